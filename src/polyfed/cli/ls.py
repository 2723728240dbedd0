"""``polyfed ls``: what there is."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from polyfed.cli.completion import complete_kind
from polyfed.cli.options import DataRoot, Explain, Json, Load, Wide
from polyfed.cli.output import View, busy, console, print_footnotes, print_json, print_table, table
from polyfed.errors import same_name
from polyfed.studies.report.kinds import EXPERIMENTS, LISTS

EXAMPLE = "Example: polyfed ls methods"
METHOD_COLUMNS = (
    "smallest batch: model's = what the model allows (2 with batch norm, else 1).",
    "sampled clients: state ages = works, but the state of clients that sit out gets old.",
)
EXPERIMENT_COLUMNS = (
    "core-hours: all seeds of what can be run (not yet: of all there will be), by the measured speed of the networks (docs/reproduce.md).",
    "laptop, reduced: the same for the smaller forms (polyfed reproduce NAME --form laptop).",
    "data here: looked for in --root DIR, or in the folder that POLYFED_DATA names.",
)


def load_files(files: list[str] | None) -> None:
    """Run users' files of methods."""
    from polyfed.core.load_methods import load_file
    from polyfed.trust import NOTHING, code_in

    for file in files or ():
        load_file(file, NOTHING.adding(code_in([file])))


def ls(
    kind: Annotated[
        str | None,
        typer.Argument(metavar="[KIND]", help=f"One of: {', '.join(LISTS)}.", show_default=False, autocompletion=complete_kind),
    ] = None,
    load: Load = None,
    root: DataRoot = None,
    wide: Wide = False,
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """List methods, data sets, models, partitions, losses, recipes or experiments."""
    from rich.markup import escape

    view = View(wide, explain)
    if kind is None:
        _list_kinds(as_json)
        return
    kind = same_name(kind, LISTS) or kind
    if kind == EXPERIMENTS:
        _list_experiments(root, as_json, view)
        return
    with busy("Looking", as_json):
        from polyfed.studies.report.catalogue import listed

        load_files(load)
        rows = listed(kind)
    if as_json:
        print_json({"kind": kind, "items": rows})
    elif kind == "methods":
        _print_methods(rows, view)
    else:
        shown = table(("name", "what"))
        for row in rows:
            shown.add_row(row["name"], escape(row["summary"]))
        print_table("", shown, view)


def _list_kinds(as_json: bool) -> None:
    if as_json:
        print_json({"kinds": list(LISTS)})
        return
    shown = table(("kind", "what"))
    for kind, about in LISTS.items():
        shown.add_row(kind, about)
    print_table("", shown)
    console().print("polyfed ls KIND lists them; polyfed show NAME shows one in full.")


def _list_experiments(root: str | None, as_json: bool, view: View) -> None:
    from rich.markup import escape

    with busy("Looking", as_json):
        from polyfed.papers.costs import experiment_rows, here_words

        rows = experiment_rows(root)
    if as_json:
        print_json({"kind": EXPERIMENTS, "items": rows})
        return
    heads = ("name", "what", "data", "core-hours", "laptop", "reduced", "data here", "state", "missing")
    shown = table(
        heads,
        ("core-hours", "laptop", "reduced"),
        [["laptop"], ["state"], ["data here"], ["core-hours"], ["data"], ["reduced"], ["missing"]],
    )
    for row in rows:
        hours = [_hours(row[key]) for key in ("core_hours_full", "core_hours_laptop", "core_hours_reduced")]
        texts = (row["state"], "; ".join(row["missing"]))
        shown.add_row(
            row["name"], escape(row["title"]), escape(", ".join(row["data"])), *hours, here_words(row), *map(escape, texts)
        )
    print_table("", shown, view)
    print_footnotes("core-hours of all seeds; laptop and reduced: the smaller forms (--form).", EXPERIMENT_COLUMNS, view)


def _hours(value: float | None) -> str:
    if value is None:
        return "-"
    return "< 0.1" if value < 0.05 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _print_methods(rows: list[dict[str, Any]], view: View) -> None:
    from rich.markup import escape

    facts = ("needs\nbatch\nnorm", "keeps\nstate", "smallest\nbatch", "sampled\nclients", "what leaves\na client")
    shown = table(("name", "what", *facts), later=[[fact] for fact in facts])
    for row in rows:
        if "needs_batch_norm" in row:
            smallest = row["smallest_batch"] or "model's"
            cells: tuple[str, ...] = (
                _yes(row["needs_batch_norm"]),
                _yes(row["keeps_client_state"]),
                str(smallest),
                row["sampled_clients"],
                row["data_derived_uploads"],
            )
        else:
            cells = ("?",) * len(facts)
        shown.add_row(row["name"], escape(row["summary"]), *map(escape, cells))
    print_table("", shown, view)
    print_footnotes("polyfed show NAME shows one in full.", METHOD_COLUMNS, view)


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"
