"""Two real ranks are profiled without a line in their program, and the traces tell who is slow."""

from __future__ import annotations

import gzip
import json
import os
import time
from dataclasses import asdict

import pytest

from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.fence import take_attempt
from hpctrain.ledger.run.layout import RunDir
from hpctrain.observe.profile.trace import Kind, ProfileRequest, StepWindow, find
from hpctrain.observe.profile.verdict import examine
from tests.support.gloo import launch
from tests.support.ledger_runs import all_fields
from tests.support.recipe import make_run, train

SLOW_S = 0.3
"""Long against whatever a busy machine adds to a step of some milliseconds."""
SWITCH = 6
"""From this step on rank 1 is slow in its own work instead of its data."""
FAR = 400


def _rank(folder, switch):
    """A program of two lines of hpctrain's; rank 1 is late, for one reason and then another."""
    import torch
    import torch.distributed as dist

    import hpctrain
    from hpctrain.core.settings.schema import ProfileSettings, Settings
    from hpctrain.train.runtime.profiler import NEVER

    settings = Settings(profile=ProfileSettings(steps="3:4", ranks="all", memory=True))
    run = hpctrain.init(settings)
    slow = run.world.rank == 1
    matrix = torch.ones(1500, 1500)
    asked = False
    for step in run.steps(total=FAR):
        with run.timed("data"):
            time.sleep(SLOW_S if slow and step in {2, 3} else 0)
        for _ in range(3 if slow and step >= switch else 0):
            matrix @ matrix
        dist.all_reduce(torch.ones(64))
        if step == switch and run.world.rank == 0:
            request = ProfileRequest("test", "tok", 2, None, memory=False, t=time.time())
            request.write(RunDir(folder).profile_request)
        asked = asked or (step > switch and run._profiler.due != NEVER)
        if asked and run._profiler.due == NEVER:
            break
    return run.step


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    run = RunDir(tmp_path_factory.mktemp("profiled") / "run")
    run.root.mkdir()
    attempt = take_attempt(run, job_id="test", restarts=0)
    run.attempt(attempt.number).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCTRAIN_RUN_DIR", str(run.root))
        patch.setenv("HPCTRAIN_ATTEMPT", json.dumps(asdict(attempt)))
        steps = launch(_rank, 2, folder=run.root, switch=SWITCH)
    assert steps[0] == steps[1] < FAR
    return run


def test_the_steps_of_the_settings_show_the_rank_that_waits_for_its_data(profiled):
    profile = examine(find(profiled.profile)[0])

    assert (profile.files.attempt, profile.files.window) == (1, StepWindow(3, 4))
    assert [list(r.steps) for r in profile.ranks] == [[3, 4], [3, 4]]
    assert profile.verdict.waited_for == 1
    assert profile.verdict.bound is Kind.DATA
    assert profile.verdict.bounds == {0: Kind.COMMUNICATION, 1: Kind.DATA}
    for r in profile.ranks:
        assert sum(r.shares.values()) == pytest.approx(1)


def test_a_request_to_the_live_run_shows_the_rank_that_computes_too_long(profiled):
    first, second = find(profiled.profile)
    profile = examine(second)

    assert second.window.first > SWITCH > first.window.last
    assert second.window.last == second.window.first + 1
    assert [list(r.steps) for r in profile.ranks] == 2 * [[second.window.first, second.window.last]]
    assert profile.verdict.waited_for == 1
    assert profile.verdict.bound is Kind.COMPUTE
    assert profile.verdict.bounds[0] is Kind.COMMUNICATION
    assert profile.ranks[1].shares[Kind.DATA] < profile.ranks[1].shares[Kind.COMPUTE]


def test_the_ledger_has_the_request_and_both_profiles(profiled):
    facts = [(e.kind, all_fields(e)) for e in ledger.read(profiled) if e.kind.startswith("profile")]
    _, second = find(profiled.profile)

    assert [kind for kind, _ in facts] == ["profiled", "profile_requested", "profiled"]
    assert "tok" in facts[1][1].values()
    assert facts[1][1]["first"] == second.window.first == facts[2][1]["first"]
    assert facts[2][1]["folder"] == str(second.folder)
    assert not profiled.profile_request.read_text()  # the next look has left it there, empty


def test_the_traces_are_found_by_tensorboards_plugin_and_hold_the_steps(profiled):
    paths = sorted((profiled.profile / "attempt-0001").iterdir())
    traces = [path for path in paths if path.name.endswith(".pt.trace.json.gz")]

    assert len(traces) == 4
    assert not [path for path in paths if ".new" in path.name]
    [trace] = [path for path in traces if path.name.startswith("rank-00000.steps-3-4.")]
    names = [e["name"] for e in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
    assert names.count("ProfilerStep#3") == names.count("ProfilerStep#4") == 1
    assert names.count("hpctrain.data") == 2


def test_a_stop_in_the_middle_cuts_the_profile_and_the_next_attempt_goes_on(tmp_path):
    every_two = {"checkpoint__interval_steps": 2, "checkpoint__mode": "sync"}
    run = make_run(tmp_path / "run", profile__steps="3:100", **every_two)

    train(run, 1, stop_at=5)
    train(run, 1)

    [stopped] = [all_fields(e)["step"] for e in ledger.read(run) if e.kind == "stopped"]
    cut, rest = find(run.profile)
    assert 5 <= stopped < 12
    assert (cut.attempt, cut.window) == (1, StepWindow(3, stopped))
    assert examine(cut).ranks[0].shares[Kind.SAVE] > 0
    assert (rest.attempt, rest.window) == (2, StepWindow(stopped + 1, 12))
    assert list(examine(rest).ranks[0].steps) == [*range(stopped + 1, 13)]


def test_a_profiler_that_fails_costs_the_profile_and_nothing_else(tmp_path, capfd):
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    run.profile.write_text("a file is where the folder should be")
    attempt = take_attempt(run, job_id="test", restarts=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCTRAIN_RUN_DIR", str(run.root))
        patch.setenv("HPCTRAIN_ATTEMPT", json.dumps(asdict(attempt)))
        assert launch(_short, 1) == [8]

    told = capfd.readouterr().err
    assert told.count("profiling has ended: FileExistsError") + told.count("NotADirectory") == 1
    assert [e.kind for e in ledger.read(run)][-1] == "done"


def _short():
    import hpctrain
    from hpctrain.core.settings.schema import ProfileSettings, Settings

    os.environ.pop("RANK")
    settings = Settings(profile=ProfileSettings(steps="2:3"))
    run = hpctrain.init(settings)
    for _ in run.steps(total=8):
        pass
    return run.step
