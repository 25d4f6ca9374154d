"""The rank's side of the process that writes its shards behind training (`writer_process.py`).

One request at a time. What goes wrong over there is an error here, within a deadline: the write
fails, the process dies, hangs, or says what cannot be understood. In the last three cases it is
killed, and the next request gets a new one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from hpctrain.checkpoint.format.shard import ShardReport
from hpctrain.checkpoint.tensors.writer_process import (
    FRAME,
    WriteFailure,
    WriteRequest,
    frame,
)
from hpctrain.core.base import clock
from hpctrain.core.base.files import PACKAGE
from hpctrain.core.base.process import OF_STEPS
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpctrain.checkpoint.tensors.arena import Arena

PATIENCE_S = 2.0
"""For a killed process to be gone: one that hangs in the kernel (a dead file system) stays."""
LOOK_S = 0.2
"""How often a wait looks whether the process is alive: its end of the socket can outlive it in a
process that the rank forked meanwhile."""
ANSWER_S = 10.0
"""For the rest of an answer that has begun: it comes out of memory, and a shard that was written
must not be given up for it."""
MAX_ANSWER_BYTES = 1 << 30
NICE = 10
"""How much the process steps back behind training."""

BOOT = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
package, handle, rank_pid, *libraries = sys.argv[1:]
init = package + "/__init__.py"
spec = spec_from_file_location("hpctrain", init, submodule_search_locations=[package])
sys.modules["hpctrain"] = module = module_from_spec(spec)
spec.loader.exec_module(module)
sys.path += libraries
from hpctrain.checkpoint.tensors.writer_process import main
main(int(handle), int(rank_pid))
"""
"""Takes just this hpctrain, from where the rank has it: the rank's sys.path may differ from what a
new interpreter finds, and putting its entries first would let a user's `pickle.py` in."""


class WriterTimeout(CheckpointError, TimeoutError):
    """A shard was not written in the time that it had."""


