"""Two runs of one script in one folder do not take each other's checkpoints for their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.checkpoint.sealed.patterns import may_meet, parse, places
from hpctrain.core.base.records import JobInfo, JobState
from hpctrain.core.settings.spec import load_spec
from hpctrain.errors import ClusterUnreachable, RunExists, UsageError
from hpctrain.launch import checks, live_job
from hpctrain.launch.change import ResumeRequest
from hpctrain.launch.prepare import create_run, prepare
from hpctrain.launch.resume import prepare_resume
from hpctrain.ledger.run.find_run import IndexedRun, record
from hpctrain.ledger.run.layout import RunDir
from tests.support.ledger_runs import write_event
from tests.support.submit_requests import request_of

RUNNING = JobInfo("local-1", JobState.RUNNING, alive=True)


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text("print('hi')\n")
    return folder


@pytest.fixture
def alive(monkeypatch):
    """Names of runs whose jobs may still write; None stands for a scheduler that is silent."""
    names = set()

    def look(run, cluster):
        del cluster
        if None in names:
            raise ClusterUnreachable("no answer")
        return RUNNING if run.name in names else None

    monkeypatch.setattr(live_job, "live_job", look)
    return names


@pytest.fixture
def submit(work):
    """Prepare a run with a pattern, and make its directory; a live run's is what `alive` says."""

    def make(name, *patterns, args=(), env=(), cwd=work, **more):
        request = request_of(
            cwd=cwd, environ={"PATH": "/nowhere"}, runs=work / "runs", name=name,
            command=["train.py", *args], env=list(env),
            sets=[f"checkpoint.sealed={pattern}" for pattern in patterns], **more,
        )  # fmt: skip
        prepared = prepare(request)
        return create_run(prepared.spec, prepared.runs), prepared.spec

    return make


@pytest.mark.parametrize("is_over", [False, True])
def test_a_live_run_of_another_folder_of_runs_is_a_rival_too(
    submit, alive, work, monkeypatch, is_over
):
    monkeypatch.setenv("XDG_STATE_HOME", str(work / "state"))
    run, _ = submit("lr-1", "checkpoints/last.pt")
    elsewhere = work / "elsewhere" / "lr-1"
    elsewhere.parent.mkdir()
    run.root.rename(elsewhere)
    record([IndexedRun(RunDir(elsewhere), frozenset({"7"}), is_over)])
    alive.add("lr-1")

    if is_over:
        submit("lr-2", "checkpoints/last.pt")
        return
    with pytest.raises(UsageError, match="takes in files that lr-1 saves too"):
        submit("lr-2", "checkpoints/last.pt")


def test_a_second_run_with_the_same_pattern_is_refused_with_the_way_out(submit, alive):
    first, _ = submit("lr-1", "checkpoints/last.pt")
    alive.add("lr-1")

    with pytest.raises(UsageError) as caught:
        submit("lr-2", "checkpoints/last.pt")

    assert "checkpoint.sealed 'checkpoints/last.pt' takes in files that lr-1 saves too" in (
        str(caught.value)
    )
    assert "--set 'checkpoint.sealed={output}/last.pt'" in str(caught.value)
    assert f"`hpctrain cancel {first.typed}`" in str(caught.value)


def test_the_way_out_works(submit, alive):
    alive.update({"lr-1", "lr-2"})
    for name in ("lr-1", "lr-2"):
        run, spec = submit(
            name, "{output}/last.pt", args=["--out", "{output}/last.pt", "--as={run}"],
            env=["WHERE={output}"],
        )  # fmt: skip
        own = str(run.output)
        assert spec.settings.checkpoint.sealed == [f"{own}/last.pt"]
        assert spec.entry.args == ["--out", f"{own}/last.pt", f"--as={name}"]
        assert spec.env["WHERE"] == own
        assert load_spec(run.spec).entry.args == spec.entry.args


def test_a_run_that_names_itself_keeps_the_name_or_is_refused(submit, work):
    """Of two submits at once one would get the other's folder in its arguments."""
    request = request_of(
        cwd=work, environ={"PATH": "/nowhere"}, runs=work / "runs", command=["train.py", "{output}"]
    )
    prepared = prepare(request)
    assert prepared.spec.entry.args == [f"{work}/runs/train-1/output"]
    submit("train-1")

    with pytest.raises(RunExists):
        create_run(prepared.spec, prepared.runs, auto_name=prepared.auto_name)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("out/ckpt-*", "out/ckpt-7"),
        ("out/ckpt-*", "out/*-last"),
        ("out", "out/last.pt"),
        ("out/last.pt", "out"),
        ("a.pt, out/b.pt", "out/b.pt"),
        ("link/last.pt", "out/last.pt"),
        ("{cwd}/out/last.pt", "out/last.pt"),
    ],
)
def test_patterns_that_may_stand_for_one_file_are_refused(submit, work, alive, first, second):
    (work / "out").mkdir()
    (work / "link").symlink_to("out")
    submit("one", first.replace("{cwd}", str(work)))
    alive.add("one")

    with pytest.raises(UsageError, match="that one saves too"):
        submit("two", second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("out/a.pt", "out/b.pt"),
        ("out/lr-0.1-*.pt", "out/lr-0.01-*.pt"),
        ("out/*.a", "out/*.b"),
        ("out-1/last.pt", "out-2/last.pt"),
    ],
)
def test_patterns_that_are_apart_are_not(submit, alive, first, second):
    submit("one", first)
    alive.add("one")

    submit("two", second)


