"""A rank from first to last: its signals, its output, the program, its failure.

No agent may have initialised CUDA. tests/engines/test_rank_life.py holds the promises.

When one rank dies, the others fail in their collectives soon after: the agent collects all reports
and shows the first that is no echo. tests/unit/agent/test_first_failure.py, test_failure_files.py
and tests/engines/test_worker_deaths.py hold the promises.
"""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import json
import logging
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing.connection import wait
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from hpctrain.core.base import clock
from hpctrain.core.base.env import (
    HPCTRAIN_ATTEMPT_DIR,
    HPCTRAIN_CONTROL,
    HPCTRAIN_NODE,
    HPCTRAIN_RESUME_ARGS,
)
from hpctrain.core.base.files import PACKAGE, read_end, read_plain, replace_text
from hpctrain.core.base.log import configure
from hpctrain.core.base.process import die_with_parent, print_to
from hpctrain.core.base.records import FailureReport, RankTask
from hpctrain.errors import HpctrainError
from hpctrain.ledger.run.layout import failure_path, rank_log_path, torch_error_path
from hpctrain.node.agent import foreign, signals
from hpctrain.node.agent.cpus import bind
from hpctrain.node.agent.environment import as_task
from hpctrain.node.agent.resume import ResumeArgs, line
from hpctrain.node.hangs.evidence import threads_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

log = logging.getLogger("hpctrain.agent")

EXIT_HANG_S = 10.0
"""A rank that raised is gone by then: peers wait in a collective until its sockets close."""
HOOKS_HANG_S = 300.0
"""So long a program's hooks at its exit may take: a tracker may upload there."""
SETTLE_S = 1.0
CLEAR_SETTLE_S = 0.2
"""Where a rank was killed from outside: survivors say by then that they live."""
ECHOES = (
    "Connection closed by peer",
    "connectFullMesh failed",
    "Connection reset by peer",
    "DistNetworkError",
    "DistBackendError",
    "Broken pipe",
    "Timed out waiting",
    "NCCL communicator was aborted",
    "ControlLost",
)
"""What a rank says when a peer went away: never the cause while another failure is known."""


def run_rank(task: RankTask) -> None:
    """Run the program as one rank, in the rank's own process and with torchrun's environment."""
    signals.ignore_all()
    die_with_parent(os.getppid())
    atexit._clear()  # noqa: SLF001 - as newer Pythons do; what is there by now is for the agent's own exit
    rank = int(os.environ["RANK"])
    attempt_dir = Path(os.environ[HPCTRAIN_ATTEMPT_DIR])
    print_to(rank_log_path(attempt_dir, rank))
    configure(f"rank {rank}")
    bind(task.cpus)
    os.environ.update(as_task(os.environ))
    task = _with_args(task, rank)
    try:
        _run(task, rank, attempt_dir)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            if not failure_path(attempt_dir, rank).exists():  # else of a program that is not Python
                _report(attempt_dir, rank, leaving)
            _exit_even_if_stuck(leaving.code if isinstance(leaving.code, int) else 1)
            raise
    except BaseException as raised:  # noqa: BLE001 - whatever it is, the agent must hear of it
        error = cause_behind(raised)
        _report(attempt_dir, rank, error)
        _exit_even_if_stuck(1)
        sys.exit(1)
    finally:
        _run_hooks()
        _end_children()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()


def _run(task: RankTask, rank: int, attempt_dir: Path) -> None:
    try:
        if task.program:
            _run_foreign(task, rank, attempt_dir)
        else:
            _run_program(task, rank)
    except BaseException:
        silence()  # before it is reported: what torch raises then would end the report
        raise


def _run_hooks() -> None:
    """Do what the program has left to its exit.

    Before Python 3.13 a process that was forked by multiprocessing leaves without it, and a tracker
    that ends its run there would lose its last steps. A hook that hangs would hold the nodes.
    """

    def leave() -> None:
        log.warning("what the program has left to its exit took %.0f s: left out", HOOKS_HANG_S)
        sys.stdout.flush()
        os._exit(0)

    timer = threading.Timer(HOOKS_HANG_S, leave)
    timer.daemon = True
    timer.start()
    atexit._run_exitfuncs()  # noqa: SLF001
    timer.cancel()


