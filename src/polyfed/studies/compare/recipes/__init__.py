"""Recipes: the settings of one experiment in a TOML file, shipped with polyfed or written by users.

A recipe opens with a comment holding the command that runs it. At its top level it may say ``title``, ``paper``, ``table``, ``note``
and ``expects`` (published numbers); the table ``[settings]`` holds fields of ``Settings``. The table ``[methods]`` holds what
``polyfed compare`` and ``polyfed sweep`` compare: methods by their texts, each with settings of its own (``fedbn = {}``,
``fedwon = { lr = 0.2 }``). The ``run.toml`` of a run can be read too.

Shipped recipes that are nearly equal are one file, a grid. ``names`` says how its recipes are called, and ``[grid.AXIS]`` holds what they
differ in: settings, and words for the places in braces of ``names``, ``title`` and ``note``. The key of a value is the word for its axis.
Every combination of the axes is a recipe.

    names = "pacs/30-rounds-{target}-{method}"
    title = "{label} on PACS without {target}, 30 rounds"

    [grid.target]
    photo = { unseen = ["photo"] }

    [grid.method]
    fedavg = { label = "FedAvg", method = "fedavg" }
"""

from __future__ import annotations

import functools
import itertools
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyfed.core.method import read_recorded
from polyfed.errors import SettingError, nearest, same_name
from polyfed.runs.folder.account_key import is_sealed
from polyfed.settings import Settings, setting_names, with_tuples
from polyfed.studies.compare.candidates import checked
from polyfed.trust import NOTHING, Trust, code_in

SHIPPED = Path(__file__).parent / "shipped"
SUFFIX = ".toml"
_SENTENCES = ("title", "paper", "table", "note")
_NUMBERS = "expects"
_SETTINGS = "settings"
_METHODS = "methods"
_GRID = "grid"
_BUDGETS = ("rounds", "total_epochs")
_BOTH_BUDGETS = "rounds and total_epochs both set the length of the run; keep one of them."


@dataclass(frozen=True)
class Recipe:
    """A recipe that was read.

    Attributes:
        name: what it is called: the name of a shipped recipe, or the file.
        command: the command in its first comment; empty where there is none.
        about: its sentences and published numbers.
        values: its settings, lists as tuples.
        methods: what it compares: settings of their own by the texts of methods.
    """

    name: str
    command: str
    about: Mapping[str, Any]
    values: Mapping[str, Any]
    methods: Mapping[str, Mapping[str, Any]]

    @property
    def title(self) -> str:
        return str(self.about.get("title", self.name))


def shipped_names() -> list[str]:
    return sorted(_shipped())


@functools.cache
def _shipped() -> Mapping[str, Recipe]:
    found: dict[str, Recipe] = {}
    for file in sorted(SHIPPED.rglob(f"*{SUFFIX}")):
        text = file.read_text(encoding="utf-8")
        document = tomllib.loads(text)
        if _GRID in document:
            found |= {
                name: _recipe(name, f"polyfed run --recipe {name} --root DATA", one) for name, one in in_grid(document).items()
            }
        else:
            name = file.relative_to(SHIPPED).with_suffix("").as_posix()
            found[name] = _recipe(name, _command_in(text), document)
    return found


