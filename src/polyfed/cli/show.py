"""``polyfed show``: one method, data set, model, partition, loss, recipe or experiment in full."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.cli.completion import complete_any
from polyfed.cli.ls import load_files
from polyfed.cli.options import Changes, Json, Load, Wide
from polyfed.cli.output import View, busy, console, print_json, print_table, table
from polyfed.cli.show_file import file_called, file_names, print_file
from polyfed.errors import PolyfedError, SettingError, UnknownName, nearest
from polyfed.settings import read_change
from polyfed.studies.report.docstrings import options_of, reflowed, text_of
from polyfed.studies.report.kinds import KINDS

if TYPE_CHECKING:
    from polyfed.core.registry import Recorded

EXAMPLE = (
    'Examples:\n\npolyfed show "fedbn + agc(clip=1.28)"\n\npolyfed show fedbn --model resnet20\n\n'
    "polyfed show digits-mini\n\npolyfed show fedwon/table-1"
)
GIVEN_BY_RUN = {
    "methods": (),
    "data": ("root",),
    "models": ("classes", "input_shape"),
    "partitions": ("dataset", "seed"),
    "losses": ("class_counts",),
}
SINGULAR = {"methods": "method", "data": "data set", "models": "model", "partitions": "partition", "losses": "loss"}
USUAL_DATA = "digits-mini"


def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A method (its text form works), data set, model, partition, loss, recipe or experiment.",
            autocompletion=complete_any,
        ),
    ],
    model: Annotated[str | None, typer.Option("--model", help="Model whose plan is shown; default: the data set's own.")] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="Data set that gives the input shape and classes; default: digits-mini.")
    ] = None,
    privacy: Annotated[
        bool, typer.Option("--privacy", help="Everything that leaves a client, and whether differential privacy covers it.")
    ] = False,
    changes: Changes = None,
    load: Load = None,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Show the idea, formula, reference, options and facts of something, and what travels."""
    file = file_called(name)
    if file is not None and not privacy:
        print_file(file, as_json, View(wide))
        return
    with busy("Looking", as_json):
        from polyfed.models.model_text import as_call, lacks_options
        from polyfed.studies.report.catalogue import written

        load_files(load)
        name = as_call(name)
        kind, record = found_as(name)
    found: dict[str, Any] = {"kind": SINGULAR[kind], "name": written(kind, record.name)}
    settings = {"data": data or USUAL_DATA, "model": model} | dict(read_change(text) for text in changes or ())
    asked_for_plan = model is not None or data is not None
    if privacy and kind != "methods":
        raise SettingError(f"--privacy is about methods, and {name} is a {SINGULAR[kind]}. Leave it out, or name a method.")
    if privacy:
        found |= privacy_json(name, settings, asked_for_plan)
    elif kind == "methods":
        found |= method_json(name, settings, asked_for_plan)
    else:
        found |= {"documentation": text_of(record.doc), "options": options_of(record.signature, record.doc, GIVEN_BY_RUN[kind])}
        found |= model_json(name, settings) if kind == "models" and not lacks_options(name) else {}
    if as_json:
        print_json(found)
    else:
        _print(found, View(wide))


def found_as(name: str) -> tuple[str, Recorded[Any]]:
    """The kind of thing a name stands for; a sum is a method."""
    from polyfed.studies.report.catalogue import registry_of, written
    from polyfed.text import read_call, read_sum

    call = read_sum(name)[0] if "+" in name else read_call(name)
    first = call.spelled or call.name
    for kind in KINDS[:1] if "+" in name else KINDS:
        registry = registry_of(kind)
        if first in registry:
            return kind, registry.find(first)
    known = [written(kind, known) for kind in KINDS for known in registry_of(kind).names()]
    raise UnknownName(f"Nothing is called {first!r}. {nearest(first.lower(), [*known, *file_names()])} See polyfed ls.")


def method_json(text: str, settings: dict[str, Any], asked_for_plan: bool) -> dict[str, Any]:
    """All about a method: its parts, its facts, and the plan of what travels on a model."""
    from polyfed.core.method import methods, parse
    from polyfed.studies.report.catalogue import fact_values

    method = parse(text)
    parts = []
    for part in method.parts:
        record = methods.find(part.name)
        home = inspect.getdoc(sys.modules[record.build.__module__]) or record.doc
        options = options_of(record.signature, record.doc, ())
        now = dict(part.options)
        parts.append(
            {"name": part.name, "documentation": home, "options": [{**o, "value": now.get(str(o["name"]))} for o in options]}
        )
    found: dict[str, Any] = {"name": str(method), "text": method.full_text, "parts": parts, "facts": fact_values(method.facts)}
    try:
        return found | plan_json(settings | {"method": str(method)})
    except PolyfedError as error:
        if asked_for_plan:
            raise
        return found | {"plan": None, "no_plan": str(error)}


def privacy_json(text: str, settings: dict[str, Any], asked_for_plan: bool) -> dict[str, Any]:
    """What leaves a client under a method, and whether its promise covers it; by kinds of entries where a model fits."""
    from polyfed.core.method import parse
    from polyfed.core.privacy import departures
    from polyfed.runs.experiment import Experiment
    from polyfed.settings import Settings, with_changes

    method = parse(text)
    run = with_changes(Settings(), settings | {"method": str(method)}).trusted()
    found: dict[str, Any] = {"name": str(method), "protects": method.facts.protects or "nobody"}
    if method.facts.protects:
        found |= {"noise_at": method.facts.noise_at, "noise_from": method.facts.noise_from, "epsilon": method.facts.epsilon}
        found |= {"delta": method.facts.delta}
    try:
        experiment = Experiment(run)
    except PolyfedError as error:
        if asked_for_plan:
            raise
        return found | {"leaves": [row.as_json() for row in departures(method, run)], "no_plan": str(error)}
    on = f"{type(experiment.bench.model).__name__}, {experiment.federation.name}"
    return found | {"on": on, "leaves": [row.as_json() for row in departures(method, run, experiment.bench.plan)]}


