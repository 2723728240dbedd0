"""One self-contained page from run folders: who won and how surely, curves, cost, what travelled, how to run it again."""

from __future__ import annotations

import importlib.metadata
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.errors import RunFolderError
from polyfed.report import pictures, sections
from polyfed.report.charts import swatch
from polyfed.report.gather import VIEWS, Arena, gather
from polyfed.report.verdict import headline, notices

HOME = Path(__file__).resolve().parent
TEMPLATE = "template.html.j2"


def write_report(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Write the report of one or several run folders as one HTML file.

    Args:
        runs: run folders; those of one method that differ in their seed are put together, those on other data are kept apart.
        out: the file to write; it needs nothing beside it and no network.

    Raises:
        RunFolderError: no run was given, a folder is no run, or the file cannot be written.
    """
    page = render(runs, out)
    path = Path(out)
    beside = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(page, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise RunFolderError(
            f"Cannot write the report to {path}: {error.strerror or error}. Choose another file with -o."
        ) from error
    return path


def render(runs: Sequence[str | Path], out: str | Path = "report.html") -> str:
    """The page as text."""
    import jinja2

    arenas = gather(runs)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HOME),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(
        title=title_of(arenas),
        arenas=[arena_values(arena, styles_of(arenas)) for arena in arenas],
        version=_version(),
        report_command=shlex.join(["polyfed", "report", *dict.fromkeys(map(str, runs)), "-o", str(out)]),
    )


def title_of(arenas: Sequence[Arena]) -> str:
    """What the page is about."""
    methods = list(dict.fromkeys(c.label for arena in arenas for c in arena.contestants))
    about = ", ".join(methods) if len(methods) <= 3 else f"{len(methods)} methods"
    return f"{about} on {' / '.join(dict.fromkeys(arena.name for arena in arenas))}"


def styles_of(arenas: Sequence[Arena]) -> dict[str, int]:
    """A style for each method, the same throughout the page."""
    labels = dict.fromkeys(c.label for arena in arenas for c in arena.contestants)
    return {label: number for number, label in enumerate(labels)}


def arena_values(arena: Arena, styles: Mapping[str, int]) -> dict[str, Any]:
    """Everything the template shows of one arena."""
    told = [one for view in VIEWS if (one := headline(arena, view)) is not None]
    sentences: dict[str, list[str]] = {}
    for contestant in arena.contestants:
        sentences.setdefault(sections.leaves(contestant), []).append(contestant.label)
    return {
        "name": arena.name,
        "source": arena.source,
        "notices": notices(arena),
        "headlines": [{"told": words, "duels": sections.duel_rows(words)} for words in told],
        "tables": [found for view in VIEWS if (found := sections.table(arena, view, styles)) is not None],
        "legend": [(c.label, swatch(styles[c.label])) for c in arena.contestants],
        "curves": [found for view in VIEWS if (found := pictures.curves(arena, view, styles)) is not None],
        "losses": pictures.loss_charts(arena, styles),
        "traffic": pictures.traffic(arena),
        "traffic_kinds": pictures.traffic_kinds(arena),
        "scatter": pictures.accuracy_against_bytes(arena, styles),
        "costs": [sections.cost_row(c, styles) for c in arena.contestants],
        "beside": sections.beside_reference(arena),
        "has_newcomer": any(sections.both_ways(c, "newcomer") for c in arena.contestants),
        "byte_tables": [(c.label, sections.byte_table(c)) for c in arena.contestants],
        "plans": [(c.label, sections.plan_rows(c.first)) for c in arena.contestants],
        "leaves": [(labels, sentence) for sentence, labels in sentences.items()],
        "beside_training": sections.beside_training(arena.contestants),
        "runs": [sections.provenance(run) for c in arena.contestants for run in sorted(c.runs, key=lambda run: run.seed)],
    }


def _version() -> str:
    try:
        return importlib.metadata.version("polyfed")
    except importlib.metadata.PackageNotFoundError:
        return ""
