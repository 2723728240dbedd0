"""``polyfed ls`` and ``polyfed show``: lists and descriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from polyfed.cli.completion import complete_any, complete_kind
from polyfed.cli.options import argument, command, flag, shared
from polyfed.cli.output import View, console, print_footnotes, print_json, print_line, print_text, status
from polyfed.cli.tables import emit, print_pairs, print_table, styled
from polyfed.errors import same_name
from polyfed.settings import read_change
from polyfed.studies.report.words import EXPERIMENTS, LISTS
from polyfed.trust import NOTHING, code_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from polyfed.cli.tables import Columns

METHOD_NOTES = (
    "smallest batch: model's = the minimum of the model (2 with batch norm, otherwise 1).",
    "sampled clients: state ages = works, but clients that are not sampled keep old state.",
)
EXPERIMENT_NOTES = (
    "core-hours: all seeds of the cells that can be run, computed from the measured speed of the networks (docs/reproduce.md).",
    "laptop, reduced: core-hours of the smaller forms (polyfed reproduce NAME --form laptop).",
    "data here: data sets found in --root DIR, or in the folder POLYFED_DATA.",
)
METHOD_FACTS = {
    "needs\nbatch\nnorm": "needs_batch_norm",
    "keeps\nstate": "keeps_client_state",
    "smallest\nbatch": "smallest_batch",
    "sampled\nclients": "sampled_clients",
    "data-derived\nuploads": "data_derived_uploads",
}
DEFAULT_DATA = "digits-mini"


def _load_files(files: Iterable[str]) -> None:
    from polyfed.core.method import load_file

    trust = NOTHING.adding(code_in(files))
    for file in files:
        load_file(file, trust)


@command("ls", "polyfed ls methods")
@argument("kind", "[KIND]", f"One of: {', '.join(LISTS)}.", required=False, shell_complete=complete_kind)
@shared("load", "data root", "wide", "explain", "json")
def ls(kind: str | None, load: Sequence[str], root: str | None, wide: bool, explain: bool, as_json: bool) -> None:
    """List methods, data sets, models, partitions, losses, recipes or experiments."""
    view = View(wide, explain)
    if kind is None:
        kinds = [{"kind": name, "what": what} for name, what in LISTS.items()]
        emit(kinds, {"kind": "kind", "description": "what"}, {"kinds": list(LISTS)} if as_json else None)
        if not as_json:
            print_text("List one kind with polyfed ls KIND. Show details with polyfed show NAME.")
        return
    kind = same_name(kind, LISTS) or kind
    with status("Loading", as_json):
        _load_files(load)
        if kind == EXPERIMENTS:
            from polyfed.papers.costs import experiment_rows

            rows = experiment_rows(root)
        else:
            from polyfed.studies.report.catalogue import listed

            rows = listed(kind)
    if as_json:
        print_json({"kind": kind, "items": rows})
    elif kind == EXPERIMENTS:
        _print_experiments(rows, view)
    elif kind == "methods":
        short = {"True": "yes", "False": "no", "None": "model's"}
        facts = {
            column: lambda row, key=key: short.get(str(row.get(key, "?")), str(row.get(key, "?")))
            for column, key in METHOD_FACTS.items()
        }
        emit(rows, {"name": "name", "description": "summary", **facts}, None, view=view, optional=[[column] for column in facts])
        print_footnotes("Show details with polyfed show NAME.", METHOD_NOTES, view)
    else:
        emit(rows, {"name": "name", "description": "summary"}, None, view=view)


def _print_experiments(rows: Sequence[dict[str, Any]], view: View) -> None:
    from polyfed.papers.costs import here_words

    columns: Columns = {
        "name": "name",
        "title": "title",
        "data": lambda row: ", ".join(row["data"]),
        "core-hours": lambda row: _format_hours(row["core_hours_full"]),
        "laptop": lambda row: _format_hours(row["core_hours_laptop"]),
        "reduced": lambda row: _format_hours(row["core_hours_reduced"]),
        "data here": lambda row: here_words(dict(row)),
        "state": "state",
        "missing": lambda row: "; ".join(row["missing"]),
    }
    optional = [["laptop"], ["state"], ["data here"], ["core-hours"], ["data"], ["reduced"], ["missing"]]
    emit(rows, columns, None, view=view, numbers=("core-hours", "laptop", "reduced"), optional=optional)
    print_footnotes("core-hours: all seeds; laptop, reduced: smaller forms.", EXPERIMENT_NOTES, view)


def _format_hours(value: float | None) -> str:
    if value is None:
        return "-"
    return "< 0.1" if value < 0.05 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


@command(
    "show",
    'polyfed show "fedbn + agc(clip=1.28)"',
    "polyfed show fedbn --model resnet20",
    "polyfed show digits-mini",
    "polyfed show fedwon/table-1",
)
@argument(
    "name",
    "NAME",
    "Method expression, or name of a data set, model, partition, loss, recipe or experiment.",
    shell_complete=complete_any,
)
@click.option("--model", help="Model for the sharing plan. Default: the default model of the data set.")
@click.option("--data", help="Data set that defines the input shape and classes. Default: digits-mini.")
@flag("--privacy", help="Show everything that clients upload, and whether differential privacy covers it.")
@shared("set", "load", "wide", "json")
def show(
    name: str,
    model: str | None,
    data: str | None,
    privacy: bool,
    changes: Sequence[str],
    load: Sequence[str],
    wide: bool,
    as_json: bool,
) -> None:
    """Show the description, options and properties of a method, data set, model or recipe, and what a method sends."""
    from polyfed.papers.files import item_names

    item = same_name(name, item_names())
    with status("Loading", as_json):
        if item is not None and not privacy:
            from polyfed.papers.costs import experiment_description

            found = experiment_description(item)
        else:
            from polyfed.studies.report.catalogue import described

            _load_files(load)
            settings = {"data": data or DEFAULT_DATA, "model": model} | dict(read_change(text) for text in changes)
            needs_plan = model is not None or data is not None
            found = described(name, settings, privacy, needs_plan, others=item_names())
    if as_json:
        print_json(found)
    else:
        console().print(styled(found["name"], "bold"), styled(f"{found['kind']}\n", "dim"))
        printed = {"recipe": _print_recipe, "experiment": _print_experiment}.get(found["kind"], _print_thing)
        (_print_privacy if privacy else printed)(found, View(wide))


def _print_thing(found: Mapping[str, Any], view: View) -> None:
    """Print a method, data set, model, partition or loss."""
    from polyfed.studies.report.catalogue import reflowed
    from polyfed.text import write_option

    for part in found.get("parts", [found]):
        print_text(f"{reflowed(part['documentation'])}\n")
        rows = [
            (option["name"], "(required)" if option["required"] else write_option(option["default"]), option["meaning"])
            for option in part["options"]
        ]
        if rows:
            print_table(f"options of {part['name']}", ("option", "default", "description"), rows)
    if "facts" in found:
        texts = {"True": "yes", "False": "no", "None": "minimum of the model", "": "none"}
        facts = {name.replace("_", " "): texts.get(str(value), str(value)) for name, value in found["facts"].items()}
        print_pairs("properties", facts, columns=("property", "value"))
    if "parameters" in found:
        print_text(f"{found['parameters']:,} parameters on {found['on']}; output layer: {found['head']}\n")
        _print_entries("entries", found["entries"], ("kind", "entries", "bytes"))
    if found.get("plan"):
        columns = ("from_round", "kind", "travels", "entries", "bytes")
        _print_entries(f"sharing plan ({found['on']}; bytes per client, round and direction)", found["plan"], columns)
    elif "no_plan" in found:
        print_text(f"No sharing plan on {DEFAULT_DATA}: {found['no_plan']} Choose another run with --model, --data or --set.")


def _print_entries(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    cells = [[f"{row[column]:,}" if isinstance(row[column], int) else str(row[column]) for column in columns] for row in rows]
    names = [{"travels": "sharing"}.get(column, column.replace("_", " ")) for column in columns]
    print_table(title, names, cells, numbers=("from round", "entries", "bytes"))


def _print_privacy(found: Mapping[str, Any], view: View) -> None:
    if "epsilon" not in found:
        print_text("The method adds no noise, so differential privacy does not cover any upload.\n")
    else:
        print_text(
            f"Differential privacy for {found['protects']}, epsilon {found['epsilon']:g}, delta {found['delta']:g}; "
            f"noise at the {found['noise_at']}, from the {found['noise_from']}.\n"
        )
    columns: Columns = {
        "upload": "what",
        "sent by": lambda row: row["part"] or "every run",
        "when": "when",
        "granularity": "granularity",
        "covered": lambda row: "yes" if row["covered"] else "no",
        "reason": "why",
    }
    title = f"uploads of a client ({found['on']})" if "on" in found else "uploads of a client"
    emit(found["leaves"], columns, None, title, view, optional=[["covered"], ["reason"], ["when"], ["granularity"], ["sent by"]])
    if "no_plan" in found:
        print_text(f"Entries are not listed separately, since there is no sharing plan: {found['no_plan']}")


def _print_recipe(found: Mapping[str, Any], view: View) -> None:
    for key, value in found["about"].items():
        print_text(str(value) if key == "title" else f"{key}: {value}")
    print_pairs("settings", found["settings"], view, ("setting", "value"))
    if found["methods"]:
        methods = {text: ", ".join(f"{key}={value}" for key, value in own.items()) for text, own in found["methods"].items()}
        print_pairs("methods", methods, view, ("method", "per-method settings"))
    if found["command"]:
        print_line(found["command"])


def _print_experiment(found: Mapping[str, Any], view: View) -> None:
    from polyfed.papers.costs import here_words

    print_text(f"{found['paper']}, {found['item']}: {found['title']}.")
    full, laptop, reduced = (
        "-" if found[f"core_hours_{form}"] is None else f"{found[f'core_hours_{form}']:,.1f}"
        for form in ("full", "laptop", "reduced")
    )
    here = here_words(dict(found))
    facts = {
        "claim": found["claim"],
        "data": ", ".join(found["data"]),
        "data here": "no (--root DIR, or POLYFED_DATA)" if here == "no" else here,
        "runs": f"{found['runs']}, {full} core-hours; laptop {laptop}; reduced {reduced}",
        "state": "; ".join([found["state"], *found["missing"]]),
        "note": found["note"],
    }
    print_pairs("", {key: value for key, value in facts.items() if value}, view)
    parts = [(part["name"], ", ".join(part["methods"]), ", ".join(part["columns"])) for part in found["parts"]]
    print_table("contents", ("part", "methods", "columns"), parts, view)
    print_line(found["command"])