def _with_args(task: RankTask, rank: int) -> RankTask:
    first = [f"{task.local_rank}={os.environ['LOCAL_RANK']}"] if task.local_rank else []
    more = ResumeArgs(**json.loads(os.environ.get(HPCTRAIN_RESUME_ARGS, "{}")))
    if task.module:
        return task
    if more.why and rank == 0:
        log.info("%s", line(more))
    return replace(task, args=[*first, *task.args, *more.words])


def collect(attempt_dir: Path, exit_codes: Mapping[int, int], node: str) -> list[FailureReport]:
    """Return failures of this node's ranks: each rank's own report, or what its exit code says.

    `exit_codes` are those of the failed ranks, by global rank.
    """
    reports = []
    for rank, code in exit_codes.items():
        path = failure_path(attempt_dir, rank)
        try:
            reports.append(FailureReport(**json.loads(read_plain(path))))
        except (OSError, ValueError, TypeError) as error:
            report = _from_exit_code(rank, code, node)
            if -code in SIGNALS:
                report.traceback = crash_traceback(rank_log_path(attempt_dir, rank), __file__)
            whole = isinstance(error, FileNotFoundError)
            report.summary += "" if whole else f"; its own report {path.name} is not whole"
            reports.append(_with_torchs(report, torch_error_path(attempt_dir, rank)))
    return reports


def first_causal(reports: Iterable[FailureReport]) -> FailureReport | None:
    """The failure that caused the rest: the earliest one that is not an echo of another's death.

    A rank killed by a signal leaves no time of its own (only when the agent noticed), so it goes
    before every echo, whatever their clocks say.
    """
    ordered = sorted(reports, key=lambda report: (is_echo(report), report.time, report.rank))
    if not ordered:
        return None
    first = ordered[0]
    first.others = sorted(report.rank for report in ordered[1:])
    return first


def settle_s(reports: Iterable[FailureReport]) -> float:
    """How long other nodes have to report failures after these first ones: one may be the cause."""
    killed = (report for report in reports if report.kind == "signal")
    is_clear = any("SIGABRT" not in report.summary for report in killed)
    return CLEAR_SETTLE_S if is_clear else SETTLE_S


def is_echo(report: FailureReport) -> bool:
    """Whether this failure only tells that a peer went away."""
    return report.kind == "exception" and any(sign in report.summary for sign in ECHOES)


def import_path(task: RankTask) -> list[str]:
    """Where the rank looks for modules, but for its script's own folder.

    PYTHONPATH as `--env` or a preset gives it was not there when the agent's interpreter started,
    and a forked rank starts none.
    """
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return list(dict.fromkeys([*task.python_path, *named, *sys.path]))


def _run_program(task: RankTask, rank: int) -> None:
    from hpctrain.core.torch_private import let_groups_go_last

    let_groups_go_last()
    write_crash_traces()
    _be_seen(rank)
    if task.cwd:
        os.chdir(task.cwd)
    sys.path[:] = import_path(task)
    sys.argv = [task.script or task.as_module or task.module, *task.args]
    if task.as_module:
        runpy.run_module(task.as_module, run_name="__main__", alter_sys=True)
        return
    if task.module:
        from importlib import import_module

        import_module(task.module).main()
        return
    sys.path.insert(0, str(Path(task.script).parent))
    runpy.run_path(task.script, run_name="__main__")


def _be_seen(rank: int) -> None:
    """Let the agent see where this rank is, also when it stands still."""
    folder = os.environ.get(HPCTRAIN_CONTROL)
    if not folder:
        return
    from hpctrain.node.control import heartbeat
    from hpctrain.node.hangs.witness import Witness

    try:
        heartbeat.begin(Path(folder), rank)
        Witness(Path(folder), rank)
    except (OSError, RuntimeError, HpctrainError) as error:
        log.warning("where this rank is cannot be seen from outside: %s", error)


