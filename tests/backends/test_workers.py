"""Worker processes: the same bits as in one process, for any number of workers, whatever happens to them."""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.processes import alive, gone
from helpers.recorded_runs import sealed_again
from helpers.watching import AfterRound
from polyfed.backends import workers as workers_module
from polyfed.backends.choose import OWN
from polyfed.backends.in_process import Debug, InProcess
from polyfed.backends.shared_memory import SharedMemory, to_json, to_tree
from polyfed.backends.worker import fork
from polyfed.backends.workers import Workers
from polyfed.core.client import Client
from polyfed.core.data_types import ClientData
from polyfed.core.method import Method
from polyfed.core.rounds import Payload, Request
from polyfed.errors import ClientFailure, DataError, NotFinite, SettingError
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.checkpoint import copied, digest
from polyfed.runs.folder.paths import Reopening
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import resume, train_run
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="workers need Linux: os.fork and os.memfd_create")

SIZES = {"a": 13, "b": 9, "c": 8, "d": 7, "e": 5}


def experiment(workers: int = 0, method: str | Method = "fedavg", base: type[InProcess] = InProcess, **changes: Any) -> Experiment:
    """Build a small run; 0 workers means no other process."""
    values = {"rounds": 2, "batch_size": 4, "momentum": 0.9, "workers": str(max(workers, 1))} | changes
    torch.manual_seed(3)
    made = Experiment(Settings(**values), tiny_federation(SIZES), method, TinyNet())
    if workers:
        made.backend = Workers(made.bench, made.federation.clients, base, workers)
    return made


def trained(workers: int = 0, method: str | Method = "fedavg", **changes: Any) -> tuple[str, str]:
    made = experiment(workers, method, **changes)
    made.train()
    found = digest(made.snapshot()), str(made.evaluate())
    made.backend.close()
    return found


def pids(made: Experiment) -> list[int]:
    assert isinstance(made.backend, Workers)
    return [worker.pid for worker in made.backend.workers]


def before(hook: Any) -> Method:
    return Method("hooked", before_training=(hook,))


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedavg", {}),
        ("fedavg", {"clients_per_round": 3, "drop": 0.3, "min_share": 0.0, "rounds": 4}),
        ("fedbn", {"clients_per_round": 0.6, "rounds": 3}),
        ("local", {}),
        ('fedprox(mu=0.1) + momentum(keep="local")', {}),
        ("fedavgm", {}),
        ("scaffold", {"momentum": 0.0}),
        ("fixbn(freeze_at=1)", {}),
        ("hfedf(warmup=1)", {}),
        ("fedtan", {"rounds": 1}),
        ("ccst", {}),
        ("elcfs", {"rounds": 1}),
        ("static_bn", {}),
    ],
)
def test_digests_and_scores_are_those_of_one_process(method: str, changes: dict[str, Any]) -> None:
    wanted = trained(0, method, **changes)
    for workers in (1, 2, 3) if method in ("fedavg", "fedbn") else (2,):
        assert trained(workers, method, **changes) == wanted


def test_the_setting_chooses() -> None:
    def chosen(**changes: Any) -> InProcess:
        return Experiment(Settings(**changes), tiny_federation(SIZES), "fedavg", TinyNet()).backend

    several = chosen(workers="3")
    assert isinstance(several, Workers)
    assert several.count == 3
    assert isinstance(few := chosen(workers="64"), Workers)
    assert few.count == len(SIZES)
    assert type(chosen(workers="1")) is InProcess
    cores = len(os.sched_getaffinity(0))
    assert getattr(chosen(), "count", 1) == min(cores, len(SIZES))
    assert type(chosen(clients_per_round=1)) is InProcess
    for backend in ("fused", "auto"):  # the last bits depend on the groups of stacked clients
        assert type(chosen(backend=backend)) is OWN[backend]
    assert type(chosen(compile="auto")) is InProcess
    with pytest.raises(SettingError, match="one thread each, which conflicts with --threads 2"):
        chosen(workers="2", threads=2)
    assert type(chosen(workers="auto", threads=2)) is InProcess
    for changes, option in (({"workers": "2"}, "--workers 2"), ({"compile": "on"}, "--compile on")):
        with pytest.raises(SettingError, match=f"^{option} has no effect: --backend debug trains in this process"):
            chosen(backend="debug", **changes)
        with pytest.raises(SettingError, match=f"^{option} has no effect: --backend flower"):
            Experiment(Settings(data="digits-mini(per_domain=20)", backend="flower", **changes))
    assert type(chosen(workers="auto", compile="auto", backend="debug")) is Debug


