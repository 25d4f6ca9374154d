"""What a new run takes of another's checkpoint, and what keeps it from being taken."""

from __future__ import annotations

import pytest
import torch

from hpctrain.checkpoint.exchange.contents import committed
from hpctrain.checkpoint.sealed import resume
from hpctrain.checkpoint.store import find
from hpctrain.cli.main import main
from hpctrain.core.settings.spec import load_spec
from hpctrain.errors import CheckpointError
from hpctrain.launch.launch import begin_from, copy_into
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.layout import RunDir
from tests.support.exchange import bits, loaded, made_run, save, some

DATA = {"tracked.data.cursor": torch.arange(3)}


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A run with checkpoints of two steps, and a new one without any."""
    monkeypatch.chdir(tmp_path)
    old = made_run(tmp_path, "old")
    for step in (4, 7):
        save(old, step, some(seed=step) | DATA, rng={"cuda": False})
    made_run(tmp_path, "new")
    return tmp_path / "runs"


def begun(runs, asked, *without):
    """The new run's first checkpoint: its step, names and manifest, and what is said of it."""
    new = RunDir(runs / "new")
    begin = begin_from(asked, without, runs=runs)
    copy_into(new, load_spec(new.spec), begin)
    (step,) = find.steps(new)
    return step, loaded(new, step), committed(new, step)[1], begin.line


def test_by_itself_all_of_the_newest_is_taken(runs):
    step, tensors, manifest, line = begun(runs, "old")

    assert step == 7
    assert bits(tensors) == bits(some(seed=7) | DATA)
    assert manifest.data == {"samples_consumed": 56}
    assert manifest.extra == {"sched": {"best": 0.5}}
    assert (manifest.world_size, manifest.mesh, manifest.rng) == (1, {"dp": 1}, {"cuda": False})
    assert (manifest.run_id, manifest.name) == ("id-of-new", "new")
    assert line == "step 7 of old; the first step is 8"


def test_a_step_may_be_named(runs):
    assert bits(begun(runs, "old@4")[1]) == bits(some(seed=4) | DATA)


@pytest.mark.parametrize(
    ("without", "prefixes", "at"),
    [
        (["optimizer"], ("model.", "rng.", "tracked.data."), 7),
        (["data"], ("model.", "optim.", "tracked.ema"), 0),
        (["data", "optimizer", "data"], ("model.",), 0),
    ],
)
def test_what_is_left_out_begins_anew(runs, without, prefixes, at):
    data, extra = "data" not in without, "optimizer" not in without

    step, tensors, manifest, line = begun(runs, "old", *without)

    wanted = {k: v for k, v in (some(seed=7) | DATA).items() if k.startswith(prefixes)}
    assert step == at
    assert bits(tensors) == bits(wanted)
    assert (bool(manifest.data), bool(manifest.extra)) == (data, extra)
    assert bool(manifest.rng) is data
    assert manifest.world_size == (1 if data else 0)
    named = " and ".join(dict.fromkeys(without))
    assert line == f"step 7 of old, without its {named}; the first step is {at + 1}"


def test_an_import_is_no_attempt_of_the_run(runs):
    begun(runs, "old")

    (event,) = ledger.read(RunDir(runs / "new"))
    assert event.attempt is None
    assert event.fact.source == str(runs / "old" / "checkpoints" / "step-0000000007")


@pytest.mark.parametrize(
    ("asked", "code", "why"),
    [
        (["--from", "none"], 4, "no run or job 'none'"),
        (["--from", "old@5"], 4, "old has no checkpoint of step 5; there are: 7, 4"),
        (["--from", "old@last"], 2, "--from old@last: 'last' is no step; write RUN@STEP, e.g."),
        (["--from", "new"], 7, "--from new: new has no whole checkpoint (`hpctrain checkpoints"),
        (["--without", "data"], 2, "--without says what of --from RUN is left out, and there is"),
        (["--from", "old", "--without", "weights"], 2, "'weights' is not one of"),
    ],
)
def test_what_cannot_be_begun_with_is_refused_and_nothing_is_left(runs, capsys, asked, code, why):
    argv = ["submit", "--cluster", "local", "--no-submit", "--name", "third", *asked]

    assert main(argv) == code
    assert why in capsys.readouterr().err
    assert not (runs / "third").exists()


def test_a_torn_checkpoint_is_refused_where_it_is_named_and_passed_over_where_it_is_not(runs):
    (file,) = (runs / "old" / "checkpoints" / "step-0000000007").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-9])

    assert begin_from("old", (), runs=runs).step == 4
    with pytest.raises(CheckpointError, match="step 7 of old is torn"):
        begin_from("old@7", (), runs=runs)


def test_damage_that_only_reading_shows_leaves_no_run_behind(runs, capsys):
    (file,) = (runs / "old" / "checkpoints" / "step-0000000007").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)

    argv = ["submit", "--cluster", "local", "--no-submit", "--name", "third", "--from", "old"]
    assert main(argv) != 0
    error = capsys.readouterr().err
    assert f"{file.parent} is damaged: " in error
    assert "; try --from old@4" in error
    assert not (runs / "third").exists()


def test_a_dry_run_says_what_it_would_begin_with_and_copies_nothing(runs, capsys):
    argv = ["submit", "--cluster", "local", "--dry-run", "--name", "third", "--from", "old@4"]

    assert main(argv) == 0
    assert "note: begins with step 4 of old; the first step is 5" in capsys.readouterr().err
    assert not (runs / "third").exists()


def test_a_run_whose_program_saves_for_itself_is_answered_with_the_way(runs, capsys, monkeypatch):
    monkeypatch.setattr(resume, "glance", lambda run: (object(), []))
    argv = ["submit", "--cluster", "local", "--no-submit", "--name", "third", "--from", "new"]

    assert main(argv) == 7
    assert "`hpctrain checkpoints path new` prints where the newest lies" in capsys.readouterr().err
