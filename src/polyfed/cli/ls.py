"""``polyfed ls``: what there is."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from polyfed.cli.options import DataRoot, Json, Load
from polyfed.cli.output import busy, console, print_json, table
from polyfed.errors import same_name
from polyfed.reports.kinds import EXPERIMENTS, LISTS

EXAMPLE = "Example: polyfed ls methods"


def load_files(files: list[str] | None) -> None:
    """Run users' files of methods."""
    from polyfed.core.code_gate import allow, code_in
    from polyfed.core.load_methods import load_file

    allow(code_in(files or ()))
    for file in files or ():
        load_file(file)


def ls(
    kind: Annotated[str | None, typer.Argument(metavar="[KIND]", help=f"One of: {', '.join(LISTS)}.", show_default=False)] = None,
    load: Load = None,
    root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """List methods, data sets, models, partitions, losses, recipes or experiments."""
    from rich.markup import escape

    if kind is None:
        _list_kinds(as_json)
        return
    kind = same_name(kind, LISTS) or kind
    if kind == EXPERIMENTS:
        _list_experiments(root, as_json)
        return
    with busy("Looking", as_json):
        from polyfed.reports.catalogue import listed

        load_files(load)
        rows = listed(kind)
    if as_json:
        print_json({"kind": kind, "items": rows})
    elif kind == "methods":
        _print_methods(rows)
    else:
        shown = table(("name", "what"))
        for row in rows:
            shown.add_row(row["name"], escape(row["summary"]))
        console().print(shown)


def _list_kinds(as_json: bool) -> None:
    if as_json:
        print_json({"kinds": list(LISTS)})
        return
    shown = table(("kind", "what"))
    for kind, about in LISTS.items():
        shown.add_row(kind, about)
    console().print(shown)
    console().print("polyfed ls KIND lists them; polyfed show NAME shows one in full.")


def _list_experiments(root: str | None, as_json: bool) -> None:
    from rich.markup import escape

    with busy("Looking", as_json):
        from polyfed.experiments.listing import experiment_rows

        rows = experiment_rows(root)
    if as_json:
        print_json({"kind": EXPERIMENTS, "items": rows})
        return
    shown = table(("name", "what", "data", "core-hours", "reduced", "data here", "state"), ("core-hours", "reduced"))
    shown.columns[0].no_wrap = True
    for row in rows:
        hours = [_hours(row[key]) for key in ("core_hours_full", "core_hours_reduced")]
        state = row["state"] + (f": {'; '.join(row['missing'])}" if row["missing"] else "")
        shown.add_row(
            row["name"], escape(row["title"]), escape(", ".join(row["data"])), *hours, _yes(row["data_here"]), escape(state)
        )
    console().print(shown)
    console().print(
        "[dim]core-hours: all seeds of what can be run (not yet: of all there will be), by the measured speed of the networks (docs/reproduce.md). "
        "data here: looked for in --root DIR, or in the folder that POLYFED_DATA names.[/dim]"
    )


def _hours(value: float | None) -> str:
    if value is None:
        return "-"
    return "< 0.1" if value < 0.05 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _print_methods(rows: list[dict[str, Any]]) -> None:
    from rich.markup import escape

    shown = table(
        ("name", "what", "needs\nbatch\nnorm", "keeps\nstate", "smallest\nbatch", "sampled\nclients", "what leaves\na client")
    )
    shown.columns[0].no_wrap = True
    for row in rows:
        if "needs_batch_norm" in row:
            smallest = row["smallest_batch"] or "model's"
            facts = (
                _yes(row["needs_batch_norm"]),
                _yes(row["keeps_client_state"]),
                str(smallest),
                row["sampled_clients"],
                row["data_derived_uploads"],
            )
        else:
            facts = ("?",) * 5
        shown.add_row(row["name"], escape(row["summary"]), *map(escape, facts))
    console().print(shown)
    console().print(
        "[dim]smallest batch: model's = what the model allows (2 with batch norm, else 1). "
        "sampled clients: state ages = works, but the state of clients that sit out gets old.[/dim]"
    )


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"