def test_workers_need_linux_and_a_model_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(SettingError, match="need Linux"):
        experiment(2)
    made = experiment()
    assert workers_module.worker_count(made.bench, 5) == 1
    made.bench.live = {"weight": torch.zeros(1, device="meta")}
    monkeypatch.undo()
    with pytest.raises(SettingError, match="only on the CPU, but the model is on cpu, meta"):
        Workers(made.bench, made.federation.clients, InProcess, 2)


class Together(InProcess):
    """A backend that takes groups and logs them."""

    takes_groups = True

    def outcomes(self, request: Request, clients: Any) -> Iterator[Any]:
        logging.getLogger("polyfed").info("group %s", " ".join(clients))
        yield from super().outcomes(request, clients)


def test_a_backend_that_takes_groups_receives_them(caplog: pytest.LogCaptureFixture) -> None:
    made = experiment(2, base=Together, rounds=1)
    with caplog.at_level(logging.INFO, "polyfed"):
        made.train()
    assert [record.getMessage() for record in caplog.records] == ["group a b c", "group d e"]
    assert digest(made.snapshot()) == in_one_process(rounds=1)
    made.backend.close()


def digest_of(made: Experiment) -> str:
    made.train()
    return digest(made.snapshot())


@functools.cache
def in_one_process(method: str = "fedavg", rounds: int = 2) -> str:
    return digest_of(experiment(0, method, rounds=rounds))


def here() -> Any:
    """Return a function that is true in the process of the test only."""
    test = os.getpid()
    return lambda: os.getpid() == test


def test_a_killed_worker_is_replaced_and_the_bits_are_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def kill_once(client: Client) -> None:
        mark = tmp_path / f"{client.round}{client.id}"
        if client.id in "bd" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    made = experiment(2, before(kill_once))
    assert digest_of(made) == in_one_process()
    assert len(list(tmp_path.iterdir())) == 4
    assert caplog.text.count("(killed by SIGKILL). Repeating its work") == 4
    made.backend.close()


def test_workers_killed_between_asks_are_replaced() -> None:
    made = experiment(2)
    made.train([lambda _: [os.kill(pid, signal.SIGKILL) for pid in pids(made)]])
    assert digest(made.snapshot()) == in_one_process()
    made.backend.close()


def test_a_client_no_worker_survives_is_named() -> None:
    is_here = here()

    def kill(client: Client) -> None:
        if client.id == "c" and not is_here():
            os.kill(os.getpid(), signal.SIGKILL)

    made = experiment(2, before(kill))
    with pytest.raises(
        ClientFailure, match=r"^Client c, round 1, request 'train': lost 3 worker processes.* Memory probably ran out"
    ):
        made.train()
    assert not made.backend.staged.keys() - set("ab")
    made.backend.close()


def test_a_worker_that_exits_is_reported_with_its_exit_code() -> None:
    made = experiment(2, before(lambda client: os._exit(7)))
    with pytest.raises(ClientFailure, match=r"ended with exit code 7\. Run with --workers 1"):
        made.train()
    made.backend.close()


@pytest.mark.parametrize("kind", [ClientFailure, NotFinite, DataError, ZeroDivisionError])
def test_errors_are_those_of_one_process(kind: type[Exception]) -> None:
    def fail(client: Client) -> None:
        if client.id in "cd":
            raise kind(f"{client.id} is bad")

    caught_errors = []
    for workers in (0, 2):
        made = experiment(workers, before(fail))
        with pytest.raises(ClientFailure if kind is ZeroDivisionError else kind) as caught:
            made.train()
        caught_errors.append((type(caught.value), str(caught.value)))
        if workers:
            assert "in fail" in str(caught.value.__cause__)
            assert not pids(made) or all(alive(pid) for pid in pids(made))
            made.backend.close()
    assert caught_errors[0] == caught_errors[1]
    assert "c is bad" in caught_errors[0][1]


