"""The Grid backend without Flower's processes: same digests as in process, faults that cost one client only, state that lasts."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from flwr.app import ConfigRecord, Error, Message, RecordDict

from helpers.flower_fakes import TINY, TINY_MODEL, FakeGrid, Meddler, described, over, tiny_data, virtual_nodes
from helpers.flower_runs import METHODS, settings_for
from polyfed.core.rounds import Payload, Request
from polyfed.core.server import ClientInfo
from polyfed.data.federation_summary import FederationSummary
from polyfed.errors import DataError, SettingError, TooFewReplies
from polyfed.flower.node.node import when_lost
from polyfed.flower.server.backend import loss_in
from polyfed.flower.server.federation import federation_of
from polyfed.flower.server_app import run_on_grid
from polyfed.flower.wire.codec import Encoder, payload_of
from polyfed.flower.wire.message import BadMessage, WireMessage
from polyfed.flower.wire.records import records_of, wire_message_of
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import resume, train_run
from polyfed.runs.result import Result
from polyfed.settings import Settings

SMALL = Settings(data=TINY, model=TINY_MODEL, rounds=2, batch_size=4, local_steps=3, checkpoint_every="1").trusted()


@pytest.fixture(autouse=True)
def tiny() -> Iterator[None]:
    with tiny_data():
        yield


def clients_of(settings: Settings) -> int:
    return len(Experiment(settings).federation.clients)


def grid_for(settings: Settings, home: Path, meddle: Meddler = lambda context, answered: answered) -> FakeGrid:
    return FakeGrid(settings, home, virtual_nodes(clients_of(settings)), meddle)


def in_process(settings: Settings) -> Result:
    return train_run(Experiment(settings), None)


def of(grid: FakeGrid, client: str) -> int:
    """The node of a client."""
    order = Experiment(grid.settings).backend.place
    return next(node for node, config in grid.configs.items() if config["partition-id"] == order[client])


@pytest.mark.parametrize("method", METHODS)
def test_over_the_grid_all_weights_are_those_of_the_run_in_process(method: str, tmp_path: Path) -> None:
    if "dp_" in method:
        pytest.importorskip("opacus", reason="needs the privacy extra")
    settings = settings_for(method, SMALL)
    expected = in_process(settings)
    found = train_run(over(grid_for(settings, tmp_path), settings), None)
    assert found.digest == expected.digest
    assert found.rows == expected.rows
    assert found.experiment.costs.bytes == expected.experiment.costs.bytes


def test_a_budget_in_epochs_and_class_weights_come_from_all_nodes_together(tmp_path: Path) -> None:
    settings = dataclasses.replace(
        SMALL, total_epochs=2.0, local_steps=None, loss="weighted_focal", partition="dirichlet(clients=3, alpha=0.5)"
    )
    assert train_run(over(grid_for(settings, tmp_path), settings), None).digest == in_process(settings).digest


def test_nodes_with_data_of_their_own_find_their_part(tmp_path: Path) -> None:
    domains = [client.id for client in Experiment(SMALL).federation.clients]
    configs = {number: {"data": TINY, "domain": domain} for number, domain in enumerate(domains, 10)}
    grid = FakeGrid(SMALL, tmp_path, configs)
    elsewhere = dataclasses.replace(SMALL, data="digits-mini")
    assert train_run(over(grid, elsewhere), None).digest == in_process(SMALL).digest


# ------------------------------------------------------------------------------------------------------------- faults
def in_round(asked: Message, number: int) -> bool:
    return asked.metadata.message_type == "train.polyfed" and asked.metadata.group_id == str(number)


def killed_in(round_number: int) -> Callable[[Message, Message], Message | None]:
    """The server dies when the first answer of a round comes in."""

    def meddle(asked: Message, answered: Message) -> Message | None:
        if in_round(asked, round_number):
            raise Killed
        return answered

    return meddle


def changed(answered: Message, name: str, value: Tensor) -> Message:
    """The answer with one of its tensors replaced, or added."""
    wire_message = wire_message_of(answered.content)
    sent = payload_of(wire_message)
    again = Encoder().encode(Payload({**sent.entries, name: value}, sent.extras), wire_message.control)
    answered.content = records_of([again])[0]
    return answered


def not_a_number(asked: Message, answered: Message) -> Message:
    shape = payload_of(wire_message_of(answered.content)).entries["head.weight"].shape
    return changed(answered, "head.weight", torch.full(shape, torch.nan))


def wrong_shape(asked: Message, answered: Message) -> Message:
    return changed(answered, "head.weight", torch.zeros(2, 2))


def extra_entry(asked: Message, answered: Message) -> Message:
    return changed(answered, "surprise", torch.zeros(2))


def huge(asked: Message, answered: Message) -> Message:
    return changed(answered, "surprise", torch.zeros(70 * 1024 * 1024, dtype=torch.uint8))


def torn(asked: Message, answered: Message) -> Message:
    """The first tensor has another shape than its bytes."""
    wire_message = wire_message_of(answered.content)
    whole = b"".join(wire_message.blobs["entries"])
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    first = next(iter(header.values()))
    first["shape"] = [1, *first["shape"], 2]
    text = json.dumps(header).encode()
    blob = [len(text).to_bytes(8, "little"), text, whole[end:]]
    answered.content = records_of([WireMessage(wire_message.control, {**wire_message.blobs, "entries": blob})])[0]
    return answered


def foreign(asked: Message, answered: Message) -> Message:
    return Message(RecordDict({"polyfed": ConfigRecord({"control": "hello"})}), reply_to=asked)


def failed(asked: Message, answered: Message) -> Message:
    return Message(Error(code=2, reason="disk on fire"), reply_to=asked)


def silent(asked: Message, answered: Message) -> None:
    return None


def somebody_else(asked: Message, answered: Message) -> Message:
    answered.metadata.__dict__["_src_node_id"] = 4711
    return answered


FAULTS: dict[str, Callable[[Message, Message], Message | None]] = {
    "not finite": not_a_number,
    "has the shape": wrong_shape,
    "was not requested": extra_entry,
    "bytes large": huge,
    "tensors cannot be read": torn,
    "no JSON": foreign,
    "disk on fire": failed,
    "no answer within": silent,
    "another node": somebody_else,
}


@pytest.mark.parametrize("said", FAULTS)
def test_a_node_at_fault_is_left_out_by_name_and_the_round_goes_on(
    said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = dataclasses.replace(SMALL, method="fedbn")
    victim = Experiment(settings).server.clients[1].id

    def meddle(asked: Message, answered: Message) -> Message | None:
        bad = in_round(asked, 1) and asked.metadata.dst_node_id == of(grid, victim)
        return FAULTS[said](asked, answered) if bad else answered

    grid = grid_for(settings, tmp_path, meddle)
    with caplog.at_level(logging.WARNING, "polyfed"):
        found = train_run(over(grid, settings, timeout=0.2 if said == "no answer within" else 5.0), None)
    assert [message for message in caplog.messages if victim in message and said in message]
    assert found.digest == without(settings, victim).digest


def without(settings: Settings, victim: str) -> Result:
    """The run in process in which this client's first round is lost."""
    experiment = Experiment(settings)
    drops_out = experiment.backend.drops_out
    lost = {victim}

    def drop(request: Request, client: str) -> bool:
        return (request.what == "train" and request.round == 1 and client in lost) or drops_out(request, client)

    experiment.backend.drops_out = drop  # type: ignore[method-assign]
    return train_run(experiment, None)


