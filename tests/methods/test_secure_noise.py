"""Noise from the system's generator: normal by statistics, on a grid, and never the same twice."""

from __future__ import annotations

import math
import sys

import pytest
import torch

pytest.importorskip("cryptography", reason="needs the privacy extra: pip install 'polyfed[privacy]'")

from scipy import stats

from polyfed.errors import MissingExtra
from polyfed.methods._shared.secure_noise import CHUNK, GRID_BITS, SecureStream

MANY = 10_000
STRAY = 5.0
"""Standard errors: a sound generator is farther off once in two million times."""


def test_ten_thousand_draws_are_normal() -> None:
    draws = SecureStream().add_noise(torch.zeros(MANY, dtype=torch.float64), 3.0).div_(3.0)
    assert abs(float(draws.mean())) < STRAY / math.sqrt(MANY)
    assert abs(float(draws.var()) - 1) < STRAY * math.sqrt(2 / MANY)
    assert abs(float(draws.pow(3).mean())) < STRAY * math.sqrt(15 / MANY)
    assert abs(float(draws.pow(4).mean()) - 3) < STRAY * math.sqrt(96 / MANY)
    assert stats.kstest(draws.numpy(), "norm").pvalue > 1e-6


def test_neighbours_pairs_and_chunks_are_independent() -> None:
    draws = SecureStream().add_noise(torch.zeros(2 * CHUNK, dtype=torch.float64), 1.0)
    for apart in (1, 2, CHUNK // 2, CHUNK):
        first, second = draws[:-apart], draws[apart:]
        for change in (torch.clone, torch.square):
            found = torch.corrcoef(torch.stack([change(first), change(second)]))[0, 1]
            assert abs(float(found)) < STRAY / math.sqrt(len(first)), apart


@pytest.mark.parametrize("count", [0, 1, 2, 7, CHUNK - 1, CHUNK + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_number_gets_noise_of_its_own(count: int, dtype: torch.dtype) -> None:
    value = torch.arange(count, dtype=dtype) % 7
    found = SecureStream().add_noise(value, 0.5)
    assert found.dtype == dtype and found.shape == value.shape
    assert bool((found - value).abs().lt(0.5 * 9).all()) and len((found - value).unique()) >= 0.99 * count
    assert torch.equal(value, torch.arange(count, dtype=dtype) % 7), "the value itself must not change"


def test_shapes_stay_and_scalars_work() -> None:
    assert SecureStream().add_noise(torch.zeros(3, 2, 5), 1.0).shape == (3, 2, 5)
    assert SecureStream().add_noise(torch.tensor(0.5, dtype=torch.float64), 2.0).shape == ()


@pytest.mark.parametrize("spread", [0.003, 1.0, 1.9, 700.0])
def test_what_leaves_lies_on_a_grid_whatever_the_last_bits_of_the_value_are(spread: float) -> None:
    grid = 2.0 ** (math.floor(math.log2(spread)) - GRID_BITS)
    value = torch.rand(1000, dtype=torch.float64) / 3
    found = SecureStream().add_noise(value, spread) / grid
    assert torch.equal(found, found.round())
    assert 2.0**-31 < grid / spread <= 2.0**-30


def test_no_two_streams_are_the_same() -> None:
    drawn = {tuple(SecureStream().uniform(3).tolist()) for _ in range(100)}
    assert len(drawn) == 100


def test_uniform_numbers_are_uniform() -> None:
    drawn = SecureStream().uniform(CHUNK + 5)
    assert len(drawn) == CHUNK + 5 and float(drawn.min()) >= 0 and float(drawn.max()) < 1
    assert stats.kstest(drawn.numpy(), "uniform").pvalue > 1e-6
    assert len(SecureStream().uniform(0)) == 0


def test_without_cryptography_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(MissingExtra, match=r"polyfed\[privacy\]"):
        SecureStream()
