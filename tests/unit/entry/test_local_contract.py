"""The embedded cluster does with jobs what SLURM was seen to do, or the difference stands here.

The same jobs as in tests/slurm/test_cluster_facts.py, on the local controller. Its nodes are
objects here, and its time is the test's. Each fact is compared with what is recorded of each
version of SLURM (`support.slurm_diaries`). Where the versions have a fact in common, it must be
that one; where they differ, one of theirs.
"""

from __future__ import annotations

import contextlib
import json
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

from hpctrain.cluster.scheduler import local as client
from hpctrain.cluster.scheduler.local import LocalControl
from hpctrain.core.base import clock
from hpctrain.core.settings.schema import Settings
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.entry import local_controller
from hpctrain.ledger.run.layout import RunDir
from tests.support.clocks import ManualClock
from tests.support.slurm_diaries import FOLDER, seen_facts, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hpctrain.core.base.records import JobContext

KILL_WAIT_S = local_controller.KILL_WAIT_S
GRACE_S = 20.0
WARNED_S = 45.0
AT_S = 10.0
"""When something is done to a job."""
LEAVES_S = 200.0
"""When the tasks of the newest attempt leave, wherever there are any."""
END_S = 300.0
TELLING = {signal.SIGTERM, signal.SIGUSR2}

NOT_HERE = {
    "warned_preempted": "preempt_send_user_signal is a setting of a site; local jobs have no such.",
    "warned_graced": "The same.",
}
"""Jobs that cannot be on the embedded cluster, and why."""
OF_EVERY_JOB = {
    "batch.signals": "The controller is the batch script, and no signal is sent to it.",
}
"""Facts that no local job has, and why."""
DIFFERENCES = {
    "second requeue.status": "SlurmControl.requeue hides the refusal as well.",
    "node failed.tasks.seen": "The reason is NodeDown, which SlurmControl.facts adds from sinfo.",
}
"""A fact of a job that is otherwise on the embedded cluster than on every SLURM, and why."""


class Node:
    """A node's tasks: they write a diary as `support.signal_watch` does, and leave when told."""

    def __init__(self, world: World, rank: int) -> None:
        """Start it."""
        self.world = world
        self.rank = rank
        self.pid = rank
        self.returncode: int | None = None
        self.events: list[dict[str, Any]] = []
        self.code: int | None = None

    def signal(self, signum: signal.Signals) -> None:
        """Get a signal, and see what the job is like then."""
        if self.code is not None:
            return
        if signum == signal.SIGKILL:
            self.code = 9
            self.events.append({"event": "killed", "t": self.world.passed_s})
            return
        control = LocalControl(self.world.job_id)
        self.events.append({"event": signum.name, "t": self.world.passed_s})
        if signum in TELLING:
            seen = seen_facts(signum.name, control.facts())
            self.events.append({"event": "record", "seen": seen})
        reaction = self.world.reactions.get(signum.name)
        if reaction == "requeue":
            control.requeue()
            self.events.append({"event": "requeue", "status": 0})
        if reaction is not None:
            self.code = 0

    def wait(self) -> int:
        """Be reaped."""
        assert self.code is not None
        self.returncode = self.code
        return self.code

    def facts(self, ends_after: float) -> dict[str, Any]:
        """Of this attempt, as `attempt_facts` names them."""
        signals = [e for e in self.events if e["event"].startswith("SIG")]
        seen = [e["seen"] for e in self.events if e["event"] == "record"]
        killed = next((e["t"] for e in self.events if e["event"] == "killed"), None)
        stays = bool(signals) and killed is not None and killed - signals[0]["t"] >= ends_after
        return {
            "signals": list(dict.fromkeys(e["event"] for e in signals)),
            "seen": [one for n, one in enumerate(seen) if one not in seen[:n]],
            "requeue": next((e["status"] for e in self.events if e["event"] == "requeue"), None),
            "lives on": bool(ends_after) and stays,
        }


class World(ManualClock):
    """The controller's time and nodes; it starts them. Whoever sleeps moves the time on."""

    def __init__(self, job_id: str, reactions: dict[str, str]) -> None:
        """Make one that waits for its controller.

        Args:
            job_id: The job.
            reactions: What tasks do at a signal, as `support.signal_watch` has it.
        """
        super().__init__(jumps=1)
        self.job_id = job_id
        self.reactions = reactions
        self.attempts: list[list[Node]] = []
        self.between: Callable[[], object] = lambda: None

    def now_ns(self) -> int:
        """Move on by a nanosecond, so that no two requests have one name."""
        self._passed_ns += 1
        return super().now_ns()

    def sleep(self, seconds: float) -> None:
        """Move on, and do what is due."""
        super().sleep(seconds)
        assert self.passed_s < END_S, "the job does not end"

    def then(self, after_s: float, do: Callable[[], object]) -> Self:
        """Do something so long after the beginning."""
        self.after(after_s, do)
        return self

    def prepare(self, spec: Spec, context: JobContext) -> None:
        """Begin an attempt, as `NodeStarter` does."""
        del spec, context
        self.attempts.append([])

    def start(self, context: JobContext) -> Node:
        """Start a node of it."""
        self.attempts[-1].append(Node(self, context.node_rank))
        return self.attempts[-1][-1]


