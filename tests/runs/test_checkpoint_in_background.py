"""Checkpoints in the background: they contain the values of their round, and at most one is pending."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor

from helpers.recorded_runs import Stopped
from polyfed.core.client import Client
from polyfed.core.method import Method
from polyfed.core.server import Server
from polyfed.core.sharing import batch_norm, keep_local
from polyfed.core.workbench import ClientState
from polyfed.errors import RunFolderError
from polyfed.runs.callbacks.callback import ActiveRun
from polyfed.runs.callbacks.checkpoints import BackgroundTask, CheckpointWriter
from polyfed.runs.costs import Costs, Meter
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.checkpoint import Checkpoints, Draft, Snapshot, digest
from polyfed.runs.folder.manifest import Damaged
from polyfed.runs.folder.paths import Reopening
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import resume, train_run
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation
from polyfed.trees import Piece, packed, unpacked

LONG = 20.0


def experiment_of(method: str | Method = "fedavg", **changes: Any) -> Experiment:
    torch.manual_seed(3)
    values: dict[str, Any] = {"rounds": 2, "batch_size": 4, "checkpoint_every": "1"} | changes
    return Experiment(Settings(**values), tiny_federation(), method, TinyNet())


def before_writing(monkeypatch: pytest.MonkeyPatch, do: Callable[[Draft], None]) -> list[int]:
    """Call a function before each checkpoint is written; return a list of their rounds."""
    write, rounds = Checkpoints.write_draft, []

    def watched(self: Checkpoints, draft: Draft) -> None:
        rounds.append(draft.round)
        do(draft)
        write(self, draft)

    monkeypatch.setattr(Checkpoints, "write_draft", watched)
    return rounds


def disk_is_full(self: Checkpoints, name: str, data: Sequence[Piece], sync: bool = False) -> None:
    raise OSError(28, "No space left on device")


# ------------------------------------------------------------------------------------------------ while the next round trains
def test_the_next_round_trains_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, waited = threading.Event(), []

    def begin(client: Client) -> None:
        if client.round == 2:
            training.set()

    def wait(draft: Draft) -> None:
        if draft.round == 1:
            waited.append(training.wait(LONG))

    before_writing(monkeypatch, wait)
    train_run(experiment_of(Method("told", before_training=(begin,))), RunFolder(tmp_path / "run"))
    assert waited == [True], "the second round begins only when the checkpoint of the first is written"


def test_a_checkpoint_holds_its_round_whatever_the_next_one_changes_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Server state, server memory, a module and client memory are changed in place before the checkpoint is written."""
    changed_again = threading.Event()

    def at_the_client(client: Client) -> None:
        client.memory.setdefault("seen", torch.zeros(2)).add_(1)

    def at_the_server(server: Server, extras: Mapping[str, Any]) -> None:
        server.persistent("sum", lambda: torch.zeros(3)).add_(1)
        with torch.no_grad():
            server.persistent("module", lambda: torch.nn.Linear(2, 2)).weight.add_(1)
        for value in server.state.values():
            value.add_(1)
        server.persistent("deep", lambda: {"list": [0]})["list"].append(server.round)
        if server.round == 2:
            changed_again.set()

    def wait(draft: Draft) -> None:
        if draft.round == 1:
            assert changed_again.wait(LONG)

    before_writing(monkeypatch, wait)
    mine = Method("mine", before_training=(at_the_client,), after_round=(at_the_server,), sharing=(keep_local(batch_norm),))
    experiment = experiment_of(mine)
    truth: dict[int, str] = {}
    found: dict[int, str] = {}
    folder = RunFolder(tmp_path / "run")
    folder.create(experiment.settings, {})
    run = ActiveRun(experiment, folder)
    checkpoints_of_run = CheckpointWriter(run)

    def look(server: Server) -> None:
        truth[server.round] = digest(experiment.snapshot())
        checkpoints = Checkpoints(tmp_path / "run" / "checkpoint")
        for number in truth:  # the newest may be of a later round by now
            with contextlib.suppress(Damaged):
                if (snapshot := checkpoints.read_round(number)) is not None:
                    found[number] = digest(snapshot)
        assert not checkpoints.read()[1]

    experiment.train([lambda server: checkpoints_of_run.after_round(run.state()), look])
    assert found[1] == truth[1] and truth[1] != truth[2]
    checkpoints_of_run.conclude()
    look(experiment.server)
    assert found[2] == truth[2]


