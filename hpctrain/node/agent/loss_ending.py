"""The end of an attempt by the loss of a node, where the run stays alive in its allocation.

Where node 0 itself is lost with its batch script nobody would end or requeue the job (SLURM keeps
it running for its other nodes), so the agents that are left continue without it, or requeue the
job, one after another.

Those that continue begin anew as the next *generation*. Each takes its own process over (exec),
since who leads forks what serves the others, which a process can only while it has one thread.
tests/unit/agent/test_loss_ending.py, tests/unit/agent/test_leader_failover.py and
tests/slurm/test_stay_alive.py hold the promises.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from hpctrain.core.base import clock
from hpctrain.core.base.env import HPCTRAIN_GENERATION, HPCTRAIN_REPLICA_SERVER
from hpctrain.core.base.files import write_private
from hpctrain.core.base.process import free_port, print_to
from hpctrain.core.base.records import EndReason, Next
from hpctrain.core.base.secret import Forged, code, sign, verify
from hpctrain.errors import ClusterError, Fenced, HpctrainError
from hpctrain.ledger.plan.decide import decide_end
from hpctrain.ledger.run import event_types as kinds
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.fence import (
    left_text,
    read_fence,
    run_lock,
    start_without_ranks,
    take_attempt,
)
from hpctrain.node.agent.control import addresses
from hpctrain.node.agent.ending import AttemptEnding
from hpctrain.node.agent.notify import notify

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from hpctrain.core.base.records import JobContext
    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.node.agent.rendezvous import Loss

log = logging.getLogger("hpctrain.agent")

TURN_S = 5.0
"""Between two agents that would requeue the job: the first one's requeue ends the others."""
LOOK_S = 0.2
"""So often it is looked whether another agent continues."""
FAILURES = {EndReason.CRASHED, EndReason.NODE_FAILED, EndReason.UNKNOWN}
"""Ends after which ranks may start again in the same job."""
PROOF_S = 5.0
"""So long has a first node that lives to show it: by a new round, or by a word that we are lost."""


ABOUT = "successor"


