"""Norm layers."""

from __future__ import annotations

import pytest
import torch

from polyfed.core.entries import entries_of
from polyfed.errors import ModelError
from polyfed.models.layers.norms import InstanceNorm


def test_instance_norm_on_single_positions_says_so() -> None:
    assert {entry.layer for entry in entries_of(InstanceNorm(4)).values()} == {"instance_norm"}
    with pytest.raises(ModelError, match="one position"):
        InstanceNorm(4)(torch.zeros(2, 4, 1, 1))