def test_a_run_without_a_live_job_or_that_is_over_is_no_rival(submit, alive):
    run, _ = submit("one", "last.pt")
    submit("two", "last.pt")
    alive.update({"one", "two"})
    for name in ("one", "two"):
        write_event(type(run)(run.root.parent / name), "done", attempt=1, step=9)

    submit("three", "last.pt")


@pytest.mark.usefixtures("alive", "hands")
def test_a_run_whose_job_was_cancelled_is_a_rival_until_that_has_ended(submit, monkeypatch):
    """The command that follows `cancel` comes while its job still ends."""
    run, _ = submit("one", "last.pt")
    write_event(run, "submitted", token="one", job_id="local-1", cluster="local", nodes="1")
    write_event(run, "cancel_requested", save=False, job_id="local-1")
    looks = iter([RUNNING, RUNNING])
    monkeypatch.setattr(live_job, "live_job", lambda *_: next(looks, None))

    submit("two", "last.pt")

    assert next(looks, None) is None


def test_where_the_scheduler_is_silent_the_other_run_may_write(submit, alive):
    submit("one", "last.pt")
    alive.add(None)

    with pytest.raises(UsageError, match="that one saves too"):
        submit("two", "last.pt")


def test_in_other_folders_the_same_relative_pattern_is_another_file(submit, alive, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "train.py").write_text("")
    submit("one", "last.pt")
    alive.add("one")

    submit("two", "last.pt", cwd=elsewhere)


def test_a_run_that_begins_when_the_other_is_done_may_have_its_files(submit, alive, work):
    run, spec = submit("one", "last.pt")
    alive.add("one")

    checks.check_sealed(spec.settings, str(work), work / "runs" / "two", after=[str(run.root)])
    with pytest.raises(UsageError, match="that one saves too"):
        checks.check_sealed(spec.settings, str(work), work / "runs" / "two")


def test_a_resume_is_refused_as_a_submit_is(submit, alive):
    run, spec = submit("one", "last.pt")
    submit("two", "last.pt")
    alive.add("two")

    with pytest.raises(UsageError, match="that two saves too"):
        prepare_resume(run, spec, ResumeRequest({}), {})


def test_the_way_out_works_at_a_resume_too(submit, alive, work, monkeypatch):
    run, spec = submit("one", "last.pt")
    submit("two", "last.pt")
    alive.add("two")

    asked = ResumeRequest(
        {}, ["checkpoint.sealed={output}/last.pt"], program=["train.py", "--out={output}/last.pt"]
    )
    monkeypatch.chdir(work)
    own = prepare_resume(run, spec, asked, {}).spec

    assert own.settings.checkpoint.sealed == [f"{run.output}/last.pt"]
    assert own.entry.args == [f"--out={run.output}/last.pt"]


def test_a_run_whose_files_cannot_be_read_hinders_nobody(submit, alive, work):
    run, _ = submit("one", "last.pt")
    run.spec.write_text("{")
    alive.add("one")

    submit("two", "last.pt")


def test_forms_are_compared_by_their_parts():
    [one], [two] = (
        list(places(parse([text])[0], [Path("/w")])) for text in ("a/*.pt", "/w/a/b.pt")
    )
    assert one == ("w", "a", "*.pt")
    assert may_meet(one, two)
    assert not may_meet(("w", "a[0-3]*"), ("w", "b*"))


SAVES = """
import torch
for epoch in range(9):
    model(batch).backward()
    torch.save(model.state_dict(), "out/last.pt")
"""


@pytest.fixture
def plain(submit, alive, work):
    """A live run that registers nothing, and whose program is seen to save."""
    (work / "train.py").write_text(SAVES)
    run, _ = submit("plain")
    alive.add("plain")
    return run


@pytest.mark.parametrize("pattern", ["out/last.pt", "out/*.pt"])
def test_a_live_run_that_registers_nothing_is_a_rival_where_its_program_is_seen_to_save(
    submit, plain, pattern
):
    """The second run resumed from the end of the first one's training, and was done at once."""
    with pytest.raises(UsageError, match=f"takes in files that {plain.name} saves too"):
        submit("with-checkpoint", pattern)


def test_where_its_program_saves_elsewhere_or_nothing_or_it_is_over_it_is_none(submit, plain, work):
    submit("of-its-own", "own/last.pt")

    (work / "train.py").write_text("print('saves nothing')\n")
    submit("beside-one-that-saves-nothing", "out/last.pt")

    (work / "train.py").write_text(SAVES)
    write_event(plain, "done", attempt=1, step=9)
    submit("later", "out/*.pt")
