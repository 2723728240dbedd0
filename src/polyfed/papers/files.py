"""Experiment files: found, read, and their references to each other followed.

A file has sentences (``title``, ``paper``, ``item``, ``claim``, ``measure``), ``seeds``, ``[settings]`` of every run, ``[methods]``
(settings by a name the paper uses) and one ``[[part]]`` or several: a table of rows and columns. A row, a column and a part each add
settings; the last one wins. ``chosen`` says where the learning rate of a file, a part, a method or a row comes from. ``like = "paper/item: part"`` takes a part of another file, and changes what is written beside it.
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
"""The paper's setting; the largest one whose runs cost about half a core-hour; one that takes minutes and decides nothing."""
_SMALLER = FORMS[1:]
_SENTENCES = ("title", "paper", "item", "claim", "measure", "note", "missing", "figure", "x")
KEYS = (*_SENTENCES, "seeds", "settings", "methods", "chosen", *_SMALLER, "orders", "part")
_OF_PART = (
    "name",
    "like",
    "settings",
    "columns",
    "rows",
    "chosen",
    *_SMALLER,
    "missing",
    "differs",
    "score",
    "unit",
    "analysis",
)
_OF_METHOD = ("chosen", *_SMALLER)
_OF_ROW = ("published", "missing", "like", *_OF_METHOD)
_OF_COLUMN = ("name", "read", "mean", "over", "of", "column", "x", "number", "minus")
_OF_ANALYSIS = ("kind", "figures")
OF_FORM = ("seeds", "columns", "rows", "targets")
PAPER, OPEN = "paper", "open"
"""Where a learning rate comes from: printed in the paper; not printed and not chosen yet (``open: why``); else the log of a search."""
UNITS: Mapping[str, tuple[float, int]] = {"percent": (100.0, 1), "fraction": (1.0, 2), "number": (1.0, 4)}
"""What a score between 0 and 1 is multiplied by, and how many digits are written; a number is written as it is."""


_NUMBER = r"[+-]?\d+(?:\.\d+)?"
_TOKEN = re.compile(rf"(?P<about>≈)?(?P<value>{_NUMBER})(?:±(?P<spread>{_NUMBER}|\?))?")
_NOT_AVAILABLE, _NO_CELL = "n/a", "-"


@dataclass(frozen=True)
class Published:
    """One published cell.

    Attributes:
        text: as the experiment file has it.
        value: the number; None if it is only drawn, unreadable, or missing in the paper.
        spread: its standard deviation, where it was printed.
        recomputed: whether the number was lost in the text of the paper and follows from others.
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
    """Read the cells of a row, apart by blanks; nothing written: none is available."""
    words = text.split() or [_NOT_AVAILABLE] * columns
    if len(words) != columns:
        raise SettingError(f"{where}: {len(words)} published cells for {columns} columns.")
    return tuple(map(read_cell, words))


@dataclass(frozen=True)
class Column:
    """A column: what is read from a run, or from other columns.

    Attributes:
        name: as the paper heads it.
        read: ``mean`` (over seen domains), ``unseen`` (mean over unseen domains), or the name of a seen domain.
        mean: names of columns that this one is the mean of.
        over: settings, one group after the other, whose runs this column is the mean of.
        of: another experiment whose cells it shows, those of the rows of the same names.
        column: the column there.
        x: its place on the horizontal axis of a figure.
        number: a number of the part's analysis, by its name there, which is read instead of a score.
        minus: the row whose cell is subtracted.
        settings: of its runs.
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
class AskedAnalysis:
    """The analysis of a part's runs: its kind, and those of its pictures that the page shows."""

    kind: str
    figures: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        name: as the paper has it.
        settings: of its runs.
        published: what the paper has in each column.
        missing: what is missing to run it; empty if nothing is.
        chosen: where its learning rate comes from: ``paper``, ``open: why``, or the log of a search on validation data, a file in
            docs/results.
        forms: what each smaller form changes for this row only.
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
        name: the heading; empty if there is only one part.
        settings: of all its runs.
        columns: its columns.
        rows: its rows.
        forms: what each smaller form changes.
        missing: what is missing to run it; empty if nothing is.
        differs: how its settings differ from the paper's: for a column or a row by its name, for all cells under "all".
        score: which score is read.
        unit: percent, fraction or number.
        analysis: what is looked into in its finished runs, where the paper's figure is no table of scores.
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
    analysis: AskedAnalysis | None = None


@dataclass(frozen=True)
class PaperItem:
    """A table or a figure of a paper."""

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
    """The names of all experiments, by paper, tables before figures."""
    names = [file.relative_to(SHIPPED).with_suffix("").as_posix() for file in SHIPPED.rglob(f"*{SUFFIX}")]
    return sorted(names, key=_place)


def _place(name: str) -> tuple[str, bool, int, str]:
    paper, _, item = name.partition("/")
    kind, _, number = item.partition("-")
    return paper, kind != "table", int(number) if number.isdigit() else 1000, number


@functools.cache
def read_item(name: str) -> PaperItem:
    known = same_name(name, item_names())
    if known is None:
        raise SettingError(
            f"There is no experiment {name!r}. {nearest(name.lower(), item_names())} All of them: polyfed ls experiments."
        )
    return item_from(known, (SHIPPED / f"{known}{SUFFIX}").read_text(encoding="utf-8"))


def item_from(name: str, text: str) -> PaperItem:
    document = tomllib.loads(text)
    _refuse(name, document, KEYS)
    document["methods"] = _methods(name, document.get("methods", {}))
    parts = [_part(f"{name}, part {number}", each, document) for number, each in enumerate(document.get("part", ()), 1)]
    sentences = {key: str(document.get(key, "")) for key in _SENTENCES}
    forms = {form: with_tuples(document[form]) for form in _SMALLER if form in document}
    for form, changes in forms.items():
        _refuse(f"{name}, {form}", changes, (*OF_FORM, *setting_names()))
    return PaperItem(
        name=name,
        seeds=int(document.get("seeds", 1)),
        parts=tuple(parts),
        forms=forms,
        orders=tuple(document.get("orders", ())),
        **sentences,
    )


def _refuse(where: str, found: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in found:
        if key not in known:
            raise SettingError(f"{where}: there is no entry {key!r}. {nearest(key, known)}")


def _methods(name: str, written: Any) -> dict[str, Any]:
    """The settings of each method by its name, or those of another file."""
    if isinstance(written, str):
        other = tomllib.loads((SHIPPED / f"{written}{SUFFIX}").read_text(encoding="utf-8"))
        return _methods(written, other.get("methods", {}))
    for row, settings in written.items():
        _refuse(f"{name}, methods, {row}", settings, (*_OF_METHOD, *setting_names()))
    return dict(written)


def _part(where: str, written: Mapping[str, Any], document: Mapping[str, Any]) -> Part:
    _refuse(where, written, _OF_PART)
    base = _liked(written["like"]) if "like" in written else None
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


def _analysis(where: str, written: Mapping[str, Any]) -> AskedAnalysis:
    _refuse(f"{where}, analysis", written, _OF_ANALYSIS)
    return AskedAnalysis(str(written["kind"]), tuple(written["figures"]))


def _form_of(form: str, base: Part | None, document: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """A part's changes in a smaller form: those of the part it is like, then those of this file, then those beside it."""
    own, liked = with_tuples(document.get(form, {})), base.forms.get(form, {}) if base else {}
    return {name: own.get(name, value) for name, value in liked.items()} | with_tuples(written.get(form, {}))


def _liked(text: str) -> Part:
    """The part of another experiment: ``paper/item``, or ``paper/item: name of the part``."""
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
