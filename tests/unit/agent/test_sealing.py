"""The agent seals what a program has saved: settled, closed, whole; never what a kill may cut."""

from __future__ import annotations

import os
import shutil
import time

import pytest

from hpctrain.checkpoint.sealed import seals, start
from hpctrain.checkpoint.sealed.start import resume_at_start
from hpctrain.core.settings.schema import CheckpointSettings
from hpctrain.errors import CheckpointError, Fenced, NoCheckpoint
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import AttemptStarted, CheckpointSealed, Submitted
from hpctrain.ledger.run.fence import identity
from hpctrain.ledger.run.layout import RunDir
from hpctrain.node.agent.sealing import LOOK_S, REST, SealWatch, is_open_for_writing
from tests.support import patience
from tests.support.checkpoints import next_attempt
from tests.support.checkpoints import save as save_checkpoint
from tests.support.sealed import archive

SETTLE_S = 10.0


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "runs" / "gpt")
    run.root.mkdir(parents=True)
    return run


class Interrupted(Exception):
    """As the agent raises it where a stop comes."""


class Watched:
    """A watch whose clock the test turns."""

    def __init__(self, run, *patterns, stopping=False):
        self.now = 0.0
        self.run, self.cwd = run, run.root.parent.parent
        self.attempt = self.start()
        run.attempt(self.attempt.number).mkdir(parents=True, exist_ok=True)
        self.settings = CheckpointSettings(
            sealed=list(patterns), seal_settle_s=SETTLE_S, patience_s=0.0
        )
        self.watch = SealWatch(
            run,
            self.attempt,
            self.settings,
            str(self.cwd),
            is_stopping=lambda: stopping,
            clock=lambda: self.now,
        )
        self.went_on_from = self.choose(self.attempt)

    def start(self):
        attempt = next_attempt(self.run)
        ledger.append(
            self.run, AttemptStarted(**identity(self.run, attempt)), attempt=attempt.number
        )
        return attempt

    def look(self, after_s=0.0):
        self.now += after_s
        self.watch.look()
        return [stored.seal.step for stored in reversed(seals.listing(self.run))]

    def left(self, *, returned):
        with self.watch as watch:
            watch.returned = returned
        return [stored.seal.step for stored in reversed(seals.listing(self.run))]

    def choose(self, attempt, on_bytes=None):
        path = resume_at_start(
            self.run, attempt, self.settings, cwd=str(self.cwd), on_bytes=on_bytes
        )
        return path and path.removeprefix(f"{self.cwd}/")

    def next_start(self, on_bytes=None):
        return self.choose(self.start(), on_bytes)


def save(watched, name, content=b"weights"):
    path = watched.cwd / name
    path.parent.mkdir(parents=True, exist_ok=True)
    archive(path, content)
    return path


def test_what_has_not_changed_for_so_long_is_sealed_in_place_with_its_step(run):
    watched = Watched(run, "out/ckpt-*.pt")
    save(watched, "out/ckpt-50.pt")

    assert watched.look() == []
    assert watched.look(SETTLE_S - 1) == []
    assert watched.look(1) == [50]
    assert watched.look(100) == [50], "once"
    (stored,) = seals.listing(run)
    assert (stored.seal.by, stored.seal.is_copy) == ("agent", False)
    assert [event.kind for event in ledger.read(run)] == ["attempt_started", "sealed"]


def test_what_lies_far_from_the_run_is_sealed_and_put_back_alike(run, tmp_path):
    watched = Watched(run, f"{tmp_path}/scratch/ckpt.pt")
    path = save(watched, tmp_path / "scratch" / "ckpt.pt")
    whole = path.read_bytes()
    watched.look()
    assert watched.look(SETTLE_S) == [None]

    path.write_bytes(b"PK\x03\x04torn")

    assert watched.next_start() == "scratch/ckpt.pt"
    assert path.read_bytes() == whole


