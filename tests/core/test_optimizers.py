"""The optimizers of clients are torch's to the bit, and using them does not import torch's compiler."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.workbench import make_optimizer
from polyfed.settings import Settings

LR = 0.05
CASES: list[tuple[dict[str, Any], type[torch.optim.Optimizer], dict[str, float]]] = [
    ({"optimizer": "sgd"}, torch.optim.SGD, {}),
    ({"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1}, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    ({"optimizer": "adam", "weight_decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1}),
    ({"optimizer": "adamw", "weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The model's values and the optimizer's buffers after some steps."""
    stream = torch.Generator().manual_seed(1)
    for _ in range(5):
        optimizer.zero_grad(set_to_none=True)
        model(torch.randn(3, 4, generator=stream)).square().mean().backward()
        optimizer.step()
    buffers = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [*(value.detach() for value in model.parameters()), *buffers]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


@pytest.mark.parametrize(("settings", "kind", "options"), CASES)
def test_the_numbers_are_those_of_torch(
    settings: dict[str, Any], kind: type[torch.optim.Optimizer], options: dict[str, float]
) -> None:
    ours, theirs = model(), model()
    made = make_optimizer(Settings(**settings), ours.parameters(), LR)
    assert isinstance(made, kind)
    found = trained(ours, made)
    wanted = trained(theirs, kind(theirs.parameters(), lr=LR, **options))  # type: ignore[arg-type, call-arg]
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    assert not any(torch.equal(a, b) for a, b in zip(found, (value.detach() for value in model().parameters()), strict=False))


PROGRAM = """
import sys, torch
from polyfed.core.data_types import ArrayExamples, ClientData, Federation
from polyfed.runs.experiment import Experiment
from polyfed.core.workbench import make_optimizer
from polyfed.settings import Settings

held = ArrayExamples(torch.zeros(8, 3, 16, 16, dtype=torch.uint8), torch.arange(8) % 2)
federation = Federation("tiny", ("0", "1"), tuple(ClientData(name, ("d",), held, {"d": held}) for name in "ab"))
for values in ({"optimizer": "sgd"}, {"optimizer": "adam"}, {"backend": "fused"}):
    Experiment(Settings(rounds=1, batch_size=4, **values), federation, "fedavg", "small_cnn(width=8)").train()
    print("torch._dynamo" in sys.modules)
"""


def test_a_round_does_not_import_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False"] * 3
