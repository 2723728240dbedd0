"""Compare feature maps of the client and server models, and map features to two dimensions with t-SNE."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import torch
from torch import Tensor, nn

from polyfed.core.data_types import in_batches
from polyfed.core.seeds import derive, generator
from polyfed.core.workbench import forward_with_features
from polyfed.errors import DataError, ModelError
from polyfed.runs.experiment import Experiment, threads
from polyfed.studies.analyse.local_models import State, require_data, server_state, states_after_training

SERVER = "server"
CHUNK = 8
"""Images per batch: the maps of all models are in memory at once."""
MAX_LAYERS = 6


@dataclass(frozen=True)
class Similarity:
    """Mean cosine of two models' feature maps after one layer."""

    layer: str
    one: str
    other: str
    cosine: float


@dataclass(frozen=True)
class Features:
    """Similarity of the models' feature maps (FedWon Figures 5 and 13).

    ``pairs`` has all layers and pairs of models, with the server second. ``maps`` has the feature map of one image by layer, domain and
    model (the mean absolute value over channels), and ``images`` the stored image by domain.
    """

    pairs: Sequence[Similarity]
    maps: Mapping[str, Mapping[str, Mapping[str, Tensor]]]
    images: Mapping[str, Tensor]

    def mean(self, with_server: bool, layer: str | None = None) -> float:
        """Return the mean cosine between clients, or between clients and the server, after one layer (default: the last)."""
        last = self.pairs[-1].layer if layer is None else layer
        found = [pair.cosine for pair in self.pairs if pair.layer == last and (pair.other == SERVER) == with_server]
        return statistics.fmean(found) if found else 1.0


def feature_similarity(
    experiment: Experiment, images: int = 64, layers: Sequence[str] = (), states: Mapping[str, State] | None = None
) -> Features:
    """Compare the feature maps of all client models and the server model on the same test images.

    The similarity is the cosine of the flattened feature maps of one image, averaged over images.

    Args:
        experiment: Experiment with its data. It is not changed.
        images: Number of test images, spread evenly over all domains.
        layers: Module names. Default: up to six evenly spaced convolutions including the last, or linear layers if there are none.
        states: Client models. Default: the models after some steps of local training, because averaging makes those of FedAvg equal.
    """
    require_data(experiment)
    found = dict(states_after_training(experiment)) if states is None else states
    models = {**found, SERVER: server_state(experiment)}
    layers = list(layers) or default_layers(experiment)
    by_domain = images_by_domain(experiment, images)
    sums: dict[tuple[str, str, str], list[float]] = {}
    maps: dict[str, dict[str, dict[str, Tensor]]] = {layer: {} for layer in layers}
    with threads(experiment.settings.threads):
        for domain, stored in by_domain.items():
            for start in range(0, len(stored), CHUNK):
                x = experiment.bench.preparation.for_testing(stored[start : start + CHUNK].to(experiment.bench.device))
                seen = {name: feature_maps(experiment, state, x, layers) for name, state in models.items()}
                for layer in layers:
                    for one, other in combinations(seen, 2):
                        cosines = nn.functional.cosine_similarity(seen[one][layer].flatten(1), seen[other][layer].flatten(1))
                        sums.setdefault((layer, one, other), []).extend(cosines.tolist())
                if start == 0:
                    for layer in layers:
                        maps[layer][domain] = {name: _as_image(seen[name][layer][0]) for name in models}
    ordered = sorted(sums.items(), key=lambda item: (layers.index(item[0][0]), item[0][2] == SERVER))
    pairs = [Similarity(*names, statistics.fmean(values)) for names, values in ordered]
    return Features(pairs, maps, {domain: stored[0] for domain, stored in by_domain.items()})


def _as_image(features: Tensor) -> Tensor:
    """Return the mean absolute value over channels, or a single row for features without spatial dimensions."""
    return features.abs().mean(0) if features.dim() == 3 else features.reshape(1, -1)