def test_losses_that_are_not_finite_can_be_dropped(caplog: pytest.LogCaptureFixture) -> None:
    def poison(client: Client) -> None:
        if client.id == "b":
            next(iter(client.bench.parameters.values())).data.fill_(float("nan"))

    changes = {"on_nan": "drop", "min_share": 0.2}
    wanted = trained(0, before(poison), **changes)
    said = [record.getMessage() for record in caplog.records]
    caplog.clear()
    assert trained(2, before(poison), **changes) == wanted
    assert [record.getMessage() for record in caplog.records] == said
    assert len(said) == 2


def test_what_workers_log_and_warn_is_shown_once_and_in_order(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def speak(client: Client) -> None:
        time.sleep(0.05 if client.id == "a" else 0.0)
        logging.getLogger("polyfed.own").warning("client %s speaks", client.id)
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.warn(f"beware of {client.id}", RuntimeWarning, stacklevel=1)
        print(f"<{client.id}>")

    made = experiment(2, before(speak), rounds=1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        made.train()
    assert [record.getMessage() for record in caplog.records if record.name == "polyfed.own"] == [
        f"client {c} speaks" for c in SIZES
    ]
    assert [str(warning.message) for warning in warned] == [f"beware of {client}" for client in SIZES]
    assert sorted(capfd.readouterr().out.split()) == [f"<{client}>" for client in SIZES]
    made.backend.close()


def test_no_worker_is_left() -> None:
    made = experiment(3)
    made.train()
    first = pids(made)
    assert len(first) == 3
    assert all(map(alive, first))
    made.backend.close()
    assert not any(map(alive, first))
    made.evaluate()
    again = pids(made)
    assert again
    assert not set(again) & set(first)
    del made
    assert all(map(gone, again))


def test_unread_replies_leave_no_worker_running() -> None:
    def rest(client: Client) -> None:
        time.sleep(60 if client.id != "a" else 0)

    made = experiment(2, before(rest))
    replies = made.backend(made.server.request("train", list(SIZES)))
    assert next(replies).client == "a"
    started = pids(made)
    replies.close()  # type: ignore[attr-defined]
    assert all(map(gone, started))
    assert not pids(made)


def test_replies_are_not_mixed_with_those_of_a_later_request() -> None:
    made = experiment(2)
    ask = made.server.request("train", list(SIZES))
    early = made.backend(ask)
    next(early)
    later = list(made.backend(ask))
    assert [reply.client for reply in later] == list(SIZES)
    with pytest.raises(ClientFailure, match="read after a later request"):
        next(early)
    made.backend.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_their_parent(number: signal.Signals) -> None:
    reading, writing = os.pipe()

    def tell(client: Client) -> None:
        os.write(writing, f"{os.getpid()}\n".encode())
        time.sleep(60)

    def train() -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            experiment(2, before(tell)).train()
        except KeyboardInterrupt:
            os._exit(42)

    parent = fork(train)
    os.close(writing)
    with open(reading) as line:
        started = [int(line.readline()) for _ in range(2)]
        assert all(map(alive, started))
        # Ctrl-C reaches all processes of the terminal's group, the other signals only the parent.
        (os.killpg if number == signal.SIGINT else os.kill)(parent, number)
        assert os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]) == (42 if number == signal.SIGINT else -number)
        assert all(map(gone, started))
        assert line.read() == ""


