"""What each section of the report shows, as plain values for the template."""

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
from polyfed.studies.report.run_record import DEFAULTS, SWEEP_FILE, RunRecord, average, plain_value, recipe
from polyfed.studies.report.run_set import Column, MethodRow, RunSet, binomial_error
from polyfed.studies.report.verdict import Verdict
from polyfed.studies.report.words import byte_words, points, second_words
from polyfed.tasks.metrics import MEASURES

ENTRY_KINDS: Mapping[str, str] = {
    "weight": "weights",
    "head": "head",
    "norm_affine": "norm scale and shift",
    "norm_stat": "norm statistics",
    "norm_count": "norm counters",
    "mix": "mixing scores",
    "momentum": "optimizer buffers",
    "extra": "other than entries",
}
VIEW_TITLES = {"seen": "Seen domains", "unseen": "Unseen domains"}
VIEW_NOTES = {
    "seen": "Each client's own model on the tests of its domain.",
    "unseen": "The newcomer's model on domains that nobody trained on.",
}
NOT_SCORED = "–"


def kind_words(kind: str) -> str:
    """An entry kind in words; a layer's own kind keeps its name."""
    return ENTRY_KINDS.get(kind, kind)


# ------------------------------------------------------------------------------------------------------------------ scores


def table(runs: RunSet, view: str, styles: Mapping[str, int]) -> dict[str, Any] | None:
    """Methods by domains in one view; None if nothing was scored in it."""
    domains = runs.domains(view)
    if not domains:
        return None
    columns = runs.columns(view, ("mean", "worst", "spread"))
    best = {column: runs.best(column) for column in columns}
    rows = []
    for row in runs.ranked(view):
        cells = [_score_cell(row, column, row in best[column]) for column in columns]
        named = {"label": row.method, "style": styles[row.method], "note": _standing(row, view)}
        rows.append({**named, "cells": cells[: len(domains)], "totals": cells[len(domains) :]})
    by_chance = runs.baseline(columns)
    return {
        "view": view,
        "measure": runs.measure,
        "words": MEASURES[runs.measure],
        "title": "Each domain left out in turn" if runs.left_out else VIEW_TITLES[view],
        "note": VIEW_NOTES[view],
        "domains": [{"name": d, "count": runs.test_size(view, d), "error": _column_error(runs, view, d)} for d in domains],
        "rows": rows,
        "baseline": [points(by_chance[c]) if c in by_chance else NOT_SCORED for c in columns] if by_chance else [],
    }


def _score_cell(row: MethodRow, column: Column, best: bool) -> dict[str, Any]:
    """Mean ± standard deviation over seeds, in percent."""
    found = row.finals(column.view, column.key)
    number = row.number(column.view, column.key) if found else None
    if number is None:
        return {"text": NOT_SCORED, "spread": "", "best": False, "title": "not scored"}
    return {
        "text": points(number.value),
        "spread": f"± {points(number.error)}" if len(found) > 1 else "",
        "best": best,
        "title": ", ".join(f"seed {seed}: {points(value)}" for seed, value in found.items()),
    }


def _column_error(runs: RunSet, view: str, domain: str) -> str:
    """The error of one score of a column from the size of its test set: at the column's average, or an average over methods."""
    scored = [row for row in runs.rows if row.finals(view, domain)]
    size = runs.test_size(view, domain)
    if runs.measure == "accuracy" and runs.task.class_labels:
        return points(binomial_error(average(row.average(view, domain) for row in scored), size)) if size and scored else "?"
    error = average(row.test_error(view, domain) for row in scored)
    return "?" if math.isnan(error) else points(error)


def _standing(row: MethodRow, view: str) -> str:
    """Seeds, and what else a reader must know of a row."""
    seeds = row.seeds
    words = f"{len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    if not row.finished:
        rounds = row.rounds(view)
        scored = f"scores of round {rounds[-1]}" if rounds else "not scored yet"
        words += f", unfinished: round {min(run.reached for run in row.records)} of {row.first.rounds}, {scored}"
    return words + (", reference: pools all data" if row.is_reference else "")


def difference_rows(verdict: Verdict) -> list[dict[str, str]]:
    """The best against every other method, for a table."""

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
            "verdict": pair.verdict,
        }
        for pair in verdict.differences
    ]


# ------------------------------------------------------------------------------------------------------------------- costs