def test_values_that_are_only_ever_replaced_are_not_copied(tmp_path: Path) -> None:
    state, memory = {"w": torch.zeros(4), "turned": torch.zeros(2, 3).T}, {"m": torch.zeros(3)}
    kept = ClientState({"l": torch.zeros(5)}, {"n": torch.zeros(2)})
    draft = Checkpoints(tmp_path).draft(Snapshot(1, state, memory, {"a": kept}), {"a"})
    light, heavy = draft.detached(state_is_replaced=True), draft.detached(state_is_replaced=False)
    assert light.state["w"] is state["w"] and light.clients["a"].entries["l"] is kept.entries["l"]
    assert light.copied_bytes == (6 + 3 + 2) * 4 and heavy.copied_bytes == (4 + 6 + 3 + 2) * 4
    originals = {value.data_ptr() for value in (*state.values(), *memory.values(), kept.memory["n"])}
    copies = (*heavy.state.values(), *heavy.memory.values(), heavy.clients["a"].memory["n"])
    assert not originals & {value.data_ptr() for value in copies}


@pytest.mark.parametrize("whose", ["of the server", "of client a"])
def test_values_changed_in_place_against_the_rule_are_not_vouched_for(tmp_path: Path, whose: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    state, clients = {"w": torch.zeros(4)}, {"a": ClientState({"w": torch.zeros(2)})}
    checkpoints.write(Snapshot(1, state, clients=clients), {"a"})
    good = digest(Snapshot(1, state, clients=clients))
    draft = checkpoints.draft(Snapshot(2, state, clients=clients), {"a"}).detached(state_is_replaced=True)
    (state if whose == "of the server" else clients["a"].entries)["w"].add_(1)
    with pytest.raises(RunFolderError, match=rf"'w' {whose} was changed in place.*round 2"):
        checkpoints.write_draft(draft)
    snapshot, _ = Checkpoints(tmp_path).read()
    assert snapshot is not None and snapshot.round == 1 and digest(snapshot) == good


def test_what_cannot_be_written_is_said_in_the_round_it_is_found(tmp_path: Path) -> None:
    def remember(server: Server, extras: Mapping[str, Any]) -> None:
        server.persistent("odd", lambda: {"f": remember})

    with pytest.raises(TypeError, match="got function"):
        train_run(experiment_of(Method("odd", after_round=(remember,)), rounds=1), RunFolder(tmp_path / "run"))


# ------------------------------------------------------------------------------------------------ one at a time
def test_at_most_one_is_on_its_way_and_none_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_work = threading.Lock()
    write = Checkpoints.write_draft

    def alone(self: Checkpoints, draft: Draft) -> None:
        assert at_work.acquire(blocking=False), "two checkpoints are written at once"
        time.sleep(0.1)
        write(self, draft)
        at_work.release()

    monkeypatch.setattr(Checkpoints, "write_draft", alone)
    rounds = before_writing(monkeypatch, lambda draft: None)
    train_run(experiment_of(rounds=4), RunFolder(tmp_path / "run"))
    assert rounds == [0, 1, 2, 3, 4, 4]


def test_one_that_is_due_by_time_is_put_off_while_another_is_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fourth = threading.Event()

    def begin(client: Client) -> None:
        if client.round == 4:
            fourth.set()

    def wait(draft: Draft) -> None:
        if draft.round == 1:
            assert fourth.wait(LONG)

    rounds = before_writing(monkeypatch, wait)
    slow = Method("slow", before_training=(begin, lambda client: time.sleep(0.02)))
    train_run(experiment_of(slow, rounds=6, checkpoint_every="0.000001s"), RunFolder(tmp_path / "run"))
    assert rounds[:2] == [0, 1] and rounds[2] >= 4, "a round waited for a checkpoint that only time asked for"
    assert rounds[-1] == 6


# ------------------------------------------------------------------------------------------------ failures and ends
def test_a_full_disk_stops_the_run_at_the_next_round_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = experiment_of("fedbn", rounds=9)
    write = Checkpoints._write_file

    def full(self: Checkpoints, name: str, data: Sequence[Piece], sync: bool = False) -> None:
        (write if "-000000" in name else disk_is_full)(self, name, data)

    monkeypatch.setattr(Checkpoints, "_write_file", full)
    with pytest.raises(RunFolderError, match=r"Cannot write a checkpoint.*No space left on device\. The last good checkpoint"):
        train_run(experiment, RunFolder(tmp_path / "run"))
    assert experiment.server.round == 2
    assert experiment.backend.changed == set(experiment.backend.client_states), "the next checkpoint would leave out what changed"
    monkeypatch.undo()
    snapshot, _ = Checkpoints(tmp_path / "run" / "checkpoint").read()
    assert snapshot is not None and snapshot.round == 0


def test_a_full_disk_in_the_last_round_is_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Checkpoints._write_file

    def full(self: Checkpoints, name: str, data: Sequence[Piece], sync: bool = False) -> None:
        (disk_is_full if name.startswith("server-000002.") else write)(self, name, data)

    monkeypatch.setattr(Checkpoints, "_write_file", full)
    with pytest.raises(RunFolderError, match="No space left"):
        train_run(experiment_of(rounds=2), RunFolder(tmp_path / "run"))


@pytest.mark.parametrize("error", [Stopped, KeyboardInterrupt, ValueError])
def test_whatever_ends_a_run_waits_for_the_checkpoint_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def stop(client: Client) -> None:
        if client.round == 3:
            raise error

    rounds = before_writing(monkeypatch, lambda draft: time.sleep(0.3))
    with pytest.raises(BaseException):  # noqa: B017 a ValueError gets the name of the client
        train_run(experiment_of(Method("stops", before_training=(stop,)), rounds=5), RunFolder(tmp_path / "run"))
    snapshot, complaints = Checkpoints(tmp_path / "run" / "checkpoint").read()
    assert snapshot is not None and snapshot.round == 2 and not complaints
    assert rounds == [0, 1, 2], "the round that was cut off is no checkpoint, and none is written twice"
    assert not list((tmp_path / "run" / "checkpoint").glob("*.part"))


def test_an_interrupt_between_rounds_saves_what_was_not_due(tmp_path: Path) -> None:
    experiment = experiment_of(rounds=5, checkpoint_every="4")
    train = experiment.train

    def stop(server: Server) -> None:
        if server.round == 3:
            raise KeyboardInterrupt

    experiment.train = lambda observers=(), **how: train([*observers, stop], **how)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        train_run(experiment, RunFolder(tmp_path / "run"))
    snapshot, _ = Checkpoints(tmp_path / "run" / "checkpoint").read()
    assert snapshot is not None and snapshot.round == 3


def test_when_the_run_and_the_writing_fail_both_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(client: Client) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "_write_file", disk_is_full)
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        train_run(experiment_of(Method("stops", before_training=(stop,))), RunFolder(tmp_path / "run"))
    assert "No space left on device" in caplog.text


