"""A worker: a forked process that has the model and the data, runs clients, and ends with its parent."""

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
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeAlias

import torch
from torch import Tensor

from polyfed.backends.client_store import ClientStore
from polyfed.backends.process_memory import private_peak, private_size, reset_peak
from polyfed.backends.shared_memory import Json, Mark, SharedMemory, Spot, to_json, to_tree
from polyfed.core.rounds import TRAINING, Payload, Request
from polyfed.core.workbench import ClientState, give_back
from polyfed.errors import ClientFailure, NotFinite, PolyfedError

if TYPE_CHECKING:
    from polyfed.backends.base import Outcome
    from polyfed.backends.in_process import InProcess

SET_PARENT_DEATH_SIGNAL = 1
BLOCKED_SIGNALS = {signal.SIGINT, signal.SIGTERM}

# A worker closes the parent's ends of the other pipes. Otherwise the other workers would not notice that the parent has ended.
parent_ends: weakref.WeakSet[Connection] = weakref.WeakSet()

# References to the parent's streams. If a child deleted them, it would write the parent's buffered output a second time.
inherited: list[TextIO] = []

# Received tensors by id: the parent's mark, the version (to detect changes in place), and the tensor (so that its id is not reused).
Marks: TypeAlias = dict[int, tuple[Mark, int, Tensor]]


class Worker:
    def __init__(self, inner: InProcess, shared: SharedMemory) -> None:
        self.request, self.response = SharedMemory(), SharedMemory()
        self.pipe, far_end = Pipe()
        parent_ends.add(self.pipe)
        self.owner = os.getpid()
        self.memory = 0
        self.pid = fork(lambda: WorkerLoop(inner, far_end, shared, self.request, self.response).serve())
        far_end.close()
        self.serial = -1
        self.known_spots = self.known_trees = 0

    def kill(self) -> None:
        """Kill the process, unless it has another parent. It has no state that could be lost."""
        if self.owner == os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def end(self) -> str:
        """End the process if it is still running, and return how it ended."""
        self.pipe.close()
        self.request.close()
        self.response.close()
        if self.owner != os.getpid():
            return "left to its own parent"
        self.kill()
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # other code in this program waits for all children, or ignores SIGCHLD
            return "ended"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def is_worker() -> bool:
    """Return True in a worker process."""
    return bool(inherited)


def fork(work: Callable[[], None]) -> int:
    """Start a process that only calls ``work``, and return its id."""
    _flush()
    # The kernel signals a child when the thread that forked it ends. Only the main thread lives as long as the process.
    dies_with_thread = threading.current_thread() is threading.main_thread()
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    try:
        with warnings.catch_warnings():
            # Python warns about forking with threads. This is safe here: the child uses one torch thread and new log locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _run_child(work, parent if dies_with_thread else None, mask)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _run_child(work: Callable[[], None], parent: int | None, mask: set[int | signal.Signals]) -> NoReturn:
    try:
        if parent is not None:
            ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
        _release_inherited(mask)
        work()
    except BaseException:
        os.write(2, f"polyfed: a worker process failed.\n{traceback.format_exc()}".encode())
        os._exit(1)
    finally:
        os._exit(0)


