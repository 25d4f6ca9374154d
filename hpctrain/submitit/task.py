"""One rank of a submitit job: call the function, checkpoint it at a stop, leave its result.

`python -m hpctrain.submitit.task` runs under an agent, in place of `submitit.core._submit`. At a
stop, `checkpoint()` is called, its return value written whole, all ranks exit, and the next start
continues from it. An exception is the result, as under submitit, and the run does not restart.

A thread listens from before the call is unpickled. Rank 0's thread decides by signals, the
scheduler's reason, `cancel --save` and the job's end, and writes a file for the others; only then
the main thread is interrupted. tests/unit/submitit/test_task.py, test_stop.py and
tests/slurm/test_submitit.py hold the promises.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from submitit import helpers
from submitit.core import utils

from hpctrain.cluster.scheduler.base import get_control
from hpctrain.core.base import clock
from hpctrain.core.base.env import (
    HPCTRAIN_ATTEMPT,
    HPCTRAIN_CLUSTER,
    HPCTRAIN_JOB_END,
    HPCTRAIN_JOB_ID,
    HPCTRAIN_RUN_DIR,
)
from hpctrain.core.base.files import replace_text
from hpctrain.core.base.records import StopCause
from hpctrain.ledger.run.fence import Attempt, left_text, look_anew
from hpctrain.ledger.run.layout import RunDir
from hpctrain.submitit.job import JobFiles, dump
from hpctrain.train.runtime.agreement import CODES
from hpctrain.train.runtime.stops import JobClock, Rank0Requests, RankSignals
from hpctrain.train.runtime.trackers import write_outcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from submitit.core.utils import DelayedSubmission


log = logging.getLogger("hpctrain.submitit")

WAIT_PICKLE_S = 60.0
"""The job may start before who submitted it has put the call into its place."""
PEERS_S = 30.0
"""So long may the other tasks take to end after one has failed; then they are ended."""
POLL_S = 0.25
SPARE_S = 5.0
"""A call that cannot be saved is left alone until so shortly before the job's end."""
EVERY_RANK = "checkpoint_every_rank"
"""A callable with this attribute has `checkpoint()` called on every rank, each for itself."""


@dataclass(frozen=True)
class TaskSettings:
    """The executor's parameters, as it hands them on."""

    folder: str
    lead_s: float
    limit_s: float
    max_num_timeout: int | None
    stderr_to_stdout: bool