def plan_json(settings: dict[str, Any]) -> dict[str, Any]:
    """What travels, on which model."""
    from polyfed.runs.experiment import Experiment
    from polyfed.settings import Settings, with_changes

    experiment = Experiment(with_changes(Settings(), settings).trusted())
    return {"on": f"{type(experiment.bench.model).__name__}, {experiment.federation.name}", "plan": experiment.plan_table()}


def model_json(text: str, settings: dict[str, Any]) -> dict[str, Any]:
    """How many parameters a model has, and its entries by kind."""
    from polyfed.core.entries import entries_of, find_head
    from polyfed.models.weights import weights_left_out
    from polyfed.runs.assemble import build_federation, build_model
    from polyfed.runs.model_checks import check_output
    from polyfed.settings import Settings, with_changes

    run = with_changes(Settings(), settings | {"model": text}).trusted()
    federation = build_federation(settings["data"], run)
    with weights_left_out():
        built = build_model(text, federation, 0, run.trust)
    check_output(built, federation)
    head, _ = find_head(built, federation.sample_input(), None)
    kinds: dict[str, dict[str, Any]] = {}
    for entry in entries_of(built, head).values():
        row = kinds.setdefault(entry.kind, {"kind": entry.kind, "entries": 0, "bytes": 0})
        row["entries"] += 1
        row["bytes"] += entry.size
    shape = "x".join(map(str, federation.sample_input().shape[1:]))
    return {
        "parameters": sum(p.numel() for p in built.parameters()),
        "on": f"{federation.name}: inputs {shape}, {len(federation.classes)} classes",
        "head": head or "in doubt",
        "entries": list(kinds.values()),
    }


def _print_privacy(found: dict[str, Any], view: View) -> None:
    from rich.markup import escape

    out = console()
    if found["protects"] == "nobody":
        out.print("It adds no noise: nothing that leaves a client is covered by differential privacy.\n")
    else:
        out.print(
            f"It protects {found['protects']}, epsilon {found['epsilon']:g}, delta {found['delta']:g}; "
            f"noise at the {found['noise_at']}, from the {found['noise_from']}.\n"
        )
    shown = table(
        ("what leaves", "sent by", "when", "made from", "covered", "why"),
        later=[["covered"], ["why"], ["when"], ["made from"], ["sent by"]],
    )
    for row in found["leaves"]:
        cells = (
            row["what"],
            row["part"] or "every run",
            row["when"],
            row["granularity"],
            "yes" if row["covered"] else "no",
            row["why"],
        )
        shown.add_row(*map(escape, cells))
    print_table(f"what leaves a client ({found['on']})" if "on" in found else "what leaves a client", shown, view)
    if "no_plan" in found:
        out.print(f"Entries are not told apart, since there is no plan: {escape(found['no_plan'])}")


def _print(found: dict[str, Any], view: View) -> None:
    from rich.markup import escape

    out = console()
    out.print(f"[bold]{escape(found['name'])}[/bold] [dim]{found['kind']}[/dim]\n")
    if "leaves" in found:
        _print_privacy(found, view)
        return
    for part in found.get("parts", [found]):
        out.print(escape(reflowed(part["documentation"])) + "\n")
        _print_options(part["name"], part["options"])
    if "facts" in found:
        shown = table(("fact", "value"))
        for name, value in found["facts"].items():
            words = {"True": "yes", "False": "no", "None": "what the model allows", "": "none worth naming"}
            shown.add_row(name.replace("_", " "), escape(words.get(str(value), str(value))))
        print_table("facts", shown)
    if "parameters" in found:
        out.print(f"{found['parameters']:,} parameters on {escape(found['on'])}; head: {escape(found['head'])}\n")
        _print_rows("entries", found["entries"], ("kind", "entries", "bytes"))
    if found.get("plan"):
        _print_rows(f"what travels ({found['on']}; bytes per client and round, each way)", found["plan"])
    elif "no_plan" in found:
        out.print(
            f"No plan of what travels on {USUAL_DATA}: {escape(found['no_plan'])} (--model, --data and --set choose another run.)"
        )


def _print_options(name: str, options: list[dict[str, Any]]) -> None:
    if not options:
        return
    from rich.markup import escape

    from polyfed.text import write_option

    shown = table(("option", "default", "meaning"))
    for option in options:
        default = "(needed)" if option["required"] else write_option(option["default"])
        shown.add_row(option["name"], escape(default), escape(option["meaning"]))
    print_table(f"options of {name}", shown)


def _print_rows(
    title: str, rows: list[dict[str, Any]], columns: tuple[str, ...] = ("from_round", "kind", "travels", "entries", "bytes")
) -> None:
    shown = table([column.replace("_", " ") for column in columns], ("from round", "entries", "bytes"))
    for row in rows:
        shown.add_row(*(f"{row[column]:,}" if isinstance(row[column], int) else str(row[column]) for column in columns))
    print_table(title, shown)
