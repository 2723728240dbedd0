"""Modules of a model are replaced in its order, shared ones once."""

from __future__ import annotations

from torch import nn

from polyfed.models.layers.surgery import replace_modules


def test_modules_are_replaced_in_the_order_of_the_model() -> None:
    inner = nn.Sequential(nn.BatchNorm2d(1), nn.BatchNorm2d(2))
    model = nn.Sequential(inner, nn.BatchNorm2d(3), inner)
    seen: list[int] = []

    def noted(norm: nn.Module) -> nn.Module:
        seen.append(norm.num_features)  # type: ignore[arg-type]
        return nn.Identity()

    assert replace_modules(model, lambda module: isinstance(module, nn.BatchNorm2d), noted) == 3
    assert seen == [1, 2, 3] and not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert model[0] is model[2]
