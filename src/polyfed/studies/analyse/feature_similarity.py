"""Feature maps of clients' models and of the server's on the same images, and how alike they are (FedWon Figures 5 and 13).

Clients' models are those after some steps of local training, before averaging: after it, those of FedAvg are all the same, and their
similarity is 1. Similarity is the cosine of the flattened feature maps of one image, averaged over images.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor, nn

from polyfed.core.seeds import generator
from polyfed.errors import ModelError
from polyfed.runs.experiment import Experiment, threads
from polyfed.studies.analyse.local_models import State, require_data, server_state, states_after_training

SERVER = "server"
CHUNK = 8
"""Images that are looked at together: the maps of all models are in memory at once."""
MAX_LAYERS = 6


@dataclass(frozen=True)
class Similarity:
    """The mean cosine of two models' feature maps after one layer."""

    layer: str
    one: str
    other: str
    cosine: float


@dataclass(frozen=True)
class Features:
    """How alike the feature maps of models are.

    Attributes:
        pairs: every layer and pair of models; the server comes last in a pair.
        maps: by layer, domain and model, the map of one image: the mean of absolute values over channels.
        images: that image by domain, as it is stored.
    """

    pairs: Sequence[Similarity]
    maps: Mapping[str, Mapping[str, Mapping[str, Tensor]]]
    images: Mapping[str, Tensor]

    def mean(self, with_server: bool, layer: str | None = None) -> float:
        """The mean cosine between clients, or between clients and the server, after one layer (default: the last)."""
        last = self.pairs[-1].layer if layer is None else layer
        found = [pair.cosine for pair in self.pairs if pair.layer == last and (pair.other == SERVER) == with_server]
        return statistics.fmean(found) if found else 1.0


def feature_similarity(
    experiment: Experiment, images: int = 64, layers: Sequence[str] = (), states: Mapping[str, State] | None = None
) -> Features:
    """Compare the feature maps of all clients' models and the server's on the same test images.

    Args:
        experiment: with its data; it is left as it is.
        images: test images, evenly from all domains.
        layers: names of modules; default: at most six convolutions (or linear layers, where there are none), evenly chosen, with the last.
        states: clients' models; default: those after some steps of local training.
    """
    require_data(experiment)
    found = dict(states_after_training(experiment)) if states is None else states
    models = {**found, SERVER: server_state(experiment)}
    watched = list(layers) or default_layers(experiment)
    by_domain = images_by_domain(experiment, images)
    sums: dict[tuple[str, str, str], list[float]] = {}
    maps: dict[str, dict[str, dict[str, Tensor]]] = {layer: {} for layer in watched}
    with threads(experiment.settings.threads):
        for domain, stored in by_domain.items():
            for start in range(0, len(stored), CHUNK):
                x = experiment.bench.preparation.for_testing(stored[start : start + CHUNK].to(experiment.bench.device))
                seen = {name: feature_maps(experiment, state, x, watched) for name, state in models.items()}
                for layer in watched:
                    for one, other in combinations(seen, 2):
                        cosines = nn.functional.cosine_similarity(seen[one][layer].flatten(1), seen[other][layer].flatten(1))
                        sums.setdefault((layer, one, other), []).extend(cosines.tolist())
                if start == 0:
                    for layer in watched:
                        maps[layer][domain] = {name: _drawn(seen[name][layer][0]) for name in models}
    pairs = [
        Similarity(*names, statistics.fmean(values)) for names, values in sorted(sums.items(), key=lambda i: _order(i[0], watched))
    ]
    return Features(pairs, maps, {domain: stored[0] for domain, stored in by_domain.items()})


def _order(names: tuple[str, str, str], layers: Sequence[str]) -> tuple[int, bool]:
    return layers.index(names[0]), names[2] == SERVER


def _drawn(features: Tensor) -> Tensor:
    """A feature map as a picture: the mean of absolute values over channels; features without places as one row."""
    return features.abs().mean(0) if features.dim() == 3 else features.reshape(1, -1)


@torch.no_grad()
def feature_maps(experiment: Experiment, state: State, x: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
    """What these layers give for some prepared inputs, in the model with this state."""
    bench, caught = experiment.bench, dict[str, Tensor]()

    def catch(layer: str) -> None:
        def note(_: nn.Module, __: object, output: Tensor) -> None:
            caught[layer] = output.detach().to("cpu", torch.float32)

        hooks.append(bench.model.get_submodule(layer).register_forward_hook(note))

    hooks: list[torch.utils.hooks.RemovableHandle] = []
    bench.load(state)
    bench.model.eval()
    try:
        for layer in layers:
            catch(layer)
        bench.model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return caught


def default_layers(experiment: Experiment) -> list[str]:
    """At most six convolutions, evenly chosen, with the last; linear layers where there are none."""
    modules = list(experiment.bench.model.named_modules())
    for kind in (nn.modules.conv._ConvNd, nn.Linear):
        found = [path for path, module in modules if isinstance(module, kind)]
        if found:
            step = max(1, -(-len(found) // MAX_LAYERS))
            return found[::-1][::step][::-1]
    raise ModelError(f"{type(experiment.bench.model).__name__} has no convolution and no linear layer to look behind.")


def images_by_domain(experiment: Experiment, images: int) -> dict[str, Tensor]:
    """Test images of every domain, seen and unseen, as they are stored; at least one of each."""
    federation = experiment.federation
    parts = {domain: many[0] for domain, many in federation.tests().items()} | dict(federation.unseen)
    each = max(1, images // max(len(parts), 1))
    chosen = {}
    for domain, examples in parts.items():
        order = torch.randperm(len(examples), generator=generator(experiment.settings.seed, "feature maps", domain))
        chosen[domain] = examples.batch(order[:each])[0]
    return chosen
