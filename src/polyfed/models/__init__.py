"""Models by name: each file registers builders ``(classes, input_shape, **options) -> nn.Module``."""

from __future__ import annotations

from torch import nn

from polyfed.registry import Registry

models: Registry[nn.Module] = Registry(
    "model", "polyfed.models", advice=" A function of your own is written module.path:function, such as my_models:net."
)
"""``classes`` and ``input_shape`` (channels, height, width) are given by the run, other options by the text."""
