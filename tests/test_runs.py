"""Run folders, checkpoints, digests, resuming, and what is done with bad replies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import polyfed
from polyfed.checkpoint import Checkpoints, Snapshot, digest
from polyfed.client import Kept
from polyfed.conversation import Payload, Reply
from polyfed.data.identity import differences, identity_of
from polyfed.entries import entries_of
from polyfed.errors import DataError, RunFolderError, SettingError, TooFewReplies, UnknownName
from polyfed.evaluation import Row
from polyfed.experiment import Experiment
from polyfed.folder import RunFolder
from polyfed.method import Facts, Method
from polyfed.observers import record, resume
from polyfed.server import problem_with
from polyfed.settings import Settings
from polyfed.sharing import batch_norm, keep_local
from polyfed.testing import SIZES, TinyNet, tiny_federation
from polyfed.trees import Piece, flattened, packed, rebuilt, unpacked


def tiny_net() -> TinyNet:
    torch.manual_seed(3)
    return TinyNet()


def tiny_federation_as_data() -> Any:
    stream = torch.Generator().manual_seed(0)
    parts = [(torch.rand(8, 3, 8, 8, generator=stream), torch.arange(8) % 3) for _ in range(4)]
    return {"a": (parts[0], parts[1]), "b": (parts[2], parts[3])}


def experiment_of(method: str = "fedbn", **changes: Any) -> Experiment:
    values = {"rounds": 4, "batch_size": 4, "checkpoint_every": "1"} | changes
    return Experiment(Settings(method=method, **values), tiny_federation(), model=tiny_net())


class Killed(BaseException):
    """Stands for a kill at some instant."""


def run_until(folder: Path, last: int, method: str = "fedbn", **changes: Any) -> None:
    experiment = experiment_of(method, **changes)
    folder_ = RunFolder(folder)

    def stop(server: Any) -> None:
        if server.round == last:
            raise Killed

    original = experiment.train
    experiment.train = lambda observers=(): original([*observers, stop])  # type: ignore[method-assign]
    with pytest.raises(Killed):
        record(experiment, folder_)


def go_on(folder: Path) -> Any:
    return resume(folder, data=tiny_federation(), model=tiny_net(), notify=lambda _: None)


@pytest.mark.parametrize("method", ["fedavg", "fedbn", 'fedprox + momentum(keep="local")'])
@pytest.mark.parametrize("last", [0, 1, 3])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, method: str, last: int) -> None:
    extra = {"momentum": 0.9} if "momentum" in method else {}
    whole = record(experiment_of(method, evaluate_every=1, **extra), RunFolder(tmp_path / "whole"))
    run_until(tmp_path / "cut", last, method, evaluate_every=1, **extra)
    resumed = go_on(tmp_path / "cut")
    assert resumed.digest == whole.digest
    assert resumed.accuracy == whole.accuracy
    lines = [RunFolder(tmp_path / name).metrics() for name in ("whole", "cut")]
    assert lines[0] == lines[1]
    assert resumed.experiment.ledger.bytes == whole.experiment.ledger.bytes


def test_a_finished_run_is_read_not_repeated(tmp_path: Path) -> None:
    whole = record(experiment_of(), RunFolder(tmp_path / "run"))
    again = go_on(tmp_path / "run")
    assert again.digest == whole.digest and again.accuracy == whole.accuracy


def test_only_changed_clients_are_written(tmp_path: Path) -> None:
    record(experiment_of("silobn", clients_per_round=1, rounds=3), RunFolder(tmp_path / "run"))
    manifest = json.loads(Checkpoints(tmp_path / "run" / "checkpoint").manifests()[0].read_text())
    stamps = {name.rsplit("-", 1)[1] for name in manifest["clients"].values()}
    assert manifest["round"] == 3 and len(manifest["clients"]) >= 1 and len(stamps) == len(manifest["clients"])


def test_old_files_are_tidied_and_two_checkpoints_kept(tmp_path: Path) -> None:
    record(experiment_of("fedavg", rounds=6), RunFolder(tmp_path / "run"))
    folder = tmp_path / "run" / "checkpoint"
    assert len(list(folder.glob("manifest-*.json"))) == 2
    assert len(list(folder.glob("server-*"))) == 2
    assert not list(folder.glob("*.part"))


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path) -> None:
    whole = record(experiment_of(), RunFolder(tmp_path / "whole"))
    run_until(tmp_path / "cut", 3)
    newest = sorted((tmp_path / "cut" / "checkpoint").glob("server-*"))[-1]
    newest.write_bytes(newest.read_bytes()[:-7] + b"damaged")
    told: list[str] = []
    result = resume(tmp_path / "cut", data=tiny_federation(), model=tiny_net(), notify=told.append)
    assert newest.name in told[0] and result.digest == whole.digest


def test_lost_metrics_are_named_and_the_run_goes_on(tmp_path: Path) -> None:
    whole = record(experiment_of(), RunFolder(tmp_path / "whole"))
    run_until(tmp_path / "cut", 3)
    (tmp_path / "cut" / "metrics.jsonl").write_text("")
    told: list[str] = []
    result = resume(tmp_path / "cut", data=tiny_federation(), model=tiny_net(), notify=told.append)
    assert "metrics.jsonl is shorter" in told[0] and result.digest == whole.digest
    assert RunFolder(tmp_path / "cut").metrics()


def test_a_method_of_python_can_be_resumed(tmp_path: Path) -> None:
    mine = Method("mine", sharing=(keep_local(batch_norm),), facts=Facts(client_state=True))
    values = {"rounds": 3, "batch_size": 4, "checkpoint_every": "1"}
    whole = record(Experiment(Settings(**values), tiny_federation(), mine, tiny_net()), RunFolder(tmp_path / "whole"))
    with pytest.raises(UnknownName, match="mine"):
        go_on(tmp_path / "whole")
    again = resume(tmp_path / "whole", tiny_federation(), tiny_net(), method=mine)
    assert again.digest == whole.digest


@pytest.mark.parametrize("damaged", ["manifest-", "server-"])
def test_a_run_goes_on_past_a_damaged_checkpoint_and_keeps_two_good_ones(tmp_path: Path, damaged: str) -> None:
    """Rounds 0, 2 and 4 are saved, and 4 is damaged: saved every round from 2 on, 3 is written before the damaged one is replaced."""
    state = {"w": torch.zeros(2)}
    checkpoints = Checkpoints(tmp_path)
    for number in (0, 2, 4):
        checkpoints.write(Snapshot(number, state), set())
    newest = next(tmp_path.glob(f"{damaged}000004*"))
    newest.write_bytes(newest.read_bytes()[:-7])
    again = Checkpoints(tmp_path)
    snapshot, complaints = again.read()
    assert snapshot is not None and snapshot.round == 2 and newest.name in complaints[0]
    again.write(Snapshot(3, state), set())
    assert [path.name for path in again.manifests()] == ["manifest-000003.json", "manifest-000002.json"]
    assert sorted(path.name for path in tmp_path.glob("server-*")) == [f"server-00000{number}.safetensors" for number in (2, 3)]
    again.write(Snapshot(5, state), set())
    assert [path.name for path in again.manifests()] == ["manifest-000005.json", "manifest-000003.json"]


def test_no_good_checkpoint_left_is_said(tmp_path: Path) -> None:
    run_until(tmp_path / "cut", 2)
    for file in (tmp_path / "cut" / "checkpoint").glob("server-*"):
        file.write_bytes(b"")
    with pytest.raises(RunFolderError, match="no good checkpoint"):
        go_on(tmp_path / "cut")


def test_a_run_of_a_newer_version_is_refused_in_a_sentence(tmp_path: Path) -> None:
    record(experiment_of(rounds=1), RunFolder(tmp_path / "run"))
    text = (tmp_path / "run" / "run.toml").read_text()
    (tmp_path / "run" / "run.toml").write_text(text.replace("format = 1", "format = 99", 1))
    with pytest.raises(RunFolderError, match="newer polyfed"):
        RunFolder(tmp_path / "run").settings()


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    record(experiment_of(rounds=1), RunFolder(tmp_path / "run"))
    with pytest.raises(RunFolderError, match="holds a run already"):
        record(experiment_of(rounds=1), RunFolder(tmp_path / "run"))
    with pytest.raises(RunFolderError, match="not a run"):
        RunFolder(tmp_path).settings()


def test_a_folder_that_cannot_be_written_is_said_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="Cannot write"):
        record(experiment_of(rounds=1), RunFolder(tmp_path / "file" / "run"))


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = record(experiment_of(), RunFolder(tmp_path / "whole"))
    put = Checkpoints._put

    def full(self: Checkpoints, name: str, data: Sequence[Piece]) -> None:
        if name.startswith("server-000002"):
            bytes_of_it = b"".join(data)
            (self.folder / f"{name}.part").write_bytes(bytes_of_it[: len(bytes_of_it) // 2])
            raise OSError(28, "No space left on device")
        put(self, name, data)

    monkeypatch.setattr(Checkpoints, "_put", full)
    with pytest.raises(RunFolderError, match="No space left"):
        record(experiment_of(), RunFolder(tmp_path / "cut"))
    monkeypatch.undo()
    assert go_on(tmp_path / "cut").digest == whole.digest


def test_what_run_toml_says_is_enough_to_run_again(tmp_path: Path) -> None:
    experiment = experiment_of("fedbn + agc(clip=0.5)", rounds=2)
    record(experiment, RunFolder(tmp_path / "run"))
    document = RunFolder(tmp_path / "run").document()
    assert document["method"]["all_options"] == 'fedbn + agc(clip=0.5, eps=0.001, exclude="nothing")'
    assert document["made_with"]["torch"] and document["plan"]
    assert RunFolder(tmp_path / "run").settings() == experiment.settings
    (tmp_path / "run" / "run.toml").write_text("format = 1\n[settings]\nruonds = 3\n")
    with pytest.raises(SettingError, match="rounds"):
        RunFolder(tmp_path / "run").settings()


def test_a_default_that_has_changed_since_does_not_change_a_run(tmp_path: Path) -> None:
    run_until(tmp_path / "cut", 2, "fedavg + agc(clip=0.5)")
    written = tmp_path / "cut" / "run.toml"
    then = written.read_text().replace("eps=0.001", "eps=0.25")
    assert then != written.read_text()
    written.write_text(then)
    assert 'agc(clip=0.5, eps=0.25, exclude="nothing")' in RunFolder(tmp_path / "cut").settings_to_go_on().method
    assert str(go_on(tmp_path / "cut").experiment.method) == "fedavg + agc(clip=0.5, eps=0.25)"


def test_a_run_is_not_opened_without_what_it_was_given_in_python(tmp_path: Path) -> None:
    options: Any = {"rounds": 1, "out": tmp_path / "run"}
    polyfed.run(tiny_federation_as_data(), "fedavg", tiny_net(), **options)
    with pytest.raises(RunFolderError, match=r"data and model given in Python.*data=\.\.\., model=\.\.\."):
        resume(tmp_path / "run")
    with pytest.raises(RunFolderError, match=r"model given in Python"):
        resume(tmp_path / "run", data=tiny_federation_as_data())
    assert resume(tmp_path / "run", data=tiny_federation_as_data(), model=tiny_net()).digest


FEWER = {"big": 13, "middle": 8}
OTHER_DATA = {
    "client small with 5 training samples is missing": tiny_federation(FEWER),
    "client late is new": tiny_federation(SIZES | {"late": 5}),
    "client small has 6 training samples instead of 5": tiny_federation(SIZES | {"small": 6}),
    "4 classes instead of 3": tiny_federation(classes=4),
    "they are 'elsewhere' instead of ''": replace(tiny_federation(), source="elsewhere"),
    "unseen are none instead of new": replace(tiny_federation(), unseen={}),
    "the names of classes, or the sizes of validation or test parts, are others": replace(
        tiny_federation(), classes=("a", "b", "c")
    ),
}


@pytest.mark.parametrize("said", OTHER_DATA)
def test_a_run_does_not_go_on_with_other_data(cut_run: Path, said: str) -> None:
    with pytest.raises(RunFolderError, match=rf"begun with other data than there are now: .*{said}.*another folder"):
        resume(cut_run, data=OTHER_DATA[said], model=TinyNet(len(OTHER_DATA[said].classes)))


def test_of_very_many_clients_the_digest_is_known_again() -> None:
    many = {f"c{number:03d}": 3 for number in range(101)}
    then, now = (identity_of(tiny_federation(many | other)) for other in ({}, {"c007": 4, "c008": 2}))
    assert "samples" not in then and differences(then, then) == []
    assert differences(then, now) == ["the names of classes, or the sizes of validation or test parts, are others"]
    assert differences(then, identity_of(tiny_federation())) == ["3 clients instead of 101", "26 training samples instead of 303"]


def test_a_run_stopped_after_its_last_scores_is_not_scored_twice(tmp_path: Path) -> None:
    whole = record(experiment_of(evaluate_every=1), RunFolder(tmp_path / "whole"))
    run_until(tmp_path / "cut", 4, evaluate_every=1)
    resumed = go_on(tmp_path / "cut")
    assert RunFolder(tmp_path / "cut").metrics() == RunFolder(tmp_path / "whole").metrics()
    assert resumed.rows == whole.rows == go_on(tmp_path / "cut").rows
    assert resumed.experiment.ledger.bytes == whole.experiment.ledger.bytes


def test_openings_that_are_held_again_count_once(tmp_path: Path) -> None:
    whole = record(experiment_of("elcfs", rounds=1), RunFolder(tmp_path / "whole"))
    run_until(tmp_path / "cut", 0, "elcfs", rounds=1)
    resumed = go_on(tmp_path / "cut")
    assert resumed.digest == whole.digest
    assert resumed.experiment.ledger.once == whole.experiment.ledger.once != 0


def test_what_is_no_run_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="there is no such folder"):
        RunFolder(tmp_path / "nothing").document()
    with pytest.raises(RunFolderError, match=r"has no run\.toml"):
        RunFolder(tmp_path).document()


trees = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.integers(0, 3).map(lambda n: torch.arange(n, dtype=torch.float32)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(0, 5), inner, max_size=3) | st.lists(inner, max_size=2).map(tuple),
    max_leaves=8,
)  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(trees)
def test_memory_survives_packing(tree: Any) -> None:
    assert same(unpacked(packed(tree)), tree)
    json_tree, tensors = flattened(tree)
    assert same(rebuilt(json.loads(json.dumps(json_tree)), tensors), tree)


def test_memory_of_other_things_is_refused() -> None:
    with pytest.raises(TypeError, match="function"):
        packed({"f": same})


def test_the_digest_sees_every_bit_and_no_order() -> None:
    state = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3)}
    base = Snapshot(1, state, {"m": 1}, {"x": Kept({"l": torch.zeros(2)}, {"n": 1})})
    one = digest(base)
    assert one == digest(Snapshot(1, dict(reversed(state.items())), {"m": 1}, base.clients))
    changed = [
        Snapshot(1, state | {"a": torch.tensor([1.0, 2.0000002])}, {"m": 1}, base.clients),
        Snapshot(1, state | {"b": torch.tensor(3.0)}, {"m": 1}, base.clients),
        Snapshot(1, state, {"m": 2}, base.clients),
        Snapshot(1, state, {"m": 1}, {"x": Kept({"l": torch.zeros(2)}, {"n": 2})}),
        Snapshot(1, state, {"m": 1}, {"y": base.clients["x"]}),
    ]
    assert len({one, *(digest(other) for other in changed)}) == 6


@pytest.fixture(scope="module")
def cut_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cut") / "run"
    run_until(folder, 3)
    return folder


@settings(max_examples=1500, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_checkpoint_files_are_never_believed(cut_run: Path, data: st.DataObject) -> None:
    """Any change to any file of the newest checkpoint: the older one, or the same values, or nothing; never other values."""
    folder = cut_run / "checkpoint"
    files = sorted(path for path in folder.iterdir() if path.is_file())
    path = data.draw(st.sampled_from(files))
    original = path.read_bytes()
    kind = data.draw(st.sampled_from(["flip", "cut", "replace", "remove", "insert"]))
    place = data.draw(st.integers(0, max(0, len(original) - 1)))
    byte = data.draw(st.integers(1, 255))
    damaged = {
        "flip": original[:place] + bytes([original[place] ^ byte]) + original[place + 1 :],
        "cut": original[:place],
        "replace": data.draw(st.binary(max_size=40)),
        "insert": original[:place] + bytes([byte]) + original[place:],
        "remove": b"",
    }[kind]
    good = {3: "newest", 2: "older"}
    try:
        path.unlink() if kind == "remove" else path.write_bytes(damaged)
        snapshot, complaints = Checkpoints(folder).read()
    finally:
        path.write_bytes(original)
    expected, _ = Checkpoints(folder).read()
    assert expected is not None and expected.round == 3
    if snapshot is None:
        pytest.fail(f"both checkpoints were lost to one damaged file: {complaints}")
    assert snapshot.round in good
    if snapshot.round == 3:
        assert digest(snapshot) == digest(expected)
    else:
        assert kind == "remove" or complaints


NAMES = [name for name, entry in entries_of(TinyNet()).items()]


def good_reply() -> dict[str, Tensor]:
    return {name: value.clone() for name, value in TinyNet().state_dict().items()}


@settings(max_examples=2000)
@given(data=st.data())
def test_malformed_replies_are_never_accepted(data: st.DataObject) -> None:
    entries: dict[str, Any] = good_reply()
    assert problem_with(entries, NAMES, entries_of(TinyNet())) == ""
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
    assert problem_with(entries, NAMES, entries_of(TinyNet())) != ""


def test_large_finite_values_are_accepted_though_their_sum_overflows() -> None:
    entries = good_reply() | {"head.weight": torch.full((3, 8), 3e38)}
    assert problem_with(entries, NAMES, entries_of(TinyNet())) == ""


def spoiled(experiment: Experiment, clients: set[str], rounds: set[int]) -> None:
    """Make some replies bad on their way."""
    carried = experiment.delivery

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
            [lambda server: seen.append(experiment.delivery.kept["small"].entries["stem.1.running_mean"]) if server.round else None]
        )
    assert "client small" in caplog.text and "not finite" in caplog.text
    assert torch.equal(seen[0], seen[1])
    assert all(bool(torch.isfinite(v).all()) for v in experiment.server.state.values())


def test_too_few_good_replies_repeat_the_round_then_stop_with_everything_kept(tmp_path: Path) -> None:
    experiment = experiment_of("fedbn", rounds=3, retries=2)
    spoiled(experiment, {"small", "middle"}, {2})
    with pytest.raises(TooFewReplies, match="tried 3 times"):
        record(experiment, RunFolder(tmp_path / "run"))
    whole = record(experiment_of("fedbn", rounds=3, retries=2), RunFolder(tmp_path / "whole"))
    assert go_on(tmp_path / "run").digest == whole.digest


def test_copying_a_run_elsewhere_changes_nothing(tmp_path: Path) -> None:
    whole = record(experiment_of(), RunFolder(tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert go_on(tmp_path / "b").digest == whole.digest


VALUES = {1: 0.2, 2: 0.7, 3: 0.7, 4: 0.6}


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[str]]:
    """Validation accuracies by round are given in advance, so that the best round is known. Returns who gives none in which round."""
    original = Experiment.evaluate
    quiet: dict[int, set[str]] = {}

    def given(self: Experiment, split: str = "test", newcomer: str | None = None) -> list[Row]:
        number = self.server.round
        if split == "validation":
            heard = [client for client in self.server.ids if client not in quiet.get(number, ())]
            return [Row("validation", client, client, {"accuracy": VALUES[number]}) for client in heard]
        return original(self, split, newcomer)

    monkeypatch.setattr(Experiment, "evaluate", given)
    return quiet


def select(folder: Path | None, method: str = "fedbn", stop: int | None = None, **changes: Any) -> Any:
    experiment = experiment_of(method, selection="best_validation", **changes)

    def cut(server: Any) -> None:
        if server.round == stop:
            raise Killed

    return record(experiment, None if folder is None else RunFolder(folder), observers=[cut])


def chosen_round(folder: Path) -> set[int]:
    return {line["selected_round"] for line in RunFolder(folder).metrics() if line["view"].startswith("selected_")}


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("method", ["fedbn", "hfedf"])
def test_the_best_validation_round_is_the_model_the_run_ends_with(tmp_path: Path, method: str) -> None:
    chosen = select(tmp_path / "run", method)
    at_two = record(experiment_of(method, rounds=2), None) if method != "hfedf" else None
    if at_two is not None:
        assert chosen.digest == at_two.digest and chosen.accuracy == at_two.accuracy
    assert chosen.digest == select(None, method).digest
    assert go_on(tmp_path / "run").digest == chosen.digest
    assert go_on(tmp_path / "run").accuracy == chosen.accuracy
    assert chosen_round(tmp_path / "run") == {2}
    scores = [line["accuracy"] for line in RunFolder(tmp_path / "run").metrics() if line["view"] == "validation"]
    assert scores[:: len(SIZES)] == list(VALUES.values())


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_selection_survives_a_kill(tmp_path: Path, stop: int) -> None:
    whole = select(tmp_path / "whole")
    with pytest.raises(Killed):
        select(tmp_path / "cut", stop=stop)
    assert go_on(tmp_path / "cut").digest == whole.digest
    assert RunFolder(tmp_path / "cut").metrics() == RunFolder(tmp_path / "whole").metrics()


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("damage", ["manifest", "server", "client", "all gone"])
def test_another_model_never_passes_for_the_best_one(tmp_path: Path, damage: str) -> None:
    with pytest.raises(Killed):
        select(tmp_path / "cut", stop=3)
    best = tmp_path / "cut" / "best"
    if damage == "all gone":
        shutil.rmtree(best)
    else:
        newest = sorted(best.glob(f"{damage}-*"))[-1]
        newest.write_bytes(newest.read_bytes()[:-7] + b"damaged")
    named = "manifest-000002.json" if damage == "all gone" else newest.name
    with pytest.raises(RunFolderError, match=rf'that of round 2, is lost: .*{named}.*another --out, or set selection = "last" in '):
        go_on(tmp_path / "cut")
    written = tmp_path / "cut" / "run.toml"
    written.write_text(written.read_text().replace('selection = "best_validation"', 'selection = "last"'))
    assert go_on(tmp_path / "cut").digest == record(experiment_of(), None).digest


def test_a_best_round_that_later_ones_overwrote_is_found_again_or_missed_aloud(
    tmp_path: Path, silent: dict[int, set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in round 4 with a checkpoint of round 1: the best of then lies under the two that came later."""
    for number, value in enumerate((0.1, 0.2, 0.3, 0.2), 1):
        monkeypatch.setitem(VALUES, number, value)
    whole = select(None)
    for name in ("found", "missed"):
        with pytest.raises(Killed):
            select(tmp_path / name, stop=1)
        checkpoint = tmp_path / name / "checkpoint"
        shutil.copytree(checkpoint, tmp_path / f"{name}-of-then")
        with pytest.raises(Killed):
            resume(tmp_path / name, data=tiny_federation(), model=tiny_net(), observers=[lambda server: _killed(server.round == 3)])
        shutil.rmtree(checkpoint)
        shutil.copytree(tmp_path / f"{name}-of-then", checkpoint)
        assert not (tmp_path / name / "best" / "manifest-000001.json").exists()
    assert go_on(tmp_path / "found").digest == whole.digest
    silent |= {number: {"small"} for number in (2, 3, 4)}
    with pytest.raises(RunFolderError, match=r"that of round 1, is lost: .*best holds later rounds only"):
        go_on(tmp_path / "missed")


