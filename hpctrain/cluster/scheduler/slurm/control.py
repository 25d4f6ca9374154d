"""SLURM from inside a job: why it is stopped, its requeue, and the same for agents in containers.

Since 24.05 SLURM itself may restart a job that exits in its grace time. Then nothing else may
requeue it: SLURM would remember the grace time, and restart the job after its next end too, even
after exit code 0 (seen with 24.11.5, not with 26.05.5). Up to 23.11 such a job is over. SLURM holds
a job (JobHoldMaxRequeue) that it restarted MaxBatchRequeue times: hpctrain requeues it before that,
and `forbid_requeue` makes the last end final.

A container has no SLURM commands: `serve`, a process beside the batch script, answers for agent and
rank 0 over the loop-back address, with a code of the start's secret in each message. Without an
answer the batch script decides. tests/unit/scheduler/test_slurm_grace.py, test_relay.py,
tests/slurm/test_requeue_path.py and test_container.py hold the promises.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.scheduler.slurm.command import QUERY_TIMEOUT_S, RETRY_PAUSE_S, run, run_until
from hpctrain.cluster.scheduler.slurm.jobs import job_facts
from hpctrain.cluster.scheduler.slurm.parse import (
    NOTHING,
    SACCT_COMMAND,
    AccountRow,
    names_of,
    parse_config,
    parse_jobs,
    parse_sacct,
)
from hpctrain.core.base import clock
from hpctrain.core.base.env import HPCTRAIN_RELAY, HPCTRAIN_RUN_DIR
from hpctrain.core.base.files import read_plain, write_private
from hpctrain.core.base.listener import Listener, listen_at
from hpctrain.core.base.records import NODE_DOWN, EndReason, JobContext, JobFacts, JobState
from hpctrain.core.base.secret import sign, verify
from hpctrain.core.base.text import fold_nodes
from hpctrain.errors import ClusterError, ClusterUnreachable
from hpctrain.ledger.run.layout import RunDir
from hpctrain.ledger.run.ownership import start_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpctrain.cluster.scheduler.base import JobControl
    from hpctrain.ledger.shapes.queue import JobShape


SINCE = (24, 5)
TIMEOUT_S = 5.0
IS_OVER = ("already finished", "already completing")
"""What SLURM says of a job that has ended, also of one that another process has cancelled."""
STILL_ENDING = (*IS_OVER, "no longer pending")
"""What it says of a job that is about to pend."""
ALREADY_REQUEUED = "pending execution"
"""scontrol's rc 1 where SLURM requeues the job by itself (submitit#1617)."""
FORBID_TIMEOUT_S = 10.0
"""The end of a finished job is not held up for longer by a silent slurmctld: a start that comes all
the same ends itself."""
PREVIOUS_END = {
    "NODE_FAIL": EndReason.NODE_FAILED,
    "PREEMPTED": EndReason.PREEMPTED,
    "REQUEUED": EndReason.REQUEUED,
    "TIMEOUT": EndReason.TIMED_OUT,
}
"""How sacct names the ends after which a job was run again."""