@torch.no_grad()
def feature_maps(experiment: Experiment, state: State, x: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
    """Return the outputs of these layers for preprocessed inputs."""
    bench, outputs = experiment.bench, dict[str, Tensor]()

    def save_output(layer: str, _: nn.Module, __: object, output: Tensor) -> None:
        outputs[layer] = output.detach().to("cpu", torch.float32)

    bench.load(state)
    bench.model.eval()
    modules = [bench.model.get_submodule(layer) for layer in layers]  # before any hook, which an unknown layer would leave behind
    hooks = [module.register_forward_hook(partial(save_output, layer)) for layer, module in zip(layers, modules, strict=True)]
    try:
        bench.model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def default_layers(experiment: Experiment) -> list[str]:
    """Return up to six evenly spaced convolutions including the last, or linear layers if there are none."""
    modules = list(experiment.bench.model.named_modules())
    for kind in (nn.modules.conv._ConvNd, nn.Linear):
        found = [path for path, module in modules if isinstance(module, kind)]
        if found:
            step = max(1, -(-len(found) // MAX_LAYERS))
            return found[::-1][::step][::-1]
    raise ModelError(f"{type(experiment.bench.model).__name__} has no convolutions and no linear layers. Pass layers=[...].")


def images_by_domain(experiment: Experiment, images: int) -> dict[str, Tensor]:
    """Return stored test images of every seen and unseen domain, at least one of each."""
    federation = experiment.federation
    parts = {domain: many[0] for domain, many in federation.tests().items()} | dict(federation.unseen)
    each = max(1, images // max(len(parts), 1))
    chosen = {}
    for domain, examples in parts.items():
        order = torch.randperm(len(examples), generator=generator(experiment.settings.seed, "feature maps", domain))
        chosen[domain] = examples.batch(order[:each])[0]
    return chosen


@dataclass(frozen=True)
class TsneMap:
    """A two-dimensional map of test images (gPerXAN Figure 3).

    ``by_class`` is the silhouette of the features by class, which is high if the classes are separated. ``by_domain`` is near 0 or
    below if the domains are mixed, which favours generalisation.
    """

    places: Tensor
    labels: Sequence[str]
    domains: Sequence[str]
    views: Sequence[str]
    by_class: float
    by_domain: float


def tsne(experiment: Experiment, per_domain: int = 100, perplexity: float = 30.0) -> TsneMap:
    """Map test images of all domains to two dimensions by the inputs of the server model's head.

    Args:
        experiment: Experiment with its data. It is not changed.
        per_domain: Maximum number of test images per domain.
        perplexity: Effective number of neighbours of an image; reduced if there are few images.
    """
    from sklearn.manifold import TSNE

    require_data(experiment)
    bench, federation = experiment.bench, experiment.federation
    federation.task.require_class_labels("t-SNE by class")
    bench.require_head("t-SNE")
    features, labels, domains, views = [], list[str](), list[str](), list[str]()
    parts = [("seen", domain, many[0]) for domain, many in federation.tests().items()]
    parts += [("unseen", domain, examples) for domain, examples in federation.unseen.items()]
    with threads(experiment.settings.threads), torch.no_grad():
        bench.load(server_state(experiment))
        bench.model.eval()
        for view, domain, examples in parts:
            order = torch.randperm(len(examples), generator=generator(experiment.settings.seed, "feature map", domain))
            some = examples.subset(order[:per_domain])
            for x, y in in_batches(some, experiment.settings.test_batch_size):
                features.append(forward_with_features(bench, bench.preparation.for_testing(x.to(bench.device)))[1].flatten(1).cpu())
                labels += [federation.classes[int(label)] for label in y]
            domains += [domain] * len(some)
            views += [view] * len(some)
    together = torch.cat(features).double()
    if len(together) < 4:
        raise DataError(f"t-SNE needs at least four test images; the run has {len(together)}.")
    near = min(perplexity, (len(together) - 1) / 3)
    seed = derive(experiment.settings.seed, "t-SNE") % 2**31
    drawn = TSNE(perplexity=near, init="pca", random_state=seed).fit_transform(together.numpy())
    return TsneMap(torch.as_tensor(drawn), labels, domains, views, silhouette(together, labels), silhouette(together, domains))


def silhouette(features: Tensor, groups: Sequence[str]) -> float:
    """Return the separation of the groups, from -1 to 1, or NaN if there is one group or every image has its own."""
    from sklearn.metrics import silhouette_score

    if not 1 < len(set(groups)) < len(groups):
        return float("nan")
    return float(silhouette_score(features.numpy(), list(groups)))
