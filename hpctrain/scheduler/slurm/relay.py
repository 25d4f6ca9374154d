"""SLURM for an agent inside a container, which has none of its commands.

A process beside the batch script (`serve`) asks in its place, so that the agent of node 0, and rank
0, know and do inside what they would outside: how a stop is meant, when the job will be killed, the
requeue, the nodes that are kept out of it. They speak over the loop-back address, which runtimes
share with their host; each word carries a code of the start's secret. Where nobody answers the
agent leaves the decision to the batch script, as it does where slurmctld is silent.
tests/unit/scheduler/test_relay.py and tests/slurm/test_container.py hold the promises.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.base import clock
from hpctrain.base.env import HPCTRAIN_RELAY, HPCTRAIN_RUN_DIR
from hpctrain.base.files import read_plain, write_private
from hpctrain.base.listener import Listener, listen_at
from hpctrain.base.records import EndReason, JobFacts, JobState
from hpctrain.base.secret import sign, verify
from hpctrain.errors import ClusterError, ClusterUnreachable
from hpctrain.run.layout import RunDir
from hpctrain.run.ownership import start_secret
from hpctrain.scheduler.slurm.control import SlurmControl

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpctrain.scheduler.base import JobControl

HOST = "127.0.0.1"
MOST_BYTES = 1 << 16
WORD_S = 5.0
"""An agent that has connected says what it wants at once; the answer may take what SLURM takes."""
LOOK_S = 1.0
COMES_S = 10.0
"""How long an agent waits for the process, which starts beside srun."""
TELLS = frozenset({"facts", "previous_end", "previous_stop"})
DOES = frozenset({"requeue", "exclude", "forbid_requeue", "end"})


def serve(path: Path, secret: str, control: JobControl, *, is_over: Callable[[], bool]) -> None:
    """Answer the agent's questions until the batch script is gone.

    Args:
        path: Where the agent finds the port.
        secret: Of this start of the job.
        control: SLURM's, for our own job.
        is_over: Whether nobody will ask any more; looked at once a second.
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
    if what in TELLS:
        value = getattr(control, what)()
        return asdict(value) if isinstance(value, JobFacts) else value
    if what not in DOES:
        raise ClusterError(f"nobody asks SLURM for {what!r}")
    getattr(control, what)(*([nodes] if what == "exclude" else []))
    return None


def _receive(connection: socket.socket, patience_s: float) -> bytes:
    """One line, without its end.

    Raises:
        OSError: none came in time, or the other has gone.
    """
    deadline, got = clock.monotonic() + patience_s, b""
    while not got.endswith(b"\n"):
        connection.settimeout(max(0.01, deadline - clock.monotonic()))
        more = connection.recv(MOST_BYTES)
        got += more
        if not more or len(got) > MOST_BYTES:
            raise ConnectionError("the connection was closed in the middle of a line")
    return got[:-1]


def control_here(job_id: str, *, restarts: int) -> JobControl:
    """What a rank asks: SLURM, or outside of its container, for whom SLURM is there.

    Args:
        job_id: Our own job.
        restarts: The restart count with which this process was started.
    """
    run = RunDir(Path(os.environ.get(HPCTRAIN_RUN_DIR, "")))
    return outside(run, SlurmControl(job_id, restarts=restarts))


def outside(run: RunDir, control: SlurmControl) -> JobControl:
    """The same control, or who asks in its place where this process is in a container.

    Args:
        run: The run, which holds the start's secret.
        control: With the restart count of this start.
    """
    port = os.environ.get(HPCTRAIN_RELAY)
    if not port or control.restarts is None:
        return control
    secret = start_secret(run, control.job_id, control.restarts)
    return RelayedControl(Path(port), secret, timeout_s=control.timeout_s)


class RelayedControl:
    """Implements `JobControl` by asking the process beside the batch script."""

    def __init__(self, path: Path, secret: str, *, timeout_s: float) -> None:
        """Nothing is asked yet.

        Args:
            path: Where that process has left its port.
            secret: Of this start of the job.
            timeout_s: How long it asks SLURM at most.
        """
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
        """What the process said.

        Raises:
            ClusterError: SLURM has refused.
            ClusterUnreachable: it, or the process, gave no answer.
        """
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
        """Connect, once the process has come; it is waited for at the beginning only.

        Raises:
            OSError: it is not there.
            ValueError: what lies there names no port.
        """
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
