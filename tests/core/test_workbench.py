"""The model that all clients of a process share: its device, memory, optimizers and batch-norm statistics."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest
import torch
from torch import nn

from helpers import tiny_runs
from polyfed.backends.fused import step_bytes
from polyfed.core.client import Client, begin_training
from polyfed.core.entries import Average, estimate_statistics
from polyfed.core.evaluation import inputs_of
from polyfed.core.seeds import default_stream, derive
from polyfed.core.workbench import (
    ClientState,
    Workbench,
    chosen_device,
    give_back_much,
    lay_channels_last,
    moved,
    precision,
    present_devices,
    sent_to,
)
from polyfed.errors import SettingError
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation

trained = functools.partial(tiny_runs.trained, rounds=3)


def test_the_workbench_never_trains_on_what_the_last_client_left() -> None:
    experiment = trained("fedbn", rounds=1)
    bench: Workbench = experiment.bench
    client = Client(tiny_federation().clients[2], bench, experiment.backend.client_states["small"], 2)
    client.receive(experiment.server.outgoing("small"))
    assert torch.equal(bench.live["stem.1.running_mean"], experiment.backend.client_states["small"].entries["stem.1.running_mean"])
    newcomer = Client(tiny_federation().clients[2], bench, ClientState(), 2)
    newcomer.receive(experiment.server.outgoing("small"))
    assert torch.equal(bench.live["stem.1.running_mean"], torch.zeros(8))


META = torch.device("meta")


def experiment(method: str = "fedavg", **settings: object) -> Experiment:
    torch.manual_seed(3)
    values = {"rounds": 2, "batch_size": 4, "momentum": 0.9} | settings
    return Experiment(Settings(method=method, **values), tiny_federation(), model=TinyNet())  # type: ignore[arg-type]


def at_work_on_meta(method: str) -> tuple[Experiment, Client]:
    """A run on the meta device, and a client that has begun its first round."""
    made = experiment(method, device="meta")
    data = made.federation.clients[0]
    made.server.start_round(1, 0)
    client = Client(data, made.bench, ClientState(), 1)
    begin_training(client, made.server.training_payload(data.id))
    return made, client


@pytest.mark.parametrize(
    "method", ["fedavg", "fedbn", "fedprox(mu=0.1)", "fedavg + agc(clip=0.1)", "fedwon", "fedstein", "fixbn", "gperxan"]
)
def test_a_step_runs_on_the_device_and_reads_no_number(method: str) -> None:
    """On the meta device a tensor has no values: whatever asks for one (item, float, a branch on it) fails."""
    made, client = at_work_on_meta(method)
    for index, (x, y) in enumerate(client.batches()):
        assert x.device == y.device == META
        assert client.train_on(index, x, y).device == META
    assert all(p.device == META and (p.grad is None or p.grad.device == META) for p in made.bench.parameters.values())


@pytest.mark.parametrize(
    "method", ["fedavg + quantise(bits=4)", "fedavg + quantise(bits=8, stochastic=False)", "fedavg + topk(share=0.1)"]
)
def test_uploads_are_made_on_the_device(method: str) -> None:
    made, client = at_work_on_meta(method)
    entries = {name: made.bench.live[name].detach().clone() for name in client.phase.up if name in made.bench.live}
    for change in made.method.uploads:
        entries = change(client, entries)
    assert {value.device for value in entries.values()} == {META}
    assert any(value.dtype == torch.uint8 for value in entries.values())


def test_batches_for_a_newcomer_and_for_measuring_a_step_are_sent_to_the_device() -> None:
    made = experiment(device="meta")
    assert {x.device for x in inputs_of(made.bench, made.federation.unseen["new"])()} == {META}
    assert step_bytes(made.bench, made.federation.clients[0]) > 0


def test_the_stream_of_an_apple_gpu_is_seeded_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, object]] = []
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: "before")
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state: told.append(("back", state)))
    monkeypatch.setattr(torch.mps, "manual_seed", lambda seed: told.append(("seed", seed)))
    with default_stream(1, "answer", device=torch.device("mps")):
        assert told == [("seed", derive(1, "answer"))]
    assert told[1:] == [("back", "before")]


def test_the_server_and_what_travels_stay_on_the_cpu() -> None:
    made = experiment("fedbn", device="meta")
    assert all(value.device.type == "cpu" for value in made.server.state.values())
    assert all(value.device == META for value in made.bench.live.values())


def test_bfloat16_trains_near_full_precision_and_keeps_float32_values() -> None:
    runs = {amp: experiment(amp=amp) for amp in ("off", "bfloat16")}
    for made in runs.values():
        made.train()
    full, half = (made.server.state for made in runs.values())
    assert all(half[name].dtype == value.dtype for name, value in full.items())
    floats = [name for name, value in full.items() if value.is_floating_point()]
    changed = [name for name in floats if not torch.equal(full[name], half[name])]
    assert changed
    moved_by = torch.cat([(full[n] - runs["off"].bench.initial[n]).flatten() for n in floats]).norm()
    apart = torch.cat([(full[n] - half[n]).flatten() for n in floats]).norm()
    assert apart < 0.1 * moved_by
    with precision("bfloat16", torch.device("cpu")):
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.bfloat16


def test_scores_in_bfloat16_are_probabilities() -> None:
    rows = experiment(amp="bfloat16").evaluate()
    assert all(0 <= row.numbers["accuracy"] <= 1 for row in rows)


def test_a_device_this_machine_has_not_is_named() -> None:
    assert chosen_device("auto").type == present_devices()[0]
    missing = next(kind for kind in ("mps", "cuda") if kind not in present_devices())
    with pytest.raises(SettingError, match=f"--device {missing}: this machine has"):
        chosen_device(missing)
    with pytest.raises(SettingError, match="device must be"):
        Settings(device="tpu")


def test_trees_move_with_their_shape_and_plain_values() -> None:
    tree = {"a": [torch.ones(2), (1, "x", torch.zeros(3))], "b": None}
    there = moved(tree, META)
    assert there["a"][0].device == META and there["a"][1][2].device == META
    assert there["a"][1][:2] == (1, "x") and there["b"] is None
    assert moved(tree, torch.device("cpu"))["a"][0] is tree["a"][0]
    assert sent_to(torch.ones(2), META).device == META


@pytest.mark.parametrize("method", ["fedavg + guiding", "gperxan", "copa", "fedavg + mixstyle(p=1.0)"])
def test_parts_with_losses_and_layers_of_their_own_train_in_bfloat16(method: str) -> None:
    made = experiment(method, amp="bfloat16", rounds=3)
    made.train()
    assert all(value.isfinite().all() for value in made.server.state.values())


def test_channels_last_reaches_the_convolutions_and_changes_rounding_only() -> None:
    runs = {layout: experiment("fedbn", layout=layout) for layout in ("channels_first", "channels_last")}
    seen: dict[str, set[tuple[bool, bool]]] = {layout: set() for layout in runs}
    for layout, made in runs.items():
        convolution = next(module for module in made.bench.model.modules() if isinstance(module, torch.nn.Conv2d))

        def note(module: torch.nn.Conv2d, inputs: tuple[torch.Tensor], found: set[tuple[bool, bool]] = seen[layout]) -> None:
            found.add((inputs[0].is_contiguous(memory_format=torch.channels_last), module.weight.is_contiguous()))

        convolution.register_forward_pre_hook(note)
        made.train()
        made.evaluate()
    assert seen["channels_last"] == {(True, True)} and seen["channels_first"] == {(False, True)}
    usual, other = (made.server.state for made in runs.values())
    assert all(torch.allclose(usual[name], other[name], rtol=1e-4, atol=1e-5) for name in usual)


def test_inputs_that_are_no_images_keep_their_layout() -> None:
    words, images = torch.zeros(2, 3), torch.zeros(2, 3, 4, 4)
    same, laid = lay_channels_last(TinyNet(), (words, images))
    assert same is words and laid.is_contiguous(memory_format=torch.channels_last)


PROGRAM = """
import torch
from polyfed.core.workbench import give_back_much
from polyfed.runs.malloc import keep_freed_pages

