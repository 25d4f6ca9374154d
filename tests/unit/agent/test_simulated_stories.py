"""Single stories of simulated jobs: what tests of real processes tell in minutes, in milliseconds.

Which story of tests/engines and tests/slurm each proves is in docs/development/contributing.md.
"""

from __future__ import annotations

import errno
import signal
from functools import partial
from unittest.mock import Mock

import pytest

from hpctrain.core.base.records import EndReason, JobContext, Next
from hpctrain.errors import Fenced
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run import fence
from hpctrain.ledger.run.event_types import (
    AttemptEnded,
    AttemptFenced,
    HangFound,
    HangSuspected,
    NodeLost,
    RanksOutOfStep,
)
from hpctrain.node.agent.in_place import RoundSize
from hpctrain.node.agent.loss_ending import LeaderFailover
from hpctrain.node.agent.node import STORE_GONE
from hpctrain.node.agent.rendezvous import ANSWER_S
from hpctrain.node.agent.rounds import NothingToResume
from hpctrain.node.hangs.standing import HangLimits
from tests.support.simulation import campaign, contract
from tests.support.simulation.checks import Overlap
from tests.support.simulation.generations import RecordedJob
from tests.support.simulation.job import Job, Setup
from tests.support.simulation.kernel import EPOCH_S, Simulation
from tests.support.simulation.ranks import Program

SEEDS = range(3)
BOUND_S = 1300.0


def play(job, *faults, bound_s=BOUND_S):
    """A job to which this is done: when, what, to which node, for how long."""
    overlap = Overlap(job)
    for at_s, kind, node, *for_s in faults:
        job.simulation.after(at_s, partial(job.fault, kind, node, for_s=[*for_s, float("inf")][0]))
    job.run(bound_s)
    assert contract.wrong_with(job, overlap) == []
    return job


def job(seed, nodes, size=None, *, steps=20, peers_raise=True, **setup):
    return Job(
        seed,
        Setup(nodes=nodes, size=size, come_s=0.1, **setup),
        Program(steps=steps, start_s=0.2, peers_raise=peers_raise),
    )


def told(job):
    return [(names, spares) for _, names, spares, _ in job.begun]


# ---- rounds that outlive their nodes


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["power", "dies", "freezes", "cut"])
def test_a_spare_takes_the_place_of_a_lost_node(seed, how):
    played = play(job(seed, 3, RoundSize(2, 2)), (5.0, how, 1, 60.0))
    assert told(played) == [(("n0", "n1"), ("n2",)), (("n0", "n2"), ())]
    assert played.losses == [("n1", True, (0, 2))]
    assert played.end.ending == "left"


@pytest.mark.parametrize("seed", SEEDS)
def test_where_no_spare_is_left_fewer_go_on_and_at_last_none(seed):
    played = play(job(seed, 3, RoundSize(3, 2)), (4.0, "dies", 1), (8.0, "dies", 2))
    assert [names for names, _ in told(played)] == [("n0", "n1", "n2"), ("n0", "n2")]
    assert (played.end.ending, played.end.silent_nodes) == ("failed", [2])
    assert played.losses[-1] == ("n2", True, None)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_spare_that_dies_ends_no_round(seed):
    played = play(job(seed, 3, RoundSize(2, 2)), (4.0, "dies", 2))
    assert (len(played.begun), played.losses) == (1, [("n2", False, (0, 1))])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_frozen_nodes_ranks_end_as_it_thaws(seed):
    played = play(job(seed, 3, RoundSize(2, 2), steps=60), (5.0, "freezes", 1, 12.0))
    assert [rank.exitcode is None for rank in played.nodes[1].ranks] == [False]
    assert played.nodes[1].left_out is not None
    assert played.end.ending == "left"