def _run_foreign(task: RankTask, rank: int, attempt_dir: Path) -> None:
    """Run a program that is no Python of ours; if it failed, report that and raise SystemExit."""
    ended = foreign.run(task)
    if ended.code == 0:
        return
    report = _from_exit_code(rank, ended.code, os.environ.get(HPCTRAIN_NODE, ""))
    report.summary = f"{Path(task.program).name}: {ended.why or report.summary}"
    report.traceback = foreign.last_lines(rank_log_path(attempt_dir, rank))
    _write(attempt_dir, _with_torchs(report, torch_error_path(attempt_dir, rank)))
    raise SystemExit(ended.code if ended.code > 0 else 128 - ended.code)


def _report(attempt_dir: Path, rank: int, error: BaseException) -> None:
    text = _shown(error)
    with suppress(OSError):  # its log is on a full disk
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    summary = traceback.format_exception_only(error)[-1].strip()
    code = error.code if isinstance(error, SystemExit) else 1
    report = FailureReport(
        rank=rank,
        node=os.environ.get(HPCTRAIN_NODE, ""),
        kind="exit" if isinstance(error, SystemExit) else "exception",
        summary=summary,
        traceback=text,
        time=clock.now(),
        exit_code=code if isinstance(code, int) else 1,
    )
    _write(attempt_dir, report)


def _write(attempt_dir: Path, report: FailureReport) -> None:
    try:
        replace_text(failure_path(attempt_dir, report.rank), json.dumps(asdict(report)))
    except OSError as problem:  # a full disk: the agent tells by the exit code
        log.warning("no report of this failure: %s", problem)


def _shown(error: BaseException) -> str:
    """The traceback as people need it.

    A refusal of ours is reported by its message alone: our own frames would bury it.
    The program's line that led there stays. An error that no class was made for nobody foresaw.
    """
    frames = _own_frames(error.__traceback__)
    if not isinstance(error, HpctrainError) or type(error) is HpctrainError:
        return "".join(traceback.format_exception(type(error), error, frames))
    theirs = traceback.extract_tb(frames)
    while theirs and Path(theirs[-1].filename).is_relative_to(PACKAGE):
        theirs.pop()
    lines = ["Traceback (most recent call last):\n", *theirs.format()] if theirs else []
    return "".join([*lines, *traceback.format_exception_only(error)])


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this launcher: people look for their own lines."""
    skip = {__file__, *RUNPY}
    while trace is not None and trace.tb_frame.f_code.co_filename in skip:
        trace = trace.tb_next
    return trace


def _exit_even_if_stuck(code: int) -> None:
    def leave() -> None:
        os._exit(code)

    timer = threading.Timer(EXIT_HANG_S, leave)
    timer.daemon = True
    timer.start()


def _end_children() -> None:
    """Kill worker processes that are left: they ignore SIGTERM, and Python's exit awaits them."""
    # torch's own handler raises where a DataLoader's worker is killed: a run that is done would
    # end as a crash.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()


def _with_torchs(report: FailureReport, path: Path) -> FailureReport:
    """A report with what `@record` has left, whole or told as not whole."""
    try:
        message = json.loads(read_plain(path))["message"]
        if isinstance(message, dict):
            report.traceback = str(message["extraInfo"]["py_callstack"])
            message = message["message"]
    except FileNotFoundError:
        return report
    except (OSError, ValueError, LookupError, TypeError):
        report.summary += f"; its error file {path.name} is not whole"
        return report
    report.summary += f"; {' '.join(str(message).split())}"
    return report


def _from_exit_code(rank: int, code: int, node: str) -> FailureReport:
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        summary = f"killed by {name}"
        if name == "SIGKILL":
            summary += " (out of memory, or killed from outside)"
        kind = "signal"
    else:
        summary, kind = f"exit code {code}", "exit"
    return FailureReport(
        rank=rank, node=node, kind=kind, summary=summary, time=clock.now(), exit_code=code
    )


