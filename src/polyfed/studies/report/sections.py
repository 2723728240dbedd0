"""Compute the values that the template shows in each section of the report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.core.method import parse
from polyfed.errors import PolyfedError, RunFolderError
from polyfed.studies.report import costs
from polyfed.studies.report.commands import command, pieces
from polyfed.studies.report.run_record import DEFAULTS, SWEEP_FILE, RunRecord, average, binomial_error, plain_value, recipe
from polyfed.studies.report.run_set import Cell, Column, MethodRow, RunSet
from polyfed.studies.report.verdict import Verdict, describe
from polyfed.studies.report.words import format_bytes, format_seconds, points
from polyfed.tasks.metrics import MEASURES

ENTRY_KINDS: Mapping[str, str] = {
    "weight": "weights",
    "head": "head",
    "norm_affine": "norm scale and shift",
    "norm_stat": "norm statistics",
    "norm_count": "norm counters",
    "mix": "mixing scores",
    "momentum": "optimizer buffers",
    "extra": "other data",
}
VIEW_TITLES = {"seen": "Seen domains", "unseen": "Unseen domains"}
VIEW_NOTES = {
    "seen": "The model of each client on the test set of its domain.",
    "unseen": "The newcomer model on domains held out of training.",
}
NOT_SCORED = "–"


# ------------------------------------------------------------------------------------------------------------------ scores


def table(runs: RunSet, view: str) -> dict[str, Any] | None:
    """Return the scores of each method by domain in one view; None if the view has no scores."""
    domains = runs.domains(view)
    if not domains:
        return None
    columns = runs.columns(view, ("mean", "worst", "spread"))
    rows = []
    for row in runs.ranked(view):
        cells = [_score_cell(row, column, cell) for column, cell in zip(columns, runs.cells(row, columns), strict=True)]
        summary = {"cells": cells[: len(domains)], "totals": cells[len(domains) :]}
        rows.append({"label": row.label, "note": _row_note(row, view), **summary})
    baseline = runs.baseline(columns)
    return {
        "measure": runs.measure,
        "metric": MEASURES[runs.measure],
        "title": "Leave-one-out" if runs.left_out else VIEW_TITLES[view],
        "note": VIEW_NOTES[view],
        "domains": [{"name": d, "count": runs.test_size(view, d), "error": _column_error(runs, view, d)} for d in domains],
        "rows": rows,
        "baseline": [points(baseline[c]) if c in baseline else NOT_SCORED for c in columns] if baseline else [],
    }


def _score_cell(row: MethodRow, column: Column, cell: Cell) -> dict[str, Any]:
    number = cell.number
    if number is None:
        return {"text": NOT_SCORED, "spread": "", "best": False, "title": "not scored"}
    return {
        "text": points(number.value),
        "spread": "" if math.isnan(number.error) else f"± {points(number.error)}",
        "best": cell.best,
        "title": ", ".join(f"seed {seed}: {points(value)}" for seed, value in row.finals(column.view, column.key).items()),
    }


def _column_error(runs: RunSet, view: str, domain: str) -> str:
    """Return the standard error of a score in this column, at the average score or averaged over methods."""
    scored = [row for row in runs.rows if row.finals(view, domain)]
    size = runs.test_size(view, domain)
    if runs.measure == "accuracy" and runs.task.class_labels:
        return points(binomial_error(average(row.average(view, domain) for row in scored), size)) if size and scored else "?"
    error = average(row.test_error(view, domain) for row in scored)
    return "?" if math.isnan(error) else points(error)


def _row_note(row: MethodRow, view: str) -> str:
    seeds = row.seeds
    note = f"{len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    if not row.finished:
        rounds = row.rounds(view)
        scored = f"scores of round {rounds[-1]}" if rounds else "no scores yet"
        note += f", {row.state}, {scored}"
    elif row.missing:
        note += f". {row.note}"
    return note + (", reference: trains on the pooled data" if row.is_reference else "")


def difference_rows(verdict: Verdict) -> list[dict[str, str]]:
    """Return the table that compares the best method with every other."""

    def span(ends: tuple[float, float] | None) -> str:
        return NOT_SCORED if ends is None else f"{points(ends[0], True)} to {points(ends[1], True)}"

    return [
        {
            "against": pair.behind.method,
            "difference": points(pair.difference, True),
            "seeds": str(len(pair.by_seed)),
            "spread": points(pair.spread) if len(pair.by_seed) > 1 else NOT_SCORED,
            "interval": span(pair.interval),
            "test_error": points(pair.test_error),
            "p_value": NOT_SCORED if pair.images is None else f"{pair.images.p_value:.2g}",
            "over_images": span(None if pair.images is None else (pair.images.low, pair.images.high)),
            "verdict": describe(pair),
        }
        for pair in verdict.differences
    ]


# ------------------------------------------------------------------------------------------------------------------- costs


def cost_row(row: MethodRow) -> dict[str, Any]:
    return {
        "label": row.method,
        "up": format_bytes(row.total_bytes(directions=["up"])),
        "down": format_bytes(row.total_bytes(directions=["down"])),
        "evaluation": format_bytes(row.total_bytes("evaluation")),
        "newcomer": format_bytes(row.total_bytes("newcomer")),
        "messages": f"{row.average_cost('messages', 'training'):,.0f}",
        "other_messages": f"{row.average_cost('messages', 'evaluation', 'newcomer'):,.0f}",
        "seconds": format_seconds(row.average_cost("seconds", "training")),
        "evaluation_seconds": format_seconds(row.average_cost("seconds", "evaluation")),
    }


def byte_table(row: MethodRow) -> list[dict[str, str]]:
    rows = []
    for purpose in ("training", "evaluation", "newcomer"):
        up, down = row.bytes_by_kind("up", purpose), row.bytes_by_kind("down", purpose)
        for kind in dict.fromkeys([*down, *up]):
            sizes = {"up": format_bytes(up.get(kind, 0)), "down": format_bytes(down.get(kind, 0))}
            rows.append({"purpose": purpose, "kind": ENTRY_KINDS.get(kind, kind), **sizes})
    return rows


def references_in(rows: Sequence[MethodRow]) -> list[MethodRow]:
    return [row for row in rows if not row.problem and row.first.method == costs.REFERENCE]


def expenses(rows: Sequence[MethodRow]) -> list[costs.Expense]:
    """Return cost and privacy of each method relative to the reference with the same settings, or to the only reference."""
    references, found = references_in(rows), []
    for row in (row for row in rows if not row.problem):
        same = [one for one in references if recipe(one.first) == recipe(row.first)]
        chosen = same or (references if len(references) == 1 else [])
        reference = chosen[0].spent if chosen else None
        found.append(costs.Expense(row.method, *declared_uploads(row.first), row.spent, reference))
    return found


def against_reference(runs: RunSet) -> dict[str, Any] | None:
    """Return the table of cost and privacy relative to the reference; None if there is no reference run."""
    references = references_in(runs.rows)
    if not references:
        return None
    measured = costs.describe_reference(references[0].spent) if len(references) == 1 else ""
    rows = [{"label": one.method, "cells": costs.cells(one)} for one in expenses(runs.rows)]
    return {"reference": costs.REFERENCE, "heads": costs.HEADS, "rows": rows, "note": f"{measured} {costs.NOTE}".strip()}


# ------------------------------------------------------------------------------------------------- uploads and downloads


def travel_matrix(runs: RunSet) -> dict[str, Any]:
    """Return the table of sharing plans: one row per entry kind, one column per method."""
    plans = [row.first.document.get("plan", []) for row in runs.rows]
    kinds = dict.fromkeys(str(entry.get("kind", "?")) for plan in plans for entry in plan)
    ordered = sorted(kinds, key=lambda kind: list(ENTRY_KINDS).index(kind) if kind in ENTRY_KINDS else len(ENTRY_KINDS))
    rows = [{"kind": ENTRY_KINDS.get(kind, kind), "cells": [_exchange_lines(plan, kind) for plan in plans]} for kind in ordered]
    return {"heads": [row.method for row in runs.rows], "rows": rows}


def _exchange_lines(plan: Sequence[Mapping[str, Any]], kind: str) -> list[dict[str, str]]:
    """Return how a method exchanges one entry kind: one line per phase and direction."""
    found = [entry for entry in plan if entry.get("kind") == kind]
    several = len({entry.get("from_round") for entry in found}) > 1
    return [
        {
            "travels": (f"from round {entry.get('from_round')}: " if several or entry.get("from_round", 1) > 1 else "")
            + str(entry.get("travels", "?")),
            "size": f"{entry.get('entries', '?')} entries, {format_bytes(entry.get('bytes', 0))}",
        }
        for entry in found
    ]


def describe_uploads(row: MethodRow) -> str:
    """Describe what clients upload besides model entries, and the privacy budget that they spend."""
    return f"{_extra_uploads(row)} {_privacy_spent(row.first)}".strip()


def _privacy_spent(run: RunRecord) -> str:
    """Describe the privacy budget that a run has spent; return an empty string without differential privacy."""
    lines = [line for line in run.lines if line["view"] == "privacy"]
    if not lines:
        return ""
    last = max(line["round"] for line in lines)
    spent = {line["client"]: line["privacy.epsilon_spent"] for line in lines if line["round"] == last}
    recorded = run.document.get("method", {})
    by_client = ", ".join(f"{client} {value:.3g}" for client, value in spent.items() if client != "all")
    return (
        f"Differential privacy for {recorded.get('protects', 'samples')}: epsilon {spent.get('all', 0.0):.4g} spent at delta "
        f"{lines[-1]['privacy.delta']:g} (per client: {by_client}). Noise from the {recorded.get('noise_from', 'seed')} is added at the "
        f"{recorded.get('noise_at', 'client')}."
    )


def _extra_uploads(row: MethodRow) -> str:
    run = row.first
    extra = row.bytes_by_kind("up").get("extra", 0)
    size = f"{format_bytes(extra)} in this run" if extra else ""
    declared, granularity = declared_uploads(run)
    if declared:
        details = "; ".join(text for text in (granularity, size) if text)
        return f"Besides model entries, clients upload during training: {declared}{f' ({details})' if details else ''}."
    if extra:
        return f"Besides model entries, clients upload other values during training ({size}), which the method does not declare."
    return "Clients upload only model entries during training."


def declared_uploads(run: RunRecord) -> tuple[str, str]:
    """Return the data-derived uploads and their granularity from the run, or from the method if it is installed."""
    recorded = run.document.get("method", {})
    if recorded.get("data_derived_uploads") and "granularity" in recorded:
        return str(recorded["data_derived_uploads"]), str(recorded["granularity"])
    try:
        facts = parse(run.method).facts
    except PolyfedError:
        return str(recorded.get("data_derived_uploads") or ""), ""
    return str(recorded.get("data_derived_uploads") or facts.data_derived_uploads), facts.granularity


def outside_training(rows: Sequence[MethodRow]) -> list[str]:
    sentences = [
        "For evaluation, clients upload their scores with per-class counts of test images and correct predictions and, after training, "
        "a confusion matrix."
    ]
    collected = [row for row in rows if row.total_bytes("newcomer")]
    if collected:
        sizes = ", ".join(f"{format_bytes(row.total_bytes('newcomer', ['up']))} with {row.method}" for row in collected)
        sentences.append(f"For the newcomer model, clients also upload entries that otherwise stay local: {sizes}.")
    return sentences


# -------------------------------------------------------------------------------------------------------- runs and searches


def provenance(run: RunRecord) -> dict[str, Any]:
    made = dict(run.document.get("made_with", {}))
    machine, commit = made.pop("machine", "?"), made.pop("commit", "")
    return {
        "path": run.path,
        "method": run.method,
        "seed": run.seed,
        "state": run.state,
        "digest": run.digest or "no readable checkpoint",
        "versions": ", ".join(f"{name} {version}" for name, version in made.items()),
        "commit": commit,
        "machine": machine,
        "command": pieces(command(run)),
        "settings": [
            (
                name,
                ", ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value),
                plain_value(value) != plain_value(DEFAULTS.get(name)),
            )
            for name, value in run.settings.items()
            if value is not None
        ],
        "all_options": run.all_options,
        "model": run.document.get("model", {}),
        "data": run.document.get("data", {}),
    }


def read_search(folder: Path) -> dict[str, Any]:
    """Read a hyperparameter search from ``sweep.json``."""
    path = folder / SWEEP_FILE
    try:
        document = json.loads(path.read_text())
        axes = [str(name) for name in document["searched"]]
        rows = [row for method in document["methods"] for row in trial_rows(method, axes)]
        kind, chosen_by = str(document["search"]), str(document["chosen_by"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(
            f"{path} is not a valid search ({type(error).__name__}: {error}). Restore it from a backup, or repeat the search."
        ) from error
    return {"folder": str(folder), "kind": kind, "chosen_by": chosen_by, "axes": axes, "rows": rows}


def trial_rows(method: Mapping[str, Any], axes: Sequence[str]) -> list[dict[str, Any]]:
    """Return the trials of a method, best first and failed ones last."""
    chosen = (method["chosen"] or {}).get("run")
    ordered = sorted(method["trials"], key=lambda trial: 1.0 if trial["validation"] is None else -trial["validation"])
    return [
        {
            "method": str(method["method"]),
            "tried": [str(trial["values"].get(axis, "–")) for axis in axes],
            "validation": "failed" if trial["validation"] is None else f"{100 * trial['validation']:.1f}",
            "chosen": trial["run"] == chosen,
        }
        for trial in ordered
    ]
