"""Draw the figures of the analyses with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from polyfed.runs.figures import COLOURS, MARKERS, empty_figure
from polyfed.studies.analyse.confidence import Confidence
from polyfed.studies.analyse.features import SERVER, Features, TsneMap
from polyfed.studies.analyse.norm_statistics import NormStatistics
from polyfed.studies.analyse.rounds import Drift, Noted
from polyfed.studies.analyse.score_grid import ScoreGrid

Rows = Sequence[Mapping[str, Any]]
MAX_PANELS = 6
SMALL = 7


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _short(text: str, length: int = 28) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _panels(found: Mapping[str, Any], width: float, height: float, rows: int = 1) -> tuple[Any, dict[str, list[Any]]]:
    """Return a figure and its axes by run label, one column per run."""
    shown = list(found)[:MAX_PANELS]
    figure = empty_figure(max(3.4, width * len(shown)), height * rows)
    axes = figure.subplots(rows, len(shown), squeeze=False)
    return figure, {label: [axes[row][place] for row in range(rows)] for place, label in enumerate(shown)}


def _single(width: float, height: float) -> tuple[Any, Any]:
    figure = empty_figure(width, height)
    return figure, figure.add_subplot()


def _label_rounds(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.set_xlabel("round", fontsize=8)


def _label_layers(axes: Any, layers: Sequence[str]) -> None:
    step = max(1, len(layers) // 16)
    places = range(0, len(layers), step)
    axes.set_xticks(list(places), [_short(layers[place], 22) for place in places], rotation=60, ha="right", fontsize=6)


def bias_bars(rows: Rows) -> Any:
    """Draw the bias of each run and norm next to the bias of shuffled batches."""
    names = [row["norm"] if len({r["run"] for r in rows}) == 1 else f"{_short(row['run'], 34)}\n{row['norm']}" for row in rows]
    figure, axes = _single(5.0, 0.5 * len(rows) + 1.2)
    for place, row in enumerate(rows):
        first = place == 0
        axes.barh(place - 0.18, 100 * row["bias"], 0.34, color=COLOURS[0], label="client batches" if first else None)
        axes.barh(place + 0.18, 100 * row["shuffled"], 0.34, color="0.65", label="same images, random batches" if first else None)
        axes.text(100 * row["bias"], place - 0.18, f" {100 * row['bias']:.1f}", va="center", fontsize=SMALL)
    axes.set_yticks(range(len(rows)), names, fontsize=SMALL)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("distance from the central gradient, % of its length", fontsize=8)
    axes.legend(fontsize=SMALL)
    return figure


def distance_lines(distances: Rows) -> Any:
    """Draw the mean shift between two clients over layers."""
    runs = list(dict.fromkeys(row["run"] for row in distances))
    sources = list(dict.fromkeys(row["source"] for row in distances))
    layers = list(dict.fromkeys(row["layer"] for row in distances))
    figure, axes = _single(5.2, 3.2)
    for place, run in enumerate(runs):
        for source in sources:
            mine = [r for r in distances if r["run"] == run and r["source"] == source and SERVER not in (r["one"], r["other"])]
            points = {layer: [r["shift"] for r in mine if r["layer"] == layer] for layer in layers}
            known = [(layers.index(layer), sum(many) / len(many)) for layer, many in points.items() if many]
            name = "their images" if source == "data" else "after local training"
            label = name if len(runs) == 1 else f"{_short(run)}: {name}"
            style = "-" if source == "data" else "--"
            axes.plot(*zip(*known, strict=True), style, color=_colour(place), marker=MARKERS[place % 8], markersize=3, label=label)
    _label_layers(axes, layers)
    axes.set_ylabel("distance between two clients' means,\nstandard deviations", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", linewidth=0.4)
    axes.legend(fontsize=SMALL)
    return figure


def channel_curves(found: NormStatistics, label: str, layers: Sequence[str]) -> Any:
    """Draw the running mean and variance per channel of some batch norms."""
    figure = empty_figure(3.6 * len(layers), 3.8)
    axes = figure.subplots(2, len(layers), squeeze=False)
    for column, layer in enumerate(layers):
        for place, (owner, by_layer) in enumerate(found.by_owner.items()):
            colour, width = ("black", 1.4) if owner == SERVER else (_colour(place), 0.8)
            shown = range(min(64, len(by_layer[layer].mean)))
            for row, values in enumerate((by_layer[layer].mean, by_layer[layer].variance)):
                axes[row][column].plot(shown, values[: len(shown)].tolist(), color=colour, linewidth=width, label=_short(owner, 20))
        axes[0][column].set_title(_short(layer, 30), fontsize=8)
        axes[1][column].set_xlabel("channel", fontsize=8)
    axes[0][0].set_ylabel("running mean", fontsize=8)
    axes[1][0].set_ylabel("running variance", fontsize=8)
    axes[0][0].legend(fontsize=6, ncols=2)
    figure.suptitle(_short(label, 60), fontsize=8)
    return figure


def drift_curves(found: Mapping[str, Drift]) -> Any:
    """Draw the change of the server statistics, the clients' distances to them, and the variance at each client, over rounds."""
    figure, panels = _panels(found, 3.6, 2.4, rows=2)
    for label, (above, below) in panels.items():
        one = found[label]
        above.plot(list(one.change), list(one.change.values()), color="black", linewidth=1.6, label="server, change")
        for place, client in enumerate(one.distance):
            distance, variance = one.distance[client], one.variance[client]
            above.plot(list(distance), list(distance.values()), color=_colour(place), linewidth=0.9, label=client)
            if variance:
                below.plot(list(variance), list(variance.values()), color=_colour(place), linewidth=0.9, marker=".", markersize=4)
        above.set_title(_short(label, 40), fontsize=8)
        above.set_ylim(bottom=0)
        _label_rounds(above)
        _label_rounds(below)
        if not any(one.variance.values()):
            below.text(0.5, 0.5, "needs two rounds", transform=below.transAxes, ha="center", fontsize=SMALL)
    first = next(iter(panels.values()))
    first[0].set_ylabel("L1 distance from the\nserver's statistics", fontsize=8)
    first[1].set_ylabel(f"variance over {next(iter(found.values())).window} rounds", fontsize=8)
    first[0].legend(fontsize=6, ncols=2)
    return figure


