"""Describe which method is best and how significant its lead is; ``PairedDifference.verdict`` is the only rule for this."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import t as student_t

from polyfed.studies.report.paired_tests import ImageTest, image_test
from polyfed.studies.report.run_record import MEAN, WORST, RunRecord, average, deviation, differing, recipe
from polyfed.studies.report.run_set import EQUAL, MethodRow, RunSet
from polyfed.studies.report.words import listed, percent, points
from polyfed.tasks.metrics import MEASURES

CLEAR, ONE_SEED = "clear", "beyond the noise of the test sets; one seed"
RATE = "lr"


@dataclass(frozen=True)
class PairedDifference:
    """The difference between two means over domains, ``ahead`` minus ``behind``, as a fraction.

    Attributes:
        spread: Standard deviation over paired seeds; NaN for fewer than two.
        test_error: Standard error due to the size of the test sets if the errors of the two methods are independent; NaN for
            metrics without one.
        images: Comparison on the same test images.
    """

    ahead: MethodRow
    behind: MethodRow
    difference: float
    by_seed: Sequence[float]
    test_error: float
    images: ImageTest | None = None

    @property
    def spread(self) -> float:
        return deviation(self.by_seed)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean difference over seeds (Student's t); None for fewer than two paired seeds."""
        count = len(self.by_seed)
        if count < 2:
            return None
        half = float(student_t.ppf(0.975, count - 1)) * self.spread / math.sqrt(count)
        return average(self.by_seed) - half, average(self.by_seed) + half

    @property
    def beyond_test_noise(self) -> bool:
        """Return True if the difference exceeds the random variation of the test images."""
        # Predictions for the same images allow a bootstrap; otherwise the difference must exceed two standard errors.
        if self.images is not None:
            return self.images.low > 0
        return math.isnan(self.test_error) or self.difference > 2 * self.test_error

    @property
    def beyond_seed_noise(self) -> bool:
        return self.interval is not None and self.interval[0] > 0

    @property
    def ends(self) -> tuple[float, float] | None:
        """The 95 % interval over seeds or, for one seed, over its test images."""
        return self.interval or (None if self.images is None else (self.images.low, self.images.high))

    @property
    def verdict(self) -> str:
        if not self.beyond_test_noise:
            return f"within the noise of the test sets{'; one seed' if self.interval is None else ''}"
        if self.interval is None:
            return ONE_SEED
        return CLEAR if self.beyond_seed_noise else f"inconclusive with {len(self.by_seed)} seeds"


@dataclass(frozen=True)
class Verdict:
    """A title and sentences about one view, and the best method compared with every other."""

    view: str
    title: str
    sentences: Sequence[str]
    differences: Sequence[PairedDifference] = ()

    @property
    def text(self) -> str:
        return " ".join([self.title, *self.sentences])

    @property
    def summary(self) -> str:
        """The comparison of the best two methods in one short sentence; empty for a single method."""
        if not self.differences:
            return ""
        first = self.differences[0]
        if first.ends is None:
            return f"Best minus second best: {points(first.difference, True)} points; {describe(first)}."
        over = "test images" if first.interval is None else f"{len(first.by_seed)} seeds"
        low, high = (points(end, True) for end in first.ends)
        return f"Best minus second best: {low} to {high} points (95 % interval over {over}); {describe(first)}."

    def as_json(self) -> dict[str, Any]:
        return {
            "view": self.view,
            "title": self.title,
            "sentences": list(self.sentences),
            "differences": [
                {
                    "best": one.ahead.method,
                    "compared_with": one.behind.method,
                    "difference": one.difference,
                    "paired_seeds": len(one.by_seed),
                    "interval": one.ends,
                    "interval_over": "seeds" if one.interval is not None else "test images",
                    "verdict": describe(one),
                }
                for one in self.differences
            ],
        }


