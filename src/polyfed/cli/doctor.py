"""``polyfed doctor``: whether batch norm will hurt a federation, and what to use instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyfed.api import doctor as examine_data
from polyfed.cli.guard import stoppable
from polyfed.cli.options import Changes, Data, Explain, Json, Quiet, Recipe, Trust, Wide, arguments, chosen_settings, with_settings
from polyfed.cli.output import View, console, listen, print_footnotes, print_json, print_table, status, table

if TYPE_CHECKING:
    from polyfed.studies.doctor import Diagnosis, Finding

FIRST = ("model", "clients_per_round", "batch_size", "partition", "root", "seed", "as_json")
EXAMPLE = (
    "Examples:\n\npolyfed doctor digits-mini\n\npolyfed doctor ./my_images --model resnet18 --batch-size 8 --clients-per-round 0.1"
)


@with_settings("data", "method", first=FIRST)
def doctor(
    values: dict[str, Any],
    data: Data = None,
    recipe: Recipe = None,
    changes: Changes = None,
    trust: Trust = False,
    wide: Wide = False,
    explain: Explain = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Look at a few steps of every client, and say whether batch norm will hurt and what to use instead; no test image is read."""
    listen(quiet)
    settings = chosen_settings(data, values, changes, recipe, trust=trust)
    with status("Reading data", quiet) as shown, stoppable("nothing was written."):
        found = examine_data(**arguments(settings), notify=shown.update if shown else None)
    if not quiet:
        print_diagnosis(found, View(wide, explain))
    if as_json:
        print_json(found.as_json())


def print_diagnosis(found: Diagnosis, view: View) -> None:
    """The findings, then the advice."""
    from rich.markup import escape

    measures, out = found.measures, console()
    shown = table(("finding", "here", "known", "what it means"), ("here",), [["known"]])
    for one in found.findings:
        shown.add_row(
            f"[bold]{one.name}[/bold]" if one.is_large else one.name,
            number(one.value, one.unit),
            known_words(one),
            escape(one.sentence),
        )
    print_table(f"{found.data}: {measures.looked_at} of {measures.clients} clients looked at", shown, view)
    meanings = (
        "times chance: compared with the same images dealt to clients at random.",
        "known: the lowest and highest of polyfed's reference federations.",
    )
    print_footnotes("times chance: next to the same images dealt at random.", meanings, view)
    for name, why in found.left_out.items():
        out.print(f"{escape(name)} is left out: {escape(why)}.")
    advice = found.advice
    out.print(f"\n[bold]{escape(advice.verdict)}[/bold]: use [bold]{escape(advice.method)}[/bold], or {escape(advice.runner_up)}.")
    for reason in advice.reasons:
        out.print(f"- {escape(reason)}")
    out.print(f"- {escape(found.cost_words)}")
    out.print("Compare them, with rates chosen on validation data:")
    out.print(found.command, soft_wrap=True, markup=False, highlight=False)


def number(value: float, unit: str) -> str:
    """A value with its unit."""
    written = f"{value:.0f}" if unit == "images" else f"{value:.2f}"
    return f"{written} {unit}"


def known_words(one: Finding) -> str:
    """The range of a number on known federations."""
    values = sorted(one.known.items(), key=lambda item: item[1])
    (least, low), (most, high) = values[0], values[-1]
    if low == high:
        return f"{low:.2f} (all)"
    return f"{low:.2f} ({least}) to {high:.2f} ({most})"
