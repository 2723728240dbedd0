"""Random streams that depend on names, not on order: every stream is derived from (seed, purpose, ...)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed for one purpose.

    >>> derive(0, "batches", 1, "a") == derive(0, "batches", 1, "a") != derive(0, "batches", 2, "a")
    True
    """
    text = "\x1f".join(str(name) for name in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    return torch.Generator().manual_seed(derive(seed, *names))


def chooser(seed: int, *names: str | int) -> random.Random:
    return random.Random(derive(seed, *names))


@contextmanager
def default_stream(seed: int, *names: str | int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the default generators of torch (CPU and GPU) inside the block, and restore them afterwards."""
    own = derive(seed, *names)
    with torch.random.fork_rng(devices=[]), _gpu_stream(own, device):
        torch.default_generator.manual_seed(own)
        yield


@contextmanager
def _gpu_stream(seed: int, device: torch.device | None) -> Iterator[None]:
    if device is not None and device.type == "cuda":
        with torch.random.fork_rng(devices=[device]):
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
            yield
    elif device is not None and device.type == "mps":
        before = torch.mps.get_rng_state()
        torch.mps.manual_seed(seed)
        try:
            yield
        finally:
            torch.mps.set_rng_state(before)
    else:
        yield
