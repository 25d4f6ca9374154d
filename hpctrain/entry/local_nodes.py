"""How the nodes of a local job start: forked from its controller, where nothing speaks against it.

To import torch and what agents use takes seconds of CPU, for each node of each start. So the
controller imports it once, just before the first node, and forks its nodes from there. A forked
node must be what a process of its own would be. Where it would not, and
`NodeStarter._why_not_forked` says why, each node is started as a process of its own.

tests/unit/entry/test_local_nodes.py and tests/e2e/test_forked_nodes.py hold the promises.
"""

from __future__ import annotations

import io
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol, TextIO

from hpctrain.core.base.env import HPCTRAIN_JOB_END, HPCTRAIN_LOCAL_CONTEXT, HPCTRAIN_RESTARTS
from hpctrain.core.base.process import own_program, show_as
from hpctrain.node.agent import signals

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import NoReturn

    from hpctrain.core.base.records import JobContext
    from hpctrain.core.settings.spec import Spec
    from hpctrain.ledger.run.layout import RunDir

log = logging.getLogger("hpctrain.entry")

PROGRAM = "hpctrain.entry.local_node"
OF_EACH_START = frozenset({HPCTRAIN_LOCAL_CONTEXT, HPCTRAIN_RESTARTS, HPCTRAIN_JOB_END})
"""Variables that differ from start to start, and that nothing reads while it is imported."""


class Node(Protocol):
    """A node's agent, which leads a process group and a session.

    Attributes:
        pid: Its id.
        returncode: How it ended; None until `wait` has reaped it.
    """

    pid: int
    returncode: int | None

    def wait(self) -> int:
        """Wait for its end and reap it. Returns its exit code, negative for a signal."""


class ForkedNode:
    """A node that is a copy of this process; for the attributes see `Node`."""

    def __init__(self, run: Path, context: JobContext) -> None:
        """Fork it; it leads its own process group when this returns."""
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        has_begun, begins = os.pipe()
        # The node must note a stop signal as soon as it can get one.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, signals.SHIELDED)
        self.pid = os.fork()
        if self.pid == 0:
            os.close(has_begun)
            _live(run, context, begins, unblocked)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        os.close(begins)
        os.read(has_begun, 1)  # ends when the node has closed its end, or is gone
        os.close(has_begun)

    def wait(self) -> int:
        """See `Node`."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class LoadedFiles:
    """The files of the modules that this process has imported, as they were then."""

    def __init__(self) -> None:
        """Note those that are imported by now."""
        self._stamps: dict[str, tuple[int, ...]] = {}
        self.note()

    def note(self) -> None:
        """Note those that have been imported since."""
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None)
            if isinstance(path, str) and path not in self._stamps:
                self._stamps[path] = _stamp(path)

    def changed(self) -> str:
        """Return the path of a file that is another one by now; "" where none is."""
        return next((path for path, stamp in self._stamps.items() if _stamp(path) != stamp), "")


class NodeStarter:
    """Starts the nodes of one local job."""

    def __init__(self, run: RunDir) -> None:
        """Import nothing yet."""
        self._run = run
        self._files = LoadedFiles()
        self._imported_under: dict[str, str] = {}
        self._set_by_imports: list[str] = []
        self._spec: Spec | None = None
        self._why_own = ""

    def prepare(self, spec: Spec, context: JobContext) -> None:
        """Decide how the nodes of the next start begin; before the first, import what they use.

        `context` is the first node's; its port may still be open.
        """
        self._spec = spec
        self._why_own = self._why_not_forked(spec, context)
        if self._why_own:
            log.info("each node starts as a process of its own: %s", self._why_own)

    def start(self, context: JobContext) -> Node:
        """Start a node at its place in the job."""
        if self._spec is None:
            raise RuntimeError("prepare() comes before start()")
        root = self._run.root
        if not self._why_own:
            return ForkedNode(root, context)
        command = _command(self._spec.python, root)
        return subprocess.Popen(command, env=_environment(context), start_new_session=True)

    def _why_not_forked(self, spec: Spec, context: JobContext) -> str:
        """Return what speaks against forking the nodes; "" for nothing.

        OpenMP, MKL, CUDA and torch read their variables once, and one that an import has set would
        be lost.
        """
        if spec.python != sys.executable:
            return f"the run has another Python than the controller: {spec.python}"
        try:
            with _as_at_import(self._run, spec, context) as environment:
                if not self._imported_under:
                    self._import(spec, environment)
        except Exception as error:  # noqa: BLE001 - whatever it is, a node meets it too and says so
            return f"the imports have failed here: {type(error).__name__}: {error}"
        self._files.note()
        if names := [*differing(self._imported_under, environment), *self._set_by_imports]:
            return f"torch was imported here with another environment: {', '.join(names)}"
        if path := self._files.changed():
            return f"{path} has changed since it was imported here"
        return _in_the_way()

    def _import(self, spec: Spec, environment: dict[str, str]) -> None:
        from hpctrain.node.agent.preload import preload

        preload(spec)
        self._set_by_imports = differing(environment, os.environ)
        self._imported_under = environment


def differing(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that are not the same in both, but for `OF_EACH_START`."""
    names = (before.keys() | now.keys()) - OF_EACH_START
    return sorted(name for name in names if before.get(name) != now.get(name))