def test_a_system_without_threads_writes_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train_run(experiment_of("fedbn"), None).digest

    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    assert train_run(experiment_of("fedbn"), RunFolder(tmp_path / "run")).digest == expected
    monkeypatch.setattr(Checkpoints, "_write_file", disk_is_full)
    with pytest.raises(RunFolderError, match="No space left"):
        train_run(experiment_of("fedbn"), RunFolder(tmp_path / "full"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_killed_with_scores_of_a_round_whose_predecessor_is_still_on_its_way(tmp_path: Path) -> None:
    """Killed while round 2 is written and round 3 has logged its losses: the run resumes from round 1, without duplicated lines."""
    whole = train_run(experiment_of("fedbn", rounds=4, evaluate_every=1), RunFolder(tmp_path / "whole"))
    child = os.fork()
    if child == 0:
        try:
            with pytest.MonkeyPatch.context() as patch:
                before_writing(patch, lambda draft: time.sleep(LONG if draft.round == 2 else 0))
                append = RunFolder.append

                def kill(self: RunFolder, lines: list[Mapping[str, Any]]) -> None:
                    append(self, lines)
                    if lines[0]["round"] == 3:
                        os.kill(os.getpid(), signal.SIGKILL)

                patch.setattr(RunFolder, "append", kill)
                train_run(experiment_of("fedbn", rounds=4, evaluate_every=1), RunFolder(tmp_path / "cut"))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    cut = RunFolder(tmp_path / "cut")
    snapshot, complaints = cut.checkpoints.read()
    assert snapshot is not None and snapshot.round == 1 and not complaints
    assert max(line["round"] for line in cut.metrics()) == 3
    torch.manual_seed(3)
    again = resume(tmp_path / "cut", data=tiny_federation(), how=Reopening(model=TinyNet()))
    assert again.digest == whole.digest
    assert cut.metrics() == RunFolder(tmp_path / "whole").metrics()


def test_stopped_after_its_last_round_a_run_scores_that_round_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the checkpoint of the last round, before the one that marks the run as finished."""
    whole = train_run(experiment_of(evaluate_every=1), RunFolder(tmp_path / "whole"))

    def stop(draft: Draft) -> None:
        if draft.finished:
            raise Stopped

    with monkeypatch.context() as patch:
        before_writing(patch, stop)
        with pytest.raises(Stopped):
            train_run(experiment_of(evaluate_every=1), RunFolder(tmp_path / "cut"))
    torch.manual_seed(3)
    again = resume(tmp_path / "cut", data=tiny_federation(), how=Reopening(model=TinyNet()))
    assert again.digest == whole.digest and again.rows == whole.rows
    assert RunFolder(tmp_path / "cut").metrics() == RunFolder(tmp_path / "whole").metrics()


# ------------------------------------------------------------------------------------------------ the thread
def test_an_interrupt_of_the_waiting_leaves_the_work_going_on() -> None:
    done: list[bool] = []
    go_on = threading.Event()

    def work() -> None:
        done.append(go_on.wait(LONG))

    def interrupt(number: int, frame: Any) -> None:
        raise Stopped

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        task = BackgroundTask()
        task.start(work)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Stopped):
            task.wait()
        assert task.busy and not done
        go_on.set()
        task.finish()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert done == [True] and not task.busy


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_fork_waits_for_the_work() -> None:
    task = BackgroundTask()
    ended: list[bool] = []

    def work() -> None:
        time.sleep(0.3)
        ended.append(True)

    task.start(work)
    assert task.busy
    child = os.fork()
    if child == 0:
        os._exit(0 if ended and not task.busy else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    task.finish()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="worker processes need Linux")
def test_workers_forked_while_a_checkpoint_is_written_end_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train_run(experiment_of("fedbn"), None).digest
    before_writing(monkeypatch, lambda draft: time.sleep(0.2))
    assert train_run(experiment_of("fedbn", workers="2"), RunFolder(tmp_path / "run")).digest == expected


def test_the_error_of_a_piece_of_work_is_raised_once() -> None:
    task = BackgroundTask()
    task.start(lambda: [][0])
    with pytest.raises(IndexError):
        task.start(lambda: None)
    task.finish()


def test_cpu_seconds_of_writing_are_no_cost_of_training() -> None:
    def burn() -> None:
        end = time.thread_time() + 0.5
        while time.thread_time() < end:
            pass

    task, costs = BackgroundTask(), Costs()
    meter = Meter(background=lambda: task.cpu_seconds)
    task.start(burn)
    task.finish()
    meter.pause(costs)
    assert task.cpu_seconds >= 0.5 and costs.cpu_seconds["training"] < 0.25


# ------------------------------------------------------------------------------------------------ the files
def test_files_are_what_the_safetensors_library_reads() -> None:
    dtypes = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "float8_e4m3fn")
    some = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tree: dict[str, Tensor] = {name: (some % 5).to(getattr(torch, name)) for name in dtypes if name != "float8_e4m3fn"}
    tree |= {"turned": some.T, "row": some[1], "again": some[1], "number": torch.tensor(3), "empty": torch.zeros(0, 2)}
    for trees in (tree, {"eight": some.to(torch.float8_e4m3fn)}):
        read = load_safetensors(packed(trees))
        back = unpacked(packed(trees))
        for place, (name, value) in enumerate(trees.items()):
            for found in (read[f"/{place}"], back[name]):
                assert found.dtype == value.dtype and found.shape == value.shape
                assert torch.equal(found.to(torch.float64), value.to(torch.float64)), name


def test_the_manifest_names_only_clients_that_are_there(tmp_path: Path) -> None:
    """The selected round may have fewer clients with state than the last round."""
    checkpoints = Checkpoints(tmp_path)
    two = {name: ClientState({"l": torch.full((2,), float(place))}) for place, name in enumerate("ab")}
    checkpoints.write(Snapshot(1, {}, clients=two), {"a", "b"})
    last = Snapshot(2, {}, clients={"a": two["a"]})
    checkpoints.write(last, {"a"}, finished=True)
    found, complaints = Checkpoints(tmp_path).read()
    assert found is not None and not complaints
    assert digest(dataclasses.replace(found, notes={})) == digest(last)
