"""Checkpoints: content, damage and digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save as save_safetensors

from helpers.recorded_runs import experiment_of, go_on, run_until
from helpers.tiny_runs import tiny_net
from helpers.watching import Messages
from polyfed.core.workbench import ClientState
from polyfed.errors import RunFolderError
from polyfed.runs.folder.checkpoint import Checkpoints, Snapshot, digest
from polyfed.runs.folder.manifest import manifest_files, sealed
from polyfed.runs.folder.paths import Reopening
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import resume, train_run
from polyfed.testing import tiny_federation
from polyfed.trees import Piece


def test_only_changed_clients_are_written(tmp_path: Path) -> None:
    train_run(experiment_of("silobn", clients_per_round=1, rounds=3), RunFolder(tmp_path / "run"))
    manifest = json.loads(manifest_files(tmp_path / "run" / "checkpoint")[0].read_text())
    stamps = {name.rsplit("-", 1)[1] for name in manifest["clients"].values()}
    assert manifest["round"] == 3 and len(manifest["clients"]) >= 1 and len(stamps) == len(manifest["clients"])


def test_old_files_are_tidied_and_two_checkpoints_kept(tmp_path: Path) -> None:
    train_run(experiment_of("fedavg", rounds=6), RunFolder(tmp_path / "run"))
    folder = tmp_path / "run" / "checkpoint"
    assert len(list(folder.glob("manifest-*.json"))) == 2
    assert len(list(folder.glob("server-*"))) == 2
    assert not list(folder.glob("*.part"))


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path) -> None:
    whole = train_run(experiment_of(), RunFolder(tmp_path / "whole"))
    run_until(tmp_path / "cut", 3)
    newest = sorted((tmp_path / "cut" / "checkpoint").glob("server-*"))[-1]
    newest.write_bytes(newest.read_bytes()[:-7] + b"damaged")
    told = Messages()
    result = resume(tmp_path / "cut", data=tiny_federation(), how=Reopening(model=tiny_net()), callbacks=[told])
    assert newest.name in told.texts[0] and result.digest == whole.digest


@pytest.mark.parametrize("damaged", ["manifest-", "server-"])
def test_a_run_goes_on_past_a_damaged_checkpoint_and_keeps_two_good_ones(tmp_path: Path, damaged: str) -> None:
    """Rounds 0, 2 and 4 are saved, and 4 is damaged. The run resumes from 2 and writes 3 before it replaces 4."""
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
    assert [path.name for path in manifest_files(tmp_path)] == ["manifest-000003.json", "manifest-000002.json"]
    assert sorted(path.name for path in tmp_path.glob("server-*")) == [f"server-00000{number}.safetensors" for number in (2, 3)]
    again.write(Snapshot(5, state), set())
    assert [path.name for path in manifest_files(tmp_path)] == ["manifest-000005.json", "manifest-000003.json"]


def test_no_good_checkpoint_left_is_said(tmp_path: Path) -> None:
    run_until(tmp_path / "cut", 2)
    for file in (tmp_path / "cut" / "checkpoint").glob("server-*"):
        file.write_bytes(b"")
    with pytest.raises(RunFolderError, match="no good checkpoint"):
        go_on(tmp_path / "cut")


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train_run(experiment_of(), RunFolder(tmp_path / "whole"))
    write = Checkpoints._write_file

    def full(self: Checkpoints, name: str, data: Sequence[Piece], sync: bool = False) -> None:
        if name.startswith("server-000002"):
            bytes_of_it = b"".join(data)
            (self.folder / f"{name}.part").write_bytes(bytes_of_it[: len(bytes_of_it) // 2])
            raise OSError(28, "No space left on device")
        write(self, name, data, sync)

    monkeypatch.setattr(Checkpoints, "_write_file", full)
    with pytest.raises(RunFolderError, match="No space left"):
        train_run(experiment_of(), RunFolder(tmp_path / "cut"))
    monkeypatch.undo()
    assert go_on(tmp_path / "cut").digest == whole.digest


def test_the_digest_sees_every_bit_and_no_order() -> None:
    state = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3)}
    base = Snapshot(1, state, {"m": 1}, {"x": ClientState({"l": torch.zeros(2)}, {"n": 1})})
    one = digest(base)
    assert one == digest(Snapshot(1, dict(reversed(state.items())), {"m": 1}, base.clients))
    changed = [
        Snapshot(1, state | {"a": torch.tensor([1.0, 2.0000002])}, {"m": 1}, base.clients),
        Snapshot(1, state | {"b": torch.tensor(3.0)}, {"m": 1}, base.clients),
        Snapshot(1, state, {"m": 2}, base.clients),
        Snapshot(1, state, {"m": 1}, {"x": ClientState({"l": torch.zeros(2)}, {"n": 2})}),
        Snapshot(1, state, {"m": 1}, {"y": base.clients["x"]}),
    ]
    assert len({one, *(digest(other) for other in changed)}) == 6


@settings(max_examples=1500, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_checkpoint_files_are_never_believed(cut_run: Path, data: st.DataObject) -> None:
    """After any change to a file of the newest checkpoint, reading returns the older one, the same values or None."""
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


def test_a_manifest_that_lacks_something_is_damaged_though_its_seal_is_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    train_run(experiment_of(rounds=1), folder)
    checkpoints = folder.checkpoints
    newest, *older = manifest_files(checkpoints.folder)
    for path in older:
        path.unlink()
    whole = json.loads(newest.read_text())
    del whole["seal"]
    odd: tuple[object, ...] = (None, "", 3.5, [], {})
    for key in ("format", "round", "server", "clients", "digests", "notes"):
        for value in ("lacking", *odd):
            manifest = {name: content for name, content in whole.items() if name != key}
            manifest |= {} if value == "lacking" else {key: value}
            newest.write_text(json.dumps(sealed(manifest)))
            snapshot, complaints = checkpoints.read()
            if key not in ("clients", "notes") or value != {}:
                assert snapshot is None and len(complaints) == 1, (key, value)


def test_a_tree_nested_thousands_deep_is_damage(tmp_path: Path) -> None:
    folder = Checkpoints(tmp_path)
    tree = '{"value": 1}'
    for _ in range(20_000):
        tree = f'{{"list": [{tree}]}}'
    content = save_safetensors({"x": torch.zeros(1)}, {"tree": tree})
    (tmp_path / "server-000001.safetensors").write_bytes(content)
    digests = {"server-000001.safetensors": hashlib.sha256(content).hexdigest()}
    manifest = {"format": 2, "round": 1, "server": "server-000001.safetensors", "clients": {}, "digests": digests, "notes": {}}
    (tmp_path / "manifest-000001.json").write_text(json.dumps(sealed(manifest)))
    snapshot, complaints = folder.read()
    assert snapshot is None and "RecursionError" in complaints[0]
