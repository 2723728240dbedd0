"""Represent a run in tables and reports: its settings, scores, costs and predictions, from a result in memory or a run folder."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from polyfed.core.evaluation import Row
from polyfed.errors import RunFolderError
from polyfed.runs.folder.checkpoint import digest
from polyfed.runs.folder.divergence import Divergence
from polyfed.runs.folder.final_files import Answers, read_answers
from polyfed.runs.folder.run_folder import RunFolder, explain_missing
from polyfed.runs.folder.unfinished import Unfinished, describe_unfinished
from polyfed.runs.result import Result, measured, over_domains
from polyfed.runs.scores import LAST, VIEWS, WINDOW, LastRounds, as_line, domains_of
from polyfed.runs.training_settings import VALIDATED
from polyfed.settings import BY_VALIDATION, FACTS, setting_names
from polyfed.tasks.known import pooled, task_of_records
from polyfed.tasks.metrics import over_examples, standard_error
from polyfed.tasks.task import Task

DEFAULTS: Mapping[str, Any] = {name: facts.default for name, facts in FACTS.items()}
SWEEP_FILE = "sweep.json"
"""File name of a hyperparameter search; the runs with the selected settings are in ``final``."""
SELECTED = "selected_"
"""Prefix of views that score the model selected by validation."""
DATA_SETTINGS = ("data", *setting_names("partition"))
METHOD_SETTINGS = [name for name, facts in FACTS.items() if facts.changes_results and name not in DATA_SETTINGS]
"""Settings that distinguish rows of one method."""
# Keys of the summaries in a table of domains. They are tuples because a domain can be called "mean".
MEAN, WORST, SPREAD = ("", "mean"), ("", "worst"), ("", "spread")


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One run, or the leave-one-out runs of one seed (``parts``).

    ``unfinished`` is set if the run folder has no final state. ``outlier`` is a warning about the last round if ``lines`` do not contain earlier rounds.
    """

    path: str
    document: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]
    reached: int = 0
    finished: bool = False
    costs: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""
    complaints: Sequence[str] = ()
    answers: Answers = field(default_factory=dict, repr=False)
    parts: Sequence[RunRecord] = ()
    outlier: str = ""
    unfinished: Unfinished | None = None

    @classmethod
    def from_result(cls, result: Result) -> RunRecord:
        """Keep only what tables need from a run in this process, so that its models can be freed."""
        experiment = result.experiment
        method, federation = experiment.method, experiment.federation
        document = {
            "settings": experiment.settings.to_dict(),
            "method": {
                "text": str(method),
                "all_options": method.full_text,
                "data_derived_uploads": method.facts.data_derived_uploads,
                "granularity": method.facts.granularity,
                "pools_data": method.population is not None,
            },
            "data": {"clients": len(federation.clients), "test_sizes": experiment.test_sizes()},
            "origins": dict(experiment.origins),
        }
        number = experiment.server.round
        lines = [as_line(number, row) for row in result.rows]
        costs = experiment.costs.numbers()
        return cls(result.path or "", document, lines, number, True, costs, answers=result.answers, outlier=result.outlier)

    @classmethod
    def from_folder(cls, path: str | Path) -> RunRecord:
        """Read a finished or unfinished run folder, with the scores up to its newest checkpoint."""
        folder = RunFolder(path)
        document = folder.document()
        snapshot, complaints = folder.read()
        unfinished = describe_unfinished(folder, snapshot, complaints)
        if snapshot is None:
            # Without a checkpoint, the metrics cannot be verified.
            return cls(str(path), document, [], complaints=complaints, unfinished=unfinished)
        notes, state = snapshot.notes, digest(snapshot)
        lines, answers = folder.sealed_lines(notes), read_answers(folder, notes)
        known = {"costs": notes.get("costs", {}), "digest": state, "answers": answers, "unfinished": unfinished}
        return cls(str(path), document, lines, snapshot.round, unfinished is None, complaints=complaints, **known)

    @property
    def divergence(self) -> Divergence | None:
        """Return where the run, or one of its leave-one-out runs, diverged, if any did."""
        found = (part.unfinished.divergence for part in self.folders if part.unfinished is not None)
        return next((one for one in found if one is not None), None)

    @property
    def state(self) -> str:
        if self.finished:
            return "finished"
        return f"unfinished: round {self.reached} of {self.rounds}" if self.divergence is None else self.divergence.words

    @property
    def folders(self) -> Sequence[RunRecord]:
        return self.parts or (self,)

    @cached_property
    def settings(self) -> dict[str, Any]:
        return {**DEFAULTS, **self.document.get("settings", {})}

    @property
    def method(self) -> str:
        return str(self.document.get("method", {}).get("text", self.settings["method"]))

    @property
    def all_options(self) -> str:
        """The method expression with all options, because defaults can have changed since the run."""
        return str(self.document.get("method", {}).get("all_options", ""))

    @property
    def seed(self) -> int:
        return int(self.settings["seed"])

    def is_tuned(self, name: str) -> bool:
        """Return True if a search chose this setting on validation data."""
        return bool(self.document.get("origins", {}).get(name) == VALIDATED)

    @property
    def rounds(self) -> int:
        return int(self.settings["rounds"])

    @property
    def task(self) -> Task:
        return task_of_records(self.domains)

    def tables_of(self, measure: str) -> dict[str, dict[int, dict[Any, float]]]:
        """Return a metric of each domain with mean, worst and spread, by view and round."""
        if measure not in self._tables:
            self._tables[measure] = {
                view: {number: _table(by_domain, measure) for number, by_domain in found.items()}
                for view, found in self._pooled.items()
            }
        return self._tables[measure]

    def final(self, view: str, measure: str) -> dict[Any, float]:
        found = self.tables_of(measure)[view]
        return found[max(found)] if found else {}

    @cached_property
    def _pooled(self) -> dict[str, dict[int, dict[str, dict[str, Any]]]]:
        """All numbers by view, round and domain, pooled over the clients of a domain."""
        return {
            view: {number: {domain: n for (_, domain), n in domains_of(many).items()} for number, many in sorted(found.items())}
            for view, found in self.rows.items()
        }

    @cached_property
    def _tables(self) -> dict[str, dict[str, dict[int, dict[Any, float]]]]:
        return {}

    @cached_property
    def domains(self) -> dict[tuple[str, str], dict[str, Any]]:
        """All numbers of the last evaluation, pooled over the clients of a domain."""
        return {
            (view, domain): numbers
            for view, found in self._pooled.items()
            if found
            for domain, numbers in found[max(found)].items()
        }

    @cached_property
    def rows(self) -> dict[str, dict[int, list[Row]]]:
        """Scores by view and round; scores of the selected model replace those of the last round."""
        rows: dict[str, dict[int, list[Row]]] = {view: {} for view in VIEWS}
        chosen: dict[tuple[str, int], list[Row]] = {}
        for line in self.lines:
            view, number = line["view"].removeprefix(SELECTED), line["round"]
            if view in rows and "count" in line:
                row = Row(view, line["client"], line["domain"], line)
                target = rows[view].setdefault(number, []) if view == line["view"] else chosen.setdefault((view, number), [])
                target.append(row)
        for (view, number), many in chosen.items():
            rows[view][number] = many
        return rows

    @cached_property
    def test_sizes(self) -> dict[tuple[str, str], int]:
        """Number of test examples by view and domain: the recorded number, otherwise the maximum over clients."""
        sizes: dict[tuple[str, str], int] = {}
        known = self.document.get("data", {}).get("test_sizes", {})
        for line in self.lines:
            view = line["view"].removeprefix(SELECTED)
            if view in VIEWS and "count" in line:
                key = (view, line["domain"])
                sizes[key] = known.get(view, {}).get(line["domain"]) or max(sizes.get(key, 0), int(line["count"]))
        return sizes

    def test_error(self, view: str, domain: str, measure: str) -> float:
        found = self.rows[view]
        many = [row.numbers for row in found[max(found)] if row.domain == domain] if found else []
        return _test_error(many, self.test_sizes.get((view, domain)), measure) if many else math.nan

    @property
    def scored_clients(self) -> int:
        scored = [(line["round"], line["client"]) for line in self.lines if line["view"].removeprefix(SELECTED) == "seen"]
        last = max((number for number, _ in scored), default=0)
        return len({client for number, client in scored if number == last})

    @cached_property
    def losses(self) -> dict[str, dict[int, float]]:
        found: dict[str, dict[int, float]] = {}
        for line in self.lines:
            if line["view"] == "training" and math.isfinite(line.get("loss", math.nan)):
                found.setdefault(line["client"], {})[line["round"]] = line["loss"]
        return found

    @property
    def mean_losses(self) -> dict[int, float]:
        by_round: dict[int, list[float]] = {}
        for losses in self.losses.values():
            for number, loss in losses.items():
                by_round.setdefault(number, []).append(loss)
        return {number: average(values) for number, values in sorted(by_round.items())}

    def last_round_warning(self, measure: str) -> str:
        """Return a warning if the score of the last round is an outlier, otherwise an empty string."""
        if self.outlier or self.settings["selection"] != LAST:
            return self.outlier
        by_round = next((tables for tables in self.tables_of(measure).values() if tables), {})
        return LastRounds({n: by_round[n][MEAN] for n in sorted(by_round)[-WINDOW:]}).warning if by_round else ""

    def class_names(self, count: int) -> list[str]:
        """Return the recorded class names, or numbers if there are none."""
        names = [str(name) for name in self.document.get("outline", {}).get("class_names", [])]
        return names if len(names) == count else [str(number) for number in range(count)]


