"""``polyfed doctor``: whether batch norm will hurt a federation, and what to use instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyfed import api
from polyfed.cli.guard import stoppable
from polyfed.cli.options import chosen_values, command, settings_except, shared
from polyfed.cli.output import View, console, listen, print_footnotes, print_json, print_line, say, status
from polyfed.cli.tables import print_table, styled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polyfed.cli.tables import Cell
    from polyfed.studies.doctor import Diagnosis, Finding


@command(
    "doctor",
    "polyfed doctor digits-mini",
    "polyfed doctor ./my_images --model resnet18 --batch-size 8 --clients-per-round 0.1",
    first=("model", "clients_per_round", "batch_size", "partition", "root", "seed", "as_json"),
)
@shared("data", "recipe", "set", "trust", "wide", "explain", "json", "quiet")
@settings_except("data", "method")
def doctor(
    recipe: str | None,
    changes: Sequence[str],
    trust: bool,
    wide: bool,
    explain: bool,
    as_json: bool,
    quiet: bool,
    **values: Any,
) -> None:
    """Look at a few steps of every client, and say whether batch norm will hurt and what to use instead; no test image is read."""
    listen(quiet)
    chosen = chosen_values(values, recipe, changes, trust)
    chosen.pop("method", None)  # no method is trained
    with status("Reading data", quiet) as shown, stoppable("nothing was written."):
        found = api.doctor(**chosen, notify=shown.update if shown else None)
    if not quiet:
        _print(found, View(wide, explain))
    if as_json:
        print_json(found.as_json())


def _print(found: Diagnosis, view: View) -> None:
    """Print the findings, then the advice."""
    from rich.markup import escape

    print_table(
        f"{found.data}: {found.measures.looked_at} of {found.measures.clients} clients looked at",
        ("finding", "here", "known", "what it means"),
        [_cells(one) for one in found.findings],
        view,
        ("here",),
        [["known"]],
    )
    meanings = (
        "times chance: compared with the same images dealt to clients at random.",
        "known: the lowest and highest of polyfed's reference federations.",
    )
    print_footnotes("times chance: next to the same images dealt at random.", meanings, view)
    for name, why in found.left_out.items():
        say(f"{name} is left out: {why}.")
    advice = found.advice
    words = f"[bold]{escape(advice.verdict)}[/bold]: use [bold]{escape(advice.method)}[/bold], or {escape(advice.runner_up)}."
    console().print(f"\n{words}")
    for reason in (*advice.reasons, found.cost_words):
        say(f"- {reason}")
    say("Compare them, with rates chosen on validation data:")
    print_line(found.command)


def _cells(one: Finding) -> list[Cell]:
    """Return a finding with its value, and the range of that number on known federations."""
    written = f"{one.value:.0f}" if one.unit == "images" else f"{one.value:.2f}"
    values = sorted(one.known.items(), key=lambda item: item[1])
    (least, low), (most, high) = values[0], values[-1]
    known = f"{low:.2f} (all)" if low == high else f"{low:.2f} ({least}) to {high:.2f} ({most})"
    return [styled(one.name, "bold") if one.is_large else one.name, f"{written} {one.unit}", known, one.sentence]
