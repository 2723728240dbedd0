"""What a client keeps on its disk: versions are exact, nothing half-written counts, nobody's needed version is removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from polyfed.core.workbench import ClientState, client_digest
from polyfed.errors import ClientFailure
from polyfed.runs.folder.client_state_files import ClientStateFiles, read_states, version_name

RUN = "0" * 31 + "1"


def kept(number: int) -> ClientState:
    return ClientState({"bn.weight": torch.full((3,), float(number))}, {"count": number, "bank": [torch.arange(number)]})


@pytest.fixture
def state(tmp_path: Path) -> ClientStateFiles:
    return ClientStateFiles(tmp_path, RUN, "sketch")


def name(number: int, begun: int = 5) -> str:
    return version_name(begun, number, number, 0)


def test_a_version_comes_back_to_the_bit_and_with_its_digest(state: ClientStateFiles) -> None:
    digest = state.store(name(1), kept(1))
    assert digest == client_digest(kept(1))
    assert client_digest(state.load(name(1), digest)) == digest


def test_the_named_version_is_used_not_the_newest(state: ClientStateFiles) -> None:
    digest = state.store(name(1), kept(1))
    state.store(name(2), kept(2))
    assert state.load(name(1), digest).memory["count"] == 1


def test_a_missing_version_is_refused_and_the_sentence_names_it(state: ClientStateFiles) -> None:
    state.store(name(1), kept(1))
    with pytest.raises(ClientFailure, match=rf"sketch: the server requests version {name(3)}.*Existing versions: {name(1)}"):
        state.load(name(3), "")


def test_a_damaged_or_exchanged_version_is_refused(state: ClientStateFiles) -> None:
    digest = state.store(name(1), kept(1))
    path = state.folder / f"{name(1)}.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ClientFailure, match="cannot read"):
        state.load(name(1), digest)
    path.write_bytes(whole[:-4] + b"\1\2\3\4")
    with pytest.raises(ClientFailure, match="digest does not match"):
        state.load(name(1), digest)


def test_only_what_nobody_needs_is_removed(state: ClientStateFiles) -> None:
    for number in range(1, 6):
        state.store(name(number), kept(number))
    state.tidy({name(2), name(4)}, before=name(5))
    assert state.versions() == [name(2), name(4), name(5)]


def test_an_ask_that_comes_late_removes_nothing_newer_than_itself(state: ClientStateFiles) -> None:
    state.store(name(1), kept(1))
    state.store(name(2, begun=9), kept(2))
    state.store(name(7), kept(7))
    state.tidy(set(), before=name(3))
    assert state.versions() == [name(7), name(2, begun=9)]


@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_a_node_that_dies_while_writing_leaves_the_version_before(
    state: ClientStateFiles, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    digest = state.store(name(1), kept(1))

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if moment == "write":
            patch.setattr("polyfed.runs.folder.client_state_files.packed", die)
        elif moment == "fsync":
            patch.setattr(os, "fsync", die)
        else:
            patch.setattr(Path, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            state.store(name(2), kept(2))
    assert state.versions() == [name(1)]
    assert state.load(name(1), digest).memory["count"] == 1
    state.store(name(3), kept(3))
    state.tidy({name(1)}, before=name(3))
    assert sorted(path.name for path in state.folder.iterdir()) == [f"{name(1)}.safetensors", f"{name(3)}.safetensors"]


def test_a_full_disk_is_said(state: ClientStateFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ClientFailure, match=r"sketch: cannot write.*No space left"):
        state.store(name(1), kept(1))


def test_the_server_cannot_reach_other_files(state: ClientStateFiles) -> None:
    for wrong in ("../../etc/passwd", "", "x", name(1) + "/.."):
        with pytest.raises(ClientFailure, match="is not a valid version"):
            state.load(wrong, "")
        with pytest.raises(ClientFailure, match="is not a valid version"):
            state.store(wrong, kept(1))


def test_runs_and_clients_are_apart_and_a_wrong_run_is_refused(tmp_path: Path) -> None:
    places = {ClientStateFiles(tmp_path, run, client).folder for run in (RUN, "a" * 32) for client in ("a", "../b")}
    assert len(places) == 4
    assert all(place.resolve().is_relative_to(tmp_path.resolve()) for place in places)
    with pytest.raises(ClientFailure, match="not a valid run id"):
        ClientStateFiles(tmp_path, "../x", "a")


def test_only_this_user_may_look(state: ClientStateFiles) -> None:
    state.store(name(1), kept(1))
    assert state.folder.stat().st_mode & 0o077 == 0


def test_versions_are_ordered_by_their_names() -> None:
    made = [version_name(1, 2, 1, 0), version_name(1, 10, 2, 0), version_name(2, 1, 1, 0), version_name(255, 1, 1, 0)]
    assert made == sorted(made)


def test_a_simulated_run_can_be_looked_at_without_flower(state: ClientStateFiles, tmp_path: Path) -> None:
    digest = state.store(name(1), kept(1))
    marker = ClientState(memory={"run": RUN, "version": name(1), "digest": digest})
    assert client_digest(read_states(tmp_path, {"sketch": marker})["sketch"]) == digest