class ShardWriter:
    """A process that writes shards.

    `begin` and `wait` are for one thread at a time; `abandon` and `close` may be called from any.
    In a process that was forked from the rank it does nothing: it is the rank's.
    """

    def __init__(self) -> None:
        """Start nothing yet: see `ready`."""
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._number = 0
        self._pending: WriteRequest | None = None
        self._abandoned = False
        self._closed = False
        self._left: list[subprocess.Popen[bytes]] = []
        self._process: _Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the process; None when the next request will start a new one."""
        process = self._process
        return None if process is None else process.popen.pid

    def ready(self) -> None:
        """Have a process there; on the main thread, before another thread calls `begin`.

        It takes requests about 0.2 s later, for which `begin` does not wait.

        Raises:
            CheckpointError: it cannot be started.
            RuntimeError: a request is in flight, the writer is closed, or this is not the main
                thread.
        """
        self._require_free()  # a new process would never answer what is in flight
        with self._lock:
            if self._process is None or self._process.dead():
                self._end()
                self._process = _Process()

    def begin(self, request: WriteRequest, arena: Arena) -> None:
        """Have a shard written; returns at once. The arena's bytes must stay until `wait` returns.

        Raises:
            CheckpointError: there is no process, or it has died; `ready` starts another.
            RuntimeError: a request is in flight, or the writer is closed.
        """
        self._require_free()
        with self._lock:
            process = self._process
            if process is None or process.dead():
                self._end()
                raise CheckpointError(
                    f"{request.path} was not written: its writer process has died; "
                    "the next save gets a new one"
                )
            self._abandoned = False
            self._number += 1
            try:
                process.send(self._number, request, arena)
            except BaseException as error:  # it may have been sent: its answer must not come
                self._end()
                if not isinstance(error, OSError):
                    raise
                raise CheckpointError(
                    f"{request.path} cannot be handed to the process that writes it: {error}"
                ) from error
            self._pending = request

    def wait(self, timeout_s: float) -> ShardReport:
        """Wait for the shard that was begun; other threads of the rank run meanwhile.

        Raises:
            CheckpointError: it was not written, for the reason that is in the message; the cause is
                an OSError with its errno where the system refused. The process may be a new one
                next time.
            WriterTimeout: it took too long; the process has been killed.
            RuntimeError: nothing was begun.
        """
        with self._lock:
            request, process = self._pending, self._process
            if request is None or process is None:
                if self._abandoned:
                    raise CheckpointError("the shard was not written: it was abandoned")
                raise RuntimeError("nothing is being written")
            try:
                answer = self._answer(request, process, clock.monotonic() + timeout_s)
            except BaseException:  # half an answer may have been read: nothing can follow it
                self._end()
                raise
            finally:
                self._pending = None
        if isinstance(answer, WriteFailure):
            raise CheckpointError(answer.message) from _system_error(answer)
        return answer

    def abandon(self) -> None:
        """Kill what is in flight, at once; a waiting caller gets an error."""
        if os.getpid() != self._owner or self._pending is None:
            return
        self._abandoned = True
        self._kill()
        with self._lock:
            if self._abandoned and self._pending is not None:
                self._end()
                self._pending = None

    def close(self) -> None:
        """Kill the process, whatever it does; nothing of it is left."""
        if os.getpid() != self._owner:
            return
        self._closed = self._abandoned = True
        self._kill()
        with self._lock:
            self._end()
            self._pending = None

    def _require_free(self) -> None:
        if self._pending is not None:
            raise RuntimeError(f"{self._pending.path} is still being written")
        if self._closed or os.getpid() != self._owner:
            raise RuntimeError("the writer is closed, or another process's")

    def _answer(
        self, request: WriteRequest, process: _Process, deadline: float
    ) -> ShardReport | WriteFailure:
        try:
            answer = process.answer(self._number, deadline, lambda: self._abandoned)
        except TimeoutError as error:
            self._end()
            raise WriterTimeout(
                f"{request.path} was not written in time and has been given up; is the file system "
                "slow or hung? checkpoint.timeout_s sets the time"
            ) from error
        except (EOFError, ConnectionError) as error:
            if self._abandoned:
                raise CheckpointError(
                    f"{request.path} was not written: it was abandoned"
                ) from error
            raise CheckpointError(
                f"{request.path} was not written: its writer process {process.fate()}; "
                "the next save gets a new one"
            ) from error
        except Exception as error:
            raise self._not_understood(request, error) from error
        if not isinstance(answer, ShardReport | WriteFailure):
            raise self._not_understood(request, TypeError(type(answer).__name__))
        return answer

    def _not_understood(self, request: WriteRequest, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{request.path} may not be written: the answer of its writer process makes no sense "
            f"({type(error).__name__}: {error}); the next save gets a new one"
        )

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            process.popen.kill()

    def _end(self) -> None:
        """No process is left behind: killed, and taken note of by this one."""
        process, self._process = self._process, None
        if process is not None and not process.end():
            self._left.append(process.popen)
        self._left = [popen for popen in self._left if popen.poll() is None]


class _Process:
    """A writer process and this end of the socket to it."""

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            # The kernel kills a process when the thread that started it ends.
            raise RuntimeError("a writer process is started by the main thread only")
        self._socket, theirs = socket.socketpair()
        package = str(PACKAGE)
        libraries = [str(Path(module.__path__[0]).parent) for module in (np, xxhash)]
        words = [package, str(theirs.fileno()), str(os.getpid()), *libraries]
        try:
            with theirs, _signals_held():
                self.popen = subprocess.Popen(
                    # -P: no module of the current directory's
                    [sys.executable, "-P", "-c", BOOT, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # whatever it says belongs into the rank's log
                    pass_fds=[theirs.fileno()],
                    env=_environment(),
                )
        except OSError as error:
            self._socket.close()
            raise CheckpointError(
                f"no process can be started to write checkpoints behind training: {error}; "
                'set checkpoint.mode = "sync"'
            ) from error
        # From here: by itself it would step back once Python has started, 0.1 s of CPU later. A
        # refusal costs training a little speed, no save.
        with contextlib.suppress(OSError):
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, self.popen.pid, min(own + NICE, 19))

    def send(self, number: int, request: WriteRequest, arena: Arena) -> None:
        """Hand a request over; what goes through the socket fits in its buffer."""
        body = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
        handle = os.memfd_create("hpctrain-request", os.MFD_CLOEXEC)
        with os.fdopen(handle, "wb") as file:
            file.write(body)
            file.flush()
            socket.send_fds(self._socket, [frame(number, body)], [arena.fd, handle])

    def answer(self, number: int, deadline: float, abandoned: Callable[[], bool]) -> object:
        """Return the answer to a request.

        Raises:
            TimeoutError: not before the deadline.
            EOFError: the process ended without it, or was abandoned.
            ValueError: it is not an answer to this request.
        """
        answered, nbytes, digest = FRAME.unpack(self._read(FRAME.size, deadline, abandoned))
        if answered != number:
            raise ValueError(f"it answers request {answered}, not {number}")
        if nbytes > MAX_ANSWER_BYTES:
            raise ValueError(f"it announces {nbytes:,} bytes")
        body = self._read(nbytes, max(deadline, clock.monotonic() + ANSWER_S), abandoned)
        if xxhash.xxh3_64_intdigest(body) != digest:
            raise ValueError("its digest is another")
        answer: object = pickle.loads(body)  # noqa: S301 - from the process started above
        return answer

    def readable(self, timeout_s: float) -> bool:
        """Whether something can be read, be it the end, after so many seconds at most."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def dead(self) -> bool:
        return self.popen.poll() is not None

    def fate(self) -> str:
        if not self._gone(PATIENCE_S):
            return "has stopped answering"
        code = self.popen.returncode
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL (the kernel does that when memory is short)"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}, its last words are in the rank's log"

    def end(self) -> bool:
        """Kill it; False if it was not gone soon, as the kernel would not let it go."""
        self.popen.kill()
        self._socket.close()
        return self._gone(PATIENCE_S)

    def _gone(self, timeout_s: float) -> bool:
        try:
            self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _read(self, count: int, deadline: float, abandoned: Callable[[], bool]) -> bytearray:
        content = bytearray(count)
        left = memoryview(content)
        while left:
            while not self.readable(max(0.0, min(LOOK_S, deadline - clock.monotonic()))):
                if abandoned():
                    raise EOFError
                if self.dead() and not self.readable(0):
                    raise EOFError
                if clock.monotonic() >= deadline:
                    raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            taken = self._socket.recv_into(left)
            if taken == 0:
                raise EOFError
            left = left[taken:]
        return content


@contextmanager
def _signals_held() -> Iterator[None]:
    """Hold SLURM's signals; a process that is started meanwhile begins with them held.

    Without that, a signal would find it without handlers until it is set up.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_STEPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _environment() -> dict[str, str]:
    """The rank's, without a thread for each core: numpy starts those as it is imported."""
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **single}


def _system_error(failure: WriteFailure) -> OSError | None:
    number = failure.errno
    return None if number is None else OSError(number, os.strerror(number))
