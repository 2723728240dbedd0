"""Reads run folders for the report: runs become entries (one method and settings, several seeds), entries become groups (one data).

Runs that each left out another domain are one leave-one-out comparison: the runs of a seed are joined into one, scored on every domain in
turn (``Run.parts``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from polyfed.core.evaluation import Row
from polyfed.core.method import parse
from polyfed.core.metrics import SMALLER_IS_BETTER
from polyfed.core.tasks.known import task_of_records
from polyfed.core.tasks.task import Headline, Task
from polyfed.errors import PolyfedError, RunFolderError
from polyfed.runs.folder.checkpoint import digest
from polyfed.runs.folder.left_files import Answers, read_answers
from polyfed.runs.folder.paths import is_path
from polyfed.runs.folder.run_folder import RunFolder, missing_words
from polyfed.runs.headline import domains_of, headline_of
from polyfed.settings import BY_VALIDATION, FACTS, setting_names

DEFAULTS: Mapping[str, Any] = {name: facts.default for name, facts in FACTS.items()}
VIEWS = ("seen", "unseen")
SWEEP_FILE = "sweep.json"
"""What a search leaves in its folder; the runs that tested what it chose are in ``final``."""
SELECTED = "selected_"
"""What the views of the model that validation chose begin with."""
DATA_SETTINGS = ("data", *setting_names("partition"))
METHOD_SETTINGS = [name for name, facts in FACTS.items() if facts.changes_results and name not in DATA_SETTINGS]
"""Settings that set entries of one method apart."""
# Keys of the summaries in a table of domains; a domain may be called "mean" too.
MEAN, WORST, SPREAD = ("", "mean"), ("", "worst"), ("", "spread")


@dataclass(frozen=True)
class Run:
    """One run folder, read."""

    path: str
    document: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]
    reached: int = 0
    finished: bool = False
    costs: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""
    complaints: Sequence[str] = ()
    answers: Answers = field(default_factory=dict, repr=False)
    parts: Sequence[Run] = ()

    @property
    def folders(self) -> Sequence[Run]:
        """The run folders behind it: itself, or the runs that each left out one domain."""
        return self.parts or (self,)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings, defaults filled in."""
        return {**DEFAULTS, **self.document.get("settings", {})}

    @property
    def method(self) -> str:
        """The method's text."""
        return str(self.document.get("method", {}).get("text", self.settings["method"]))

    @property
    def all_options(self) -> str:
        """The method's text with every option as it was; defaults may have changed since."""
        return str(self.document.get("method", {}).get("all_options", ""))

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.settings["seed"])

    @property
    def rounds(self) -> int:
        """How many rounds it is meant to have."""
        return int(self.settings["rounds"])

    @property
    def tables(self) -> dict[str, dict[int, dict[Any, float]]]:
        """The accuracies."""
        return self.tables_of("accuracy")

    def tables_of(self, measure: str) -> dict[str, dict[int, dict[Any, float]]]:
        """By view and round: a measure of each domain, their mean, worst and spread."""
        if measure not in self._tables:
            self._tables[measure] = {
                view: {number: _table(by_domain, measure) for number, by_domain in found.items()}
                for view, found in self._pooled.items()
            }
        return self._tables[measure]

    @cached_property
    def _pooled(self) -> dict[str, dict[int, dict[str, dict[str, Any]]]]:
        """All numbers by view, round and domain, over the clients of a domain."""
        return {
            view: {number: {domain: n for (_, domain), n in domains_of(many).items()} for number, many in sorted(found.items())}
            for view, found in self.rows.items()
        }

    @cached_property
    def _tables(self) -> dict[str, dict[str, dict[int, dict[Any, float]]]]:
        return {}

    @cached_property
    def domains(self) -> dict[tuple[str, str], dict[str, Any]]:
        """All numbers of the last evaluation, over the clients of a domain."""
        return {
            (view, domain): numbers
            for view, found in self._pooled.items()
            if found
            for domain, numbers in found[max(found)].items()
        }

    @cached_property
    def rows(self) -> dict[str, dict[int, list[Row]]]:
        """Scores by view and round. A selected model stands in the last round's place."""
        rows: dict[str, dict[int, list[Row]]] = {view: {} for view in VIEWS}
        chosen: dict[tuple[str, int], list[Row]] = {}
        for line in self.lines:
            view, number = line["view"].removeprefix(SELECTED), line["round"]
            if view in rows and "count" in line:
                row = Row(view, line["client"], line["domain"], line)
                home = rows[view].setdefault(number, []) if view == line["view"] else chosen.setdefault((view, number), [])
                home.append(row)
        for (view, number), many in chosen.items():
            rows[view][number] = many
        return rows

    @cached_property
    def test_sizes(self) -> dict[tuple[str, str], int]:
        """Test examples by view and domain: as the run wrote them down, else the most that one client was tested on."""
        sizes: dict[tuple[str, str], int] = {}
        known = self.document.get("data", {}).get("test_sizes", {})
        for line in self.lines:
            view = line["view"].removeprefix(SELECTED)
            if view in VIEWS and "count" in line:
                key = (view, line["domain"])
                sizes[key] = known.get(view, {}).get(line["domain"]) or max(sizes.get(key, 0), int(line["count"]))
        return sizes

    @cached_property
    def scored_clients(self) -> int:
        """How many clients' models were scored at the end, where each has its own."""
        scored = [(line["round"], line["client"]) for line in self.lines if line["view"].removeprefix(SELECTED) == "seen"]
        last = max((number for number, _ in scored), default=0)
        return len({client for number, client in scored if number == last})

    @cached_property
    def losses(self) -> dict[str, dict[int, float]]:
        """Training loss by client and round."""
        found: dict[str, dict[int, float]] = {}
        for line in self.lines:
            if line["view"] == "training" and math.isfinite(line.get("loss", math.nan)):
                found.setdefault(line["client"], {})[line["round"]] = line["loss"]
        return found

    def bytes(self, direction: str, purpose: str) -> dict[str, int]:
        """Bytes by class of entry."""
        return dict(self.costs.get("bytes", {}).get(direction, {}).get(purpose, {}))