class Task:
    """One rank's part of a job."""

    def __init__(self, settings: TaskSettings, run: RunDir, attempt: Attempt) -> None:
        self.settings = settings
        self.run = run
        self.attempt = attempt
        self.files = JobFiles.of(run)
        self.rank = int(os.environ.get("RANK", "0"))
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.call: DelayedSubmission | None = None
        end = os.environ.get(HPCTRAIN_JOB_END)
        self.clock = JobClock(float(end) if end else None, margin_s=0.0)
        self.watch = StopWatch(
            self.files.stop(attempt.number),
            rank=self.rank,
            requests=self._requests() if self.rank == 0 else None,
            due=self._due,
        )

    def run_call(self) -> None:
        """Make the call from where it was left, and end as the job must."""
        look_anew(self.files.folder)
        self.watch.start()  # before anything of the user's is imported
        self._forget_error()
        if self.files.result(self.rank).exists():
            outcome, value = utils.pickle_load(self.files.result(self.rank))
        else:
            outcome, value = self._give(self._made())
        self._await_peers(failed=outcome == "error")
        if outcome == "error":
            write_outcome(self.run, self.attempt, "failed", step=None, cause=None)
            raise utils.FailedJobError(_last_line(str(value)))

    def _forget_error(self) -> None:
        """Somebody who resumes a failed job wants it tried again."""
        path, is_new_job = self.files.result(self.rank), self.attempt.restarts == 0
        if is_new_job and path.exists() and utils.pickle_load(path)[0] == "error":
            path.unlink()

    def _made(self) -> tuple[str, Any]:
        """The call's outcome in submitit's words, once it has one."""
        try:
            self.call = self._load()
            print(f"hpctrain: attempt {self.attempt.number} calls {_name(self.call)}", flush=True)
            self.watch.call(self._stop)
            value = self.call.result()
            self.watch.stop_acting()
        except SystemExit:
            self.watch.stop_acting()
            raise
        except Exception:  # noqa: BLE001 - whatever it is, it is the call's result
            self.watch.stop_acting()
            if self._is_saved():
                self._leave()  # a peer has left: its connections closed
            traceback.print_exc()
            return "error", traceback.format_exc()
        return "success", value

    def _give(self, result: tuple[str, Any]) -> tuple[str, Any]:
        path = self.files.result(self.rank)
        try:
            dump(result, path)
        except Exception:  # noqa: BLE001 - not every value can be pickled
            traceback.print_exc()
            result = "error", traceback.format_exc()
            dump(result, path)
        return result

    def _load(self) -> DelayedSubmission:
        deadline = clock.monotonic() + WAIT_PICKLE_S
        while not self.files.pickle().exists():
            if clock.monotonic() > deadline:
                raise FileNotFoundError(
                    f"{self.files.pickle()} did not come in {WAIT_PICKLE_S:.0f} s: the program "
                    "that submitted this job has died; submit it anew"
                )
            clock.sleep(POLL_S)
            look_anew(self.files.folder)
        return self.files.load(self.rank)

    # ---- at a stop

    def _stop(self) -> None:
        """Save the call and leave, or end it. In the main thread, in the midst of the call."""
        cause = self.watch.cause
        if self.call is None or cause is None or self._is_saved():
            self._leave()
        if not self._saves():
            self._await_saved()
            self._leave()
        is_late = cause in TIME_CAUSES
        state = self.files.saved_state()
        timeouts = state.timeouts + is_late
        print(f"hpctrain: asked to stop ({cause.value}); saving the call", flush=True)
        saved = self._save(self.call, final=is_late)
        if saved is None and is_late:
            raise utils.UncompletedJobError(
                "Job not requeued because: timed-out and not checkpointable."
            )
        most = self.settings.max_num_timeout
        if most is not None and timeouts > most:
            raise utils.UncompletedJobError("Job not requeued because: timed-out too many times.")
        if self.rank == 0:
            ranks = self.ranks if self._every_rank() else 1
            if saved:
                self._await_pickles(ranks)
                state = replace(state, attempt=self.attempt.number, ranks=ranks)
            self.files.commit(replace(state, timeouts=timeouts))
            left = "" if most is None else f" ({most - timeouts} remaining timeouts)"
            print(f"hpctrain: saved; the job continues in its next start{left}", flush=True)
            write_outcome(self.run, self.attempt, "stopped", step=None, cause=cause)
        else:
            self._await_saved()
        self._leave()

    def _save(self, call: DelayedSubmission, *, final: bool) -> bool | None:
        """Call `checkpoint()` and write what it returns; None where the callable has none."""
        if not _is_checkpointable(call):
            return None
        try:
            later = call._checkpoint_function()  # noqa: SLF001 - what submitit's handler calls
            if later is not None:
                later.set_timeout(call._timeout_min, call._timeout_countdown)  # noqa: SLF001
                dump(later, self.files.pickle(self.attempt.number, self.rank))
                return True
        except Exception:
            if final:
                raise
            traceback.print_exc()
            log.warning("checkpoint() failed; the job continues from what was saved before")
            return False
        raise utils.UncompletedJobError(
            "Job not requeued because: checkpoint function returned None."
        )

    def _saves(self) -> bool:
        return self.rank == 0 or self._every_rank()

    def _every_rank(self) -> bool:
        return self.call is not None and bool(getattr(self.call.function, EVERY_RANK, False))

    def _is_saved(self) -> bool:
        return self.run.outcome(self.attempt.number).exists()

    def _await_saved(self) -> None:
        """Until rank 0 has committed; the agent ends us where it never does."""
        while not self._is_saved():
            clock.sleep(POLL_S)
            look_anew(self.run.attempt(self.attempt.number))

    def _await_pickles(self, ranks: int) -> None:
        own = [self.files.pickle(self.attempt.number, rank) for rank in range(ranks)]
        given = [self.files.result(rank) for rank in range(ranks)]
        while not all(a.exists() or b.exists() for a, b in zip(own, given, strict=True)):
            clock.sleep(POLL_S)
            look_anew(self.files.folder)

    def _leave(self) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        raise SystemExit(0)

    # ---- at the end

    def _await_peers(self, *, failed: bool) -> None:
        """Until all tasks have a result; as under srun, one that fails does not end the others."""
        deadline = clock.monotonic() + PEERS_S
        while not all(self.files.result(rank).exists() for rank in range(self.ranks)):
            if failed and clock.monotonic() > deadline:
                return
            if self.watch.cause is not None and not failed:
                if self.rank == 0 and not self._is_saved():
                    self._commit_for_peers()
                self._leave()
            clock.sleep(POLL_S)
            look_anew(self.files.folder)

    def _commit_for_peers(self) -> None:
        """Rank 0 has its result, others have not: they continue in the next start."""
        self.call = self.call or self._load()
        if self._every_rank():
            self._await_pickles(self.ranks)
            state = self.files.saved_state()
            self.files.commit(replace(state, attempt=self.attempt.number, ranks=self.ranks))
        write_outcome(self.run, self.attempt, "stopped", step=None, cause=self.watch.cause)

    # ---- when

    def _due(self) -> float | None:
        """When the call must stop so that it is saved before the job's end."""
        end = self.clock.end_time
        if end is None:
            return None
        can_wait = self.call is not None and not _is_checkpointable(self.call)
        return end - (SPARE_S if can_wait else self.settings.lead_s)

    def _requests(self) -> Rank0Requests:
        job_id = os.environ[HPCTRAIN_JOB_ID]
        control = get_control(os.environ[HPCTRAIN_CLUSTER], job_id, self.attempt.restarts)
        return Rank0Requests(
            request=self.run.stop_request,
            profile_request=self.run.profile_request,
            job_id=job_id,
            clock=self.clock,
            control=control,
        )


