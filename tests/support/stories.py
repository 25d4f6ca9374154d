"""One run of `scripts/story.py` and what is done to it, on the embedded cluster or on SLURM.

story = Story(cluster, tmp_path, nodes=1)
story.wait_held()
story.preempt()
story.open_gate()
story.wait_over("done")
story.assert_same_bits()

The program stops at step `HELD_AT` until the gate is open, so a test acts on a run that stands
there, and nothing depends on how fast the machine is. A test waits for files and for the ledger.
"""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from hpctrain.checkpoint.store import find
from hpctrain.cluster.scheduler import local as client
from hpctrain.core.base.records import JobState
from tests.support import local_runs
from tests.support.ledger_runs import all_fields
from tests.support.scenario import RunHandle, submit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.support.slurm_cluster import SlurmCluster

PROGRAM = local_runs.SCRIPTS / "story.py"
STEPS = 40
HELD_AT = 7
EVERY = 2
"""Steps between saves; before the gate it has saved three times."""
LEAD_S = 120
"""The warning before the time limit; such a stop begins up to MARGIN_S before the end."""
MARGIN_S = 90
ENDS_IN_S = 60
GRACE_S = 600.0
"""Of a local job: its end is none of a story."""
OVER = {"done": JobState.COMPLETED, "stopped": JobState.COMPLETED, "cancelled": JobState.CANCELLED}


class Scheduler(Protocol):
    """What a story asks of the place where its job runs.

    Attributes:
        slurm: The cluster, where it is SLURM.
        ranks_per_node: So many does a story have here.
    """

    slurm: SlurmCluster | None
    ranks_per_node: int

    def words(self, *, grace: bool) -> Sequence[str]:
        """Words of `hpctrain submit` that name the place."""

    def preempt(self, run: RunHandle, *, grace: bool) -> None:
        """Have a more important job take all nodes."""

    def back(self, run: RunHandle) -> None:
        """Wait until the preempted job has left its nodes, and give them back."""

    def kill_node(self, run: RunHandle, index: int) -> None:
        """Let a node of the newest attempt die."""

    def ends_in(self, run: RunHandle, seconds: int) -> None:
        """Move the end of the running job."""

    def state(self, run: RunHandle) -> tuple[str, int]:
        """The job's state and how often it was started again."""


class OnLocal:
    """The embedded cluster."""

    slurm = None
    ranks_per_node = 1

    def words(self, *, grace: bool) -> Sequence[str]:
        """See `Scheduler`."""
        del grace
        return ["--cluster=local"]

    def preempt(self, run: RunHandle, *, grace: bool) -> None:
        """See `Scheduler`. All nodes are there again for the next start."""
        leave = len(run.nodes()[0])
        client.request(run.job_id, "preempt", leave=leave, grace_s=GRACE_S if grace else 0.0)

    def back(self, run: RunHandle) -> None:
        """See `Scheduler`: nobody else is on the nodes."""

    def kill_node(self, run: RunHandle, index: int) -> None:
        """See `Scheduler`."""
        client.request(run.job_id, "fail_node", node=index)

    def ends_in(self, run: RunHandle, seconds: int) -> None:
        """See `Scheduler`."""
        client.request(run.job_id, "end_in", seconds=seconds)

    def state(self, run: RunHandle) -> tuple[str, int]:
        """See `Scheduler`."""
        record = client.read(run.job_id)
        assert record is not None
        return str(record.state), record.restarts


class OnSlurm:
    """A real cluster of four nodes."""

    ranks_per_node = 2

    def __init__(self, slurm: SlurmCluster) -> None:
        """Use this one."""
        self.slurm = slurm
        self._urgent = ""

    def words(self, *, grace: bool) -> Sequence[str]:
        """See `Scheduler`."""
        return [f"--partition={'grace' if grace else 'work'}"]

    def preempt(self, run: RunHandle, *, grace: bool) -> None:
        """See `Scheduler`; the partition has a grace time or none."""
        del run, grace
        self._urgent = self.slurm.submit_urgent(len(self.slurm.nodes))

    def back(self, run: RunHandle) -> None:
        """See `Scheduler`."""
        self.slurm.wait_job(run.job_id, "PENDING")
        self.slurm.cancel(self._urgent)
        self.slurm.start_now(run.job_id)

    def kill_node(self, run: RunHandle, index: int) -> None:
        """See `Scheduler`."""
        self.slurm.kill_node(run.nodes()[0][index])

    def ends_in(self, run: RunHandle, seconds: int) -> None:
        """See `Scheduler`; SLURM looks at limits every 30 s."""
        self.slurm.end_in(run.job_id, seconds)

    def state(self, run: RunHandle) -> tuple[str, int]:
        """See `Scheduler`."""
        record = self.slurm.job(run.job_id)
        return record["JobState"], int(record["Restarts"])


