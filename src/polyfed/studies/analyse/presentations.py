"""How each kind of analysis is presented for all runs together: a sentence, tables, figures and numbers."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from polyfed.runs.result import accuracy_table
from polyfed.studies.analyse import drawings
from polyfed.studies.analyse.confidence import Confidence
from polyfed.studies.analyse.feature_similarity import Features
from polyfed.studies.analyse.gradient_bias import GradientBias, gradient_bias_of
from polyfed.studies.analyse.local_models import EntrySpread, layer_spread
from polyfed.studies.analyse.norm_statistics import SERVER, NormStatistics, norm_statistics
from polyfed.studies.analyse.opened_run import OpenedRun
from polyfed.studies.analyse.rounds import Drift, Noted
from polyfed.studies.analyse.score_grid import GridRun, score_grid
from polyfed.studies.analyse.tsne import TsneMap
from polyfed.studies.analyse.union_statistics import score_with, union_statistics

Rows = list[dict[str, Any]]


class Presented(NamedTuple):
    """What an ``Analysis`` says, without its name."""

    sentence: str
    tables: Mapping[str, Rows]
    figures: Mapping[str, Any]
    numbers: Mapping[str, Mapping[str, float]] = MappingProxyType({})


def _mean(values: Iterable[float]) -> float:
    """The mean; not a number where there are none."""
    known = list(values)
    return statistics.fmean(known) if known else math.nan


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _each(found: Mapping[str, Any], words: Callable[[Any], str]) -> str:
    """The same words for every run: with one run, without its name."""
    if len(found) == 1:
        text = words(next(iter(found.values())))
        return f"{text[0].upper()}{text[1:]}."
    return "; ".join(f"{label}: {words(one)}" for label, one in found.items()) + "."


def _by_run(found: Mapping[str, Any], **numbers: Callable[[Any], float]) -> dict[str, dict[str, float]]:
    """Numbers of every run; blanks of their names are written as underscores."""
    return {name.replace("_", " "): {label: number(one) for label, one in found.items()} for name, number in numbers.items()}


# ------------------------------------------------------------------------------------------------------------ gradient bias


def measure_bias(run: OpenedRun) -> list[GradientBias]:
    experiment = run.experiment
    found = [gradient_bias_of(experiment, norm="as trained", draws=2)]
    if experiment.bench.batch_norms:
        found.append(gradient_bias_of(experiment, norm="statistics fixed", draws=1, fixed_statistics=True))
    return found


def present_bias(found: Mapping[str, list[GradientBias]]) -> Presented:
    each = [({"run": label, "norm": one.norm}, one) for label, many in found.items() for one in many]
    rows = [{**names, "bias": one.bias, "shuffled": one.shuffled, "cosine": one.cosine} for names, one in each]
    layers = [{**names, "layer": layer, "bias": value} for names, one in each for layer, value in one.layers.items()]
    clients = [{**names, "client": client, "bias": value} for names, one in each for client, value in one.clients.items()]

    def words(many: list[GradientBias]) -> str:
        first = many[0]
        text = f"the mean of local gradients is {_percent(first.bias)} of its length off the central one"
        text += f" ({_percent(first.shuffled)} with the same images dealt at random)"
        return text + "".join(f", {_percent(one.bias)} with {one.norm}" for one in many[1:])

    figure = drawings.bias_bars(rows)
    numbers = _by_run(found, bias=lambda many: many[0].bias, dealt_at_random=lambda many: many[0].shuffled)
    tables = {"bias": rows, "layers": layers, "clients": clients}
    return Presented(_each(found, words), tables, {"bias": figure}, numbers)


# -------------------------------------------------------------------------------------------------------- norm statistics


def measure_statistics(run: OpenedRun) -> tuple[NormStatistics, NormStatistics]:
    return norm_statistics(run.experiment), norm_statistics(run.experiment, "trained", states=run.trained)


def present_statistics(found: Mapping[str, tuple[NormStatistics, NormStatistics]]) -> Presented:
    each = [({"run": label, "source": one.source}, one) for label, both in found.items() for one in both]
    distances = [{**names, **dataclasses.asdict(pair)} for names, one in each for pair in one.distances()]
    channels = [{**names, **row} for names, one in each for row in one.rows()]

    def words(both: tuple[NormStatistics, NormStatistics]) -> str:
        data, trained = both
        apart = [one for one in data.distances() if SERVER not in (one.one, one.other)]
        if not apart:
            return "one client, so there is nothing to compare"
        most = max(apart, key=lambda one: one.shift)
        return (
            f"under one model, clients' images lie {data.mean_shift():.2f} standard deviations apart on average, most between {most.one} "
            f"and {most.other} at {most.layer} ({most.shift:.2f}); after local training, running means lie {trained.mean_shift():.2f} apart"
        )

    label, (_, first) = next(iter(found.items()))
    figures = {
        "distance": drawings.distance_lines(distances),
        "channels": drawings.channel_curves(first, label, first.layers[-2:]),
        "channels of all layers": drawings.channel_curves(first, label, first.layers),
    }
    numbers = _by_run(
        found,
        images_of_clients=lambda both: both[0].mean_shift(),
        client_and_client=lambda both: both[1].mean_shift(),
        client_and_server=lambda both: both[1].mean_shift(with_server=True),
    )
    return Presented(_each(found, words), {"distances": distances, "channels": channels}, figures, numbers)


# ------------------------------------------------------------------------------------------------------------------- drift


def present_drift(found: Mapping[str, Drift]) -> Presented:
    rows: Rows = []
    for label, one in found.items():
        rows += [{"run": label, "client": "server", "round": r, "measure": "change", "value": v} for r, v in one.change.items()]
        for measure in ("distance", "variance"):
            for client, values in getattr(one, measure).items():
                rows += [{"run": label, "client": client, "round": r, "measure": measure, "value": v} for r, v in values.items()]

    def words(one: Drift) -> str:
        first, last = min(one.change), max(one.change)
        far = {client: values[max(values)] for client, values in one.distance.items()}
        most = max(far, key=lambda client: far[client])
        return (
            f"the common statistics moved by {one.change[first]:.3g} (L1) in round {first} and by {one.change[last]:.3g} in round {last}; "
            f"{most} ended farthest from them ({far[most]:.3g})"
        )

    def last(by_client: Mapping[str, Mapping[int, float]]) -> float:
        return _mean(values[max(values)] for values in by_client.values() if values)

    numbers = _by_run(
        found,
        change=lambda one: one.change[max(one.change)],
        distance=lambda one: last(one.distance),
        variance=lambda one: last(one.variance),
    )
    return Presented(_each(found, words), {"drift": rows}, {"drift": drawings.drift_curves(found)}, numbers)


# ---------------------------------------------------------------------------------------------------------------- features


def present_features(found: Mapping[str, Features]) -> Presented:
    rows = [{"run": label, **dataclasses.asdict(pair)} for label, one in found.items() for pair in one.pairs]

    def words(one: Features) -> str:
        layer = one.pairs[-1].layer
        return f"after {layer}, feature maps of two clients have cosine {one.mean(False):.3f}, of a client and the server {one.mean(True):.3f}"

    figures = {
        "similarity": drawings.similarity_bars(found),
        "maps": drawings.maps(found),
        "maps of all layers": drawings.maps_of_layers(found),
    }
    numbers = _by_run(found, client_and_client=lambda one: one.mean(False), client_and_server=lambda one: one.mean(True))
    return Presented(_each(found, words), {"similarity": rows}, figures, numbers)


# ------------------------------------------------------------------------------------------------------------ model spread


def measure_spread(run: OpenedRun) -> dict[str, list[EntrySpread]]:
    return {"as tested": layer_spread(run.experiment), "after local training": layer_spread(run.experiment, run.trained.items())}


def present_spread(found: Mapping[str, dict[str, list[EntrySpread]]]) -> Presented:
    rows = [
        {"run": label, "models": when, **dataclasses.asdict(one)}
        for label, both in found.items()
        for when, many in both.items()
        for one in many
    ]

    def words(both: dict[str, list[EntrySpread]]) -> str:
        parts = []
        for when, many in both.items():
            most = max(many, key=lambda one: one.relative)
            parts.append(
                f"{when}, clients differ most in {most.entry} ({_percent(most.relative)} of its size)"
                if most.relative
                else f"{when}, clients' models are equal"
            )
        return "; ".join(parts)

    numbers = _by_run(
        found,
        as_tested=lambda both: _mean(one.deviation for one in both["as tested"]),
        after_local_training=lambda both: _mean(one.deviation for one in both["after local training"]),
    )
    return Presented(_each(found, words), {"spread": rows}, {"spread": drawings.spread_lines(rows)}, numbers)


# --------------------------------------------------------------------------------------------------------------- alignment


def present_noted(found: Mapping[str, Noted]) -> Presented:
    rows: Rows = [
        {"run": label, "name": what, "client": client, "round": number, "value": value}
        for label, one in found.items()
        for what, by_client in one.numbers.items()
        for client, values in by_client.items()
        for number, value in values.items()
    ]
    vectors: Rows = [
        {"run": label, "name": what, "client": client, "round": number, "dimension": place, "value": value}
        for label, one in found.items()
        for what, by_client in one.vectors.items()
        for client, by_round in by_client.items()
        for number, values in by_round.items()
        for place, value in enumerate(values)
    ]

    def words(one: Noted) -> str:
        parts = []
        for what in one.numbers:
            client, by = one.largest_deviation(what)
            parts.append(f"{what.replace('_', ' ')} of {client} strays farthest from the mean of a round, by {by:.3g}")
        moved = {c: math.dist(v[min(v)], v[max(v)]) for many in one.vectors.values() for c, v in many.items() if len(v) > 1}
        if moved:
            most = max(moved, key=lambda client: moved[client])
            parts.append(f"the embedding of {most} moved most ({moved[most]:.3g})")
        return "; ".join(parts) or "one round was noted"

    numbers = _by_run(
        found,
        farthest_from_the_mean=lambda one: max((one.largest_deviation(what)[1] for what in one.numbers), default=math.nan),
        farthest_in_the_last_round=lambda one: max((one.last_deviation(what) for what in one.numbers), default=math.nan),
        embeddings_apart=Noted.apart,
    )
    figures = {"rounds": drawings.noted_curves(found), "last round": drawings.noted_bars(found)}
    if any(one.vectors for one in found.values()):
        figures["embeddings"] = drawings.embeddings(found)
    return Presented(_each(found, words), {"numbers": rows, "vectors": vectors}, figures, numbers)


# -------------------------------------------------------------------------------------------------------------- confidence


def present_confidence(found: Mapping[str, list[Confidence]]) -> Presented:
    each = [
        ({"run": label, "view": one.view, "answers": "right" if one.right else "wrong"}, one)
        for label, many in found.items()
        for one in many
    ]
    rows = [{**names, "count": one.count, "mean": one.mean} for names, one in each]
    bins = [
        {**names, "from": place / len(one.histogram), "to": (place + 1) / len(one.histogram), "share": share}
        for names, one in each
        for place, share in enumerate(one.histogram)
    ]

    def words(many: list[Confidence]) -> str:
        parts = []
        for view in dict.fromkeys(one.view for one in many):
            means = {one.right: one for one in many if one.view == view}
            both = [
                f"{'right' if right else 'wrong'} {_percent(one.mean)} ({one.count})" for right, one in means.items() if one.count
            ]
            parts.append(f"mean confidence on {view} domains: {', '.join(both)}")
        return "; ".join(parts)

    numbers: dict[str, dict[str, float]] = {}
    for label, many in found.items():
        for one in many:
            if one.count:
                numbers.setdefault(f"{one.view}, {'right' if one.right else 'wrong'}", {})[label] = one.mean
    tables = {"means": rows, "histogram": bins}
    return Presented(_each(found, words), tables, {"confidence": drawings.histograms(found)}, numbers)


# -------------------------------------------------------------------------------------------------------------------- t-SNE


def present_map(found: Mapping[str, TsneMap]) -> Presented:
    rows = [
        {"run": label, "x": float(x), "y": float(y), "class": c, "domain": d, "view": v}
        for label, one in found.items()
        for (x, y), c, d, v in zip(one.places.tolist(), one.labels, one.domains, one.views, strict=True)
    ]
    apart = [{"run": label, "by_class": one.by_class, "by_domain": one.by_domain} for label, one in found.items()]

    def words(one: TsneMap) -> str:
        return f"silhouette of the features by class {one.by_class:.2f}, by domain {one.by_domain:.2f}"

    numbers = _by_run(found, by_class=lambda one: one.by_class, by_domain=lambda one: one.by_domain)
    tables = {"places": rows, "silhouette": apart}
    return Presented(_each(found, words), tables, {"map": drawings.tsne_maps(found)}, numbers)


# -------------------------------------------------------------------------------------------------------------------- grid


def present_grid(found: Mapping[str, GridRun]) -> Presented:
    grid = score_grid(list(found.values()))
    a, b = grid.methods
    rows: Rows = [
        {
            grid.axes[0] or "row": r,
            grid.axes[1]: c,
            a: one,
            b: other,
            "difference": None if one is None or other is None else one - other,
        }
        for r, mine, theirs in zip(grid.rows, grid.scores[a], grid.scores[b], strict=True)
        for c, one, other in zip(grid.columns, mine, theirs, strict=True)
    ]
    known = [row for row in rows if row["difference"] is not None]
    if not known:
        sentence = f"No cell has a run of both {a} and {b}."
    else:
        where = max(known, key=lambda row: row["difference"]), min(known, key=lambda row: row["difference"])
        sentence = f"Accuracy of {a} minus that of {b}: " + ", ".join(
            f"{'most' if place == 0 else 'least'} {100 * row['difference']:+.1f} points at {_cell_words(row, grid.axes)}"
            for place, row in enumerate(where)
        )
        sentence += f"; {a} is ahead in {sum(row['difference'] > 0 for row in known)} of {len(known)} cells."
    return Presented(sentence, {"grid": rows}, {"grid": drawings.grid(grid)})


def _cell_words(row: Mapping[str, Any], axes: Sequence[str]) -> str:
    return ", ".join(f"{axis.replace('_', ' ')} {row[axis]}" for axis in axes if axis)


# -------------------------------------------------------------------------------------------------------- union statistics


def measure_union(run: OpenedRun) -> dict[str, dict[str, float]]:
    experiment = run.experiment
    averaged = accuracy_table(score_with(experiment, {}))["seen"]
    union = accuracy_table(score_with(experiment, union_statistics(experiment)))["seen"]
    return {domain: {"averaged": averaged[domain], "union": union[domain]} for domain in averaged}


def present_union(found: Mapping[str, dict[str, dict[str, float]]]) -> Presented:
    rows = [{"run": label, "domain": domain, **both} for label, domains in found.items() for domain, both in domains.items()]

    def words(domains: dict[str, dict[str, float]]) -> str:
        gain = sum(both["union"] - both["averaged"] for both in domains.values()) / len(domains)
        return f"statistics of all data together instead of averaged ones change mean accuracy by {100 * gain:+.1f} points"

    numbers = _by_run(
        found,
        averaged=lambda domains: _mean(both["averaged"] for both in domains.values()),
        union=lambda domains: _mean(both["union"] for both in domains.values()),
    )
    return Presented(_each(found, words), {"accuracy": rows}, {"accuracy": drawings.union_bars(rows)}, numbers)
