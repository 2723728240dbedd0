"""Registry of named factories, which can be listed and built from expressions."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from polyfed.errors import OptionError, TextError, UnknownName, nearest, same_name
from polyfed.text import Call, Option, read_call

T = TypeVar("T")


@dataclass(frozen=True)
class Recorded(Generic[T]):
    """A registered factory with its signature and documentation."""

    name: str
    build: Callable[..., T]
    signature: inspect.Signature
    doc: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    def bind(self, call: Call) -> dict[str, Option]:
        """Match the options of a call with the factory's parameters, including defaults."""
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
        """Return a message about options without a value, or an empty string."""
        needed = [name for name, parameter in self.signature.parameters.items() if parameter.default is inspect.Parameter.empty]
        missing = [name for name in needed[len(call.positional) :] if name not in call.named]
        if "root" in missing:
            return f"{self.name} reads files. Pass their folder with --root DIR."
        written = ", ".join(f"{name}=..." for name in missing)
        return f"{self.name} requires {', '.join(missing)}: write {self.name}({written})." if missing else ""


def _checked(name: str, parameter: inspect.Parameter, value: Any) -> Any:
    """Check a value against the plain type of its annotation; integers are converted to float if it is float."""
    annotation = getattr(parameter.annotation, "__name__", parameter.annotation)
    expected = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}.get(str(annotation))
    if expected is None:
        return value
    if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
        raise OptionError(f"{name}: option {parameter.name} must be {annotation}, got {value!r}.")
    return float(value) if annotation == "float" else value


class Registry(Generic[T]):
    """Named factories of one kind."""

    def __init__(
        self, kind: str, folder: str | None = None, entry_points: str | None = None, hyphens: bool = False, advice: str = ""
    ) -> None:
        """Create an empty registry.

        Args:
            kind: Kind of the factories, for messages.
            folder: Package whose modules register factories. It must not be in a higher layer.
            entry_points: Group of entry points through which installed packages, including polyfed, register factories.
            hyphens: Names are written with hyphens.
            advice: End of the message about an unknown name.
        """
        self.kind, self.hyphens, self.advice = kind, hyphens, advice
        self._folder, self._entry_points = folder, entry_points
        self._records: dict[str, Recorded[T]] = {}
        self._discovered = False

    def add(self, build: Callable[..., T], name: str | None = None, **extra: Any) -> Recorded[T]:
        """Register a factory. Default name: that of the function."""
        name = name or build.__name__
        known = self._records.get(name)
        if known is not None and known.build.__module__ != build.__module__:
            raise OptionError(
                f"Two {self.kind}s are called {name}: in {known.build.__module__} and in {build.__module__}. Rename one."
            )
        self._records[name] = Recorded(name, build, inspect.signature(build), inspect.getdoc(build) or "", extra)
        return self._records[name]

    def names(self) -> list[str]:
        self.discover()
        return sorted(self._records)

    def find(self, name: str) -> Recorded[T]:
        """Return the factory of a name. The error for an unknown name suggests the nearest one."""
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
        """Build from an expression. ``context`` has the values of parameters that the expression must not set."""
        call = read_call(text)
        record = self.find(call.spelled or call.name)
        set_here = sorted(set(context) & set(call.named))
        if set_here:
            raise TextError(f"{record.name}: {', '.join(set_here)} is set by the run. Remove it from the expression.")
        given = {key: value for key, value in context.items() if key in record.signature.parameters}
        free = [key for key in record.signature.parameters if key not in given]
        if len(call.positional) > len(free):
            raise OptionError(f"{record.name} accepts {len(free)} options ({', '.join(free)}), got {len(call.positional)}.")
        written = dict(zip(free, call.positional, strict=False))
        twice = sorted(set(written) & set(call.named))
        if twice:
            raise OptionError(f"{record.name}: {twice[0]} is given twice, by position and by name. Remove one.")
        return record.build(**record.bind(Call(call.name, (), {**written, **call.named, **given})))

    def options_in(self, text: str, set_by_run: Collection[str] = ()) -> dict[str, Option]:
        """Return the options in an expression by name; empty if it does not name a registered factory.

        ``set_by_run`` are parameters that an expression cannot set.
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
        """Import the modules that register factories, once."""
        if self._discovered:
            return
        self._discovered = True
        if self._folder is not None:
            import_all(self._folder)
        if self._entry_points is not None:
            for point in importlib.metadata.entry_points(group=self._entry_points):
                point.load()


def import_all(folder: str) -> None:
    """Import a package with all of its modules, or a plain module."""
    home = importlib.import_module(folder)
    for module in sorted(found.name for found in pkgutil.iter_modules(getattr(home, "__path__", ()))):
        importlib.import_module(f"{folder}.{module}")
