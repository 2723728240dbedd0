"""One worker: a forked process that holds the model and the data, answers for clients, and dies with its parent.

Forking gives it everything the parent has, without importing or copying. What that brings along and must not be used twice is put
aside first: signal handlers, log handlers, half-written output, the parent's ends of other lines, exit hooks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeAlias

import torch
from torch import Tensor

from polyfed.backends.client_store import ClientStore
from polyfed.backends.shared_memory import Json, Mark, SharedMemory, Spot, joined, parted
from polyfed.core.rounds import TRAINING, Payload, Request
from polyfed.core.workbench import ClientState
from polyfed.errors import ClientFailure, PolyfedError

if TYPE_CHECKING:
    from polyfed.backends.base import Outcome
    from polyfed.backends.in_process import InProcess

SET_PARENT_DEATH_SIGNAL = 1
BLOCKED_SIGNALS = {signal.SIGINT, signal.SIGTERM}

# A worker must not hold the parent's end of another's line open: its reader would never see the end of it.
parent_ends: weakref.WeakSet[Connection] = weakref.WeakSet()

# The parent's streams, in a child: what still lies in them is the parent's to write, and would be written if they were let go of.
inherited: list[TextIO] = []

# Tensors that were sent, by id: how the parent calls them, and their version, by which a change in place shows. The tensor is stored too, so that its id stays its own.
Marks: TypeAlias = dict[int, tuple[Mark, int, Tensor]]


class Worker:
    """A worker as its parent sees it."""

    def __init__(self, inner: InProcess, shared: SharedMemory) -> None:
        self.request, self.response = SharedMemory(), SharedMemory()
        self.line, far_end = Pipe()
        parent_ends.add(self.line)
        self.owner = os.getpid()
        self.pid = forked(lambda: WorkerLoop(inner, far_end, shared, self.request, self.response).serve())
        far_end.close()
        self.serial = -1
        self.known_spots = self.known_trees = 0

    def kill(self) -> None:
        """Begin to end the process; it has nothing that could be lost. A process of another parent is not touched."""
        if self.owner == os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def end(self) -> str:
        """End the process, if it has not ended itself, and say how it ended."""
        self.line.close()
        self.request.close()
        self.response.close()
        if self.owner != os.getpid():
            return "left to its own parent"
        self.kill()
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # somebody else in this program waits for all children, or ignores SIGCHLD
            return "ended"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def forked(work: Callable[[], None]) -> int:
    """The id of a new process that does this work and nothing else."""
    _flush()
    # The kernel tells a child when the thread that forked it ends; only the main thread lasts as long as the process.
    dies_with_thread = threading.current_thread() is threading.main_thread()
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    try:
        with warnings.catch_warnings():
            # Python warns of threads in general: torch uses one in the child, and log locks are made again.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _be_child(work, parent if dies_with_thread else None, mask)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _be_child(work: Callable[[], None], parent: int | None, mask: set[int | signal.Signals]) -> NoReturn:
    """Live as a child; nothing of the parent's program is ever returned to."""
    try:
        if parent is not None:
            ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
        _put_aside(mask)
        work()
    except BaseException:
        os.write(2, f"polyfed: a worker process failed.\n{traceback.format_exc()}".encode())
        os._exit(1)
    finally:
        os._exit(0)


def _put_aside(mask: set[int | signal.Signals]) -> None:
    """Give up what belongs to the parent."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what a Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for end in list(parent_ends):
        end.close()
    # Where memory runs out, a worker is lost rather than the parent. Not every machine lets a process say so.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
    inherited.extend((sys.stdout, sys.stderr))
    sys.stdout, sys.stderr = _stream(1, sys.stdout), _stream(2, sys.stderr)
    gc.freeze()  # what is here now is the parent's: looking through it would copy its memory
    torch.set_num_threads(1)


def _stream(number: int, before: TextIO) -> TextIO:
    """A stream of its own to where the parent's leads; a program started without one has None in its place."""
    return before and open(number, "w", buffering=1, closefd=False, errors="backslashreplace")


def _flush() -> None:
    """Write out what was printed. Unlike the streams' own flush, print puts up with a stream that is None."""
    print(end="", flush=True)
    print(end="", file=sys.stderr, flush=True)


