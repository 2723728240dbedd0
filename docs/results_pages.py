"""Pages of results, one for each data set that has runs, generated from the ledger (docs/results/runs) alone.

docs/results/publish.py writes them. A page has, for each part of an experiment that was run: the paper's table with ours, validation
curves with a band over seeds, the test score as a point at the chosen round, and a sentence for each cell that is far off.
"""

from __future__ import annotations

import functools
import re
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from method_tables import table

from polyfed.papers.claims import judged_orders
from polyfed.papers.figures import pictures, standalone
from polyfed.papers.files import FORMS, UNITS, Part, item_names, read_item
from polyfed.papers.grid import Form, folder_of, sources_of
from polyfed.papers.ledger import FINISHED, Ledger, Record
from polyfed.papers.page import LEGEND, Footnotes, shown_table
from polyfed.papers.reproduction import Outcome, Reproduction, Trained, from_ledger
from polyfed.runs.folder.paths import data_slug, slug
from polyfed.runs.result import accuracy_table
from polyfed.studies.report.charts import Series, line_chart, ticks

PAGES = Path(__file__).parent / "results"
RUNS = PAGES / "runs"
FAR = 3.0
"""Points between ours and the published number that need an explanation."""
UNEXPLAINED = "unexplained"
MARKS = re.compile(r" ([a-z]+(?:,[a-z]+)*)$")
CHARTS = (
    "Charts: lines are mean validation scores over clients and seeds, with a band of one standard deviation over seeds; "
    "points are mean test scores over domains and seeds, at the chosen round or after each of the last rounds."
)
COMMAND = "python docs/results/publish.py"
TITLES = {
    "digits-five": "Digits-Five",
    "office-caltech10": "Office-Caltech-10",
    "pacs": "PACS",
    "cifar10": "CIFAR-10",
    "digits-mini": "digits-mini",
    "fed-isic2019": "Fed-ISIC2019",
    "vlcs": "VLCS",
    "camvid": "CamVid",
}


@dataclass
class Explanations:
    """What docs/results/explanations.toml says: sentences for cells, and why a claim cannot be compared."""

    cells: Mapping[str, Any] = field(default_factory=dict)
    not_comparable: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = PAGES / "explanations.toml") -> Explanations:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        return cls(document.get("cells", {}), document.get("not_comparable", {}))

    def of(self, item: str, part: str, row: str, column: str) -> str:
        """The sentence for a cell: its own, or the one for its whole row; empty if there is none."""
        row_of = self.cells.get(item, {}).get(part, {}).get(row, {})
        return str(row_of.get(column, row_of.get("all", "")))


@dataclass(frozen=True)
class Section:
    """One part of an experiment in one form that has runs."""

    found: Reproduction
    part: Part
    outcomes: Sequence[Outcome]

    @property
    def title(self) -> str:
        item, form = self.found.item, self.found.form
        words = [item.name, self.part.name, "" if form.is_full else f"{form.name} form"]
        return ", ".join(filter(None, words))

    @property
    def stem(self) -> str:
        return slug(self.title.lower())

    @property
    def data(self) -> str:
        run = next(one for one in self.outcomes if one.values or one.diverged)
        settings = next(each.settings for each in sources_of(run.cell, self.found.form) if each.settings is not None)
        return data_slug(settings.data)

    def files(self) -> frozenset[str]:
        return frozenset(run.record.file for one in self.outcomes for run in self.trained(one))

    def trained(self, outcome: Outcome) -> list[Trained]:
        """The runs of a cell that reads one run; none for a mean."""
        settings = outcome.cell.settings
        return [] if settings is None else self.found.trained.get(folder_of(settings), [])


def reproductions(ledger: Ledger) -> list[Reproduction]:
    """Every experiment in every form of which the ledger has a run."""
    found = [reproduction(name, form, ledger) for name in item_names() for form in FORMS]
    return [one for one in found if one.trained]


@functools.cache
def reproduction(name: str, form: str, ledger: Ledger) -> Reproduction:
    """An experiment in one form; made once, since pages and index need it."""
    return from_ledger(read_item(name), Form(form), ledger)


@functools.cache
def ledger_in(folder: Path) -> Ledger:
    """The ledger of a folder; read once."""
    return Ledger.read(folder)


def sections(found: Sequence[Reproduction]) -> list[Section]:
    """Every part with a number, in the order of experiments and forms; a smaller form that adds no run is left out."""
    shown, seen = [], set()
    for one in found:
        for part, outcomes in one.parts():
            mine = Section(one, part, outcomes).files()
            key = (one.item.name, part.name, mine)
            if any(each.values or each.diverged for each in outcomes) and (not mine or key not in seen):
                seen.add(key)
                shown.append(Section(one, part, outcomes))
    return shown


