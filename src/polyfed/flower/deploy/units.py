"""systemd units and compose files for servers and nodes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from polyfed.errors import SettingError
from polyfed.flower.deploy.processes import PROGRAMS
from polyfed.flower.deploy.templates import render

BAD_INPUT, REFUSED = 2, 3


def write_server_units(folder: Path, words: Sequence[str], server: Path, port: int) -> list[Path]:
    """Write a unit, a compose file and a Dockerfile for a server; ``words`` is the command after ``polyfed``."""
    unit = _unit("polyfed server", words, server, "on-failure", 15)
    return _write(folder, "polyfed-serve.service", unit, _compose("serve", words, server, [f"{port}:{port}"], []))


def write_node_units(folder: Path, words: Sequence[str], node: Path, data: str) -> list[Path]:
    """Write a unit, a compose file and a Dockerfile for a node; its data is mounted read-only."""
    name = f"polyfed-{node.name}"
    mounts = [f"{data}:{data}:ro"] if data.startswith("/") else []
    return _write(folder, f"{name}.service", _unit(name, words, node, "always", 10), _compose(name, words, node, [], mounts))


def _unit(what: str, words: Sequence[str], place: Path, restart: str, seconds: int) -> str:
    """Return a systemd unit, which restarts after a crash, but not after bad input or a rejection."""
    home = place.resolve().parent
    return render(
        "unit.service",
        what=what,
        command=" ".join(_systemd(word) for word in [str(PROGRAMS / "polyfed"), *words]),
        folder=home,
        writable=_systemd(str(home)),
        restart=restart,
        seconds=seconds,
        bad_input=BAD_INPUT,
        refused=REFUSED,
    )


def _systemd(word: str) -> str:
    """Quote a word so that systemd reads ``%`` and ``$`` as they are."""
    if "\n" in word:
        raise SettingError(f"A systemd unit cannot contain the line break in {word!r}.")
    plain = word.replace("%", "%%").replace("$", "$$")
    return plain if plain == shlex.quote(plain) else '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _compose(name: str, words: Sequence[str], place: Path, ports: Sequence[str], mounts: Sequence[str]) -> str:
    home = str(place.resolve().parent)
    return render(
        "compose.yaml",
        name=name,
        home=_yaml(home),
        words=[_yaml(word) for word in words],
        mounts=[_yaml(mount) for mount in (f"{home}:{home}", *mounts)],
        ports=[_yaml(port) for port in ports],
    )


def _yaml(word: str) -> str:
    """Quote a word for YAML; compose reads ``$`` as a variable."""
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$") + '"'


def _write(folder: Path, unit_name: str, unit: str, compose: str) -> list[Path]:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    files = {unit_name: unit, "compose.yaml": compose, "Dockerfile": render("Dockerfile", python=version)}
    for name in files:
        if (folder / name).exists():
            raise SettingError(
                f"{folder / name} already exists, and nothing is overwritten. Choose another folder with --write-units."
            )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return [folder / name for name in files]
