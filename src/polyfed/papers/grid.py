"""The runs of an experiment: the settings of each cell in each form, and the cells that share a run."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyfed.core.method import parse
from polyfed.errors import SettingError, nearest
from polyfed.papers.files import FORMS, OF_FORM, OPEN, PAPER, Column, PaperItem, Part, Published, Row, read_item
from polyfed.runs.folder.paths import data_slug, slug
from polyfed.settings import FACTS, Settings, setting_names
from polyfed.studies.compare.recipes import layered
from polyfed.text import read_call

NOT_IN_NAME = ("seed", "metric", *setting_names("machine"))
NOT_ASKED = "not asked for"
OMITTED = "not in the {} form"
SEEDS = {"laptop": 3, "reduced": 1}
"""Default number of seeds of a smaller form."""


@dataclass(frozen=True)
class Form:
    """The selected form of an experiment.

    Attributes:
        name: full, laptop or reduced.
        only: Selected methods; all if empty.
        seeds: Number of seeds.
        changes: Settings that override all others.
        planned: Include cells that cannot be run yet, for estimates.
        columns: Selected columns or parts; all if empty.
    """

    name: str = "full"
    only: tuple[str, ...] = ()
    seeds: int | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    planned: bool = False
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in FORMS:
            raise SettingError(f"There is no form {self.name!r}. {nearest(self.name, FORMS)}")

    @property
    def is_full(self) -> bool:
        return self.name == FORMS[0]

    @property
    def whole(self) -> Form:
        """The same form with all methods and columns, for the sources of a cell."""
        return dataclasses.replace(self, only=(), columns=())

    def selects(self, part: Part, column: Column) -> bool:
        """Return True if this column is selected, by its name or by the name of its part."""
        return not self.columns or bool({column.name, part.name} & set(self.columns))


@dataclass(frozen=True)
class Cell:
    """One cell of an experiment.

    Attributes:
        item: The experiment whose runs it shows.
        part: Its part there.
        row: Its row.
        column: Its column.
        published: The published cell.
        settings: Settings of its runs without the seed; None if it needs no runs.
        seeds: Number of seeds.
        why_not: Reason why it has no runs.
        notes: Differences from the paper's setting.
        stands_in: A smaller form runs it on different data from the paper's.
    """

    item: PaperItem
    part: Part
    row: Row
    column: Column
    published: Published
    settings: Settings | None
    seeds: int
    why_not: str = ""
    notes: tuple[str, ...] = ()
    stands_in: bool = False

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.item.name, self.part.name, self.row.name, self.column.name


def cells_of(item: PaperItem, form: Form) -> list[Cell]:
    _check_selection(item, form)
    return [cell for part in item.parts for row in part.rows for cell in _cells_of_row(item, part, row, form)]


def _check_selection(item: PaperItem, form: Form) -> None:
    rows = [row for part in item.parts for row in part.rows]
    methods = dict.fromkeys(name for row in rows for name in (row.name, str(row.settings.get("method", ""))) if name)
    for name in form.only:
        if name.casefold() not in {each.casefold() for each in methods}:
            raise SettingError(f"{item.name} has no method {name!r}. {nearest(name, list(methods))}")
    columns = [*(column.name for part in item.parts for column in part.columns), *(part.name for part in item.parts)]
    for name in form.columns:
        if name not in columns:
            raise SettingError(f"{item.name} has no column {name!r}. {nearest(name, list(dict.fromkeys(columns)))}")


def _cells_of_row(item: PaperItem, part: Part, row: Row, form: Form) -> Iterator[Cell]:
    for column, published in zip(part.columns, row.published, strict=True):
        if column.of:
            yield _cell_of_other(item, part, row, column, published, form)
            continue
        smaller = _smaller(item, part, form)
        why = _missing_reason(part, row, column, published, form, smaller)
        settings = None if why or column.mean or column.over else settings_of(item, part, row, column, form)
        notes = [part.differs[key] for key in ("all", column.name, row.name) if key in part.differs]
        if settings is not None:
            notes += _notes(item, part, row, column, form, settings)
        seeds = form.seeds or (item.seeds if form.is_full else int(smaller.get("seeds", SEEDS[form.name])))
        other = settings is not None and read_call(settings.data).name != read_call(str(_full(part, row, column)["data"])).name
        yield Cell(item, part, row, column, published, settings, seeds, why, tuple(notes), other)


def _notes(item: PaperItem, part: Part, row: Row, column: Column, form: Form, settings: Settings) -> list[str]:
    """Describe how the learning rate, the reported round and the settings of a cell differ from the paper's."""
    rounds = settings.averaged_rounds
    averaged = [f"mean of the last {rounds} rounds (paper: the last round)"] if rounds else []
    return [*_rate_notes(row, settings), *averaged, *_changes(item, part, row, column, form)]


