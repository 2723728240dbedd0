"""Read experiment files, and resolve their references to each other.

A file contains texts (``title``, ``paper``, ``item``, ``claim``, ``measure``), ``seeds``, ``[settings]`` for all runs, ``[methods]``
(settings by the paper's method names) and one or more ``[[part]]``: a table with rows and columns. The settings of
a row override those of its part, and the settings of a column override both. ``chosen`` is the source of a learning rate. ``like = "paper/item: part"`` copies a part of
another file; other entries override the copy.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyfed.errors import SettingError, nearest, same_name
from polyfed.settings import setting_names, with_tuples

SHIPPED = Path(__file__).parent / "shipped"
SUFFIX = ".toml"
FORMS = ("full", "laptop", "reduced")
"""The paper's setting; the largest setting whose runs take about half a core-hour; a setting that takes minutes, for a quick trial."""
_SMALLER = FORMS[1:]
_TEXTS = ("title", "paper", "item", "claim", "measure", "note", "missing", "figure", "x")
KEYS = (*_TEXTS, "seeds", "settings", "methods", "chosen", *_SMALLER, "orders", "part")
_OF_METHOD = ("chosen", *_SMALLER)
_OF_PART = ("name", "like", "settings", "columns", "rows", *_OF_METHOD, "missing", "differs", "score", "unit", "analysis")
_OF_ROW = ("published", "missing", "like", *_OF_METHOD)
_OF_COLUMN = ("name", "read", "mean", "over", "of", "column", "x", "number", "minus")
_OF_ANALYSIS = ("kind", "figures")
OF_FORM = ("seeds", "columns", "rows", "targets")
PAPER, OPEN = "paper", "open"
"""Source of a learning rate: printed in the paper; not printed and not selected yet (``open: why``); otherwise the log of a search."""
UNITS: Mapping[str, tuple[float, int]] = {"percent": (100.0, 1), "fraction": (1.0, 2), "number": (1.0, 4)}
"""Factor for a score between 0 and 1, and number of digits."""


_NUMBER = r"[+-]?\d+(?:\.\d+)?"
_TOKEN = re.compile(rf"(?P<about>≈)?(?P<value>{_NUMBER})(?:±(?P<spread>{_NUMBER}|\?))?")
_NOT_AVAILABLE, _NO_CELL = "n/a", "-"


@dataclass(frozen=True)
class Published:
    """One published cell.

    Attributes:
        text: Text in the experiment file.
        value: The number; None if it is only plotted, unreadable or missing in the paper.
        spread: Standard deviation, if printed.
        recomputed: The number is unreadable in the paper and was computed from others.
    """

    text: str
    value: float | None = None
    spread: float | None = None
    recomputed: bool = False

    @property
    def exists(self) -> bool:
        return self.text != _NO_CELL

    def __str__(self) -> str:
        return self.text.replace("±", " ± ").replace(" ± ?", "")


def read_cell(text: str) -> Published:
    """Read one cell.

    >>> read_cell("96.2±0.2").value, read_cell("67.0±?").spread, read_cell("≈61.2").recomputed, read_cell("n/a").value
    (96.2, None, True, None)
    """
    if text in (_NOT_AVAILABLE, _NO_CELL):
        return Published(text)
    found = _TOKEN.fullmatch(text)
    if found is None:
        raise SettingError(
            f"Cannot read the published cell {text!r}. Write 96.2, 96.2±0.2, ≈96.2, n/a (not available) or - (none)."
        )
    spread = None if found["spread"] in (None, "?") else float(found["spread"])
    return Published(text, float(found["value"]), spread, found["about"] is not None)


def _read_cells(text: str, columns: int, where: str) -> tuple[Published, ...]:
    """Read the cells of a row, separated by spaces. In an empty row, no cell is available."""
    cells = text.split() or [_NOT_AVAILABLE] * columns
    if len(cells) != columns:
        raise SettingError(f"{where}: {len(cells)} published cells for {columns} columns.")
    return tuple(map(read_cell, cells))


