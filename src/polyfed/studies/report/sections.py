"""What each section of the report shows, worked out as plain values for the template."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.core.method import parse
from polyfed.core.metrics import MEASURES, NEITHER_IS_BETTER, SMALLER_IS_BETTER
from polyfed.errors import PolyfedError
from polyfed.runs.costs import Costs
from polyfed.settings import Settings
from polyfed.studies.report import costs
from polyfed.studies.report.byte_words import byte_words
from polyfed.studies.report.commands import command, pieces
from polyfed.studies.report.gather import DEFAULTS, MEAN, SPREAD, WORST, Group, GroupEntry, Run, average, deviation, recipe
from polyfed.studies.report.tables import chance_of
from polyfed.studies.report.verdict import Headline, binomial_error, domain_error, points

KINDS: Mapping[str, str] = {
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


def kind_words(kind: str) -> str:
    """A class of entries in words; a layer's own class keeps its name."""
    return KINDS.get(kind, kind)


def byte_tick(count: float) -> str:
    """Bytes at an axis: as ``byte_words``, without zeros that say nothing."""
    number, unit = byte_words(count).split()
    return f"{float(number):g} {unit}"


def second_words(seconds: float) -> str:
    """Seconds as a reader would say them."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def score_cell(entry: GroupEntry, view: str, key: Any, best: float | None) -> dict[str, Any]:
    """Mean ± standard deviation over seeds, in percent."""
    found = entry.finals(view, key)
    if not found:
        return {"text": "–", "spread": "", "best": False, "title": "not scored"}
    mean, spread = average(found.values()), deviation(found.values())
    by_seed = ", ".join(f"seed {seed}: {points(value)}" for seed, value in found.items())
    return {
        "text": points(mean),
        "spread": f"± {points(spread)}" if len(found) > 1 else "",
        "best": best is not None and abs(mean - best) < 1e-9,
        "title": by_seed,
    }


def table(group: Group, view: str, styles: Mapping[str, int]) -> dict[str, Any] | None:
    """Methods by domains in one view; None where nothing was scored in it."""
    domains = group.domains(view)
    if not domains:
        return None
    contenders = group.contenders(view)
    smaller = group.measure in SMALLER_IS_BETTER
    pick, sign = (min, 1) if smaller else (max, -1)
    best = {key: pick((entry.mean(view, key) for entry in contenders), default=None) for key in (*domains, MEAN, WORST)}
    ranks = len(contenders) > 1 and group.measure not in NEITHER_IS_BETTER
    rows = []
    for entry in sorted(group.entries, key=lambda entry: _for_sorting(sign * entry.mean(view, MEAN))):
        mine: Mapping[Any, float | None] = best if entry in contenders and ranks else {}
        rows.append(
            {
                "label": entry.label,
                "style": styles[entry.label],
                "note": standing(entry, view),
                "cells": [score_cell(entry, view, domain, mine.get(domain)) for domain in domains],
                "totals": [score_cell(entry, view, key, mine.get(key)) for key in (MEAN, WORST, SPREAD)]
                if len(domains) > 1
                else [],
            }
        )
    heads = [{"name": d, "count": group.test_size(view, d), "error": _column_error(group, view, d)} for d in domains]
    title = "Each domain left out in turn" if group.left_out else VIEW_TITLES[view]
    return {
        "view": view,
        "measure": group.measure,
        "words": MEASURES[group.measure],
        "title": title,
        "note": VIEW_NOTES[view],
        "domains": heads,
        "rows": rows,
        "baseline": baseline_cells(group, view),
    }


def _for_sorting(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _column_error(group: Group, view: str, domain: str) -> str:
    """The error of one score of a column from the size of its test set: at the column's average, or an average over methods."""
    scored = [entry for entry in group.entries if entry.finals(view, domain)]
    size = group.test_size(view, domain)
    if group.measure == "accuracy" and group.task.class_labels:
        return points(binomial_error(average(entry.mean(view, domain) for entry in scored), size)) if size and scored else "?"
    error = average(domain_error(group, view, domain, entry) for entry in scored)
    return "?" if math.isnan(error) else points(error)


def baseline_cells(group: Group, view: str) -> list[str]:
    """What always answering the most frequent class scores on each domain, then their mean, worst and spread; nothing where it is unknown."""
    return [points(value) for value in baseline(group, view)]


def baseline(group: Group, view: str) -> list[float]:
    """The numbers of ``baseline_cells``."""
    known = group.domains_scored()
    found = []
    for domain in group.domains(view):
        numbers = known.get((view, domain), {})
        by_measure = {"accuracy": numbers.get("majority_rate", math.nan), "balanced_accuracy": chance_of(numbers)}
        found.append(by_measure.get(group.measure, math.nan))
    if not found or any(map(math.isnan, found)):
        return []
    return [*found, *([average(found), min(found), max(found) - min(found)] if len(found) > 1 else [])]