@pytest.mark.parametrize("seed", range(12))
def test_a_node_that_is_lost_while_a_round_begins_ends_no_second_one(seed):
    """Its loss is heard as the round without it has begun."""
    made = job(seed, 4, RoundSize(4, 2), lease_s=1.0)
    played = play(made, (4.0, "power", 3), (4.0 + 0.15 * seed, "power", 2))
    assert played.begun[-1][1] == ("n0", "n1")
    rounds = [set(one.members) for one in played.verdicts if one.node == 0]
    gone = [set(one.end.silent_nodes) for one in played.verdicts if one.node == 0]
    assert all(lost <= members for lost, members in zip(gone, rounds, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_where_the_first_node_is_gone_the_others_end_their_ranks_and_leave(seed):
    for how in ("power", "dies", "freezes"):
        played = play(job(seed, 3, RoundSize(2, 2)), (5.0, how, 0), (90.0, "over", 0))
        assert all(played.nodes[n].left_out.first_is_gone for n in (1, 2))
        assert not any(played.nodes[n].live_ranks() for n in (1, 2))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("size", "last"), [((2, 2), ("n0", "n2")), ((3, 3), ("n0", "n1", "n2"))])
def test_a_node_whose_ranks_are_killed_twice_is_left_out_where_that_can_be(seed, size, last):
    made = job(seed, 3, RoundSize(*size))
    played = play(made, (3.0, "rank", 1), (8.0, "rank", 1))
    assert len(played.begun) == 3
    assert played.begun[-1][1] == last


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("bad", "size", "second"),
    [
        ("n1", (2, 2), ("n0", "n2")),
        ("n1", (3, 2), ("n0", "n2")),
        ("n2", (2, 2), ("n0", "n1")),
        ("n9", (2, 2), ("n0", "n1")),
        ("n1", (3, 3), None),
        ("n0", (3, 2), None),
    ],
)
def test_a_node_that_guards_have_named_is_left_out_where_that_can_be(seed, bad, size, second):
    made = job(seed, 3, RoundSize(*size))
    made.simulation.after(2.0, partial(made.name_bad, bad))
    played = play(made, (4.0, "rank", 0))
    assert [names for names, _ in told(played)][1:] == ([second] if second else [])


