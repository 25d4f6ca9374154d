"""Ranks under real agents: where one is killed, those that are left leave the newest step."""

from __future__ import annotations

import json
import random

import pytest

from hpctrain.run.layout import RunDir
from tests.support.local_runs import SCRIPTS, await_end, events, start
from tests.support.recipe import TINY, assert_same_bits, full_state, make_run, train

STEPS = 16
MORE = ("forward", "reduce", "norm", "tail")
SETTINGS = {
    **TINY,
    "train.steps": STEPS,
    "train.step_delay_s": 0.05,
    "alive.memory": "auto",
    "alive.memory_steps": 5,
    "budget.crashes": 1000,
    "budget.no_progress": 1000,
    "run.restarts_in_job": 1000,
    "run.restart_pause_s": 0,
}
NO_DISK = ";".join(f"fail:{at},attempt=2,error=EIO" for at in ("choose.list", "read.manifest"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("undisturbed") / "run", train__steps=STEPS)
    train(run, 3)
    return full_state(run, STEPS)


def words(settings):
    """As flags of the command line."""
    return [
        f"--set={key}={json.dumps(value) if isinstance(value, bool) else value}"
        for key, value in settings.items()
    ]


def run_killed(tmp_path, monkeypatch, killed, *, faults=NO_DISK, nodes=1, ranks=3, **changes):
    """A run in which ranks are killed; its directory, and what it went on from."""
    settings = SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}
    monkeypatch.setenv("KILLED", killed)
    monkeypatch.setenv("HPCTRAIN_FAULTS", faults)
    script = str(SCRIPTS / "killed_at.py")
    root = start(tmp_path, "run", nodes, ranks // nodes, *words(settings), "--", script)
    attempts = 1 + len({one.split(":")[0] for one in killed.split(",") if one})
    await_end(root, attempts)
    return RunDir(root), events(root, "restored")


@pytest.mark.parametrize(
    "place", ["backward", "update", *(pytest.param(at, marks=pytest.mark.soak) for at in MORE)]
)
def test_no_step_is_lost_wherever_a_rank_is_killed(tmp_path, monkeypatch, undisturbed, place):
    run, (_, second) = run_killed(tmp_path, monkeypatch, f"1:1:9:{place}")

    done = 9 if place in {"norm", "update", "tail"} else 8
    assert (second["step"], second["read_from"], second["skipped"]) == (done, "will", [])
    assert "SIGKILL" in events(run.root, "attempt_ended")[0]["detail"], "an echo is named for it"
    assert_same_bits(undisturbed, full_state(run, STEPS))


def test_nodes_leave_it_to_each_other(tmp_path, monkeypatch, undisturbed):
    """The only rank of its node is killed: what all ranks hold alike comes from another node."""
    run, (_, second) = run_killed(tmp_path, monkeypatch, "1:1:9:forward", nodes=3)

    assert (second["step"], second["read_from"]) == (8, "will")
    assert_same_bits(undisturbed, full_state(run, STEPS))


def test_a_stopped_survivor_keeps_nobody_from_it(tmp_path, monkeypatch, undisturbed):
    run, (_, second) = run_killed(tmp_path, monkeypatch, "1:0:9:stop,1:2:9:backward")

    assert (second["step"], second["read_from"]) == (8, "will")
    assert_same_bits(undisturbed, full_state(run, STEPS))


def test_two_ranks_that_are_killed_at_once(tmp_path, monkeypatch, undisturbed):
    run, (_, second) = run_killed(tmp_path, monkeypatch, "1:0:9:reduce,1:1:9:reduce")

    assert (second["step"], second["read_from"]) == (8, "will")
    assert_same_bits(undisturbed, full_state(run, STEPS))


def test_an_exact_run_loses_no_step_either(tmp_path, monkeypatch):
    exact = {"engine__exact": True, "train__micro_batch": 4}
    plain = make_run(tmp_path / "undisturbed" / "run", train__steps=STEPS, **exact)
    train(plain, 3)

    run, (_, second) = run_killed(tmp_path, monkeypatch, "1:1:9:update", **exact)

    assert (second["step"], second["read_from"]) == (9, "will")
    assert_same_bits(full_state(plain, STEPS), full_state(run, STEPS))


def test_shards_are_nobody_elses_and_a_copy_serves(tmp_path, monkeypatch):
    _, (_, second) = run_killed(tmp_path, monkeypatch, "1:1:9:forward", engine__kind="fsdp2")

    assert second["read_from"] in {"memory", ""}


def test_what_a_rank_has_raised_leaves_no_will(tmp_path, monkeypatch, undisturbed):
    """It may have computed what it fell over; a copy is older, as all ranks have made it."""
    run, (_, second) = run_killed(tmp_path, monkeypatch, "1:1:9:raise")

    assert second["read_from"] != "will"
    assert_same_bits(undisturbed, full_state(run, STEPS))


def test_with_the_setting_off_there_is_none(tmp_path, monkeypatch, undisturbed):
    run, (_, second) = run_killed(tmp_path, monkeypatch, "1:1:9:forward", alive__last_will="no")

    assert second["read_from"] != "will"
    assert_same_bits(undisturbed, full_state(run, STEPS))


@pytest.mark.parametrize(("who", "kept"), [("", "no will"), (",rank=0", "will")])
def test_a_rank_that_is_killed_while_it_leaves_its_will_leaves_none(
    tmp_path, monkeypatch, undisturbed, who, kept
):
    """Another one does, if there is one."""
    faults = f"kill:memory.willed,attempt=1{who}"

    run, (_, second) = run_killed(tmp_path, monkeypatch, "1:1:9:backward", faults=faults)

    assert (second["read_from"] == "will") == (kept == "will")
    assert_same_bits(undisturbed, full_state(run, STEPS))


def test_where_its_agent_is_killed_over_a_will_the_run_goes_on_from_a_whole_checkpoint(
    tmp_path, monkeypatch, undisturbed
):
    """The memory goes with the agent, and what is in it of the will: its header."""
    killed = "1:1:9:backward,1:0:9:agent,1:2:9:agent"

    run, (_, second) = run_killed(
        tmp_path, monkeypatch, killed, faults="", checkpoint__interval_steps=4
    )

    assert events(run.root, "attempt_ended")[0]["by"] == "batch"  # no agent is left to say it
    assert (second["read_from"], second["step"] in {4, 8}) == ("", True), second
    # The newest may have been on its way to disk.
    assert all(one["reason"].endswith("never committed") for one in second["skipped"])
    assert_same_bits(undisturbed, full_state(run, STEPS))


def random_kills(seed, count, *, ranks, gap, most_ms):
    """So many kills, each some steps after the one before: of any rank, at any moment of a step."""
    draw = random.Random(seed)
    killed, step = [], 0
    for attempt in range(1, count + 1):
        step += draw.randint(gap, gap + 3)
        place = draw.choice(["forward", "backward", "reduce", "norm", "update", "tail"])
        if draw.random() < 0.5:
            place = str(draw.randint(0, most_ms))
        killed.append(f"{attempt}:{draw.randrange(ranks)}:{step}:{place}")
    return killed, step + 4


def outcomes(run):
    """Of each death: steps that were done and lost, and from where training went on."""
    ended = events(run.root, "attempt_ended")[:-1]
    restored = events(run.root, "restored")[1:]
    rows = zip(ended, restored, strict=True)
    return [(max(0, end["step"] - back["step"]), back["read_from"]) for end, back in rows]


def assert_kills_cost_nothing(tmp_path, monkeypatch, seed, count, ranks):
    killed, steps = random_kills(seed, count, ranks=ranks, gap=8, most_ms=30)
    plain = make_run(tmp_path / "undisturbed" / "run", train__steps=steps)
    train(plain, ranks)

    run, _ = run_killed(
        tmp_path, monkeypatch, ",".join(killed), faults="", ranks=ranks, train__steps=steps
    )

    told = outcomes(run)
    print(f"seed {seed}: {killed}: {told}")  # what a soak is read by
    assert_same_bits(full_state(plain, steps), full_state(run, steps))
    assert all(lost == 0 for lost, kept in told if kept == "will"), told
    return told


def test_ranks_killed_at_random_moments_lose_no_step(tmp_path, monkeypatch):
    told = assert_kills_cost_nothing(tmp_path, monkeypatch, 1, 6, 3)

    assert [kept for _, kept in told].count("will") >= 3, told


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_two_hundred_ranks_killed_at_random_moments_lose_no_step(tmp_path, monkeypatch, seed):
    told = assert_kills_cost_nothing(tmp_path, monkeypatch, seed, 10, 4 if seed % 2 else 3)

    assert [kept for _, kept in told].count("will") >= 5, told