def _release_inherited(mask: set[int | signal.Signals]) -> None:
    """Release what belongs to the parent: signal handlers, its ends of other pipes, buffered output."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for end in list(parent_ends):
        end.close()
    # If memory runs out, the kernel kills a worker rather than the parent. Some systems do not permit this setting.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
    inherited.extend((sys.stdout, sys.stderr))
    sys.stdout, sys.stderr = _stream(1, sys.stdout), _stream(2, sys.stderr)
    gc.freeze()  # collecting the parent's objects would copy their memory
    torch.set_num_threads(1)


def _stream(number: int, before: TextIO) -> TextIO:
    """Open a separate stream to the same file descriptor; None if the program was started without this stream."""
    return before and open(number, "w", buffering=1, closefd=False, errors="backslashreplace")


def _flush() -> None:
    """Flush both streams. Unlike their ``flush``, print accepts a stream that is None."""
    print(end="", flush=True)
    print(end="", file=sys.stderr, flush=True)


class Notes(logging.Handler):
    """Collects log records and warnings for the parent, which shows them once and in order."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Json] = []

    def install(self) -> None:
        """Replace all log handlers and the handler of warnings."""
        known = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
        for logger in known:
            logger.handlers, logger.propagate = [], True
        logging.root.handlers = [self]
        warnings.showwarning = self._add_warning

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
        self.records.append(["log", record.name, record.levelno, text, record.pathname, record.lineno])

    def _add_warning(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        self.records.append(["warning", class_name(category), 0, str(message), filename, lineno])


class WorkerLoop:
    """Receives requests in the worker, runs the clients and sends their outcomes."""

    def __init__(
        self, inner: InProcess, pipe: Connection, shared: SharedMemory, request: SharedMemory, response: SharedMemory
    ) -> None:
        self.inner, self.pipe, self.shared, self.request, self.response = inner, pipe, shared, request, response
        self.notes = Notes()
        self.serial = -1
        self.shared_tensors: list[Tensor] = []
        self.shared_payloads: list[Payload] = []
        self.shared_marks: Marks = {}
        self.purpose = ""
        self.size_at_start: int | None = None

    def serve(self) -> None:
        self.notes.install()
        give_back()
        self.size_at_start = private_size()
        while True:
            try:
                text = self.pipe.recv_bytes()
            except (EOFError, ConnectionError):
                return
            response = self.respond(json.loads(text))
            _flush()
            try:
                self.pipe.send_bytes(json.dumps(response).encode())
            except ConnectionError:
                return

    def respond(self, message: Json) -> Json:
        """Return the outcomes of a request, the error that ended them if a client failed, and the CPU time and memory used."""
        start, bench = time.process_time(), self.inner.bench
        self.response.clear()
        response: dict[str, Any] = {"own": [], "outcomes": []}
        bench.answers = {} if message["wants_answers"] else None
        try:
            request, states, marks = self.unpack(message)
            self.measure_memory(request.purpose)
            self.inner.client_states, self.inner.staged = states, ClientStore()
            for outcome in self.inner.outcomes(request, list(states)):
                response["outcomes"].append(self.pack(request, outcome, marks, response["own"]))
        except Exception as error:
            arguments = list(error.args) if isinstance(error, NotFinite) else [str(error)]
            response["error"] = [class_name(type(error)), arguments, traceback.format_exc()]
        self.inner.client_states = {}

        def mark(value: Tensor) -> Mark:
            response["own"].append(self.response.put(value))
            return {"own": len(response["own"]) - 1}

        response["answers"] = [[list(key), to_json(dict(found), mark)] for key, found in (bench.answers or {}).items()]
        response["cpu_seconds"], response["memory"] = time.process_time() - start, self.peak_of_training()
        response["notes"], self.notes.records = self.notes.records, []
        return response

    def measure_memory(self, purpose: str) -> None:
        """Reset the peak when training starts, after returning the memory that evaluations freed."""
        if purpose == TRAINING != self.purpose:
            give_back()
            reset_peak()
        self.purpose = purpose

    def peak_of_training(self) -> int:
        """Return the bytes that training added to this process since its start."""
        peak = private_peak() if self.purpose == TRAINING else None
        return 0 if peak is None or self.size_at_start is None else max(0, peak - self.size_at_start)

    def unpack(self, message: Json) -> tuple[Request, dict[str, ClientState], Marks]:
        """Return the request, the client states, and the parent's marks of the received tensors."""
        serial, what, purpose, number, attempt, together = message["request"]
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

        self.shared_payloads += [Payload(*to_tree(tree, tensor)) for tree in message["trees"]]
        payloads, states = {}, {}
        for client, payload, state in message["clients"]:
            payloads[client] = self.shared_payloads[payload] if isinstance(payload, int) else Payload(*to_tree(payload, tensor))
            states[client] = ClientState() if state is None else ClientState(*to_tree(state, tensor))
        return Request(what, payloads, purpose, number, attempt, together), states, marks

    def pack(self, request: Request, outcome: Outcome, marks: Marks, own: list[Spot]) -> Json:
        """Convert an outcome to JSON. New or changed tensors are copied to shared memory; the others keep the parent's mark."""

        def mark(value: Tensor) -> Mark:
            known = marks.get(id(value))
            if known is not None and value._version == known[1]:
                return known[0]
            own.append(self.response.put(value))
            return {"own": len(own) - 1}

        try:
            payload = None if outcome.payload is None else to_json((outcome.payload.entries, outcome.payload.extras), mark)
            has_new_state = request.purpose == TRAINING and outcome.payload is not None
            state = to_json((outcome.state.entries, outcome.state.memory), mark) if has_new_state else None
        except TypeError as error:
            raise ClientFailure(f"Client {outcome.client}, round {request.round}, request {request.what!r}: {error}") from error
        return [outcome.client, payload, state, outcome.loss, outcome.problem, outcome.validation]


class WorkerTraceback(Exception):
    """The stack trace of a worker that failed."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def find_class(name: str, root: type) -> type | None:
    """Return the class with this name among ``root`` and its subclasses."""
    pending = [root]
    while pending:
        kind = pending.pop()
        if class_name(kind) == name:
            return kind
        pending += kind.__subclasses__()
    return None


def rebuild_error(name: str, arguments: Sequence[Any], stack: str) -> Exception:
    """Rebuild a worker's error in its original class if the arguments are sufficient, otherwise as a ClientFailure."""
    kind = find_class(name, PolyfedError) or (find_class(name, Exception) if name.startswith("builtins.") else None)
    error: Exception
    try:
        error = kind(*arguments) if kind is not None else ClientFailure(f"{name}: {arguments[0]}")
    except TypeError:
        error = ClientFailure(f"{name}: {arguments[0]}")
    error.__cause__ = WorkerTraceback(stack)
    return error


def show(note: Json, registry: dict[Any, Any]) -> None:
    kind, name, level, text, file, line = note
    if kind == "log":
        logger = logging.getLogger(name)
        logger.handle(logger.makeRecord(name, level, file, line, text, (), None))
        return
    category = find_class(name, Warning) or UserWarning
    warnings.warn_explicit(text, category, file, line, registry=registry)
