"""Candidates of a comparison or a search: methods, each with settings of its own where it has some.

``fedavg; fedwon with lr=0.2, schedule=cosine`` are two candidates. In Python, the second is ``("fedwon", {"lr": 0.2, "schedule": "cosine"})``
or an item of a mapping; in a recipe, a line of the table ``[methods]``. What is learnt and how long is the same for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from polyfed.core.method import Method, load_file, parse
from polyfed.errors import PolyfedError, SettingError
from polyfed.settings import FACTS, Settings, read_change, require_names, with_changes, with_tuples
from polyfed.text import outside_brackets, split_outside_brackets
from polyfed.trust import NOTHING, Trust

_Given: TypeAlias = "str | Method | tuple[str | Method, Mapping[str, Any]]"
Methods: TypeAlias = "_Given | Sequence[_Given] | Mapping[str, Mapping[str, Any]]"

_WITH = re.compile(r"\bwith\b")


@dataclass(frozen=True)
class Candidate:
    """One method of a comparison.

    Attributes:
        text: of the method.
        own: settings of its own, which take the place of those of the comparison.
        value: the method itself, where its text does not say it all.
    """

    text: str
    own: Mapping[str, Any] = field(default_factory=dict)
    value: Method | None = None

    @property
    def label(self) -> str:
        """Its text, with the settings of its own: ``fedwon with lr=0.2``."""
        return self.text + (f" with {own_words(self.own)}" if self.own else "")

    @property
    def method(self) -> Method:
        return parse(self.text) if self.value is None else self.value

    def settings(self, common: Settings) -> Settings:
        return with_changes(common, {**self.own, "method": self.text})


def own_words(own: Mapping[str, Any]) -> str:
    """Settings in words, as they are read again.

    >>> own_words({"lr": 0.2, "schedule": "steps(at=(0.5, 0.75))"})
    'lr=0.2, schedule=steps(at=(0.5, 0.75))'
    """
    return ", ".join(f"{name}={value!r}" if isinstance(value, float) else f"{name}={value}" for name, value in own.items())


def candidates(methods: Any, load: Sequence[str] = (), trust: Trust = NOTHING) -> dict[str, Candidate]:
    """Candidates by their labels, each once. What cannot be read raises an error before anything is trained.

    Args:
        methods: texts, also several in one text apart by semicolons; Method values; pairs of one of them and settings; or a mapping from
            texts to settings.
        load: files of methods to run before.
        trust: what of them may be run.
    """
    for file in load:
        load_file(file, trust)
    found: dict[str, Candidate] = {}
    for one in _each(methods):
        if found.setdefault(one.label, one).value != one.value:
            raise SettingError(f"Two different methods are called {one.text!r}; give one of them another name.")
    if not found:
        raise SettingError('methods names no method. Write them apart by semicolons: "fedavg; fedbn".')
    return found


def _each(methods: Any) -> Iterable[Candidate]:
    if isinstance(methods, Mapping):
        methods = list(methods.items())
    elif isinstance(methods, str | Method) or _is_pair(methods):
        methods = [methods]
    for one in methods:
        given, own = one if _is_pair(one) else (one, {})
        if isinstance(given, Method):
            yield Candidate(str(given), checked(own), None if is_registered(given) else given)
        elif isinstance(given, str):
            texts = split_outside_brackets(given, ";")
            if own and len(texts) != 1:
                raise SettingError(f"Settings of its own are for one method, found {len(texts)} in {given!r}.")
            yield from (read_candidate(text, own) for text in texts)
        else:
            raise SettingError(f"methods takes texts, Method values, or pairs of one of them and settings, found {given!r}.")


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)


def read_one(text: str) -> Method:
    """A method from its text; several that are not apart by semicolons are told so."""
    if re.search(r"\w\s*,|\w\s+\w", outside_brackets(text).strip()):
        raise SettingError(f'Cannot read {text.strip()!r} as one method. Separate methods with ; such as "fedavg; fedbn".')
    return parse(text)


def read_candidate(text: str, own: Mapping[str, Any] | None = None) -> Candidate:
    """Read ``fedwon with lr=0.2, schedule=cosine``.

    >>> read_candidate("fedwon with lr=0.2").own
    {'lr': 0.2}
    """
    method, *written = _WITH.split(text, 1)
    pieces = split_outside_brackets(written[0]) if written else []
    if written and not pieces:
        raise SettingError(f"{text!r} says no setting after 'with'. Write, for example: {method.strip()} with lr=0.1")
    pairs = [read_change(piece, 'A setting after "with"') for piece in pieces]
    names = [name for name, _ in [*pairs, *(own or {}).items()]]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SettingError(f"{text!r} sets {twice} twice; keep one of them.")
    return Candidate(str(read_one(method)), checked({**dict(pairs), **(own or {})}))


def checked(own: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that a method of a comparison may have for itself; others are the same for all."""
    require_names(own)
    for name in own:
        if why := common_to_all(name):
            raise SettingError(f"{name} cannot be a method's own: {why}. Give it once, for all methods.")
    return with_tuples(own)


def common_to_all(name: str) -> str:
    """Why a setting is the same for all methods; empty where a method may have its own."""
    if FACTS[name].role == "budget":
        return "the length of a run is the same for all"
    return "" if FACTS[name].role == "training" else "it is no setting of training"


def is_registered(method: Method) -> bool:
    """Whether the text of a method stands for this very method."""
    try:
        return parse(str(method)) == method
    except PolyfedError:
        return False