def _table(by_domain: Mapping[str, Mapping[str, Any]], measure: str) -> dict[Any, float]:
    """A measure of each domain, their mean, worst and spread; a domain without it has NaN, and so have these."""
    found: dict[Any, float] = {domain: float(numbers.get(measure, math.nan)) for domain, numbers in by_domain.items()}
    values = list(found.values())
    if not values or any(map(math.isnan, values)):
        return {**found, MEAN: math.nan, WORST: math.nan, SPREAD: math.nan}
    worst = max(values) if measure in SMALLER_IS_BETTER else min(values)
    return {**found, MEAN: sum(values) / len(values), WORST: worst, SPREAD: max(values) - min(values)}


@dataclass(frozen=True)
class GroupEntry:
    """Runs of one method and the same settings, that differ in their seed, looked at by one measure."""

    label: str
    runs: Sequence[Run]
    measure: str = "accuracy"

    @property
    def finished(self) -> bool:
        """Whether any of its runs came to its end."""
        return any(run.finished for run in self.runs)

    @property
    def first(self) -> Run:
        """The run that stands for what all of them have in common."""
        return self.counted[0]

    @cached_property
    def counted(self) -> list[Run]:
        """The runs whose numbers count: finished ones where there are any, one for each seed."""
        chosen: dict[int, Run] = {}
        for run in sorted(self.runs, key=lambda run: run.seed):
            if run.finished or not self.finished:
                chosen.setdefault(run.seed, run)
        return list(chosen.values())

    @property
    def seeds(self) -> list[int]:
        """Seeds of the runs that count."""
        return [run.seed for run in self.counted]

    @cached_property
    def is_reference(self) -> bool:
        """Whether it pools all data, so that it is no federated method."""
        written = self.first.document.get("method", {}).get("pools_data")
        if written is not None:
            return bool(written)
        try:
            return parse(self.first.method).population is not None
        except PolyfedError:
            return False

    def rounds(self, view: str) -> list[int]:
        """Rounds in which all of its runs were evaluated."""
        return sorted(set.intersection(*(set(run.tables_of(self.measure)[view]) for run in self.counted)))

    def finals(self, view: str, key: Any) -> dict[int, float]:
        """The last score by seed."""
        found = {}
        for run in self.counted:
            table = run.tables_of(self.measure)[view]
            found[run.seed] = table[max(table)].get(key, math.nan) if table else math.nan
        return found if all(map(math.isfinite, found.values())) else {}

    def scores(self, view: str, key: Any, number: int) -> dict[int, float]:
        """The score in one round by seed; nothing where a seed has none."""
        found = {run.seed: run.tables_of(self.measure)[view][number].get(key, math.nan) for run in self.counted}
        return found if all(map(math.isfinite, found.values())) else {}

    def mean(self, view: str, key: Any) -> float:
        """The last score, averaged over seeds."""
        return average(self.finals(view, key).values())


