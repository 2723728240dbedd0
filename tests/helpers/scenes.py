"""Tiny images with masks."""

from __future__ import annotations

import torch

from polyfed.core.data_types import ArrayExamples, DataSet, Domain
from polyfed.tasks.known import SEGMENTATION
from polyfed.tasks.segmentation import IGNORED


def squares() -> DataSet:
    """Two domains of bright squares on dark ground, with a frame of pixels without a class."""
    domains = tuple(Domain(name, part(8, shift, shift), part(4, shift, shift + 1)) for name, shift in (("night", 0), ("day", 60)))
    return DataSet("squares", ("ground", "square"), domains, default_model="small_unet(width=4)", task=SEGMENTATION)


def part(count: int, shift: int, seed: int) -> ArrayExamples:
    """Images of one brightness."""
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randint(shift, shift + 60, (count, 3, 16, 16), generator=draw), torch.zeros(count, 16, 16)
    for place, corner in enumerate(torch.randint(2, 8, (count, 2), generator=draw).tolist()):
        x[place, :, corner[0] : corner[0] + 6, corner[1] : corner[1] + 6] += 120
        y[place, corner[0] : corner[0] + 6, corner[1] : corner[1] + 6] = 1
    y[:, 0] = IGNORED
    return ArrayExamples(x.to(torch.uint8), y.to(torch.uint8))
