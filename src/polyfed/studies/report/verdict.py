"""Who won, and how surely: the numbers of the runs in plain words that never say more than the numbers do."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polyfed.core.metrics import MEASURES, standard_error
from polyfed.runs.scores import LAST, WINDOW, LastRounds
from polyfed.studies.report.gather import MEAN, WORST, Group, GroupEntry, Run, average, deviation, differing, recipe
from polyfed.studies.report.paired_tests import ImageTest, image_test

# Two-sided 95 % points of Student's t with 1 to 20 degrees of freedom.
T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)


def t95(freedom: int) -> float:
    """The two-sided 95 % point of Student's t."""
    return T95[freedom - 1] if freedom <= len(T95) else 1.96 + 2.5 / freedom


@dataclass(frozen=True)
class PairedDifference:
    """The difference of two means over domains: ``ahead`` less ``behind``, as fractions.

    ``spread`` is its standard deviation over paired seeds (NaN below two), ``test_error`` its standard error from the size of the
    test sets, taking the two methods' errors as independent (NaN for measures that have none), and ``images`` compares the two on the
    same test images.
    """

    ahead: GroupEntry
    behind: GroupEntry
    difference: float
    by_seed: Sequence[float]
    test_error: float
    images: ImageTest | None = None

    @property
    def spread(self) -> float:
        """Standard deviation over paired seeds."""
        return deviation(self.by_seed)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean difference over seeds (Student's t); None below two paired seeds."""
        count = len(self.by_seed)
        if count < 2:
            return None
        half = t95(count - 1) * self.spread / math.sqrt(count)
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
            return "beyond the noise of the test sets; one seed"
        return "clear" if self.beyond_seed_noise else f"not settled by {len(self.by_seed)} seeds"


@dataclass(frozen=True)
class Headline:
    """One view in words: a title, sentences below it, and the winner against everybody else."""

    view: str
    title: str
    sentences: Sequence[str]
    differences: Sequence[PairedDifference] = ()


def binomial_error(accuracy: float, count: int) -> float:
    """Standard error of an accuracy from ``count`` test examples."""
    return math.sqrt(max(accuracy * (1 - accuracy), 0) / count) if count else math.nan


def domain_error(group: Group, view: str, domain: str, entry: GroupEntry) -> float:
    """Standard error of a score from the size of its test set; NaN for measures that have no simple one."""
    if entry.measure == "accuracy" and group.task.class_labels:
        return binomial_error(entry.mean(view, domain), group.test_size(view, domain))
    return average(standard_error(run.domains.get((view, domain), {}), entry.measure) for run in entry.counted)


def mean_error(group: Group, view: str, entry: GroupEntry) -> float:
    """Standard error of a mean over domains, from the sizes of their test sets; more seeds do not make it smaller."""
    domains = group.domains(view)
    return math.sqrt(sum(domain_error(group, view, d, entry) ** 2 for d in domains)) / len(domains)


def paired_difference(group: Group, view: str, ahead: GroupEntry, behind: GroupEntry) -> PairedDifference:
    """Compare two entries."""
    one, other = ahead.finals(view, MEAN), behind.finals(view, MEAN)
    by_seed = [one[seed] - other[seed] for seed in one if seed in other]
    error = math.hypot(mean_error(group, view, ahead), mean_error(group, view, behind))
    first, second = ({run.seed: run.answers for run in entry.counted} for entry in (ahead, behind))
    balanced = group.measure == "balanced_accuracy"
    images = image_test(first, second, view, balanced) if balanced or group.measure == "accuracy" else None
    return PairedDifference(ahead, behind, average(one.values()) - average(other.values()), by_seed, error, images)


def percent(value: float) -> str:
    """A fraction as a percentage."""
    return f"{100 * value:.1f} %"


def points(value: float, sign: bool = False) -> str:
    """A difference of fractions in percentage points, without the unit."""
    return (f"{100 * value:+.1f}" if sign else f"{100 * value:.1f}").replace("-", "−")


def listed(names: Iterable[str]) -> str:
    """Names in a sentence."""
    found = list(names)
    return " and ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)


def headline(group: Group, view: str) -> Headline | None:
    """Who won in a view; None where nothing was scored in it."""
    domains = group.domains(view)
    if not domains:
        return None
    contenders = sorted(group.contenders(view), key=lambda entry: -entry.mean(view, MEAN))
    where = _where(view, domains, group)
    if not contenders:
        return Headline(view, f"No finished run was scored {where}.", ["Below is how far the runs came."])
    best = contenders[0]
    if len(contenders) == 1:
        title = f"{best.label} reaches {percent(best.mean(view, MEAN))} {where}."
        return Headline(view, title, [*_only_one(best, view, domains), *_references(group, view)])
    differences = [paired_difference(group, view, best, other) for other in contenders[1:]]
    sentences = [
        *_domains_won(view, domains, contenders),
        *_fairness(differences[0]),
        *_how_surely(differences[0]),
        *_the_rest(differences),
    ]
    return Headline(view, _title(differences[0], view, where), [*sentences, *_references(group, view)], differences)


def _where(view: str, domains: Sequence[str], group: Group) -> str:
    measure = "" if group.measure == "accuracy" else f"{MEASURES[group.measure]} "
    trained = "the clients trained on" if view == "seen" else "nobody trained on"
    if len(domains) == 1:
        return f"{measure}on {domains[0]}" if view == "seen" else f"{measure}on {domains[0]}, a domain {trained}"
    turns = ", each left out in turn" if group.left_out else ""
    return f"{measure}on average over {len(domains)} domains {trained}{turns}"


def _only_one(best: GroupEntry, view: str, domains: Sequence[str]) -> list[str]:
    worst = min(domains, key=lambda domain: best.mean(view, domain))
    worst_domain = [f"Its worst domain is {worst} with {percent(best.mean(view, worst))}."] if len(domains) > 1 else []
    return [*worst_domain, "There is nothing to compare it with: add runs of other methods on the same data."]


def _title(first: PairedDifference, view: str, where: str) -> str:
    best, other = first.ahead, first.behind
    level, more = percent(best.mean(view, MEAN)), points(first.difference)
    if first.verdict == "clear" and not unequal(first):
        return f"{best.label} wins: {level} {where}, {more} points more than {other.label}."
    if first.verdict == "clear" or (first.interval is None and first.beyond_test_noise):
        but = "Not with the same settings, though." if unequal(first) else "One seed only."
        return f"{best.label} is ahead: {level} {where}, {more} points more than {other.label}. {but}"
    if first.difference < 1e-9:
        return f"A tie: {best.label} and {other.label} both reach {level} {where}."
    return f"No sure winner: {best.label} comes first with {level} {where}, {more} points above {other.label}."


def unequal(first: PairedDifference) -> list[str]:
    """Settings in which two different methods were not run alike; a model that a method changed itself is none."""
    one, other = first.ahead.first, first.behind.first
    if one.method == other.method:
        return []
    return [name for name in differing([one, other]) if name != "model" or one.settings["model"] != other.settings["model"]]


def _fairness(first: PairedDifference) -> list[str]:
    names = unequal(first)
    return [f"The two were not run with the same {listed(names)}, so this does not compare the methods alone."] if names else []


def _domains_won(view: str, domains: Sequence[str], contenders: Sequence[GroupEntry]) -> list[str]:
    if len(domains) == 1:
        return []
    best, won, shared = contenders[0], list[str](), list[str]()
    for domain in domains:
        gap = best.mean(view, domain) - max(entry.mean(view, domain) for entry in contenders[1:])
        if gap > 1e-9:
            won.append(domain)
        elif gap > -1e-9:
            shared.append(domain)
    names = f" ({listed(won)})" if 0 < len(won) < len(domains) else ""
    tied = f", and shares the best score on {listed(shared)}" if shared else ""
    worst = max(contenders, key=lambda entry: entry.mean(view, WORST))
    also = "it also comes first" if worst is best else f"{worst.label} comes first"
    judged = f"Judged by the worst domain, {also} with {percent(worst.mean(view, WORST))}."
    return [f"{best.label} is best on {len(won)} of {len(domains)} domains{names}{tied}. {judged}"]


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
    lead = f"The difference of {100 * first.difference:.2f} points is {side} the noise of the test sets"
    if first.images is not None:
        # The same images were answered, so their sizes alone would say less than the answers do.
        sentences.append(f"{lead}. {first.ahead.label} (first) against {first.behind.label} (second). {first.images.words}")
        sentences += _other_test(first, first.images)
    elif not math.isnan(first.test_error):
        sentences.append(f"{lead}: from their sizes alone, two standard errors of it are {200 * first.test_error:.2f} points.")
    return sentences


def _other_test(first: PairedDifference, images: ImageTest) -> list[str]:
    """Why McNemar's test may say something else than the interval that the verdict is taken from."""
    if (images.p_value < 0.05 and images.only_first > images.only_second) == first.beyond_test_noise:
        return []
    return [
        f"The verdict is the bootstrap's, which averages domains and seeds as the scores do; McNemar's test counts the images of seed {images.seed}, "
        "all domains together, and differs here: take the lead with care."
    ]


def _the_rest(differences: Sequence[PairedDifference]) -> list[str]:
    if len(differences) < 2:
        return []
    picked = f"The best of {len(differences) + 1} was picked after seeing the scores"
    return [f"{picked}; nothing here is corrected for that, so take small leads with care."]


def _references(group: Group, view: str) -> list[str]:
    contenders = group.contenders(view)
    shown = [
        entry
        for entry in group.entries
        if entry.is_reference and entry.finished and entry not in contenders and entry.finals(view, MEAN)
    ]
    return [
        f"{entry.label} pools all data and so is a reference, no federated method: {percent(entry.mean(view, MEAN))}."
        for entry in shown
    ]


def notices(group: Group) -> list[str]:
    """What a reader must know before trusting a comparison."""
    sentences = [sentence for entry in group.entries for sentence in _about_runs(entry)]
    firsts = [entry.first for entry in group.entries]
    for name in differing(firsts) if len({run.method for run in firsts}) > 1 else ():
        # A method may well change the model it is given; only a model that was asked for is a difference of settings.
        if name != "model" or len({run.settings["model"] for run in firsts}) > 1:
            values = [f"{recipe(entry.first).get(name)} for {entry.label}" for entry in group.entries]
            sentences.append(f"Not the same settings: {name} is {listed(values)}.")
    if len({tuple(entry.seeds) for entry in group.entries if entry.finished}) > 1:
        sentences.append(
            "Not the same seeds: "
            + "; ".join(f"{entry.label} has {listed(map(str, entry.seeds))}" for entry in group.entries)
            + "."
        )
    sizes: dict[tuple[str, str], set[int]] = {}
    for run in (run for entry in group.entries for run in entry.runs):
        for key, count in run.test_sizes.items():
            sizes.setdefault(key, set()).add(count)
    sentences += [
        f"The test sets of {d} differ in size between runs ({listed(map(str, sorted(n)))})."
        for (_, d), n in sizes.items()
        if len(n) > 1
    ]
    return sentences


def _about_runs(entry: GroupEntry) -> list[str]:
    sentences = []
    for run in entry.runs:
        scored, clients = run.scored_clients, run.document.get("data", {}).get("clients", 0)
        if run.settings["evaluate_clients"] and 0 < run.settings["evaluate_clients"] <= scored < clients:
            sentences.append(f"{entry.label}, seed {run.seed}: {scored} of {clients} clients were scored, drawn by the seed.")
        instead = "The checkpoint before it was read." if run.digest else "No checkpoint can be read, so no scores are shown."
        sentences += [f"{complaint} {instead}" for complaint in run.complaints]
        if run.parts:
            sentences += _about_parts(entry, run)
        elif not run.finished:
            shown = "; its numbers are left out" if entry.finished else ""
            sentences.append(
                f"Unfinished: {entry.label}, seed {run.seed}, has come to round {run.reached} of {run.rounds}{shown}. "
                f"Go on with it: polyfed resume {shlex.quote(run.path)}"
            )
        elif run not in entry.counted:
            sentences.append(f"{run.path} repeats seed {run.seed} of {entry.label}; only one run of a seed is counted.")
        if run.finished and not run.parts and (outlier := _outlier(run, entry.measure)):
            sentences.append(f"{entry.label}, seed {run.seed}: {outlier}")
    return sentences


def _outlier(run: Run, measure: str) -> str:
    """A sentence if a run ends with a last round that is not typical, else nothing."""
    if run.settings["selection"] != LAST:
        return ""
    by_round = next((tables for tables in run.tables_of(measure).values() if tables), {})
    return LastRounds({number: by_round[number][MEAN] for number in sorted(by_round)[-WINDOW:]}).warning if by_round else ""


def _about_parts(entry: GroupEntry, run: Run) -> list[str]:
    """What is missing of a leave-one-out comparison."""
    if run.finished:
        return []
    unfinished = [part for part in run.parts if not part.finished]
    if not unfinished:
        scored = listed(part.settings["unseen"][0] for part in run.parts)
        return [
            f"Incomplete: {entry.label}, seed {run.seed}, left out {scored} only; the other domains are missing, so it cannot win."
        ]
    return [
        f"Unfinished: {entry.label}, seed {run.seed}, without {part.settings['unseen'][0]}, has come to round {part.reached} of "
        f"{part.rounds}. Go on with it: polyfed resume {shlex.quote(part.path)}"
        for part in unfinished
    ]