def cost_row(row: MethodRow, styles: Mapping[str, int]) -> dict[str, Any]:
    """What a run of a method costs, averaged over its seeds."""
    return {
        "label": row.method,
        "style": styles[row.method],
        "up": byte_words(row.total_bytes(directions=["up"])),
        "down": byte_words(row.total_bytes(directions=["down"])),
        "evaluation": byte_words(row.total_bytes("evaluation")),
        "newcomer": byte_words(row.total_bytes("newcomer")),
        "messages": f"{row.average_cost('messages', 'training'):,.0f}",
        "other_messages": f"{row.average_cost('messages', 'evaluation', 'newcomer'):,.0f}",
        "seconds": second_words(row.average_cost("seconds", "training")),
        "evaluation_seconds": second_words(row.average_cost("seconds", "evaluation")),
    }


def byte_table(row: MethodRow) -> list[dict[str, str]]:
    """Bytes by entry kind, purpose and direction."""
    rows = []
    for purpose in ("training", "evaluation", "newcomer"):
        up, down = row.bytes_by_kind("up", purpose), row.bytes_by_kind("down", purpose)
        for kind in dict.fromkeys([*down, *up]):
            sizes = {"up": byte_words(up.get(kind, 0)), "down": byte_words(down.get(kind, 0))}
            rows.append({"purpose": purpose, "kind": kind_words(kind), **sizes})
    return rows


def references_in(rows: Sequence[MethodRow]) -> list[MethodRow]:
    """The rows that costs are compared with."""
    return [row for row in rows if not row.problem and row.first.method == costs.REFERENCE]


def expenses(rows: Sequence[MethodRow]) -> list[costs.Expense]:
    """Cost and privacy of each method that was run, relative to the reference with the same settings; if there is only one, to that."""
    references, found = references_in(rows), []
    for row in (row for row in rows if not row.problem):
        same = [one for one in references if recipe(one.first) == recipe(row.first)]
        chosen = same or (references if len(references) == 1 else [])
        reference = chosen[0].spent if chosen else None
        found.append(costs.Expense(row.method, *declared_uploads(row.first), row.spent, reference))
    return found


def against_reference(runs: RunSet) -> dict[str, Any] | None:
    """Cost and privacy of every method relative to the reference; None if no run of the reference is there."""
    references = references_in(runs.rows)
    if not references:
        return None
    known = costs.reference_words(references[0].spent) if len(references) == 1 else ""
    rows = [{"label": one.method, "cells": costs.cells(one)} for one in expenses(runs.rows)]
    return {"reference": costs.REFERENCE, "heads": costs.HEADS, "rows": rows, "note": f"{known} {costs.NOTE}".strip()}


# ----------------------------------------------------------------------------------------------------------- what travels


def travel_matrix(runs: RunSet) -> dict[str, Any]:
    """What travels in all methods: a row for each entry kind, a column for each method."""
    plans = [row.first.document.get("plan", []) for row in runs.rows]
    kinds = dict.fromkeys(str(entry.get("kind", "?")) for plan in plans for entry in plan)
    ordered = sorted(kinds, key=lambda kind: list(ENTRY_KINDS).index(kind) if kind in ENTRY_KINDS else len(ENTRY_KINDS))
    rows = [{"kind": kind_words(kind), "cells": [_travels(plan, kind) for plan in plans]} for kind in ordered]
    return {"heads": [row.method for row in runs.rows], "rows": rows}


def _travels(plan: Sequence[Mapping[str, Any]], kind: str) -> list[dict[str, str]]:
    """How one entry kind travels in a method: a line for each phase and direction."""
    found = [entry for entry in plan if entry.get("kind") == kind]
    several = len({entry.get("from_round") for entry in found}) > 1
    return [
        {
            "travels": (f"from round {entry.get('from_round')}: " if several or entry.get("from_round", 1) > 1 else "")
            + str(entry.get("travels", "?")),
            "size": f"{entry.get('entries', '?')} entries, {byte_words(entry.get('bytes', 0))}",
        }
        for entry in found
    ]


def uploads_beyond_entries(row: MethodRow) -> str:
    """What leaves clients beyond model entries, and what privacy was promised and spent, in sentences."""
    return " ".join(text for text in (extra_uploads(row), privacy_spent(row.first)) if text)


