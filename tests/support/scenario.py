"""A run, driven as a user drives it: by the command line, read by its ledger.

On the real cluster, or with `slurm=None` on the embedded one.

run = submit(slurm, tmp_path, "--nodes", "4", "--ranks-per-node", "2", sets=TINY)
run.wait_step(5)
...
run.wait_state("done")
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.scheduler import local as local_client
from hpctrain.core.base.env import HPCTRAIN_FAULTS
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.layout import RunDir
from tests.support import cpus, patience
from tests.support.gates import steps_held
from tests.support.ledger_runs import all_fields
from tests.support.patience import PATIENCE_S
from tests.support.recipe import TINY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpctrain.ledger.run.events import Event
    from tests.support.gates import Gate
    from tests.support.slurm_cluster import SlurmCluster

CPUS = 2
"""What a story is taken to use. On the real cluster half: it waits for SLURM most of the time, and
with all of it two such stories kept everything else from two cores that stood 70 to 90 % idle."""


def cli(
    slurm: SlurmCluster | None, cwd: Path, *args: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run hpctrain's command line as a user would, in the cluster's environment."""
    base = dict(os.environ) if slurm is None else slurm.env
    return subprocess.run(
        [sys.executable, "-m", "hpctrain", *args],
        cwd=cwd,
        env={**base, "PYTHONPATH": str(Path(__file__).parents[2]), **(env or {})},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@dataclass
class RunHandle:
    """One run of a test."""

    slurm: SlurmCluster | None
    cwd: Path
    dir: RunDir
    job_id: str
    gates: Mapping[int, Gate] = field(default_factory=dict)

    def let_go(self, attempt: int) -> None:
        """Let the steps of an attempt go on that `submit` had held."""
        self.gates[attempt].open()

    def cli(self, *args: str, env: Mapping[str, str] | None = None) -> str:
        """A command that must succeed; its stdout."""
        done = cli(self.slurm, self.cwd, *args, env=env)
        assert done.returncode == 0, f"hpctrain {args}: exit {done.returncode}\n{done.stderr}"
        return done.stdout

    def doctor(self, attempt: int) -> str:
        """What the doctor calls the end of an attempt."""
        return json.loads(self.cli("doctor", "run", "--attempt", str(attempt), "--json"))["kind"]

    def events(self, kind: str | None = None, attempt: int | None = None) -> list[Event]:
        """The ledger, or the part of it that is asked for."""
        return [
            e
            for e in ledger.read(self.dir)
            if kind in (None, e.kind) and attempt in (None, e.attempt)
        ]

    def wait(self, what: str, reached: Callable[[], Any]) -> Any:
        """Wait for something to become true; where it does not, all that may tell why."""
        return patience.until(reached, lambda: f"{what}\n{self.story()}")

    def wait_event(self, kind: str, attempt: int | None = None, count: int = 1) -> Event:
        """Wait for the count-th event of a kind."""

        def there() -> list[Event] | None:
            found = self.events(kind, attempt)
            return found if len(found) >= count else None

        found: list[Event] = self.wait(f"event {kind} (attempt {attempt})", there)
        return found[count - 1]

    def wait_step(self, step: int, attempt: int | None = None) -> int:
        """Wait until a step is done (in an attempt); the newest step."""

        def done() -> int | None:
            steps = [int(all_fields(e)["last"]) for e in self.events("steps", attempt)]
            return max(steps) if steps and max(steps) >= step else None

        newest: int = self.wait(f"step {step}", done)
        return newest

    def wait_done(self) -> None:
        """Wait until the program has returned and the job is gone."""
        assert self.slurm is not None
        self.wait_event("done")
        self.slurm.wait_job(self.job_id, ("COMPLETED",))

    def wait_preempted(self) -> None:
        """Wait until slurmctld has begun to preempt the job, or has ended it."""
        slurm = self.slurm
        assert slurm is not None

        def begun() -> bool:
            job = slurm.job(self.job_id)
            return job["JobState"] != "RUNNING" or job.get("PreemptTime", "None") != "None"

        self.wait("a preemption", begun)

    def nodes(self) -> tuple[list[str], list[str]]:
        """Those of the newest attempt, and the spares. SLURM does not always begin with n1."""
        fact = all_fields(self.events("attempt_started")[-1])
        return list(fact["nodes"]), list(fact["spares"])

    def ends(self) -> list[tuple[str, str]]:
        """(reason, next) of each attempt that ended, in order."""
        return [(e.fact.reason, e.fact.next) for e in self.events("attempt_ended")]

    def restored(self) -> list[int]:
        """The step that each attempt began at."""
        return [int(all_fields(e)["step"]) for e in self.events("restored")]

    def steps_lost(self) -> list[int]:
        """Of each attempt but the last: steps done in it that the next one had to do again."""
        starts = {e.attempt: int(all_fields(e)["step"]) for e in self.events("restored")}
        last: dict[int, int] = {}
        for e in self.events("steps"):
            assert e.attempt is not None
            last[e.attempt] = max(last.get(e.attempt, 0), int(all_fields(e)["last"]))
        numbers = sorted(n for n in starts if n is not None)
        return [
            max(0, last.get(one, starts[one]) - starts[following])
            for one, following in itertools.pairwise(numbers)
        ]

    def status(self) -> dict[str, Any]:
        """`hpctrain status --json`."""
        found: dict[str, Any] = json.loads(self.cli("status", self.dir.name, "--json"))
        return found

    def story(self) -> str:
        """What happened so far, for a failing test."""
        job = local_client.read(self.job_id) if self.slurm is None else self.slurm.job(self.job_id)
        lines = [str(job)]
        lines += [
            f"{e.t:.1f} {e.attempt} {e.kind} {json.dumps(all_fields(e))[:299]}"
            for e in self.events()
        ]
        outputs = sorted(self.dir.jobs.glob("*.out"))
        newest = sorted((self.dir.root / "attempts").glob("*/rank-00000.log"))[-1:]
        for path in [*outputs, *newest]:
            lines.append(f"--- {path.name}\n{path.read_text()[-2000:]}")
        return "\n".join(lines)


def copies_in_memory(steps: int, every: int) -> dict[str, Any]:
    """Settings of a run that copies its state into memory, and saves nothing."""
    return {
        "train.steps": steps,
        "train.step_delay_s": 0.1,
        "checkpoint.interval_steps": 1000,
        "run.log_every_s": 0,
        "run.restart_pause_s": 0,
        "alive.memory": "auto",
        "alive.memory_steps": every,
    }


def submit(
    slurm: SlurmCluster | None,
    cwd: Path,
    *args: str,
    sets: Mapping[str, Any] | None = None,
    name: str = "run",
    script: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    held: Mapping[int, int] | None = None,
) -> RunHandle:
    """`hpctrain submit` of the tiny recipe (or of a script) with these settings over `TINY`.

    It goes to the real cluster where there is one, else to what `args` name. `held` is attempt to
    step: its ranks stand before that step until `RunHandle.let_go`. A save's event comes with the
    next save at the latest: hold behind that one to wait for it.
    """
    cpus.take(CPUS if slurm is None else CPUS // 2)
    gates, faults = steps_held(cwd, held or {})
    if faults:
        armed = (env or {}).get(HPCTRAIN_FAULTS)
        env = {**(env or {}), HPCTRAIN_FAULTS: f"{armed};{faults}" if armed else faults}
    settings = {} if script else {**TINY, "train.dropout": 0.0}
    settings |= sets or {}
    words = [f"--set={key}={_toml(value)}" for key, value in settings.items()]
    tail = ["--", *script] if script else []
    done = cli(
        slurm,
        cwd,
        "submit",
        *(["--cluster=slurm"] if slurm is not None else []),
        f"--name={name}",
        *args,
        *words,
        "--json",
        *tail,
        env=env,
    )
    assert done.returncode == 0, f"submit: exit {done.returncode}\n{done.stderr}"
    told = json.loads(done.stdout)
    return RunHandle(slurm, cwd, RunDir(Path(told["run_dir"])), str(told["job_id"]), gates)


def _toml(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | list) else str(value)
