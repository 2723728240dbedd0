"""One self-contained page from run folders: who won, where, by how much and how surely; what it costs; why; how to run it again.

``page/`` holds the template, its script, and uPlot (MIT licence), which draws the charts that can be hovered over and zoomed.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.core.metrics import MEASURES
from polyfed.core.tasks.known import in_percent
from polyfed.errors import RunFolderError
from polyfed.runs.folder.atomic_write import write_atomically
from polyfed.runs.headline import warnings_over_seeds
from polyfed.settings import AUTO
from polyfed.studies.report import pictures, sections
from polyfed.studies.report.analysis_sections import NONE, chosen_kinds, grid_of, sections_of
from polyfed.studies.report.charts import swatch
from polyfed.studies.report.commands import compare_command, pieces, report_command
from polyfed.studies.report.data_pictures import pictures_of
from polyfed.studies.report.gather import MEAN, VIEWS, Group, gather, run_folders
from polyfed.studies.report.searches import searches_in
from polyfed.studies.report.verdict import headline, notices

PAGE = Path(__file__).resolve().parent / "page"
TEMPLATE, SCRIPT = "report.html.j2", "report.js"
LIBRARY = "uplot-1.6.32.min"
LIBRARY_NOTICE = "uPlot 1.6.32 (c) 2022 Leon Sorokin, MIT licence."


def report_on(
    runs: str | Path | Sequence[str | Path],
    out: str | Path,
    metric: str = AUTO,
    pictures: bool | None = None,
    analyses: str = AUTO,
) -> Path:
    """What ``polyfed.report`` does."""
    named = [runs] if isinstance(runs, str | Path) else runs
    chosen_kinds(analyses)  # a wrong name is refused before anything is read
    return write_report(run_folders(named), out, metric, pictures, searches_in(named), analyses)


def write_report(
    runs: Sequence[str | Path],
    out: str | Path,
    metric: str = AUTO,
    pictures: bool | None = False,
    searches: Sequence[Mapping[str, Any]] = (),
    analyses: str = NONE,
) -> Path:
    """Write the report of one or several run folders as one HTML file.

    Args:
        runs: run folders; those of one method that differ in their seed are put together, those on other data are kept apart.
        out: the file to write; it needs no other file and no network.
        metric: the measure that heads the tables.
        pictures: whether images of the data are shown; None: where this account made the runs, and the data are here.
        searches: the searches that chose the settings of these runs.
        analyses: auto (those that need no data), all, none, or names of kinds with commas between them.

    Raises:
        RunFolderError: no run was given, a folder is no run, or the file cannot be written.
    """
    path = Path(out)
    if not path.name:
        raise RunFolderError(f"The report needs a file to be written to, found {str(out)!r}. Name one: -o report.html")
    page = render(runs, out, metric, pictures, searches, analyses)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page.encode("utf-8", "backslashreplace"))  # names of files need not be text
    except OSError as error:
        raise RunFolderError(
            f"Cannot write the report to {path}: {error.strerror or error}. Choose another file with -o."
        ) from error
    return path


def render(
    runs: Sequence[str | Path],
    out: str | Path = "report.html",
    metric: str = AUTO,
    with_pictures: bool | None = False,
    searches: Sequence[Mapping[str, Any]] = (),
    analyses: str = NONE,
) -> str:
    """The page as text."""
    import jinja2
    from markupsafe import Markup

    groups = [headed(group, metric) for group in gather(runs)]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["together"] = together
    styles = styles_of(groups)
    library, script = ((PAGE / name).read_text() for name in (f"{LIBRARY}.js", SCRIPT))
    curves = [interactive_values(group, styles) for group in groups]
    return environment.get_template(TEMPLATE).render(
        title=title_of(groups),
        groups=[group_values(group, styles, metric, with_pictures, analyses) for group in groups],
        grid=grid_of(groups, analyses),
        searches=searches,
        version=_version(),
        report_command=pieces(report_command(runs, out)),
        library=Markup(library),
        library_style=Markup((PAGE / f"{LIBRARY}.css").read_text()),
        library_notice=LIBRARY_NOTICE,
        script=Markup(script),
        script_hashes=Markup(" ".join(f"'sha256-{_hash(text)}'" for text in (library, script))),
        curves_json=Markup(_inside_script(curves)),
    )


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _inside_script(tree: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever names it holds."""
    text = json.dumps(tree, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def headed(group: Group, metric: str) -> Group:
    """The group by the measure that heads its tables; a measure that no run has falls back to the usual one."""
    chosen = group.headline(metric).measure
    looked_at = group.by(chosen)
    scored = any(entry.finals(view, MEAN) for view in VIEWS for entry in looked_at.entries if entry.runs)
    return looked_at if scored else group


def interactive_values(group: Group, styles: Mapping[str, int]) -> dict[str, Any]:
    """What the script of the page draws."""
    shown = in_percent(group.task)
    return {
        "labels": [entry.label for entry in group.entries],
        "styles": [styles[entry.label] for entry in group.entries],
        "words": {name: MEASURES[name] for name in shown},
        "views": pictures.curve_data(group, [group.measure, *(name for name in shown if name != group.measure)]),
    }


def title_of(groups: Sequence[Group]) -> str:
    """What the page is about, in a few words."""
    methods = list(dict.fromkeys(entry.label for group in groups for entry in group.entries))
    about = ", ".join(methods) if len(methods) <= 3 and sum(map(len, methods)) <= 60 else f"{len(methods)} methods"
    return f"{about} on {' / '.join(dict.fromkeys(group.name for group in groups))}"


def styles_of(groups: Sequence[Group]) -> dict[str, int]:
    """A style for each method, the same throughout the page."""
    labels = dict.fromkeys(entry.label for group in groups for entry in group.entries)
    return {label: number for number, label in enumerate(labels)}


def group_values(
    group: Group, styles: Mapping[str, int], metric: str = AUTO, with_pictures: bool | None = None, analyses: str = NONE
) -> dict[str, Any]:
    """Everything the template shows of one group."""
    headlines = [words for view in VIEWS if (words := headline(group, view)) is not None]
    sentences: dict[str, list[str]] = {}
    for entry in group.entries:
        sentences.setdefault(sections.uploads_beyond_entries(entry), []).append(entry.label)
    chosen = group.headline(metric)
    tables = [
        table
        for measure in dict.fromkeys([group.measure, *in_percent(group.task)])
        for view in VIEWS
        if (table := sections.table(group.by(measure), view, styles)) is not None
        and any(cell["text"] != "–" for row in table["rows"] for cell in row["cells"])
    ]
    measures = list(dict.fromkeys(table["measure"] for table in tables))
    parts = [part for entry in group.entries for run in sorted(entry.runs, key=lambda run: run.seed) for part in run.folders]
    return {
        "name": group.name,
        "source": group.source,
        "left_out": group.left_out,
        "measure": group.measure,
        "measures": [(measure, MEASURES[measure]) for measure in measures],
        "metric_reason": chosen.reason if chosen.measure != "accuracy" and metric == AUTO else "",
        "warnings": no_better_than_one_class(group),
        "nobody": group.task.nobody,
        "notices": notices(group),
        "headlines": [{"words": one, "differences": sections.difference_rows(one)} for one in headlines],
        "tables": tables,
        "legend": [(entry.label, swatch(styles[entry.label])) for entry in group.entries],
        "curves": [found for view in VIEWS if (found := pictures.curves(group, view, styles)) is not None],
        "interactive": bool(pictures.curve_data(group, [group.measure])),
        "losses": pictures.loss_charts(group, styles),
        "confusion": pictures.confusion_maps(group),
        "analyses": sections_of(group, analyses),
        "pictures": pictures_of(group, with_pictures),
        "traffic": pictures.traffic(group),
        "traffic_kinds": pictures.traffic_kinds(group),
        "scatter": pictures.accuracy_against_bytes(group, styles),
        "costs": [sections.cost_row(entry, styles) for entry in group.entries],
        "against_reference": sections.against_reference(group),
        "has_newcomer": any(sections.both_ways(entry, "newcomer") for entry in group.entries),
        "byte_tables": [(entry.label, sections.byte_table(entry)) for entry in group.entries],
        "travel": sections.travel_matrix(group),
        "uploads": [(labels, sentence) for sentence, labels in sentences.items()],
        "outside_training": sections.outside_training(group.entries),
        "compare": None if (one := compare_command(parts, group.left_out)) is None else pieces(one),
        "runs": [sections.provenance(part) for part in parts],
    }


def no_better_than_one_class(group: Group) -> dict[str, str]:
    """A sentence for each method that does no better than always giving the same answer, in some of its runs."""
    by_entry = ({run.seed: run.domains for run in entry.counted} for entry in group.entries)
    return {
        entry.label: text
        for entry, domains in zip(group.entries, by_entry, strict=True)
        for text in warnings_over_seeds(domains, entry.label)
    }


def together(text: str) -> str:
    """A text in which no line ends between a number and its unit."""
    return re.sub(r"(\d) (?=(?:%|[kMG]?B\b))", "\\1\u00a0", text)


def _version() -> str:
    try:
        return importlib.metadata.version("polyfed")
    except importlib.metadata.PackageNotFoundError:
        return ""
