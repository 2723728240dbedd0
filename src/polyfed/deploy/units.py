"""systemd units and compose files for servers and nodes; they start the same commands that a person would."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from polyfed.deploy.processes import PROGRAMS
from polyfed.errors import SettingError

BAD_INPUT, REFUSED = 2, 3
IMAGE = "polyfed"


def write_server_units(folder: Path, words: Sequence[str], server: Path, port: int) -> list[Path]:
    """A unit and a compose file for a server.

    Args:
        folder: where the files go.
        words: the command after ``polyfed``.
        server: folder of the server.
        port: that nodes reach.
    """
    unit = unit_text("polyfed server", words, server, "on-failure", "15")
    return written(folder, "polyfed-serve.service", unit, compose_text("serve", words, server, [f"{port}:{port}"], []))


def write_node_units(folder: Path, words: Sequence[str], node: Path, data: str) -> list[Path]:
    """A unit and a compose file for a node."""
    name = f"polyfed-{node.name}"
    mounts = [f"{data}:{data}:ro"] if data.startswith("/") else []
    return written(
        folder, f"{name}.service", unit_text(name, words, node, "always", "10"), compose_text(name, words, node, [], mounts)
    )


def unit_text(what: str, words: Sequence[str], place: Path, restart: str, seconds: str) -> str:
    """A systemd unit. Bad input and a refusal are not tried again; a crash is."""
    command = " ".join(quoted(word) for word in [str(PROGRAMS / "polyfed"), *words])
    return UNIT.format(
        what=what,
        command=command,
        folder=place.resolve().parent,
        writable=quoted(str(place.resolve().parent)),
        restart=restart,
        seconds=seconds,
        not_again=f"{BAD_INPUT} {REFUSED}",
    )


def quoted(word: str) -> str:
    """A word as systemd reads it: ``%`` and ``$`` stand for themselves."""
    if "\n" in word:
        raise SettingError(f"A unit cannot have a line break in {word!r}.")
    plain = word.replace("%", "%%").replace("$", "$$")
    return plain if plain == shlex.quote(plain) else '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'


def compose_text(name: str, words: Sequence[str], place: Path, ports: Sequence[str], mounts: Sequence[str]) -> str:
    """A compose file; the image is built from the Dockerfile beside it."""
    home = place.resolve().parent
    lines = ["services:", f"  {name}:", f"    image: {IMAGE}", "    build: .", "    init: true", "    restart: on-failure"]
    lines += ["    read_only: true", "    tmpfs: [/tmp]", '    cap_drop: ["ALL"]', "    security_opt: [no-new-privileges:true]"]
    lines += ['    user: "${UID:-1000}:${GID:-1000}"', f"    working_dir: {yaml(str(home))}"]
    lines += [f"    command: [{', '.join(yaml(word) for word in words)}]", "    volumes:"]
    lines += [f"      - {yaml(f'{home}:{home}')}", *(f"      - {yaml(mount)}" for mount in mounts)]
    if ports:
        lines += ["    ports:", *(f"      - {yaml(port)}" for port in ports)]
    return "\n".join(lines) + "\n"


def yaml(word: str) -> str:
    """A text in YAML; compose reads ``$`` as a variable."""
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$") + '"'


def written(folder: Path, unit_name: str, unit: str, compose: str) -> list[Path]:
    """Write the files; nothing that exists is overwritten."""
    files = {unit_name: unit, "compose.yaml": compose, "Dockerfile": DOCKERFILE.format(*sys.version_info[:2])}
    for name in files:
        if (folder / name).exists():
            raise SettingError(f"{folder / name} exists, and nothing is overwritten. Name another folder with --write-units.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return [folder / name for name in files]


UNIT = """\
# Copy to /etc/systemd/system, set User=, then: systemctl enable --now NAME
[Unit]
Description={what}
After=network-online.target
Wants=network-online.target

[Service]
ExecStart={command}
WorkingDirectory={folder}
User=polyfed
Restart={restart}
RestartSec={seconds}
RestartPreventExitStatus={not_again}
SuccessExitStatus=130
KillMode=mixed
TimeoutStopSec=60
UMask=0077
NoNewPrivileges=true
ProtectSystem=strict
ReadWritePaths={writable}
PrivateTmp=true
ProtectKernelTunables=true
ProtectControlGroups=true

[Install]
WantedBy=multi-user.target
"""

DOCKERFILE = """\
# Put a wheel of polyfed (make wheel) beside this file.
FROM python:{0}.{1}-slim
RUN apt-get update && apt-get install -y --no-install-recommends nginx-light && rm -rf /var/lib/apt/lists/*
COPY polyfed-*.whl /tmp/
RUN pip install --no-cache-dir "$(ls /tmp/polyfed-*.whl)[flower]"
ENV HOME=/tmp
ENTRYPOINT ["polyfed"]
"""