@pytest.mark.parametrize("seed", SEEDS)
def test_no_round_follows_where_the_run_may_not_go_on(seed):
    made = job(seed, 3, RoundSize(2, 2))
    made.may_go_on = False
    played = play(made, (4.0, "dies", 1))
    assert (played.end.ending, played.end.silent_nodes, len(played.begun)) == ("failed", [1], 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_first_node_without_a_liveness_gives_up_and_asks_it_no_more(seed):
    played = play(job(seed, 3, RoundSize(2, 2)), (0.01, "power", 1), (4.0, "liveness", 0))
    assert "has ended" in str(played.nodes[0].error)
    assert played.simulation.now_s < 60.0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_without_a_liveness_leaves_and_the_others_go_on(seed):
    played = play(job(seed, 3, RoundSize(2, 2)), (4.0, "liveness", 1))
    assert not played.nodes[1].left_out.first_is_gone
    assert told(played)[1] == (("n0", "n2"), ())


@pytest.mark.parametrize("seed", range(8))
def test_a_node_that_cannot_begin_hears_that_its_round_is_broken(seed):
    """It waits for the verdict then, and the next round may be announced before it has read it."""
    made = job(seed, 4, RoundSize(4, 2), lease_s=1.0)
    made.poll_stretch = 6.0
    played = play(made, (3.0, "control", 1), (4.0, "rank", 0), (4.2, "power", 3), (4.4, "dies", 2))
    assert [node.error for node in played.nodes] == [None] * 4
    assert played.begun[-1][1] == ("n0", "n1")


@pytest.mark.parametrize("seed", range(12))
def test_who_is_slow_and_finds_its_rounds_store_gone_goes_on_with_the_next(seed):
    """Two rounds were announced in a moment, and node 0 serves the stores of two."""
    made = job(seed, 5, RoundSize(5, 2), lease_s=1.0)
    made.poll_stretch = 6.0
    dies_s = 4.05 + 0.03 * seed
    played = play(made, (4.0, "dies", 1), (dies_s, "dies", 2), (dies_s + 0.05, "dies", 3))
    assert (played.nodes[4].error, played.nodes[4].left_out) == (None, None)
    assert played.begun[-1][1] == ("n0", "n4")


@pytest.mark.parametrize(("how", "are_saved"), [("dies", True), ("rank", True), ("raises", False)])
def test_copies_go_to_disk_where_no_round_follows_a_death(how, are_saved):
    made = job(1, 3, RoundSize(3, 2), restarts=0)
    made.saves_copies, made.may_go_on = True, False
    played = play(made, (4.0, how, 2))
    living = (0, 1) if how == "dies" else (0, 1, 2)
    said = {(number, place, them) for number, place, them, _ in played.copied}
    assert said == ({(number, number, living) for number in living} if are_saved else set())


# ---- rounds in which every node has to come


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_start_again_where_every_agent_answers(seed):
    played = play(job(seed, 2), (4.0, "rank", 0))
    assert (played.end.ending, len(played.begun)) == ("left", 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_they_do_not_where_a_nodes_agent_gives_no_sign(seed):
    played = play(job(seed, 2), (3.9, "freezes", 1), (4.0, "rank", 0), (60.0, "over", 0))
    end = played.end
    assert (end.ending, end.restart, end.silent_nodes) == ("failed", False, [1])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_cause_is_told_and_not_its_echo(seed):
    played = play(job(seed, 4, restarts=0), (4.0, "raises", 2))
    assert (played.end.failure.rank, played.end.why) == (2, "ValueError: the cause")


# ---- hangs


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["hangs", "stopped"])
def test_a_hang_is_named_ended_and_started_again(seed, how):
    made = job(seed, 4, limits=HangLimits(2.0, first_step_s=30.0), peers_raise=False, steps=30)
    played = play(made, (6.0, how, 1))
    found = [fact for _, _, fact in played.facts]
    assert [type(fact) for fact in found] == [HangSuspected, HangFound]
    assert (found[1].ranks, found[1].ended) == ((1,), True)
    assert played.end.ending == "left"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_whose_heartbeats_cannot_be_read_is_looked_at_all_the_same(seed, node):
    made = job(seed, 3, ranks=2, limits=HangLimits(2.0), steps=30)
    made.nodes[node].lacks_board = True
    played = play(made, (6.0, "hangs", 1))
    found = [fact for _, _, fact in played.facts if isinstance(fact, HangFound)]
    assert [fact.ranks for fact in found] == [(2,)]
    assert played.end.ending == "left"


@pytest.mark.parametrize("seed", SEEDS)
def test_where_it_is_only_to_be_told_nothing_is_ended(seed):
    made = job(seed, 4, limits=HangLimits(2.0, ends_round=False), steps=30)
    played = play(made, (6.0, "hangs", 1, 30.0))
    assert [fact.ended for _, _, fact in played.facts if isinstance(fact, HangFound)] == [False]
    assert (played.end.ending, len(played.begun)) == ("left", 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_work_that_takes_several_limits_is_left_alone(seed):
    made = job(seed, 4, limits=HangLimits(3.0), steps=30)
    played = play(made, (6.0, "computes", 0, 20.0))
    assert not [fact for _, _, fact in played.facts if isinstance(fact, HangFound)]
    assert played.end.ending == "left"


@pytest.mark.parametrize("limits", [HangLimits(2.0, watches=False), HangLimits(60.0)])
def test_a_user_is_told_where_the_ranks_are(limits):
    made = job(1, 3, limits=limits, steps=40)
    made.simulation.after(8.0, partial(made.ask_for_stacks, "token"))
    played = play(made, (5.0, "hangs", 1, 10.0))
    assert played.answered.keys() == {"token"}
    assert '"verdict"' in played.documents[0]
    assert played.facts == []


@pytest.mark.parametrize(("desync", "attempts"), [("off", 1), ("tell", 1), ("restart", 2)])
def test_a_rank_that_leaves_out_a_collective_is_told_or_ended(desync, attempts):
    made = job(1, 4, limits=HangLimits(60.0, desync=desync), steps=60, restarts=1)
    made.odd_counts[2] = 30
    played = play(made)
    found = [fact for _, n, fact in played.facts if isinstance(fact, RanksOutOfStep) and n == 1]
    assert [fact.ranks for fact in found] == ([] if desync == "off" else [(2,)])
    assert len(played.begun) == attempts


# ---- stops


@pytest.mark.parametrize("size", [None, RoundSize(2, 2)])
@pytest.mark.parametrize("listens", [False, True])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR2])
def test_a_stop_reaches_every_rank_and_no_round_follows(size, listens, signum):
    made = job(2, 3, size, steps=2000, listens=listens)
    made.simulation.after(8.0, partial(made.signal, signum))
    played = play(made)
    assert (played.end.ending, played.end.restart, len(played.begun)) == ("left", False, 1)
    assert played.simulation.now_s < 20.0