def test_runs_go_on_with_another_number_of_workers(tmp_path: Path) -> None:
    wanted = in_one_process("fedbn", rounds=4)
    folder = RunFolder(tmp_path / "run")
    first, saved = experiment(2, "fedbn", rounds=4, checkpoint_every="1"), []

    class Stop(Exception):
        pass

    def stop(server: Any) -> None:
        if server.round == 2:
            saved.append(copied(first.snapshot()))
            raise Stop

    with pytest.raises(Stop):
        train_run(first, folder, callbacks=[AfterRound(stop)])
    assert not pids(first)
    text = (folder.path / "run.toml").read_text()
    assert text.count('workers = "2"') == 1
    (folder.path / "run.toml").write_text(text.replace('workers = "2"', 'workers = "3"'))
    sealed_again(folder.path)
    torch.manual_seed(3)
    result = resume(folder.path, data=tiny_federation(SIZES), how=Reopening(model=TinyNet()))
    assert isinstance(result.experiment.backend, Workers)
    assert digest(result.experiment.snapshot()) == wanted
    alone = experiment(0, "fedbn", rounds=4)
    alone.restore(saved[0])
    assert digest_of(alone) == wanted


def test_works_from_a_thread_and_after_torch_has_used_several() -> None:
    torch.set_num_threads(2)
    torch.rand(500, 500) @ torch.rand(500, 500)
    torch.rand(1 << 18).sum()
    torch.set_num_threads(1)
    made = experiment(2)
    thread = threading.Thread(target=made.train)
    thread.start()
    thread.join()
    assert digest(made.snapshot()) == in_one_process()
    alone = experiment()
    alone.restore(made.snapshot())
    assert str(made.evaluate()) == str(alone.evaluate())
    made.backend.close()


def echo(client: Client, payload: Payload) -> Payload:
    """Return the received values, unchanged and changed."""
    client.memory["bank"] = payload.extras["same"]
    counts = client.memory.setdefault("counts", torch.zeros(2))
    counts += 1
    changed = {name: value.clone() for name, value in payload.extras["values"].items()}
    return Payload({}, {"same": payload.extras["same"], "changed": changed, "tree": payload.extras["tree"]})


ECHO = Method("echoes", answers={"echo": echo})


def test_everything_that_may_be_sent_comes_through_as_it_was() -> None:
    values = {
        "empty": torch.empty(0, 3),
        "number": torch.tensor(2.5, dtype=torch.float64),
        "truth": torch.tensor([True, False]),
        "half": torch.arange(5).to(torch.bfloat16),
        "long": torch.arange(7).flip(0),
        "complex": torch.tensor([1 + 2j]),
        "last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "turned": torch.rand(3, 4).T,
        "expanded": torch.rand(3, 1).expand(3, 4),
        "strided": torch.rand(8)[::2],
        "with gradient": nn.Parameter(torch.rand(3)),
    }
    tree = {"a": [1, 2.5, None, True, ("x", {"y": float("inf")})], 3: "three", (1, 2): []}
    same = torch.rand(3)
    made = experiment(2, ECHO)
    payloads = {client: Payload({}, {"same": same, "values": values, "tree": tree}) for client in SIZES}
    replies = list(made.backend(Request("echo", payloads)))
    assert [reply.client for reply in replies] == list(SIZES)
    for reply in replies:
        assert reply.extras["tree"] == tree
        assert reply.extras["same"] is same
        for name, value in reply.extras["changed"].items():
            assert value.dtype == values[name].dtype
            assert torch.equal(value, values[name])
            assert value.stride() == values[name].detach().clone().stride() or value.numel() == 0
            assert not value.requires_grad
    list(made.backend(Request("echo", payloads)))
    assert all(torch.equal(kept.memory["counts"], torch.full((2,), 2.0)) for kept in made.backend.staged.values())
    # A value that all clients received is stored once, as in one process.
    assert {id(kept.memory["bank"]) for kept in made.backend.staged.values()} == {id(same)}
    made.backend.close()


def test_replies_stay_as_they_are_and_memory_grows_with_the_payload_only() -> None:
    made = experiment(2, ECHO)

    def ask(size: int, value: float) -> list[Tensor]:
        payloads = {c: Payload({}, {"same": 0, "tree": 0, "values": {"x": torch.full((size,), value)}}) for c in SIZES}
        return [reply.extras["changed"]["x"] for reply in made.backend(Request("echo", payloads))]

    small = ask(10, 1.0)
    large = ask(3_000_000, 2.0)
    ask(3_000_000, 3.0)
    assert all(torch.equal(value, torch.full((10,), 1.0)) for value in small)
    assert all(bool((value == 2.0).all()) and len(value) == 3_000_000 for value in large)
    made.backend.close()