class WatchedController(local_controller.Controller):
    """The real one, but for its nodes and for hpctrain's own batch side."""

    world: World

    def _watch(self) -> None:
        return None

    def _conclude(self, code: int) -> int:
        self.world.between()
        return code


@pytest.fixture
def make(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., WatchedController]]:
    """Make the local job of a story."""
    monkeypatch.setattr(local_controller, "_code", lambda node: node.code)
    monkeypatch.setattr(local_controller, "_kill_group", lambda node, signum: node.signal(signum))

    def make(story: Story, folder: Path | None = None) -> WatchedController:
        folder = folder or tmp_path_factory.mktemp("job")
        monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(folder / "local"))
        run = RunDir(folder / "run")
        run.root.mkdir(exist_ok=True)
        Spec("run", "id", 0.0, "local", "", Entry("recipe"), Settings()).dump(run.spec)
        record = client.LocalJobRecord(
            job_id="",
            token="token",
            run_dir=str(run.root),
            min_nodes=story.nodes[1],
            max_nodes=story.nodes[0],
            time_s=story.limit_s,
            signal_lead_s=WARNED_S,
        )
        job_id = client.create(record).job_id
        controller = WatchedController(job_id)
        controller.world = World(job_id, dict(story.reactions))
        controller._starter = controller.world
        clocks.enter_context(clock.use(controller.world))
        return controller

    with contextlib.ExitStack() as clocks:
        yield make


def _requeue_twice(controller: WatchedController) -> None:
    for _ in range(2):
        LocalControl(controller.record.job_id).requeue()


def _leave(controller: WatchedController) -> None:
    for node in controller.world.attempts[-1]:
        node.code = 0


def _ask(operation: str, **fields: Any) -> Callable[[WatchedController], None]:
    return lambda controller: client.request(controller.record.job_id, operation, **fields)


def _graced(**reactions: str) -> Story:
    return Story(_ask("preempt", leave=1, grace_s=GRACE_S), reactions)


@dataclass(frozen=True)
class Story:
    """A job, and what is done to it at `AT_S`.

    Attributes:
        do: What is done.
        reactions: What its tasks do at a signal.
        lives_s: So long after its first signal it lives at least, where it stays.
        nodes: The most and the least that it takes.
        limit_s: Its time limit.
    """

    do: Callable[[WatchedController], None] = lambda _controller: None
    reactions: Mapping[str, str] = field(default_factory=dict)
    lives_s: float = 0
    nodes: tuple[int, int] = (1, 1)
    limit_s: float = 1000


STORIES = {
    "preempted": Story(_ask("preempt", leave=1, grace_s=0), lives_s=KILL_WAIT_S),
    "graced": replace(_graced(), lives_s=GRACE_S),
    "graced_exits": _graced(SIGTERM="exit"),
    "graced_requeues": _graced(SIGTERM="requeue"),
    "graced_requeues_then_exits": _graced(SIGTERM="requeue"),
    "requeued": Story(_ask("requeue"), lives_s=KILL_WAIT_S),
    "second requeue": Story(_requeue_twice, lives_s=KILL_WAIT_S),
    "cancelled": Story(_ask("cancel"), lives_s=KILL_WAIT_S),
    "cancelled_requeues": Story(_ask("cancel"), {"SIGTERM": "requeue"}),
    "limited": Story(lives_s=KILL_WAIT_S, limit_s=100),
    "node failed": Story(_ask("fail_node", node=1), {"SIGTERM": "exit"}, nodes=(3, 2)),
}


def played(story: Story, controller: WatchedController) -> dict[str, Any]:
    """Play a job to its end; what is recorded of it."""
    world = controller.world
    world.then(AT_S, lambda: story.do(controller)).then(LEAVES_S, lambda: _leave(controller))
    controller.serve()
    first, *others = world.attempts
    final = controller.record
    runs_again = {"state": "runs again", "restarts": 1}
    ended = {"state": str(final.state), "restarts": final.restarts}
    return {
        "tasks": first[0].facts(story.lives_s),
        "next": runs_again if others else ended,
        "then": ended,
        "nodes": [len(first), *(len(others[0]) for _ in others[:1])],
        "status": 0,
        "restarts": final.restarts,
    }


