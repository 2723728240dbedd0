"""User-supplied models: lazy layers use the seed of the run, and models that cannot be trained are rejected before round 1."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helpers.command_line import Command, says
from polyfed import open_run, run
from polyfed.errors import ModelError
from polyfed.runs.assemble import build_model
from polyfed.testing import TinyNet, tiny_federation
from polyfed.trust import NOTHING

SMALL = {"rounds": 1, "batch_size": 8}
CLASSES = len(tiny_federation().classes)


def lazy_net() -> nn.Module:
    return nn.Sequential(
        nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LazyLinear(CLASSES)
    )


def mixed_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(CLASSES))


# ------------------------------------------------------------------------------------------------ lazy layers
@pytest.mark.parametrize(
    ("build", "method"),
    [(lazy_net, "fedavg"), (lazy_net, "fedbn"), (lazy_net, "fedavg + group_norm"), (mixed_net, "fedavg"), (mixed_net, "fedsr")],
)
def test_lazy_layers_are_made_under_the_seed_of_the_run(build: Callable[[], nn.Module], method: str) -> None:
    digests = []
    for noise in range(2):
        torch.manual_seed(noise)
        digests.append(run(tiny_federation(), method, build, **SMALL).digest)
    assert digests[0] == digests[1]
    assert run(tiny_federation(), method, build, seed=1, **SMALL).digest != digests[0]


def test_a_lazy_module_that_is_given_is_made_under_the_seed_and_stays_lazy_itself() -> None:
    given = nn.Sequential(nn.Flatten(), nn.LazyLinear(CLASSES))
    digests = []
    for noise in range(2):
        torch.manual_seed(noise)
        digests.append(run(tiny_federation(), "fedavg", given, **SMALL).digest)
    assert digests[0] == digests[1]
    assert given[1].has_uninitialized_params()


def test_looking_for_shapes_does_not_move_the_statistics_of_a_lazy_norm() -> None:
    built = build_model(lazy_net, tiny_federation(), 0, NOTHING)
    assert torch.equal(built[1].running_mean, torch.zeros(4)) and int(built[1].num_batches_tracked) == 0
    assert built.training


def test_a_run_of_a_lazy_model_is_opened_again(tmp_path: Path) -> None:
    trained = run(tiny_federation(), "fedbn", lazy_net, out=tmp_path / "run", **SMALL)
    assert open_run(tmp_path / "run", model=lazy_net).digest == trained.digest


def test_a_lazy_layer_that_is_never_used_is_refused() -> None:
    class Unused(TinyNet):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.LazyLinear(3)

    with pytest.raises(ModelError, match="does not use its lazy layer spare"):
        run(tiny_federation(), "fedavg", Unused, **SMALL)


# ------------------------------------------------------------------------------------------------ what cannot be trained
class Complex(TinyNet):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


class ComplexBuffer(TinyNet):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))


class Sparse(TinyNet):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("links", torch.eye(2).to_sparse())


class Empty(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :CLASSES]


class ComplexLogits(TinyNet):
    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(super().forward(x), super().forward(x))


class Quits(TinyNet):
    def forward(self, x: Tensor) -> Tensor:
        raise SystemExit


def frozen() -> nn.Module:
    return TinyNet().requires_grad_(False)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Complex, "phase is complex"),
        (ComplexBuffer, "phase is complex"),
        (Sparse, "links is stored as torch.sparse_coo"),
        (Empty, "has no parameters"),
        (frozen, "all .* are frozen"),
        (ComplexLogits, "returns torch.complex64"),
        (Quits, "does not accept inputs .*SystemExit"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_before_round_1(
    build: Callable[[], nn.Module], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=words):
        run(tiny_federation(), "fedavg", build, out=tmp_path / "run", **SMALL)
    assert not (tmp_path / "run").exists()


def test_an_empty_module_is_not_taken_for_no_module() -> None:
    with pytest.raises(ModelError, match="Sequential"):
        run(tiny_federation(), "fedavg", nn.Sequential(), **SMALL)


# ------------------------------------------------------------------------------------------------ functions that fail
BUILDERS = """
import sys

def wrong_type(classes):
    return len(classes)

def quits(classes):
    sys.exit(0)

def needs_more(classes, depth):
    return None

def breaks():
    raise KeyError("weights")
"""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("wrong_type", "it raised TypeError"),
        ("quits", "it raised SystemExit"),
        ("needs_more", "depth"),
        ("breaks", "it raised KeyError"),
    ],
)
def test_a_function_that_fails_to_build_a_model_gets_one_sentence(
    polyfed: Command, tmp_path: Path, function: str, words: str
) -> None:
    (tmp_path / "edgy_builders.py").write_text(BUILDERS)
    says(
        polyfed("run", "digits-mini(per_domain=20)", "--model", f"edgy_builders:{function}", "-q"), "could not build a model", words
    )


@pytest.mark.parametrize("text", ["import sys; sys.exit(0)", "1 / 0", "def f(:", "raise TypeError"])
def test_a_module_that_fails_when_it_is_imported_gets_one_sentence(polyfed: Command, tmp_path: Path, text: str) -> None:
    name = f"edgy_module_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    says(polyfed("run", "digits-mini(per_domain=20)", "--model", f"{name}:f", "-q"), f"Cannot import the model {name}:f")
    says(polyfed("run", "digits-mini(per_domain=20)", "--load", f"{name}.py", "-q"), "failed to run")
