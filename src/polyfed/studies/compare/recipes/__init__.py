"""Read recipes: the settings of one experiment in a TOML file, shipped with polyfed or written by users.

A recipe starts with a comment that holds the command to run it. The top level may have ``title``, ``paper``, ``table``, ``note`` and
``expects`` (published numbers). The table ``[settings]`` holds fields of ``Settings``. The table ``[methods]`` maps the methods to compare
to their per-method settings (``fedbn = {}``, ``fedwon = { lr = 0.2 }``). The ``run.toml`` of a run is a valid recipe too.

Similar shipped recipes share one file with a grid. Each combination of values on the axes ``[grid.AXIS]`` is a recipe. A value holds
settings and replacements for the placeholders in ``names``, ``title`` and ``note``; its key replaces the placeholder of the axis.

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
_TEXT_KEYS = ("title", "paper", "table", "note")
_NUMBERS = "expects"
_SETTINGS = "settings"
_METHODS = "methods"
_GRID = "grid"
_BUDGETS = ("rounds", "total_epochs")
_BOTH_BUDGETS = "rounds and total_epochs both set the length of the run. Keep one of them."


@dataclass(frozen=True)
class Recipe:
    """The content of a recipe: the command in its first comment, texts and published numbers, settings, and methods to compare."""

    name: str
    command: str
    about: Mapping[str, Any]
    values: Mapping[str, Any]
    methods: Mapping[str, Mapping[str, Any]]

    @property
    def title(self) -> str:
        return str(self.about.get("title", self.name))


def shipped_names() -> list[str]:
    return sorted(_shipped_recipes())


@functools.cache
def _shipped_recipes() -> Mapping[str, Recipe]:
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
        texts = {axis: key for axis, (key, _) in zip(axes, chosen, strict=True)}
        texts |= {name: str(value) for name, value in values.items() if name not in setting_names()}
        settings = document[_SETTINGS] | {key: value for key, value in values.items() if key in setting_names()}
        about = {key: _fill(texts.get(key, document[key]), texts) for key in ("title", "note")}
        found[_fill(document["names"], texts)] = {**about, _SETTINGS: settings}
    return found


def _fill(template: str, texts: Mapping[str, str]) -> str:
    """Replace the placeholders in a template; unknown placeholders become empty.

    >>> _fill("{label} on PACS. {more}", {"label": "FedAvg"})
    'FedAvg on PACS.'
    """
    return re.sub(r"\{(\w+)\}", lambda match: texts.get(match[1], ""), template).strip()


def read(text: str) -> Recipe:
    """Read a recipe from a file, or a shipped recipe by name. One error lists all problems with the form of a file."""
    if not Path(text).is_file():
        return _shipped_recipes()[_shipped_name(text)]
    content = _content(text)
    document, problems = _parse(content)
    if problems := problems or _form_problems(content.decode(), document):
        raise SettingError(f"{text}: {' '.join(problems)}")
    return _recipe(text, _command_in(content.decode()), document)


def _recipe(name: str, command: str, document: Mapping[str, Any]) -> Recipe:
    about = {key: value for key, value in document.items() if key in (*_TEXT_KEYS, _NUMBERS)}
    values = with_tuples(document[_SETTINGS])
    if "made_with" in document and isinstance(values.get("method"), str):
        values["method"] = read_recorded(values["method"])
    methods = {text: with_tuples(own) for text, own in _methods_in(document).items()}
    return Recipe(name, command, about, values, methods)


def _content(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise SettingError(f"Cannot read {file}: {error}.") from error


def _shipped_name(text: str) -> str:
    found = same_name(text, shipped_names())
    if found is not None:
        return found
    if Path(text).suffix == SUFFIX:
        raise SettingError(f"{text} does not exist. Shipped recipes are named without {SUFFIX} (polyfed ls recipes).")
    raise SettingError(f"{text} is neither a file nor a shipped recipe. {nearest(text.lower(), shipped_names())}")


def _command_in(text: str) -> str:
    """Return the command in the first comment of a recipe, or ""."""
    for line in text.splitlines():
        if line.startswith("#") and "polyfed run" in line:
            return line.lstrip("# ").strip()
        if line.strip() and not line.startswith("#"):
            break
    return ""


def trust_of(text: str, values: Mapping[str, Any], trust: bool = False) -> Trust:
    """Trust the code of shipped recipes, of a ``run.toml`` from this account, and of recipes that the user trusts.

    A file written by hand cannot be distinguished from another user's file, so the user must trust it, or pass its code explicitly.
    """
    load, model = values.get("load"), values.get("model")
    files = [item for item in load if isinstance(item, str)] if isinstance(load, list | tuple) else []
    code = code_in(files, model if isinstance(model, str) else None)
    if trust or (code and (not Path(text).is_file() or is_sealed(_content(text)))):
        return NOTHING.adding(code)
    return NOTHING.refusing(code, str(Path(text)) if Path(text).is_file() else _shipped_name(text))


def _parse(content: bytes) -> tuple[dict[str, Any], list[str]]:
    """Return the document in a recipe, or the problems if it cannot be parsed."""
    try:
        return tomllib.loads(content.decode("utf-8")), []
    except tomllib.TOMLDecodeError as error:
        found = re.search(r" \(at line (\d+), column \d+\)", str(error))
        message = str(error) if found is None else str(error).replace(found.group(), "")
        line = "" if found is None else f"line {found.group(1)}: "
        return {}, [f"{line}Invalid TOML: {message}."]
    except RecursionError:
        return {}, ["Cannot read the file: its values are nested too deeply."]
    except ValueError as error:
        return {}, [f"Cannot read the file: {error}."]


def _form_problems(text: str, document: Mapping[str, Any]) -> list[str]:
    """Return all problems with the keys and values of a document, without checking method and other expressions."""
    if not document:
        return ["The file is empty. Add a [settings] table."]
    problems = [] if "made_with" in document else list(_about_problems(document))
    values = document.get(_SETTINGS)
    if isinstance(values, Mapping):
        problems += [*_setting_problems(values), *_method_problems(_methods_in(document))]
        if all(values.get(name) is not None for name in _BUDGETS):
            problems.append(("total_epochs", _BOTH_BUDGETS))
    found = [message if (line := _line_of(text, key)) is None else f"line {line}: {message}" for key, message in problems]
    return found if isinstance(values, Mapping) else [*found, "There is no [settings] table. Add one, such as rounds = 20 in it."]


def _about_problems(document: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    known = (*_TEXT_KEYS, _NUMBERS, _SETTINGS, _METHODS)
    for key, value in document.items():
        if key in _TEXT_KEYS and not isinstance(value, str):
            yield key, f"{key} must be a string, got {value!r}."
        elif key == _NUMBERS and not (isinstance(value, Mapping) and all(_is_number(number) for number in value.values())):
            yield key, f"{key} must be a table of published numbers, such as mean = 86.5."
        elif key in setting_names():
            yield key, f"{key} is a setting. Move it to [settings]."
        elif key not in known:
            yield key, f"Unknown key {key!r}. {nearest(key, known)}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _setting_problems(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield the problems of each setting, checked separately."""
    for name in values:
        if name not in setting_names():
            yield name, f"Unknown setting {name!r}. {nearest(name, setting_names())}"
    for name, value in with_tuples(values).items():
        if name in setting_names():
            try:
                Settings(**{name: value})
            except SettingError as error:
                yield name, str(error)