@dataclass(frozen=True)
class Column:
    """A column, whose values come from runs or from other columns.

    Attributes:
        name: Heading in the paper.
        read: ``mean`` (over seen domains), ``unseen`` (mean over unseen domains), or the name of a domain.
        mean: Columns whose mean this column shows.
        over: Settings of the runs whose mean this column shows.
        of: Another experiment whose cells this column shows, in rows with the same names.
        column: The column of the other experiment.
        x: Position on the horizontal axis of a figure.
        number: Name of a number in the part's analysis, shown instead of a score.
        minus: Row whose cell is subtracted.
        settings: Settings of its runs.
    """

    name: str
    read: str = ""
    mean: tuple[str, ...] = ()
    over: tuple[Mapping[str, Any], ...] = ()
    of: str = ""
    column: str = ""
    x: float | None = None
    number: str = ""
    minus: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PartFigures:
    """The kind of a part's analysis, and its figures on the page."""

    kind: str
    figures: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        name: Name in the paper.
        settings: Settings of its runs.
        published: Published cells by column.
        missing: Features that polyfed lacks to run it; empty if none.
        chosen: Source of its learning rate: ``paper``, ``open: why``, or the log of a search on validation data in docs/results.
        forms: Changes of each smaller form for this row only.
    """

    name: str
    settings: Mapping[str, Any]
    published: tuple[Published, ...]
    missing: str = ""
    chosen: str = ""
    forms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """One table of an experiment.

    Attributes:
        name: Heading; empty if there is only one part.
        settings: Settings of all its runs.
        columns: Its columns.
        rows: Its rows.
        forms: Changes of each smaller form.
        missing: Features that polyfed lacks to run it; empty if none.
        differs: Differences between its settings and the paper's, by column or row name, or "all" for all cells.
        score: The metric it shows.
        unit: percent, fraction or number.
        analysis: The analysis of its runs, if the paper's figure does not show scores.
    """

    name: str
    settings: Mapping[str, Any]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    forms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    missing: str = ""
    differs: Mapping[str, str] = field(default_factory=dict)
    score: str = "accuracy"
    unit: str = "percent"
    analysis: PartFigures | None = None


@dataclass(frozen=True)
class PaperItem:
    name: str
    title: str
    paper: str
    item: str
    claim: str
    measure: str
    seeds: int
    parts: tuple[Part, ...]
    forms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    orders: tuple[str, ...] = ()
    note: str = ""
    missing: str = ""
    figure: str = ""
    x: str = ""

    @property
    def is_figure(self) -> bool:
        return self.item.startswith("Figure")


def item_names() -> list[str]:
    """Return the names of all experiments, sorted by paper, with tables before figures."""
    names = [file.relative_to(SHIPPED).with_suffix("").as_posix() for file in SHIPPED.rglob(f"*{SUFFIX}")]
    return sorted(names, key=_sort_key)


def _sort_key(name: str) -> tuple[str, bool, int, str]:
    paper, _, item = name.partition("/")
    kind, _, number = item.partition("-")
    return paper, kind != "table", int(number) if number.isdigit() else 1000, number


@functools.cache
def read_item(name: str) -> PaperItem:
    known = same_name(name, item_names())
    if known is None:
        raise SettingError(
            f"There is no experiment {name!r}. {nearest(name.lower(), item_names())} List all with: polyfed ls experiments."
        )
    return item_from(known, (SHIPPED / f"{known}{SUFFIX}").read_text(encoding="utf-8"))


def item_from(name: str, text: str) -> PaperItem:
    document = tomllib.loads(text)
    _refuse(name, document, KEYS)
    document["methods"] = _methods(name, document.get("methods", {}))
    parts = [_part(f"{name}, part {number}", each, document) for number, each in enumerate(document.get("part", ()), 1)]
    texts = {key: str(document.get(key, "")) for key in _TEXTS}
    forms = {form: with_tuples(document[form]) for form in _SMALLER if form in document}
    for form, changes in forms.items():
        _refuse(f"{name}, {form}", changes, (*OF_FORM, *setting_names()))
    return PaperItem(
        name=name,
        seeds=int(document.get("seeds", 1)),
        parts=tuple(parts),
        forms=forms,
        orders=tuple(document.get("orders", ())),
        **texts,
    )


def _refuse(where: str, found: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in found:
        if key not in known:
            raise SettingError(f"{where}: unknown entry {key!r}. {nearest(key, known)}")


def _methods(name: str, written: Any) -> dict[str, Any]:
    """Return the settings by method name, possibly from another file."""
    if isinstance(written, str):
        other = tomllib.loads((SHIPPED / f"{written}{SUFFIX}").read_text(encoding="utf-8"))
        return _methods(written, other.get("methods", {}))
    for row, settings in written.items():
        _refuse(f"{name}, methods, {row}", settings, (*_OF_METHOD, *setting_names()))
    return dict(written)


def _part(where: str, written: Mapping[str, Any], document: Mapping[str, Any]) -> Part:
    _refuse(where, written, _OF_PART)
    base = _part_of_other_item(written["like"]) if "like" in written else None
    columns = tuple(map(_column, written["columns"])) if "columns" in written else base.columns if base else ()
    own = {**with_tuples(document.get("settings", {})), **with_tuples(written.get("settings", {}))}
    _refuse(where, own, setting_names())
    rows = _rows(where, written, document, base, len(columns))
    differs = written.get("differs", {})
    return Part(
        name=str(written.get("name", base.name if base else "")),
        settings={**(base.settings if base else {}), **own},
        columns=columns,
        rows=rows,
        forms={
            form: _form_of(form, base, document, written) for form in _SMALLER if form in written or (base and form in base.forms)
        },
        missing=str(written.get("missing", base.missing if base else "")),
        differs={**(base.differs if base else {}), **({"all": differs} if isinstance(differs, str) else differs)},
        score=str(written.get("score", base.score if base else "accuracy")),
        unit=str(written.get("unit", base.unit if base else "percent")),
        analysis=_analysis(where, written["analysis"]) if "analysis" in written else base.analysis if base else None,
    )


def _analysis(where: str, written: Mapping[str, Any]) -> PartFigures:
    _refuse(f"{where}, analysis", written, _OF_ANALYSIS)
    return PartFigures(str(written["kind"]), tuple(written["figures"]))


def _form_of(form: str, base: Part | None, document: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of a smaller form: those of the copied part, overridden by those of this file and of this part."""
    own, liked = with_tuples(document.get(form, {})), base.forms.get(form, {}) if base else {}
    return {name: own.get(name, value) for name, value in liked.items()} | with_tuples(written.get(form, {}))