CRASH_BYTES = 128 << 10
"""Of a log's end: faulthandler writes 100 threads of 100 frames at most, and then one long line."""
SIGNALS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""What faulthandler tells of."""
RUNPY = frozenset({"<frozen runpy>", runpy.__file__})
_BEGIN = "Fatal Python error: "


def write_crash_traces() -> None:
    """Have this rank's log say where it is when SIGSEGV, SIGABRT, SIGBUS, SIGFPE or SIGILL ends it.

    If its output is no file, nothing is written. A program's own faulthandler has its way.
    """
    try:
        faulthandler.enable(sys.stderr)
    except (AttributeError, OSError, ValueError):  # a stream of the program's own, without a file
        faulthandler.disable()


def crash_traceback(log: Path, launcher: str) -> str:
    """Return a rank's crash from its log, in the form and order of any other traceback, or "".

    The frames of `launcher`, the file that started the program, are left out, and those around.
    """
    try:
        text = read_end(log, CRASH_BYTES)
    except OSError:
        return ""
    begin = text.rfind(_BEGIN)
    if begin < 0:
        return ""
    title = text[begin:].splitlines()[0]
    frames = _inside(launcher, _frames(text[begin:]))
    return "".join(["Traceback (most recent call last):\n", *frames.format(), f"{title}\n"])


def _inside(launcher: str, frames: traceback.StackSummary) -> traceback.StackSummary:
    """A program's own frames: an agent that was forked has left its own around them."""
    files = [frame.filename for frame in frames]
    first = max((at + 1 for at, file in enumerate(files) if file == launcher), default=0)
    first += sum(1 for _ in itertools.takewhile(lambda file: file in RUNPY, files[first:]))
    return traceback.StackSummary.from_list(frames[first:] or frames)


def _frames(text: str) -> traceback.StackSummary:
    """The frames of the thread that crashed, outermost first.

    One of gloo's or NCCL's own has none. Those of the main thread say then what it worked for;
    faulthandler writes that thread last.
    """
    threads = threads_of(text)
    crashed = next((frames for is_current, frames in threads if is_current and frames), None)
    frames = crashed or (threads[-1][1] if threads else ())
    return traceback.StackSummary.from_list([(*frame, None) for frame in reversed(frames)])


DEATH_S = 2.0
"""So long after its connection broke it is waited for a worker's death to be known."""
_LOADER, _FETCH = ("torch", "utils", "data", "dataloader.py"), "_try_get_data"


def silence() -> None:
    """Have no worker's death raise an error from now on: one failure is being told."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def cause_behind(error: BaseException) -> BaseException:
    """Return a worker's death in torch's words if it broke a loader's connection, else `error`."""
    if not isinstance(error, OSError | EOFError):
        return error
    workers = _workers_of(error.__traceback__)
    _wait_for_a_death(workers)
    for worker in workers:
        if worker.exitcode:
            death = RuntimeError(_in_torchs_words(worker.pid, worker.exitcode))
            death.__cause__ = error
            return death.with_traceback(error.__traceback__)
    return error


def _workers_of(trace: TracebackType | None) -> list[Any]:
    """The processes of the loader that raised this; none where no loader did."""
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name == _FETCH and PurePath(code.co_filename).parts[-4:] == _LOADER:
            loader = trace.tb_frame.f_locals.get("self")
            return list(getattr(loader, "_workers", ()))  # torch does not promise the name
        trace = trace.tb_next
    return []


def _wait_for_a_death(workers: Sequence[Any]) -> None:
    """Until it is known of one of them, or for `DEATH_S`."""
    if any(worker.exitcode is not None for worker in workers):
        return
    gone = wait([worker.sentinel for worker in workers], DEATH_S) if workers else []
    for worker in workers:
        if worker.sentinel in gone:
            worker.join()  # its pipe is closed, as the rest of its files: its end follows


def _in_torchs_words(pid: int, code: int) -> str:
    if code > 0:
        return f"DataLoader worker (pid {pid}) exited unexpectedly with exit code {code}"
    name = signal.strsignal(-code) or f"signal {-code}"
    return f"DataLoader worker (pid {pid}) is killed by signal: {name}."