def main() -> None:
    """Run as a rank, under an agent."""
    settings = TaskSettings(**json.loads(sys.argv[1]))
    run = RunDir(Path(os.environ[HPCTRAIN_RUN_DIR]))
    attempt = Attempt(**json.loads(os.environ[HPCTRAIN_ATTEMPT]))
    task = Task(settings, run, attempt)
    as_submitit_sets_it(os.environ, settings.folder)
    helpers.TorchDistributedEnvironment.export = _keep_the_agents  # type: ignore[method-assign]
    task.files.folder.mkdir(mode=0o700, exist_ok=True)
    out, err = task.files.stdout(task.rank), task.files.stderr(task.rank)
    print(f"the call's output goes to {out}{'' if settings.stderr_to_stdout else f' and {err}'}")
    _redirect(out, out if settings.stderr_to_stdout else err)
    task.run_call()


def as_submitit_sets_it(environ: Any, folder: str) -> None:
    """Add what submitit's `JobEnvironment` reads, whichever scheduler there is."""
    environ["SUBMITIT_FOLDER"] = folder
    environ["SUBMITIT_EXECUTOR"] = environ[HPCTRAIN_CLUSTER]
    nodes = int(environ.get("GROUP_WORLD_SIZE", "1"))
    values = {
        "JOB_ID": environ[HPCTRAIN_JOB_ID],
        "NTASKS": environ.get("WORLD_SIZE", "1"),
        "JOB_NUM_NODES": str(nodes),
        "NODEID": environ.get("GROUP_RANK", "0"),
        "GLOBALID": environ.get("RANK", "0"),
        "LOCALID": environ.get("LOCAL_RANK", "0"),
    }
    for name, value in values.items():
        environ[f"SUBMITIT_LOCAL_{name}"] = value


def _keep_the_agents(
    self: Any,
    set_cuda_visible_devices: bool = True,
    overwrite: bool = False,  # noqa: ARG001 - as above
) -> Any:
    """Submitit's `export`, where the agent has exported the ranks' own values already."""
    for name in ("master_addr", "master_port", "rank", "world_size", "local_rank"):
        value = os.environ.get(name.upper())
        if value is not None:
            setattr(self, name, value if name == "master_addr" else int(value))
    if set_cuda_visible_devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(self.local_rank)
    return self