@dataclass(frozen=True)
class Generation:
    """The agents of a job after its first node was lost, and once more for each that led them.

    Attributes:
        number: From 1 on; srun's own agents are generation 0.
        leader: The node whose agent leads.
        address: Under which the others reach it.
        port: The first of its ports.
        follows: The attempt after which it continues.
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


class NoLeader:
    """Where no agent can lead after the first node: there is no next generation."""

    is_possible = False
    """Whether an agent of this one may begin it."""

    def claimed(self) -> Generation | None:
        """What another agent has begun: nothing."""
        return None

    def claim(self, follows: int, lost: Collection[str] = ()) -> Generation:
        """Begin one, which cannot be here."""
        del follows, lost
        raise Fenced("no agent can lead the others of this job")


class LeaderFailover(NoLeader):
    """The next generation, as an agent of this one looks for it or begins it."""

    is_possible = True

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
    log.warning("continues, led by %s", generation.leader)
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


class LossEnding(AttemptEnding):
    """The end of attempts, losses of nodes included.

    Attributes:
        failover: How the agents that are left continue without node 0.
    """

    failover = NoLeader()

    def after_loss(self, attempt: int, why: str) -> bool:
        """Write down a round that a node's loss has ended; whether another may follow it here."""
        self._look(attempt)
        facts = self._facts(attempt, "crashed", why=why, nodes_failed=True, in_place=True)
        decision = decide_end(facts, self._end.history, self._settings.budget)
        if decision.next is not Next.RESTART or self._is_left_behind(attempt):
            return False
        self.excluded_nodes.are_out(self._end.history)  # where others can do without such nodes
        self._end.carry_out(facts, decision)
        self.pause_s = 0.0
        notify(self._run, self._settings.notify, attempt)
        return True

    def record_loss(self, attempt: int | None, loss: Loss, members: Sequence[str]) -> None:
        """Record which node was lost, and the members of the next round; none if there is none.

        `attempt` is None before the first.
        """
        fact = kinds.NodeLost(
            node=loss.name, why=loss.why, was_spare=not loss.was_member, members=tuple(members)
        )
        log.warning("%s was lost: %s", loss.name, loss.why)
        if attempt is None:
            ledger.record(self._run, fact)
        elif self._is_current(attempt):  # not by a first node that thaws: the others continue
            self.record(attempt, fact)

    def after_first_node(
        self,
        why: str,
        node: str,
        attempt: int,
        turn: int,
        sleep: Callable[[float], None] = clock.sleep,
    ) -> Generation | None:
        """Requeue or continue the job after node 0 was lost.

        If others continue without this node, it is this node that was lost. A node that thaws, or
        whose network was cut, hears of the first one as little as after its death. `attempt` is the
        last one of this node, 0 for none; `turn` is how many of the agents left come first.

        Returns:
            The generation of agents that this one continues with; None to leave.
        """
        try:
            begun = self._next_generation(why, node, attempt, turn, sleep)
        except Fenced as error:  # the first one lives, and has begun another attempt meanwhile
            log.warning("the job continues without %s: %s", node, error)
            return None
        # It thaws, and was lost before the first one.
        if begun is not None and node not in begun.nodes:
            log.warning("the job continues without %s", node)
            return None
        return begun

    def _next_generation(
        self, why: str, node: str, attempt: int, turn: int, sleep: Callable[[float], None]
    ) -> Generation | None:
        for _ in range(round((PROOF_S + turn * TURN_S) / LOOK_S)):
            if (begun := self._claimed()) is not None:
                return begun
            sleep(LOOK_S)
        fence = read_fence(self._run)
        own = self._context.job_id, self._context.restarts
        if fence is None or (fence.job_id, fence.restarts) != own:
            self._end_unbegun(fence, why)
            return None
        if not self._is_left_alone(fence, node, attempt):
            return None
        first = self._context.nodes[0]
        log.warning("%s was lost: %s; what follows is decided here", first, why)
        self.record(fence.number, kinds.NodeLost(node=first, why=why, was_first=True))
        lost = f"{first} was lost: {why}"
        if self.failover.is_possible and self.after_loss(fence.number, lost):
            try:
                return self.failover.claim(fence.number, self._lost_nodes())
            except Fenced:
                raise
            except (HpctrainError, OSError) as error:
                log.warning("nobody can lead the agents that are left: %s", error)
        if (begun := self._claimed()) is not None:  # while this one looked
            return begun
        facts = self._facts(fence.number, "crashed", why=lost, nodes_failed=True)
        self._decide(facts)
        return None

    def _end_unbegun(self, fence: Attempt | None, why: str) -> None:
        """Requeue a job whose first node was lost before its first attempt: nobody else would.

        `fence` is the newest attempt, of another start.
        """
        context, scheduler = self._context, self._ask()
        own = context.job_id, context.restarts
        if scheduler is None or self._is_gone(scheduler):
            return
        began = context.start_time
        if fence is not None and fence.job_id != own[0] and (not began or fence.started > began):
            return  # the run seems to continue in that job
        try:
            taken = take_attempt(self._run, job_id=own[0], restarts=own[1])
        except (HpctrainError, OSError) as error:
            log.warning("the job is left as it is: %s", error)
            return
        begun = start_without_ranks(
            self._run, taken, by="start", nodes=context.nodes, job_started=began
        )
        ledger.record(self._run, begun, attempt=taken.number)
        fact = kinds.NodeLost(node=context.nodes[0], why=why, was_first=True)
        ledger.record(self._run, fact, attempt=taken.number)
        lost = f"{context.nodes[0]} was lost before a rank had started: {why}"
        log.warning("%s; what follows is decided here", lost)
        self._decide(self._facts(taken.number, "crashed", why=lost, nodes_failed=True))

    def _is_left_alone(self, fence: Attempt, node: str, attempt: int) -> bool:
        """Whether nobody has seen to the job of this start."""
        if (attempt and fence.number > attempt) or node in self._lost_nodes():
            log.warning("the job continues without %s", node)
            return False
        end = self._look(fence.number).last(kinds.AttemptEnded, fence.number)
        if end is not None and end.next not in {Next.RESTART, Next.ASK_BATCH}:
            return False
        if end is not None and end.next is Next.ASK_BATCH and end.reason not in FAILURES:
            return False  # the scheduler stops the job, which no attempt here outlives
        scheduler = self._ask()
        return scheduler is None or not self._is_gone(scheduler)

    def check_leads(self) -> None:
        """Before an attempt begins: whether another agent leads those that are left by now.

        Raises:
            Fenced: one does.
        """
        if (begun := self._claimed()) is not None:
            raise Fenced(f"{begun.leader} leads the agents of this job that are left")

    def _is_current(self, attempt: int) -> bool:
        # A first node that thaws must not end what others continue with, also before they take part
        # in their first attempt.
        return super()._is_current(attempt) and self._claimed() is None

    def end_without_nodes(self, why: str) -> int:
        """End a new generation of agents for which too few nodes came; return the exit code."""
        fence = read_fence(self._run)
        number = None if fence is None else fence.number
        self._look(number)
        return self._decide(self._facts(number or 0, "crashed", why=why, nodes_failed=True))

    def end_job(self) -> None:
        """End the job where the run is over: its batch script, which would end it, may be gone."""
        fence = read_fence(self._run)
        number = None if fence is None else fence.number
        end = self._look(number).last(kinds.AttemptEnded, number)
        if end is None or end.next is not Next.STOP:
            return
        try:
            self._control.end()
        except ClusterError as error:
            log.warning("the run is over, and its job could not be ended: %s", error)

    def _lost_nodes(self) -> set[str]:
        """Nodes that this start of the job has lost, as its first node has written them down."""
        start: tuple[str, int | None] = ("", None)
        lost: set[str] = set()
        for event in ledger.read(self._run):
            if isinstance(event.fact, kinds.AttemptStarted):
                before, start = start, (event.fact.job_id, event.fact.restarts)
                if start != before:
                    lost.clear()
            elif isinstance(event.fact, kinds.NodeLost) and not event.fact.was_first:
                lost.add(event.fact.node)
        return lost

    def _claimed(self) -> Generation | None:
        try:
            return self.failover.claimed()
        except OSError as error:
            log.warning("whether another agent continues cannot be read: %s", error)
            return None