@pytest.mark.parametrize("size", [None, RoundSize(2, 2)])
def test_ranks_that_do_not_leave_are_killed_before_the_scheduler_does_it(size):
    made = job(2, 2, size, steps=2000)
    made.program.heeds_stop = False
    made.simulation.after(8.0, partial(campaign.stop, made, "preempted"))
    played = play(made)
    assert (played.end.ending, played.was_killed_at_s) == ("killed", None)


# ---- who goes on after the first node


def recorded(tmp_path, seed, nodes, size, *, steps=40, lease_s=2.0):
    setup = Setup(nodes=nodes, size=RoundSize(*size), come_s=0.1, lease_s=lease_s)
    return RecordedJob(seed, setup, tmp_path, Program(steps=steps, start_s=0.2))


def ends(played):
    facts = [event.fact for event in played.events()]
    return [(fact.reason, fact.next) for fact in facts if isinstance(fact, AttemptEnded)]


RESTART = (EndReason.NODE_FAILED, Next.RESTART)
DONE = (EndReason.COMPLETED, Next.STOP)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["power", "dies", "freezes"])
def test_the_next_node_leads_after_the_first_one(tmp_path, seed, how):
    played = play(recorded(tmp_path, seed, 3, (3, 2)), (5.0, how, 0, 200.0))
    assert ends(played)[-2:] == [RESTART, DONE]
    assert {g.leader for _, g in played.generations} == {"n1"}
    assert {node for node, _ in played.generations} == {1, 2}
    assert (played.requeued, played.ended_by) == ([], [1])


@pytest.mark.parametrize("seed", SEEDS)
def test_another_one_leads_after_the_second(tmp_path, seed):
    made = recorded(tmp_path, seed, 3, (3, 1), steps=80)
    played = play(made, (5.0, "dies", 0), (25.0, "dies", 1))
    assert [g.leader for node, g in played.generations if node == 2] == ["n1", "n2"]
    assert (ends(played)[-1], played.ended_by) == (DONE, [2])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_job_is_requeued_once_where_too_few_are_left(tmp_path, seed):
    played = play(recorded(tmp_path, seed, 3, (3, 3)), (5.0, "power", 0))
    assert ends(played) == [(EndReason.NODE_FAILED, Next.REQUEUE)]
    assert len(played.requeued) == 1
    assert played.generations == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_first_node_that_thaws_finds_itself_fenced_out(tmp_path, seed):
    made = recorded(tmp_path, seed, 3, (3, 1), steps=200)
    played = play(made, (5.0, "freezes", 0, 30.0))
    assert ends(played)[-1] == DONE
    assert {g.leader for _, g in played.generations} == {"n1"}
    facts = [event.fact for event in played.events()]
    lost = [fact.node for fact in facts if isinstance(fact, NodeLost)]
    assert lost == ["n0"], "it does not write down that it has lost the others"
    assert sum(isinstance(fact, AttemptFenced) for fact in facts) <= 1


