"""Replies that are malformed or not finite are dropped, and too few good ones repeat the round."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.recorded_runs import experiment_of, go_on
from polyfed.backends.base import StagingBackend
from polyfed.core.client import Client
from polyfed.core.entries import entries_of, optimizer_entries
from polyfed.core.method import Facts, Method
from polyfed.core.replies import problem_with
from polyfed.core.rounds import Payload, Reply, Request, SendRequest
from polyfed.errors import TooFewReplies
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import train_run
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation

STATE, ENTRIES = TinyNet().state_dict(), entries_of(TinyNet())
NAMES = list(ENTRIES)


def good_reply() -> dict[str, Tensor]:
    return {name: value.clone() for name, value in STATE.items()}


@settings(max_examples=600)
@given(data=st.data())
def test_malformed_replies_are_never_accepted(data: st.DataObject) -> None:
    entries: dict[str, Any] = good_reply()
    assert problem_with(entries, NAMES, ENTRIES) == ""
    name = data.draw(st.sampled_from(NAMES))
    value = entries[name]
    kind = data.draw(st.sampled_from(["missing", "extra", "shape", "dtype", "nan", "inf", "type", "empty", "all"]))
    if kind in ("nan", "inf") and not value.is_floating_point():
        name, value = "head.weight", entries["head.weight"]
    if kind == "missing":
        del entries[name]
    elif kind == "extra":
        entries[data.draw(st.text(max_size=8)) + "!"] = value
    elif kind == "shape":
        entries[name] = torch.zeros(*value.shape, 2, dtype=value.dtype)
    elif kind == "dtype":
        entries[name] = value.to(torch.float64 if value.dtype != torch.float64 else torch.float32)
    elif kind in ("nan", "inf"):
        flat = value.clone().reshape(-1)
        flat[data.draw(st.integers(0, flat.numel() - 1))] = float(kind) * data.draw(st.sampled_from([1, -1]))
        entries[name] = flat.reshape(value.shape)
    elif kind == "type":
        entries[name] = data.draw(st.sampled_from([None, 3, "x", [1.0]]))
    elif kind == "empty":
        entries[name] = torch.zeros(0, dtype=value.dtype)
    else:
        entries = {}
    assert problem_with(entries, NAMES, ENTRIES) != ""


@pytest.mark.parametrize(("value", "why"), [(1e14, ""), (3e38, "has values from 3e+38 to 3e+38, expected -1e+15 to 1e+15")])
def test_values_are_finite_and_so_are_their_squares(value: float, why: str) -> None:
    entries = good_reply() | {"head.weight": torch.full((3, 8), value)}
    assert problem_with(entries, NAMES, ENTRIES) == (f"'head.weight' {why}" if why else "")


def test_a_variance_is_not_negative() -> None:
    entries = good_reply() | {"stem.1.running_var": torch.full((8,), -1e-3)}
    assert "'stem.1.running_var' has values from -0.001 to -0.001, expected 0" in problem_with(entries, NAMES, ENTRIES)


@pytest.mark.parametrize(("buffer", "bad"), [("exp_avg_sq", -1.0), ("step", 0.0)])
def test_what_adam_takes_the_root_of_is_not_negative(buffer: str, bad: float) -> None:
    known = optimizer_entries({"head.bias": ENTRIES["head.bias"]}, ("exp_avg_sq", "step"))
    name = f"optimizer/{buffer}/head.bias"
    assert "expected" in problem_with({name: torch.full(known[name].shape, bad)}, [name], known)
    assert problem_with({name: torch.full(known[name].shape, 1.0)}, [name], known) == ""


def spoiled(experiment: Experiment, clients: set[str], rounds: set[int]) -> None:
    """Make some replies bad on their way."""
    carried = experiment.backend

    class Spoiling(type(carried)):  # type: ignore[misc]
        def __call__(self, ask: Any) -> Any:
            for reply in super().__call__(ask):
                if reply.client in clients and ask.round in rounds and ask.what == "train":
                    bad = {n: v * float("nan") if v.is_floating_point() else v for n, v in reply.entries.items()}
                    yield Reply(reply.client, Payload(bad, reply.extras), reply.samples)
                else:
                    yield reply

    carried.__class__ = Spoiling


def test_a_bad_reply_is_dropped_with_who_and_why_and_its_client_keeps_its_old_state(caplog: pytest.LogCaptureFixture) -> None:
    experiment = experiment_of("fedbn", rounds=2)
    spoiled(experiment, {"small"}, {2})
    seen: list[Tensor] = []
    with caplog.at_level("WARNING", logger="polyfed"):
        experiment.train(
            [
                lambda server: (
                    seen.append(experiment.backend.client_states["small"].entries["stem.1.running_mean"]) if server.round else None
                )
            ]
        )
    assert "client small" in caplog.text and "not finite" in caplog.text
    assert torch.equal(seen[0], seen[1])
    assert all(bool(torch.isfinite(v).all()) for v in experiment.server.state.values())


def test_too_few_good_replies_repeat_the_round_then_stop_with_everything_kept(tmp_path: Path) -> None:
    experiment = experiment_of("fedbn", rounds=3, retries=2)
    spoiled(experiment, {"small", "middle"}, {2})
    with pytest.raises(TooFewReplies, match="Gave up after 3 attempts"):
        train_run(experiment, RunFolder(tmp_path / "run"))
    whole = train_run(experiment_of("fedbn", rounds=3, retries=2), RunFolder(tmp_path / "whole"))
    assert go_on(tmp_path / "run").digest == whole.digest


BAD = "small"
Bend = Callable[[Payload], Payload]


def not_a_number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.full_like(value, torch.nan) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: not_a_number(one) for name, one in value.items()}
    return float("nan") if isinstance(value, float) else value


def bent_extras(payload: Payload) -> Payload:
    return replace(payload, extras=not_a_number(payload.extras))


def bent_entries(payload: Payload) -> Payload:
    return replace(payload, entries=not_a_number(payload.entries))


def without_extras(payload: Payload) -> Payload:
    return replace(payload, extras={})


def of_another_shape(payload: Payload) -> Payload:
    return replace(payload, extras={n: v[:1] if isinstance(v, Tensor) else v for n, v in payload.extras.items()})


def of_another_layer(payload: Payload) -> Payload:
    return replace(payload, extras={**payload.extras, "layer": "head"})


def with_extra(name: str, value: Any) -> Bend:
    """Puts a value in the place of an extra."""

    def bend(payload: Payload) -> Payload:
        assert name in payload.extras
        return replace(payload, extras={**payload.extras, name: value})

    return bend


def with_change(value: Callable[[Tensor], Any]) -> Bend:
    """Bends the first change of a control variate."""

    def bend(payload: Payload) -> Payload:
        change = payload.extras["scaffold_change"]
        first = next(iter(change))
        return replace(payload, extras={"scaffold_change": {**change, first: value(change[first])}})

    return bend


def with_counter(value: int) -> Bend:
    """Bends all counters of batch norm."""

    def bend(payload: Payload) -> Payload:
        bent = {n: torch.full_like(v, value) if n.endswith("num_batches_tracked") else v for n, v in payload.entries.items()}
        return replace(payload, entries=bent)

    return bend


def with_weight(value: Callable[[Tensor], Any]) -> Bend:
    """Bends the weight of the head."""
    return lambda payload: replace(payload, entries={**payload.entries, "head.weight": value(payload.entries["head.weight"])})


def nested_deep() -> Any:
    tree: Any = 1.0
    for _ in range(100_000):
        tree = [tree]
    return tree


def trained(monkeypatch: pytest.MonkeyPatch, method: str, question: str, bend: Bend, number: int | None = None) -> Experiment:
    """A run in which one client's answers to one question are bent, in all rounds or in one."""
    send_request = StagingBackend.__call__

    def bending(self: StagingBackend, request: Request) -> Iterator[Reply]:
        for reply in send_request(self, request):
            bad = reply.client == BAD and request.what == question and number in (None, request.round)
            yield replace(reply, payload=bend(reply.payload)) if bad else reply

    monkeypatch.setattr(StagingBackend, "__call__", bending)
    torch.manual_seed(3)
    experiment = Experiment(Settings(method=method, rounds=2, batch_size=4), tiny_federation(), model=TinyNet())
    experiment.train()
    experiment.evaluate()
    return experiment


