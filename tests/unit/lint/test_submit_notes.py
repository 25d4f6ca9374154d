"""At submit lint speaks, in a few lines, and never stands in the way."""

from __future__ import annotations

import os

import pytest

from hpctrain.advise.lint.render import lint_notes
from hpctrain.core.settings.schema import RunSettings, Settings, SlurmSettings
from hpctrain.core.settings.spec import Entry
from hpctrain.launch.prepare import SubmitRequest, prepare
from hpctrain.launch.program import MOST_BYTES

HANGS = "import torch.distributed as dist\nif dist.get_rank() == 0:\n    dist.barrier()\n"
OLD = "import torch\nscaler = torch.cuda.amp.GradScaler()\n"


@pytest.fixture
def notes_on(tmp_path):
    def notes(text, *, lint=True, kind="script", cpus=0):
        path = tmp_path / "train.py"
        if isinstance(text, bytes):
            path.write_bytes(text)
        else:
            path.write_text(text)
        settings = Settings(run=RunSettings(lint=lint), slurm=SlurmSettings(cpus_per_rank=cpus))
        return lint_notes(Entry(kind=kind, path=str(path)), settings, tmp_path)

    return notes


def test_an_error_is_told_with_its_place_and_where_to_read_more(notes_on):
    assert notes_on(HANGS) == [
        "lint: train.py:3 HT101 barrier() is called only where dist.get_rank() == 0 (line 2)",
        "lint: hpctrain lint train.py tells why and what instead",
    ]


def test_the_rest_is_counted(notes_on):
    *first, last = notes_on(OLD + HANGS * 4)

    assert len(first) == 2
    assert last == (
        "lint: 2 more errors and 1 warning in train.py: hpctrain lint train.py tells why and what "
        "instead"
    )


def test_nothing_is_said_where_nothing_is_wrong_or_nobody_asks(notes_on):
    assert notes_on("import torch\n") == []
    assert notes_on("import torch\nx = torch.load('a.pt')\n") == []
    assert notes_on(HANGS, lint=False) == []
    assert notes_on(HANGS, kind="program") == []


def test_what_cannot_be_read_or_is_long_is_passed_over_with_a_note(notes_on, tmp_path):
    (note,) = notes_on(b"# coding: klingon\n")
    assert note.startswith("lint has passed over train.py: it cannot be read: unknown encoding")
    (note,) = notes_on("#" * (MOST_BYTES + 1))
    assert note == "lint has passed over train.py: it is long: hpctrain lint train.py"
    gone = Entry(kind="script", path=str(tmp_path / "none.py"))
    (note,) = lint_notes(gone, Settings(), tmp_path)
    assert "none.py: it cannot be read: No such file" in note


def test_workers_are_held_against_the_cpus_of_a_rank(notes_on):
    text = "from torch.utils.data import DataLoader\nloader = DataLoader(x, num_workers=8)\n"

    assert notes_on(text, cpus=8) == notes_on(text) == []
    assert notes_on(text, cpus=4)[0].startswith("lint: 1 warning in train.py")


def test_a_comment_in_the_program_is_heard(notes_on):
    assert notes_on(HANGS.replace("barrier()", "barrier()  # hpctrain: ignore HT101")) == []


def test_submit_says_so_and_submits_all_the_same(tmp_path):
    (tmp_path / "train.py").write_text(HANGS)

    def asked(**more):
        request = SubmitRequest(
            cwd=tmp_path,
            environ=os.environ,
            runs=tmp_path / "runs",
            command=("train.py",),
            cluster="local",
            lint=lint_notes,
            **more,
        )
        return [note for note in prepare(request).notes if "lint" in note]

    assert asked()[0].startswith("lint: train.py:3 HT101 ")
    assert asked(sets=("run.lint=false",)) == []