def _table(by_domain: Mapping[str, Mapping[str, Any]], measure: str) -> dict[Any, float]:
    found: dict[Any, float] = {domain: float(numbers.get(measure, math.nan)) for domain, numbers in by_domain.items()}
    mean, worst, spread = over_domains(list(found.values()), measure)
    return {**found, MEAN: mean, WORST: worst, SPREAD: spread}


def _test_error(scores: Sequence[Mapping[str, Any]], size: int | None, measure: str) -> float:
    """Return the error for one domain with ``size`` test examples; if ``size`` is None, clients have distinct examples."""
    if measure != "accuracy" or "standard_error" not in scores[0]:
        return standard_error(pooled(scores), measure)
    counts = [score["count"] for score in scores]
    if len(scores) > 1 and size in (None, sum(counts)):
        return float(math.hypot(*(score["standard_error"] * score["count"] for score in scores)) / sum(counts))
    return over_examples(scores, "standard_error")


def average(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else math.nan


def deviation(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.stdev(found) if len(found) > 1 else math.nan


def chance_of(numbers: Mapping[str, Any]) -> float:
    occurring = sum(count > 0 for count in numbers.get("class_counts", ()))
    return 1 / occurring if occurring else math.nan


def binomial_error(accuracy: float, count: int) -> float:
    """Return the standard error of an accuracy on ``count`` test examples."""
    return math.sqrt(max(accuracy * (1 - accuracy), 0) / count) if count else math.nan


# ----------------------------------------------------------------------------------------------------- rows of one summary


@dataclass(frozen=True)
class DomainRow:
    """The score on one domain, averaged over clients with their test set sizes as weights."""

    view: str
    domain: str
    value: float
    error: float
    count: int
    clients: int
    accuracy: float
    majority: float


def domain_rows(summary: Mapping[str, Any], measure: str = "accuracy") -> list[DomainRow]:
    """Return a metric with its error for each domain of ``Result.summary()``, seen domains first."""
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for score in summary["scores"]:
        grouped.setdefault((score["view"], score["domain"]), []).append(score)
    rows = []
    for (view, domain), many in sorted(grouped.items(), key=lambda item: item[0][0] == "unseen"):
        size = summary["test_sizes"].get(view, {}).get(domain)
        value, accuracy, majority = (measured(many, name) for name in (measure, "accuracy", "majority_rate"))
        count = sum(score["count"] for score in many) if size is None else size
        rows.append(DomainRow(view, domain, value, _test_error(many, size, measure), count, len(many), accuracy, majority))
    return rows


class CostRow(NamedTuple):
    purpose: str
    kind: str
    up: int
    down: int


def cost_rows(summary: Mapping[str, Any]) -> list[CostRow]:
    """Return the traffic by purpose and entry kind, training first."""
    up, down = summary["bytes"]["up"], summary["bytes"]["down"]
    rows = []
    for purpose in sorted({*up, *down}, key=lambda name: (name != "training", name)):
        kinds = dict.fromkeys([*down.get(purpose, {}), *up.get(purpose, {})])
        rows += [CostRow(purpose, kind, up.get(purpose, {}).get(kind, 0), down.get(purpose, {}).get(kind, 0)) for kind in kinds]
    return rows


# ---------------------------------------------------------------------------------------------------- settings that differ


def plain_value(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def recipe(run: RunRecord) -> dict[str, Any]:
    """Return the settings that distinguish rows of one method."""
    chosen = {name: plain_value(run.settings[name]) for name in METHOD_SETTINGS}
    model = run.document.get("model", {})
    model_name = chosen["model"] or f"{model.get('type', '?')} ({model.get('parameters', '?')} parameters)"
    # Selection by validation depends on which rounds were evaluated.
    selection, every = run.settings["selection"], run.settings["evaluate_every"] or 1
    among = f" of every {f'{every} rounds' if every > 1 else 'round'}" if selection in BY_VALIDATION else ""
    return chosen | {"model": model_name, "selection": f"{selection}{among}"}


def differing(runs: Sequence[RunRecord]) -> list[str]:
    recipes = [recipe(run) for run in runs]
    return [name for name in recipes[0] if len({repr(chosen.get(name)) for chosen in recipes}) > 1]


# ----------------------------------------------------------------------------------------------------------- several runs


def joined(runs: Sequence[RunRecord], domains: Collection[str]) -> RunRecord:
    """Join the leave-one-out runs of one seed; the result is finished if it has a finished run for each of ``domains``."""
    parts: dict[str, RunRecord] = {}
    for run in runs:
        name = run.settings["unseen"][0]
        if name not in parts or (run.finished, run.reached) >= (parts[name].finished, parts[name].reached):
            parts[name] = run
    chosen = list(parts.values())
    lines = [line for run in chosen for line in run.lines if line["view"].removeprefix(SELECTED) == "unseen"]
    losses = [
        {"round": number, "view": "training", "client": f"clients without {name}", "loss": loss}
        for name, run in parts.items()
        for number, loss in run.mean_losses.items()
    ]
    document = chosen[0].document
    return RunRecord(
        path=", ".join(run.path for run in chosen),
        document={**document, "settings": {**document.get("settings", {}), "unseen": []}},
        lines=[*lines, *losses],
        reached=min(run.reached for run in chosen),
        finished=set(parts) == set(domains) and all(run.finished for run in chosen),
        costs=_sum([run.costs for run in chosen if run.costs]),
        digest="; ".join(run.digest for run in chosen),
        complaints=[text for run in chosen for text in run.complaints],
        answers={key: found for run in chosen for key, found in run.answers.items() if key[0] == "unseen"},
        parts=[*chosen, *(run for run in runs if run not in chosen)],
    )


def _sum(trees: Sequence[Any]) -> Any:
    if trees and isinstance(trees[0], Mapping):
        keys = dict.fromkeys(key for tree in trees for key in tree)
        return {key: _sum([tree[key] for tree in trees if key in tree]) for key in keys}
    return sum(trees) if trees and isinstance(trees[0], int | float) else trees[0] if trees else {}


def run_folders(paths: Sequence[str | Path]) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, paths):
        pattern = "final/*/run.toml" if (path / SWEEP_FILE).is_file() else "*/run.toml"
        inside = [path] if (path / "run.toml").is_file() else sorted(file.parent for file in path.glob(pattern))
        if not inside:
            raise RunFolderError(f"{path} is not a run folder and does not contain any: {explain_missing(path)}")
        found += inside
    return found
