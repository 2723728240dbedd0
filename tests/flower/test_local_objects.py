"""Objects of a SuperNode over its unix socket: stored and found as over HTTP, and reached by its own account only."""

from __future__ import annotations

import hashlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode.nodestate import NodeState, NodeStateFactory

from polyfed.flower.wire import local_objects
from polyfed.flower.wire.local_objects import (
    connected,
    counted_tasks,
    is_offered,
    place_of,
    pull_from,
    push_to,
    receive,
    serve,
    use_objects,
    waiting_for_work,
)

RUN, ADDRESS = 7, "127.0.0.1:9094"
CONTENT = b"ArrayChunk  3000000\x00" + os.urandom(3_000_000)
NAME = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    return place_of(ADDRESS)


@pytest.fixture
def state(place: Path) -> Iterator[NodeState]:
    """The state of a SuperNode that offers its objects."""
    found = NodeStateFactory(objectstore_factory=ObjectStoreFactory()).state()
    server = serve(place, found, counted_tasks(found))
    yield found
    server.shutdown()
    server.server_close()


def session(state: NodeState) -> str:
    """A session in which the object is expected."""
    number = state.start_session(RUN)
    state.preregister_object_tree(ObjectTree(object_id=NAME), number)
    return number


def test_an_object_that_is_pushed_is_pulled_as_it_was(state: NodeState, place: Path) -> None:
    push_to(place, RUN, session(state))(NAME, CONTENT)
    assert state.get_object(RUN, NAME) == CONTENT
    assert pull_from(place, RUN)(NAME) == CONTENT


def test_errors_are_those_of_flower(state: NodeState, place: Path) -> None:
    with pytest.raises(ObjectPullError, match="was not found"):
        pull_from(place, RUN)(NAME)
    expected = session(state)
    with pytest.raises(ObjectPushError):
        push_to(place, RUN, "another session")(NAME, CONTENT)
    with pytest.raises(ObjectPushError):
        push_to(place, RUN + 1, expected)(NAME, CONTENT)


def test_who_pulls_an_object_that_is_still_on_its_way_gets_it_when_it_is_there(state: NodeState, place: Path) -> None:
    expected = session(state)
    with ThreadPoolExecutor(1) as pool:
        pulled = pool.submit(pull_from(place, RUN), NAME)
        with pytest.raises(TimeoutError):
            pulled.result(0.3)
        push_to(place, RUN, expected)(NAME, CONTENT)
        assert pulled.result(60) == CONTENT


def test_who_waits_for_work_is_told_when_there_is_a_task(state: NodeState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_objects, "LONGEST_WAIT", 60.0)
    waiting = waiting_for_work(ADDRESS)
    assert waiting is not None
    with waiting:
        assert not select.select([waiting], [], [], 0.3)[0]
        state.create_task(task_type="flwr-clientapp", run_id=RUN, fab_hash="")
        assert receive(waiting)[0]["task"]


def test_a_task_that_was_made_before_anybody_waited_is_told_at_once(state: NodeState) -> None:
    state.create_task(task_type="flwr-clientapp", run_id=RUN, fab_hash="")
    waiting = waiting_for_work(ADDRESS)
    assert waiting is not None
    with waiting:
        assert receive(waiting)[0]["task"]


def test_who_waits_long_looks_in_any_case(state: NodeState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_objects, "LONGEST_WAIT", 0.1)
    waiting = waiting_for_work(ADDRESS)
    assert waiting is not None
    with waiting:
        assert receive(waiting)[0]["task"] is False


def test_a_side_that_has_answered_and_gone_is_no_error() -> None:

    class Gone:
        sent = b""

        def sendall(self, data: bytes) -> None:
            if self.sent:
                raise BrokenPipeError
            self.sent += data

    local_objects.send(Gone(), {"run": RUN, "object": NAME})  # type: ignore[arg-type]


def test_content_that_is_not_what_its_id_says_is_not_stored(state: NodeState, place: Path) -> None:
    with pytest.raises(ObjectPushError):
        push_to(place, RUN, session(state))(NAME, CONTENT[:-1] + b"x")
    assert state.get_object(RUN, NAME) in (None, b"")


def test_a_head_without_end_is_refused(state: NodeState, place: Path) -> None:
    with connected(place) as connection:
        connection.sendall((2**40).to_bytes(8, "little"))
        with pytest.raises(ConnectionResetError):
            receive(connection)
    assert is_offered(place)


def test_only_this_account_may_enter_its_folder(place: Path) -> None:
    assert place.parent.stat().st_mode & 0o777 == 0o700


def test_where_no_supernode_listens_clientapps_use_http(place: Path) -> None:
    assert waiting_for_work(ADDRESS) is None
    code = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen()"
    for prepare in (lambda: None, lambda: subprocess.run([sys.executable, "-c", code, str(place)], check=True)):
        prepare()
        module = SimpleNamespace(
            make_pull_object_fn_protobuf=lambda *_: "pull over HTTP", make_push_object_fn_protobuf=lambda *_: "push over HTTP"
        )
        use_objects(module, ADDRESS)  # type: ignore[arg-type]
        assert module.make_pull_object_fn_protobuf(None, None, RUN) == "pull over HTTP"
        assert module.make_push_object_fn_protobuf(None, None, RUN, "") == "push over HTTP"


def test_where_one_listens_they_use_its_socket(state: NodeState, place: Path) -> None:
    module = SimpleNamespace(make_pull_object_fn_protobuf=None, make_push_object_fn_protobuf=None)
    use_objects(module, ADDRESS)  # type: ignore[arg-type]
    module.make_push_object_fn_protobuf(None, None, RUN, session(state))(NAME, CONTENT)
    assert module.make_pull_object_fn_protobuf(None, None, RUN)(NAME) == CONTENT