class Story:
    """A run of the program, from its submit on.

    Attributes:
        run: Its ledger and its commands.
    """

    def __init__(
        self,
        cluster: Scheduler,
        folder: Path,
        *,
        nodes: str = "1",
        grace: bool = False,
        held: str = "",
        **sets: Any,
    ) -> None:
        """Submit it.

        Args:
            cluster: Where.
            folder: Where the program's files are.
            nodes: How many, as `--nodes` takes it.
            grace: A preemption comes with a grace time.
            held: The one rank that the gate holds; "": all.
            sets: More settings, as section__key.
        """
        self.cluster = cluster
        self._folder = folder
        settings = {
            "checkpoint.interval_steps": EVERY,
            "run.log_every_s": 0,
            "run.restart_pause_s": 0,
            **{name.replace("__", "."): value for name, value in sets.items()},
        }
        shape = (f"--nodes={nodes}", f"--ranks-per-node={cluster.ranks_per_node}", "--time=10")
        self.run: RunHandle = submit(
            cluster.slurm,
            folder,
            *(*cluster.words(grace=grace), *shape, "--no-snapshot"),
            sets=settings,
            script=[str(PROGRAM), str(STEPS), str(HELD_AT), *([held] if held else [])],
        )
        self._grace = grace

    # -- what happens in it

    def _files(self, name: str) -> list[Path]:
        return [path for path in self._folder.glob(f"{name}-*") if not path.suffix]

    def wait_held(self, ranks: int | None = None) -> list[Path]:
        """Wait until so many ranks stand at the gate, or as many as one node has."""
        least = ranks or self.cluster.ranks_per_node

        def there() -> list[Path]:
            found = self._files("held")
            return found if len(found) >= least else []

        return self.wait("ranks at the gate", there)

    def wait_heard(self) -> None:
        """Wait until a rank that is held has got a stop signal."""
        self.wait("a stop signal", lambda: self._files("heard"))

    def wait(self, what: str, reached: Callable[[], Any]) -> Any:
        """Wait for something to become true."""
        return self.run.wait(what, reached)

    def wait_event(self, kind: str, count: int = 1) -> dict[str, Any]:
        """Wait for the count-th event of a kind; its fields."""
        return all_fields(self.run.wait_event(kind, count=count))

    def wait_over(self, state: str, restarts: int) -> None:
        """Wait until the job has ended, in this state of its run, after so many restarts."""
        self.wait(f"the end of the job ({state})", self._is_over)
        assert self.run.status()["state"] == state
        assert self.cluster.state(self.run) == (str(OVER[state]), restarts), self.run.story()

    def _is_over(self) -> bool:
        return self.cluster.state(self.run)[0] in {*map(str, client.OVER), "TIMEOUT"}

    def wait_saved(self) -> None:
        """Wait until a run that is held has its newest checkpoint, which is written behind it."""
        last = HELD_AT // EVERY * EVERY
        self.wait(f"the save of step {last}", lambda: find.steps(self.run.dir)[:1] == [last])

    def wait_gone(self) -> None:
        """Wait until no rank that was held is left."""

        def gone() -> bool:
            return not any(_lives(int(path.read_text())) for path in self._files("held"))

        self.wait("the end of the ranks", gone)

    # -- what is done to it

    def open_gate(self) -> None:
        """Let all ranks of all attempts go on."""
        (self._folder / "gate").touch()

    def preempt(self) -> None:
        """A more important job takes all nodes."""
        self.cluster.preempt(self.run, grace=self._grace)

    def back(self) -> None:
        """The more important job is over."""
        self.cluster.back(self.run)

    def kill_node(self, index: int) -> None:
        """A node dies."""
        self.cluster.kill_node(self.run, index)

    def kill_rank(self) -> None:
        """A rank that is held dies."""
        os.kill(int(self.wait_held()[0].read_text()), signal.SIGKILL)

    def reach_time_limit(self) -> None:
        """The job's end comes near; needs `LEAD_S` and `MARGIN_S` as settings."""
        self.cluster.ends_in(self.run, ENDS_IN_S)

    def cancel(self) -> None:
        """The user cancels the run."""
        self.run.cli("cancel", "run")

    def cancel_save(self) -> None:
        """The user asks it to save and leave."""
        self.run.cli("cancel", "run", "--save")

    def resume(self) -> str:
        """The user resumes it; what the command said."""
        said = self.run.cli("resume", "run")
        self.run.job_id = str(said.split("job ")[1].split()[0])
        return said

    def tear_checkpoint(self) -> str:
        """Cut a file of the newest checkpoint; the checkpoint's name."""
        self.wait_saved()
        shard = self.run.dir.checkpoints / self.newest() / "shard-00000.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1])
        return shard.parent.name

    # -- what came of it

    def newest(self) -> str:
        """The name of the newest committed checkpoint."""
        return find.step_path(self.run.dir, find.steps(self.run.dir)[0]).name

    def ends(self) -> list[tuple[str, str]]:
        """(reason, next) of each attempt that ended, in order."""
        return self.run.ends()

    def assert_same_bits(self) -> None:
        """All state is that of a run that nobody disturbed."""
        expected = runpy.run_path(str(PROGRAM), run_name="story")["reference"](STEPS)
        assert (self._folder / "final").read_text() == expected

    def assert_attempts(self, *reasons: str, lost: Sequence[int] = (0,)) -> None:
        """The attempts ended so, and each but the last lost so many steps."""
        assert [reason for reason, _ in self.ends()] == list(reasons), self.run.story()
        assert self.run.steps_lost() == list(lost), self.run.story()


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def on_both(*, quick: bool = True, every_slurm: bool = False) -> Callable[[Any], Any]:
    """Run a story on the embedded cluster and on SLURM; it takes `cluster`.

    Args:
        quick: The local one is cheap enough for `make test`.
        every_slurm: The one on SLURM depends on its version, so `make check` runs it on all three.
            Others are a `story` of `make soak`, proved by the local one.
    """

    def marked(test: Callable[..., None]) -> Any:
        path = Path(test.__code__.co_filename).relative_to(Path(__file__).parents[2])
        proof = f"{path.as_posix()}::{test.__name__}"
        of_slurm = pytest.mark.every_slurm if every_slurm else pytest.mark.story(proved_by=proof)
        places = [
            pytest.param("local", marks=[pytest.mark.quick] if quick else []),
            pytest.param("slurm", marks=[pytest.mark.slurm, of_slurm]),
        ]
        return pytest.mark.parametrize("cluster", places, indirect=True)(test)

    return marked
