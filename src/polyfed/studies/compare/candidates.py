"""Read the candidates of a comparison or a search: methods with optional per-method settings.

``fedavg; fedwon with lr=0.2, schedule=cosine`` are two candidates. In Python, the second is ``("fedwon", {"lr": 0.2, "schedule": "cosine"})``
or an item of a mapping; in a recipe, a line of the ``[methods]`` table. The task and the training length are the same for all candidates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyfed.core.method import Method, load_file, parse
from polyfed.errors import PolyfedError, SettingError
from polyfed.settings import FACTS, Settings, read_change, require_names, with_changes, with_tuples
from polyfed.text import outside_brackets, split_outside_brackets
from polyfed.trust import NOTHING, Trust

_WITH = re.compile(r"\bwith\b")


@dataclass(frozen=True)
class Candidate:
    """A method expression with per-method settings, and the method itself if the expression does not define it."""

    text: str
    own: Mapping[str, Any] = field(default_factory=dict)
    value: Method | None = None

    @property
    def label(self) -> str:
        """Expression with the per-method settings: ``fedwon with lr=0.2``."""
        return self.text + (f" with {format_settings(self.own)}" if self.own else "")

    @property
    def method(self) -> Method:
        return parse(self.text) if self.value is None else self.value

    def settings(self, common: Settings) -> Settings:
        return with_changes(common, {**self.own, "method": self.text})


def format_settings(own: Mapping[str, Any]) -> str:
    """Format settings so that they can be parsed again.

    >>> format_settings({"lr": 0.2, "schedule": "steps(at=(0.5, 0.75))"})
    'lr=0.2, schedule=steps(at=(0.5, 0.75))'
    """
    return ", ".join(f"{name}={value!r}" if isinstance(value, float) else f"{name}={value}" for name, value in own.items())


def candidates(methods: Any, load: Sequence[str] = (), trust: Trust = NOTHING) -> dict[str, Candidate]:
    """Load the trusted method files, and return the candidates by label, without duplicates.

    ``methods`` are method expressions, possibly several in one string, separated by semicolons; Method values; pairs of either and settings;
    or a mapping from expressions to settings.
    """
    for file in load:
        load_file(file, trust)
    found: dict[str, Candidate] = {}
    for one in _each(methods):
        if found.setdefault(one.label, one).value != one.value:
            raise SettingError(f"Two different methods are named {one.text!r}. Rename one of them.")
    if not found:
        raise SettingError('No methods. Separate them with semicolons, such as "fedavg; fedbn".')
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
                raise SettingError(f"Per-method settings apply to one method; got {len(texts)} in {given!r}.")
            yield from (read_candidate(text, own) for text in texts)
        else:
            raise SettingError(
                f"methods must hold method expressions, Method values, or pairs of either and settings; got {given!r}."
            )


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)


def read_one(text: str) -> Method:
    """Parse one method; suggest semicolons if there are several."""
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
        raise SettingError(f"{text!r} has no setting after 'with'. Write, for example: {method.strip()} with lr=0.1")
    pairs = [read_change(piece, 'A setting after "with"') for piece in pieces]
    names = [name for name, _ in [*pairs, *(own or {}).items()]]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SettingError(f"{text!r} sets {twice} twice. Keep one of them.")
    return Candidate(str(read_one(method)), checked({**dict(pairs), **(own or {})}))


def checked(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return per-method settings, or raise SettingError if one of them must be the same for all methods."""
    require_names(own)
    for name in own:
        if why := common_to_all(name):
            raise SettingError(f"{name} cannot be set per method: {why}. Set it once, for all methods.")
    return with_tuples(own)


def common_to_all(name: str) -> str:
    """Return the reason why a setting must be the same for all methods, or "" if it may differ."""
    if FACTS[name].role == "budget":
        return "all runs have the same length"
    return "" if FACTS[name].role == "training" else "only training settings can differ"


def is_registered(method: Method) -> bool:
    """Return True if the method's expression parses to this method."""
    try:
        return parse(str(method)) == method
    except PolyfedError:
        return False