def standing(entry: GroupEntry, view: str) -> str:
    """Seeds, and what else a reader must know of a row."""
    seeds = entry.seeds
    words = f"{len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    if not entry.finished:
        rounds = entry.rounds(view)
        scored = f"scores of round {rounds[-1]}" if rounds else "not scored yet"
        words += f", unfinished: round {min(run.reached for run in entry.runs)} of {entry.first.rounds}, {scored}"
    return words + (", reference: pools all data" if entry.is_reference else "")


def difference_rows(headline: Headline) -> list[dict[str, str]]:
    """The best against everybody else, for a table."""
    rows = []
    for pair in headline.differences:
        interval = f"{points(pair.interval[0], True)} to {points(pair.interval[1], True)}" if pair.interval else "–"
        spread = points(pair.spread) if len(pair.by_seed) > 1 else "–"
        rows.append(
            {
                "against": pair.behind.label,
                "difference": points(pair.difference, True),
                "seeds": str(len(pair.by_seed)),
                "spread": spread,
                "interval": interval,
                "test_error": points(pair.test_error),
                "p_value": "–" if pair.images is None else f"{pair.images.p_value:.2g}",
                "over_images": "–"
                if pair.images is None
                else f"{points(pair.images.low, True)} to {points(pair.images.high, True)}",
                "verdict": pair.verdict,
            }
        )
    return rows


def mean_bytes(entry: GroupEntry, direction: str, purpose: str) -> dict[str, float]:
    """Bytes of a run by class of entry, averaged over seeds."""
    found = [run.bytes(direction, purpose) for run in entry.counted]
    return {kind: average(one.get(kind, 0) for one in found) for kind in dict.fromkeys(kind for one in found for kind in one)}


def both_ways(entry: GroupEntry, purpose: str) -> float:
    """Bytes up and down for one purpose."""
    return sum(sum(mean_bytes(entry, direction, purpose).values()) for direction in ("up", "down"))


def cost_row(entry: GroupEntry, styles: Mapping[str, int]) -> dict[str, Any]:
    """What a run of a method costs, averaged over its seeds."""
    by_run = [run.costs for run in entry.counted]

    def seconds(what: str) -> str:
        return second_words(average(one.get("seconds", {}).get(what, 0.0) for one in by_run))

    def messages(*purposes: str) -> str:
        return f"{average(sum(one.get('messages', {}).get(p, 0) for p in purposes) for one in by_run):,.0f}"

    return {
        "label": entry.label,
        "style": styles[entry.label],
        "up": byte_words(sum(mean_bytes(entry, "up", "training").values())),
        "down": byte_words(sum(mean_bytes(entry, "down", "training").values())),
        "evaluation": byte_words(both_ways(entry, "evaluation")),
        "newcomer": byte_words(both_ways(entry, "newcomer")),
        "messages": messages("training"),
        "other_messages": messages("evaluation", "newcomer"),
        "seconds": seconds("training"),
        "evaluation_seconds": seconds("evaluation"),
    }


def byte_table(entry: GroupEntry) -> list[dict[str, str]]:
    """Bytes by class of entry, purpose and direction."""
    rows = []
    for purpose in ("training", "evaluation", "newcomer"):
        up, down = mean_bytes(entry, "up", purpose), mean_bytes(entry, "down", purpose)
        for kind in dict.fromkeys([*down, *up]):
            sizes = {"up": byte_words(up.get(kind, 0)), "down": byte_words(down.get(kind, 0))}
            rows.append({"purpose": purpose, "kind": kind_words(kind), **sizes})
    return rows


def travel_matrix(group: Group) -> dict[str, Any]:
    """What travels in all methods: a row for each class of entry, a column for each method."""
    kinds = list(
        dict.fromkeys(str(row.get("kind", "?")) for entry in group.entries for row in entry.first.document.get("plan", []))
    )
    ordered = sorted(kinds, key=lambda kind: list(KINDS).index(kind) if kind in KINDS else len(KINDS))
    rows = [{"kind": kind_words(kind), "cells": [_travels(entry.first, kind) for entry in group.entries]} for kind in ordered]
    return {"heads": [entry.label for entry in group.entries], "rows": rows}