@pytest.mark.parametrize("on_nan", ["stop", "drop"])
def test_losses_that_are_not_finite_end_a_run_only_if_too_many_nodes_have_them(on_nan: str, tmp_path: Path) -> None:
    settings = dataclasses.replace(SMALL, lr=1e30, local_steps=4, on_nan=on_nan, retries=1)
    with pytest.raises(TooFewReplies, match="Gave up after 2 attempts"):
        train_run(over(grid_for(settings, tmp_path), settings), None)


def test_a_round_without_enough_answers_is_repeated_from_the_same_state(tmp_path: Path) -> None:
    settings = dataclasses.replace(SMALL, method="fedbn", min_share=1.0)
    times = itertools.count()

    def meddle(asked: Message, answered: Message) -> Message | None:
        return None if in_round(asked, 2) and next(times) == 1 else answered

    found = train_run(over(grid_for(settings, tmp_path, meddle), settings, timeout=0.2), None)
    assert found.digest == in_process(settings).digest


def test_a_node_that_comes_back_under_another_number_goes_on_with_its_state(tmp_path: Path) -> None:
    settings = dataclasses.replace(SMALL, method="fedbn", min_share=1.0)
    moved: list[int] = []

    def meddle(asked: Message, answered: Message) -> Message | None:
        if in_round(asked, 2) and not moved:
            old = asked.metadata.dst_node_id
            moved.append(old + 1)
            grid.offline.add(old)
            grid.configs = {**grid.configs, old + 1: grid.configs[old]}
            (tmp_path / str(old)).rename(tmp_path / str(old + 1))
            return None
        return answered

    grid = grid_for(settings, tmp_path, meddle)
    found = train_run(over(grid, settings, timeout=0.2, patience=5.0), None)
    assert moved
    assert found.digest == in_process(settings).digest