def _redirect(out: Path, err: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for stream, path, descriptor in ((sys.stdout, out, 1), (sys.stderr, err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _is_checkpointable(call: DelayedSubmission) -> bool:
    function = call.function
    return hasattr(function, "checkpoint") or hasattr(function, "__submitit_checkpoint__")


def _name(call: DelayedSubmission) -> str:
    function = call.function
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _last_line(trace: str) -> str:
    return trace.strip().rpartition("\n")[2]


INTERRUPT = signal.SIGRTMIN + 5
"""No library takes it, and a sleeping or waiting main thread wakes up of it."""
STOP_POLL_S, IDLE_POLL_S = 0.25, 1.0
"""Between two looks for a stop: of rank 0 and of who has heard a signal; of the others."""
AGAIN_S = 3.0
"""A main thread that swallowed the exception gets it again."""
TIME_CAUSES = frozenset({StopCause.WARNING, StopCause.CLOCK})


class StopWatch:
    """Tells the main thread once that it must stop.

    Attributes:
        cause: Why, once it must.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        requests: Rank0Requests | None,
        due: Callable[[], float | None],
    ) -> None:
        """Make one; `start` begins to watch.

        Args:
            path: The file by which all ranks of the attempt hear of a stop.
            rank: This rank's number.
            requests: Rank 0's, whose word counts; None on other ranks.
            due: When to stop because of the job's end, seconds since the epoch; None for never.
        """
        self.cause: StopCause | None = None
        self._path = path
        self._rank = rank
        self._requests = requests
        self._due = due
        self._signals = RankSignals()
        self._act: Callable[[], None] | None = None
        self._acting = False
        self._pid = os.getpid()

    def start(self) -> None:
        """Listen from now on. Call it on the main thread."""
        signal.signal(INTERRUPT, self._on_interrupt)
        self._signals.start()
        if self._requests is not None:
            self._requests.start()
        threading.Thread(target=self._watch, name="hpctrain-submitit", daemon=True).start()

    def call(self, act: Callable[[], None]) -> None:
        """What the main thread does at a stop: from now on, between two of its bytecodes.

        `act` ends the call by raising.
        """
        self._act = act
        if self.cause is not None:  # it came while the call was being unpickled
            act()

    def stop_acting(self) -> None:
        """The call is over: a stop no longer interrupts the main thread, which looks at `cause`."""
        self._act = None

    def _on_interrupt(self, _signum: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid or self._act is None or self._acting:
            return  # in a child that was forked, or told again while it saves
        self._acting = True
        try:
            self._act()
        finally:
            self._acting = False

    def _watch(self) -> None:
        while self.cause is None:
            if self._signals.is_replaced:
                return  # the call uses hpctrain.init(), whose run stops by itself
            cause = self._look()
            if cause is not None:
                self.cause = cause
                break
            lively = self._rank == 0 or self._signals.heard.is_set()
            clock.sleep(STOP_POLL_S if lively else IDLE_POLL_S)
        main = threading.main_thread()
        while main.is_alive():
            signal.pthread_kill(main.ident or 0, INTERRUPT)
            clock.sleep(AGAIN_S)

    def _look(self) -> StopCause | None:
        if self._requests is None:
            return read_stop(self._path)
        if self._signals.warned:
            self._signals.warned = False
            self._requests.warn()
        cause = CODES[self._requests.stop]
        if cause is None and self._signals.term:
            cause = StopCause.TERM
        due = self._due()
        if cause is None and due is not None and clock.now() >= due:
            cause = StopCause.CLOCK
        if cause is not None:
            replace_text(self._path, json.dumps({"cause": cause.value}))
        return cause


def read_stop(path: Path) -> StopCause | None:
    """What rank 0 has decided; None so far."""
    with contextlib.suppress(ValueError, OSError, KeyError):
        return StopCause(json.loads(left_text(path))["cause"])
    return None


if __name__ == "__main__":
    main()
