"""Train or resume a run, and convert it to a ledger record."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polyfed.core.evaluation import Row
from polyfed.errors import NotFinite, TooFewReplies
from polyfed.papers.analyses import record_analysis
from polyfed.papers.grid import folder_of
from polyfed.papers.ledger import DEFAULTS, DIVERGED, FINISHED, Record, identity_of, packed_bits, recorded_settings
from polyfed.runs.callbacks.callback import Callback, Callbacks
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.lock import retry_when_free
from polyfed.runs.folder.paths import Reopening
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import resume, train_run
from polyfed.runs.result import Result, accuracy_table
from polyfed.runs.scores import scored_rounds
from polyfed.setting_facts import Unset
from polyfed.settings import Settings
from polyfed.studies.compare.compare import ComparedRuns
from polyfed.studies.report.commands import options
from polyfed.tasks.metrics import MEASURES

_NOT_REPEATED = ("data", "method", "seed", "root", "workers", "checkpoint_every", "metric")
_OF_VERSIONS = ("machine", "commit")
_ROUND = re.compile(r"(?:in round|Round) (\d+)")
_BY_ROUND = ("accuracy", "balanced_accuracy", "mean_iou")
"""Metrics that a record contains by round. Balanced accuracy is omitted if it equals accuracy."""


def train_recorded(
    settings: Settings, folder: Path, analyses: Iterable[str] = (), callbacks: Sequence[Callback] | None = None
) -> Record:
    """Train, resume or read one run, and return its record. A run that diverges has a record as well.

    Args:
        settings: Settings with the seed and the data folder ``root``.
        folder: Parent folder. The run folder is ``folder/SETTINGS/RUN``.
        analyses: Kinds of analyses to record.
        callbacks: Callbacks of the run.
    """
    runs = ComparedRuns(settings, settings.method, folder=folder / folder_of(settings), callbacks=callbacks)
    (run,) = runs.runs
    run_callbacks = Callbacks(runs.callbacks, run.words)
    experiment = Experiment(run.settings, runs.data, run.value)
    for notice in experiment.notices:
        runs.message(notice)

    def work() -> Result:
        path, exists = runs.folder_of(run, experiment)
        assert path is not None
        if exists:
            return resume(path.path, runs.data, Reopening(trusted=run.settings.trust), [run_callbacks])
        return train_run(experiment, path, [run_callbacks])

    try:
        result = retry_when_free(work, runs.message)
    except (NotFinite, TooFewReplies) as error:
        if isinstance(error, TooFewReplies) and settings.drop:
            raise
        # Without simulated failures, only replies with values out of bounds are missing.
        found, _ = runs.folder_of(run, experiment)
        assert found is not None
        return diverged(settings, found, str(error))
    run_callbacks.end_reused(result)
    return record_of(result, settings, analyses)


def record_of(result: Result, settings: Settings, analyses: Iterable[str] = ()) -> Record:
    """Build the record of a finished run.

    Args:
        result: The run, with its folder.
        settings: Requested settings, before defaults of the data or model were filled in.
        analyses: Kinds of analyses to record.
    """
    assert result.path is not None
    folder, summary = RunFolder(result.path), result.summary()
    lines = folder.metrics()
    rounds = int(summary["rounds"])
    chosen = [int(line["selected_round"]) for line in lines if "selected_round" in line]
    averaged = [number for number in scored_rounds(lines) if number > rounds - settings.averaged_rounds]
    costs = result.experiment.costs
    cost = {
        "cpu_seconds": round(costs.cpu_seconds.get("training", 0.0), 1),
        "seconds": round(costs.seconds.get("training", 0.0), 1),
        "bytes_up": int(summary["bytes_up"]),
        "bytes_down": int(summary["bytes_down"]),
    }
    return Record(
        **_identified(settings, folder, result.experiment.method.full_text),
        state=FINISHED,
        digest=result.digest,
        cost=cost,
        rounds=rounds,
        selected_round=chosen[-1] if chosen else rounds,
        last_rounds=averaged,
        scores=scores_of(result.rows),
        by_round=_curves_of_tests(lines),
        validation=validation_curve(lines),
        right=_right_of(result),
        data=_packed_files(result.experiment.federation.source),
        analyses={kind: record_analysis(result, kind) for kind in dict.fromkeys(analyses)},
    )


def diverged(settings: Settings, folder: RunFolder, error: str) -> Record:
    """Build the record of a diverged run, with the last round and the error."""
    lines = folder.metrics()
    found = _ROUND.search(error)
    reached = int(found[1]) if found else max((int(line["round"]) for line in lines), default=0)
    cost = {"cpu_seconds": 0.0, "seconds": 0.0, "bytes_up": 0, "bytes_down": 0}
    full = str(folder.document().get("method", {}).get("all_options", settings.method))
    return Record(
        **_identified(settings, folder, full),
        state=DIVERGED,
        digest="",
        cost=cost,
        rounds=reached,
        by_round=_curves_of_tests(lines),
        validation=validation_curve(lines),
        error=error,
    )


def _identified(settings: Settings, folder: RunFolder, method: str) -> dict[str, Any]:
    """Return the entries that finished and diverged runs have in common."""
    made_with = folder.document().get("made_with", {})
    full = dataclasses.replace(settings, method=method)
    return {
        "identity": identity_of(full),
        "seed": settings.seed,
        "settings": recorded_settings(settings),
        "method": method,
        "command": command_of(settings),
        "commit": str(made_with.get("commit", "")),
        "versions": {name: str(value) for name, value in made_with.items() if name not in _OF_VERSIONS},
        "machine": str(made_with.get("machine", "")),
    }


def command_of(settings: Settings) -> str:
    """Return the ``polyfed run`` command that repeats a run, with DATA as the data folder."""
    values = {**DEFAULTS, **settings.to_dict()}
    words = ["polyfed", "run", settings.data, "--method", settings.method]
    given = [name for name in ("lr", "optimizer", "batch_size") if not isinstance(getattr(settings, name), Unset)]
    rest = [*options(values, DEFAULTS, _NOT_REPEATED, given), "--seed", str(settings.seed), "--root", "DATA"]
    return shlex.join([*words, *rest])


def scores_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return all metrics by view and domain, over the clients of a domain."""
    tables = {measure: accuracy_table(rows, measure) for measure in MEASURES}
    found = []
    for view in ("seen", "unseen"):
        for domain in tables["accuracy"][view]:
            mine = [row for row in rows if (row.view, row.domain) == (view, domain)]
            measured = {name: round(float(value), 6) for name in MEASURES if not math.isnan(value := tables[name][view][domain])}
            count = sum(int(row.numbers.get("count", 0)) for row in mine)
            found.append({"view": view, "domain": domain, "clients": len(mine), "count": count, **measured})
    return found


