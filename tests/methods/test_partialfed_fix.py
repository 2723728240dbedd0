"""PartialFed with a fixed strategy: what is skipped goes up and stays."""

from __future__ import annotations

import pytest
import torch

from helpers.tiny_runs import (
    built,
    digest_of,
    trained,
)
from helpers.watching import watched
from polyfed.core.method import parse
from polyfed.errors import OptionError, SharingError
from polyfed.runs.result import Result
from polyfed.testing import TinyNet


def test_what_is_skipped_goes_up_and_never_comes_back() -> None:
    experiment = built("partialfed_fix")
    seen = watched(experiment)
    everything = set(TinyNet().state_dict())
    own = {name for name in everything if name.startswith(("stem.1.", "branch.1.", "head."))}
    assert len(own) == 12
    assert seen[1, "train"] == seen[2, "train"] == (everything - own, everything)
    kept = {client: k.entries for client, k in experiment.backend.client_states.items()}
    assert all(set(entries) == own for entries in kept.values())
    sizes = {"big": 13, "middle": 8, "small": 5}
    for name in ("head.weight", "stem.1.running_mean"):
        mean = sum(sizes[client] / 26 * kept[client][name] for client in sizes)
        torch.testing.assert_close(experiment.server.state[name], mean, rtol=1e-5, atol=1e-6)
    model = Result(experiment, []).model_for("small").state_dict()
    assert all(torch.equal(model[n], kept["small"][n] if n in own else experiment.server.state[n]) for n in everything)


def test_partialfed_fix_identities_and_options() -> None:
    assert digest_of("partialfed_fix(skip=())") == digest_of("fedavg")
    local = trained('partialfed_fix(skip=("batch_norm",))')
    fedbn = trained("fedbn")
    assert all(torch.equal(fedbn.server.state[n], local.server.state[n]) for n in ("stem.0.weight", "head.weight"))
    by_pattern = watched(built('partialfed_fix(skip=("branch.*", "head")) + agc'))[2, "train"][0]
    assert by_pattern == {name for name in TinyNet().state_dict() if name.startswith("stem.")}
    for text, why in {"('bn',)": "skip cannot name 'bn'", "'head'": "takes a list"}.items():
        with pytest.raises(OptionError, match=why):
            parse(f"partialfed_fix(skip={text})")
    with pytest.raises(SharingError, match="no batch norm"):
        built("partialfed_fix + group_norm(groups=2)")