def test_what_still_grows_is_not_sealed(run):
    watched = Watched(run, "out/checkpoint-*")
    folder = watched.cwd / "out" / "checkpoint-50"
    folder.mkdir(parents=True)
    for part in range(3):
        (folder / f"part-{part}").write_bytes(b"x")
        assert watched.look(SETTLE_S - 1) == []
    assert watched.look(SETTLE_S) == [50]


def test_a_file_that_is_open_for_writing_is_not_sealed(run):
    watched = Watched(run, "out/ckpt-*.pt")
    path = save(watched, "out/ckpt-50.pt")
    watched.look()

    with path.open("r+b"):
        assert watched.look(SETTLE_S) == []
    with path.open("rb"):
        assert watched.look(SETTLE_S) == [50]


def test_an_archive_without_its_end_is_not_sealed_however_long_it_lies_there(run, caplog):
    watched = Watched(run, "out/ckpt-*.pt")
    path = save(watched, "out/ckpt-50.pt", b"weights" * 100)
    path.write_bytes(path.read_bytes()[:-10])

    for _ in range(5):
        assert watched.look(SETTLE_S) == []
    assert caplog.text.count("is not registered: ckpt-50.pt: not a whole zip archive") == 1


def test_each_save_over_one_path_is_sealed_with_a_copy(run):
    watched = Watched(run, "out/ckpt.pt")
    for content in (b"one", b"two", b"three"):
        path = save(watched, "out/ckpt.pt", content * 100)
        watched.look()
        watched.look(SETTLE_S)

    newest, before = seals.listing(run)
    assert newest.copy.read_bytes() == path.read_bytes() != before.copy.read_bytes()
    path.write_bytes(b"PK\x03\x04torn")
    assert watched.next_start() == "out/ckpt.pt"
    assert path.read_bytes() == newest.copy.read_bytes()


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_what_lay_there_before_the_run_is_not_the_runs(run, hours):
    """Whatever the clock of its file server says."""
    old = run.root.parent.parent / "out" / "ckpt-900.pt"
    old.parent.mkdir()
    archive(old, b"of another run")
    os.utime(old, 2 * (time.time() + 3600 * hours,))
    watched = Watched(run, "out/ckpt-*.pt")

    watched.look()
    assert watched.look(SETTLE_S) == []
    assert watched.left(returned=True) == []
    assert watched.next_start() is None
    assert old.exists()


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_file_server_of_another_time_hides_no_save(run, hours):
    """Nor does a program that copies a file together with its time."""
    (run.root.parent.parent / "out").mkdir()
    archive(run.root.parent.parent / "out" / "ckpt-900.pt", b"of another run")
    watched = Watched(run, "out/ckpt-*.pt")

    paths = [save(watched, "out/ckpt-50.pt"), save(watched, "out/ckpt-900.pt", b"anew")]
    for path in paths:
        os.utime(path, 2 * (time.time() + 3600 * hours,))

    watched.look()
    assert watched.look(SETTLE_S) == [50, 900]
    paths.append(save(watched, "out/ckpt-950.pt"))
    os.utime(paths[-1], 2 * (time.time() + 3600 * hours + 1,))
    assert watched.left(returned=False) == [50, 900]
    assert watched.next_start() == "out/ckpt-950.pt"


def test_a_pattern_that_comes_later_stands_for_what_was_saved_since_the_first_start(run):
    old = run.root.parent.parent / "out" / "ckpt-900.pt"
    old.parent.mkdir()
    archive(old, b"of another run")
    os.utime(old, 2 * (time.time() - 3600,))
    first = Watched(run, "other/*")
    os.utime(save(first, "out/ckpt-50.pt"), 2 * (time.time() + 1,))
    first.left(returned=True)

    assert Watched(run, "other/*", "out/ckpt-*.pt").went_on_from == "out/ckpt-50.pt"
    assert [stored.seal.step for stored in seals.listing(run)] == [50]