def describe(pair: PairedDifference) -> str:
    """Return the verdict with a caveat if the settings of the two methods differ."""
    return f"{pair.verdict}; settings differ" if _unequal(pair) else pair.verdict


def paired_difference(runs: RunSet, view: str, ahead: MethodRow, behind: MethodRow) -> PairedDifference:
    one, other = ahead.finals(view, MEAN), behind.finals(view, MEAN)
    by_seed = [one[seed] - other[seed] for seed in one if seed in other]
    error = math.hypot(ahead.test_error(view, MEAN), behind.test_error(view, MEAN))
    balanced = runs.measure == "balanced_accuracy"
    images = image_test(ahead.answers, behind.answers, view, balanced) if balanced or runs.measure == "accuracy" else None
    return PairedDifference(ahead, behind, average(one.values()) - average(other.values()), by_seed, error, images)


def verdicts_of(runs: RunSet) -> list[Verdict]:
    return [verdict for view in runs.views if (verdict := verdict_of(runs, view)) is not None]


def verdict_of(runs: RunSet, view: str) -> Verdict | None:
    """Describe the result of a view; return None if it has no scores."""
    domains = runs.domains(view)
    if not domains:
        return None
    contenders = runs.ranked(view, runs.contenders(view))
    where = _where(view, domains, runs)
    notes = [row.note for row in runs.rows if row.missing and row.finished]
    if not contenders and notes:
        return Verdict(view, f"No method has finished runs of all seeds {where}.", notes)
    if not contenders:
        return Verdict(view, f"No finished run has scores {where}.", ["The tables show the intermediate scores."])
    best = contenders[0]
    references = [
        f"{row.method} trains on the pooled data. It is a reference, not a federated method: {percent(row.average(view, MEAN))} %."
        for row in runs.rows
        if row.finished and row.is_reference and row not in contenders and row.finals(view, MEAN)
    ]
    if len(contenders) == 1:
        title = f"{best.method} reaches {percent(best.average(view, MEAN))} % {where}."
        worst = min(domains, key=lambda domain: best.average(view, domain))
        details = [f"Its worst domain is {worst} with {percent(best.average(view, worst))} %."] if len(domains) > 1 else []
        alone = "There is no other method to compare it with. Add runs of other methods on the same data."
        return Verdict(view, title, [*details, *(notes or [alone]), *references])
    differences = [paired_difference(runs, view, best, other) for other in contenders[1:]]
    sentences = [*_domains_won(view, domains, contenders)]
    if names := _unequal(differences[0]):
        sentences.append(f"The two runs differ in {listed(names)}, so this does not compare the methods alone.")
    sentences += _about_rates(contenders)
    sentences += _significance(differences[0])
    if len(differences) > 1:
        sentences.append(
            f"The best of {len(contenders)} methods was selected after seeing the scores, and the intervals are not corrected for "
            "this. Treat small differences with caution."
        )
    return Verdict(view, _title(differences[0], view, where), [*sentences, *notes, *references], differences)


def _where(view: str, domains: Sequence[str], runs: RunSet) -> str:
    measure = "" if runs.measure == "accuracy" else f"{MEASURES[runs.measure]} "
    trained = "the clients trained on" if view == "seen" else "held out of training"
    if len(domains) == 1:
        return f"{measure}on {domains[0]}" if view == "seen" else f"{measure}on {domains[0]}, a domain {trained}"
    turns = ", one at a time" if runs.left_out else ""
    return f"{measure}on average over {len(domains)} domains {trained}{turns}"


def _title(first: PairedDifference, view: str, where: str) -> str:
    best, other = first.ahead.method, first.behind.method
    level, more = f"{percent(first.ahead.average(view, MEAN))} %", points(first.difference)
    unequal = _unequal(first)
    if first.verdict == CLEAR and not unequal:
        return f"{best} wins: {level} {where}, {more} points more than {other}."
    if first.verdict in (CLEAR, ONE_SEED):
        caveat = "Their settings differ." if unequal else "There is only one seed."
        return f"{best} is ahead: {level} {where}, {more} points more than {other}. {caveat}"
    if first.difference < EQUAL:
        return f"A tie: {best} and {other} both reach {level} {where}."
    return f"No clear winner: {best} ranks first with {level} {where}, {more} points above {other}."