def _in_the_way() -> str:
    """Return what a fork would copy only half of; "" for nothing."""
    if _threads() > 1:
        _fork_in_vain()
    if (threads := _threads()) > 1:
        return f"the controller has {threads} threads"
    if sys.modules["torch"].cuda.is_initialized():
        return "CUDA is initialised in the controller"
    return ""


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - names alone


def _fork_in_vain() -> None:
    """Have OpenBLAS end the threads that it has made when numpy was imported.

    It does so before each fork, and makes them anew when somebody computes, which is not here.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


@contextmanager
def _as_at_import(run: RunDir, spec: Spec, context: JobContext) -> Iterator[dict[str, str]]:
    """Set the environment in which a node's agent imports torch; HpctrainError if it would fail."""
    from hpctrain.node.agent.environment import RankEnvironment

    before = dict(os.environ)
    _set_environment(_environment(context))
    try:
        RankEnvironment(run, spec, context).before_imports()
        yield dict(os.environ)
    finally:
        _set_environment(before)


def _environment(context: JobContext) -> dict[str, str]:
    return {**os.environ, HPCTRAIN_LOCAL_CONTEXT: json.dumps(asdict(context))}


def _set_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _command(python: str, run: Path) -> list[str]:
    return own_program(PROGRAM, str(run), python=python, unbuffered=True)


def _stamp(path: str) -> tuple[int, ...]:
    """What differs where a file was written or replaced; () where there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116 - some thousand of them
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _live(
    run: Path, context: JobContext, begins: int, unblocked: set[int | signal.Signals]
) -> NoReturn:
    """Be a node, in the process that was forked for it.

    Close `begins` when this process can be signalled as a group. `unblocked` is the signal mask of
    a process of its own.
    """
    code = 1
    try:
        os.setsid()
        signals.install()
        os.close(begins)
        signal.pthread_sigmask(signal.SIG_SETMASK, set(unblocked) - set(signals.SHIELDED))
        _be_program(run, context)
        runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as leaving:
        code = _exit_code(leaving)
    except BaseException:  # noqa: BLE001 - nothing may return into the controller's code
        traceback.print_exc()
    finally:
        _leave(code)


def _be_program(run: Path, context: JobContext) -> None:
    """Make of a copy of the controller what ``python -u -m PROGRAM RUN`` would be."""
    _set_environment(_environment(context))
    sys.orig_argv[:] = _command(sys.executable, run)
    sys.argv[1:] = [str(run)]
    sys.stdout, sys.stderr = _unbuffered(sys.stdout), _unbuffered(sys.stderr)
    if "numpy.random" in sys.modules:  # else all nodes would draw the same; `random` sees to itself
        sys.modules["numpy.random"].seed()
    show_as(f"hpctrain {context.nodes[context.node_rank]}")


def _exit_code(leaving: SystemExit) -> int:
    """Return the exit code that Python makes of it; a text is printed."""
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    print(leaving.code, file=sys.stderr)
    return 1


def _unbuffered(stream: TextIO) -> TextIO:
    """Return stdout or stderr as ``python -u`` has it."""
    raw = io.FileIO(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, write_through=True)


def _leave(code: int) -> NoReturn:
    """Exit as Python does, but for the controller's frames above."""
    import atexit

    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - as multiprocessing does
        atexit._run_exitfuncs()  # noqa: SLF001
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