def test_when_all_ranks_have_returned_what_is_left_is_sealed_at_once(run):
    watched = Watched(run, "out/checkpoint-*")
    save(watched, "out/checkpoint-50/model.pt")
    save(watched, "out/checkpoint-60/model.pt")

    assert watched.left(returned=True) == [50, 60]


def test_after_a_kill_a_folder_is_not_sealed_and_a_single_whole_archive_is(run):
    watched = Watched(run, "out/checkpoint-*", "out/ckpt-*.pt")
    whole = save(watched, "out/ckpt-40.pt")
    folder = save(watched, "out/checkpoint-50/model.pt")
    no_archive = watched.cwd / "out" / "ckpt-60.pt"
    no_archive.write_bytes(b"a format without checksums")
    for later_s, path in enumerate((whole, folder, no_archive)):
        os.utime(path, (time.time() + later_s, time.time() + later_s))

    assert watched.left(returned=False) == []
    assert watched.next_start() == "out/ckpt-40.pt"
    assert folder.exists(), "left alone: nobody can say"
    assert no_archive.exists()
    assert [stored.seal.step for stored in seals.listing(run)] == [40]


def test_what_a_kill_has_left_is_not_sealed_by_later_starts_until_it_is_saved_again(run):
    watched = Watched(run, "out/checkpoint-*", "out/ckpt-*.pt")
    save(watched, "out/checkpoint-40/model.pt")
    watched.look()
    assert watched.look(SETTLE_S) == [40]
    save(watched, "out/checkpoint-50/model.pt")
    watched.left(returned=False)

    later = Watched(run, "out/checkpoint-*", "out/ckpt-*.pt")
    assert later.went_on_from == "out/checkpoint-40"
    later.look()
    assert later.look(SETTLE_S) == [40]
    save(later, "out/checkpoint-50/model.pt", b"saved again")
    later.look()
    assert later.look(SETTLE_S) == [40, 50]
    assert later.left(returned=True) == [40, 50]


def test_what_is_older_than_the_file_that_a_start_goes_on_from_is_not_sealed_after_it(run):
    watched = Watched(run, "out/checkpoint-*", "out/ckpt-*.pt")
    folder, whole = save(watched, "out/checkpoint-40/model.pt"), save(watched, "out/ckpt-50.pt")
    for later_s, path in enumerate((folder, whole)):
        os.utime(path, (time.time() + later_s, time.time() + later_s))
    watched.left(returned=False)

    later = Watched(run, "out/checkpoint-*", "out/ckpt-*.pt")
    assert later.went_on_from == "out/ckpt-50.pt"
    later.look()
    assert later.look(SETTLE_S) == [50]


def test_what_has_changed_since_it_had_settled_is_not_sealed(run):
    watched = Watched(run, "out/checkpoint-*")
    folder = save(watched, "out/checkpoint-50/model.pt").parent
    (match,) = watched.watch._unsealed.matches()
    settled = watched.watch._unsealed.unit(match)
    (folder / "optimizer.pt").write_bytes(b"on its way")

    with pytest.raises(CheckpointError, match="was changed while it was registered"):
        start.seal(run, watched.attempt, settled, watched.settings)
    assert not seals.listing(run)


def test_what_a_person_went_back_behind_is_not_sealed_again(run):
    watched = Watched(run, "out/ckpt-*.pt")
    old = [save(watched, f"out/ckpt-{step}.pt") for step in (50, 100)]
    assert watched.left(returned=True) == [50, 100]
    ledger.append(run, Submitted(token="t", job_id="8", from_step=50))
    assert watched.next_start() == "out/ckpt-50.pt"
    again = Watched(run, "out/ckpt-*.pt")

    again.look()
    assert again.look(SETTLE_S) == [50]
    later = time.time() + 5
    os.utime(old[1], (later, later))  # trained anew
    again.look()
    assert again.look(SETTLE_S) == [50, 100]


