"""What a run has survived: of the newest job and attempt, and nothing where nothing happened."""

from __future__ import annotations

from hpctrain.ledger.history.attempts import attempts
from hpctrain.ledger.history.incidents import Survived, survived
from hpctrain.ledger.history.run_history import RunHistory
from tests.unit.history.test_goodput import Log


def of(log: Log) -> Survived:
    return survived(RunHistory.of(log.events))


def job(number: int, job_id: str, restarts: int, **more) -> dict:
    return {"attempt": number, "job_id": job_id, "restarts": restarts, **more}


def started(log: Log, t: float, number: int, *, restarts: int = 0, job_id: str = "17", **more):
    return log.at(
        t, "attempt_started", number, job_id=job_id, restarts=restarts, world_size=4, **more
    )


def test_of_a_run_without_any_there_is_nothing():
    assert of(Log()) == Survived()
    assert of(Log().submitted(0)) == Survived()

    seen = of(started(Log(), 1, 1, nodes=["n1"]))

    assert seen.members.training == ("n1",)
    assert seen.members.rounds == 1
    assert not seen.members.lost
    assert seen.guarded == Survived().guarded
    assert (seen.memory, seen.out_of_step) == (None, None)


def test_members_are_those_of_the_newest_jobs_newest_round():
    log = started(Log(), 1, 1, nodes=["n1", "n2"], spares=["n9"])
    log.at(2, "node_lost", 1, node="n1", why="gone")
    started(log, 10, 2, restarts=1, nodes=["n3", "n4"], spares=["n5", "n6"])
    log.at(11, "node_lost", 2, node="n4", why="silent", members=["n3", "n5"])
    started(log, 12, 3, restarts=1, nodes=["n3", "n5"], spares=["n6", "n7"], by="restart")
    log.at(13, "node_lost", 3, node="n6", was_spare=True)

    seen = of(log).members

    assert seen.training == ("n3", "n5")
    assert seen.waiting == ("n7",)
    assert [fact.node for fact in seen.lost] == ["n4", "n6"]  # that of another start is history
    assert seen.rounds == 2

    started(log, 20, 4, job_id="18", restarts=1, nodes=["n8"])
    assert of(log).members.rounds == 1
    assert of(log).members.lost == ()


def test_peers_and_switches_are_those_of_the_newest_round():
    log = started(Log(), 1, 1, nodes=["n1", "n2"], peers=["n2", "n1"], switches=["a", "b"])
    assert (of(log).members.peers, of(log).members.switches) == (("n2", "n1"), ("a", "b"))

    started(log, 2, 2, nodes=["n1"], by="restart")
    assert (of(log).members.peers, of(log).members.switches) == ((), ())


def test_what_guards_left_out_counts_as_far_as_no_restore_went_back_behind_it():
    log = started(Log(), 1, 1, nodes=["n1"])
    for step in (5, 9):
        log.at(step, "nonfinite", 1, step=step, loss="nan")
        log.at(step, "batch_skipped", 1, step=step, first=8 * step, last=8 * step + 8, why="spike")
    log.at(10, "spike", 1, step=10).at(11, "rewound", 1, step=10, to=6, why="spike")
    log.at(12, "replicas_differ", 1, step=12, ranks=[1], nodes=["n1"], certain=True)

    seen = of(log).guarded
    assert (seen.left_out, seen.not_finite, seen.spikes, seen.rewinds) == (2, 2, 1, 1)
    assert seen.newest_left_out.step == 9
    assert seen.newest_rewind.to == 6
    assert seen.differing.ranks == (1,)

    started(log, 20, 2, nodes=["n1"], by="restart")
    log.at(21, "restored", 2, step=6, checkpoint="step-6")
    assert of(log).guarded.left_out == 1
    assert of(log).guarded.newest_left_out.step == 5


def test_copies_and_steps_apart_are_those_of_the_newest_attempt():
    log = started(Log(), 1, 1, nodes=["n1"])
    log.at(2, "memory_copies", 1, steps=0, why="no room").at(3, "memory_copies", 1, steps=4)
    log.at(4, "desync", 1, ranks=[2], summary="rank 2 is behind", ended=True)
    assert of(log).memory.steps == 4
    assert of(log).out_of_step.ranks == (2,)

    started(log, 5, 2, nodes=["n1"], by="restart")
    assert (of(log).memory, of(log).out_of_step) == (None, None)


def test_where_each_attempts_state_came_from_is_known():
    log = Log()
    for number, fields in enumerate(
        [
            {"step": 0},
            {"step": 4, "checkpoint": "step-4"},
            {"step": 7, "checkpoint": "step-7", "read_from": "memory"},
            {"step": 7, "by": "program"},
        ],
        start=1,
    ):
        started(log, 10 * number, number, nodes=["n1"])
        log.at(10 * number + 1, "restored", number, **fields)
    started(log, 90, 5, nodes=["n1"]).at(91, "resume_chosen", 5, path="/c/5", step=5)
    log.at(92, "restored", 5, by="program", step=5)
    started(log, 95, 6, nodes=["n1"]).at(96, "resume_chosen", 6)

    views = attempts(RunHistory.of(log.events))

    assert [view.read_from for view in views] == ["", "disk", "memory", "", "disk", ""]