def similarity_bars(found: Mapping[str, Features]) -> Any:
    """Draw the mean cosine between clients, and between clients and the server, after each layer."""
    figure, panels = _panels(found, 3.4, 3.0)
    for label, (axes,) in panels.items():
        one = found[label]
        layers = list(dict.fromkeys(pair.layer for pair in one.pairs))
        for server, style, name in ((False, "-", "client and client"), (True, "--", "client and server")):
            values = [one.mean(server, layer) for layer in layers]
            look = {"color": _colour(int(server)), "marker": MARKERS[int(server)], "markersize": 4}
            axes.plot(range(len(layers)), values, style, label=name, **look)
        axes.set_title(_short(label, 40), fontsize=8)
        _label_layers(axes, layers)
        axes.grid(axis="y", linewidth=0.4)
    limits = [axes.get_ylim() for (axes,) in panels.values()]
    for (axes,) in panels.values():
        axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    first = next(iter(panels.values()))[0]
    first.set_ylabel("cosine of feature maps", fontsize=8)
    first.legend(fontsize=SMALL)
    return figure


def maps(found: Mapping[str, Features], all_layers: bool = False) -> Any:
    """Draw the last layer's feature maps of one image per domain, or all layers' maps of one image, for the first runs.

    Each row has the image and then its feature map under each model, with the server last.
    """
    rows = []
    for label, one in list(found.items())[:4]:
        layers, domains = list(one.maps), list(one.images)
        for layer, domain in product(layers, domains[:1]) if all_layers else product(layers[-1:], domains[:3]):
            name = _short(layer, 16) if all_layers else domain
            rows.append((name if len(found) == 1 else f"{_short(label, 16)}\n{name}", one, layer, domain))
    names = list(rows[0][1].maps[rows[0][2]][rows[0][3]])[-6:]
    figure = empty_figure(1.1 * (len(names) + 1), 1.15 * len(rows) + 0.3)
    axes = figure.subplots(len(rows), len(names) + 1, squeeze=False)
    for row, (label, one, layer, domain) in enumerate(rows):
        image = one.images[domain]
        axes[row][0].imshow(image.permute(1, 2, 0).squeeze(-1).numpy() if image.dim() == 3 else image.reshape(1, -1), cmap="gray")
        axes[row][0].set_ylabel(label, fontsize=6)
        for column, name in enumerate(names, 1):
            axes[row][column].imshow(one.maps[layer][domain][name].numpy(), cmap="viridis", aspect="auto")
            if row == 0:
                axes[row][column].set_title(_short(name, 14), fontsize=SMALL)
    axes[0][0].set_title("image", fontsize=SMALL)
    for line in axes:
        for one_axes in line:
            one_axes.set_xticks([])
            one_axes.set_yticks([])
    return figure