def _rate_notes(row: Row, settings: Settings) -> list[str]:
    """Describe the source of a learning rate that the paper does not print."""
    source, _, why = (word.strip() for word in row.chosen.partition(":"))
    if source in ("", PAPER):
        return []
    if source == OPEN:
        return [f"learning rate not printed; not yet chosen on validation data: {settings.lr:g}" + (f" ({why})" if why else "")]
    return [f"learning rate not printed; {settings.lr:g} was chosen on validation data ({source})"]


def _missing_reason(part: Part, row: Row, column: Column, published: Published, form: Form, smaller: Mapping[str, Any]) -> str:
    if not published.exists:
        return published.text
    if (part.missing or row.missing) and not form.planned:
        return f"not yet: {part.missing or row.missing}"
    names = {row.name.casefold(), str(row.settings.get("method", "")).casefold()}
    if (form.only and not names & {name.casefold() for name in form.only}) or not form.selects(part, column):
        return NOT_ASKED
    kept_columns, kept_rows = smaller.get("columns"), smaller.get("rows")
    # A mean is included if one of its columns is.
    if (kept_rows and row.name not in kept_rows) or (kept_columns and not {column.name, *column.mean} & set(kept_columns)):
        return OMITTED.format(form.name)
    return ""


def _smaller(item: PaperItem, part: Part, form: Form) -> dict[str, Any]:
    """Return the changes that a smaller form makes to a part. The full form makes none."""
    return {**item.forms.get(form.name, {}), **part.forms.get(form.name, {})}


def _full(part: Part, row: Row, column: Column) -> dict[str, Any]:
    return layered(part.settings, row.settings, column.settings)


def settings_of(item: PaperItem, part: Part, row: Row, column: Column, form: Form) -> Settings:
    """Return the settings of a cell's runs. The reported metric is also used to select rounds."""
    full = _full(part, row, column)
    reported = {"metric": part.score} if part.score in FACTS["metric"].choices else {}
    return _checked_settings(tuple(sorted(layered(reported, full, _reduction(item, part, row, full, form), form.changes).items())))


@functools.cache
def _checked_settings(values: tuple[tuple[str, Any], ...]) -> Settings:
    """Cache settings, because checking them is slow and thousands of cells share a few hundred."""
    return Settings(**dict(values))


def _reduction(item: PaperItem, part: Part, row: Row, full: Mapping[str, Any], form: Form) -> dict[str, Any]:
    """Return the settings that a smaller form changes. It never increases the number of rounds."""
    layers = (each.forms.get(form.name, {}) for each in (item, part, row))
    changes = layered(*({name: value for name, value in layer.items() if name not in OF_FORM} for layer in layers))
    for budget in ("rounds", "total_epochs"):
        if budget in changes and full.get(budget) is not None:
            changes[budget] = min(changes[budget], full[budget])
    return changes


def _changes(item: PaperItem, part: Part, row: Row, column: Column, form: Form) -> list[str]:
    full = _full(part, row, column)
    notes = []
    for label, changes in (
        (form.name, _reduction(item, part, row, full, form)),
        ("changed by the user", form.changes),
    ):
        changed = [
            f"{name} {value} (paper: {full.get(name, _default(name))})"
            for name, value in changes.items()
            if name not in NOT_IN_NAME
            and value != full.get(name, _default(name))
            and (changes is form.changes or name not in form.changes)
        ]
        notes += [f"{label}: {', '.join(changed)}"] if changed else []
    return notes


def _default(name: str) -> Any:
    return getattr(Settings, name)