def pages(ledger: Ledger, explanations: Explanations) -> dict[str, bytes]:
    """All files of the pages by their names in docs/results."""
    by_data: dict[str, list[Section]] = {}
    for section in sections(reproductions(ledger)):
        by_data.setdefault(section.data, []).append(section)
    for record in ledger.records:
        by_data.setdefault(data_slug(str(record.settings["data"])), [])
    files: dict[str, bytes] = {}
    for data, many in sorted(by_data.items()):
        text, drawn = page(data, many, ledger, explanations)
        files |= {f"{data}.md": text.encode(), **drawn}
    return files


def page(data: str, many: Sequence[Section], ledger: Ledger, explanations: Explanations) -> tuple[str, dict[str, bytes]]:
    """The page of a data set, and its pictures."""
    records = [one for one in ledger.records if data_slug(str(one.settings["data"])) == data]
    hours = sum(float(one.cost.get("cpu_seconds", 0.0)) for one in records) / 3600
    spent = f", {hours:.1f} core-hours of training" if hours else ""
    lines = [
        f"# {TITLES.get(data, data)}",
        "",
        f"Our runs and the published numbers: {len(records)} run{'s' * (len(records) != 1)}{spent}.",
        f"Generated by `{COMMAND}` from [the ledger](index.md#the-ledger); statuses of the claims are in [the index](index.md).",
        "",
        LEGEND.replace("n/a: not", "[Marks](#marks) are explained below. ± is the standard deviation over seeds. n/a: not"),
        "",
        CHARTS,
        "",
    ]
    footnotes = Footnotes()
    listed: dict[str, str] = {}
    rows_in: dict[tuple[str, ...], str] = {}
    drawn: dict[str, bytes] = {}
    used: set[str] = set()
    sentences = explained(many, explanations)
    with_curves: dict[frozenset[str], str] = {}
    for section in many:
        text, more = section_text(section, sentences, with_curves.get(section.files(), ""), footnotes, listed, rows_in)
        if section.part.analysis is None:
            with_curves.setdefault(section.files(), section.title)
        lines += text
        drawn |= more
        used |= {run.record.file for runs in section.found.trained.values() for run in runs}
    lines += further(records, used)
    lines += ["## Marks", "", *(f"* {line}" for line in footnotes.lines()), ""] if footnotes.marks else []
    lines += ["## Runs", "", runs_table(records), ""]
    return "\n".join(lines).rstrip() + "\n", drawn


Explained = Mapping[tuple[frozenset[str], str], str]
"""Sentences by the records of a cell and the name of its column: experiments share runs, and so explanations."""


def explained(many: Sequence[Section], explanations: Explanations) -> Explained:
    found = {}
    for section in many:
        for one in section.outcomes:
            sentence = explanations.of(section.found.item.name, section.part.name, one.cell.row.name, one.cell.column.name)
            if sentence:
                found[cell_key(section, one)] = sentence
    return found


def cell_key(section: Section, one: Outcome) -> tuple[frozenset[str], str]:
    """The records behind a cell, and its column."""
    settings = [each.settings for each in sources_of(one.cell, section.found.form) if each.settings is not None]
    runs = [run for each in settings for run in section.found.trained.get(folder_of(each), [])]
    return frozenset(run.record.file for run in runs), one.cell.column.name


def section_text(
    section: Section,
    sentences: Explained,
    curves_in: str,
    footnotes: Footnotes,
    listed: dict[str, str],
    rows_in: dict[tuple[str, ...], str],
) -> tuple[list[str], dict[str, bytes]]:
    """Return the text of one part, and its figures.

    Args:
        section: the part.
        sentences: explanations of cells.
        curves_in: title of an earlier section with curves of the same runs; empty if there is none.
        footnotes: the marks of the page; new ones are added.
        listed: lines about differing cells that the page has, with the title of their section; new ones are added.
        rows_in: rows of tables that the page has, without marks, with the title of their section; new ones are added.
    """
    found = section.found
    shown = shown_table(section.part, section.outcomes, footnotes)
    lines = [f"## {section.title}", "", f"{found.item.paper}, {found.item.item}: {found.item.claim}", ""]
    rows = [line for line, row in zip(shown.lines, _rows(section), strict=True) if row]
    lines += [table_or_reference(shown.head, rows, section.title, rows_in), ""]
    lines += far_off(section, sentences, listed)
    tested = [one for one in judged_orders(found) if one.order.part == section.part.name and one.is_run]
    lines += ["Rankings in the claim:", "", *(f"* {one}" for one in tested), ""] if tested else []
    drawn: dict[str, bytes] = {}
    for number, (title, legend, suffix, file) in enumerate(drawn_of(section, not curves_in), 1):
        name = f"pictures/{section.stem}-{number}{suffix}"
        drawn[name] = file
        lines += [f"![{title}]({name})", "", *([legend, ""] if legend else [])]
    lines += [f"Curves of the same runs: {curves_in}.", ""] if curves_in and section.part.analysis is None else []
    analysis = found.analyses.get(section.part.name)
    if analysis is not None and analysis.found is not None:
        lines += [f"{analysis.found.title}. {analysis.found.sentence}", ""]
    return lines, drawn


