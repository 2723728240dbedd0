"""Recipes: the settings of one experiment in a TOML file, shipped with polyfed or written by users.

A recipe opens with a comment holding the command that runs it. At its top level it may say ``title``, ``paper``, ``table``, ``note``
and ``expects`` (published numbers); the table ``[settings]`` holds fields of ``Settings``. The table ``[methods]`` holds what
``polyfed compare`` and ``polyfed sweep`` compare: methods by their texts, each with settings of its own (``fedbn = {}``,
``fedwon = { lr = 0.2 }``). The ``run.toml`` of a run can be read too. Shipped recipes that are nearly equal are one file (``grids.py``).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyfed.core.method import read_recorded
from polyfed.errors import SettingError, nearest, same_name
from polyfed.runs.folder.account_key import is_sealed
from polyfed.settings import Settings, setting_names, with_tuples
from polyfed.studies.compare.candidates import checked
from polyfed.studies.compare.recipes.grids import SUFFIX, shipped_texts
from polyfed.trust import NOTHING, Trust, code_in

SENTENCES = ("title", "paper", "table", "note")
NUMBERS = "expects"
SETTINGS = "settings"
METHODS = "methods"
BUDGETS = ("rounds", "total_epochs")
BOTH_BUDGETS = "rounds and total_epochs both set the length of the run; keep one of them."


@dataclass(frozen=True)
class Problem:
    """What is wrong with a recipe, and in which line, where that is known."""

    sentence: str
    line: int | None = None

    def __str__(self) -> str:
        return self.sentence if self.line is None else f"line {self.line}: {self.sentence}"


@dataclass(frozen=True)
class Recipe:
    """A recipe that was read.

    Attributes:
        name: what it is called: the name of a shipped recipe, or the file.
        text: its TOML.
        about: its sentences and published numbers.
        values: its settings, lists as tuples.
        methods: what it compares: settings of their own by the texts of methods.
    """

    name: str
    text: str
    about: Mapping[str, Any]
    values: Mapping[str, Any]
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What it is, in a few words."""
        return str(self.about.get("title", self.name))


def shipped_names() -> list[str]:
    """The names of the recipes inside the package."""
    return sorted(shipped_texts())


@dataclass(frozen=True)
class Found:
    """A recipe as it was found: the bytes of a file, or those that are shipped under a name."""

    place: str
    content: bytes
    shipped: bool


def find(text: str) -> Found:
    """A recipe: a file that exists, or what is shipped under this name."""
    path = Path(text)
    if path.is_file():
        try:
            return Found(str(path), path.read_bytes(), shipped=False)
        except OSError as error:
            raise SettingError(f"{text}: It cannot be read: {error}.") from error
    shipped = same_name(text, shipped_names())
    if shipped is not None:
        return Found(shipped, shipped_texts()[shipped].encode(), shipped=True)
    if path.suffix == SUFFIX:
        raise SettingError(f"There is no file {text}. Recipes of polyfed's own are named without {SUFFIX} (polyfed ls recipes).")
    raise SettingError(f"There is no file {text} and no recipe of that name. {nearest(text.lower(), shipped_names())}")


def read(text: str) -> Recipe:
    """Read a recipe; what is wrong with its form is said all at once."""
    content = find(text).content
    document, problems = parsed(content)
    if problems := problems or form_problems(content.decode(), document):
        raise SettingError(f"{text}: {' '.join(map(str, problems))}")
    about = {key: value for key, value in document.items() if key in (*SENTENCES, NUMBERS)}
    values = with_tuples(document[SETTINGS])
    if "made_with" in document and isinstance(values.get("method"), str):
        values["method"] = read_recorded(values["method"])
    return Recipe(text, content.decode(), about, values, methods_in(document))


def trust_of(text: str, values: Mapping[str, Any], trust: bool = False) -> Trust:
    """Trust the code that a recipe names if it is shipped, the ``run.toml`` of a run of this account, or one the user trusts.

    A file that the user wrote by hand looks like one that came from somebody else, so it needs to be trusted, or its code named again.
    """
    found = find(text)
    load, model = values.get("load"), values.get("model")
    files = [item for item in load if isinstance(item, str)] if isinstance(load, list | tuple) else []
    code = code_in(files, model if isinstance(model, str) else None)
    if trust or (code and (found.shipped or is_sealed(found.content))):
        return NOTHING.adding(code)
    return NOTHING.refusing(code, found.place)