def _killed(now: bool) -> None:
    if now:
        raise Killed


def test_rounds_are_compared_over_the_same_clients_only(
    tmp_path: Path, silent: dict[int, set[str]], caplog: pytest.LogCaptureFixture
) -> None:
    silent[2] = {"small", "big"}
    select(tmp_path / "run")
    assert chosen_round(tmp_path / "run") == {3}
    assert "Round 2 cannot be the best one: no validation scores came from big, small." in caplog.messages


def test_where_no_round_can_be_chosen_the_last_is_looked_at_again(tmp_path: Path, silent: dict[int, set[str]]) -> None:
    silent |= {number: set(SIZES) for number in VALUES}
    with pytest.raises(TooFewReplies, match="a round in which all 3 clients answer with validation scores, and there was none"):
        select(tmp_path / "run")
    silent.clear()
    assert go_on(tmp_path / "run").digest == record(experiment_of(), None).digest
    assert chosen_round(tmp_path / "run") == {4}


def test_selection_without_validation_data_is_refused_before_training() -> None:
    federation = tiny_federation()
    first, *others = federation.clients
    bare = replace(federation, clients=(replace(first, validation=None), *others))
    with pytest.raises(DataError, match=r"1 of 3 clients of tiny have none \(big\)\. Use --selection last"):
        Experiment(Settings(selection="best_validation"), bare, model=tiny_net())
    Experiment(Settings(), bare, model=tiny_net())