@dataclass(frozen=True)
class Group:
    """Entries on the same data, looked at by one measure; ``left_out`` are the domains that are unseen in turn."""

    name: str
    source: str
    entries: Sequence[GroupEntry]
    left_out: Sequence[str] = ()
    measure: str = "accuracy"

    def by(self, measure: str) -> Group:
        """The same runs by another measure."""
        return replace(self, entries=[replace(entry, measure=measure) for entry in self.entries], measure=measure)

    @property
    def runs(self) -> list[Run]:
        """All its runs."""
        return [run for entry in self.entries for run in entry.runs]

    @property
    def task(self) -> Task:
        """What was learnt, as the scores tell."""
        return task_of_records(self.domains_scored())

    def headline(self, metric: str) -> Headline:
        """Return the metric of its tables: the requested one, or the one that its runs record."""
        return headline_of(metric, [part.document for run in self.runs for part in run.folders], self.domains_scored())

    def domains_scored(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The numbers of each domain in some run; which classes its test set holds is the same in all."""
        return {key: numbers for run in reversed(self.runs) for key, numbers in run.domains.items()}

    def domains(self, view: str) -> list[str]:
        """Domains scored in a view, in the order of the first run."""
        named = [domain for entry in self.entries for run in entry.runs for v, domain in run.test_sizes if v == view]
        return list(dict.fromkeys(named))

    def test_size(self, view: str, domain: str) -> int:
        """Test examples of a domain."""
        return max((run.test_sizes.get((view, domain), 0) for entry in self.entries for run in entry.runs), default=0)

    def contenders(self, view: str) -> list[GroupEntry]:
        """Who can win: finished, scored on every domain, and federated (unless nobody is)."""
        domains = self.domains(view)
        whole = [entry for entry in self.entries if entry.finished and domains and all(entry.finals(view, d) for d in domains)]
        return [entry for entry in whole if not entry.is_reference] or whole


def average(values: Iterable[float]) -> float:
    """The mean, or NaN of nothing."""
    found = list(values)
    return sum(found) / len(found) if found else math.nan


def deviation(values: Iterable[float]) -> float:
    """The standard deviation of a sample (n - 1), or NaN of fewer than two."""
    found = list(values)
    return statistics.stdev(found) if len(found) > 1 else math.nan


def gather(paths: Sequence[str | Path]) -> list[Group]:
    """Read the folders and sort them into groups; all folders that are no runs are named at once."""
    if not paths:
        raise RunFolderError(
            "There is nothing to report: no run folder was given. Name at least one: polyfed report RUN... -o FILE.html"
        )
    runs, problems = [], []
    for path in dict.fromkeys(str(path) for path in paths):
        try:
            runs.append(read_run(path))
        except RunFolderError as error:
            problems.append(str(error) + _runs_inside(Path(path)))
    if problems:
        raise RunFolderError(" ".join(problems))
    return [group for many in _by_data(runs) for group in _groups(many)]


def _by_data(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs on the same data, whichever domains they leave out."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(_data_key(run, but=("unseen",)), []).append(run)
    return list(found.values())


def _groups(runs: Sequence[Run]) -> list[Group]:
    """One leave-one-out comparison, or a group for each choice of unseen domains."""
    unseen = [tuple(run.settings["unseen"]) for run in runs]
    if all(len(names) == 1 for names in unseen) and len(set(unseen)) > 1:
        return [_group(left_out_in_turn(runs), sorted({name for (name,) in unseen}))]
    by_data: dict[str, list[Run]] = {}
    for run in runs:
        by_data.setdefault(_data_key(run), []).append(run)
    return [_group(many) for many in by_data.values()]


def left_out_in_turn(runs: Sequence[Run]) -> list[Run]:
    """One run for each method, settings and seed, joined from those that left out one domain each."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        key = repr((run.method, recipe(run), run.all_options, run.seed))
        found.setdefault(key, []).append(run)
    domains = {run.settings["unseen"][0] for run in runs}
    return [_joined(many, domains) for many in found.values()]


def _joined(runs: Sequence[Run], domains: Collection[str]) -> Run:
    """The runs of one seed as one, with the scores on the domain that each left out."""
    parts = {run.settings["unseen"][0]: run for run in sorted(runs, key=lambda run: (run.finished, run.reached))}
    ordered = [parts[name] for name in sorted(parts)]
    first = ordered[0]
    lines = [line for run in ordered for line in run.lines if line["view"].removeprefix(SELECTED) == "unseen"]
    losses = [
        {"round": number, "view": "training", "client": f"clients without {name}", "loss": average(values)}
        for name, run in sorted(parts.items())
        for number, values in _losses_by_round(run).items()
    ]
    return Run(
        path=", ".join(run.path for run in ordered),
        document={**first.document, "settings": {**first.document.get("settings", {}), "unseen": []}},
        lines=[*lines, *losses],
        reached=min(run.reached for run in ordered),
        finished=set(parts) == set(domains) and all(run.finished for run in ordered),
        costs=_sum([run.costs for run in ordered if run.costs]),
        digest="; ".join(run.digest for run in ordered),
        complaints=[text for run in ordered for text in run.complaints],
        answers={key: found for run in ordered for key, found in run.answers.items() if key[0] == "unseen"},
        parts=[*ordered, *(run for run in runs if run not in ordered)],
    )


def _losses_by_round(run: Run) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for by_round in run.losses.values():
        for number, loss in by_round.items():
            found.setdefault(number, []).append(loss)
    return found


def _sum(trees: Sequence[Any]) -> Any:
    """Trees of numbers, added leaf by leaf; what only some have counts too."""
    if trees and isinstance(trees[0], Mapping):
        keys = dict.fromkeys(key for tree in trees for key in tree)
        return {key: _sum([tree[key] for tree in trees if key in tree]) for key in keys}
    return sum(trees) if trees and isinstance(trees[0], int | float) else trees[0] if trees else {}


def run_folders(paths: Sequence[str | Path]) -> list[Path]:
    """The run folders named, and those inside folders that are no run themselves."""
    found: list[Path] = []
    for path in map(Path, paths):
        pattern = "final/*/run.toml" if (path / SWEEP_FILE).is_file() else "*/run.toml"
        inside = [path] if (path / "run.toml").is_file() else sorted(file.parent for file in path.glob(pattern))
        if not inside:
            raise RunFolderError(f"{path} is not a run and holds none: {missing_words(path)}")
        found += inside
    return found


def read_run(path: str | Path) -> Run:
    """Read one run folder, finished or not: the scores up to its newest checkpoint."""
    folder = RunFolder(path)
    document = folder.document()
    snapshot, complaints = folder.read()
    if snapshot is None:
        # No checkpoint vouches for what the metrics say.
        return Run(str(path), document, [], complaints=complaints)
    notes, state = snapshot.notes, digest(snapshot)
    lines = folder.sealed_lines(notes)
    answers = read_answers(folder, notes)
    finished, costs = notes.get("finished", False), notes.get("costs", {})
    return Run(str(path), document, lines, snapshot.round, finished, costs, state, complaints, answers)


def _runs_inside(path: Path) -> str:
    inside = sorted(child.parent.name for child in path.glob("*/run.toml")) if path.is_dir() else []
    return f" It holds runs, though: {', '.join(inside[:5])}{' and more' if len(inside) > 5 else ''}." if inside else ""


def _data_key(run: Run, but: Sequence[str] = ()) -> str:
    facts = run.document.get("data", {})
    settings = {name: _plain(run.settings[name]) for name in DATA_SETTINGS if name not in but}
    if is_path(settings["data"]):
        # The same folder of images may lie elsewhere on another machine; its source says how many there are of what.
        settings["data"] = Path(settings["data"]).name
    return repr([facts.get("source"), facts.get("classes"), list(settings.values())])


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def recipe(run: Run) -> dict[str, Any]:
    """What sets entries of one method apart."""
    chosen = {name: _plain(run.settings[name]) for name in METHOD_SETTINGS}
    model = run.document.get("model", {})
    named = chosen["model"] or f"{model.get('type', '?')} ({model.get('parameters', '?')} parameters)"
    return chosen | {"model": named, "selection": _selection(run)}


def _selection(run: Run) -> str:
    """How the round that counts was chosen, and among which."""
    every = run.settings["evaluate_every"] or 1
    among = f" of every {f'{every} rounds' if every > 1 else 'round'}" if run.settings["selection"] in BY_VALIDATION else ""
    return f"{run.settings['selection']}{among}"


def differing(runs: Sequence[Run]) -> list[str]:
    """Names of settings in which the runs differ."""
    recipes = [recipe(run) for run in runs]
    return [name for name in recipes[0] if len({repr(chosen.get(name)) for chosen in recipes}) > 1]


def _group(runs: Sequence[Run], left_out: Sequence[str] = ()) -> Group:
    by_method: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        by_method.setdefault(run.method, {}).setdefault(repr((recipe(run), run.all_options)), []).append(run)
    entries = []
    for method, groups in by_method.items():
        apart = differing([many[0] for many in groups.values()])
        changed = len({many[0].all_options for many in groups.values()}) > 1
        for many in groups.values():
            text = many[0].all_options if changed else method
            details = ", ".join(f"{name}={recipe(many[0])[name]}" for name in apart)
            entries.append(GroupEntry(f"{text} [{details}]" if details else text, many))
    facts, settings = runs[0].document.get("data", {}), runs[0].settings
    extras = [f"{name} {settings[name]}" for name in ("partition", "few_shot") if settings[name] != DEFAULTS[name]]
    extras += [f"unseen: {', '.join(settings['unseen'])}"] if settings["unseen"] else []
    extras += ["leave-one-out"] if left_out else []
    return Group(", ".join([str(facts.get("name", settings["data"])), *extras]), str(facts.get("source", "")), entries, left_out)
