"""Ranks under real agents go on from copies in their nodes' memory, bit for bit."""

from __future__ import annotations

import json
import random

import pytest

from hpctrain.ledger.run.layout import RunDir
from tests.support.local_runs import SCRIPTS, await_end, events, start
from tests.support.recipe import TINY, assert_same_bits, full_state, make_run, train

STEPS = 30
SETTINGS = {
    **TINY,
    "train.steps": STEPS,
    "train.step_delay_s": 0.04,
    "alive.memory": "auto",
    "alive.memory_steps": 4,
}
NO_DISK = ";".join(f"fail:{at},attempt=2,error=EIO" for at in ("choose.list", "read.manifest"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("undisturbed") / "run", train__steps=STEPS)
    train(run, 2)
    return full_state(run, STEPS)


def words(settings):
    """As flags of the command line."""
    return [
        f"--set={key}={json.dumps(value) if isinstance(value, bool) else value}"
        for key, value in settings.items()
    ]


def run_with(tmp_path, monkeypatch, faults, *, attempts=2, nodes=1, **changes):
    """A run of two ranks with these faults; its directory, and what it went on from."""
    settings = SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}
    monkeypatch.setenv("HPCTRAIN_FAULTS", faults)
    root = start(tmp_path, "run", nodes, 2 // nodes, *words(settings))
    await_end(root, attempts)
    return RunDir(root), events(root, "restored")


def test_a_killed_rank_costs_some_steps_and_no_byte_of_the_disk(tmp_path, monkeypatch, undisturbed):
    kill = "kill:memory.copied,rank=1,attempt=1,hit=3"

    run, restored = run_with(tmp_path, monkeypatch, f"{kill};{NO_DISK}")

    first, second = restored
    assert (first["step"], first["read_from"]) == (0, "")
    assert second["read_from"] == "memory"
    assert second["skipped"] == []
    assert 0 < second["step"] < STEPS
    died = events(run.root, "attempt_ended")[0]["step"]
    assert died - second["step"] <= SETTINGS["alive.memory_steps"] + 1
    assert_same_bits(undisturbed, full_state(run, STEPS))
    told = events(run.root, "memory_copies")
    assert [fact["steps"] for fact in told] == [4, 4]
    assert all(fact["bytes"] > 0 for fact in told)


KILL_STEP = 18


def run_killed(tmp_path, monkeypatch, killed, faults="", **changes):
    """A run in which ranks are killed, by `killed_at.py`; its directory."""
    monkeypatch.setenv("KILLED", ",".join(killed))
    monkeypatch.setenv("HPCTRAIN_FAULTS", faults)
    more = {"train.step_delay_s": 0.1, "run.restarts_in_job": 100, "run.restart_pause_s": 0}
    more |= {key.replace("__", "."): value for key, value in changes.items()}
    script = str(SCRIPTS / "killed_at.py")
    root = start(tmp_path, "run", 1, 2, *words(SETTINGS | more), "--", script)
    await_end(root, 1 + len({kill.split(":")[0] for kill in killed}))
    return RunDir(root)


@pytest.mark.parametrize(
    "place",
    [
        "backward",
        "update",
        *(pytest.param(at, marks=pytest.mark.soak) for at in ("forward", "reduce", "norm", "tail")),
    ],
)
@pytest.mark.parametrize("ranks", [[1], pytest.param([0, 1], marks=pytest.mark.soak)])
def test_wherever_in_a_step_ranks_are_killed_the_steps_since_the_last_copy_are_done_again(
    tmp_path, monkeypatch, undisturbed, ranks, place
):
    killed = [f"1:{rank}:{KILL_STEP}:{place}" for rank in ranks]

    run = run_killed(tmp_path, monkeypatch, killed, NO_DISK)

    _, again = events(run.root, "restored")
    assert (again["read_from"], again["skipped"]) == ("memory", [])
    # All ranks agree on a step first, and a copy is whole some steps later.
    assert 0 < KILL_STEP - again["step"] <= SETTINGS["alive.memory_steps"] + 3
    assert "SIGKILL" in events(run.root, "attempt_ended")[0]["detail"], "an echo is named for it"
    assert_same_bits(undisturbed, full_state(run, STEPS))


def random_kills(seed, count):
    """So many kills, each some steps after the one before: of any rank, at any moment of a step."""
    draw = random.Random(seed)
    killed, step = [], 0
    for attempt in range(1, count + 1):
        step += draw.randint(10, 13)
        place = draw.choice(["forward", "backward", "reduce", "norm", "update", "tail"])
        if draw.random() < 0.5:
            place = str(draw.randint(0, 30))  # milliseconds
        killed.append(f"{attempt}:{draw.randrange(2)}:{step}:{place}")
    return killed, step + 4


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 110))
def test_a_hundred_ranks_killed_at_random_moments_cost_the_steps_since_a_copy(
    tmp_path, monkeypatch, seed
):
    killed, steps = random_kills(seed, 10)
    plain = make_run(tmp_path / "undisturbed" / "run", train__steps=steps)
    train(plain, 2)

    run = run_killed(
        tmp_path,
        monkeypatch,
        killed,
        train__steps=steps,
        budget__crashes=1000,
        budget__no_progress=1000,
    )

    ended, restored = events(run.root, "attempt_ended")[:-1], events(run.root, "restored")[1:]
    rows = zip(ended, restored, strict=True)
    told = [(max(0, end["step"] - back["step"]), back["read_from"]) for end, back in rows]
    print(f"seed {seed}: {killed}: {told}")  # what a soak is read by
    assert {kept for _, kept in told} == {"memory"}
    assert all(lost <= SETTINGS["alive.memory_steps"] + 3 for lost, _ in told), told
    assert_same_bits(full_state(plain, steps), full_state(run, steps))