def table_or_reference(head: Sequence[str], rows: Sequence[Sequence[str]], title: str, rows_in: dict[tuple[str, ...], str]) -> str:
    """Return a table, or if the page already has all of its rows, where they are and which marks they have here."""
    plain = {tuple(head) + tuple(MARKS.sub("", cell) for cell in row): row for row in rows}
    if plain and all(key in rows_in for key in plain):
        marks = sorted({mark for row in rows for cell in row if (found := MARKS.search(cell)) for mark in found[1].split(",")})
        names = ", ".join(row[0] for row in rows)
        places = ", ".join(dict.fromkeys(rows_in[key] for key in plain))
        return f"Same numbers as in {places}: {names}. Marks: {','.join(marks)}."
    for key in plain:
        rows_in.setdefault(key, title)
    return table(head, rows)


def _rows(section: Section) -> list[bool]:
    """Which rows have a number of ours."""
    width = len(section.part.columns)
    cells = [section.outcomes[place * width : (place + 1) * width] for place in range(len(section.part.rows))]
    return [any(one.values or one.diverged for one in row) for row in cells]


def is_far(one: Outcome) -> bool:
    """Whether a cell differs from the published number by more than three points."""
    unit = one.cell.part.unit
    if one.difference is None or unit == "number":
        return False
    return abs(one.difference) * 100 / UNITS[unit][0] > FAR


def far_off(section: Section, sentences: Explained, listed: dict[str, str]) -> list[str]:
    """Return a sentence for each cell that is far off, once per page; cells of a row with the same sentence together."""
    by_row: dict[tuple[str, str], list[str]] = {}
    for one in section.outcomes:
        if is_far(one):
            row, column = one.cell.row.name, one.cell.column.name
            digits = UNITS[one.cell.part.unit][1]
            words = f"{column} ({one.difference:+.{digits}f})".replace("-", "−")
            by_row.setdefault((row, sentences.get(cell_key(section, one), UNEXPLAINED)), []).append(words)
    if not by_row:
        return []
    lines = [f"* {row}, {', '.join(columns)}: {sentence}" for (row, sentence), columns in by_row.items()]
    known = list(dict.fromkeys(listed[line] for line in lines if line in listed))
    fresh = [line for line in lines if line not in listed]
    listed |= dict.fromkeys(fresh, section.title)
    head = f"Cells that differ by more than {FAR:.0f} points:"
    if not fresh:
        return [f"{head} as in {', '.join(known)}.", ""]
    return [head, "", *fresh, *([f"* Others: as in {', '.join(known)}"] if known else []), ""]


# ----------------------------------------------------------------------------------------------------------------- pictures


def drawn_of(section: Section, with_curves: bool = True) -> Iterator[tuple[str, str, str, bytes]]:
    """The pictures of a part: title, legend, ending of the file's name, file."""
    if section.part.analysis is None and with_curves:
        yield from curves(section)
    for one in pictures(section.found, section.part):
        yield one.title or section.title, "", one.suffix, one.file


def curves(section: Section) -> Iterator[tuple[str, str, str, bytes]]:
    """Curves of all rows that share their columns' runs: a chart for each group of columns."""
    width = len(section.part.columns)
    groups: dict[tuple[str, ...], list[int]] = {}
    for place, column in enumerate(section.part.columns):
        if not (column.mean or column.over or column.minus or column.number):
            mine = [section.outcomes[row * width + place] for row in range(len(section.part.rows))]
            names = tuple("" if one.cell.settings is None else folder_of(one.cell.settings) for one in mine)
            if any(section.trained(one) for one in mine):
                groups.setdefault(names, []).append(place)
    for places in groups.values():
        columns = [section.part.columns[place] for place in places]
        view = "unseen" if all(column.read == "unseen" for column in columns) else "seen"
        series: list[Series] = []
        for row in range(len(section.part.rows)):
            runs = [one for one in section.trained(section.outcomes[row * width + places[0]]) if one.record.state == FINISHED]
            series += row_series(section.part, section.part.rows[row].name, row, [one.record for one in runs], view)
        if series:
            yield _chart(section, series, ", ".join(column.name for column in columns) if len(groups) > 1 else "", view)


