"""Methods, and models, from a user's own file."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from pathlib import Path

from polyfed.core.method import methods
from polyfed.errors import OptionError, PolyfedError
from polyfed.trust import Trust, code_in


def load_file(path: str | Path, trust: Trust) -> list[str]:
    """Run a user's file of methods or models, if it is trusted; returns the names of methods it registered.

    A file without methods must define a function or class of its own, such as one that ``model = "file:function"`` names.
    """
    trust.require(code_in(load=[str(path)]))
    file = Path(path)
    if not os.path.isfile(file):
        raise OptionError(f"There is no file {path} to load methods from.")
    before = set(methods.names())
    name = f"polyfed_loaded_{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise OptionError(f"{path} is not a Python file; methods are loaded from files such as my_method.py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except PolyfedError:
        raise
    except (Exception, SystemExit) as error:
        raise OptionError(f"{path} could not be run: {type(error).__name__}: {error}.") from error
    new = sorted(
        (set(methods.names()) - before) | {known for known, record in methods.known().items() if record.build.__module__ == name}
    )
    defined = [value for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    if not new and not any(getattr(value, "__module__", None) == name for value in defined):
        raise OptionError(
            f"{path} registers no method and defines no model. Decorate a function that returns a Method with @polyfed.register, "
            f"or write a function that returns a torch module and name it: --model {file.stem}:FUNCTION"
        )
    return new