def _travels(run: Run, kind: str) -> list[dict[str, str]]:
    """How one class of entries travels in a method: a line for each phase and way."""
    found = [row for row in run.document.get("plan", []) if row.get("kind") == kind]
    several = len({row.get("from_round") for row in found}) > 1
    return [
        {
            "travels": (f"from round {row.get('from_round')}: " if several or row.get("from_round", 1) > 1 else "")
            + str(row.get("travels", "?")),
            "size": f"{row.get('entries', '?')} entries, {byte_words(row.get('bytes', 0))}",
        }
        for row in found
    ]


def uploads_beyond_entries(entry: GroupEntry) -> str:
    """What leaves clients beyond model entries, and what privacy was promised and spent, in sentences."""
    return " ".join(text for text in (extra_uploads(entry), privacy_spent(entry.first)) if text)


def privacy_spent(run: Run) -> str:
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


def extra_uploads(entry: GroupEntry) -> str:
    """What leaves clients beyond model entries, in a sentence."""
    run = entry.first
    extra = mean_bytes(entry, "up", "training").get("extra", 0)
    size = f"{byte_words(extra)} in this run" if extra else ""
    declared, granularity = declared_uploads(run)
    if declared:
        details = "; ".join(text for text in (granularity, size) if text)
        return f"Beyond model entries this leaves clients in training: {declared}{f' ({details})' if details else ''}."
    if extra:
        return f"Beyond model entries clients send other values in training ({size}); the method does not say what they are."
    return "Nothing but model entries leaves clients in training."


def declared_uploads(run: Run) -> tuple[str, str]:
    """What leaves a client, and its granularity: as written in the run, or as the method itself says; nothing for one that is not installed here."""
    written = run.document.get("method", {})
    if written.get("data_derived_uploads") and "granularity" in written:
        return str(written["data_derived_uploads"]), str(written["granularity"])
    try:
        facts = parse(run.method).facts
    except PolyfedError:
        return str(written.get("data_derived_uploads") or ""), ""
    return str(written.get("data_derived_uploads") or facts.data_derived_uploads), facts.granularity


def spent_by(entry: GroupEntry) -> costs.Spent:
    """What the runs of an entry cost."""
    folders = [part for run in entry.counted for part in run.folders]
    found = [run for run in folders if run.costs and run.document.get("data", {}).get("clients")]
    return costs.spent([_totals(run) for run in found])


def _totals(run: Run) -> costs.Totals:
    clients = int(run.document["data"]["clients"])
    sampled = Settings(clients_per_round=run.settings["clients_per_round"]).sampled(clients)
    return costs.totals(Costs.from_numbers(run.costs), clients, sampled, run.reached)


def against_reference(group: Group) -> dict[str, Any] | None:
    """Cost and privacy of every entry beside the reference on the same data; None where no run of the reference is there."""
    references = [entry for entry in group.entries if entry.first.method == costs.REFERENCE]
    if not references:
        return None
    rows = []
    for entry in group.entries:
        chosen = reference_for(entry, references)
        reference = None if chosen is None else spent_by(chosen)
        own = costs.expense_of(entry.label, *declared_uploads(entry.first), spent_by(entry), reference)
        rows.append({"label": entry.label, "cells": costs.cells(own)})
    known = costs.reference_words(spent_by(references[0])) if len(references) == 1 else ""
    return {"reference": costs.REFERENCE, "heads": costs.HEADS, "rows": rows, "note": f"{known} {costs.NOTE}".strip()}


def reference_for(entry: GroupEntry, references: Sequence[GroupEntry]) -> GroupEntry | None:
    """The reference with the same settings; where there is but one, that one."""
    same = [one for one in references if recipe(one.first) == recipe(entry.first)]
    return same[0] if same else references[0] if len(references) == 1 else None


def outside_training(entries: Sequence[GroupEntry]) -> list[str]:
    """What leaves clients for evaluations and newcomers."""
    sentences = [
        "In evaluations clients send their scores, with counts by class: how many test images they have of each, how many were right, "
        "and, at the end, which class was taken for which."
    ]
    collected = [entry for entry in entries if both_ways(entry, "newcomer")]
    if collected:
        sizes = ", ".join(
            f"{byte_words(sum(mean_bytes(entry, 'up', 'newcomer').values()))} with {entry.label}" for entry in collected
        )
        sentences.append(f"For the newcomer's model, entries that otherwise stay local were collected: {sizes}.")
    return sentences


def provenance(run: Run) -> dict[str, Any]:
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
        "settings": [(name, _setting_words(value), value != _as_plain(DEFAULTS.get(name))) for name, value in _set(run).items()],
        "all_options": run.all_options,
        "model": run.document.get("model", {}),
        "data": run.document.get("data", {}),
    }


def _set(run: Run) -> dict[str, Any]:
    return {name: _as_plain(value) for name, value in run.settings.items() if value is not None}


def _as_plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _setting_words(value: Any) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)
