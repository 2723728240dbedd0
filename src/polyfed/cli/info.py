"""``polyfed info``: the environment, for bug reports."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from polyfed.cli.options import command, shared
from polyfed.cli.output import print_json
from polyfed.cli.tables import print_pairs

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
        "versions": {name: _version(name) for name in PACKAGES},
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "devices": ", ".join(devices),
        "cache": str(cache_folder()),
        "data": os.environ.get("POLYFED_DATA", "POLYFED_DATA is not set"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
