"""Train on PyTorch data sets: a pair (train, test) for each domain."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import polyfed


def sensor(shift: float, seed: int, count: int) -> TensorDataset:
    """Return two classes of 8 readings, with an offset for the sensor of a domain."""
    stream = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    readings = torch.randn(count, 8, generator=stream) + labels[:, None] + shift
    return TensorDataset(readings, labels)


data = {name: (sensor(shift, 0, 120), sensor(shift, 1, 60)) for name, shift in {"lab": 0.0, "field": 5.0, "sea": -5.0}.items()}
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))

if __name__ == "__main__":
    for method in ("fedavg", "fedbn", "local"):
        print(polyfed.run(data, method=method, model=model, rounds=10, lr=0.1))
