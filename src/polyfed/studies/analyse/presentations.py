"""Present each analysis for all runs together: a sentence, tables, figures and numbers."""

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
from polyfed.studies.analyse.features import Features, TsneMap
from polyfed.studies.analyse.gradient_bias import GradientBias, gradient_bias_of
from polyfed.studies.analyse.local_models import EntrySpread, layer_spread
from polyfed.studies.analyse.norm_statistics import NormStatistics, norm_statistics, score_with, union_statistics
from polyfed.studies.analyse.opened_run import OpenedRun
from polyfed.studies.analyse.rounds import Drift, Noted
from polyfed.studies.analyse.score_grid import GridRun, score_grid

Rows = list[dict[str, Any]]


class Presentation(NamedTuple):
    sentence: str
    tables: Mapping[str, Rows]
    figures: Mapping[str, Any]
    numbers: Mapping[str, Mapping[str, float]] = MappingProxyType({})


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return statistics.fmean(known) if known else math.nan


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _sentence(found: Mapping[str, Any], describe: Callable[[Any], str]) -> str:
    """Describe every run after its label, or a single run without it."""
    if len(found) == 1:
        text = describe(next(iter(found.values())))
        return f"{text[0].upper()}{text[1:]}."
    return "; ".join(f"{label}: {describe(one)}" for label, one in found.items()) + "."


def _by_run(found: Mapping[str, Any], **numbers: Callable[[Any], float]) -> dict[str, dict[str, float]]:
    """Compute numbers of every run; underscores in their names become spaces."""
    return {name.replace("_", " "): {label: number(one) for label, one in found.items()} for name, number in numbers.items()}


def measure_bias(run: OpenedRun) -> list[GradientBias]:
    experiment = run.experiment
    found = [gradient_bias_of(experiment, norm="as trained", draws=2)]
    if experiment.bench.batch_norms:
        found.append(gradient_bias_of(experiment, norm="statistics fixed", draws=1, fixed_statistics=True))
    return found


def present_bias(found: Mapping[str, list[GradientBias]]) -> Presentation:
    each = [({"run": label, "norm": one.norm}, one) for label, many in found.items() for one in many]
    rows = [{**names, "bias": one.bias, "shuffled": one.shuffled, "cosine": one.cosine} for names, one in each]
    layers = [{**names, "layer": layer, "bias": value} for names, one in each for layer, value in one.layers.items()]
    clients = [{**names, "client": client, "bias": value} for names, one in each for client, value in one.clients.items()]

    def describe(many: list[GradientBias]) -> str:
        first = many[0]
        text = f"the mean local gradient differs from the central gradient by {_percent(first.bias)} of its length"
        text += f" ({_percent(first.shuffled)} with the same images in random batches)"
        return text + "".join(f", {_percent(one.bias)} with {one.norm}" for one in many[1:])

    figure = drawings.bias_bars(rows)
    numbers = _by_run(found, bias=lambda many: many[0].bias, dealt_at_random=lambda many: many[0].shuffled)
    tables = {"bias": rows, "layers": layers, "clients": clients}
    return Presentation(_sentence(found, describe), tables, {"bias": figure}, numbers)


def measure_statistics(run: OpenedRun) -> tuple[NormStatistics, NormStatistics]:
    return norm_statistics(run.experiment), norm_statistics(run.experiment, "trained", states=run.trained)