def test_nothing_grows_over_many_asks() -> None:
    made = experiment(2, "fedbn", rounds=1)
    made.train()

    def sizes() -> tuple[int, list[int]]:
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in (os.getpid(), *pids(made))]
        return len(os.listdir("/proc/self/fd")), pages

    def ask(times: int) -> None:
        payload = Payload({}, {"names": [name for name in made.bench.live if "running" in name]})
        for _ in range(times):
            assert len(list(made.backend(Request("entries", dict.fromkeys(SIZES, payload))))) == len(SIZES)

    ask(20)
    files, pages = sizes()
    ask(100)
    files_after, pages_after = sizes()
    assert files_after == files
    assert all(late - early < 250 for early, late in zip(pages, pages_after, strict=True)), (pages, pages_after)
    made.backend.close()


def test_answers_wait_in_memory_only_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "MAX_BYTES_AHEAD", 0)

    def rest(client: Client) -> None:
        time.sleep(0.3 if client.id == "a" else 0.0)

    made = experiment(2, before(rest), rounds=1)
    ready: list[int] = []
    settle = workers_module.Turn.settle

    def watch(self: Any, job: Any, bundle: Any) -> None:
        settle(self, job, bundle)
        ready.append(len(self.ready))

    monkeypatch.setattr(workers_module.Turn, "settle", watch)
    made.train()
    assert max(ready) == 2
    assert digest(made.snapshot()) == in_one_process(rounds=1)
    made.backend.close()


def test_values_that_cannot_be_sent_are_an_error() -> None:
    def strange(client: Client, payload: Payload) -> Payload:
        return Payload({}, {"thing": object()})

    made = experiment(2, Method("strange", answers={"strange": strange}))
    with pytest.raises(ClientFailure, match=r"Client a, round 0, request 'strange': .* got object"):
        list(made.backend(Request("strange", dict.fromkeys(SIZES, Payload()))))
    with pytest.raises(ClientFailure, match=r"request 'strange' to client a: .* got object"):
        list(made.backend(Request("strange", dict.fromkeys(SIZES, Payload({}, {"thing": object()})))))
    with pytest.raises(ClientFailure, match="Only dense tensors"):
        list(made.backend(Request("strange", dict.fromkeys(SIZES, Payload({}, {"thing": torch.eye(2).to_sparse()})))))
    made.backend.close()


def test_workers_use_data_changed_before_the_first_request() -> None:
    made, plain = experiment(2), experiment()
    for one in (made, plain):
        data: ClientData = one.backend.data["a"]
        other = ClientData("b", ("b",), data.train, {"b": data.tests["a"]}, data.validation)
        one.backend.replace_data([*(held for held in one.backend.data.values() if held.id != "b"), other])
    assert digest_of(made) == digest_of(plain) != in_one_process()
    assert str(made.evaluate()) == str(plain.evaluate())
    made.backend.close()


def test_trees_are_converted_to_json_and_back() -> None:
    memory = SharedMemory()
    tensors: list[Tensor] = [torch.arange(3), torch.ones(2, 2)]
    spots = []

    def mark(value: Tensor) -> dict[str, int]:
        spots.append(memory.put(value))
        return {"own": len(spots) - 1}

    json_tree = to_json({"x": [tensors[0], {"y": (tensors[1], 1)}]}, mark)
    back = to_tree(json_tree, lambda _, place: memory.view(spots[place]))
    assert torch.equal(back["x"][0], tensors[0])
    assert torch.equal(back["x"][1]["y"][0], tensors[1])
    assert [spot.start % 64 for spot in spots] == [0, 0]
    back["x"][0][0] = 9
    assert int(memory.view(spots[0])[0]) == 9