@pytest.mark.parametrize("seed", range(6))
def test_who_thaws_before_its_first_attempt_begins_none_beside_the_others(tmp_path, seed):
    """They have had the job requeued by then."""
    made = recorded(tmp_path, seed, 3, (3, 1))
    made.setup.come_s = 0.01
    made.simulation.after(
        0.02, partial(made.network.cut, made.nodes[2].machine, made.nodes[0].machine)
    )
    played = play(made, (0.9, "freezes", 0, 7.4 + 0.1 * seed))
    assert len(played.requeued) <= 1
    assert ends(played)


@pytest.mark.parametrize("seed", range(6))
def test_a_first_node_that_froze_as_it_imported_takes_no_attempt_after_the_others(tmp_path, seed):
    """They have ended the job's first attempt by then, and had the job requeued."""
    made = recorded(tmp_path, seed, 3, (3, 1))
    made.setup.come_s = 0.01
    played = play(made, (0.1, "freezes", 0, 7.3 + 0.1 * seed))
    # Where the others had not met it, they still waited for it.
    assert ends(played) in ([(EndReason.NODE_FAILED, Next.REQUEUE)], [DONE])
    assert len(played.requeued) == (ends(played) != [DONE])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_that_was_cut_off_begins_nothing_after_a_stop_by_the_scheduler(tmp_path, seed):
    """The scheduler is silent, so the first node leaves the decision to its batch script."""
    made = recorded(tmp_path, seed, 2, (1, 1), steps=2000, lease_s=10.0)
    made.simulation.after(5.5, partial(campaign.stop, made, "silent"))
    played = play(made, (5.0, "cut", 1, 30.0))
    assert played.generations == []
    assert {following for _, following in ends(played)} == {Next.ASK_BATCH}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [(3, 1), (2, 2)])
def test_a_first_node_without_its_liveness_process_leaves_the_job_to_the_others(
    tmp_path, seed, size
):
    played = play(recorded(tmp_path, seed, 3, size), (5.0, "liveness", 0))
    assert ends(played) == [RESTART, DONE]
    assert {generation.leader for _, generation in played.generations} == {"n1"}
    assert played.requeued == []
    assert not played.nodes[0].live_ranks()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_first_node_without_its_liveness_process_decides_where_too_few_are_left(tmp_path, seed):
    played = play(recorded(tmp_path, seed, 3, (3, 3)), (5.0, "liveness", 0))
    assert [following for _, following in ends(played)] == [Next.REQUEUE]
    assert len(played.requeued) == 1


