"""Write a self-contained HTML report of run folders; ``page/`` contains its template and script, and uPlot for interactive charts."""

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
from polyfed.studies.report.run_record import SWEEP_FILE, run_folders
from polyfed.studies.report.run_set import RunSet
from polyfed.studies.report.verdict import notices, verdicts_of
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
    allow_unfinished: bool = False,
) -> Path:
    """Write the report of run folders, of the runs in other folders, and of searches; see ``polyfed.report``."""
    paths = [runs] if isinstance(runs, str | Path) else runs
    chosen_kinds(analyses)  # rejects invalid names before reading any folder
    searches = [sections.read_search(Path(path)) for path in paths if (Path(path) / SWEEP_FILE).is_file()]
    return write_report(run_folders(paths), out, metric, pictures, searches, analyses, allow_unfinished)


def write_report(
    runs: Sequence[str | Path],
    out: str | Path,
    metric: str = AUTO,
    pictures: bool | None = False,
    searches: Sequence[Mapping[str, Any]] = (),
    analyses: str = NONE,
    allow_unfinished: bool = False,
) -> Path:
    """Write the report of run folders as one HTML file.

    Args:
        runs: Run folders. Runs that differ only in the seed form one row; runs on different data form separate groups.
        out: Path of the HTML file, which needs no other file and no network.
        metric: Primary metric.
        pictures: Show images of the data. By default, only if this account made the runs and the data exists on this machine.
        searches: Hyperparameter searches that chose the settings of these runs.
        analyses: auto (analyses that need no data), all, none, or comma-separated names.
        allow_unfinished: Use the newest good state of runs whose final state is damaged.

    Raises:
        RunFolderError: If there are no runs, a folder is not a run folder, a final state is damaged, or the file cannot be written.
    """
    path = Path(out)
    if not path.name:
        raise RunFolderError(f"The report must be written to a file, but -o is {str(out)!r}. Pass a file name: -o report.html")
    page = render(runs, out, metric, pictures, searches, analyses, allow_unfinished)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page.encode("utf-8", "backslashreplace"))  # file names can contain invalid characters
    except OSError as error:
        problem = error.strerror or error
        raise RunFolderError(f"Cannot write the report to {path}: {problem}. Choose another file with -o.") from error
    return path


def render(
    runs: Sequence[str | Path],
    out: str | Path = "report.html",
    metric: str = AUTO,
    with_pictures: bool | None = False,
    searches: Sequence[Mapping[str, Any]] = (),
    analyses: str = NONE,
    allow_unfinished: bool = False,
) -> str:
    """Return the report as HTML; see ``write_report`` for the arguments."""
    import jinja2
    from markupsafe import Markup

    sets = [found.headed(metric) for found in gather(runs, allow_damaged=allow_unfinished)]
    loader, undefined = jinja2.FileSystemLoader(PAGE), jinja2.StrictUndefined
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=undefined, trim_blocks=True, lstrip_blocks=True)
    # A line does not break between a number and its unit.
    environment.filters["together"] = lambda text: re.sub(r"(\d) (?=(?:%|[kMG]?B\b))", "\\1\u00a0", text)
    labels = list(dict.fromkeys(row.method for found in sets for row in found.rows))
    styles = {label: number for number, label in enumerate(labels)}  # the same throughout the page
    about = ", ".join(labels) if len(labels) <= 3 and sum(map(len, labels)) <= 60 else f"{len(labels)} methods"
    library, script = ((PAGE / name).read_text() for name in (f"{LIBRARY}.js", SCRIPT))
    curves = json.dumps([_interactive_values(found, styles) for found in sets], allow_nan=False, separators=(",", ":"))
    # Without these characters, no name can end the script element.
    curves = curves.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return environment.get_template(TEMPLATE).render(
        title=f"{about} on {' / '.join(dict.fromkeys(found.name for found in sets))}",
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
        curves_json=Markup(curves),
    )


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _interactive_values(runs: RunSet, styles: Mapping[str, int]) -> dict[str, Any]:
    shown = in_percent(runs.task)
    return {
        "labels": [row.method for row in runs.rows],
        "styles": [styles[row.method] for row in runs.rows],
        "words": {name: MEASURES[name] for name in shown},
        "views": pictures.curve_data(runs, [runs.measure, *(name for name in shown if name != runs.measure)]),
    }


def _values(runs: RunSet, styles: Mapping[str, int], metric: str, with_pictures: bool | None, analyses: str) -> dict[str, Any]:
    uploads: dict[str, list[str]] = {}
    for row in runs.rows:
        uploads.setdefault(sections.describe_uploads(row), []).append(row.method)
    chosen = runs.headline(metric)
    tables = [
        table
        for measure in dict.fromkeys([runs.measure, *in_percent(runs.task)])
        for view in runs.views
        if (table := sections.table(runs.by(measure), view)) is not None
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
        # Methods that are no better than a constant prediction in some of their runs.
        "warnings": {
            row.method: text
            for row in runs.rows
            for text in warnings_over_seeds({run.seed: run.domains for run in row.counted}, row.method)
        },
        "baseline_name": runs.task.baseline,
        "notices": notices(runs),
        "headlines": [{"verdict": one, "differences": sections.difference_rows(one)} for one in verdicts_of(runs)],
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
        "costs": [sections.cost_row(row) for row in runs.rows],
        "against_reference": sections.against_reference(runs),
        "has_newcomer": any(row.total_bytes("newcomer") for row in runs.rows),
        "byte_tables": [(row.method, sections.byte_table(row)) for row in runs.rows],
        "travel": sections.travel_matrix(runs),
        "uploads": [(labels, sentence) for sentence, labels in uploads.items()],
        "outside_training": sections.outside_training(runs.rows),
        "compare": None if (one := compare_command(parts, runs.left_out)) is None else pieces(one),
        "runs": [sections.provenance(part) for part in parts],
    }


def _version() -> str:
    try:
        return importlib.metadata.version("polyfed")
    except importlib.metadata.PackageNotFoundError:
        return ""
