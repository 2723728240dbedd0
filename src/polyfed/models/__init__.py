"""Registry of models: each file registers builders ``(classes, input_shape, **options) -> nn.Module``."""

from __future__ import annotations

from torch import nn

from polyfed.registry import Registry

models: Registry[nn.Module] = Registry(
    "model", "polyfed.models", advice=" For a custom model, write module.path:function, such as my_models:net."
)
"""The run sets ``classes`` and ``input_shape`` (channels, height, width); the model expression sets the other options."""
