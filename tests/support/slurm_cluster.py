"""A real SLURM cluster in one temporary folder, for tests and for trying things.

    python -m tests.support.slurm_cluster up [--dir D]      # until Ctrl-C; prints what to export
    python -m tests.support.slurm_cluster run -- CMD...     # starts one, runs CMD in it, ends it

Partitions: `work` (default; preempted at once), `grace` (preempted after 20 s), both by requeue,
and `urgent`, which preempts them. Nodes n1..n4 pose as 8 CPUs each, all on this machine.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self, TypeVar

from tests.support import processes
from tests.support.slurm_boot import Daemons, missing, tail, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from tests.support.slurm_config import Layout, Shape

T = TypeVar("T")
Record = dict[str, str]
FIELD = re.compile(r"(?:^|\s)([A-Z][\w:/]*)=(.*?)(?=\s+[A-Z][\w:/]*=|\s*$)")


def parse_record(line: str) -> Record:
    """Fields of one line of `scontrol show ... -o`."""
    return dict(FIELD.findall(line))


class SlurmCluster:
    """munged, MariaDB, slurmdbd, slurmctld and slurmd's, four if not told otherwise, ours to kill.

    >>> with SlurmCluster() as cluster:
    ...     job = cluster.sbatch("-N2", "--wrap", "srun hostname")
    ...     cluster.wait_job(job, "COMPLETED", 30)
    """

    missing = staticmethod(missing)
    wait_for = staticmethod(wait_for)

    def __init__(self, folder: Path | None = None, shape: Shape | None = None) -> None:
        self._daemons = Daemons(folder, shape)
        self._user_signal = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- the whole cluster

    def start(self) -> None:
        """Start everything and return once all nodes are idle."""
        self._daemons.start()

    def stop(self) -> None:
        """Kill every process of the cluster, jobs included, and remove its folder."""
        self._daemons.stop()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Their names."""
        return self._daemons.shape.nodes

    @property
    def at(self) -> Layout:
        """Where the cluster's files and logs lie."""
        return self._daemons.at

    @functools.cached_property
    def version(self) -> tuple[int, int]:
        """Year and month of SLURM's version, such as (22, 5)."""
        year, month = re.findall(r"\d+", self.run("sinfo", "--version", check=True).stdout)[:2]
        return int(year), int(month)

    def by_version(self, facts: dict[tuple[int, int], T]) -> T:
        """Of facts by the first version that each holds for, the one of this SLURM."""
        return facts[max(since for since in facts if since <= self.version)]

    @property
    def end_in_grace(self) -> tuple[str, str]:
        """How an attempt ends that leaves in its grace time: who runs the job again?"""
        return ("preempted", "leave" if self.version >= (24, 5) else "requeue")

    @property
    def env(self) -> dict[str, str]:
        """For subprocesses: our environment, SLURM_CONF, and no other SLURM_* variable."""
        return self._daemons.environment()

    def run(
        self, *argv: str, check: bool = False, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command against this cluster.

        Raises:
            AssertionError: `check` was asked for and it failed; tells what it said.
        """
        done = subprocess.run(
            argv,
            env=self.env,
            cwd=self.at.work,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode:
            said = f"{done.stdout}{done.stderr}".strip()
            raise AssertionError(f"{' '.join(argv)}: exit {done.returncode}: {said}")
        return done

    def reset(self) -> None:
        """Between tests: no job, no stray process, all daemons up, all nodes idle."""
        if not self._daemons.alive("munged"):
            self.start_munged()
        if not self._daemons.alive("slurmctld"):
            self.start_slurmctld()
        if self._user_signal:
            self._set_user_signal(on=False)
        self._end_jobs()
        for name in self.nodes:
            self.revive_node(name)
        self.drain_all()

    def leave(self) -> None:
        """After a test: nothing of its jobs runs on, while `reset` may be a long way off."""
        if not self._daemons.alive("munged"):
            self.start_munged()
        if self._daemons.alive("slurmctld"):
            self._end_jobs()
        processes.kill_all(self._pids_of_jobs())

    def drain_all(self) -> None:
        """Cancel all jobs, kill what they left behind, and wait until the live nodes are idle."""

        def drained() -> bool:
            left = self._end_jobs()
            states = self._daemons.node_states()
            busy = [n for n, s in states.items() if self._daemons.alive(n) and s != "idle"]
            return not left and not busy and len(states) == len(self.nodes)

        wait_for(drained, lambda: f"idle nodes: {self._situation()}")

    def _end_jobs(self) -> list[str]:
        """Cancel what is queued, SIGKILL what runs; the job ids that were still there."""
        rows = self.run("squeue", "-h", "-o", "%A %T", check=True).stdout.splitlines()
        jobs = dict(row.split() for row in rows)
        if live := [job_id for job_id, state in jobs.items() if state != "COMPLETING"]:
            self.run("scancel", "--quiet", *live)
        left = self._pids_of_jobs()
        processes.kill_all(left)
        return [*jobs, *map(str, left)]

    def _pids_of_jobs(self) -> list[int]:
        return [pid for pid in self._daemons.descendants() if self._job_of(pid)]

    @contextmanager
    def user_signal(self) -> Iterator[None]:
        """While inside, preemption sends the job's own `--signal` (preempt_send_user_signal)."""
        self._set_user_signal(on=True)
        try:
            yield
        finally:
            self._set_user_signal(on=False)

    def _set_user_signal(self, *, on: bool) -> None:
        self._daemons.configure(user_signal=on)
        if self._may_spin():
            self._daemons.end("slurmctld")  # killed, it would forget what jobs do meanwhile
            self.start_slurmctld()
        else:
            self.run("scontrol", "reconfigure", check=True)
        self._user_signal = on

        def taken() -> bool:
            said = self.run("scontrol", "show", "config").stdout
            return ("preempt_send_user_signal" in said) is on

        wait_for(taken, f"preempt_send_user_signal {'on' if on else 'off'}")

    def _may_spin(self) -> bool:
        """Whether a thread of slurmctld may spin for ever after `scontrol reconfigure`.

        One of 22.05 that sends something to nodes while slurm.conf is read takes TreeWidth for 0.
        Later versions start slurmctld anew.
        """
        return self.version < (23, 11)

    def kill_slurmctld(self) -> None:
        """SIGKILL slurmctld; jobs run on.

        slurmctld writes its state every 5 s. Killed before that, it forgets: jobs of the last
        seconds are gone or requeued, and their nodes get drained ("Duplicate jobid"). So wait for
        the next save first.
        """
        before = self._state_saved()
        if not self._may_spin():
            self.run("scontrol", "reconfigure", check=True)  # marks the state as changed
        if not self._may_spin() or any(self._mark(job) for job in self._listed()):
            wait_for(lambda: self._state_saved() > before, "slurmctld to save its state")
        self._daemons.kill("slurmctld")

    def _listed(self) -> list[str]:
        return self.run("squeue", "-h", "-o", "%A", check=True).stdout.split()

    def _mark(self, job_id: str) -> bool:
        """Change the job, so that slurmctld writes its state; False if it has ended."""
        changed = self.run("scontrol", "update", f"jobid={job_id}", "admincomment=saved")
        return changed.returncode == 0

    def _state_saved(self) -> int:
        path = self.at.folder / "state" / "job_state"
        return path.stat().st_mtime_ns if path.exists() else 0

    def start_slurmctld(self) -> None:
        """Start slurmctld again on the state it left, and wait until it answers."""
        self._daemons.start_slurmctld()

        def answers() -> bool:
            return "is UP" in self.run("scontrol", "ping").stdout

        wait_for(answers, lambda: f"slurmctld:\n{tail(self.at.log('slurmctld'))}")

    def kill_munged(self) -> None:
        """SIGKILL munged: from then on no command of SLURM's gets an answer."""
        self._daemons.kill("munged")

    def start_munged(self) -> None:
        """Start munged again, and wait until it takes requests."""
        self._daemons.start_munged()

    # -- nodes

    def kill_node(self, *names: str, leave_ranks: bool = False) -> None:
        """Let a node die: slurmd, its slurmstepds and all that they started; SLURM is told.

        Several die at once. With `leave_ranks` the job's own processes live on as zombies that
        SLURM knows nothing of.
        """
        for name in names:
            self._daemons.kill(name)

        def gone() -> bool:
            steps = [pid for name in names for pid in self._stepds(name)]
            ranks = []
            if not leave_ranks:
                ranks = [*processes.descendants(*steps)]
                ranks += [pid for name in names for pid in self._ranks(name)]
            # slurmstepd stands still first: it must not tell of the rest. Then srun, which a node
            # without power takes along: left behind, or stopped, it would get the kernel's SIGHUP
            # for an orphaned group, and end the step's tasks on all other nodes.
            processes.kill_all(steps, signal.SIGSTOP)
            processes.kill_all(sorted(ranks, key=_outlives_srun), signal.SIGKILL)
            processes.kill_all(steps, signal.SIGKILL)
            return not steps and not ranks

        wait_for(gone, f"the end of the processes of {', '.join(names)}")
        for name in names:
            down = ("scontrol", "update", f"nodename={name}", "state=down", "reason=test")
            self.run(*down, check=True)

    def revive_node(self, name: str) -> None:
        """Start the node's slurmd if it is dead and wait until SLURM counts it as up."""
        if not self._daemons.alive(name):
            self._daemons.start_slurmd(name)

        def up() -> bool:
            state = self._daemons.node_states().get(name, "")
            if state.startswith(("down", "drain", "fail")):
                self.run("scontrol", "update", f"nodename={name}", "state=resume")
                return False
            return bool(state) and not state.endswith("*")

        wait_for(up, lambda: f"{name} to come back:\n{tail(self.at.log(name))}")

    @contextmanager
    def own_mounts(self, mount: Callable[[str], Sequence[str]]) -> Iterator[None]:
        """While inside, each node has mounts of its own, made by the command that `mount` names."""
        for name in self.nodes:
            self._daemons.kill(name)
            self._daemons.start_slurmd(name, mount=mount(name))
        try:
            for name in self.nodes:
                self.revive_node(name)
            yield
        finally:
            self.drain_all()
            for name in self.nodes:
                self._daemons.kill(name)  # `reset` starts it where all others are
                processes.kill_all(self._serving(mount(name)))

    @contextmanager
    def stopped_node(self, name: str) -> Iterator[None]:
        """While inside, the node's slurmd does not answer: a step is started there afterwards."""
        pid = self._daemons.pid(name)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def _serving(self, command: Sequence[str]) -> list[int]:
        """What a command has left running."""
        return [p for p in self._daemons.descendants() if processes.command(p) == list(command)]

    def _stepds(self, node: str) -> list[int]:
        log = str(self.at.log(node))
        steps = [p for p in self._daemons.descendants() if _is_stepd(p)]
        return [pid for pid in steps if log in processes.open_files(pid)]

    def _ranks(self, node: str) -> list[int]:
        return [p for p in self._daemons.descendants() if self._job_of(p) and _node_of(p) == node]

    def _job_of(self, pid: int) -> str:
        """Id of the job that the process belongs to; empty for daemons."""
        environment = processes.environment(pid)
        return environment.get("SLURM_JOB_ID", "") if "SLURMD_NODENAME" in environment else ""

    # -- jobs

    def sbatch(self, *argv: str) -> str:
        """Submit a job with sbatch's own arguments and return its id; output goes to at.work."""
        return self.run("sbatch", "--parsable", *argv, check=True).stdout.strip().split(";")[0]

    def submit_urgent(self, nodes: int | Collection[str], *, seconds: float = 600) -> str:
        """Submit a job that takes whole nodes (so many, or these), preempting what runs there."""
        if isinstance(nodes, int):
            where = [f"--nodes={nodes}"]
        else:
            where = [f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}"]
        return self.sbatch(
            *("--partition=urgent", "--exclusive", "--job-name=urgent", "--output=/dev/null"),
            *(*where, f"--wrap=exec sleep {seconds}"),
        )

    def cancel(self, job_id: str) -> None:
        """Scancel the job."""
        self.run("scancel", job_id, check=True)

    def end_job(self, job_id: str) -> None:
        """Cancel the job, kill its processes and wait until its nodes are free of it."""
        self.cancel(job_id)

        def gone() -> bool:
            left = self.pids_of_job(job_id)
            processes.kill_all(left)
            return not left and not self.run("squeue", "-h", "-j", job_id).stdout

        wait_for(gone, lambda: f"the end of job {job_id}:\n{self._situation()}")

    def start_now(self, job_id: str) -> None:
        """Shorten the wait that SLURM puts before a requeued job, from 6 s to 2.

        Not to nothing: a start in the second of the requeue meets "Job credential revoked" on its
        nodes, and the job is FAILED for good.
        """
        self.wait_job(job_id, "PENDING")
        done = self.run("scontrol", "update", f"jobid={job_id}", "StartTime=now+2")
        if done.returncode and "no longer pending" not in done.stderr:  # else it has begun already
            raise AssertionError(f"StartTime of job {job_id}: {done.stderr.strip()}")

    def end_in(self, job_id: str, seconds: int) -> None:
        """Move the end of a running job, so that no test waits for a limit in whole minutes.

        SLURM looks at limits every 30 s: the signals and the end come up to so much later.
        """
        end = datetime.now(UTC).astimezone() + timedelta(seconds=seconds)
        when = end.strftime("%Y-%m-%dT%H:%M:%S")
        self.run("scontrol", "update", f"jobid={job_id}", f"EndTime={when}", check=True)

    def job(self, job_id: str) -> Record:
        """What `scontrol show job` says of it; empty when SLURM does not know the job."""
        done = self.run("scontrol", "show", "job", "-o", job_id)
        if done.returncode and "Invalid job id" not in done.stderr:
            raise AssertionError(f"scontrol show job {job_id}: {done.stderr.strip()}")
        return parse_record(done.stdout.partition("\n")[0])

    def wait_job(
        self,
        job_id: str,
        wanted: str | Collection[str] | Callable[[Record], object],
    ) -> Record:
        """Wait until the job is in a state (or one of several), or its record fulfils a predicate.

        Raises:
            AssertionError: it never was; tells the record and the log.
        """
        states = {wanted} if isinstance(wanted, str) else wanted
        last: Record = {}

        def reached() -> Record | None:
            nonlocal last
            last = self.job(job_id)
            there = states(last) if callable(states) else last.get("JobState") in states
            return last if there else None

        def told() -> str:
            return f"job {job_id}: {wanted}\nlast seen: {last}\n{self._situation()}"

        found = wait_for(reached, told)
        assert found is not None
        return found

    def pids_of_job(self, job_id: str, node: str | None = None) -> list[int]:
        """Processes of the job, on all nodes or on one; without slurmstepd."""
        return [
            pid
            for pid in self._daemons.descendants()
            if self._job_of(pid) == job_id and node in (None, _node_of(pid))
        ]

    def _situation(self) -> str:
        queue = self.run("squeue", "-o", "%i %j %P %T %R %N").stdout
        return f"{self._daemons.node_states()}\n{queue}{tail(self.at.log('slurmctld'))}"


def _is_stepd(pid: int) -> bool:
    return processes.executable(pid).startswith("slurmstepd")


def _outlives_srun(pid: int) -> bool:
    """False for the helper that srun forks, which must die before it.

    Where srun is gone and has said nothing to it, it has SLURM kill the step on all nodes.
    """
    above = processes.parents().get(pid, 0)
    return not (processes.executable(pid) == "srun" == processes.executable(above))


def _node_of(pid: int) -> str:
    return processes.environment(pid).get("SLURMD_NODENAME", "")


def _stay_up(cluster: SlurmCluster) -> NoReturn:
    print(f"export SLURM_CONF={cluster.env['SLURM_CONF']}", flush=True)
    print("# nodes n1..n4; partitions work, grace, urgent; Ctrl-C ends it", flush=True)
    while True:
        signal.pause()


def main(argv: list[str] | None = None) -> int:
    """Run one cluster by hand."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.slurm_cluster")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("up", "run"):
        sub = commands.add_parser(name)
        sub.add_argument("--dir", type=Path, help="an empty or absent folder; removed at the end")
        if name == "run":
            sub.add_argument("argv", nargs="+", metavar="CMD")
    asked = parser.parse_args(argv)
    if lacking := missing():
        print(f"no SLURM cluster here, missing: {', '.join(lacking)}", file=sys.stderr)
        return 3
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with SlurmCluster(asked.dir) as cluster:
            if asked.command == "run":
                return subprocess.run(asked.argv, env=cluster.env, check=False).returncode
            _stay_up(cluster)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