def _curves_of_tests(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the test scores by round, for the rounds that evaluated all domains; empty if there are none."""
    rows = scored_rounds(lines)
    if not rows:
        return {}
    by_round = {number: {(one["view"], one["domain"]): one for one in scores_of(many)} for number, many in sorted(rows.items())}
    places = next(iter(by_round.values()))
    whole = {number: found for number, found in by_round.items() if found.keys() == places.keys()}
    scores = []
    for (view, domain), first in places.items():
        curves = {
            name: [round(float(found[view, domain].get(name, math.nan)), 4) for found in whole.values()]
            for name in _BY_ROUND
            if all(name in found[view, domain] for found in whole.values())
        }
        scores.append({"view": view, "domain": domain, "count": first["count"], **_distinct(curves)})
    return {"rounds": list(whole), "scores": scores}


def validation_curve(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean validation scores of clients by round; empty if there are none."""
    by_round: dict[int, list[Mapping[str, Any]]] = {}
    for line in lines:
        if line["view"] == "validation":
            by_round.setdefault(int(line["round"]), []).append(line)
    by_round = dict(sorted(by_round.items()))
    measures = [name for name in _BY_ROUND if by_round and all(name in line for many in by_round.values() for line in many)]
    curves = {
        name: [round(statistics.fmean(float(line[name]) for line in many), 4) for many in by_round.values()] for name in measures
    }
    return {"rounds": list(by_round), **_distinct(curves)} if curves else {}


def _distinct(curves: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Omit curves that equal the accuracy curve."""
    return {name: values for name, values in curves.items() if name == "accuracy" or values != curves.get("accuracy")}


def _right_of(result: Result) -> list[dict[str, Any]]:
    """Return packed bits of the correctly classified test images; empty if the labels are not classes."""
    found = []
    for (view, client, domain), one in sorted(result.answers.items()):
        labels, given = np.asarray(one["labels"]), np.asarray(one["answers"])
        if labels.ndim == 1 and labels.shape == given.shape:
            found.append(
                {"view": view, "client": client, "domain": domain, "count": len(labels), "bits": packed_bits(labels == given)}
            )
    return found


def _packed_files(source: str) -> str:
    """Return the packed files of the data, which are smaller than the published ones; empty for other data.

    >>> (
    ...     _packed_files("packed vlcs_mini96.tar (187 images), stratified 70/30: LabelMe 53/12/12"),
    ...     _packed_files("folder PACS/: photo 1/1/1"),
    ... )
    ('packed vlcs_mini96.tar (187 images)', '')
    """
    found = re.match(r"packed [^(:,]+(?:\([^)]*\))?", source)
    return found[0].strip() if found else ""