def in_grid(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    axes = document[_GRID]
    found = {}
    for chosen in itertools.product(*(axis.items() for axis in axes.values())):
        values = {name: value for _, own in chosen for name, value in own.items()}
        words = {axis: key for axis, (key, _) in zip(axes, chosen, strict=True)}
        words |= {name: str(value) for name, value in values.items() if name not in setting_names()}
        settings = document[_SETTINGS] | {key: value for key, value in values.items() if key in setting_names()}
        sentences = {key: _filled(words.get(key, document[key]), words) for key in ("title", "note")}
        found[_filled(document["names"], words)] = {**sentences, _SETTINGS: settings}
    return found


def _filled(text: str, words: Mapping[str, str]) -> str:
    """Put words in the places of their names; a place that has no word stays empty.

    >>> _filled("{label} on PACS. {more}", {"label": "FedAvg"})
    'FedAvg on PACS.'
    """
    return re.sub(r"\{(\w+)\}", lambda found: words.get(found[1], ""), text).strip()


def read(text: str) -> Recipe:
    """Read a recipe: a file that exists, or what is shipped under this name. All that is wrong with its form is said at once."""
    if not Path(text).is_file():
        return _shipped()[_shipped_name(text)]
    content = _content(text)
    document, problems = _parsed(content)
    if problems := problems or _form_problems(content.decode(), document):
        raise SettingError(f"{text}: {' '.join(problems)}")
    return _recipe(text, _command_in(content.decode()), document)


def _recipe(name: str, command: str, document: Mapping[str, Any]) -> Recipe:
    about = {key: value for key, value in document.items() if key in (*_SENTENCES, _NUMBERS)}
    values = with_tuples(document[_SETTINGS])
    if "made_with" in document and isinstance(values.get("method"), str):
        values["method"] = read_recorded(values["method"])
    methods = {text: with_tuples(own) for text, own in _methods_in(document).items()}
    return Recipe(name, command, about, values, methods)


def _content(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise SettingError(f"{file}: It cannot be read: {error}.") from error


def _shipped_name(text: str) -> str:
    found = same_name(text, shipped_names())
    if found is not None:
        return found
    if Path(text).suffix == SUFFIX:
        raise SettingError(f"There is no file {text}. Recipes of polyfed's own are named without {SUFFIX} (polyfed ls recipes).")
    raise SettingError(f"There is no file {text} and no recipe of that name. {nearest(text.lower(), shipped_names())}")


def _command_in(text: str) -> str:
    """The command in the first comment of a recipe's text; empty where there is none."""
    for line in text.splitlines():
        if line.startswith("#") and "polyfed run" in line:
            return line.lstrip("# ").strip()
        if line.strip() and not line.startswith("#"):
            break
    return ""


def trust_of(text: str, values: Mapping[str, Any], trust: bool = False) -> Trust:
    """Trust the code that a recipe names if it is shipped, the ``run.toml`` of a run of this account, or one the user trusts.

    A file that the user wrote by hand looks like one that came from somebody else, so it needs to be trusted, or its code named again.
    """
    load, model = values.get("load"), values.get("model")
    files = [item for item in load if isinstance(item, str)] if isinstance(load, list | tuple) else []
    code = code_in(files, model if isinstance(model, str) else None)
    if trust or (code and (not Path(text).is_file() or is_sealed(_content(text)))):
        return NOTHING.adding(code)
    return NOTHING.refusing(code, str(Path(text)) if Path(text).is_file() else _shipped_name(text))


def _parsed(content: bytes) -> tuple[dict[str, Any], list[str]]:
    """The document in a recipe, or what keeps it from being read."""
    try:
        return tomllib.loads(content.decode("utf-8")), []
    except tomllib.TOMLDecodeError as error:
        found = re.search(r" \(at line (\d+), column \d+\)", str(error))
        sentence = str(error) if found is None else str(error).replace(found.group(), "")
        line = "" if found is None else f"line {found.group(1)}: "
        return {}, [f"{line}This is not TOML: {sentence}."]
    except RecursionError:
        return {}, ["It cannot be read: its values are nested too deep."]
    except ValueError as error:
        return {}, [f"It cannot be read: {error}."]


def _form_problems(text: str, document: Mapping[str, Any]) -> list[str]:
    """Everything wrong with the keys and values of a document that could be read, except for what texts mean."""
    if not document:
        return ["It is empty; write settings in a table [settings]."]
    problems = [] if "made_with" in document else list(_about_problems(document))
    values = document.get(_SETTINGS)
    if isinstance(values, Mapping):
        problems += [*_setting_problems(values), *_method_problems(_methods_in(document))]
        if all(values.get(name) is not None for name in _BUDGETS):
            problems.append(("total_epochs", _BOTH_BUDGETS))
    found = [sentence if (line := _line_of(text, key)) is None else f"line {line}: {sentence}" for key, sentence in problems]
    return (
        found if isinstance(values, Mapping) else [*found, "It has no table [settings]; write settings there, such as rounds = 20."]
    )


def _about_problems(document: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    known = (*_SENTENCES, _NUMBERS, _SETTINGS, _METHODS)
    for key, value in document.items():
        if key in _SENTENCES and not isinstance(value, str):
            yield key, f"{key} takes text, found {value!r}."
        elif key == _NUMBERS and not (isinstance(value, Mapping) and all(_is_number(number) for number in value.values())):
            yield key, f"{key} takes a table of published numbers, such as mean = 86.5."
        elif key in setting_names():
            yield key, f"{key} is a setting; write it below [settings]."
        elif key not in known:
            yield key, f"There is no entry {key!r}. {nearest(key, known)}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _setting_problems(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Problems of each setting by itself; no value of one depends on that of another."""
    for name in values:
        if name not in setting_names():
            yield name, f"There is no setting {name!r}. {nearest(name, setting_names())}"
    for name, value in with_tuples(values).items():
        if name in setting_names():
            try:
                Settings(**{name: value})
            except SettingError as error:
                yield name, str(error)


def _methods_in(document: Mapping[str, Any]) -> Any:
    """The table of methods; the ``run.toml`` of a run compares none."""
    return {} if "made_with" in document else document.get(_METHODS, {})


def _method_problems(methods: Any) -> Iterable[tuple[str, str]]:
    """Problems of the settings that methods have for themselves; what the texts mean is looked at later."""
    if not isinstance(methods, Mapping):
        yield (
            _METHODS,
            f'{_METHODS} takes a table of methods, each with settings of its own: "fedavg" = {{}}, "fedwon" = {{ lr = 0.2 }}.',
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
        for _, sentence in _setting_problems(own):
            yield text, f"{text}: {sentence}"


def _line_of(text: str, key: str) -> int | None:
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(rf"""\s*(\[\s*)?["']?{re.escape(key)}["']?\s*[=.\]]""", line):
            return number
    return None


def layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from several places, the later ones winning; a budget of one kind takes the place of the other kind."""
    chosen: dict[str, Any] = {}
    for layer in layers:
        budgets = [name for name in _BUDGETS if layer.get(name) is not None]
        if len(budgets) > 1:
            raise SettingError(_BOTH_BUDGETS)
        chosen = {name: value for name, value in chosen.items() if not budgets or name not in _BUDGETS} | dict(layer)
    return chosen
