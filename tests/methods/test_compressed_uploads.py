"""quantise and topk: what is sent, what is kept, and how many bytes travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from helpers.tiny_runs import PARAMETERS, assert_near, built, trained
from polyfed.core.method import parse
from polyfed.errors import JoinError
from polyfed.methods.compressed_uploads import LargestChanges, Quantise, packed, unpacked
from polyfed.testing import TinyNet


def test_codes_are_packed_and_unpacked() -> None:
    for bits in (1, 2, 4, 8):
        codes = torch.randint(0, 2**bits, (13,), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
        assert len(packed(codes, bits)) == -(-13 * bits // 8)
        assert torch.equal(unpacked(packed(codes, bits), bits)[:13], codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quantised_values_are_numpys_levels(dtype: torch.dtype) -> None:
    change = torch.randn(7, 5, generator=torch.Generator().manual_seed(2), dtype=dtype)
    entry = type(built("fedavg").bench.plan.entries["head.bias"])("x", "weight", "linear", (7, 5), dtype, True)
    stream, array = torch.Generator().manual_seed(0), change.double().numpy()
    for bits in (2, 8):
        scale = (array.max() - array.min()) / (2**bits - 1)
        nearest = array.min() + scale * np.floor((array - array.min()) / scale + 0.5)
        plain = Quantise(bits, False)
        np.testing.assert_allclose(plain.decoded(plain.encoded(change, stream), entry), nearest, rtol=1e-4, atol=1e-6)
        noisy = Quantise(bits, True)
        many = torch.stack([noisy.decoded(noisy.encoded(change, stream), entry) for _ in range(400)]).double().numpy()
        assert np.abs(many - array).max() <= scale * 1.001
        assert np.abs(many.mean(0) - array).max() < 5 * scale / 2 / np.sqrt(400)
        assert len(plain.encoded(change, stream)) == plain.size(entry)
    constant = torch.full((7, 5), 0.25, dtype=dtype)
    assert torch.equal(plain.decoded(plain.encoded(constant, stream), entry), constant)


SIZES = tuple(p.numel() for p in TinyNet().parameters())


DENSE = 4 * 4 * 8 + 2 * 8


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("quantise", sum(8 + n for n in SIZES)),
        ("quantise(bits=4)", sum(8 + -(-n // 2) for n in SIZES)),
        ("topk", sum(8 * -(-n // 100) for n in SIZES)),
        ("topk(share=0.25, memory=False)", sum(min(8 * -(-n // 4), 4 * n) for n in SIZES)),
    ],
)
def test_the_bytes_that_travel_are_counted(text: str, size: int) -> None:
    experiment, plain = trained(text), trained("fedavg")
    assert experiment.costs.total("up") == 2 * 3 * (size + DENSE)
    assert "extra" not in experiment.costs.bytes["up"]["training"]
    assert experiment.costs.total("down") == plain.costs.total("down")
    counters = [name for name in plain.server.state if "num_batches" in name]
    assert all(torch.equal(experiment.server.state[name], plain.server.state[name]) for name in counters)


def test_compressed_training_stays_near() -> None:
    plain = trained("fedavg", rounds=1).server.state
    near = trained("quantise", rounds=1).server.state
    moved = {name: (plain[name] - built("fedavg").bench.initial[name]).abs().max() for name in PARAMETERS}
    assert all(bool((near[name] - plain[name]).abs().max() <= 0.02 * moved[name]) for name in PARAMETERS)
    assert all(torch.equal(near[name], value) for name, value in plain.items() if name not in PARAMETERS)


def test_topk_sends_the_largest_changes_and_keeps_the_rest() -> None:
    change = torch.tensor([0.1, -3.0, 0.2, 2.0, -0.3, 0.0, 0.05, 0.4])
    entry = type(built("fedavg").bench.plan.entries["head.bias"])("x", "weight", "linear", (8,), torch.float32, True)
    part = LargestChanges(0.25, True)
    sent, left = part.encoded(change)
    positions, values = part.decoded(sent, entry)
    assert positions.tolist() == [1, 3] and values.tolist() == [-3.0, 2.0] and sent.dtype == torch.uint8 and len(sent) == 16
    assert torch.equal(left.index_add(0, positions, values), change)
    assert part.count(30) == 8 and LargestChanges(0.1, True).count(30) == 3


def test_what_topk_did_not_send_is_added_the_next_time() -> None:
    """With one client, sent changes and memory together are all its changes."""
    experiment = built("topk", {"only": 8}, rounds=1)
    experiment.train()
    start, left = experiment.bench.initial, experiment.backend.client_states["only"].memory["topk"]
    whole = trained("fedavg", {"only": 8}, rounds=1).server.state
    for name in PARAMETERS:
        moved = experiment.server.state[name] - start[name]
        assert int((moved != 0).sum()) <= -(-moved.numel() // 100)
        assert_near({name: moved + left[name].reshape(moved.shape)}, {name: whole[name] - start[name]})
    assert not trained("topk(memory=False)").backend.client_states


def test_a_reply_that_cannot_be_decoded_is_rejected() -> None:
    for text, spoil in (("quantise", lambda v: v[:-1]), ("topk", lambda v: v * 0 + 255)):
        experiment = built(text, min_share=0.5)
        reply = experiment.backend.accept

        def broken(ask: Any, outcome: Any, reply: Any = reply, spoil: Any = spoil) -> Any:
            made = reply(ask, outcome)
            if outcome.client == "small":
                made.payload.entries["head.weight"] = spoil(made.entries["head.weight"])
            return made

        experiment.backend.accept = broken  # type: ignore[method-assign]
        experiment.train()
        assert "head.weight" in experiment.server.rejected["small"]


def test_compression_refuses_what_it_cannot_undo() -> None:
    with pytest.raises(JoinError, match="stage 'compress'"):
        parse("quantise + topk")
    with pytest.raises(JoinError, match="pfedhn"):
        built("pfedhn + quantise")
