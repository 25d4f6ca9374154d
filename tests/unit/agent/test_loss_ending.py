"""What is written of the end of an attempt by a node's loss, and who sees to the job then."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpctrain.core.base import clock
from hpctrain.core.base.records import JobContext, JobFacts
from hpctrain.core.settings.spec import load_spec
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.fence import read_fence, take_attempt
from hpctrain.node.agent import main
from hpctrain.node.agent.loss_ending import LOOK_S, PROOF_S, TURN_S, LossEnding
from hpctrain.node.agent.rendezvous import LeftOut, Loss
from hpctrain.node.agent.rounds import RoundEnd
from tests.support.clocks import ManualClock
from tests.support.ledger_runs import Story, all_fields

JOB_BEGAN = 1_790_000_000.0


class Scheduler:
    """Says what it is told to, and counts requeues."""

    def __init__(self, **facts):
        self.says = JobFacts(**{"state": "RUNNING", "restarts": 0, **facts})
        self.requeued = self.ended = 0

    def facts(self):
        return self.says

    def requeue(self):
        self.requeued += 1

    def end(self):
        self.ended += 1

    def forbid_requeue(self):
        """Nothing to forbid here."""


@pytest.fixture
def story(tmp_path):
    """A run whose attempt 1 is in its tenth step."""
    story = Story(tmp_path / "gpt").submitted("7")
    number = take_attempt(story.run, job_id="7", restarts=0).number
    story.run.attempt(number).mkdir(parents=True)
    return story.started(number, "7").restored(number).add("phase", number, name="first_step")


def ending(story, scheduler, *, job_id="7", restarts=0):
    context = JobContext(
        *(job_id, restarts, 1, ["n1", "n2", "n3"], "n1", 20000, ""), start_time=JOB_BEGAN
    )
    spec = load_spec(story.run.spec)
    return LossEnding(story.run, spec, context, scheduler, now=lambda: story.t)


def ends(story):
    ended = [e for e in ledger.read(story.run) if e.kind == "attempt_ended"]
    return [(e.fact.reason, e.fact.next, e.fact.detail) for e in ended]


def no_time(_seconds):
    """Nobody waits."""


def test_a_round_that_a_loss_has_ended_is_followed_by_another_without_a_pause(story):
    own = ending(story, scheduler := Scheduler())
    own.pause_s = 30.0

    assert own.after_loss(1, "n2 was lost")

    assert ends(story) == [("node_failed", "restart", "n2 was lost")]
    assert (own.pause_s, scheduler.requeued) == (0.0, 0)


@pytest.mark.parametrize("facts", [{"restarts": 1}, {"state": "COMPLETING"}])
def test_no_round_follows_where_slurm_has_taken_the_job_away(story, facts):
    assert not ending(story, Scheduler(**facts)).after_loss(1, "n2 was lost")
    assert ends(story) == []


def test_losses_do_not_use_up_the_restarts_of_crashes(story):
    spec = load_spec(story.run.spec)
    own = ending(story, Scheduler())
    for _ in range(spec.settings.run.restarts_in_job + 1):
        number = take_attempt(story.run, job_id="7", restarts=0).number
        story.started(number, "7", by="restart").restored(number)
        story.add("saved", number, step=10 * number)
        assert own.after_loss(number, "n2")

    number = take_attempt(story.run, job_id="7", restarts=0).number
    story.started(number, "7", by="restart").restored(number)
    story.add("saved", number, step=10 * number)
    assert own.after_crash(number, None)


def test_a_loss_says_who_goes_on(story):
    ending(story, Scheduler()).record_loss(1, Loss(1, "n2", "silent", was_member=True), ["n1"])

    (lost,) = [e for e in ledger.read(story.run) if e.kind == "node_lost"]
    assert all_fields(lost)["members"] == ["n1"]
    assert (lost.attempt, lost.fact.node, lost.fact.why) == (1, "n2", "silent")
    assert not lost.fact.was_spare


def test_the_job_of_a_lost_first_node_is_requeued_once(story):
    waits = []
    own = ending(story, first := Scheduler())

    own.after_first_node("silent", "n2", 1, 0, waits.append)
    ending(story, second := Scheduler()).after_first_node("silent", "n3", 1, 2, waits.append)

    assert (first.requeued, second.requeued) == (1, 0)
    assert sum(waits) == pytest.approx(2 * PROOF_S + 2 * TURN_S)
    assert ends(story) == [("node_failed", "requeue", "n1 was lost: silent")]
    (lost,) = [e for e in ledger.read(story.run) if e.kind == "node_lost"]
    assert (lost.fact.node, lost.fact.was_first) == ("n1", True)


def test_two_agents_that_see_to_the_job_at_once_end_its_attempt_once(story):
    """The second one asks the scheduler while the first one writes the end down."""

    class Slow(Scheduler):
        is_asked = False

        def facts(self):
            if not self.is_asked:
                self.is_asked = True
                ending(story, first).after_first_node("silent", "n2", 1, 0, no_time)
            return self.says

    first, second = Scheduler(), Slow()
    own = ending(story, second)
    own._decide(own._facts(1, "crashed", why="n1 was lost", nodes_failed=True))

    assert ends(story) == [("node_failed", "requeue", "n1 was lost: silent")]
    assert (first.requeued, second.requeued) == (1, 0)


class Begun(str):
    """A generation, by a name; who has no place in it."""

    __slots__ = ()
    lost = ("n1",)
    nodes = ("n2", "n3")


class LeaderFailover:
    """What other agents have begun, and what is begun here."""

    is_possible = True

    def __init__(self, claimed=()):
        self.claims = iter([*claimed])
        self.made, self.lost = [], set()

    def claimed(self):
        name = next(self.claims, None)
        return None if name is None else Begun(name)

    def claim(self, follows, lost):
        self.made.append(follows)
        self.lost = set(lost)
        return Begun(f"generation after {follows}")


def test_agents_that_are_left_go_on_without_the_first_node_and_requeue_nothing(story):
    own = ending(story, scheduler := Scheduler())
    own.failover = LeaderFailover()

    assert own.after_first_node("silent", "n2", 1, 0, no_time) == "generation after 1"

    assert (own.failover.made, scheduler.requeued) == ([1], 0)
    assert ends(story) == [("node_failed", "restart", "n1 was lost: silent")]


def test_nobody_waits_for_nodes_that_were_lost_before_the_first_one(story):
    own = ending(story, Scheduler())
    own.failover = LeaderFailover()
    own.record_loss(1, Loss(1, "n2", "its ranks died twice", was_member=True), ["n1", "n3"])

    assert own.after_first_node("silent", "n3", 1, 0, no_time)

    assert own.failover.lost == {"n2"}


def test_a_node_that_thaws_has_no_place_where_it_was_lost_before_the_first_one(story, monkeypatch):
    own = ending(story, Scheduler())
    own.failover = LeaderFailover(["theirs"])
    monkeypatch.setattr(Begun, "nodes", ("n3",))

    assert own.after_first_node("silent", "n2", 1, 1, no_time) is None


def test_a_first_node_that_thaws_calls_nobody_lost(story):
    """Else the agents that go on would find themselves there, and leave at the next loss."""
    own = ending(story, Scheduler())
    own.failover = LeaderFailover(["theirs"] * 3)

    own.record_loss(1, Loss(1, "n2", "Broken pipe", was_member=True), [])

    assert [e for e in ledger.read(story.run) if e.kind == "node_lost"] == []


def test_one_that_hears_of_another_leader_follows_it_and_writes_nothing(story):
    own = ending(story, scheduler := Scheduler())
    own.failover = LeaderFailover([None, "theirs"])

    assert own.after_first_node("silent", "n3", 1, 1, no_time) == "theirs"

    assert (own.failover.made, scheduler.requeued, ends(story)) == ([], 0, [])


def test_one_that_another_was_quicker_than_follows_it(story):
    own = ending(story, scheduler := Scheduler())
    own.failover = LeaderFailover([None] * round(PROOF_S / LOOK_S) + ["theirs"] * 2)

    assert own.after_first_node("silent", "n3", 1, 0, no_time) == "theirs"

    assert (own.failover.made, scheduler.requeued, ends(story)) == ([], 0, [])


def test_a_first_node_that_thaws_ends_nothing_of_those_that_go_on_without_it(story):
    own = ending(story, scheduler := Scheduler())
    own.failover = LeaderFailover(["theirs"] * 3)

    assert not own.after_loss(1, "n2 was lost")
    assert own.conclude(1, RoundEnd("failed", why="n2 was lost"), None) == 0

    assert (scheduler.requeued, ends(story)) == (0, [])


def test_where_nobody_can_lead_the_job_is_requeued(story):
    own = ending(story, scheduler := Scheduler())
    own.failover = LeaderFailover()
    own.failover.claim = lambda _follows, _lost: (_ for _ in ()).throw(OSError("no room"))

    assert own.after_first_node("silent", "n2", 1, 0, no_time) is None

    assert scheduler.requeued == 1


def test_too_few_agents_that_came_to_go_on_requeue_the_job(story):
    own = ending(story, scheduler := Scheduler())
    own.failover = LeaderFailover()
    own.after_first_node("silent", "n2", 1, 0, no_time)

    later = ending(story, scheduler)
    later.end_without_nodes("no round can be made of n2")

    assert scheduler.requeued == 1
    assert ends(story)[-1] == ("node_failed", "requeue", "no round can be made of n2")
    assert [e.attempt for e in ledger.read(story.run) if e.kind == "attempt_ended"] == [1, 1]


@pytest.mark.parametrize(("outcome", "is_ended"), [("done", 1), ("crashed", 0)])
def test_a_job_whose_batch_script_is_gone_is_ended_with_its_run(story, outcome, is_ended):
    own = ending(story, scheduler := Scheduler())
    own.end_job()
    assert scheduler.ended == 0
    own._decide(own._facts(1, outcome))

    own.end_job()

    assert scheduler.ended == is_ended


@pytest.mark.parametrize("facts", [{"restarts": 1}, {"state": "CANCELLED"}])
def test_nothing_is_done_where_slurm_has_ended_the_job(story, facts):
    ending(story, scheduler := Scheduler(**facts)).after_first_node("silent", "n2", 1, 0, no_time)

    assert scheduler.requeued == 0
    assert ends(story) == []


@pytest.mark.parametrize(
    "newest",
    [None, ("7", 0, 0.0), ("6", 0, -50.0)],
    ids=["none", "of the start before", "of the job before"],
)
def test_a_job_whose_first_node_was_lost_before_its_first_attempt_is_requeued(tmp_path, newest):
    """Without an agent of the first node nobody else would ever end it."""
    story = Story(tmp_path / "gpt").submitted("7")
    if newest is not None:
        job_id, restarts, began = newest
        with clock.use(ManualClock(wall_s=JOB_BEGAN + began)):
            take_attempt(story.run, job_id=job_id, restarts=restarts)
    number = 1 if newest is None else 2
    own = ending(story, scheduler := Scheduler(restarts=1), restarts=1)
    own.failover = LeaderFailover()

    assert own.after_first_node("silent", "n2", 0, 0, no_time) is None
    later = ending(story, second := Scheduler(restarts=1), restarts=1)
    assert later.after_first_node("silent", "n3", 0, 1, no_time) is None

    assert (scheduler.requeued, second.requeued, own.failover.made) == (1, 0, [])
    assert ends(story) == [
        ("node_failed", "requeue", "n1 was lost before a rank had started: silent")
    ]
    told = [(e.kind, e.attempt) for e in ledger.read(story.run)][-4:]
    assert told == [
        ("attempt_started", number),
        ("node_lost", number),
        ("attempt_ended", number),
        ("requeued", number),
    ]


@pytest.mark.parametrize(
    ("newest", "facts"),
    [
        (("8", 0, 50.0), {}),
        (("7", 2, 50.0), {}),
        (("7", 0, -50.0), {"restarts": 2}),
        (("7", 0, -50.0), {"state": "CANCELLED"}),
        (("7", 0, -50.0), None),
    ],
    ids=["a later job", "a later start", "requeued", "cancelled", "SLURM is silent"],
)
def test_a_start_without_an_attempt_does_nothing_where_the_run_may_be_elsewhere(
    tmp_path, newest, facts
):
    story = Story(tmp_path / "gpt").submitted("7")
    job_id, restarts, began = newest
    with clock.use(ManualClock(wall_s=JOB_BEGAN + began)):
        taken = take_attempt(story.run, job_id=job_id, restarts=restarts)
    scheduler = Scheduler(**({"restarts": 1} | (facts or {})))
    own = ending(story, scheduler, restarts=1)
    if facts is None:
        own._ask = lambda: None

    assert own.after_first_node("silent", "n2", 0, 0, no_time) is None

    assert (scheduler.requeued, ends(story)) == (0, [])
    assert read_fence(story.run) == taken


@pytest.mark.parametrize("other", [("8", 0), ("7", 1)])
def test_an_agent_that_a_dead_job_left_behind_does_nothing(story, other):
    job_id, restarts = other
    take_attempt(story.run, job_id=job_id, restarts=restarts)

    ending(story, scheduler := Scheduler()).after_first_node("silent", "n2", 1, 0, no_time)

    assert scheduler.requeued == 0


@pytest.mark.parametrize("meanwhile", ["another round", "lost"])
@pytest.mark.parametrize("attempt", [1, 0], ids=["member", "spare"])
def test_a_node_that_was_away_itself_leaves_the_others_their_job(story, meanwhile, attempt):
    """It thaws, or its network comes back: of the first node it has heard nothing, either."""

    def time_goes_by(_seconds):
        if meanwhile == "another round" and attempt:
            take_attempt(story.run, job_id="7", restarts=0)
        else:
            lost = Loss(1, "n2", "silent", was_member=bool(attempt))
            ending(story, Scheduler()).record_loss(1, lost, ["n1", "n3"])

    own = ending(story, scheduler := Scheduler())
    own.after_first_node("nothing was heard", "n2", attempt, 0, time_goes_by)

    assert scheduler.requeued == 0
    assert ends(story) == []


def test_losses_of_another_start_of_the_job_are_no_sign_that_the_first_node_lives(story):
    ending(story, Scheduler()).record_loss(1, Loss(1, "n2", "silent", was_member=True), ["n1"])
    number = take_attempt(story.run, job_id="7", restarts=1).number
    story.run.attempt(number).mkdir(parents=True)
    story.started(number, "7", restarts=1)

    own = ending(story, scheduler := Scheduler(restarts=1), restarts=1)
    own.after_first_node("silent", "n2", number, 0, no_time)

    assert scheduler.requeued == 1


def test_who_sees_to_the_job_is_not_ended_by_its_own_liveness():
    """It kills an agent that has not left after some seconds; here it proves and waits for more."""
    done = []
    agent = SimpleNamespace(attempt_number=4)
    place = SimpleNamespace(
        members=(0, 2), nodes=["n1", "n2", "n3"], node=1, can_do_without_first=lambda: True
    )
    line = SimpleNamespace(stop=lambda: done.append("liveness channel stopped"))
    own = SimpleNamespace(after_first_node=lambda *told: done.append(told))  # nobody succeeds

    main._leave(agent, LeftOut("silent", first_is_gone=True), place, own, line)
    main._leave(agent, LeftOut("this node stood still"), place, own, line)

    assert done == ["liveness channel stopped", ("silent", "n2", 4, 1), "liveness channel stopped"]


@pytest.mark.parametrize("node", [0, 1])
def test_an_agent_that_leaves_has_no_process_of_its_node_left(monkeypatch, node):
    """The process itself may live on, as an agent of the next generation."""
    done = []
    monkeypatch.setattr(main.signals, "ignore_all", lambda: None)
    processes = SimpleNamespace(stop=lambda: done.append("control stopped"))
    liveness = SimpleNamespace(
        place=SimpleNamespace(node=node),
        end=lambda *_: done.append("the others informed"),
        stop=lambda: done.append("liveness channel stopped"),
    )

    assert main._see_through(lambda: 7, None, processes, liveness, leads_others=False) == 7

    informed = ["the others informed"] if node == 0 else []
    assert done == ["control stopped", *informed, "liveness channel stopped"]
