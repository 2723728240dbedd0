"""Who won, and with what confidence: the numbers of the runs in words that never say more than the numbers do.

``PairedDifference.verdict`` is the only rule; every table and sentence about a winner follows it.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import t as student_t

from polyfed.studies.report.paired_tests import ImageTest, image_test
from polyfed.studies.report.run_record import MEAN, WORST, RunRecord, average, deviation, differing, recipe
from polyfed.studies.report.run_set import EQUAL, MethodRow, RunSet
from polyfed.studies.report.words import listed, percent, points
from polyfed.tasks.metrics import MEASURES

CLEAR, ONE_SEED = "clear", "beyond the noise of the test sets; one seed"


@dataclass(frozen=True)
class PairedDifference:
    """The difference of two means over domains: ``ahead`` less ``behind``, as fractions.

    ``spread`` is its standard deviation over paired seeds (NaN below two), ``test_error`` its standard error from the size of the
    test sets, taking the two methods' errors as independent (NaN for measures that have none), and ``images`` compares the two on the
    same test images.
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
        """The 95 % interval of the mean difference over seeds (Student's t); None below two paired seeds."""
        count = len(self.by_seed)
        if count < 2:
            return None
        half = float(student_t.ppf(0.975, count - 1)) * self.spread / math.sqrt(count)
        return average(self.by_seed) - half, average(self.by_seed) + half

    @property
    def beyond_test_noise(self) -> bool:
        """Whether the difference is more than luck of the test images.

        Where both answered the same images, the bootstrap over them says so; else it is more than twice its error from their number.
        """
        if self.images is not None:
            return self.images.low > 0
        return math.isnan(self.test_error) or self.difference > 2 * self.test_error

    @property
    def beyond_seed_noise(self) -> bool:
        """Whether the interval over seeds leaves out zero."""
        return self.interval is not None and self.interval[0] > 0

    @property
    def verdict(self) -> str:
        """A few words for a table."""
        if not self.beyond_test_noise:
            return "within the noise of the test sets"
        if self.interval is None:
            return ONE_SEED
        return CLEAR if self.beyond_seed_noise else f"not settled by {len(self.by_seed)} seeds"


@dataclass(frozen=True)
class Verdict:
    """One view in words: a title, sentences below it, and the best method against every other."""

    view: str
    title: str
    sentences: Sequence[str]
    differences: Sequence[PairedDifference] = ()


def paired_difference(runs: RunSet, view: str, ahead: MethodRow, behind: MethodRow) -> PairedDifference:
    one, other = ahead.finals(view, MEAN), behind.finals(view, MEAN)
    by_seed = [one[seed] - other[seed] for seed in one if seed in other]
    error = math.hypot(ahead.test_error(view, MEAN), behind.test_error(view, MEAN))
    balanced = runs.measure == "balanced_accuracy"
    images = image_test(ahead.answers, behind.answers, view, balanced) if balanced or runs.measure == "accuracy" else None
    return PairedDifference(ahead, behind, average(one.values()) - average(other.values()), by_seed, error, images)


def lead(runs: RunSet, view: str) -> PairedDifference | None:
    """The best method less the next one; None if there is nothing to compare."""
    ranked = runs.ranked(view, runs.contenders(view))
    return paired_difference(runs, view, *ranked[:2]) if len(ranked) > 1 else None


def verdict_of(runs: RunSet, view: str) -> Verdict | None:
    """Who won in a view; None if nothing was scored in it."""
    domains = runs.domains(view)
    if not domains:
        return None
    contenders = runs.ranked(view, runs.contenders(view))
    where = _where(view, domains, runs)
    if not contenders:
        return Verdict(view, f"No finished run was scored {where}.", ["Below is how far the runs came."])
    best = contenders[0]
    references = [
        f"{row.method} pools all data and so is a reference, no federated method: {percent(row.average(view, MEAN))} %."
        for row in runs.rows
        if row.is_reference and row.finished and row not in contenders and row.finals(view, MEAN)
    ]
    if len(contenders) == 1:
        title = f"{best.method} reaches {percent(best.average(view, MEAN))} % {where}."
        return Verdict(view, title, [*_only_one(best, view, domains), *references])
    differences = [paired_difference(runs, view, best, other) for other in contenders[1:]]
    sentences = [*_domains_won(view, domains, contenders), *_fairness(differences[0]), *_how_surely(differences[0])]
    if len(differences) > 1:
        picked = f"The best of {len(contenders)} was picked after seeing the scores"
        sentences.append(f"{picked}; nothing here is corrected for that, so take small leads with care.")
    return Verdict(view, _title(differences[0], view, where), [*sentences, *references], differences)


def _where(view: str, domains: Sequence[str], runs: RunSet) -> str:
    measure = "" if runs.measure == "accuracy" else f"{MEASURES[runs.measure]} "
    trained = "the clients trained on" if view == "seen" else "nobody trained on"
    if len(domains) == 1:
        return f"{measure}on {domains[0]}" if view == "seen" else f"{measure}on {domains[0]}, a domain {trained}"
    turns = ", each left out in turn" if runs.left_out else ""
    return f"{measure}on average over {len(domains)} domains {trained}{turns}"


def _only_one(best: MethodRow, view: str, domains: Sequence[str]) -> list[str]:
    worst = min(domains, key=lambda domain: best.average(view, domain))
    worst_domain = [f"Its worst domain is {worst} with {percent(best.average(view, worst))} %."] if len(domains) > 1 else []
    return [*worst_domain, "There is nothing to compare it with: add runs of other methods on the same data."]