def test_a_stranger_is_not_let_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grid = grid_for(SMALL, tmp_path)
    experiment = over(grid, SMALL)
    grid.configs = {**grid.configs, 999: {"data": TINY, "domain": "small", "client": "stranger"}}
    with caplog.at_level(logging.WARNING, "polyfed"):
        found = train_run(experiment, None)
    assert any("Node 999 is not let in" in message for message in caplog.messages)
    assert found.digest == in_process(SMALL).digest


def losing_its_state(settings: Settings, home: Path, config: Mapping[str, str], after: int = 1) -> FakeGrid:
    """A grid whose first node, configured so, loses its files after a round."""

    def meddle(asked: Message, answered: Message) -> Message | None:
        if in_round(asked, after) and asked.metadata.dst_node_id == first:
            for file in (home / str(first)).rglob("*.safetensors"):
                file.unlink()
        return answered

    grid = grid_for(settings, home, meddle)
    first = next(iter(grid.configs))
    grid.configs = {**grid.configs, first: {**grid.configs[first], **config}}
    return grid


def test_a_client_whose_state_is_lost_is_left_out_and_the_version_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = dataclasses.replace(SMALL, method="fedbn")
    with caplog.at_level(logging.WARNING, "polyfed"):
        train_run(over(losing_its_state(settings, tmp_path, {}), settings), None)
    assert any("the server resumes from version" in message and "-r1-a0" in message for message in caplog.messages)
    assert any('lost-state="restart"' in message for message in caplog.messages)


def test_a_node_may_start_again_when_its_state_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = dataclasses.replace(SMALL, method="fedbn", min_share=1.0)
    grid = losing_its_state(settings, tmp_path, {"lost-state": "restart"})
    with caplog.at_level(logging.WARNING, "polyfed"):
        found = train_run(over(grid, settings), None)
    assert sum("has lost what it kept, and starts again" in message for message in caplog.messages) == 1
    assert found.digest != in_process(settings).digest, "its batch norm began once more"
    assert len(list((tmp_path / str(next(iter(grid.configs)))).rglob("*.safetensors"))) >= 1, "and is kept again"


def test_what_was_lost_and_not_trained_since_is_not_scored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = dataclasses.replace(SMALL, method="fedbn")
    grid = losing_its_state(settings, tmp_path, {"lost-state": "restart"}, after=settings.rounds)
    with caplog.at_level(logging.WARNING, "polyfed"):
        found = train_run(over(grid, settings), None)
    assert not any("starts again" in message for message in caplog.messages)
    assert any("the server resumes from version" in message for message in caplog.messages)
    assert len(found.accuracy["seen"]) == len(grid.configs) - 1


def test_a_node_that_does_not_know_what_to_do_when_its_state_is_lost_says_so() -> None:
    with pytest.raises(SettingError, match="lost-state cannot be 're-start'"):
        when_lost({"lost-state": "re-start"})


# ------------------------------------------------------------------------------------------------------ state that lasts
class Killed(BaseException):
    """As if the process were gone."""