def _unequal(first: PairedDifference) -> list[str]:
    """Return the settings that differ between two methods, except those of ``_differing``."""
    one, other = first.ahead.first, first.behind.first
    return [] if one.method == other.method else _differing([one, other])


def _differing(runs: Sequence[RunRecord]) -> list[str]:
    """Return the settings that differ, except a model that a method replaced itself, and values chosen on validation data."""
    return [
        name
        for name in differing(runs)
        if (name != "model" or len({run.settings["model"] for run in runs}) > 1) and not all(run.is_tuned(name) for run in runs)
    ]


def _about_rates(contenders: Sequence[MethodRow]) -> list[str]:
    """Report if the learning rates were chosen on validation data."""
    tuned = [row for row in contenders if row.first.is_tuned(RATE)]
    rates = {row.method: f"{row.first.settings[RATE]:g}" for row in contenders}
    if len(tuned) == len(contenders):
        return [f"Chosen on validation data: {RATE} {listed(f'{rate} for {method}' for method, rate in rates.items())}."]
    if tuned:
        others = listed(row.method for row in contenders if row not in tuned)
        return [f"{RATE} was chosen on validation data for {listed(row.method for row in tuned)}, but not for {others}."]
    if len(set(rates.values())) > 1:
        return []
    return [
        f"All methods use {RATE} {next(iter(rates.values()))}, which was not tuned per method. Another rate can change the ranking "
        "(polyfed sweep tunes it)."
    ]


def _domains_won(view: str, domains: Sequence[str], contenders: Sequence[MethodRow]) -> list[str]:
    if len(domains) == 1:
        return []
    best, won, shared = contenders[0], list[str](), list[str]()
    for domain in domains:
        gap = best.average(view, domain) - max(row.average(view, domain) for row in contenders[1:])
        if gap > EQUAL:
            won.append(domain)
        elif gap > -EQUAL:
            shared.append(domain)
    names = f" ({listed(won)})" if 0 < len(won) < len(domains) else ""
    tied = f", and shares the best score on {listed(shared)}" if shared else ""
    worst = max(contenders, key=lambda row: row.average(view, WORST))
    also = "it also ranks first" if worst is best else f"{worst.method} ranks first"
    by_worst = f"By worst domain, {also} with {percent(worst.average(view, WORST))} %."
    return [f"{best.method} is best on {len(won)} of {len(domains)} domains{names}{tied}. {by_worst}"]


def _significance(first: PairedDifference) -> list[str]:
    sentences = []
    if first.interval is None:
        reason = "One seed does not" if len(first.by_seed) == 1 else "The methods have no seed in common, and unpaired runs do not"
        sentences.append(
            f"{reason} show how much the result varies between seeds. Repeat with more seeds (--seed 1, --seed 2, ...)."
        )
    else:
        low, high = first.interval
        ahead = sum(value > 0 for value in first.by_seed)
        count = len(first.by_seed)
        sentences.append(
            f"Over {count} paired seeds the difference is {points(average(first.by_seed), True)} ± {points(first.spread)} points "
            f"(mean ± standard deviation; ahead in {ahead} of {count}); its 95 % interval is {points(low, True)} to {points(high, True)}"
            + (
                ", which excludes zero."
                if first.beyond_seed_noise
                else f", which includes zero: {count} seeds are not enough to decide."
            )
        )
    side = "beyond" if first.beyond_test_noise else "within"
    found = f"The difference of {100 * first.difference:.2f} points is {side} the noise of the test sets"
    if first.images is not None:
        # Predictions for the same images are more informative than the test set sizes.
        images = first.images
        sentences.append(f"{found}. {first.ahead.method} (first) compared with {first.behind.method} (second): {images.summary}")
        if (images.p_value < 0.05 and images.only_first > images.only_second) != first.beyond_test_noise:
            sentences.append(
                "McNemar's test disagrees with the bootstrap. The verdict follows the bootstrap, which averages over domains and seeds "
                f"like the scores; McNemar's test pools the images of all domains for seed {images.seed}. Treat the lead with caution."
            )
    elif not math.isnan(first.test_error):
        sentences.append(f"{found}: given the test set sizes, two standard errors are {200 * first.test_error:.2f} points.")
    return sentences