@pytest.mark.parametrize(
    ("method", "question", "bend", "why"),
    [
        ("fedtan", "fedtan_step", bent_extras, "not finite"),
        ("fedtan", "fedtan_step", without_extras, "'layer' is missing"),
        ("fedtan", "fedtan_step", of_another_shape, "has the shape (1,)"),
        ("fedtan", "fedtan_step", of_another_layer, "is 'head', expected one of"),
        ("static_bn", "static_bn_statistics", bent_entries, "not finite"),
        ("ccst", "ccst_collect", bent_extras, "not finite"),
        ("elcfs", "elcfs_collect", without_extras, "'given' is missing"),
        ("scaffold", "train", bent_extras, "not finite"),
        ("feddg_ga", "train", without_extras, "is missing"),
        ("feddg_ga", "train", bent_entries, "not finite"),
        ("fednova", "train", with_extra("fednova_steps", "4"), "is str, expected a number"),
        ("fednova", "train", with_extra("fednova_steps", None), "is NoneType, expected a number"),
        ("fednova", "train", with_extra("fednova_steps", [4.0]), "is list, expected a number"),
        ("fednova", "train", with_extra("fednova_steps", -1e30), "is -1e+30, expected a number between"),
        ("fednova", "train", with_extra("fednova_steps", 10**400), "an integer of 1329 bits"),
        ("fednova", "train", with_extra("fednova_steps", True), "is bool, expected a number"),
        ("scaffold", "train", without_extras, "'scaffold_change' is missing"),
        ("scaffold", "train", with_extra("scaffold_change", "none"), "is str, expected a mapping"),
        ("scaffold", "train", with_extra("scaffold_change", {"head.weight": 1.0}), "is missing"),
        ("scaffold", "train", with_change(lambda value: value[:1]), "has the shape"),
        ("scaffold", "train", with_change(lambda value: 10**400), "is int, expected a tensor"),
        ("scaffold", "train", with_change(lambda value: value.double()), "has the type torch.float64"),
        ("feddg_ga", "train", with_extra("feddg_ga_own", "0.5"), "is str, expected a number"),
        ("feddg_ga", "train", with_extra("feddg_ga_own", torch.ones(3)), "is Tensor, expected a number"),
        ("feddg_ga", "train", with_extra("feddg_ga_averaged", nested_deep()), "is list, expected a number"),
        (
            "fedtan",
            "fedtan_step",
            lambda payload: replace(payload, extras={**payload.extras, "more": "!"}),
            "'more' is not declared",
        ),
        ("fedtan", "fedtan_step", with_extra("layer", ["stem.1"]), "is list, expected text"),
        ("ccst", "ccst_collect", with_extra("given", "anything"), "is str, expected a tensor"),
        ("ccst", "ccst_collect", with_extra("given", torch.ones(1, 2, 4)), "has the shape (1, 2, 4), expected (1, 2, 3)"),
        ("ccst", "ccst_collect", with_extra("given", -torch.ones(1, 2, 3)), "standard deviations below 0"),
        ("elcfs", "elcfs_collect", with_extra("given", torch.full((1, 3, 8, 8), 1e30)), "has values from 1e+30"),
        ("elcfs", "elcfs_collect", with_extra("given", {"spectrum": 1}), "is dict, expected a tensor"),
        ("fedavg", "train", lambda payload: replace(payload, extras={"note": "hello"}), "'note' is not declared"),
        ("fedavg", "train", with_counter(2**62), "counts 4611686018427387904 batches, expected 0 to"),
        ("fedavg", "train", with_counter(-1), "counts -1 batches"),
        ("fedavg", "train", with_weight(lambda value: value.to_sparse()), "is a sparse_coo tensor"),
        ("fedavg", "train", with_weight(lambda value: value.to("meta")), "is on the device meta"),
        ("fedavg", "train", with_weight(lambda value: value.to_mkldnn()), "is a _mkldnn tensor"),
        ("fedavg", "train", with_weight(lambda value: value.tolist()), "is list, expected a tensor"),
        ("fedavg", "train", with_weight(lambda value: value.half()), "has the type torch.float16"),
        ("fedavg", "train", with_weight(lambda value: value.clone().requires_grad_()), "requires_grad"),
        ("fedavg", "train", with_weight(lambda value: torch.full_like(value, 1e30)), "has values from 1e+30"),
        ("fedyogi", "train", with_weight(lambda value: torch.full_like(value, -3e38)), "has values from -3e+38"),
        ("quantise", "train", with_weight(lambda value: value.to("meta")), "is on the device meta"),
        ("topk", "train", with_weight(lambda value: value.float().to_sparse()), "is a sparse_coo tensor"),
        ("static_bn", "static_bn_statistics", with_counter(0), "statistics are of zero batches"),
        ("fedbn", "evaluate", with_extra("scores", {"big": {"accuracy": 1.0, "count": 6, "right": 6}}), "'big' is not declared"),
        ("fedbn", "evaluate", with_extra("scores", {BAD: {"accuracy": "1", "count": 6, "right": 6}}), "is str, expected a number"),
        ("fedbn", "evaluate", without_extras, "'scores' is missing"),
        ("fedbn", "entries", with_extra("untrained", "no"), "is str, expected True or False"),
        ("fedbn", "entries", bent_entries, "not finite"),
    ],
)
def test_a_bad_reply_is_dropped_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str, question: str, bend: Bend, why: str
) -> None:
    with caplog.at_level(logging.WARNING, "polyfed"):
        experiment = trained(monkeypatch, method, question, bend)
    dropped = [record.getMessage() for record in caplog.records if "dropped the reply" in record.getMessage()]
    assert dropped and all(f"dropped the reply of client {BAD}:" in message and why in message for message in dropped)
    assert all(bool(torch.isfinite(value).all()) for value in experiment.server.state.values())
    assert all(int(v) < 100 for n, v in experiment.server.state.items() if n.endswith("num_batches_tracked"))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_nested_tensor_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    trained(monkeypatch, "fedavg", "train", with_weight(lambda value: torch.nested.nested_tensor([value, value])))
    assert "is a nested tensor, expected a dense one" in caplog.text