@pytest.mark.parametrize(
    ("method", "at"),
    [("fedbn", 0.3), ("fedbn", 0.6), ("fedbn", 0.9), ("elcfs", 0.2), ("fedtan", 0.6), ('fedavg + momentum(keep="local")', 0.6)],
)
def test_a_server_stopped_in_mid_round_and_resumed_ends_with_the_same_digest(method: str, at: float, tmp_path: Path) -> None:
    settings = dataclasses.replace(SMALL, method=method, rounds=3, momentum=0.9 if "momentum" in method else 0.0)
    whole = grid_for(settings, tmp_path / "whole")
    expected = train_run(over(whole, settings), None)
    assert expected.digest == in_process(settings).digest
    last = int(at * len(whole.asked))
    told = itertools.count()

    def meddle(asked: Message, answered: Message) -> Message | None:
        if next(told) == last:
            raise Killed
        return answered

    out = tmp_path / "run"
    grid = grid_for(settings, tmp_path / "nodes", meddle)
    with pytest.raises(Killed):
        train_run(over(grid, settings), RunFolder(out))
    grid.answers.clear()
    again = over(grid, settings)
    found = resume(out, data=again.federation, backend=lambda bench, clients: again.backend)
    assert found.digest == expected.digest
    assert found.rows == expected.rows


def test_checkpoints_far_apart_keep_their_versions_alive(tmp_path: Path) -> None:
    settings = dataclasses.replace(SMALL, method="fedbn", rounds=9, local_steps=1, checkpoint_every="4")
    out = tmp_path / "run"
    grid = grid_for(settings, tmp_path / "nodes", killed_in(round_number=8))
    with pytest.raises(Killed):
        train_run(over(grid, settings), RunFolder(out))
    held = {len(list(folder.rglob("*.safetensors"))) for folder in (tmp_path / "nodes").iterdir()}
    assert max(held) <= 5, "versions nobody needs pile up"
    grid.meddle = lambda context, answered: answered
    again = over(grid, settings)
    assert resume(out, data=again.federation, backend=lambda b, c: again.backend).digest == in_process(settings).digest


def test_the_best_round_is_still_there_at_the_end(tmp_path: Path) -> None:
    settings = dataclasses.replace(SMALL, method="fedbn", rounds=4, selection="best_validation", lr=0.5)
    found = train_run(over(grid_for(settings, tmp_path), settings), RunFolder(tmp_path / "run"))
    expected = in_process(settings)
    assert found.digest == expected.digest
    assert found.rows == expected.rows


def test_a_clients_own_model_cannot_be_taken_from_it(tmp_path: Path) -> None:
    settings = dataclasses.replace(SMALL, method="fedbn", rounds=1)
    experiment = over(grid_for(settings, tmp_path), settings)
    found = train_run(experiment, None)
    assert not any(experiment.backend.can_read(client) for client in experiment.server.client_ids)
    with pytest.raises(DataError, match="stays on its machine"):
        found.model_for(found.experiment.server.client_ids[0])
    shared = dataclasses.replace(SMALL, rounds=1)
    assert train_run(over(grid_for(shared, tmp_path), shared), None).model_for("small") is not None


# --------------------------------------------------------------------------------------------------------- first query
def test_nodes_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    same = {1: {"data": TINY, "domain": "small"}, 2: {"data": TINY, "domain": "small"}}
    with pytest.raises(DataError, match=r"0 of 2 nodes can take part. Nodes 1 and 2 call themselves small"):
        over(FakeGrid(SMALL, tmp_path, same), SMALL)
    nobody = {1: {"data": TINY, "domain": "small"}, 2: {"data": TINY, "domain": "smal"}}
    with pytest.raises(DataError, match=r"1 of 2 nodes can take part.*small"):
        over(FakeGrid(SMALL, tmp_path, nobody), SMALL)
    vague = {1: {"data": TINY}}
    with pytest.raises(DataError, match="Say which one this node is"):
        over(FakeGrid(SMALL, tmp_path, vague), SMALL)
    renamed = {1: {"data": TINY, "domain": "small", "client": "north"}, 2: {"data": TINY, "domain": "small", "client": "south"}}
    experiment = over(FakeGrid(SMALL, tmp_path, renamed), SMALL)
    assert experiment.server.client_ids == ["north", "south"]


