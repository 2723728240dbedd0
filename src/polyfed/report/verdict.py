"""Who won, and how surely: the numbers of the runs in plain words that never say more than the numbers do."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polyfed.report.gather import MEAN, WORST, Arena, Contestant, average, deviation, differing, recipe

# Two-sided 95 % points of Student's t with 1 to 20 degrees of freedom.
T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)


def t95(freedom: int) -> float:
    """The two-sided 95 % point of Student's t."""
    return T95[freedom - 1] if freedom <= len(T95) else 1.96 + 2.5 / freedom


@dataclass(frozen=True)
class Duel:
    """The difference of two means over domains: ``ahead`` less ``behind``, as fractions.

    ``spread`` is its standard deviation over paired seeds (NaN below two), ``test_error`` its standard error from the size of the
    test sets, taking the two methods' errors as independent.
    """

    ahead: Contestant
    behind: Contestant
    difference: float
    by_seed: Sequence[float]
    test_error: float

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
        """Whether the difference is more than twice its error from the test sets."""
        return self.difference > 2 * self.test_error

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
    duels: Sequence[Duel] = ()


def binomial_error(accuracy: float, count: int) -> float:
    """Standard error of an accuracy from so many test examples."""
    return math.sqrt(max(accuracy * (1 - accuracy), 0) / count) if count else math.nan


def mean_error(arena: Arena, view: str, contestant: Contestant) -> float:
    """Standard error of a mean over domains, from the sizes of their test sets; more seeds do not make it smaller."""
    domains = arena.domains(view)
    errors = [binomial_error(contestant.mean(view, d), arena.test_size(view, d)) for d in domains]
    return math.sqrt(sum(error**2 for error in errors)) / len(domains)


def duel(arena: Arena, view: str, ahead: Contestant, behind: Contestant) -> Duel:
    """Compare two contestants."""
    one, other = ahead.finals(view, MEAN), behind.finals(view, MEAN)
    by_seed = [one[seed] - other[seed] for seed in one if seed in other]
    error = math.hypot(mean_error(arena, view, ahead), mean_error(arena, view, behind))
    return Duel(ahead, behind, average(one.values()) - average(other.values()), by_seed, error)


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


def headline(arena: Arena, view: str) -> Headline | None:
    """Who won in a view; None where nothing was scored in it."""
    domains = arena.domains(view)
    if not domains:
        return None
    contenders = sorted(arena.contenders(view), key=lambda c: -c.mean(view, MEAN))
    where = _where(view, domains)
    if not contenders:
        return Headline(view, f"No finished run was scored {where}.", ["Below is how far the runs came."])
    best = contenders[0]
    if len(contenders) == 1:
        title = f"{best.label} reaches {percent(best.mean(view, MEAN))} {where}."
        return Headline(view, title, [*_alone(best, view, domains), *_references(arena, view)])
    duels = [duel(arena, view, best, other) for other in contenders[1:]]
    sentences = [*_domains_won(view, domains, contenders), *_fairness(duels[0]), *_how_surely(duels[0]), *_the_rest(duels)]
    return Headline(view, _title(duels[0], view, where), [*sentences, *_references(arena, view)], duels)


def _where(view: str, domains: Sequence[str]) -> str:
    trained = "the clients trained on" if view == "seen" else "nobody trained on"
    if len(domains) == 1:
        return f"on {domains[0]}" if view == "seen" else f"on {domains[0]}, a domain {trained}"
    return f"on average over {len(domains)} domains {trained}"


def _alone(best: Contestant, view: str, domains: Sequence[str]) -> list[str]:
    worst = min(domains, key=lambda domain: best.mean(view, domain))
    told = [f"Its worst domain is {worst} with {percent(best.mean(view, worst))}."] if len(domains) > 1 else []
    return [*told, "There is nothing to compare it with: add runs of other methods on the same data."]


def _title(first: Duel, view: str, where: str) -> str:
    best, other = first.ahead, first.behind
    level, more = percent(best.mean(view, MEAN)), points(first.difference)
    if first.verdict == "clear" and not unequal(first):
        return f"{best.label} wins: {level} {where}, {more} points more than {other.label}."
    if first.verdict == "clear" or (first.interval is None and first.beyond_test_noise):
        but = "Not with the same settings, though." if unequal(first) else "One seed only."
        return f"{best.label} is ahead: {level} {where}, {more} points more than {other.label}. {but}"
    if first.difference < 1e-9:
        return f"A tie: {best.label} and {other.label} both reach {level} {where}."
    return f"No sure winner: {best.label} comes first {where} with {level}, {more} points above {other.label}."


def unequal(first: Duel) -> list[str]:
    """Settings in which two different methods were not run alike; a model that a method changed itself is none."""
    one, other = first.ahead.first, first.behind.first
    if one.method == other.method:
        return []
    return [name for name in differing([one, other]) if name != "model" or one.settings["model"] != other.settings["model"]]