def test_scores_that_are_text_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = trained(monkeypatch, "feddg_ga", "train", with_extra("feddg_ga_own", "0.5"), number=1).server.memory["feddg_ga"]
    assert all(isinstance(value, float) for value in memory["own"].values()) and set(memory["own"]) == {"big", "middle", BAD}


def test_what_is_refused_is_not_counted_nor_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = trained(monkeypatch, "ccst", "ccst_collect", with_extra("given", torch.ones(1000, 2, 3)))
    assert bad.costs.once == 2 * 2 * 3 * 4, "two styles of 2 x 3 numbers of 4 bytes"
    assert all(len(given) == 1 for client in ("big", "middle") for given in bad.backend.state_of(client).memory["ccst"])


@pytest.mark.parametrize(
    "change", [{"samples": -3}, {"samples": 10**30}, {"samples": True}, {"client": "big"}, {"client": "nobody"}]
)
def test_samples_and_clients_are_those_that_were_asked(change: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    experiment = Experiment(Settings(rounds=1, batch_size=4), tiny_federation(), model=TinyNet())

    def lying(send_request: SendRequest) -> SendRequest:
        return lambda ask: (replace(reply, **change) if reply.client == BAD else reply for reply in send_request(ask))

    experiment.train(through=lying)
    who = change.get("client", BAD)
    assert f"dropped the reply of client {who}" in caplog.text.replace("'", "")
    assert "big" not in experiment.server.rejected, "its own reply was good"


def test_a_batch_norm_that_is_used_twice_may_count_twice() -> None:
    class Twice(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for _ in range(5):
                x = self.branch(x)
            return self.head(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]

    experiment = Experiment(Settings(rounds=3, batch_size=4), tiny_federation(), model=Twice())
    experiment.train()
    assert not experiment.server.rejected
    assert int(experiment.server.state["branch.1.num_batches_tracked"]) == 3 * 3 * 5


def test_who_gave_nothing_usable_still_gets_what_the_others_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = trained(monkeypatch, "ccst", "ccst_collect", bent_extras).backend.client_states
    assert {client: len(kept[client].memory["ccst"]) for client in ("big", "middle", BAD)} == {"big": 1, "middle": 1, BAD: 2}


def test_scores_of_a_rejected_reply_do_not_move_the_weights_of_feddg_ga(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = trained(monkeypatch, "feddg_ga", "train", bent_entries, number=1).server.memory["feddg_ga"]
    assert memory["round"] == {"big": 2, "middle": 2, BAD: 2}, "it counts again in round 2"
    assert memory["weights"][BAD] == pytest.approx(1 / 3), "it has no gap: it did not take part in round 1"


def forget_in_round_two(client: Client) -> None:
    if client.round == 1:
        client.memory["note"] = client.id
    else:
        client.memory.clear()


def test_a_client_can_forget_everything() -> None:
    method = Method("forgets", before_training=(forget_in_round_two,), facts=Facts(client_state=True))
    experiment = Experiment(Settings(rounds=2, batch_size=4), tiny_federation(), method, TinyNet())
    experiment.train()
    assert all(not experiment.backend.state_of(client).memory for client in ("big", "middle", BAD))


def test_how_many_must_answer() -> None:
    for share, asked, needed in [(0.07, 100, 7), (0.56, 25, 14), (0.5, 3, 2), (0.0, 10, 1), (1.0, 10, 10)]:
        assert Settings(min_share=share).needed(asked) == needed