def _title(first: PairedDifference, view: str, where: str) -> str:
    best, other = first.ahead.method, first.behind.method
    level, more = f"{percent(first.ahead.average(view, MEAN))} %", points(first.difference)
    unequal = _unequal(first)
    if first.verdict == CLEAR and not unequal:
        return f"{best} wins: {level} {where}, {more} points more than {other}."
    if first.verdict in (CLEAR, ONE_SEED):
        but = "Not with the same settings, though." if unequal else "One seed only."
        return f"{best} is ahead: {level} {where}, {more} points more than {other}. {but}"
    if first.difference < EQUAL:
        return f"A tie: {best} and {other} both reach {level} {where}."
    return f"No sure winner: {best} comes first with {level} {where}, {more} points above {other}."


def _unequal(first: PairedDifference) -> list[str]:
    """Settings in which two different methods were not run alike; a model that a method changed itself is none."""
    one, other = first.ahead.first, first.behind.first
    if one.method == other.method:
        return []
    return [name for name in differing([one, other]) if name != "model" or one.settings["model"] != other.settings["model"]]


def _fairness(first: PairedDifference) -> list[str]:
    names = _unequal(first)
    return [f"The two were not run with the same {listed(names)}, so this does not compare the methods alone."] if names else []


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
    also = "it also comes first" if worst is best else f"{worst.method} comes first"
    judged = f"Judged by the worst domain, {also} with {percent(worst.average(view, WORST))} %."
    return [f"{best.method} is best on {len(won)} of {len(domains)} domains{names}{tied}. {judged}"]


def _how_surely(first: PairedDifference) -> list[str]:
    sentences = []
    if first.interval is None:
        seeds = "One seed" if len(first.by_seed) == 1 else "The two share no seed, and unpaired runs"
        sentences.append(f"{seeds} cannot say how much is luck of the seed: repeat with other seeds (--seed 1, --seed 2, ...).")
    else:
        low, high = first.interval
        ahead = sum(value > 0 for value in first.by_seed)
        count = len(first.by_seed)
        sentences.append(
            f"Over {count} paired seeds the difference is {points(average(first.by_seed), True)} ± {points(first.spread)} points "
            f"(mean ± standard deviation; ahead in {ahead} of {count}); its 95 % interval is {points(low, True)} to {points(high, True)}"
            + (", which leaves out zero." if first.beyond_seed_noise else f", which holds zero: {count} seeds do not settle it.")
        )
    side = "beyond" if first.beyond_test_noise else "within"
    found = f"The difference of {100 * first.difference:.2f} points is {side} the noise of the test sets"
    if first.images is not None:
        # The same images were answered, so their sizes alone would say less than the answers do.
        sentences.append(f"{found}. {first.ahead.method} (first) against {first.behind.method} (second). {first.images.words}")
        sentences += _other_test(first, first.images)
    elif not math.isnan(first.test_error):
        sentences.append(f"{found}: from their sizes alone, two standard errors of it are {200 * first.test_error:.2f} points.")
    return sentences


def _other_test(first: PairedDifference, images: ImageTest) -> list[str]:
    """Why McNemar's test may say something else than the interval that the verdict is taken from."""
    if (images.p_value < 0.05 and images.only_first > images.only_second) == first.beyond_test_noise:
        return []
    return [
        f"The verdict is the bootstrap's, which averages domains and seeds as the scores do; McNemar's test counts the images of seed {images.seed}, "
        "all domains together, and differs here: take the lead with care."
    ]


def notices(runs: RunSet) -> list[str]:
    """What a reader must know before trusting a comparison."""
    rows = runs.rows
    sentences = [sentence for row in rows for sentence in _about_runs(row)]
    firsts = [row.first for row in rows]
    for name in differing(firsts) if len({run.method for run in firsts}) > 1 else ():
        # A method may well change the model it is given; only a model that was asked for is a difference of settings.
        if name != "model" or len({run.settings["model"] for run in firsts}) > 1:
            values = [f"{recipe(row.first).get(name)} for {row.method}" for row in rows]
            sentences.append(f"Not the same settings: {name} is {listed(values)}.")
    if len({tuple(row.seeds) for row in rows if row.finished}) > 1:
        by_row = "; ".join(f"{row.method} has {listed(map(str, row.seeds))}" for row in rows)
        sentences.append(f"Not the same seeds: {by_row}.")
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
            sentences.append(f"{who}: {scored} of {clients} clients were scored, drawn by the seed.")
        instead = "The checkpoint before it was read." if run.digest else "No checkpoint can be read, so no scores are shown."
        sentences += [f"{complaint} {instead}" for complaint in run.complaints]
        if run.parts:
            sentences += _about_parts(who, run)
        elif not run.finished:
            shown = "; its numbers are left out" if row.finished else ""
            sentences.append(_unfinished(who, run, shown))
        elif run not in row.counted:
            sentences.append(f"{run.path} repeats seed {run.seed} of {row.method}; only one run of a seed is counted.")
        if run.finished and not run.parts and (outlier := run.last_round_warning(row.measure)):
            sentences.append(f"{who}: {outlier}")
    return sentences


def _unfinished(who: str, run: RunRecord, shown: str = "") -> str:
    resume = f"polyfed resume {shlex.quote(run.path)}"
    return f"Unfinished: {who}, has come to round {run.reached} of {run.rounds}{shown}. Go on with it: {resume}"


def _about_parts(who: str, run: RunRecord) -> list[str]:
    """What is missing of a leave-one-out comparison."""
    unfinished = [part for part in run.parts if not part.finished]
    if run.finished or unfinished:
        return [] if run.finished else [_unfinished(f"{who}, without {part.settings['unseen'][0]}", part) for part in unfinished]
    scored = listed(part.settings["unseen"][0] for part in run.parts)
    return [f"Incomplete: {who}, left out {scored} only; the other domains are missing, so it cannot win."]