def present_statistics(found: Mapping[str, tuple[NormStatistics, NormStatistics]]) -> Presentation:
    each = [({"run": label, "source": one.source}, one) for label, both in found.items() for one in both]
    distances = [{**names, **dataclasses.asdict(pair)} for names, one in each for pair in one.distances()]
    channels = [{**names, **row} for names, one in each for row in one.rows()]

    def describe(both: tuple[NormStatistics, NormStatistics]) -> str:
        data, trained = both
        distances = data.between_clients()
        if not distances:
            return "only one client, so there is nothing to compare"
        largest = max(distances, key=lambda one: one.shift)
        return (
            f"under one model, the clients' images differ by {data.mean_shift():.2f} standard deviations on average, most between "
            f"{largest.one} and {largest.other} at {largest.layer} ({largest.shift:.2f}); after local training, the running means "
            f"differ by {trained.mean_shift():.2f}"
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
    return Presentation(_sentence(found, describe), {"distances": distances, "channels": channels}, figures, numbers)


def present_drift(found: Mapping[str, Drift]) -> Presentation:
    rows: Rows = []
    for label, one in found.items():
        rows += [{"run": label, "client": "server", "round": r, "measure": "change", "value": v} for r, v in one.change.items()]
        for measure in ("distance", "variance"):
            for client, values in getattr(one, measure).items():
                rows += [{"run": label, "client": client, "round": r, "measure": measure, "value": v} for r, v in values.items()]

    def describe(one: Drift) -> str:
        first, last = min(one.change), max(one.change)
        distances = {client: values[max(values)] for client, values in one.distance.items()}
        farthest = max(distances, key=lambda client: distances[client])
        return (
            f"the server statistics changed by {one.change[first]:.3g} (L1) in round {first} and by {one.change[last]:.3g} in round "
            f"{last}; {farthest} ended farthest from them ({distances[farthest]:.3g})"
        )

    def last(by_client: Mapping[str, Mapping[int, float]]) -> float:
        return _mean(values[max(values)] for values in by_client.values() if values)

    numbers = _by_run(
        found,
        change=lambda one: one.change[max(one.change)],
        distance=lambda one: last(one.distance),
        variance=lambda one: last(one.variance),
    )
    return Presentation(_sentence(found, describe), {"drift": rows}, {"drift": drawings.drift_curves(found)}, numbers)


def present_features(found: Mapping[str, Features]) -> Presentation:
    rows = [{"run": label, **dataclasses.asdict(pair)} for label, one in found.items() for pair in one.pairs]

    def describe(one: Features) -> str:
        layer = one.pairs[-1].layer
        return (
            f"after {layer}, the feature maps of two clients have a cosine of {one.mean(False):.3f}, those of a client and the server "
            f"{one.mean(True):.3f}"
        )

    figures = {
        "similarity": drawings.similarity_bars(found),
        "maps": drawings.maps(found),
        "maps of all layers": drawings.maps(found, all_layers=True),
    }
    numbers = _by_run(found, client_and_client=lambda one: one.mean(False), client_and_server=lambda one: one.mean(True))
    return Presentation(_sentence(found, describe), {"similarity": rows}, figures, numbers)


def measure_spread(run: OpenedRun) -> dict[str, list[EntrySpread]]:
    return {"as tested": layer_spread(run.experiment), "after local training": layer_spread(run.experiment, run.trained.items())}


def present_spread(found: Mapping[str, dict[str, list[EntrySpread]]]) -> Presentation:
    each = [({"run": label, "models": when}, many) for label, both in found.items() for when, many in both.items()]
    rows = [{**names, **dataclasses.asdict(one)} for names, many in each for one in many]

    def describe(both: dict[str, list[EntrySpread]]) -> str:
        parts = []
        for when, many in both.items():
            most = max(many, key=lambda one: one.relative)
            parts.append(
                f"{when}, clients differ most in {most.entry} ({_percent(most.relative)} of its size)"
                if most.relative
                else f"{when}, the client models are equal"
            )
        return "; ".join(parts)

    numbers = _by_run(
        found,
        as_tested=lambda both: _mean(one.deviation for one in both["as tested"]),
        after_local_training=lambda both: _mean(one.deviation for one in both["after local training"]),
    )
    return Presentation(_sentence(found, describe), {"spread": rows}, {"spread": drawings.spread_lines(rows)}, numbers)


def present_noted(found: Mapping[str, Noted]) -> Presentation:
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

    def describe(one: Noted) -> str:
        parts = []
        for what in one.numbers:
            client, deviation = one.largest_deviation(what)
            parts.append(f"the {what.replace('_', ' ')} of {client} deviates most from the round mean, by {deviation:.3g}")
        moved = {c: math.dist(v[min(v)], v[max(v)]) for many in one.vectors.values() for c, v in many.items() if len(v) > 1}
        if moved:
            most = max(moved, key=lambda client: moved[client])
            parts.append(f"the embedding of {most} moved most ({moved[most]:.3g})")
        return "; ".join(parts) or "only one round was logged"

    numbers = _by_run(
        found,
        farthest_from_the_mean=lambda one: max((one.largest_deviation(what)[1] for what in one.numbers), default=math.nan),
        farthest_in_the_last_round=lambda one: max((one.last_deviation(what) for what in one.numbers), default=math.nan),
        embeddings_apart=Noted.max_distance,
    )
    figures = {"rounds": drawings.noted_curves(found), "last round": drawings.noted_bars(found)}
    if any(one.vectors for one in found.values()):
        figures["embeddings"] = drawings.embeddings(found)
    return Presentation(_sentence(found, describe), {"numbers": rows, "vectors": vectors}, figures, numbers)


def present_confidence(found: Mapping[str, list[Confidence]]) -> Presentation:
    kinds = {True: "right", False: "wrong"}
    each = [({"run": label, "view": one.view, "answers": kinds[one.right]}, one) for label, many in found.items() for one in many]
    rows = [{**names, "count": one.count, "mean": one.mean} for names, one in each]
    bins = [
        {**names, "from": place / len(one.histogram), "to": (place + 1) / len(one.histogram), "share": share}
        for names, one in each
        for place, share in enumerate(one.histogram)
    ]

    def describe(many: list[Confidence]) -> str:
        parts = []
        for view in dict.fromkeys(one.view for one in many):
            both = [f"{kinds[one.right]} {_percent(one.mean)} ({one.count})" for one in many if one.view == view and one.count]
            parts.append(f"mean confidence on {view} domains: {', '.join(both)}")
        return "; ".join(parts)

    numbers: dict[str, dict[str, float]] = {}
    for label, many in found.items():
        for one in many:
            if one.count:
                numbers.setdefault(f"{one.view}, {kinds[one.right]}", {})[label] = one.mean
    tables = {"means": rows, "histogram": bins}
    return Presentation(_sentence(found, describe), tables, {"confidence": drawings.histograms(found)}, numbers)


def present_map(found: Mapping[str, TsneMap]) -> Presentation:
    rows = [
        {"run": label, "x": float(x), "y": float(y), "class": c, "domain": d, "view": v}
        for label, one in found.items()
        for (x, y), c, d, v in zip(one.places.tolist(), one.labels, one.domains, one.views, strict=True)
    ]
    silhouettes = [{"run": label, "by_class": one.by_class, "by_domain": one.by_domain} for label, one in found.items()]

    def describe(one: TsneMap) -> str:
        return f"silhouette of the features by class {one.by_class:.2f}, by domain {one.by_domain:.2f}"

    numbers = _by_run(found, by_class=lambda one: one.by_class, by_domain=lambda one: one.by_domain)
    tables = {"places": rows, "silhouette": silhouettes}
    return Presentation(_sentence(found, describe), tables, {"map": drawings.tsne_maps(found)}, numbers)


def present_grid(found: Mapping[str, GridRun]) -> Presentation:
    grid = score_grid(list(found.values()))
    a, b = grid.methods
    rows: Rows = [
        {grid.axes[0] or "row": r, grid.axes[1]: c, a: one, b: other, "difference": difference}
        for r, *cells in zip(grid.rows, grid.scores[a], grid.scores[b], grid.differences(), strict=True)
        for c, one, other, difference in zip(grid.columns, *cells, strict=True)
    ]
    known = [row for row in rows if row["difference"] is not None]
    if not known:
        sentence = f"No cell has a run of both {a} and {b}."
    else:
        largest, smallest = (_describe_cell(choose(known, key=lambda row: row["difference"]), grid.axes) for choose in (max, min))
        ahead = sum(row["difference"] > 0 for row in known)
        sentence = (
            f"Accuracy of {a} minus {b}: largest {largest}, smallest {smallest}; {a} is ahead in {ahead} of {len(known)} cells."
        )
    return Presentation(sentence, {"grid": rows}, {"grid": drawings.grid(grid)})


def _describe_cell(row: Mapping[str, Any], axes: Sequence[str]) -> str:
    where = ", ".join(f"{axis.replace('_', ' ')} {row[axis]}" for axis in axes if axis)
    return f"{100 * row['difference']:+.1f} points at {where}"


def measure_union(run: OpenedRun) -> dict[str, dict[str, float]]:
    experiment = run.experiment
    averaged = accuracy_table(score_with(experiment, {}))["seen"]
    union = accuracy_table(score_with(experiment, union_statistics(experiment)))["seen"]
    return {domain: {"averaged": averaged[domain], "union": union[domain]} for domain in averaged}


def present_union(found: Mapping[str, dict[str, dict[str, float]]]) -> Presentation:
    rows = [{"run": label, "domain": domain, **both} for label, domains in found.items() for domain, both in domains.items()]

    def describe(domains: dict[str, dict[str, float]]) -> str:
        gain = sum(both["union"] - both["averaged"] for both in domains.values()) / len(domains)
        return f"statistics of the pooled data instead of averaged ones change mean accuracy by {100 * gain:+.1f} points"

    numbers = _by_run(
        found,
        averaged=lambda domains: _mean(both["averaged"] for both in domains.values()),
        union=lambda domains: _mean(both["union"] for both in domains.values()),
    )
    return Presentation(_sentence(found, describe), {"accuracy": rows}, {"accuracy": drawings.union_bars(rows)}, numbers)
