"""`run.sealed`: what the ranks have written is proved, and found again at the next start."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import torch

from hpctrain.checkpoint.sealed import seals
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.layout import RunDir
from tests.support import local_runs, patience
from tests.support.gloo import launch
from tests.support.ledger_runs import all_fields


def _await_calls(folder, step, count):
    patience.until(lambda: len(list(folder.glob(f"calls-{step}-*"))) == count)


def program(root, out, steps=(), *, late_rank=None, sealed=None):
    """What a program with its own checkpoints does; returns what each rank has seen."""
    import hpctrain

    os.environ["HPCTRAIN_RUN_DIR"] = str(root)
    run = hpctrain.init()
    errors = []
    for step in steps:
        folder = Path(out) / f"global_step{step}"
        folder.mkdir(parents=True, exist_ok=True)
        if run.world.rank == late_rank:
            _await_calls(Path(out).parent, step, run.world.world_size - 1)
        torch.save({"step": step, "rank": run.world.rank}, folder / f"rank_{run.world.rank}.pt")
        (Path(out).parent / f"calls-{step}-{run.world.rank}").touch()
        try:
            run.sealed(step, sealed or folder)
        except hpctrain.errors.CheckpointError as error:
            errors.append(str(error))
    return str(run.resume_path), errors


def test_all_that_the_ranks_have_written_is_sealed_also_by_the_last_of_them(tmp_path):
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    out = tmp_path / "out"

    first = launch(program, 3, root=run.root, out=out, steps=(50, 100), late_rank=2)
    again = launch(program, 2, root=run.root, out=out)

    assert first == [("None", [])] * 3
    assert again == [(str(out / "global_step100"), [])] * 2, "the same on every rank"
    newest, before = seals.listing(run)
    assert [file.name for file in newest.seal.files] == ["rank_0.pt", "rank_1.pt", "rank_2.pt"]
    assert (newest.seal.step, before.seal.step, newest.seal.by) == (100, 50, "program")
    told = [all_fields(e) for e in ledger.read(run) if e.kind in {"sealed", "resume_chosen"}]
    assert [fact["step"] for fact in told] == [50, 100, 100]
    assert told[1]["bytes"] == newest.seal.size
    assert told[2]["path"] == str(out / "global_step100")


def test_what_cannot_be_sealed_is_an_error_on_every_rank_and_training_can_go_on(tmp_path):
    run = RunDir(tmp_path / "run")
    run.root.mkdir()

    ranks = launch(
        program, 2, root=run.root, out=tmp_path / "out", steps=(5,), sealed=tmp_path / "nowhere"
    )

    assert ranks == [("None", [f"{tmp_path / 'nowhere'} is not there; nothing was registered"])] * 2
    assert not list(run.sealed.iterdir()) if run.sealed.exists() else True


def test_a_file_that_a_kill_has_torn_is_put_back_before_the_program_sees_it(tmp_path):
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    path = tmp_path / "ckpt.pt"

    launch(program_with_one_path, 1, root=run.root, path=path, step=10)
    whole = path.read_bytes()
    launch(program_with_one_path, 1, root=run.root, path=path, step=20, cut=100, may_fail=True)
    assert path.read_bytes() != whole
    seen = launch(program_with_one_path, 1, root=run.root, path=path)

    assert seen == [(str(path), 10)]
    assert path.read_bytes() == whole


def program_with_one_path(root, path, step=None, cut=None):
    """Saves over one file; is killed after so many bytes of it."""
    import hpctrain

    os.environ["HPCTRAIN_RUN_DIR"] = str(root)
    run = hpctrain.init()
    step_found = torch.load(run.resume_path)["step"] if run.resume_path else None
    if step is not None:
        state = {"step": step, "weights": torch.full((1000,), float(step))}
        if cut is not None:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            with contextlib.suppress(OSError):
                path.write_bytes(buffer.getvalue()[:cut])
            os.kill(os.getpid(), 9)
        torch.save(state, path)
        run.sealed(step, path)
    return str(run.resume_path), step_found


def test_an_unchanged_program_that_is_killed_in_the_middle_of_a_save_goes_on_from_the_one_before(
    tmp_path,
):
    settings = ("checkpoint.sealed=out/ckpt.pt", "checkpoint.seal_settle_s=0.2")
    flags = [word for setting in settings for word in ("--set", setting)]
    script = local_runs.SCRIPTS / "saves_over_one_path.py"

    run = local_runs.start(tmp_path, "nano", 1, 1, *flags, "--", str(script), "wait")
    ended = local_runs.await_end(run, 2)

    path = tmp_path / "out" / "ckpt.pt"
    assert ended["reason"] == "completed"
    assert 0 < (tmp_path / "out" / "ckpt.pt.torn-2").stat().st_size <= 200_000
    (log,) = (run / "attempts" / "0002").glob("rank-00000.log")
    assert f"begins at step 2, given {path}" in log.read_text()
    assert torch.load(path)["step"] == 5
    (chosen,) = local_runs.events(run, "resume_chosen")
    assert (chosen["path"], chosen["put_back"]) == (str(path), True)
    assert len(seals.listing(RunDir(run))) == 2, "checkpoint.keep_sealed"
