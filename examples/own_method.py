"""A custom method that penalises large features."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

import polyfed


@dataclass(frozen=True)
class SmallFeatures(polyfed.Part):
    weight: float
    needs_features = True  # the input of the classifier, in step.features

    def __call__(self, step: polyfed.Step) -> Tensor:
        return self.weight * step.features.square().mean()


@polyfed.register
def feature_norm(weight: float = 0.01) -> polyfed.Method:
    """Penalise large features."""
    return polyfed.Method("feature_norm", objective=(SmallFeatures(weight),))


if __name__ == "__main__":
    polyfed.check_method("feature_norm(weight=0.1)")