@pytest.mark.parametrize(
    ("state", "reads"),
    [("whole", 1), ("torn", 2), ("newer", 5), ("not sealed", 5), ("left behind", 5)],
)
def test_a_start_can_be_interrupted_at_each_part_that_it_reads(run, state, reads):
    """As by a stop: it ends there, and the next start goes on from the same."""
    watched = Watched(run, "out/ckpt.pt")
    path = save(watched, "out/ckpt.pt", b"first" * 100)
    if state not in {"not sealed", "left behind"}:
        watched.look()
        watched.look(SETTLE_S)
    if state == "torn":
        path.write_bytes(b"PK\x03\x04torn")
    elif state == "newer":
        archive(path, b"second" * 100, later_than=path)
    elif state == "left behind":
        run.attempt(1).joinpath(start.RETURNED).touch()
    saved = b"second" if state == "newer" else b"first"
    parts = 0

    while True:
        left = parts

        def stop(_):
            nonlocal left
            left -= 1
            if left < 0:
                raise Interrupted

        try:
            assert watched.next_start(stop) == "out/ckpt.pt"
            break
        except Interrupted:
            parts += 1
            run.attempt(watched.start().number - 1).mkdir(parents=True, exist_ok=True)

    assert parts == reads
    assert saved in path.read_bytes()


def test_a_person_goes_back_once(run):
    """Not again at each start after it: what was trained since would be forgotten."""
    watched = Watched(run, "out/ckpt-*.pt")
    ledger.append(run, Submitted(token="t", job_id="8", from_step=0))
    again = Watched(run, "out/ckpt-*.pt")
    assert again.went_on_from is None

    save(watched, "out/ckpt-50.pt")

    assert again.left(returned=True) == [50]
    assert watched.next_start() == "out/ckpt-50.pt"
    assert watched.next_start() == "out/ckpt-50.pt"


def test_a_run_whose_seals_are_gone_does_not_begin_anew_unasked(run):
    watched = Watched(run, "out/checkpoint-*")
    save(watched, "out/checkpoint-50/model.pt")
    watched.look()
    assert watched.look(SETTLE_S) == [50]
    shutil.rmtree(run.sealed)

    with pytest.raises(
        CheckpointError, match=rf"registered .*out/checkpoint-50, .*resume {run.typed} --from 0"
    ):
        watched.next_start()

    ledger.append(run, Submitted(token="t", job_id="8", from_step=0))
    assert watched.next_start() is None
    assert watched.next_start() is None


def test_where_ranks_had_returned_seals_that_are_gone_are_made_again(run):
    watched = Watched(run, "out/checkpoint-*")
    os.utime(save(watched, "out/checkpoint-50/model.pt"), 2 * (time.time() + 1,))
    assert watched.left(returned=True) == [50]
    shutil.rmtree(run.sealed)

    assert watched.next_start() == "out/checkpoint-50"


def test_a_torn_archive_that_nobody_has_sealed_is_set_aside(run):
    watched = Watched(run, "out/ckpt-*.pt")
    save(watched, "out/ckpt-40.pt")
    torn = save(watched, "out/ckpt-50.pt", b"weights" * 100)
    torn.write_bytes(torn.read_bytes()[:300])
    watched.left(returned=False)

    assert watched.next_start() == "out/ckpt-40.pt"
    assert sorted(p.name for p in torn.parent.iterdir()) == ["ckpt-40.pt", "ckpt-50.pt.torn-2"]
    told = [event.fact for event in ledger.read(run) if event.kind == "checkpoint_set_aside"]
    assert [fact.name for fact in told] == [str(torn)]


def test_where_a_stop_leaves_no_time_the_next_start_seals_what_returned_ranks_have_left(run):
    watched = Watched(run, "out/checkpoint-*", stopping=True)
    save(watched, "out/checkpoint-50/model.pt")

    assert watched.left(returned=True) == []
    assert watched.next_start() == "out/checkpoint-50"


