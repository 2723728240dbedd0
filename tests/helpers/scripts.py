"""Scripts of the repository that are no modules of the package, loaded by their file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def loaded(file: Path) -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location(f"script_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