def row_series(part: Part, label: str, style: int, records: Sequence[Record], view: str) -> list[Series]:
    """The validation curve with a band over seeds, and the test scores that count as points."""
    if not records:
        return []
    measure, found = part.score, []
    known = [one for one in records if measure in one.validation]
    if known:
        rounds = sorted(set.intersection(*(set(one.validation["rounds"]) for one in known)))
        values = {
            number: [100 * one.validation[measure][one.validation["rounds"].index(number)] for one in known] for number in rounds
        }
        means = [(float(number), statistics.fmean(many)) for number, many in values.items()]
        band = [
            (float(number), statistics.fmean(many) - statistics.stdev(many), statistics.fmean(many) + statistics.stdev(many))
            for number, many in values.items()
            if len(many) > 1
        ]
        found.append(Series(f"{label}, validation", style, means, band))
    last = [one for one in records if one.last_rounds]
    if last:
        numbers = sorted(set.intersection(*(set(one.last_rounds) for one in last)))
        for number in numbers:
            scores = [_test(one.rows_by_round()[number], measure, view) for one in last]
            found.append(Series(f"{label}, test, round {number}", style, [(float(number), statistics.fmean(scores))]))
    else:
        scores = [_test(one.rows(), measure, view) for one in records]
        place = statistics.fmean(one.selected_round or one.rounds for one in records)
        found.append(Series(f"{label}, test", style, [(place, statistics.fmean(scores))]))
    return found


def _test(rows: Any, measure: str, view: str) -> float:
    found = accuracy_table(rows, measure)
    return 100 * (statistics.fmean(found[view].values()) if found[view] else float(found["mean"]))


def _chart(section: Section, series: Sequence[Series], columns: str, view: str) -> tuple[str, str, str, bytes]:
    points = [point for one in series for point in one.points] + [
        (number, value) for one in series for number, low, high in one.band for value in (low, high)
    ]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    title = ", ".join(filter(None, (section.title, columns)))
    low = min(xs) - 1 if min(xs) == max(xs) else min(xs)
    axis = ticks(max(0.0, min(ys) - 0.5), min(100.0, max(ys) + 0.5))
    svg = line_chart(series, title, axis, lambda value: f"{value:.0f}", ("round", "percent"), (low, max(xs)))
    styles = {one.style: one.label.split(", ")[0] for one in series}
    legend = f"Test on {view} domains. Colours in this order: {', '.join(styles.values())}."
    return title, legend, ".svg", standalone(svg).encode()


# -------------------------------------------------------------------------------------------------------------- lists of runs


def further(records: Sequence[Record], used: set[str]) -> list[str]:
    """Runs that answer no cell: other options, other rounds."""
    groups: dict[str, list[Record]] = {}
    for one in records:
        if one.file not in used:
            groups.setdefault(one.identity, []).append(one)
    if not groups:
        return []
    rows = []
    for many in groups.values():
        first = many[0]
        tables = [accuracy_table(one.rows()) for one in many if one.state == FINISHED]
        means = [100 * float(each["mean"]) for each in tables]
        shown = (
            f"{statistics.fmean(means):.1f}" + (f" ± {statistics.stdev(means):.1f}" if len(means) > 1 else "")
            if means
            else "diverged"
        )
        rows.append([f"`{first.command}`".replace("|", "\\|"), ", ".join(str(one.seed) for one in many), shown])
    return ["## Further runs", "", "They answer no cell of a table.", "", table(("command", "seeds", "mean accuracy, %"), rows), ""]


def runs_table(records: Sequence[Record]) -> str:
    """Every run with its record, digest, commit and cost."""
    rows = []
    for one in records:
        hours = f"{float(one.cost['cpu_seconds']) / 3600:.2f}" if one.cost.get("cpu_seconds") else "not noted"
        digest = f"`{one.digest[:16]}`" if one.digest else f"diverged in round {one.rounds}"
        rows.append([f"[{one.identity}](runs/{one.file})", str(one.seed), digest, f"`{one.commit[:7]}`", hours])
    return table(("record", "seed", "digest", "commit", "core-hours"), rows)