def _part_of_other_item(text: str) -> Part:
    """Return a part of another experiment: ``paper/item`` or ``paper/item: part``."""
    name, _, wanted = (word.strip() for word in text.partition(":"))
    parts = read_item(name).parts
    found = [part for part in parts if part.name == wanted or not wanted]
    if not found:
        raise SettingError(f"{name} has no part {wanted!r}. {nearest(wanted, [part.name for part in parts])}")
    return found[0]


def _column(written: Any) -> Column:
    if isinstance(written, str):
        return Column(written, written)
    settings = with_tuples({key: value for key, value in written.items() if key not in _OF_COLUMN})
    _refuse(f"column {written.get('name')}", settings, setting_names())
    return Column(
        str(written["name"]),
        str(written.get("read", written["name"])),
        tuple(written.get("mean", ())),
        tuple(map(with_tuples, written.get("over", ()))),
        str(written.get("of", "")),
        str(written.get("column", "")),
        written.get("x"),
        str(written.get("number", "")),
        str(written.get("minus", "")),
        settings,
    )


def _rows(where: str, written: Mapping[str, Any], document: Mapping[str, Any], base: Part | None, columns: int) -> tuple[Row, ...]:
    known = {row.name: row for row in base.rows} if base else {}
    if "rows" not in written:
        return tuple(known.values())
    rows = []
    for name, value in written["rows"].items():
        given = {"published": value} if isinstance(value, str) else dict(value)
        like = str(given.get("like", name))
        before = known.get(like)
        method = document["methods"].get(like, {})
        settings = {**_settings_in(method), **(before.settings if before else {}), **_settings_in(given)}
        _refuse(f"{where}, row {name}", settings, setting_names())
        inherited = before is not None and "published" not in given and len(before.published) == columns
        published = (
            before.published if inherited and before else _read_cells(str(given.get("published", "")), columns, f"{where}, {name}")
        )
        sources = (given, method, written, {"chosen": before.chosen} if before else {}, document)
        chosen = next((str(each["chosen"]) for each in sources if each.get("chosen")), "")
        forms = {
            **(before.forms if before else {}),
            **{form: with_tuples({**method, **given}[form]) for form in _SMALLER if form in {**method, **given}},
        }
        for form, changes in forms.items():
            _refuse(f"{where}, row {name}, {form}", changes, setting_names())
        rows.append(Row(name, settings, published, str(given.get("missing", before.missing if before else "")), chosen, forms))
    return tuple(rows)


def _settings_in(written: Mapping[str, Any]) -> dict[str, Any]:
    return with_tuples({key: each for key, each in written.items() if key not in _OF_ROW})