def notices(runs: RunSet) -> list[str]:
    """Return caveats about the runs: incomplete runs, and differences in settings, seeds or test sets."""
    rows = runs.rows
    sentences = [sentence for row in rows for sentence in _about_runs(row)]
    firsts = [row.first for row in rows]
    for name in _differing(firsts) if len({run.method for run in firsts}) > 1 else ():
        values = [f"{recipe(row.first).get(name)} for {row.method}" for row in rows]
        sentences.append(f"Settings differ: {name} is {listed(values)}.")
    if len({tuple(row.seeds) for row in rows if row.finished}) > 1:
        by_row = "; ".join(f"{row.method} has {listed(map(str, row.seeds))}" for row in rows)
        sentences.append(f"Seeds differ: {by_row}.")
    sizes: dict[tuple[str, str], set[int]] = {}
    for run in runs.runs:
        for key, count in run.test_sizes.items():
            sizes.setdefault(key, set()).add(count)
    sentences += [
        f"The test sets of {domain} differ in size between runs ({listed(map(str, sorted(found)))})."
        for (_, domain), found in sizes.items()
        if len(found) > 1
    ]
    return sentences


def _about_runs(row: MethodRow) -> list[str]:
    sentences = []
    for run in row.records:
        who, scored, clients = f"{row.method}, seed {run.seed}", run.scored_clients, run.document.get("data", {}).get("clients", 0)
        if run.settings["evaluate_clients"] and 0 < run.settings["evaluate_clients"] <= scored < clients:
            sentences.append(f"{who}: {scored} of {clients} clients were scored, sampled with the seed.")
        instead = (
            "The report uses the checkpoint before it." if run.digest else "No checkpoint is readable, so there are no scores."
        )
        sentences += [f"{complaint} {instead}" for complaint in run.complaints]
        if run.parts:
            sentences += _about_parts(who, run)
        elif not run.finished:
            sentences.append(_unfinished(who, run, " Its scores are not shown." if row.finished else ""))
        elif run not in row.counted:
            sentences.append(f"{run.path} repeats seed {run.seed} of {row.method}. Only one run per seed is used.")
        if run.finished and not run.parts and (outlier := run.last_round_warning(row.measure)):
            sentences.append(f"{who}: {outlier}")
    return sentences


def _unfinished(who: str, run: RunRecord, consequence: str = "") -> str:
    if run.divergence is not None:
        found = run.divergence
        return f"{who}, {found.words}.{consequence} {found.remedy}"
    progress = f"Unfinished: {who}, stopped after round {run.reached} of {run.rounds}."
    return f"{progress}{consequence} Resume it with: polyfed resume {shlex.quote(run.path)}"


def _about_parts(who: str, run: RunRecord) -> list[str]:
    unfinished = [part for part in run.parts if not part.finished]
    if run.finished or unfinished:
        return [] if run.finished else [_unfinished(f"{who}, without {part.settings['unseen'][0]}", part) for part in unfinished]
    scored = listed(part.settings["unseen"][0] for part in run.parts)
    return [
        f"Incomplete: {who}, has only the runs without {scored}. Runs without the other domains are missing, so it is not ranked."
    ]