def _methods_in(document: Mapping[str, Any]) -> Any:
    """Return the table of methods, or {} for the ``run.toml`` of a run."""
    return {} if "made_with" in document else document.get(_METHODS, {})


def _method_problems(methods: Any) -> Iterable[tuple[str, str]]:
    """Yield the problems of per-method settings; the method expressions are checked later."""
    if not isinstance(methods, Mapping):
        yield _METHODS, f'{_METHODS} must be a table of per-method settings, such as "fedavg" = {{}}, "fedwon" = {{ lr = 0.2 }}.'
        return
    for text, own in methods.items():
        if not isinstance(own, Mapping):
            yield text, f"{text} must be a table of per-method settings, such as {{ lr = 0.2 }} or {{}}; got {own!r}."
            continue
        try:
            checked(own)
        except SettingError as error:
            yield text, f"{text}: {error}"
            continue
        for _, message in _setting_problems(own):
            yield text, f"{text}: {message}"


def _line_of(text: str, key: str) -> int | None:
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(rf"""\s*(\[\s*)?["']?{re.escape(key)}["']?\s*[=.\]]""", line):
            return number
    return None


def layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings. Later layers override earlier ones; rounds override total_epochs, and vice versa."""
    chosen: dict[str, Any] = {}
    for layer in layers:
        budgets = [name for name in _BUDGETS if layer.get(name) is not None]
        if len(budgets) > 1:
            raise SettingError(_BOTH_BUDGETS)
        chosen = {name: value for name, value in chosen.items() if not budgets or name not in _BUDGETS} | dict(layer)
    return chosen