@pytest.mark.parametrize("how", ["power", "dies"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_first_node_that_is_lost_before_it_has_recorded_the_end_is_replaced(tmp_path, seed, how):
    """All nodes have heard by then that the ranks have returned."""
    made = recorded(tmp_path, seed, 3, (3, 1))
    heard = made.verdict

    def lose_the_first(node, *end):
        heard(node, *end)
        if node.number == 1 and not made.faults:
            made.fault(how, 0)

    made.verdict = lose_the_first
    made.simulation.after(300.0, partial(made.fault, "over", 0))
    played = play(made)
    last = ends(played)[-1]
    assert last == DONE or last[1] is Next.REQUEUE
    assert played.simulation.now_s < 100.0


@pytest.mark.parametrize("seed", SEEDS)
def test_of_two_leaders_that_cannot_hear_each_other_one_ends_the_job(tmp_path, seed):
    """The second one still awaits a dead node as a third takes it for lost, and leads as well."""
    made = recorded(tmp_path, seed, 4, (4, 1))
    kinds = [(5.0, "dies", 0), (5.2, "dies", 3), (13.0, "cut", 2, 30.0), (300.0, "over", 0)]
    played = play(made, *kinds)
    assert ends(played)[-1] == DONE
    assert len(played.ended_by) == 1
    assert played.simulation.now_s < 100.0


def test_nobody_leads_after_a_first_node_that_has_begun_another_attempt(tmp_path):
    made = recorded(tmp_path, 1, 3, (3, 1))
    taken = partial(fence.take_attempt, made.run_dir, job_id="7", restarts=0)
    taken()
    context = JobContext("7", 0, 1, ["n0", "n1", "n2"], "n0", 1, "")
    own = LeaderFailover(made.run_dir, "secret", context)
    taken()
    with pytest.raises(Fenced, match="attempt 2 has begun"):
        own.claim(1)
    assert own.claimed() is None
    with pytest.raises(Fenced, match="not I"):
        taken(check=Mock(side_effect=Fenced("not I")))
    assert fence.read_fence(made.run_dir).number == 2


@pytest.mark.parametrize("seed", range(6))
def test_a_job_whose_first_node_dies_before_its_first_attempt_is_requeued(tmp_path, seed):
    made = recorded(tmp_path, seed, 3, (2, 2))
    made.reads_s = 5.0
    made.simulation.after(0.4, partial(made.simulation.freeze, made.nodes[0].machine))
    made.simulation.after(0.5, partial(made.simulation.thaw, made.nodes[0].machine))
    played = play(made, (0.5, "dies", 0))
    assert ends(played) == [(EndReason.NODE_FAILED, Next.REQUEUE)]
    assert len(played.requeued) == 1


@pytest.mark.parametrize(
    ("how", "end"),
    [
        ("preempted", (EndReason.PREEMPTED, Next.LEAVE)),
        ("grace", (EndReason.PREEMPTED, Next.REQUEUE)),
        ("both", (EndReason.PREEMPTED, Next.REQUEUE)),
        ("limit", (EndReason.TIMED_OUT, Next.REQUEUE)),
        ("cancelled", (EndReason.CANCELLED, Next.STOP)),
        ("silent", (EndReason.PREEMPTED, Next.ASK_BATCH)),
    ],
)
@pytest.mark.parametrize("is_led_by_another", [False, True])
def test_what_follows_a_stop_is_said_by_whoever_leads(tmp_path, how, end, is_led_by_another):
    made = recorded(tmp_path, 3, 3, (3, 2), steps=2000)
    made.simulation.after(30.0, partial(campaign.stop, made, how))
    played = play(made, *([(5.0, "dies", 0)] if is_led_by_another else []))
    assert ends(played) == [*([RESTART] if is_led_by_another else []), end]
    assert bool(played.requeued) == (end[1] is Next.REQUEUE)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_dies_costs_no_node_once_and_its_node_the_second_time(tmp_path, seed):
    made = recorded(tmp_path, seed, 3, (2, 2), steps=60)
    played = play(made, (4.0, "rank", 1), (14.0, "rank", 1))
    began = [event.fact.nodes for event in played.events() if event.kind == "attempt_started"]
    assert began == [("n0", "n1"), ("n0", "n1"), ("n0", "n2")]
    (lost,) = [event.fact for event in played.events() if isinstance(event.fact, NodeLost)]
    assert (lost.node, lost.why) == ("n1", "its ranks died twice within an hour")


# ---- what is said of it


def said(played):
    return " | ".join(words for _, words in played.warned)


def test_hangs_are_told_in_the_log():
    played = play(job(1, 3, limits=HangLimits(2.0), steps=30), (6.0, "hangs", 1, 3.0))
    assert "the ranks may hang: 2 ranks wait for rank 1" in said(played)
    assert "the ranks go on, after they had stood for" in said(played)

    played = play(job(1, 3, limits=HangLimits(2.0), steps=30), (6.0, "hangs", 1))
    assert "the ranks hang; the round ends: " in said(played)

    made = job(1, 3, limits=HangLimits(2.0))
    made.nodes[1].lacks_board = True
    assert "the ranks' heartbeats cannot be read: there is no board" in said(play(made))

    made = job(1, 4, limits=HangLimits(60.0, desync="restart"), steps=60, restarts=1)
    made.odd_counts[2] = 30
    assert "are of different steps; the round ends" in said(play(made)).replace("is of", "are of")


def test_a_document_that_cannot_be_written_costs_the_file_and_never_the_verdict():
    made = job(1, 3, limits=HangLimits(2.0), steps=30)
    made.has_full_disk = True
    played = play(made, (6.0, "hangs", 1))
    assert "cannot write what the ranks do: no room" in said(played)
    assert played.end.ending == "left"


def test_who_is_waited_for_is_told_in_the_log():
    late = job(1, 3, RoundSize(2, 2))
    late.simulation.after(0.0, partial(late.simulation.freeze, late.nodes[1].machine))
    late.simulation.after(45.0, partial(late.simulation.thaw, late.nodes[1].machine))
    assert "still waits for the agents of n1" in said(play(late))

    made = job(1, 3)
    made.setup.end_wait_s = 20.0
    made.program.lingers[1] = "hangs"
    words = said(play(made))
    assert "2 ranks returned and rank 1 did not" in words
    assert "ended after 20 s of that" in words
    assert words.count("; ended") == 2


def test_who_goes_on_is_told_in_the_log(tmp_path):
    words = said(play(recorded(tmp_path, 1, 3, (3, 2)), (5.0, "power", 0)))
    assert "n0 was lost: nothing was heard from the first node for 2 s; what follows is" in words
    assert "leaves the job: nothing was heard" in words


# ---- the simulation itself


def test_the_same_seed_is_the_same_run_and_another_is_another():
    traces = [tuple(campaign.play("staying", seed).simulation.trace) for seed in (5, 5, 6)]
    assert traces[0] == traces[1] != traces[2]


def test_nothing_waits_for_the_real_clock():
    simulation = Simulation(1)
    simulation.start("sleeper", lambda: simulation.sleep(1e6))
    simulation.run(2e6)
    simulation.close()
    assert simulation.now_s == pytest.approx(1e6, rel=1e-3)


def test_what_is_broken_is_said_with_the_command_that_plays_it_again(monkeypatch):
    monkeypatch.setattr(contract, "CHECKS", (lambda _job: iter(["this"]),))
    with pytest.raises(campaign.Broken, match=r"simulation\.campaign staying 3\n"):
        campaign.play("staying", 3)


# ---- a full disk


def with_full_disk(monkeypatch, made, until_s):
    """From 4 s on the run's disk refuses the ledger and the fence."""
    append, write = ledger.append, fence._write

    def refuse():
        if 4.0 < made.simulation.now_s < until_s:
            raise OSError(errno.ENOSPC, "No space left on device", "events.jsonl")

    monkeypatch.setattr(ledger, "append", lambda *at, **more: refuse() or append(*at, **more))
    monkeypatch.setattr(fence, "_write", lambda *at: refuse() or write(*at))
    return made


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_rank_waits_for_room_and_its_end_is_written_then(seed, tmp_path, monkeypatch):
    setup = Setup(nodes=2, size=RoundSize(2, 2), come_s=0.1)
    made = RecordedJob(seed, setup, tmp_path, Program(steps=20, start_s=0.2))
    played = play(with_full_disk(monkeypatch, made, 60.0), (5.0, "rank", 1))
    assert played.end is None
    assert [(len(played.nodes), node.error) for node in played.nodes] == [(2, None)] * 2
    facts = [(event.kind, event.attempt) for event in made.events()]
    started = facts.index(("attempt_started", 2))
    assert facts.index(("attempt_ended", 1)) < started
    assert facts.count(("attempt_ended", 1)) == 1
    ended, began = (made.events()[at] for at in (facts.index(("attempt_ended", 1)), started))
    assert ended.t < played.simulation.now_s + EPOCH_S - 60.0 < began.t + 60.0
    assert (ended.fact.reason, ended.fact.next) == (EndReason.CRASHED, Next.RESTART)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_disk_that_stays_full_ends_the_job_in_a_line_and_no_other_agent_fails(
    seed, tmp_path, monkeypatch
):
    setup = Setup(nodes=2, size=RoundSize(2, 2), come_s=0.1)
    made = RecordedJob(seed, setup, tmp_path, Program(steps=20, start_s=0.2))
    played = play(with_full_disk(monkeypatch, made, float("inf")), (5.0, "rank", 1))
    assert isinstance(played.nodes[0].error, OSError)
    assert played.nodes[1].error is None
    assert made.codes == {1: 0}


@pytest.mark.parametrize("seed", SEEDS)
def test_where_every_node_has_to_come_a_refused_attempt_is_told_to_all(seed):
    made = job(seed, 3)
    made.has_no_room = True
    made.simulation.after(5.0, partial(made.fault, "rank", 1, for_s=0.0))
    played = made.run(BOUND_S)  # the contract is that of jobs that end by themselves
    assert isinstance(played.nodes[0].error, OSError)
    for node in played.nodes[1:]:
        assert isinstance(node.error, NothingToResume)
        assert str(node.error) == "no space for another attempt"
        assert played.nodes[0].ended_s < node.ended_s + 1.0  # it waits for nobody who has heard it


# ---- the process that serves the agents' store


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [None, RoundSize(3, 3), RoundSize(2, 2)])
@pytest.mark.parametrize("how", ["store", "store_stops"])
def test_a_lost_store_ends_a_round_and_the_next_one_has_a_new_store(seed, size, how):
    made = job(seed, 3, size, steps=200 if how == "store_stops" else 20)
    played = play(made, (5.0, how, 0))
    assert len(played.begun) == 2
    assert played.losses == []
    assert [crash.kind for crash in played.crashes] == ["signal"]
    assert "store" in played.crashes[0].summary
    assert played.end.ending == "left"
    assert [node.error for node in played.nodes] == [None] * 3


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [None, RoundSize(2, 2)])
def test_a_store_that_is_killed_before_there_are_ranks_ends_that_attempt(seed, size):
    made = job(seed, 2, size)
    made.reads_s = 10.0  # what the ranks go on from is proved meanwhile
    made.simulation.after(5.0, lambda: [server.end(made) for server in made.ports.values()])
    agents = made.nodes
    numbers = []
    made.simulation.after(5.0, lambda: numbers.append(agents[0].agent.attempt_number))
    played = play(made)
    assert numbers == [1]
    assert (len(played.begun), len(played.crashes), played.end.ending) == (2, 1, "left")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [None, RoundSize(2, 2)])