def flat(facts: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Facts by their whole name, such as "tasks.signals"."""
    found: dict[str, Any] = {}
    for name, value in facts.items():
        inner = isinstance(value, dict)
        found |= flat(value, f"{above}{name}.") if inner else {above + name: value}
    return found


def differences(name: str, ours: Mapping[str, Any]) -> dict[str, str]:
    """Facts in which a local job does as no recorded version does, and what both do."""
    versions = [flat(one) for one in shared(name)]
    mine = flat(ours)
    return {
        f"{name}.{fact}": f"here {mine.get(fact)}, SLURM {[one[fact] for one in versions]}"
        for fact in versions[0].keys() - OF_EVERY_JOB.keys()
        if mine.get(fact) not in [one[fact] for one in versions]
    }


@pytest.mark.parametrize("name", STORIES)
def test_a_local_job_does_what_slurm_was_seen_to_do(
    make: Callable[[Story], WatchedController], name: str
) -> None:
    found = differences(name, played(STORIES[name], make(STORIES[name])))

    listed = {fact for fact in DIFFERENCES if fact.split(".")[0] == name}
    assert found.keys() == listed, found


def test_each_recorded_job_is_played_here_or_cannot_be() -> None:
    for path in FOLDER.glob("*.json"):
        recorded = json.loads(path.read_text())
        assert recorded.keys() == STORIES.keys() | NOT_HERE.keys(), path.name


def test_three_versions_are_recorded() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} >= {"22.05", "24.11", "26.05"}


def test_a_job_that_is_cancelled_between_two_starts_stays_cancelled(
    make: Callable[[Story], WatchedController],
) -> None:
    controller = make(STORIES["preempted"])
    controller.world.between = lambda: _ask("cancel")(controller)

    played(STORIES["preempted"], controller)

    assert controller.record.state == "CANCELLED"
    assert len(controller.world.attempts) == 1


def test_a_requeue_that_is_asked_for_at_the_end_of_the_time_is_a_start_more(
    make: Callable[[Story], WatchedController],
) -> None:
    controller = make(STORIES["limited"])
    controller.world.between = lambda: (
        len(controller.world.attempts) == 1 and _ask("requeue")(controller)
    )

    facts = played(STORIES["limited"], controller)

    assert facts["then"] == {"state": "COMPLETED", "restarts": 1}


def test_hpctrain_concludes_no_job_that_was_cancelled(
    make: Callable[[Story], WatchedController],
) -> None:
    controller = make(STORIES["cancelled"])
    controller.world.between = lambda: pytest.fail("the scheduler runs nothing more")

    played(STORIES["cancelled"], controller)


def test_the_nodes_beside_a_dead_one_have_their_time_to_leave(
    make: Callable[[Story], WatchedController],
) -> None:
    story = replace(STORIES["node failed"], reactions={}, lives_s=KILL_WAIT_S)
    controller = make(story)

    facts = played(story, controller)

    assert facts["tasks"]["lives on"]
    assert [e["event"] for e in controller.world.attempts[0][1].events] == ["killed"]


def test_an_agent_that_fails_ends_the_others_also_behind_a_dead_node(
    make: Callable[[Story], WatchedController],
) -> None:
    story = STORIES["node failed"]
    controller = make(story)

    def fail() -> None:
        controller.world.attempts[1][1].code = 1

    controller.world.then(AT_S, lambda: story.do(controller)).then(2 * AT_S, fail)
    controller.serve()

    (killed,) = controller.world.attempts[1][0].events
    assert killed["event"] == "killed"
    assert controller.record.state == "FAILED"


def test_a_moved_end_is_a_time_limit(make: Callable[[Story], WatchedController]) -> None:
    story = Story(_ask("end_in", seconds=60))

    facts = played(story, make(story))

    assert facts["tasks"]["signals"] == ["SIGUSR2", "SIGTERM"]
    assert facts["next"]["state"] == "TIMEOUT"


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED", "TIMEOUT"])
def test_a_job_waits_in_vain_for_one_that_did_not_end_well(
    make: Callable[..., WatchedController], state: str
) -> None:
    before = make(Story())
    before.record.state = state
    client.write(before.record)
    controller = make(Story(), folder=Path(before.record.run_dir).parent)
    controller.record.after = [before.record.job_id]
    reasons = []
    controller.world.then(AT_S, lambda: reasons.append(controller.record.reason))
    controller.world.then(2 * AT_S, lambda: _ask("cancel")(controller))

    controller.serve()

    assert reasons == ["DependencyNeverSatisfied"]
    assert controller.world.attempts == []


@pytest.mark.parametrize("name", ["preempted", "node failed"])
def test_a_cancelled_job_stays_cancelled_whatever_happens_to_its_nodes(
    make: Callable[[Story], WatchedController], name: str
) -> None:
    story = replace(STORIES[name], reactions={})
    controller = make(story)
    controller.world.then(AT_S - 1, lambda: _ask("cancel")(controller))

    played(story, controller)

    assert controller.record.state == "CANCELLED"
    assert len(controller.world.attempts) == 1