class SlurmControl:
    """Implements `JobControl` with scontrol.

    Attributes:
        job_id: Our own job; ``A_t`` in an array, since ``A`` alone would requeue all its tasks.
        restarts: The restart count with which this process was started. With it, a process that a
            node failure left behind cannot requeue the job away from its own successor.
        nodes: Nodes of this start; with them the loss of one differs from other requeues.
        timeout_s: How long slurmctld may be silent before we give up.
    """

    def __init__(
        self,
        job_id: str,
        *,
        restarts: int | None = None,
        nodes: Sequence[str] = (),
        timeout_s: float = QUERY_TIMEOUT_S,
    ) -> None:
        self.job_id = job_id
        self.restarts = restarts
        self.nodes = nodes
        self.timeout_s = timeout_s

    def facts(self) -> JobFacts:
        """Ask slurmctld about our own job."""
        record = self._record(clock.monotonic() + self.timeout_s)
        facts = job_facts(record)
        if self._is_requeued(facts) and self._lost_a_node():
            return replace(facts, reason=NODE_DOWN)
        return replace(facts, comes_back=comes_back(record))

    def requeue(self) -> None:
        """Ask for this job to be run again, patiently while slurmctld is down."""
        deadline = clock.monotonic() + self.timeout_s
        if self.restarts is not None and self._is_requeued(job_facts(self._record(deadline))):
            return
        try:
            run_until(["scontrol", "requeue", self.job_id], deadline=deadline)
        except ClusterUnreachable:
            raise
        except ClusterError as error:
            if ALREADY_REQUEUED not in str(error).lower():
                raise

    def exclude(self, nodes: Sequence[str]) -> None:
        """Keep nodes out of the next start, beside those that were kept out before.

        Only after `requeue`: of a running job SLURM refuses it ("no longer pending execution"), and
        from the requeue on it takes it, while the job's processes still end (measured on 22.05).
        """
        deadline = clock.monotonic() + self.timeout_s
        before = self._record(deadline).get("ExcNodeList", "")
        kept_out = [*names_of("" if before in NOTHING else before), *nodes]
        names = fold_nodes(list(dict.fromkeys(kept_out)))
        update = ["scontrol", "update", f"JobId={self.job_id}", f"ExcNodeList={names}"]
        run_until(update, deadline=deadline)

    def reshape(self, shape: JobShape) -> None:
        """Change nodes and time limit of the next start; only after `requeue`.

        A pending job's own user may raise both, a running job's neither (measured on 22.05). One
        number alone would be a minimum, and the CPUs must follow or fewer nodes never suffice.
        """
        deadline = clock.monotonic() + min(self.timeout_s, TIMEOUT_S)
        nodes, minutes = shape.nodes, -(-shape.limit_s // 60)
        update = ["scontrol", "update", f"JobId={self.job_id}", f"NumNodes={nodes}-{nodes}"]
        update += [f"NumCPUs={nodes}", f"TimeLimit={minutes}"]
        while True:
            try:
                run_until(update, deadline=deadline)
                break
            except ClusterUnreachable:
                raise
            except ClusterError as error:
                # SLURM has taken a job that it preempts off its nodes before it lets it pend.
                ending = any(sign in str(error).lower() for sign in STILL_ENDING)
                if not ending or clock.monotonic() > deadline:
                    raise
            clock.sleep(RETRY_PAUSE_S)

    def end(self) -> None:
        """End our own job: one whose first node is dead stays RUNNING, with nothing in it."""
        deadline = clock.monotonic() + self.timeout_s
        if not self._is_requeued(job_facts(self._record(deadline))):
            _run_unless_over(["scancel", self.job_id], deadline)

    def forbid_requeue(self) -> None:
        """Keep SLURM from running this job again, as `--no-requeue` would have.

        Since 24.05 a job that leaves in its grace time is run again whatever its exit code. Some
        versions do so at its next end as well, where it was requeued in a grace time before. SLURM
        does not run a job again that is over, such as one that the agents have cancelled.
        """
        deadline = clock.monotonic() + min(self.timeout_s, FORBID_TIMEOUT_S)
        if not self._is_requeued(job_facts(self._record(deadline))):
            update = ["scontrol", "update", f"JobId={self.job_id}", "Requeue=0"]
            _run_unless_over(update, deadline)

    def previous_end(self) -> EndReason:
        """Why the incarnation before this one ended, as far as accounting tells; else UNKNOWN.

        After a node failure no code of the job has run, so only SLURM can say what it was.
        """
        row = self._previous()
        return PREVIOUS_END[row.state] if row is not None else EndReason.UNKNOWN

    def previous_stop(self) -> float | None:
        """When it ended, as far as accounting tells."""
        row = self._previous()
        return row.end if row is not None else None

    def _previous(self) -> AccountRow | None:
        """The incarnation before this one in accounting."""
        try:
            rows = parse_sacct(run([*SACCT_COMMAND, "--jobs", self.job_id]))
        except ClusterError:  # no accounting here: nothing is known, and nothing more hangs on it
            return None
        # Our own incarnation is RUNNING, or has no row yet; the ended ones come in order.
        ended = [row for row in rows if row.state in PREVIOUS_END]
        return ended[-1] if ended else None

    def _record(self, deadline: float) -> dict[str, str]:
        text = run_until(["scontrol", "show", "job", self.job_id], deadline=deadline)
        records = parse_jobs(text)
        if not records:
            said = text.strip()[:80]
            raise ClusterError(f"scontrol show job {self.job_id} printed no job: {said!r}")
        return records[0]

    def _is_requeued(self, facts: JobFacts) -> bool:
        """Whether SLURM runs the job again without us: its count is ahead of this start's."""
        ours, now = self.restarts, facts.restarts
        return ours is not None and now is not None and now > ours

    def _lost_a_node(self) -> bool:
        """Whether a node of this start is down."""
        if not self.nodes:
            return False
        named = f"--nodes={fold_nodes(self.nodes)}"  # one by one too long for one argument
        try:
            states = run(["sinfo", "--noheader", "--Node", named, "--format=%T"])
        except ClusterError:  # the reason stays unknown, and what follows is the same
            return False
        return any(state.startswith("down") for state in states.split())


def _run_unless_over(args: Sequence[str], deadline: float) -> None:
    """Like `run_until`; a job that is over needs no more."""
    try:
        run_until(args, deadline=deadline)
    except ClusterUnreachable:
        raise
    except ClusterError as error:
        if not any(sign in str(error).lower() for sign in IS_OVER):
            raise


def of_agent(
    job_id: str, *, restarts: int, nodes: Sequence[str], kill_wait_s: float
) -> SlurmControl:
    """What an agent asks, or who asks for it.

    For half of KillWait at most: where slurmctld is silent, the batch side needs the other half.
    """
    timeout_s = min(QUERY_TIMEOUT_S, kill_wait_s / 2)
    return SlurmControl(job_id, restarts=restarts, nodes=nodes, timeout_s=timeout_s)


def comes_back(job: Mapping[str, str], ask: Callable[[list[str]], str] | None = None) -> bool:
    """Return whether SLURM runs a job again (`scontrol show job`); False if that is not certain."""
    if job.get("PreemptTime", "") in NOTHING or job.get("Requeue") != "1":
        return False
    ask = ask or _ask
    try:
        config = parse_config(ask(["scontrol", "show", "config"]))
        if _version(config) < SINCE or _is_held_next(job, config):
            return False
        return "REQUEUE" in _preempt_mode(job, config, ask)
    except ClusterError:  # a requeue too many is better than a run that does not come back
        return False


def _ask(args: list[str]) -> str:
    return run(args, timeout_s=TIMEOUT_S)


def _version(config: Mapping[str, str]) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d{1,9}", config.get("SLURM_VERSION", ""))[:2])


def _is_held_next(job: Mapping[str, str], config: Mapping[str, str]) -> bool:
    """Whether one more start by SLURM's own doing would hold the job. BatchFlag counts them."""
    flag, most = job.get("BatchFlag", ""), config.get("MaxBatchRequeue", "")
    return not flag.isdigit() or not most.isdigit() or int(flag) >= int(most)


def _preempt_mode(
    job: Mapping[str, str], config: Mapping[str, str], ask: Callable[[list[str]], str]
) -> list[str]:
    """What preemption does to this job: the words of its partition or QOS, else the cluster's."""
    mode = ""
    if config.get("PreemptType") == "preempt/partition_prio":
        text = ask(["scontrol", "show", "partition", job.get("Partition", "")])
        match = re.search(r"\bPreemptMode=(\S+)", text)
        mode = match[1] if match else ""
    elif config.get("PreemptType") == "preempt/qos":
        columns = ["--noheader", "--parsable2", "show", "qos", job.get("QOS", "")]
        mode = ask(["sacctmgr", *columns, "format=PreemptMode"]).strip()
        mode = "" if mode.lower() == "cluster" else mode
    return (mode or config.get("PreemptMode", "")).upper().split(",")


HOST = "127.0.0.1"
MOST_BYTES = 1 << 16
WORD_S = 5.0
"""An agent that has connected says what it wants at once; the answer may take what SLURM takes."""
LOOK_S = 1.0
COMES_S = 10.0
"""How long an agent waits for the process, which starts beside srun."""
FACTS_ALLOWED = frozenset({"facts", "previous_end", "previous_stop"})
DOES = frozenset({"requeue", "exclude", "forbid_requeue", "end"})


def serve(path: Path, secret: str, control: JobControl, *, is_over: Callable[[], bool]) -> None:
    """Answer the agent's questions until the batch script is gone.

    The agent finds the port at `path`. `is_over`, whether nobody will ask any more, is called once
    a second.
    """
    with ThreadPoolExecutor(1) as in_order:  # so that nobody waits for SLURM to be accepted

        def submit(asked: Mapping[str, Any], connection: socket.socket) -> None:
            in_order.submit(_answer, secret, control, asked, connection)

        def hear(said: bytes) -> Callable[[socket.socket], None] | None:
            if not said.endswith(b"\n"):
                return None
            asked = json.loads(verify(secret, "relay asks", said[:-1]))
            return lambda connection: submit(asked, connection)

        listener = Listener(
            listen_at(HOST), lambda: (b"", hear), proof_s=WORD_S, most_bytes=MOST_BYTES
        )
        write_private(path, f"{listener.port}\n")
        while not is_over():
            listener.turn(clock.monotonic() + LOOK_S)
        listener.close()


def _answer(
    secret: str, control: JobControl, asked: Mapping[str, Any], connection: socket.socket
) -> None:
    with connection, contextlib.suppress(OSError):  # it has left
        connection.settimeout(WORD_S)
        connection.sendall(_answered(secret, control, asked))


def _answered(secret: str, control: JobControl, asked: Mapping[str, Any]) -> bytes:
    value: object = None
    error = ""
    try:
        value = _carry_out(control, asked["what"], [str(node) for node in asked["nodes"]])
    except ClusterUnreachable as silence:
        error = f"unreachable:{silence}"
    except ClusterError as refusal:
        error = f"refused:{refusal}"
    text = json.dumps({"value": value, "error": error})
    return sign(secret, f"relay answers {asked['nonce']}", text).encode() + b"\n"


def _carry_out(control: JobControl, what: str, nodes: Sequence[str]) -> object:
    if what in FACTS_ALLOWED:
        value = getattr(control, what)()
        return asdict(value) if isinstance(value, JobFacts) else value
    if what not in DOES:
        raise ClusterError(f"nobody asks SLURM for {what!r}")
    getattr(control, what)(*([nodes] if what == "exclude" else []))
    return None


def _receive(connection: socket.socket, patience_s: float) -> bytes:
    """One line, without its end."""
    deadline, got = clock.monotonic() + patience_s, b""
    while not got.endswith(b"\n"):
        connection.settimeout(max(0.01, deadline - clock.monotonic()))
        more = connection.recv(MOST_BYTES)
        got += more
        if not more or len(got) > MOST_BYTES:
            raise ConnectionError("the connection was closed in the middle of a line")
    return got[:-1]


def control_here(job_id: str, *, restarts: int) -> JobControl:
    """Return what a rank asks: SLURM's control, or in a container the relay to it."""
    run = RunDir(Path(os.environ.get(HPCTRAIN_RUN_DIR, "")))
    return _outside(run, SlurmControl(job_id, restarts=restarts))


def control_of_agent(run: RunDir, context: JobContext) -> JobControl:
    """Return what an agent asks: SLURM's control, or in a container the relay to it."""
    control = of_agent(
        context.job_id,
        restarts=context.restarts,
        nodes=context.nodes,
        kill_wait_s=context.kill_wait_s,
    )
    return _outside(run, control)


def _outside(run: RunDir, control: SlurmControl) -> JobControl:
    """Return the control with this start's restart count, or in a container the relay to it."""
    port = os.environ.get(HPCTRAIN_RELAY)
    if not port or control.restarts is None:
        return control
    secret = start_secret(run, control.job_id, control.restarts)
    return RelayedControl(Path(port), secret, timeout_s=control.timeout_s)


class RelayedControl:
    """Implements `JobControl` by asking the process beside the batch script."""

    def __init__(self, path: Path, secret: str, *, timeout_s: float) -> None:
        """Ask nothing yet; `path` has the port of the relay, which may query for `timeout_s`."""
        self._path = path
        self._secret = secret
        self._timeout_s = timeout_s
        self._until = clock.monotonic() + COMES_S

    def facts(self) -> JobFacts:
        """See `SlurmControl`."""
        value = self._ask("facts")
        return JobFacts(**value | {"state": JobState(value["state"])})

    def previous_end(self) -> EndReason:
        """UNKNOWN where nobody answers."""
        try:
            return EndReason(self._ask("previous_end"))
        except ClusterError:
            return EndReason.UNKNOWN

    def previous_stop(self) -> float | None:
        """None where nobody answers."""
        with contextlib.suppress(ClusterError):
            stop: float | None = self._ask("previous_stop")
            return stop
        return None

    def exclude(self, nodes: Sequence[str]) -> None:
        """See `SlurmControl`."""
        self._ask("exclude", nodes)

    def requeue(self) -> None:
        """See `SlurmControl`."""
        self._ask("requeue")

    def end(self) -> None:
        """See `SlurmControl`."""
        self._ask("end")

    def forbid_requeue(self) -> None:
        """See `SlurmControl`."""
        self._ask("forbid_requeue")

    def _ask(self, what: str, nodes: Sequence[str] = ()) -> Any:
        """What the process said."""
        nonce = secrets.token_hex(8)
        text = json.dumps({"what": what, "nodes": list(nodes), "nonce": nonce})
        try:
            with self._connect() as connection:
                connection.sendall(sign(self._secret, "relay asks", text).encode() + b"\n")
                line = _receive(connection, self._timeout_s + WORD_S)
            answer = json.loads(verify(self._secret, f"relay answers {nonce}", line))
        except (OSError, ValueError) as error:
            raise ClusterUnreachable(
                f"nobody beside the batch script asks SLURM for this container ({error})"
            ) from None
        kind, _, why = answer["error"].partition(":")
        if kind:
            raise (ClusterUnreachable if kind == "unreachable" else ClusterError)(why)
        return answer["value"]

    def _connect(self) -> socket.socket:
        """Connect, once the process has come; it is waited for at the beginning only."""
        while True:
            try:
                port = int(read_plain(self._path))
                return socket.create_connection((HOST, port), timeout=WORD_S)
            except (OSError, ValueError):
                if clock.monotonic() > self._until:
                    raise
            clock.sleep(0.1)


def parent_is_gone(parent: int) -> Callable[[], bool]:
    """Whether the process that has started us is no more."""
    return lambda: os.getppid() != parent