def spread_lines(rows: Rows) -> Any:
    """Draw the relative deviation across clients for each entry."""
    weights = [row for row in rows if row["values"] > 1]
    runs, entries = (list(dict.fromkeys(row[key] for row in weights)) for key in ("run", "entry"))
    figure, axes = _single(5.6, 3.4)
    for place, run in enumerate(runs):
        for models, style in (("as tested", "-"), ("after local training", "--")):
            mine = [row for row in weights if row["run"] == run and row["models"] == models]
            label = models if len(runs) == 1 else f"{_short(run, 40)}, {models}"
            xs = [entries.index(row["entry"]) for row in mine]
            axes.plot(
                xs, [100 * row["relative"] for row in mine], style, color=_colour(place), marker=".", markersize=4, label=label
            )
    _label_layers(axes, entries)
    axes.set_ylabel("deviation across clients,\n% of the size of the entry", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", linewidth=0.4)
    figure.legend(loc="outside upper left", fontsize=6, ncols=2)
    return figure


def noted_curves(found: Mapping[str, Noted]) -> Any:
    """Draw the client numbers over rounds, with the largest deviation in bold, above the paths of the embeddings."""
    figure, panels = _panels(found, 3.6, 2.5, rows=2)
    for label, (above, below) in panels.items():
        one = found[label]
        above.set_title(_short(label, 40), fontsize=8)
        for name, by_client in list(one.numbers.items())[:1]:
            bold, _ = one.largest_deviation(name)
            for place, (client, values) in enumerate(by_client.items()):
                look = {"color": _colour(place), "linewidth": 2.2 if client == bold else 0.9, "marker": ".", "markersize": 3}
                above.plot(list(values), list(values.values()), label=client, **look)
            above.axhline(1 / len(by_client), color="0.6", linewidth=0.8, linestyle="dotted")
            above.set_ylabel(name.replace("_", " "), fontsize=8)
            _label_rounds(above)
            above.legend(fontsize=6, ncols=2)
        for name, vectors in list(one.vectors.items())[:1]:
            _draw_paths(below, name, vectors)
    return figure


def _draw_paths(axes: Any, name: str, by_client: Mapping[str, Mapping[int, Sequence[float]]]) -> None:
    for place, (client, by_round) in enumerate(by_client.items()):
        flat = all(len(vector) == 1 for vector in by_round.values())
        xs = list(by_round) if flat else [vector[0] for vector in by_round.values()]
        ys = [vector[0] if flat else vector[1] for vector in by_round.values()]
        axes.plot(xs, ys, color=_colour(place), linewidth=0.9)
        axes.plot(xs[-1:], ys[-1:], MARKERS[place % 8], color=_colour(place), markersize=5)
        axes.annotate(client, (xs[-1], ys[-1]), fontsize=6, xytext=(4, 2), textcoords="offset points")
    axes.margins(x=0.2)
    axes.set_xlabel(f"{name}, first dimension", fontsize=8)
    if flat:
        _label_rounds(axes)
    axes.set_ylabel(name if flat else "second dimension", fontsize=8)


def noted_bars(found: Mapping[str, Noted]) -> Any:
    """Draw the first logged number of every client in its last round, with one group of bars per run."""
    figure, axes = _single(max(3.4, 1.5 * len(found) + 1.2), 2.8)
    for group, one in enumerate(found.values()):
        for name in list(one.numbers)[:1]:
            last = one.last(name)
            width = 0.8 / len(last)
            for place, (client, (_, value)) in enumerate(last.items()):
                x = group + (place - (len(last) - 1) / 2) * width
                axes.bar(x, value, 0.9 * width, color=_colour(place))
                axes.text(x, value, _short(client, 14), rotation=90, ha="center", va="top", fontsize=6, color="white")
            axes.hlines(1 / len(last), group - 0.45, group + 0.45, colors="0.4", linestyles="dotted")
            axes.set_ylabel(f"{name.replace('_', ' ')}, last round", fontsize=8)
    axes.set_xticks(range(len(found)), [_short(label, 24) for label in found], fontsize=SMALL)
    return figure


def embeddings(found: Mapping[str, Noted]) -> Any:
    """Draw the last client embeddings of each run: the first dimension horizontally, the second (if any) vertically."""
    figure = empty_figure(4.6, 0.7 * len(found) + 1.2)
    axes = figure.subplots(len(found), 1, squeeze=False, sharex=True)
    for row, (label, one) in enumerate(found.items()):
        for by_client in list(one.vectors.values())[:1]:
            for place, (client, by_round) in enumerate(by_client.items()):
                x, *rest = by_round[max(by_round)]
                y = rest[0] if rest else 0.0
                axes[row][0].plot([x], [y], MARKERS[place % len(MARKERS)], color=_colour(place), markersize=6)
                offset = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center"}
                axes[row][0].annotate(_short(client, 14), (x, y), fontsize=6, **offset)
        axes[row][0].set_ylabel(_short(label, 18), fontsize=SMALL, rotation=0, ha="right", va="center")
        axes[row][0].set_yticks([])
        axes[row][0].margins(x=0.1, y=1.0)
    axes[-1][0].set_xlabel("embedding, first dimension", fontsize=8)
    return figure


def histograms(found: Mapping[str, list[Confidence]]) -> Any:
    """Draw histograms of the confidence in right and wrong predictions, seen domains above unseen ones."""
    views = list(dict.fromkeys(one.view for many in found.values() for one in many))
    figure, panels = _panels(found, 3.0, 2.2, rows=len(views))
    for label, column in panels.items():
        for axes, view in zip(column, views, strict=True):
            for one in found[label]:
                if one.view == view and one.count:
                    edges = [place / len(one.histogram) for place in range(len(one.histogram) + 1)]
                    colour = COLOURS[2] if one.right else COLOURS[1]
                    name = f"{'right' if one.right else 'wrong'} ({one.count})"
                    axes.stairs([100 * part for part in one.histogram], edges, color=colour, fill=True, alpha=0.45, label=name)
            if any(one.view == view and one.count for one in found[label]):
                axes.legend(fontsize=6)
            else:
                axes.text(0.5, 0.5, "no stored predictions", transform=axes.transAxes, ha="center", fontsize=SMALL)
            axes.set_xlim(0, 1)
            axes.set_title(f"{_short(label, 30)}: {view}", fontsize=8)
        column[-1].set_xlabel("probability of the predicted class", fontsize=8)
    for axes in next(iter(panels.values())):
        axes.set_ylabel("% of these predictions", fontsize=8)
    return figure


def tsne_maps(found: Mapping[str, TsneMap]) -> Any:
    """Draw the map of images, coloured by class above and by domain below."""
    figure, panels = _panels(found, 3.4, 3.0, rows=2)
    for number, (label, (above, below)) in enumerate(panels.items()):
        one = found[label]
        domains = list(dict.fromkeys(one.domains))
        unseen = {domain for domain, view in zip(one.domains, one.views, strict=True) if view == "unseen"}
        for axes, groups in ((above, one.labels), (below, one.domains)):
            for place, group in enumerate(sorted(set(groups))):
                for shape, domain in enumerate(domains):
                    rows = [i for i, (g, d) in enumerate(zip(groups, one.domains, strict=True)) if g == group and d == domain]
                    if rows:
                        xs, ys = one.places[rows].T.tolist()
                        name = f"{group} (unseen)" if group in unseen and axes is below else group
                        shown = name if shape == 0 or groups is one.domains else None
                        marker, colour = MARKERS[shape % len(MARKERS)], _class_colour(place)
                        axes.scatter(xs, ys, s=7, color=colour, marker=marker, linewidths=0, label=shown)
            axes.set_xticks([])
            axes.set_yticks([])
            if number == 0:
                axes.legend(fontsize=5, ncols=2, markerscale=1.4)
        above.set_title(f"{_short(label, 34)}: by class", fontsize=8)
        below.set_title("by domain", fontsize=8)
    return figure


def _class_colour(place: int) -> Any:
    from matplotlib import colormaps

    return colormaps["tab20"](place % 20) if place >= len(COLOURS) else COLOURS[place]


def grid(found: ScoreGrid) -> Any:
    """Draw Score(A) - Score(B) in points; blue cells favour A."""
    values = [[float("nan") if one is None else 100 * one for one in row] for row in found.differences()]
    known = [abs(one) for row in values for one in row if one == one]
    limit = max(known, default=1.0) or 1.0
    figure, axes = _single(max(3.4, 0.9 * len(found.columns) + 1.8), 0.55 * len(found.rows) + 1.6)
    image = axes.imshow(values, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
    for row, line in enumerate(values):
        for column, one in enumerate(line):
            text = "no run" if one != one else f"{one:+.1f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if abs(one) > 0.6 * limit else "black")
    axes.set_xticks(range(len(found.columns)), [_short(str(one), 16) for one in found.columns], fontsize=SMALL)
    axes.set_yticks(range(len(found.rows)), [_short(str(one), 20) for one in found.rows], fontsize=SMALL)
    axes.set_xlabel(found.axes[1].replace("_", " "), fontsize=8)
    axes.set_ylabel(found.axes[0].replace("_", " "), fontsize=8)
    figure.suptitle(f"accuracy of {_short(found.methods[0], 30)} − {_short(found.methods[1], 30)}", fontsize=8)
    figure.colorbar(image, ax=axes, label="points")
    return figure


def union_bars(rows: Rows) -> Any:
    """Draw the accuracy per domain with averaged statistics and with those of the pooled data."""
    runs = list(dict.fromkeys(row["run"] for row in rows))
    names = [row["domain"] if len(runs) == 1 else f"{_short(row['run'], 16)}\n{row['domain']}" for row in rows]
    figure, axes = _single(max(3.6, 0.7 * len(rows) + 1.4), 2.8)
    for offset, key, colour in ((-0.2, "averaged", "0.6"), (0.2, "union", COLOURS[0])):
        axes.bar([place + offset for place in range(len(rows))], [100 * row[key] for row in rows], 0.4, color=colour, label=key)
    axes.set_xticks(range(len(rows)), names, fontsize=6, rotation=20 if len(rows) > 4 else 0)
    axes.set_ylabel("accuracy, %", fontsize=8)
    axes.legend(title="statistics", fontsize=SMALL, title_fontsize=SMALL)
    return figure
