"""Going on where the first node was lost, whose agent led the others.

SLURM keeps such a job for its other nodes, without its batch script and its srun. The agents that
are left begin anew as the next *generation*. One of them leads it: it leaves a claim in the run's
directory, and the others look for that. Each takes its own process over (exec), since who leads
forks what serves the others, which a process can only while it has one thread.
tests/unit/agent/test_succession.py and tests/slurm/test_stay_alive.py hold the promises.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from hpctrain.core.base.env import HPCTRAIN_GENERATION, HPCTRAIN_REPLICA_SERVER
from hpctrain.core.base.files import write_private
from hpctrain.core.base.process import free_port, print_to
from hpctrain.core.base.secret import Forged, code, sign, verify
from hpctrain.errors import Fenced
from hpctrain.ledger.run.fence import left_text, read_fence, run_lock
from hpctrain.node.agent.control import addresses

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from hpctrain.core.base.records import JobContext
    from hpctrain.ledger.run.layout import RunDir

log = logging.getLogger("hpctrain.agent")

ABOUT = "successor"


@dataclass(frozen=True)
class Generation:
    """The agents of a job after its first node was lost, and once more for each that led them.

    Attributes:
        number: From 1 on; srun's own agents are generation 0.
        leader: The node whose agent leads.
        address: Under which the others reach it.
        port: The first of its ports.
        follows: The attempt after which it goes on.
        lost: The nodes that led before it, and those that nobody is to wait for.
        nodes: All others, the leader first.
    """

    number: int
    leader: str
    address: str
    port: int
    follows: int
    lost: tuple[str, ...]
    nodes: tuple[str, ...]

    def context(self, of_start: JobContext) -> JobContext:
        """Return a node's place in this generation, from its place as srun has started it."""
        own, nodes = of_start.nodes[of_start.node_rank], list(self.nodes)
        return replace(
            of_start,
            nodes=nodes,
            node_rank=nodes.index(own),
            master_addr=self.address,
            port=self.port,
        )

    def secret(self, of_start: str) -> str:
        """Return its agents' secret, made of the start's: older generations count no more."""
        return code(of_start, "generation", self.number)


class Succeeds(Exception):
    """This process is to become an agent of the next generation.

    Attributes:
        generation: Which.
        replica_server: The process with copies of the state, as `NodeControl.hand_over` gave it.
    """

    replica_server = ""

    def __init__(self, generation: Generation) -> None:
        super().__init__(f"generation {generation.number}, led by {generation.leader}")
        self.generation = generation


def generation_of(environ: Mapping[str, str]) -> Generation | None:
    """The generation of this process; None where srun has started it."""
    text = environ.get(HPCTRAIN_GENERATION)
    return _generation(json.loads(text)) if text else None


class Succession:
    """The next generation, as an agent of this one looks for it or begins it."""

    def __init__(self, run: RunDir, secret: str, context: JobContext) -> None:
        """Look at nothing yet; `context` is this node's place in this generation."""
        self._run, self._secret, self._context = run, secret, context
        self._now = generation_of(os.environ)
        self._number = 1 if self._now is None else self._now.number + 1

    def claimed(self) -> Generation | None:
        """What another agent has begun, or another after that; None where none has.

        Raises:
            OSError: nobody can tell.
        """
        text = left_text(self._run.successor)
        if not text:
            return None
        try:
            said = _generation(json.loads(verify(self._secret, ABOUT, text)))
        except (Forged, ValueError, TypeError):  # of another start, or written half
            return None
        return said if said.number >= self._number else None

    def claim(self, follows: int, lost: Collection[str] = ()) -> Generation:
        """Begin a generation after attempt `follows`, or join what another agent has begun.

        Nobody is to wait for the nodes in `lost`, beside the first one.

        Raises:
            OSError: it cannot be written down.
            Fenced: another attempt has begun.
            HpctrainError: the run's lock cannot be had, or no port.
        """
        context = self._context
        own, first = context.nodes[context.node_rank], context.nodes[0]
        with run_lock(self._run):
            if (there := self.claimed()) is not None:
                return there
            newest = read_fence(self._run)
            if newest is not None and newest.number != follows:
                raise Fenced(f"attempt {newest.number} has begun: this node does not lead the job")
            _, address = addresses(context.master_addr, context.node_rank)
            port = free_port(context.job_id, context.restarts)
            before = self._now.lost if self._now is not None else ()
            others = [node for node in context.nodes[1:] if node in lost and node != own]
            gone = (*before, first, *others)
            left = [node for node in context.nodes if node and node not in {own, *gone}]
            nodes = (own, *dict.fromkeys(left))
            begun = Generation(self._number, own, address, port, follows, gone, nodes)
            text = sign(self._secret, ABOUT, json.dumps(asdict(begun)))
            write_private(self._run.successor, text, shared=False)
            return begun


def take_over(
    generation: Generation, run: RunDir, environ: Mapping[str, str], replica_server: str = ""
) -> NoReturn:
    """Become an agent of that generation, in this process; srun is gone, so it prints elsewhere.

    This process was started with `environ`; for `replica_server` see `Succeeds`.
    """
    log.warning("goes on, led by %s", generation.leader)
    print_to(run.jobs / f"generation-{generation.number}.out")
    arguments = [sys.executable, *sys.orig_argv[1:]]
    variables = {
        HPCTRAIN_GENERATION: json.dumps(asdict(generation)),
        HPCTRAIN_REPLICA_SERVER: replica_server,
    }
    os.execve(sys.executable, arguments, {**environ, **variables})  # noqa: S606


def _generation(said: Mapping[str, Any]) -> Generation:
    names = {name: tuple(said[name]) for name in ("lost", "nodes")}
    return Generation(**{**said, **names})
