"""``polyfed info``: versions, cores, devices and folders, for bug reports."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from polyfed.cli.options import Json
from polyfed.cli.output import print_json, print_table, table

EXAMPLE = "Example: polyfed info --json"
PACKAGES = ("polyfed", "torch", "torchvision", "numpy", "typer", "click", "rich", "flwr", "timm", "onnxruntime")
ABSENT = "not installed"


def info(as_json: Json = False) -> None:
    """Print versions, cores, devices and folders; put it into a bug report. Nothing is sent anywhere."""
    found = facts()
    if as_json:
        print_json(found)
        return
    shown = table(("what", "found"))
    for name, value in found.items():
        rows = value.items() if isinstance(value, dict) else [(name, value)]
        for what, each in rows:
            shown.add_row(str(what), str(each))
    print_table("", shown)


def facts() -> dict[str, Any]:
    """What a bug report needs to say of a machine."""
    import torch

    from polyfed.data.store.cache import cache_folder

    devices = ["cpu", *(f"cuda:{place} ({torch.cuda.get_device_name(place)})" for place in range(torch.cuda.device_count()))]
    devices += ["mps"] if torch.backends.mps.is_available() else []
    return {
        "versions": {name: installed(name) for name in PACKAGES},
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "devices": ", ".join(devices),
        "cache": str(cache_folder()),
        "data": os.environ.get("POLYFED_DATA", "POLYFED_DATA is not set"),
    }


def installed(package: str) -> str:
    """The version of a package, or that it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ABSENT