def privacy_spent(run: RunRecord) -> str:
    """What a run has spent of its promise of differential privacy, in all and by client; empty where it promises none."""
    lines = [line for line in run.lines if line["view"] == "privacy"]
    if not lines:
        return ""
    last = max(line["round"] for line in lines)
    spent = {line["client"]: line["privacy.epsilon_spent"] for line in lines if line["round"] == last}
    written = run.document.get("method", {})
    each = ", ".join(f"{client} {value:.3g}" for client, value in spent.items() if client != "all")
    return (
        f"Differential privacy for {written.get('protects', 'samples')}: epsilon {spent.get('all', 0.0):.4g} is spent at delta "
        f"{lines[-1]['privacy.delta']:g} (by client: {each}); the noise is of the {written.get('noise_from', 'seed')}, at the "
        f"{written.get('noise_at', 'client')}."
    )


def extra_uploads(row: MethodRow) -> str:
    """What leaves clients beyond model entries, in a sentence."""
    run = row.first
    extra = row.bytes_by_kind("up").get("extra", 0)
    size = f"{byte_words(extra)} in this run" if extra else ""
    declared, granularity = declared_uploads(run)
    if declared:
        details = "; ".join(text for text in (granularity, size) if text)
        return f"Beyond model entries this leaves clients in training: {declared}{f' ({details})' if details else ''}."
    if extra:
        return f"Beyond model entries clients send other values in training ({size}); the method does not say what they are."
    return "Nothing but model entries leaves clients in training."


def declared_uploads(run: RunRecord) -> tuple[str, str]:
    """What leaves a client, and its granularity: as written in the run, or as the method itself says; nothing for one that is not installed here."""
    written = run.document.get("method", {})
    if written.get("data_derived_uploads") and "granularity" in written:
        return str(written["data_derived_uploads"]), str(written["granularity"])
    try:
        facts = parse(run.method).facts
    except PolyfedError:
        return str(written.get("data_derived_uploads") or ""), ""
    return str(written.get("data_derived_uploads") or facts.data_derived_uploads), facts.granularity


def outside_training(rows: Sequence[MethodRow]) -> list[str]:
    """What leaves clients for evaluations and newcomers."""
    sentences = [
        "In evaluations clients send their scores, with counts by class: how many test images they have of each, how many were right, "
        "and, at the end, which class was taken for which."
    ]
    collected = [row for row in rows if row.total_bytes("newcomer")]
    if collected:
        sizes = ", ".join(f"{byte_words(row.total_bytes('newcomer', ['up']))} with {row.method}" for row in collected)
        sentences.append(f"For the newcomer's model, entries that otherwise stay local were collected: {sizes}.")
    return sentences


# -------------------------------------------------------------------------------------------------------- runs and searches


def provenance(run: RunRecord) -> dict[str, Any]:
    """Where a run's numbers come from."""
    made = dict(run.document.get("made_with", {}))
    machine, commit = made.pop("machine", "?"), made.pop("commit", "")
    return {
        "path": run.path,
        "method": run.method,
        "seed": run.seed,
        "state": "finished" if run.finished else f"unfinished: round {run.reached} of {run.rounds}",
        "digest": run.digest or "no good checkpoint",
        "versions": ", ".join(f"{name} {version}" for name, version in made.items()),
        "commit": commit,
        "machine": machine,
        "command": pieces(command(run)),
        "settings": [
            (name, _setting_words(value), plain_value(value) != plain_value(DEFAULTS.get(name)))
            for name, value in run.settings.items()
            if value is not None
        ],
        "all_options": run.all_options,
        "model": run.document.get("model", {}),
        "data": run.document.get("data", {}),
    }


def _setting_words(value: Any) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, list | tuple) else str(value)


def searches_in(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """The searches among these folders, from ``sweep.json``: what was tried, what validation said, and what was chosen."""
    return [_read_search(Path(path)) for path in paths if (Path(path) / SWEEP_FILE).is_file()]


def _read_search(folder: Path) -> dict[str, Any]:
    path = folder / SWEEP_FILE
    try:
        document = json.loads(path.read_text())
        axes = [str(name) for name in document["searched"]]
        rows = [row for method in document["methods"] for row in trial_rows(method, axes)]
        kind, chosen_by = str(document["search"]), str(document["chosen_by"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(f"{path} cannot be read as a search ({type(error).__name__}: {error}).") from error
    return {"folder": str(folder), "kind": kind, "chosen_by": chosen_by, "axes": axes, "rows": rows}


def trial_rows(method: Mapping[str, Any], axes: Sequence[str]) -> list[dict[str, Any]]:
    """The trials of a method, best first; those that failed last."""
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