@pytest.mark.story(proved_by="tests/unit/memory/test_pace.py")
def test_with_a_copy_at_each_step_no_step_that_was_done_is_done_again(tmp_path, monkeypatch):
    """Whether even or odd: agreed on one by one, copies would be made at every other step."""
    monkeypatch.setenv("STEP_S", "2.0")
    monkeypatch.setenv("KILLED_AT", "1:7:6")
    settings = SETTINGS | {"train.steps": 12, "train.step_delay_s": 0, "alive.memory_steps": 1}
    script = str(SCRIPTS / "killed_in_step.py")

    root = start(tmp_path, "run", 1, 2, *words(settings), "--", script)
    await_end(root, 3)

    assert [fact["step"] for fact in events(root, "attempt_ended")] == [6, 11, 12]
    restored = [(fact["step"], fact["read_from"]) for fact in events(root, "restored")]
    assert restored == [(0, ""), (6, "memory"), (11, "memory")]


def test_nodes_have_each_their_ranks_copies(tmp_path, monkeypatch, undisturbed):
    kill = "kill:memory.copied,rank=1,attempt=1,hit=3"

    run, (_, second) = run_with(tmp_path, monkeypatch, f"{kill};{NO_DISK}", nodes=2)

    assert second["read_from"] == "memory"
    assert 0 < second["step"] < STEPS
    assert_same_bits(undisturbed, full_state(run, STEPS))


@pytest.mark.realtime(
    proved_by=("tests/unit/checkpoint/test_damage.py", "tests/unit/memory/test_choice.py")
)
def test_a_flipped_bit_is_found_and_the_disk_is_taken(tmp_path, monkeypatch, undisturbed):
    kill = "kill:memory.copied,rank=1,attempt=1,hit=4"
    flips = ";".join(f"flip:memory.proved,rank=1,hit={hit},bit=99999" for hit in (2, 3, 4, 5, 6))

    run, (_, second) = run_with(
        # Copies at 4, 8, 12 and 16, where the kill is: the save of 11 is older than 12's copy.
        tmp_path,
        monkeypatch,
        f"{kill};{flips}",
        checkpoint__interval_steps=11,
        train__step_delay_s=0.3,
    )

    assert second["read_from"] == ""
    assert second["step"] > 0
    reasons = [skipped["reason"] for skipped in second["skipped"]]
    # A save that the kill has met on its way to the disk is passed over too.
    assert any("shard-00001.safetensors" in why and "damaged bytes" in why for why in reasons)
    assert_same_bits(undisturbed, full_state(run, STEPS))


@pytest.mark.soak
@pytest.mark.parametrize("hit", [1, 2, 3, 4])
@pytest.mark.parametrize("where", ["memory.copy,rank=0", "memory.copied,rank=0"])
def test_a_rank_killed_at_any_point_of_a_copy_ends_bit_equal(
    tmp_path, monkeypatch, undisturbed, where, hit
):
    kill = f"kill:{where},attempt=1,hit={hit}"

    run, (_, second) = run_with(tmp_path, monkeypatch, f"{kill};{NO_DISK}")

    assert second["read_from"] == ("memory" if second["step"] else "")
    assert second["step"] > 0 or hit <= 2  # the first copy may have been left out
    assert_same_bits(undisturbed, full_state(run, STEPS))


@pytest.mark.soak
@pytest.mark.parametrize("point", ["memory.digest", "memory.proved", "memory.publish"])
@pytest.mark.parametrize("hit", [1, 2, 5])
def test_a_replica_server_killed_at_any_point_costs_the_copies_alone(
    tmp_path, monkeypatch, undisturbed, point, hit
):
    run, restored = run_with(tmp_path, monkeypatch, f"kill:{point},hit={hit}", attempts=1)

    assert [fact["step"] for fact in restored] == [0]
    assert_same_bits(undisturbed, full_state(run, STEPS))
