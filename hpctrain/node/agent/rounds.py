"""A round of ranks, as the parts of one node's agent share it.

tests/engines/test_node_agent.py holds the promises.
"""

from __future__ import annotations

import multiprocessing.connection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpctrain.ledger.run.layout import rank_log_path
from hpctrain.node.agent.resume import ResumeArgs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

    from hpctrain.core.base.records import FailureReport, StopCause
    from hpctrain.errors import CheckpointError
    from hpctrain.ledger.run.event_fields import LedgerFact
    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.node.agent.rendezvous import Loss, SignedStore
    from hpctrain.node.agent.stop_deadline import StopDeadline

Ending = Literal["left", "failed", "killed", "hung"]


@dataclass
class RoundEnd:
    """How a round of ranks ended, the same on every node.

    Attributes:
        ending: All ranks returned; one failed; they were killed because a stop took too long; or
            some had returned, and the others did nothing any more.
        restart: The agents start the ranks again in this allocation.
        silent_nodes: Nodes that are dead, by their numbers in the job: their agents did not answer
            after it, or they were lost.
        left_out: Why this node takes part in no round any more; then nobody else waits for it.
    """

    ending: Ending
    restart: bool = False
    why: str = ""
    failure: FailureReport | None = None
    silent_nodes: list[int] = field(default_factory=list)
    left_out: str = ""


class NothingToResume(Exception):
    """Before any rank was started: the run has sealed checkpoints, and none can be had."""

    def __init__(self, why: CheckpointError) -> None:
        super().__init__(str(why))
        self.why = why


class RoundPart:
    """One job beside the ranks of a round; at each moment it does nothing unless a subclass does.

    It is a context manager, entered once the ranks run and left once they are gone; the part that
    was entered last is left first.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of what belongs to the round."""

    def tick(self) -> RoundEnd | None:
        """Act about ten times a second; return the round's end where this part knows it."""

    def hear(self, news: Mapping[str, Any]) -> None:
        """Act on what node 0's agent has published to all agents."""

    def verdict(self, end: RoundEnd) -> None:
        """Note how the round ends; the ranks that are left are ended after this."""


class NodeRanks:
    """The ranks of this node in one round, in torch's order.

    Attributes:
        context: torch's, with the processes; None before they are forked.
    """

    def __init__(self, workers: Sequence[Any]) -> None:
        """Begin without processes."""
        self.workers = workers
        self.context: Any = None

    @property
    def first(self) -> int:
        """The lowest rank of this node."""
        return int(self.workers[0].global_rank)

    @property
    def in_all(self) -> int:
        """The number of ranks on all nodes."""
        return int(self.workers[0].world_size)

    @property
    def processes(self) -> list[Any]:
        """The ranks' process objects, whose sentinels are awaited; torch keeps them to itself."""
        context = getattr(self.context, "_pc", None)
        return [] if context is None else list(context.processes)

    def pairs(self) -> list[tuple[Any, Any]]:
        """Return each worker with its process."""
        return list(zip(self.workers, self.processes, strict=True))

    def wait(self, timeout_s: float) -> None:
        """Wait until a rank ends."""
        multiprocessing.connection.wait(  # those of ended ranks are always ready
            [one.sentinel for one in self.processes if one.exitcode is None], timeout=timeout_s
        )

    def has_returned(self, worker: Any, process: Any) -> bool:
        """Its program may have come to its end before its process has: a thread continues."""
        value = getattr(self.context, "_ret_vals", {}).get(worker.local_rank)
        came_back = process.exitcode is None and value is not None and not value.empty()
        return came_back or process.exitcode == 0


@dataclass
class AgentRound:
    """What the parts of one node's agent share in one round.

    Attributes:
        number: From 0 on; it is part of each key in the store.
        node: The name of this node.
        place: Of this node in the round.
        nodes: How many nodes the round has.
        store: The agents' store of this round.
        directory: The attempt's; known once node 0 has begun it.
        has_reported: This node has no rank left, and has told node 0.
    """

    number: int
    node: str
    place: int
    nodes: int
    store: SignedStore
    ranks: NodeRanks
    directory: Path = Path()
    has_reported: bool = False
    _published: int = 0

    def key(self, name: str) -> str:
        """Return the key of this round with that name."""
        return f"round/{self.number}/{name}"

    def say(self, name: str, value: Any) -> None:
        """Leave a value of this node in the store, over the one before."""
        self.store.set(self.key(f"{name}/{self.place}"), value)

    def report(self, failures: Sequence[FailureReport]) -> None:
        """Report to node 0 that no rank is left here, and what failed."""
        self.has_reported = True
        self.say("report", [asdict(failure) for failure in failures])
        self.store.count(self.key("reports"), 1)

    def say_again(self) -> None:
        """Say again what was written over, and have node 0 look at once."""
        if self.store.say_again():
            self.store.count(self.key("reports"), 1)

    def publish(self, news: Mapping[str, Any]) -> None:
        """Node 0: tell all agents; they read the news in order, one look each time round."""
        self.store.set(self.key(f"news/{self._published}"), news)
        self._published += 1

    def logs(self) -> list[Path]:
        """Return the logs of this node's ranks."""
        return [rank_log_path(self.directory, one.global_rank) for one in self.ranks.workers]


@dataclass
class RoundHooks:
    """What node 0's agent does around a round with the run and the scheduler.

    Attributes:
        begin: Takes the attempt's number; called before the ranks start, with their number.
        deadline: When the ranks must be gone, once a stop has been asked for.
        may_restart: Whether the ranks may start again here after this failure.
        notice: What asks ranks to leave that ask nobody: `StopNotice.look`.
        resume: What the ranks of this attempt resume from; may take long, since it reads what it
            names, and calls what it is given for each part of that. A CheckpointError of it ends
            the round before any rank is started.
        sealing: Seals what the program saves, beside the ranks of an attempt.
        starts: How often ranks of the run were started, this time included.
        more_args: What the program gets beside its own arguments at this start, which resumes from
            a path or None.
        record: Writes an event into the ledger.
        asked_stacks: The token of a user's request to know where the ranks are; "" for none.
        may_go_on: Whether ranks may start again after nodes were lost, where others can continue.
        lost: Told of each node that was lost, also of spares.
    """

    begin: Callable[[int], Attempt]
    deadline: StopDeadline
    may_restart: Callable[[FailureReport | None], bool]
    notice: Callable[[Callable[[], bool]], StopCause | None]
    resume: Callable[[Attempt, Callable[[int], None]], str | None] = lambda _attempt, _on_bytes: (
        None
    )
    sealing: Callable[[Attempt], RoundPart] = lambda _attempt: RoundPart()
    starts: Callable[[], int] = lambda: 1
    more_args: Callable[[int, str | None], ResumeArgs] = lambda _start, _resume: ResumeArgs()
    record: Callable[[LedgerFact], None] = lambda _: None
    asked_stacks: Callable[[], str] = lambda: ""
    may_go_on: Callable[[str], bool] = lambda _why: False
    lost: Callable[[Loss, tuple[int, ...] | None], None] = lambda _loss, _members: None
