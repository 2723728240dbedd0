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

from polyfed.errors import RunFolderError
from polyfed.runs.folder.atomic_write import write_atomically
from polyfed.runs.scores import warnings_over_seeds
from polyfed.settings import AUTO
from polyfed.studies.report import pictures, sections
from polyfed.studies.report.charts import swatch
from polyfed.studies.report.commands import compare_command, pieces, report_command
from polyfed.studies.report.gather import gather
from polyfed.studies.report.pictures import NONE, analyses_of, chosen_kinds, grid_of, images_of
from polyfed.studies.report.run_record import run_folders
from polyfed.studies.report.run_set import RunSet
from polyfed.studies.report.verdict import notices, verdict_of
from polyfed.tasks.known import in_percent
from polyfed.tasks.metrics import MEASURES

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
    return write_report(run_folders(named), out, metric, pictures, sections.searches_in(named), analyses)


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

    sets = [found.headed(metric) for found in gather(runs)]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["together"] = _together
    labels = dict.fromkeys(row.method for found in sets for row in found.rows)
    styles = {label: number for number, label in enumerate(labels)}  # the same throughout the page
    library, script = ((PAGE / name).read_text() for name in (f"{LIBRARY}.js", SCRIPT))
    curves = [_interactive_values(found, styles) for found in sets]
    return environment.get_template(TEMPLATE).render(
        title=_title_of(sets),
        groups=[_values(found, styles, metric, with_pictures, analyses) for found in sets],
        grid=grid_of(sets, analyses),
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


def _interactive_values(runs: RunSet, styles: Mapping[str, int]) -> dict[str, Any]:
    """What the script of the page draws."""
    shown = in_percent(runs.task)
    return {
        "labels": [row.method for row in runs.rows],
        "styles": [styles[row.method] for row in runs.rows],
        "words": {name: MEASURES[name] for name in shown},
        "views": pictures.curve_data(runs, [runs.measure, *(name for name in shown if name != runs.measure)]),
    }


def _title_of(sets: Sequence[RunSet]) -> str:
    """What the page is about, in a few words."""
    methods = list(dict.fromkeys(row.method for runs in sets for row in runs.rows))
    about = ", ".join(methods) if len(methods) <= 3 and sum(map(len, methods)) <= 60 else f"{len(methods)} methods"
    return f"{about} on {' / '.join(dict.fromkeys(runs.name for runs in sets))}"


def _values(runs: RunSet, styles: Mapping[str, int], metric: str, with_pictures: bool | None, analyses: str) -> dict[str, Any]:
    """Everything the template shows of one set of runs."""
    verdicts = [verdict for view in runs.views if (verdict := verdict_of(runs, view)) is not None]
    sentences: dict[str, list[str]] = {}
    for row in runs.rows:
        sentences.setdefault(sections.uploads_beyond_entries(row), []).append(row.method)
    chosen = runs.headline(metric)
    tables = [
        table
        for measure in dict.fromkeys([runs.measure, *in_percent(runs.task)])
        for view in runs.views
        if (table := sections.table(runs.by(measure), view, styles)) is not None
        and any(cell["text"] != sections.NOT_SCORED for row in table["rows"] for cell in row["cells"])
    ]
    measures = dict.fromkeys(table["measure"] for table in tables)
    parts = [part for row in runs.rows for run in sorted(row.records, key=lambda run: run.seed) for part in run.folders]
    return {
        "name": runs.name,
        "source": runs.source,
        "left_out": runs.left_out,
        "measure": runs.measure,
        "measures": [(measure, MEASURES[measure]) for measure in measures],
        "metric_reason": chosen.reason if chosen.measure != "accuracy" and metric == AUTO else "",
        # A sentence for each method that does no better than always giving the same answer, in some of its runs.
        "warnings": {
            row.method: text
            for row in runs.rows
            for text in warnings_over_seeds({run.seed: run.domains for run in row.counted}, row.method)
        },
        "nobody": runs.task.baseline,
        "notices": notices(runs),
        "headlines": [{"words": one, "differences": sections.difference_rows(one)} for one in verdicts],
        "tables": tables,
        "legend": [(row.method, swatch(styles[row.method])) for row in runs.rows],
        "curves": [found for view in runs.views if (found := pictures.curves(runs, view, styles)) is not None],
        "interactive": bool(pictures.curve_data(runs, [runs.measure])),
        "losses": pictures.loss_charts(runs, styles),
        "confusion": pictures.confusion_maps(runs),
        "analyses": analyses_of(runs, analyses),
        "pictures": images_of(runs, with_pictures),
        "traffic": pictures.traffic(runs),
        "traffic_kinds": pictures.traffic_kinds(runs),
        "scatter": pictures.accuracy_against_bytes(runs, styles),
        "costs": [sections.cost_row(row, styles) for row in runs.rows],
        "against_reference": sections.against_reference(runs),
        "has_newcomer": any(row.total_bytes("newcomer") for row in runs.rows),
        "byte_tables": [(row.method, sections.byte_table(row)) for row in runs.rows],
        "travel": sections.travel_matrix(runs),
        "uploads": [(labels, sentence) for sentence, labels in sentences.items()],
        "outside_training": sections.outside_training(runs.rows),
        "compare": None if (one := compare_command(parts, runs.left_out)) is None else pieces(one),
        "runs": [sections.provenance(part) for part in parts],
    }


def _together(text: str) -> str:
    """A text in which no line ends between a number and its unit."""
    return re.sub(r"(\d) (?=(?:%|[kMG]?B\b))", "\\1\u00a0", text)


def _version() -> str:
    try:
        return importlib.metadata.version("polyfed")
    except importlib.metadata.PackageNotFoundError:
        return ""