def parsed(content: bytes) -> tuple[dict[str, Any], list[Problem]]:
    """The document in a recipe, or what keeps it from being read."""
    try:
        return tomllib.loads(content.decode("utf-8")), []
    except tomllib.TOMLDecodeError as error:
        found = re.search(r" \(at line (\d+), column \d+\)", str(error))
        sentence = str(error) if found is None else str(error).replace(found.group(), "")
        return {}, [Problem(f"This is not TOML: {sentence}.", int(found.group(1)) if found else None)]
    except RecursionError:
        return {}, [Problem("It cannot be read: its values are nested too deep.")]
    except ValueError as error:
        return {}, [Problem(f"It cannot be read: {error}.")]


def form_problems(text: str, document: Mapping[str, Any]) -> list[Problem]:
    """Everything wrong with the keys and values of a document that could be read, except for what texts mean."""
    if not document:
        return [Problem("It is empty; write settings in a table [settings].")]
    of_a_run = "made_with" in document
    problems = [] if of_a_run else [Problem(sentence, line_of(text, key)) for key, sentence in _about_problems(document)]
    values = document.get(SETTINGS)
    if not isinstance(values, Mapping):
        return [*problems, Problem("It has no table [settings]; write settings there, such as rounds = 20.")]
    problems += [Problem(sentence, line_of(text, key)) for key, sentence in _setting_problems(values)]
    problems += [Problem(sentence, line_of(text, key)) for key, sentence in method_problems(document)]
    if all(values.get(name) is not None for name in BUDGETS):
        problems.append(Problem(BOTH_BUDGETS, line_of(text, "total_epochs")))
    return problems


def _about_problems(document: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for key, value in document.items():
        if key in SENTENCES and not isinstance(value, str):
            yield key, f"{key} takes text, found {value!r}."
        elif key == NUMBERS and not (isinstance(value, Mapping) and all(_is_number(number) for number in value.values())):
            yield key, f"{key} takes a table of published numbers, such as mean = 86.5."
        elif key in setting_names():
            yield key, f"{key} is a setting; write it below [settings]."
        elif key not in (*SENTENCES, NUMBERS, SETTINGS, METHODS):
            yield key, f"There is no entry {key!r}. {nearest(key, (*SENTENCES, NUMBERS, SETTINGS, METHODS))}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _setting_problems(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Problems of each setting on its own; no value of one depends on that of another."""
    for name in values:
        if name not in setting_names():
            yield name, f"There is no setting {name!r}. {nearest(name, setting_names())}"
    for name, sentence in usable(values)[1]:
        yield name, sentence


def methods_in(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The methods that a recipe compares, each with the settings of its own; the ``run.toml`` of a run compares none."""
    return {} if "made_with" in document else {text: with_tuples(own) for text, own in document.get(METHODS, {}).items()}


def method_problems(document: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Problems of the settings that methods have for themselves; what the texts mean is looked at later."""
    methods = {} if "made_with" in document else document.get(METHODS, {})
    if not isinstance(methods, Mapping):
        yield (
            METHODS,
            f'{METHODS} takes a table of methods, each with settings of its own: "fedavg" = {{}}, "fedwon" = {{ lr = 0.2 }}.',
        )
        return
    for text, own in methods.items():
        if not isinstance(own, Mapping):
            yield text, f"{text} takes a table of settings of its own, such as {{ lr = 0.2 }}, or {{}}; found {own!r}."
            continue
        try:
            checked(own)
        except SettingError as error:
            yield text, f"{text}: {error}"
            continue
        for _, sentence in usable(own)[1]:
            yield text, f"{text}: {sentence}"


def usable(values: Mapping[str, Any]) -> tuple[Settings, list[tuple[str, str]]]:
    """Settings of those values that can be used, and what is wrong with the others."""
    known = {name: value for name, value in with_tuples(values).items() if name in setting_names()}
    try:
        return Settings(**known), []
    except SettingError:
        problems = []
        for name, value in list(known.items()):
            try:
                Settings(**{name: value})
            except SettingError as error:
                problems.append((name, str(error)))
                del known[name]
        return Settings(**known), problems


def line_of(text: str, key: str) -> int | None:
    """The line in which a key is set."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(rf"""\s*(\[\s*)?["']?{re.escape(key)}["']?\s*[=.\]]""", line):
            return number
    return None


def layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from several places, the later ones winning; a budget of one kind takes the place of the other kind."""
    chosen: dict[str, Any] = {}
    for layer in layers:
        budgets = [name for name in BUDGETS if layer.get(name) is not None]
        if len(budgets) > 1:
            raise SettingError(BOTH_BUDGETS)
        chosen = {name: value for name, value in chosen.items() if not budgets or name not in BUDGETS} | dict(layer)
    return chosen


def command_of(text: str) -> str:
    """The command in the first comment of a recipe's text; empty where there is none."""
    for line in text.splitlines():
        if line.startswith("#") and "polyfed run" in line:
            return line.lstrip("# ").strip()
        if line.strip() and not line.startswith("#"):
            break
    return ""
