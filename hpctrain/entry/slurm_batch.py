"""The commands of a job's script: what it asks before and after its one srun line.

    python -m hpctrain.entry.slurm_batch before RUN TOKEN      prints exports for the shell
    python -m hpctrain.entry.slurm_batch after RUN TOKEN --rc N --term 0|1 [--why TEXT]
    python -m hpctrain.entry.slurm_batch relay RUN             asks SLURM for agents in containers
    python -m hpctrain.entry.slurm_batch staged RUN --way W --seconds N --why TEXT
                                                               records what stage.sh pipes into it
    python -m hpctrain.entry.slurm_batch body                  prints where body.sh lies

`before` starts in a few hundredths of a second; what scontrol does not answer, or refuses, it does
without. `after` requeues where no agent could, and its exit code is the job's.
tests/unit/scheduler/test_slurm_environment.py and test_site_script.py hold the promises.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain.cluster.scheduler.slurm.command import KILL_WAIT_S, own_job_id, own_restarts, resolves
from hpctrain.cluster.scheduler.slurm.command import run as run_command
from hpctrain.cluster.scheduler.slurm.parse import (
    parse_config_seconds,
    parse_jobs,
    parse_records,
    read_nodes,
)
from hpctrain.core.base import VERSION
from hpctrain.core.base.env import (
    HPCTRAIN_BATCH_VERSION,
    HPCTRAIN_JOB_END,
    HPCTRAIN_JOB_START,
    HPCTRAIN_KILL_WAIT_S,
    HPCTRAIN_MASTER_ADDR,
    HPCTRAIN_NODES,
    HPCTRAIN_PORT,
    HPCTRAIN_RELAY,
    HPCTRAIN_RESTARTS,
)
from hpctrain.core.base.log import configure
from hpctrain.core.base.process import free_port
from hpctrain.errors import ClusterError, ClusterUnreachable, HpctrainError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

log = logging.getLogger("hpctrain.entry")

ASK_TIMEOUT_S = 10.0


def main(argv: Sequence[str]) -> int:
    """Run one of them; the exit code is the batch script's."""
    configure("batch")
    try:
        match list(argv):
            case ["before", root, _]:
                return _before(root)
            case ["after", root, token, "--rc", rc, "--term", term]:
                return _after(root, token, rc, term)
            case ["after", root, token, "--rc", rc, "--term", term, "--why", why]:
                return _after(root, token, rc, term, why)
            case ["staged", root, "--way", way, "--seconds", seconds, "--why", why]:
                _staged(Path(root), sys.stdin, way=way, seconds=float(seconds), why=why)
            case ["relay", root]:
                _relay(Path(root), os.environ)
            case ["body"]:
                from hpctrain.cluster.scheduler.slurm.script import body_path

                print(body_path())
            case _:
                raise UsageError(
                    f"hpctrain.entry.slurm_batch: {' '.join(argv)!r}: see its docstring"
                )
    except HpctrainError as error:
        log.error("%s", error)  # noqa: TRY400 - a user's mistake, no bug of ours
        return error.exit_code
    return 0


def _after(root: str, token: str, rc: str, term: str, why: str = "") -> int:
    from hpctrain.entry.slurm_after import after

    if one_of_many(os.environ):  # `before` has said so
        return UsageError.exit_code
    return after(root, token, rc=int(rc), term=term == "1", why=why, env=os.environ)


def _before(root: str) -> int:
    if many := one_of_many(os.environ):
        raise UsageError(many)
    spec = _raw_spec(root)
    if _is_held_back(root, spec):
        from hpctrain.ledger.plan.decide import EXIT_STOPPED

        return EXIT_STOPPED
    for name, value in exports(os.environ, _meeting_point(spec)).items():
        print(f"export {name}={shlex.quote(value)}")
    print(f"hpctrain_evaluate={_evaluates(spec)}")
    if _stays_alive(spec):
        print("hpctrain_alive=1")
    for line in _staging(root):
        print(line)
    return 0