def megabytes():
    return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) // 1024

keep_freed_pages()
small = [torch.ones(60 * 2**18)]
del small
little = give_back_much()
blocks = []
for number in range(8):
    blocks.append((torch.ones(60 * 2**18), torch.ones(100_000)))
full = megabytes()
kept = [small for _, small in blocks]  # they lie between the large ones, so the heap cannot shrink at its end
del blocks
before, much, after = megabytes(), give_back_much(), megabytes()
print(little, much, full - before, full - after)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_much_goes_back_and_little_stays() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    little, much, freed_before, freed_after = done.stdout.split()
    assert (little, much) == ("False", "True"), "60 MB are kept, 480 MB are not"
    assert int(freed_before) < 100 and int(freed_after) > 400, done.stdout


def test_other_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.core.workbench._library", lambda: None)
    assert not give_back_much()


@pytest.mark.parametrize("average", ["moving", "batches", "samples"])
def test_statistics_follow_the_batches(average: Average) -> None:
    stream = torch.Generator().manual_seed(0)
    norm, dropout = nn.BatchNorm1d(2, momentum=0.25), nn.Dropout(0.5)
    model = nn.Sequential(dropout, norm)
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.fill_(3.0)
    batches = [torch.randn(size, 2, generator=stream) for size in (4, 8)]
    means, variances = [b.mean(0) for b in batches], [b.var(0) for b in batches]
    shares = {"moving": (0.75 * 0.25, 0.25), "batches": (1 / 2, 1 / 2), "samples": (1 / 3, 2 / 3)}[average]
    rest = 1 - sum(shares)
    estimate_statistics(model, batches, average)
    torch.testing.assert_close(norm.running_mean, rest * 3.0 + shares[0] * means[0] + shares[1] * means[1])
    torch.testing.assert_close(norm.running_var, rest * torch.ones(2) + shares[0] * variances[0] + shares[1] * variances[1])
    assert norm.momentum == 0.25 and not model.training and not norm.training