class Notes(logging.Handler):
    """Log records and warnings, collected for the parent, which shows them once and in order."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Json] = []

    def listen(self) -> None:
        """Take the place of all handlers."""
        known = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
        for logger in known:
            logger.handlers, logger.propagate = [], True
        logging.root.handlers = [self]
        warnings.showwarning = self.warned

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
        self.records.append(["log", record.name, record.levelno, text, record.pathname, record.lineno])

    def warned(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        self.records.append(["warning", class_name(category), 0, str(message), filename, lineno])

    def taken(self) -> list[Json]:
        """What was collected since the last time."""
        records, self.records = self.records, []
        return records


class WorkerLoop:
    """Reads what is asked, lets clients answer, and lays the answers out; runs in the worker."""

    def __init__(
        self, inner: InProcess, line: Connection, shared: SharedMemory, request: SharedMemory, response: SharedMemory
    ) -> None:
        self.inner, self.line, self.shared, self.request, self.response = inner, line, shared, request, response
        self.notes = Notes()
        self.serial = -1
        self.shared_tensors: list[Tensor] = []
        self.shared_payloads: list[Payload] = []
        self.shared_marks: Marks = {}

    def serve(self) -> None:
        """Answer until the parent is gone."""
        self.notes.listen()
        while True:
            try:
                text = self.line.recv_bytes()
            except (EOFError, ConnectionError):
                return
            answer = self.answered(json.loads(text))
            _flush()
            try:
                self.line.send_bytes(json.dumps(answer).encode())
            except ConnectionError:
                return

    def answered(self, message: Json) -> Json:
        """Let the clients of a message answer; a failure comes after the answers before it."""
        self.response.clear()
        answer: dict[str, Any] = {"own": [], "outcomes": []}
        try:
            request, states, marks = self.unpacked(message)
            self.inner.client_states, self.inner.staged = states, ClientStore()
            for outcome in self.inner.outcomes(request, list(states)):
                answer["outcomes"].append(self.packed(request, outcome, marks, answer["own"]))
        except Exception as error:
            answer["error"] = [class_name(type(error)), str(error), traceback.format_exc()]
        self.inner.client_states = {}
        answer["notes"] = self.notes.taken()
        return answer

    def unpacked(self, message: Json) -> tuple[Request, dict[str, ClientState], Marks]:
        """What is asked of whom, what they keep, and by which marks the parent knows the tensors that were sent."""
        serial, what, purpose, number, attempt, together = message["ask"]
        if serial != self.serial:
            self.serial, self.shared_tensors, self.shared_payloads, self.shared_marks = serial, [], [], {}
        for spot in message["spots"]:
            value = self.shared.view(Spot(*spot))
            self.shared_marks[id(value)] = {"shared": len(self.shared_tensors)}, value._version, value
            self.shared_tensors.append(value)
        own = [self.request.view(Spot(*spot)) for spot in message["own"]]
        marks = self.shared_marks | {id(value): ({"sent": place}, value._version, value) for place, value in enumerate(own)}

        def tensor(kind: str, place: int) -> Tensor:
            return self.shared_tensors[place] if kind == "shared" else own[place]

        self.shared_payloads += [Payload(*joined(tree, tensor)) for tree in message["trees"]]
        payloads, states = {}, {}
        for client, payload, state in message["clients"]:
            payloads[client] = self.shared_payloads[payload] if isinstance(payload, int) else Payload(*joined(payload, tensor))
            states[client] = ClientState() if state is None else ClientState(*joined(state, tensor))
        return Request(what, payloads, purpose, number, attempt, together), states, marks

    def packed(self, request: Request, outcome: Outcome, marks: Marks, own: list[Spot]) -> Json:
        """An outcome as JSON, its tensors laid out; those that were sent and are as they were are only named."""

        def mark(value: Tensor) -> Mark:
            known = marks.get(id(value))
            if known is not None and value._version == known[1]:
                return known[0]
            own.append(self.response.put(value))
            return {"own": len(own) - 1}

        try:
            payload = None if outcome.payload is None else parted((outcome.payload.entries, outcome.payload.extras), mark)
            keeps = request.purpose == TRAINING and outcome.payload is not None
            state = parted((outcome.state.entries, outcome.state.memory), mark) if keeps else None
        except TypeError as error:
            raise ClientFailure(f"Client {outcome.client}, round {request.round}, question {request.what!r}: {error}") from error
        return [outcome.client, payload, state, outcome.loss, outcome.problem, outcome.validation]


class InWorker(Exception):
    """What a worker's stack looked like when it failed."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def class_name(kind: type) -> str:
    """A name by which the other process finds a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def class_named(name: str, root: type) -> type | None:
    """The class of this name at or below another one."""
    waiting = [root]
    while waiting:
        kind = waiting.pop()
        if class_name(kind) == name:
            return kind
        waiting += kind.__subclasses__()
    return None


def failure(name: str, text: str, stack: str) -> Exception:
    """A worker's error, as the class it was, where its text is enough to make it."""
    kind = class_named(name, PolyfedError) or (class_named(name, Exception) if name.startswith("builtins.") else None)
    error: Exception
    try:
        error = kind(text) if kind is not None else ClientFailure(f"{name}: {text}")
    except TypeError:
        error = ClientFailure(f"{name}: {text}")
    error.__cause__ = InWorker(stack)
    return error


def show(note: Json, once: dict[Any, Any]) -> None:
    """Log or warn in the parent what a worker noted."""
    kind, name, level, text, file, line = note
    if kind == "log":
        logger = logging.getLogger(name)
        logger.handle(logger.makeRecord(name, level, file, line, text, (), None))
        return
    category = class_named(name, Warning) or UserWarning
    warnings.warn_explicit(text, category, file, line, registry=once)