def test_the_server_app_runs_records_and_goes_on(tmp_path: Path) -> None:
    settings = dataclasses.replace(SMALL, method="fedbn")
    out = tmp_path / "run"
    grid = grid_for(settings, tmp_path / "nodes")
    config = {"out": str(out), "min-nodes": len(grid.configs), "wait": 1.0}
    found = run_on_grid(grid, settings, config)  # type: ignore[arg-type]
    assert found.digest == in_process(settings).digest
    asked = len(grid.asked)
    again = run_on_grid(grid, settings, config)  # type: ignore[arg-type]
    assert again.digest == found.digest
    assert len(grid.asked) == asked + len(grid.configs), "a finished run asks nodes only who they are"
    with pytest.raises(SettingError, match=r"other settings \(lr\)"):
        run_on_grid(grid, dataclasses.replace(settings, lr=0.5), config)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="stay where they are"):
        run_on_grid(grid, dataclasses.replace(settings, method="central"), config)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="of 99 nodes were connected"):
        run_on_grid(grid, settings, {**config, "min-nodes": 99, "wait": 0.0})  # type: ignore[arg-type]


def test_a_run_that_goes_on_has_the_clients_it_was_begun_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = dataclasses.replace(SMALL, method="fedbn", rounds=3)
    config = {"out": str(tmp_path / "run"), "min-nodes": 2, "wait": 0.0, "patience": 0.0}
    grid = grid_for(settings, tmp_path / "nodes", killed_in(round_number=2))
    with pytest.raises(Killed):
        run_on_grid(grid, settings, config)  # type: ignore[arg-type]
    grid.meddle = lambda context, answered: answered
    grid.answers.clear()
    grid.offline.add(of(grid, "small"))
    with pytest.raises(DataError, match=r"1 of 3 clients of the run that is to go on were not there after 0 seconds: small\."):
        run_on_grid(grid, settings, config)  # type: ignore[arg-type]
    grid.offline.clear()
    grid.configs = {999: {"data": TINY, "domain": "small", "client": "stranger"}, **grid.configs}
    with caplog.at_level(logging.WARNING, "polyfed"):
        found = run_on_grid(grid, settings, config)  # type: ignore[arg-type]
    assert "Node 999 is not let in: stranger is no client of the run that goes on." in caplog.messages
    assert found.digest == in_process(settings).digest


def test_the_order_in_which_nodes_come_changes_nothing_of_the_data() -> None:
    told = [described(client, client, files=f"files of {client}") for client in ("north", "south")]
    first, second = (FederationSummary.of(federation_of(each)).identity() for each in (told, told[::-1]))
    assert first == second


def test_objects_of_this_process_cannot_be_sent_to_nodes() -> None:
    settings = dataclasses.replace(SMALL, backend="flower")
    with pytest.raises(SettingError, match="builds its own model"):
        Experiment(settings, model=torch.nn.Linear(2, 2))


def test_a_question_without_entries_is_a_question_too(tmp_path: Path) -> None:
    experiment = over(grid_for(SMALL, tmp_path), SMALL)
    names = list(experiment.bench.live)[:2]
    ask = Request("entries", {"small": Payload(extras={"names": names})}, "newcomer")
    (reply,) = experiment.backend(ask)
    assert list(reply.entries) == names
    assert reply.extras["untrained"]


def test_nodes_of_one_domain_have_tests_of_their_own() -> None:
    federation = federation_of([described(client, "d") for client in ("one", "two")])
    one, two = map(ClientInfo.from_data, federation.clients)
    assert one.test_set_ids and two.test_set_ids and not one.test_set_ids & two.test_set_ids
    assert federation.test_sizes()["seen"] == {"d": 10}


def test_a_loss_that_is_no_finite_number_leaves_the_client_out() -> None:
    for loss in (10**400, float("nan"), float("inf"), True, "0.5"):
        with pytest.raises(BadMessage, match="its loss is"):
            loss_in({"loss": loss})


def test_a_loss_may_be_absent() -> None:
    assert loss_in({}) is None and loss_in({"loss": 2}) == 2.0