def test_a_pattern_that_matched_nothing_is_warned_of_in_a_line(run, caplog):
    watched = Watched(run, "out/ckpt-*.pt", "uot/*")
    save(watched, "out/ckpt-50.pt")
    watched.left(returned=True)

    warned = [record.getMessage() for record in caplog.records]
    assert warned == ["checkpoint.sealed: 'uot/*' matched nothing in this attempt"]


def test_a_newer_attempt_ends_the_sealing(run):
    watched = Watched(run, "out/ckpt-*.pt")
    save(watched, "out/ckpt-50.pt")
    next_attempt(run)

    watched.look()
    with pytest.raises(Fenced):
        watched.look(SETTLE_S)
    assert watched.left(returned=True) == []


def test_a_disk_that_refuses_never_ends_the_watch(run, monkeypatch, caplog):
    watched = Watched(run, "out/ckpt-*.pt")
    save(watched, "out/ckpt-50.pt")

    def refuses(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("hpctrain.checkpoint.sealed.seals.begin", refuses)
        assert watched.left(returned=True) == []
    assert "No space left" in caplog.text


def test_it_rests_for_what_a_look_took_and_not_for_what_reading_a_checkpoint_took(run, monkeypatch):
    watched = Watched(run, "out/ckpt-*.pt")
    save(watched, "out/ckpt-50.pt")
    matches, seal = start.Unsealed.matches, start.seal

    def takes(seconds, act):
        def acts(*args):
            watched.now += seconds
            return act(*args)

        return acts

    monkeypatch.setattr(start, "seal", takes(60.0, seal))
    watched.look()
    assert watched.look(SETTLE_S) == [50]
    assert watched.now > 60, "the checkpoint was read"
    assert watched.watch.rest_s == LOOK_S

    monkeypatch.setattr(start.Unsealed, "matches", takes(3.0, matches))
    watched.look()
    assert watched.watch.rest_s == 3.0 * REST


def test_the_thread_looks_by_itself_and_is_gone_with_the_ranks(run, monkeypatch):
    monkeypatch.setattr("hpctrain.node.agent.sealing.LOOK_S", 0.01)
    watched = Watched(run, "out/ckpt-*.pt")
    watched.settings = CheckpointSettings(sealed=["out/ckpt-*.pt"], seal_settle_s=0.0)
    watch = SealWatch(run, watched.attempt, watched.settings, str(watched.cwd))
    with watch:
        save(watched, "out/ckpt-50.pt")
        patience.until(lambda: seals.listing(run))

    assert [stored.seal.step for stored in seals.listing(run)] == [50]
    assert not watch._thread.is_alive()


def test_who_may_still_write_is_told_by_the_kernel(run, tmp_path):
    watched = Watched(run, "out/*")
    path = save(watched, "out/ckpt-50.pt")
    (match,) = watched.watch._unsealed.matches()
    one = watched.watch._unsealed.unit(match)

    assert not is_open_for_writing(one)
    with path.open("ab"):
        assert is_open_for_writing(one)


def test_a_run_that_has_sealed_nothing_starts_without_a_look_at_its_checkpoints(run):
    """Its ranks may go on from the nodes' memory, which needs no disk."""
    watched = Watched(run, "out/ckpt-*.pt")
    watched.settings = CheckpointSettings()
    attempt = watched.start()
    shutil.rmtree(run.checkpoints)
    run.checkpoints.symlink_to(run.checkpoints)  # whoever lists it gets an error

    assert watched.choose(attempt) is None


def test_a_run_whose_seals_are_gone_is_refused_unless_it_has_changed_over_to_checkpoints(run):
    watched = Watched(run)
    save(watched, "out/ckpt-50.pt")
    sealed = CheckpointSealed(path=str(watched.cwd / "out/ckpt-50.pt"), step=50, by="program")
    ledger.append(run, sealed, attempt=1)

    with pytest.raises(NoCheckpoint, match=r"no record of them is left .*--from 0"):
        watched.next_start()
    save_checkpoint(run, attempt := watched.start(), 60)
    assert watched.choose(attempt) is None
