"""Features of test images in two dimensions by t-SNE, by class and by domain (gPerXAN Figure 3).

Features are what the head of the server's model is given. Beside the picture, two numbers from the features themselves: the silhouette
by class (high: classes lie apart) and by domain (near 0 or below: domains are mixed, which is what generalisation wants).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.data_types import in_batches
from polyfed.core.seeds import derive, generator
from polyfed.core.workbench import forward_with_features
from polyfed.errors import DataError
from polyfed.runs.experiment import Experiment, threads
from polyfed.studies.analyse.local_models import require_data, server_state


@dataclass(frozen=True)
class TsneMap:
    """A place for each test image, and how well classes and domains are told apart.

    Attributes:
        places: two numbers for each image.
        labels: the class of each image.
        domains: the domain of each image.
        views: seen or unseen.
        by_class: silhouette of the features by class.
        by_domain: silhouette of the features by domain.
    """

    places: Tensor
    labels: Sequence[str]
    domains: Sequence[str]
    views: Sequence[str]
    by_class: float
    by_domain: float


def tsne(experiment: Experiment, per_domain: int = 100, perplexity: float = 30.0) -> TsneMap:
    """Put test images of all domains on a plane by the features of the server's model.

    Args:
        experiment: with its data; it is left as it is.
        per_domain: test images of each domain, at most.
        perplexity: about how many neighbours an image has; lowered where there are few images.
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
        raise DataError(f"t-SNE needs four test images or more, and the run has {len(together)}.")
    near = min(perplexity, (len(together) - 1) / 3)
    seed = derive(experiment.settings.seed, "t-SNE") % 2**31
    drawn = TSNE(perplexity=near, init="pca", random_state=seed).fit_transform(together.numpy())
    return TsneMap(torch.as_tensor(drawn), labels, domains, views, silhouette(together, labels), silhouette(together, domains))


def silhouette(features: Tensor, groups: Sequence[str]) -> float:
    """How well groups lie apart, between -1 and 1; NaN where there is one group, or one for each image."""
    from sklearn.metrics import silhouette_score

    if not 1 < len(set(groups)) < len(groups):
        return float("nan")
    return float(silhouette_score(features.numpy(), list(groups)))
