"""The tree of errors in the documentation is the tree of classes."""

from __future__ import annotations

import inspect
import re

from polyfed import errors
from polyfed.errors import PolyfedError

LINE = re.compile(r"^(?P<indent>[│ ]*)(?:[├└]── )?(?P<name>\w+) *(?:\((?P<builtin>\w+)\))?", re.MULTILINE)


def drawn() -> dict[str, tuple[str, str | None]]:
    """Each error of the drawing, with its parent and the built-in error it also is."""
    tree = next(part for part in inspect.cleandoc(errors.__doc__ or "").split("\n\n") if part.startswith("PolyfedError"))
    found: dict[str, tuple[str, str | None]] = {}
    above = ["PolyfedError"]
    for match in list(LINE.finditer(tree))[1:]:
        depth = len(match["indent"]) // 4 + 1
        found[match["name"]] = (above[depth - 1], match["builtin"])
        above[depth:] = [match["name"]]
    return found


def test_the_tree_of_errors_is_complete_and_true() -> None:
    classes = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, PolyfedError) and value is not PolyfedError
    }
    tree = drawn()
    assert sorted(tree) == sorted(classes)
    for name, (parent, builtin) in tree.items():
        bases = [base.__name__ for base in classes[name].__bases__]
        assert bases == [parent, *([builtin] if builtin else [])]
