"""A registry turns a decorated function into something listable, buildable from text, and tested."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Generic, TypeVar

from polyfed.errors import OptionError, TextError, UnknownName, nearest, same_name
from polyfed.text import Call, Option, read_call

T = TypeVar("T")


@dataclass(frozen=True)
class Recorded(Generic[T]):
    """A registered factory with what its documentation says."""

    name: str
    build: Callable[..., T]
    signature: inspect.Signature
    doc: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    def bind(self, call: Call) -> dict[str, Option]:
        """Match written options with the factory's own; wrong ones name the nearest right one."""
        parameters = self.signature.parameters
        for key in call.named:
            if key not in parameters:
                raise OptionError(f"{self.name} has no option {key!r}. {nearest(key, parameters)}")
        try:
            bound = self.signature.bind(*call.positional, **call.named)
        except TypeError as error:
            raise OptionError(self.why_unbound(call) or f"{self.name}{self.signature}: {error}.") from error
        bound.apply_defaults()
        return {key: _checked(self.name, parameters[key], value) for key, value in bound.arguments.items()}

    def why_unbound(self, call: Call) -> str:
        """Which options have no value; empty where that is not what is wrong."""
        needed = [name for name, parameter in self.signature.parameters.items() if parameter.default is inspect.Parameter.empty]
        missing = [name for name in needed[len(call.positional) :] if name not in call.named]
        if "root" in missing:
            return f"{self.name} is read from files: give the folder that holds them with --root DIR."
        written = ", ".join(f"{name}=..." for name in missing)
        return f"{self.name} needs {', '.join(missing)}: write {self.name}({written})." if missing else ""


def _checked(name: str, parameter: inspect.Parameter, value: Any) -> Any:
    """Compare a written value with the plain type its annotation promises."""
    written = getattr(parameter.annotation, "__name__", parameter.annotation)
    promised = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}.get(str(written))
    if promised is None:
        return value
    wrong = not isinstance(value, promised) or (isinstance(value, bool) and bool not in promised)
    if wrong:
        raise OptionError(f"{name}: option {parameter.name} takes {written}, found {value!r}.")
    return float(value) if written == "float" else value


class Registry(Generic[T]):
    """Named factories of one kind of thing."""

    def __init__(
        self, kind: str, folder: str | None = None, entry_points: str | None = None, hyphens: bool = False, advice: str = ""
    ) -> None:
        """Begin without any.

        Args:
            kind: what they are, for messages.
            folder: the package whose modules register some; it must not lie in a higher layer.
            entry_points: the group of entry points by which installed packages register some, polyfed itself among them.
            hyphens: users write their names with hyphens.
            advice: what messages about an unknown name say in the end.
        """
        self.kind, self.hyphens, self.advice = kind, hyphens, advice
        self._folder, self._entry_points = folder, entry_points
        self._records: dict[str, Recorded[T]] = {}
        self._discovered = False

    def add(self, build: Callable[..., T], name: str | None = None, **extra: Any) -> Recorded[T]:
        """Record a factory under its own name."""
        name = name or build.__name__
        known = self._records.get(name)
        if known is not None and known.build.__module__ != build.__module__:
            raise OptionError(f"Two {self.kind}s are called {name}: in {known.build.__module__} and in {build.__module__}.")
        record = Recorded(name, build, inspect.signature(build), inspect.getdoc(build) or "", extra)
        self._records[name] = record
        return record

    def names(self) -> list[str]:
        self.discover()
        return sorted(self._records)

    def find(self, name: str) -> Recorded[T]:
        """Look a name up; a wrong one names the nearest right one."""
        self.discover()
        key = same_name(name, self._records)
        if key is None:
            known = {each: each.replace("_", "-") if self.hyphens else each for each in self._records}
            raise UnknownName(f"There is no {self.kind} called {name!r}. {nearest(name.lower(), known.values())}{self.advice}")
        return self._records[key]

    def __contains__(self, name: str) -> bool:
        self.discover()
        return same_name(name, self._records) is not None

    def build(self, text: str, **context: Any) -> T:
        """Build from text. ``context`` fills parameters the text must not set (those it names)."""
        call = read_call(text)
        record = self.find(call.spelled or call.name)
        set_here = sorted(set(context) & set(call.named))
        if set_here:
            raise TextError(f"{record.name}: {', '.join(set_here)} is set by the run, not in the text.")
        given = {key: value for key, value in context.items() if key in record.signature.parameters}
        free = [key for key in record.signature.parameters if key not in given]
        if len(call.positional) > len(free):
            raise OptionError(f"{record.name} takes {len(free)} options ({', '.join(free)}), found {len(call.positional)}.")
        written = dict(zip(free, call.positional, strict=False))
        twice = sorted(set(written) & set(call.named))
        if twice:
            raise OptionError(f"{record.name}: {twice[0]} is given twice, once by its place and once by its name.")
        return record.build(**record.bind(Call(call.name, (), {**written, **call.named, **given})))

    def options_in(self, text: str, set_by_run: Collection[str] = ()) -> dict[str, Option]:
        """The options that a text writes, by their names; none where it is not the text of something registered.

        Args:
            text: a name with options.
            set_by_run: parameters that the text cannot set.
        """
        try:
            call = read_call(text)
        except TextError:
            return {}
        if call.name not in self:
            return {}
        free = [name for name in self.find(call.name).signature.parameters if name not in set_by_run]
        return dict(zip(free, call.positional, strict=False)) | dict(call.named)

    def discover(self) -> None:
        """Import once what registers things; there is no list to maintain."""
        if self._discovered:
            return
        self._discovered = True
        if self._folder is not None:
            import_all(self._folder)
        if self._entry_points is not None:
            for point in importlib.metadata.entry_points(group=self._entry_points):
                point.load()


def import_all(folder: str) -> None:
    """Import a package, or a plain module, with every module in it."""
    for module in submodules(importlib.import_module(folder)):
        importlib.import_module(module)


def submodules(home: ModuleType) -> list[str]:
    """The full names of a package's own modules, sorted; none for a plain module."""
    paths = getattr(home, "__path__", ())
    return sorted(f"{home.__name__}.{found.name}" for found in pkgutil.iter_modules(paths))