@pytest.mark.parametrize("how", ["store", "store_stops"])
def test_where_no_round_may_follow_a_lost_store_all_agents_end_and_say_so(seed, size, how):
    made = job(seed, 3, size, restarts=0, steps=200)
    made.simulation.after(5.0, partial(made.fault, how, 0))
    played = made.run(BOUND_S)
    assert len(played.begun) == 1
    assert (played.end.ending, played.end.restart) == ("failed", False)
    assert not any(node.is_killed for node in played.nodes)
    first, *others = played.nodes
    assert first.error is None
    lost_s = 5.0 if how == "store" else 5.0 + ANSWER_S
    for node in others:
        assert node.ended_s < lost_s + 15.0
        if size is not None:
            assert node.left_out.is_over
        else:
            told = [words for who, words in played.warned if who == node.number]
            assert f"no other attempt begins in this job: {STORE_GONE}" in told


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("silent", [1, 2])
def test_an_agent_that_says_nothing_as_others_have_returned_is_not_waited_for_for_ever(
    seed, silent
):
    made = job(seed, 3, end_wait_s=30.0)
    played = play(made, (5.0, "agent_stops", silent), (120.0, "over", 0))
    assert played.end.ending == "hung"
    assert played.end.silent_nodes == [silent]
    assert not played.end.restart
    assert f"n{silent}" in played.end.why


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [None, RoundSize(3, 2)])
def test_where_the_first_agent_says_nothing_the_others_leave_and_say_so(seed, size):
    made = job(seed, 3, size, end_wait_s=30.0)
    made.simulation.after(5.0, partial(made.fault, "agent_stops", 0))
    made.simulation.after(120.0, partial(made.fault, "over", 0))
    played = made.run(BOUND_S)
    why = "all ranks of this node ended, and the agent of n0 said nothing for 30 s"
    for node in played.nodes[1:]:
        assert not node.is_killed
        assert node.agent.end.left_out == why
        assert (node.number, why) in played.warned
        assert size is None or node.left_out.first_is_gone
