"""One self-contained page from run folders: who won and how surely, curves, cost, what travelled, how to run it again."""

from __future__ import annotations

import importlib.metadata
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.errors import RunFolderError
from polyfed.reports import pictures, sections
from polyfed.reports.charts import swatch
from polyfed.reports.gather import VIEWS, Group, gather, run_folders
from polyfed.reports.verdict import headline, notices
from polyfed.runs.atomic_write import write_atomically

HOME = Path(__file__).resolve().parent
TEMPLATE = "template.html.j2"


def report_on(runs: str | Path | Sequence[str | Path], out: str | Path) -> Path:
    """What ``polyfed.report`` does."""
    return write_report(run_folders([runs] if isinstance(runs, str | Path) else runs), out)


def write_report(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Write the report of one or several run folders as one HTML file.

    Args:
        runs: run folders; those of one method that differ in their seed are put together, those on other data are kept apart.
        out: the file to write; it needs no other file and no network.

    Raises:
        RunFolderError: no run was given, a folder is no run, or the file cannot be written.
    """
    path = Path(out)
    if not path.name:
        raise RunFolderError(f"The report needs a file to be written to, found {str(out)!r}. Name one: -o report.html")
    page = render(runs, out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page.encode("utf-8", "backslashreplace"))  # names of files need not be text
    except OSError as error:
        raise RunFolderError(
            f"Cannot write the report to {path}: {error.strerror or error}. Choose another file with -o."
        ) from error
    return path


def render(runs: Sequence[str | Path], out: str | Path = "report.html") -> str:
    """The page as text."""
    import jinja2

    groups = gather(runs)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HOME),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(
        title=title_of(groups),
        groups=[group_values(group, styles_of(groups)) for group in groups],
        version=_version(),
        report_command=shlex.join(["polyfed", "report", *dict.fromkeys(map(str, runs)), "-o", str(out)]),
    )


def title_of(groups: Sequence[Group]) -> str:
    """What the page is about."""
    methods = list(dict.fromkeys(entry.label for group in groups for entry in group.entries))
    about = ", ".join(methods) if len(methods) <= 3 else f"{len(methods)} methods"
    return f"{about} on {' / '.join(dict.fromkeys(group.name for group in groups))}"


def styles_of(groups: Sequence[Group]) -> dict[str, int]:
    """A style for each method, the same throughout the page."""
    labels = dict.fromkeys(entry.label for group in groups for entry in group.entries)
    return {label: number for number, label in enumerate(labels)}


def group_values(group: Group, styles: Mapping[str, int]) -> dict[str, Any]:
    """Everything the template shows of one group."""
    headlines = [words for view in VIEWS if (words := headline(group, view)) is not None]
    sentences: dict[str, list[str]] = {}
    for entry in group.entries:
        sentences.setdefault(sections.uploads_beyond_entries(entry), []).append(entry.label)
    return {
        "name": group.name,
        "source": group.source,
        "notices": notices(group),
        "headlines": [{"words": one, "differences": sections.difference_rows(one)} for one in headlines],
        "tables": [found for view in VIEWS if (found := sections.table(group, view, styles)) is not None],
        "legend": [(entry.label, swatch(styles[entry.label])) for entry in group.entries],
        "curves": [found for view in VIEWS if (found := pictures.curves(group, view, styles)) is not None],
        "losses": pictures.loss_charts(group, styles),
        "traffic": pictures.traffic(group),
        "traffic_kinds": pictures.traffic_kinds(group),
        "scatter": pictures.accuracy_against_bytes(group, styles),
        "costs": [sections.cost_row(entry, styles) for entry in group.entries],
        "against_reference": sections.against_reference(group),
        "has_newcomer": any(sections.both_ways(entry, "newcomer") for entry in group.entries),
        "byte_tables": [(entry.label, sections.byte_table(entry)) for entry in group.entries],
        "plans": [(entry.label, sections.plan_rows(entry.first)) for entry in group.entries],
        "uploads": [(labels, sentence) for sentence, labels in sentences.items()],
        "outside_training": sections.outside_training(group.entries),
        "runs": [sections.provenance(run) for entry in group.entries for run in sorted(entry.runs, key=lambda run: run.seed)],
    }


def _version() -> str:
    try:
        return importlib.metadata.version("polyfed")
    except importlib.metadata.PackageNotFoundError:
        return ""
