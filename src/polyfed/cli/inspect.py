"""``polyfed inspect``, ``digest`` and ``info``: contents of a run folder, and the environment."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from polyfed.cli.options import command, shared
from polyfed.cli.output import console, print_json, warn
from polyfed.cli.tables import print_pairs, print_table
from polyfed.studies.report.words import format_bytes


@command("inspect", "polyfed inspect runs/digits-mini-fedbn-seed0")
@shared("run", "json")
def inspect(path: str, as_json: bool) -> None:
    """Show what a run folder contains and which code it refers to, without running that code."""
    from polyfed.runs.folder.inspection import inspect_run

    found = inspect_run(path)
    if as_json:
        print_json(found)
        return
    names = ("run", "written by", "method", "data", "given in Python", "checkpoint", "metrics")
    rows = [(name, found[name.replace(" ", "_").lower()]) for name in names]
    rows += [("code", text) for text in found["code"] or ["none"]] + [("problem", text) for text in found["problems"]]
    print_table("run folder", ("name", "value"), [(name, _escape(value)) for name, value in rows])
    console().print()
    print_table("settings", ("setting", "value"), [(_escape(name), _escape(value)) for name, value in found["settings"].items()])
    console().print()
    files = [(_escape(name), format_bytes(size)) for name, size in found["files"].items()]
    print_table("files", ("file", "size"), files, numbers=("size",))


def _escape(value: object) -> str:
    """Escape control characters and line breaks in text from an untrusted file."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in str(value))


@command("digest", "polyfed digest runs/digits-mini-fedbn-seed0")
@shared("run", "json")
def digest(path: str, as_json: bool) -> None:
    """Print a hash of the final state of the server and all clients. Identical runs have identical hashes."""
    from polyfed.runs.folder.checkpoint import digest as digest_of
    from polyfed.runs.reopen import read_snapshot

    snapshot = read_snapshot(path, warn)
    found = digest_of(snapshot)
    if as_json:
        print_json({"digest": found, "round": snapshot.round, "finished": bool(snapshot.notes.get("finished")), "run": path})
    else:
        print(found)


PACKAGES = ("polyfed", "torch", "torchvision", "numpy", "click", "rich", "flwr", "timm", "onnxruntime")


@command("info", "polyfed info --json")
@shared("json")
def info(as_json: bool) -> None:
    """Print versions, cores, devices and folders, for bug reports. Sends nothing."""
    found = _collect()
    if as_json:
        print_json(found)
    else:
        print_pairs("", found.pop("versions") | found)


def _collect() -> dict[str, Any]:
    import torch

    from polyfed.data.store.cache import cache_folder

    devices = ["cpu", *(f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(torch.cuda.device_count()))]
    devices += ["mps"] if torch.backends.mps.is_available() else []
    return {
        "versions": {name: installed_version(name) for name in PACKAGES},
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "devices": ", ".join(devices),
        "cache": str(cache_folder()),
        "data": os.environ.get("POLYFED_DATA", "POLYFED_DATA is not set"),
    }


def installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
