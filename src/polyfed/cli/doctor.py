"""``polyfed doctor``: a diagnosis of batch-norm problems, with a recommended method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyfed import api
from polyfed.cli.guard import stoppable
from polyfed.cli.options import command, resolve_values, settings_except, shared
from polyfed.cli.output import View, console, log_to_stderr, print_footnotes, print_json, print_line, print_text, status
from polyfed.cli.tables import print_table, styled

if TYPE_CHECKING:
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
def doctor(wide: bool, explain: bool, as_json: bool, quiet: bool, **values: Any) -> None:
    """Estimate from a few training steps per client whether shared batch norm will hurt, and recommend a method.

    Test images are not read.
    """
    log_to_stderr(quiet)
    chosen = resolve_values(**values)
    chosen.pop("method", None)  # the doctor trains no method
    with status("Reading data", quiet) as shown, stoppable("No files were written."):
        found = api.doctor(**chosen, notify=shown.update if shown else None)
    if not quiet:
        _print(found, View(wide, explain))
    if as_json:
        print_json(found.as_json())


def _print(found: Diagnosis, view: View) -> None:
    from rich.markup import escape

    print_table(
        f"{found.data}: {found.measures.looked_at} of {found.measures.clients} clients examined",
        ("finding", "here", "known", "meaning"),
        [_cells(one) for one in found.findings],
        view,
        ("here",),
        [["known"]],
    )
    notes = (
        "times chance: relative to the same images split at random.",
        "known: lowest and highest value of polyfed's reference federations.",
    )
    print_footnotes(notes[0], notes, view)
    for name, reason in found.left_out.items():
        print_text(f"Skipped {name}: {reason}.")
    advice = found.advice
    methods = f"use [bold]{escape(advice.method)}[/bold], or {escape(advice.runner_up)}."
    console().print(f"\n[bold]{escape(advice.verdict)}[/bold]: {methods}")
    for reason in (*advice.reasons, found.cost_words):
        print_text(f"- {reason}")
    print_text("To compare them, with learning rates chosen on validation data:")
    print_line(found.command)


def _cells(one: Finding) -> list[Cell]:
    """Return the name, value, known range and meaning of a finding."""
    written = f"{one.value:.0f}" if one.unit == "images" else f"{one.value:.2f}"
    values = sorted(one.known.items(), key=lambda item: item[1])
    (least, low), (most, high) = values[0], values[-1]
    known = f"{low:.2f} (all)" if low == high else f"{low:.2f} ({least}) to {high:.2f} ({most})"
    return [styled(one.name, "bold") if one.is_large else one.name, f"{written} {one.unit}", known, one.sentence]
