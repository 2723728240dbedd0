"""``polyfed ls`` and ``polyfed show``: what there is, and one of it in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from polyfed.cli.completion import complete_any, complete_kind
from polyfed.cli.options import argument, command, flag, shared
from polyfed.cli.output import View, console, print_footnotes, print_json, print_line, say, status
from polyfed.cli.tables import emit, print_pairs, print_table, styled
from polyfed.errors import same_name
from polyfed.settings import read_change
from polyfed.studies.report.words import EXPERIMENTS, LISTS
from polyfed.trust import NOTHING, code_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from polyfed.cli.tables import Columns

METHOD_NOTES = (
    "smallest batch: model's = what the model allows (2 with batch norm, else 1).",
    "sampled clients: state ages = works, but the state of clients that sit out gets old.",
)
EXPERIMENT_NOTES = (
    "core-hours: all seeds of what can be run (not yet: of all there will be), by the measured speed of the networks (docs/reproduce.md).",
    "laptop, reduced: the same for the smaller forms (polyfed reproduce NAME --form laptop).",
    "data here: looked for in --root DIR, or in the folder that POLYFED_DATA names.",
)
FACTS_OF_METHODS = {
    "needs\nbatch\nnorm": "needs_batch_norm",
    "keeps\nstate": "keeps_client_state",
    "smallest\nbatch": "smallest_batch",
    "sampled\nclients": "sampled_clients",
    "what leaves\na client": "data_derived_uploads",
}
USUAL_DATA = "digits-mini"


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
        about = [{"kind": name, "what": what} for name, what in LISTS.items()]
        emit(about, {"kind": "kind", "what": "what"}, {"kinds": list(LISTS)} if as_json else None)
        if not as_json:
            say("polyfed ls KIND lists them; polyfed show NAME shows one in full.")
        return
    kind = same_name(kind, LISTS) or kind
    with status("Looking", as_json):
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
        facts = {head: lambda row, key=key: _fact_words(row.get(key, "?")) for head, key in FACTS_OF_METHODS.items()}
        emit(rows, {"name": "name", "what": "summary", **facts}, None, view=view, later=[[head] for head in facts])
        print_footnotes("polyfed show NAME shows one in full.", METHOD_NOTES, view)
    else:
        emit(rows, {"name": "name", "what": "summary"}, None, view=view)


def _fact_words(value: Any) -> str:
    """Return a fact of a method for a narrow column."""
    return {"True": "yes", "False": "no", "None": "model's"}.get(str(value), str(value))


def _print_experiments(rows: Sequence[dict[str, Any]], view: View) -> None:
    from polyfed.papers.costs import here_words

    columns: Columns = {
        "name": "name",
        "what": "title",
        "data": lambda row: ", ".join(row["data"]),
        "core-hours": lambda row: _hours(row["core_hours_full"]),
        "laptop": lambda row: _hours(row["core_hours_laptop"]),
        "reduced": lambda row: _hours(row["core_hours_reduced"]),
        "data here": lambda row: here_words(dict(row)),
        "state": "state",
        "missing": lambda row: "; ".join(row["missing"]),
    }
    later = [["laptop"], ["state"], ["data here"], ["core-hours"], ["data"], ["reduced"], ["missing"]]
    emit(rows, columns, None, view=view, numbers=("core-hours", "laptop", "reduced"), later=later)
    print_footnotes("core-hours of all seeds; laptop and reduced: the smaller forms (--form).", EXPERIMENT_NOTES, view)


def _hours(value: float | None) -> str:
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
    "A method (its text form works), data set, model, partition, loss, recipe or experiment.",
    shell_complete=complete_any,
)
@click.option("--model", help="Model whose plan is shown; default: the data set's own.")
@click.option("--data", help="Data set that gives the input shape and classes; default: digits-mini.")
@flag("--privacy", help="Everything that leaves a client, and whether differential privacy covers it.")
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
    """Show the idea, formula, reference, options and facts of something, and what travels."""
    from polyfed.papers.files import item_names

    item = same_name(name, item_names())
    with status("Looking", as_json):
        if item is not None and not privacy:
            from polyfed.papers.costs import experiment_description

            found = experiment_description(item)
        else:
            from polyfed.studies.report.catalogue import described

            _load_files(load)
            settings = {"data": data or USUAL_DATA, "model": model} | dict(read_change(text) for text in changes)
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
        say(f"{reflowed(part['documentation'])}\n")
        rows = [
            (option["name"], "(needed)" if option["required"] else write_option(option["default"]), option["meaning"])
            for option in part["options"]
        ]
        if rows:
            print_table(f"options of {part['name']}", ("option", "default", "meaning"), rows)
    if "facts" in found:
        words = {"True": "yes", "False": "no", "None": "what the model allows", "": "none worth naming"}
        facts = {name.replace("_", " "): words.get(str(value), str(value)) for name, value in found["facts"].items()}
        print_pairs("facts", facts, heads=("fact", "value"))
    if "parameters" in found:
        say(f"{found['parameters']:,} parameters on {found['on']}; head: {found['head']}\n")
        _print_entries("entries", found["entries"], ("kind", "entries", "bytes"))
    if found.get("plan"):
        columns = ("from_round", "kind", "travels", "entries", "bytes")
        _print_entries(f"what travels ({found['on']}; bytes per client and round, each way)", found["plan"], columns)
    elif "no_plan" in found:
        say(f"No plan of what travels on {USUAL_DATA}: {found['no_plan']} (--model, --data and --set choose another run.)")


def _print_entries(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    cells = [[f"{row[column]:,}" if isinstance(row[column], int) else str(row[column]) for column in columns] for row in rows]
    heads = [column.replace("_", " ") for column in columns]
    print_table(title, heads, cells, numbers=("from round", "entries", "bytes"))


def _print_privacy(found: Mapping[str, Any], view: View) -> None:
    if found["protects"] == "nobody":
        say("It adds no noise: nothing that leaves a client is covered by differential privacy.\n")
    else:
        say(
            f"It protects {found['protects']}, epsilon {found['epsilon']:g}, delta {found['delta']:g}; "
            f"noise at the {found['noise_at']}, from the {found['noise_from']}.\n"
        )
    columns: Columns = {
        "what leaves": "what",
        "sent by": lambda row: row["part"] or "every run",
        "when": "when",
        "made from": "granularity",
        "covered": lambda row: "yes" if row["covered"] else "no",
        "why": "why",
    }
    title = f"what leaves a client ({found['on']})" if "on" in found else "what leaves a client"
    emit(found["leaves"], columns, None, title, view, later=[["covered"], ["why"], ["when"], ["made from"], ["sent by"]])
    if "no_plan" in found:
        say(f"Entries are not told apart, since there is no plan: {found['no_plan']}")


def _print_recipe(found: Mapping[str, Any], view: View) -> None:
    for key, value in found["about"].items():
        say(str(value) if key == "title" else f"{key}: {value}")
    print_pairs("settings", found["settings"], view, ("setting", "value"))
    if found["methods"]:
        compared = {text: ", ".join(f"{key}={value}" for key, value in own.items()) for text, own in found["methods"].items()}
        print_pairs("methods", compared, view, ("method", "settings of its own"))
    if found["command"]:
        print_line(found["command"])


def _print_experiment(found: Mapping[str, Any], view: View) -> None:
    from polyfed.papers.costs import here_words

    say(f"{found['paper']}, {found['item']}: {found['title']}.")
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
    print_table("what it shows", ("part", "methods", "columns"), parts, view)
    print_line(found["command"])