def one_of_many(env: Mapping[str, str]) -> str:
    """Why this job cannot be a run's, or "": of several jobs each would fence the others out."""
    what = ""
    if env.get("SLURM_ARRAY_TASK_ID"):
        what = f"a task of the array {env.get('SLURM_ARRAY_JOB_ID')}"
    elif env.get("SLURM_HET_SIZE", "1") != "1":
        what = "a part of a heterogeneous job"
    if not what:
        return ""
    return (
        f"job {env['SLURM_JOB_ID']} is {what}, and a run is one plain job: submit the script by "
        "itself for each run, without --array, `#SBATCH hetjob` and ':'"
    )


class MeetingPoint(NamedTuple):
    """Under which name or address the site's nodes reach the first one."""

    template: str = ""
    """{host} stands for the node's name; "" for the name itself."""
    resolve: str = "name"
    """What is handed on: the "name", or its "ipv4" or "ipv6" address."""


def exports(env: Mapping[str, str], meeting: MeetingPoint | None = None) -> dict[str, str]:
    """Return environment variables with what every agent of this start is to know.

    Raises:
        ClusterError: no port is free on this node.
    """
    job_id, restarts = own_job_id(env), own_restarts(env)
    nodelist = env.get("SLURM_JOB_NODELIST", "")
    nodes = read_nodes(nodelist)
    variables = {
        HPCTRAIN_PORT: str(free_port(job_id, restarts)),
        HPCTRAIN_RESTARTS: str(restarts),
        HPCTRAIN_NODES: nodelist,  # all names would be too long for one variable
        HPCTRAIN_BATCH_VERSION: VERSION,
    }
    variables |= _asked(job_id, nodes)
    address = _met_at(nodes[0], meeting) if nodes and meeting else ""
    return variables | ({HPCTRAIN_MASTER_ADDR: address} if address else {})


def _relay(root: Path, env: Mapping[str, str]) -> None:
    """Serve until the batch script has gone."""
    from hpctrain.cluster.scheduler.slurm.control import of_agent, parent_is_gone, serve
    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.ledger.run.ownership import start_secret

    is_over = parent_is_gone(os.getppid())
    job_id, restarts = own_job_id(env), own_restarts(env)
    kill_wait_s = float(env.get(HPCTRAIN_KILL_WAIT_S) or KILL_WAIT_S)
    nodes = read_nodes(env.get("SLURM_JOB_NODELIST", ""))
    control = of_agent(job_id, restarts=restarts, nodes=nodes, kill_wait_s=kill_wait_s)
    secret = start_secret(RunDir(root), job_id, restarts)
    serve(Path(env[HPCTRAIN_RELAY]), secret, control, is_over=is_over)


def _asked(job_id: str, nodes: Sequence[str]) -> dict[str, str]:
    """What only slurmctld knows: the job's times, its KillWait, where the first node is.

    A site may show users no nodes (PrivateData), so each question stands for itself; a slurmctld
    that is silent is asked no second one.
    """
    variables: dict[str, str] = {}
    for ask in (partial(_times, job_id), _kill_wait, partial(_first_node, nodes)):
        try:
            variables |= ask()
        except ClusterUnreachable as error:
            log.warning("%s; going on without it", error)
            break
        except (ClusterError, ValueError) as error:
            log.warning("%s; going on without it", error)
    return variables


def _times(job_id: str) -> dict[str, str]:
    records = parse_jobs(_scontrol("show", "job", job_id))
    job = records[0] if records else {}
    times = {HPCTRAIN_JOB_END: "EndTime", HPCTRAIN_JOB_START: "StartTime"}
    return {name: job[key] for name, key in times.items() if job.get(key, "").isdigit()}


def _kill_wait() -> dict[str, str]:
    seconds = parse_config_seconds(_scontrol("show", "config"), "KillWait")
    return {} if seconds is None else {HPCTRAIN_KILL_WAIT_S: f"{seconds:g}"}


def _first_node(nodes: Sequence[str]) -> dict[str, str]:
    return {HPCTRAIN_MASTER_ADDR: _address(nodes[0])} if nodes else {}


