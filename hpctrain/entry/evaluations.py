"""Looks after the evaluations of a run, beside its ranks and at the end of jobs.

    python -P -m hpctrain.entry.evaluations RUN watch      until the batch script ends, or SIGINT
    python -P -m hpctrain.entry.evaluations RUN look       once
    python -P -m hpctrain.entry.evaluations RUN look STEP  once, also at what this one has come to

Whatever goes wrong here is a line in its output and no more: training and the job's exit code know
nothing of it. tests/unit/entry/test_evaluations.py holds the promises.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.core.base import clock
from hpctrain.core.base.log import configure
from hpctrain.core.base.process import own_program
from hpctrain.errors import HpctrainError
from hpctrain.ledger.run.layout import RunDir

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.core.settings.spec import Spec
    from hpctrain.launch.evaluations import Advanced

log = logging.getLogger("hpctrain.entry")

LOOK_S = 5.0
"""How often the ledger is looked at."""
LOOK_AGAIN_S = 60.0
"""So often what is due is looked after though the ledger says nothing new."""
GIVE_UP_S = 90.0
"""How long the end of a job waits for the look that it has started."""
IGNORED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def watch(run: RunDir, stop: threading.Event) -> None:
    """Look after the evaluations until asked to stop, or the process that started this one ends.

    The last look comes then: what was saved at the very end is due before the job is back.
    """
    parent, complaint = os.getppid(), ""
    ledger = _Ledger(run)
    is_last = False
    while not is_last:
        is_last = clock.wait(stop, LOOK_S) or os.getppid() != parent
        why = ""
        try:
            if not ledger.has_news():
                continue  # nothing was tried: the last complaint stands
            look(run)
        except (HpctrainError, OSError) as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001 - training must not notice
            why = f"{type(error).__name__}: {error}"
        if why and why != complaint:
            log.warning("checkpoints of %s are not evaluated just now: %s", run.name, why)
        complaint = why


class _Ledger:
    """A run's ledger as it grows, as far as its evaluations go."""

    def __init__(self, run: RunDir) -> None:
        from hpctrain.ledger.history.run_history import RunHistory
        from hpctrain.ledger.run.events import Tail

        self._run = run
        self._tail, self._history = Tail(run.events, marks="few"), RunHistory()
        self._due: list[int] | None = None
        self._shown_at = 0.0

    def has_news(self) -> bool:
        """Whether something else is due than before, or the last look is a while ago."""
        from hpctrain.ledger.history.evaluations import due
        from hpctrain.ledger.run.event_types import StepsDone
        from hpctrain.ledger.run.ownership import job_spec

        before, now = self._due, clock.monotonic()
        events = [event for event in self._tail.new() if not isinstance(event.fact, StepsDone)]
        if events or before is None:
            self._history.extend(events)
            settings = job_spec(self._run).settings.evaluate
            self._due = due(self._history, settings.every, last=settings.last)
        if self._due == before and now - self._shown_at < LOOK_AGAIN_S:
            return False
        self._shown_at = now
        return True


def look(run: RunDir, of: int | None = None) -> None:
    """Do what is to be done, and say what was done."""
    from hpctrain.launch.evaluations import advance
    from hpctrain.ledger.run.ownership import job_spec

    say(run, advance(run, job_spec(run), of=of))


def say(run: RunDir, done: Advanced) -> None:
    """Say what was done; a submission that is refused in a job needs somebody to help."""
    for fact in done.said:
        metrics = ", ".join(f"{name} {value:.6g}" for name, value in fact.metrics.items())
        log.info("step %d is evaluated: %s", fact.step, fact.why or metrics)
    for step in done.submitted:
        log.info("step %d is evaluated by job %s", step, done.alive[step])
    for step, why in done.refused.items():
        log.warning(
            "the evaluation of step %d could not be submitted from here and is tried again: %s; "
            "`hpctrain evaluate %s` on a login node submits it",
            step,
            why,
            run.root,
        )


def at_the_end_of(run: RunDir, env: Mapping[str, str]) -> None:
    """Have a process look after the evaluations when the last job of a run ends.

    Not if the job comes back: it would have to wait. `run` has checkpoints to evaluate, or is an
    evaluation. That process and its jobs get `env`.
    """
    try:
        from hpctrain.core.settings.spec import load_spec

        words = _words(run, load_spec(run.spec))
        if words:
            command = own_program("hpctrain.entry.evaluations", *words)
            subprocess.run(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                timeout=GIVE_UP_S,
                check=False,
            )
    except (HpctrainError, OSError, subprocess.SubprocessError) as error:
        log.warning("the evaluations of %s are not looked after: %s", run.name, error)


def _words(run: RunDir, spec: Spec) -> list[str]:
    if spec.evaluates is None and "evaluate" not in spec.beside:
        return []
    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.history.run_state import OVER

    if RunHistory.read(run, marks="few").state.phase not in OVER:
        return []
    if spec.evaluates is not None:
        return [spec.evaluates.run, "look", str(spec.evaluates.step)]
    return [str(run.root), "look"]


def main(argv: Sequence[str]) -> int:
    """See the module's docstring."""
    stop = threading.Event()
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    configure("evaluations")
    try:
        match list(argv):
            case [root, "watch"]:
                signal.signal(signal.SIGINT, lambda *_: stop.set())
                from hpctrain.cluster.scheduler.slurm.command import script_environment

                env = script_environment(os.getppid(), os.environ)
                os.environ.clear()
                os.environ.update(env)
                watch(RunDir(Path(root)), stop)
            case [root, "look"]:
                look(RunDir(Path(root)))
            case [root, "look", step]:
                look(RunDir(Path(root)), int(step))
            case _:
                log.error("hpctrain.entry.evaluations: %r: see its docstring", " ".join(argv))
                return 2
    except (HpctrainError, OSError) as error:
        log.warning("checkpoints are not evaluated just now: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