def _fairness(first: Duel) -> list[str]:
    names = unequal(first)
    return [f"The two were not run with the same {listed(names)}, so this does not compare the methods alone."] if names else []


def _domains_won(view: str, domains: Sequence[str], contenders: Sequence[Contestant]) -> list[str]:
    if len(domains) == 1:
        return []
    best, alone, shared = contenders[0], list[str](), list[str]()
    for domain in domains:
        gap = best.mean(view, domain) - max(c.mean(view, domain) for c in contenders[1:])
        if gap > 1e-9:
            alone.append(domain)
        elif gap > -1e-9:
            shared.append(domain)
    names = f" ({listed(alone)})" if 0 < len(alone) < len(domains) else ""
    tied = f", and shares the best score on {listed(shared)}" if shared else ""
    worst = max(contenders, key=lambda c: c.mean(view, WORST))
    also = "it also comes first" if worst is best else f"{worst.label} comes first"
    judged = f"Judged by the worst domain, {also} with {percent(worst.mean(view, WORST))}."
    return [f"{best.label} is best on {len(alone)} of {len(domains)} domains{names}{tied}. {judged}"]


def _how_surely(first: Duel) -> list[str]:
    told = []
    if first.interval is None:
        seeds = "One seed" if len(first.by_seed) == 1 else "The two share no seed, and unpaired runs"
        told.append(f"{seeds} cannot say how much is luck of the seed: repeat with other seeds (--seed 1, --seed 2, ...).")
    else:
        low, high = first.interval
        ahead = sum(value > 0 for value in first.by_seed)
        count = len(first.by_seed)
        told.append(
            f"Over {count} paired seeds the difference is {points(average(first.by_seed), True)} ± {points(first.spread)} points "
            f"(mean ± standard deviation; ahead in {ahead} of {count}); its 95 % interval is {points(low, True)} to {points(high, True)}"
            + (", which leaves out zero." if first.beyond_seed_noise else f", which holds zero: {count} seeds do not settle it.")
        )
    side = "beyond" if first.beyond_test_noise else "within"
    told.append(
        f"The difference of {100 * first.difference:.2f} points is {side} the noise of the test sets: from their sizes alone, "
        f"two standard errors of it are {200 * first.test_error:.2f} points."
    )
    return told


def _the_rest(duels: Sequence[Duel]) -> list[str]:
    if len(duels) < 2:
        return []
    picked = f"The best of {len(duels) + 1} was picked after seeing the scores"
    return [f"{picked}; nothing here is corrected for that, so take small leads with care."]


def _references(arena: Arena, view: str) -> list[str]:
    contenders = arena.contenders(view)
    shown = [c for c in arena.contestants if c.is_reference and c.finished and c not in contenders and c.finals(view, MEAN)]
    return [f"{c.label} pools all data and so is a reference, no federated method: {percent(c.mean(view, MEAN))}." for c in shown]


def notices(arena: Arena) -> list[str]:
    """What a reader must know before trusting a comparison."""
    told = [sentence for c in arena.contestants for sentence in _about_runs(c)]
    firsts = [c.first for c in arena.contestants]
    for name in differing(firsts) if len({run.method for run in firsts}) > 1 else ():
        # A method may well change the model it is given; only a model that was asked for is a difference of settings.
        if name != "model" or len({run.settings["model"] for run in firsts}) > 1:
            values = [f"{recipe(c.first).get(name)} for {c.label}" for c in arena.contestants]
            told.append(f"Not the same settings: {name} is {listed(values)}.")
    if len({tuple(c.seeds) for c in arena.contestants if c.finished}) > 1:
        told.append(
            "Not the same seeds: " + "; ".join(f"{c.label} has {listed(map(str, c.seeds))}" for c in arena.contestants) + "."
        )
    sizes: dict[tuple[str, str], set[int]] = {}
    for run in (run for c in arena.contestants for run in c.runs):
        for key, count in run.test_sizes.items():
            sizes.setdefault(key, set()).add(count)
    told += [
        f"The test sets of {d} differ in size between runs ({listed(map(str, sorted(n)))})."
        for (_, d), n in sizes.items()
        if len(n) > 1
    ]
    return told


def _about_runs(contestant: Contestant) -> list[str]:
    told = []
    for run in contestant.runs:
        told += [f"{complaint} The checkpoint before it was read." for complaint in run.complaints]
        if not run.finished:
            shown = "; its numbers are left out" if contestant.finished else ""
            told.append(
                f"Unfinished: {contestant.label}, seed {run.seed}, has come to round {run.reached} of {run.rounds}{shown}. "
                f"Go on with it: polyfed resume {shlex.quote(run.path)}"
            )
        elif run not in contestant.counted:
            told.append(f"{run.path} repeats seed {run.seed} of {contestant.label}; only one run of a seed is counted.")
    return told