def _cell_of_other(item: PaperItem, own: Part, row: Row, column: Column, published: Published, form: Form) -> Cell:
    """Return a cell of another experiment, with the number that this one prints."""
    if not published.exists:
        return Cell(item, own, row, column, published, None, 1, published.text)
    other = read_item(column.of)
    plain = form.whole
    for part in other.parts:
        for its_row in part.rows:
            if its_row.name == row.name:
                found = [
                    cell
                    for cell in _cells_of_row(other, part, its_row, plain)
                    if cell.column.name == (column.column or column.name)
                ]
                if found:
                    names = {row.name.casefold(), str(its_row.settings.get("method", "")).casefold()}
                    selected = not form.only or names & {name.casefold() for name in form.only}
                    why = found[0].why_not if selected and form.selects(own, column) else NOT_ASKED
                    return dataclasses.replace(found[0], published=published, why_not=why)
    raise SettingError(f"{column.of} has no cell in row {row.name!r} and column {column.column or column.name!r}.")


def sources_of(cell: Cell, form: Form) -> list[Cell]:
    """Return the cells of a mean that the form contains, or the cell itself if it is not a mean."""
    whole = form.whole
    if cell.column.over:
        targets = _smaller(cell.item, cell.part, form).get("targets")
        kept = [each for each in cell.column.over if not targets or set(each.get("unseen", ())) & set(targets)]
        return [_over(cell, each, whole, len(kept) < len(cell.column.over)) for each in kept]
    if not cell.column.mean:
        return [cell]
    row = [each for name in cell.column.mean for each in _named_cells(cell, name, whole)]
    found = [each for each in row if each.why_not != OMITTED.format(form.name)]
    note = (f"{form.name}: mean over {', '.join(each.column.name for each in found)} only",) if len(found) < len(row) else ()
    sources = [source for each in found for source in sources_of(each, form)]
    return [dataclasses.replace(each, notes=(*each.notes, *note)) for each in sources]


def _named_cells(cell: Cell, name: str, form: Form) -> list[Cell]:
    """Return the cells of the same row in a column of this part, or of another one (``part, column``)."""
    return [
        each
        for part in cell.item.parts
        for row in part.rows
        if row.name == cell.row.name
        for each in _cells_of_row(cell.item, part, row, form)
        if name == (each.column.name if part.name == cell.part.name else f"{part.name}, {each.column.name}")
    ]


def _over(cell: Cell, more: Mapping[str, Any], form: Form, shortened: bool) -> Cell:
    column = dataclasses.replace(cell.column, over=(), settings={**cell.column.settings, **more})
    settings = settings_of(cell.item, cell.part, cell.row, column, form)
    notes = _notes(cell.item, cell.part, cell.row, column, form, settings)
    notes += [f"{form.name}: mean over {', '.join(more.get('unseen', ()))} only"] if shortened else []
    return dataclasses.replace(cell, column=column, settings=settings, notes=(*cell.notes, *notes))


@functools.cache
def canonical(method: str) -> str:
    """Return a method expression without default options, so that equal methods share a folder."""
    return str(parse(method))


@dataclass(frozen=True)
class PlannedRun:
    """Runs of one or more cells that differ only in their seed."""

    settings: Settings
    seeds: int
    words: str

    @property
    def folder(self) -> str:
        return folder_of(self.settings)


@functools.cache
def folder_of(settings: Settings) -> str:
    """Return the folder name for runs with these settings and any seed. Settings with default values do not change it."""
    names = [name for name in setting_names() if name not in NOT_IN_NAME and getattr(settings, name) != _default(name)]
    values = {name: getattr(settings, name) for name in names}
    written = json.dumps(values | {"method": canonical(settings.method)}, sort_keys=True, default=list).encode()
    return f"{data_slug(settings.data)}-{slug(settings.method)[:30]}-{hashlib.sha256(written).hexdigest()[:10]}"


def planned_runs(cells: Sequence[Cell], form: Form) -> dict[str, PlannedRun]:
    """Return the runs of cells without duplicates, by folder name."""
    runs: dict[str, PlannedRun] = {}
    for cell in cells:
        if cell.why_not:
            continue
        for source in sources_of(cell, form):
            if source.settings is not None:
                run = PlannedRun(source.settings, source.seeds, " ".join(filter(None, (source.part.name, source.row.name))))
                before = runs.get(run.folder)
                if before is None or before.seeds < run.seeds:
                    runs[run.folder] = run
    return runs