def _is_held_back(root: str, spec: dict[str, Any]) -> bool:
    """Whether a run that must be done before this one is not; its ledger and the log say which.

    Raises:
        HpctrainError: a ledger cannot be read now; the end of the script sees to that.
    """
    if not (after := spec.get("after")):
        return False
    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.node.agent.batch_side import held_back

    try:
        return bool(held_back(RunDir(Path(root)), after, own_job_id(os.environ)))
    except OSError as error:
        raise HpctrainError(f"a run that is to be done first: {error}") from None


def _raw_spec(root: str) -> dict[str, Any]:
    """The run's spec.json as it is: this process has no time."""
    with contextlib.suppress(OSError, ValueError):  # a hand-written script's run has none
        raw = json.loads((Path(root) / "spec.json").read_text())
        return raw if isinstance(raw, dict) else {}
    return {}


def _meeting_point(spec: dict[str, Any]) -> MeetingPoint | None:
    with contextlib.suppress(KeyError, TypeError):  # no preset in it
        network = spec["preset"]["network"]
        meeting = MeetingPoint(network["rendezvous_host"], network["resolve"])
        return None if meeting == MeetingPoint() else meeting
    return None


def _staging(root: str) -> list[str]:
    """What of staging.json stage.sh needs; none where nothing is to be staged."""
    from hpctrain.ledger.run.layout import RunDir

    run = RunDir(Path(root))
    if not run.staging.exists():
        return []
    from hpctrain.cluster.scheduler.slurm.script import shell_variables
    from hpctrain.ledger.run.staging import Staging, read_staging

    try:
        staging = read_staging(run)
    except (OSError, ValueError, TypeError) as error:
        staging = Staging(why=f"{run.staging} cannot be read: {error}")
    return shell_variables(staging) if staging else []


def _staged(root: Path, lines: Iterable[str], *, way: str, seconds: float, why: str) -> None:
    from hpctrain.cluster.scheduler.slurm.script import outcome
    from hpctrain.ledger.run import events as ledger
    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.observe.status.event_lines import staged

    nodes = read_nodes(os.environ.get("SLURM_JOB_NODELIST", ""))
    job = own_job_id(os.environ), own_restarts(os.environ)
    fact = outcome(lines, nodes, job, way=way, seconds=seconds, why=why)
    log.warning("%s", staged(fact)) if fact.not_staged else log.info("%s", staged(fact))
    ledger.record(RunDir(root), fact)


def _evaluates(spec: dict[str, Any]) -> str:
    """Whether somebody is to look after the run's evaluations, for the shell: 1 or nothing."""
    beside = spec.get("beside")
    return "1" if isinstance(beside, dict) and "evaluate" in beside else ""


def _stays_alive(spec: dict[str, Any]) -> bool:
    """Whether the job outlives its nodes: as `AliveSettings.is_on`, without its import."""
    with contextlib.suppress(KeyError, TypeError):
        alive = spec["settings"]["alive"]
        return bool(alive["spares"]) or alive["shrink"] == "auto"
    return False


def _met_at(node: str, meeting: MeetingPoint) -> str:
    """Where the site's preset lets the ranks meet; "" where that means nothing on this node."""
    name = meeting.template.replace("{host}", node) or node
    family = {"ipv4": socket.AF_INET, "ipv6": socket.AF_INET6}.get(meeting.resolve)
    try:
        addresses = socket.getaddrinfo(name, None, family or socket.AF_UNSPEC)
    except (OSError, UnicodeError) as error:
        log.warning(
            "%s has no %s here (%s), though the site's [network] says so; ranks meet at its own "
            "address instead",
            name,
            meeting.resolve if family else "address",
            error,
        )
        return ""
    return str(addresses[0][4][0]) if family else name


def _address(node: str) -> str:
    """The node's name where it is a host's name, else the address under which slurmctld reaches it.

    Several nodes on one host, as in a test cluster, have names that mean nothing outside SLURM.
    """
    records = parse_records(_scontrol("show", "node", node))
    record = records[0] if records else {}
    if record.get("NodeHostName", node) == node and resolves(node):
        return node
    return record.get("NodeAddr", node)


def _scontrol(*args: str) -> str:
    return run_command(["scontrol", *args], timeout_s=ASK_TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
