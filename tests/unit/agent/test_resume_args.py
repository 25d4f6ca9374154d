"""Arguments for a later start are added where there is something to go on from, and only there."""

from __future__ import annotations

import pytest

from hpctrain.core.settings.schema import RunSettings
from hpctrain.node.agent.resume import ResumeArgs, line, resume_args


def added(tmp_path, args, pattern="", *, start=1, resume=None):
    settings = RunSettings(resume_args=args, resume_if=pattern)
    return resume_args(settings, start=start, resume=resume, cwd=str(tmp_path))


@pytest.mark.parametrize(
    ("given", "at", "words"),
    [
        (("", ""), (2, "/c"), ()),
        (("--init_from=resume", ""), (1, None), ()),
        (("--init_from=resume", ""), (2, None), ("--init_from=resume",)),
        (("--init_from=resume", ""), (1, "/c"), ("--init_from=resume",)),
        (("--from {checkpoint}/x", ""), (1, "/c d"), ("--from", "/c d/x")),
        (("--from {checkpoint}", ""), (2, None), ()),
        (("--from {checkpoint}", "out/*.pt"), (2, None), ()),
        (("--at {step}", ""), (2, "/c/iter_0000100.pt2"), ("--at", "100")),
        (
            ("--at={step} {checkpoint}", ""),
            (2, "/c2/e=3-step=50.ckpt"),
            ("--at=50", "/c2/e=3-step=50.ckpt"),
        ),
        (("--at {step}", ""), (2, "/c2/ckpt.pt"), ()),
        (("--at {step}", "out/*.pt"), (2, None), ()),
        (("'a b' c", "out/*.pt"), (1, None), ("a b", "c")),
        (("-r", "none/*.pt"), (2, None), ()),
        (("-r", "none/*.pt"), (2, "/c"), ("-r",)),
        (("-r", "**/deep.pt"), (1, None), ("-r",)),
        (("-r", "$OUT_FOLDER/ckpt.pt"), (1, None), ("-r",)),
        (("-r", "$NO_SUCH_VARIABLE/ckpt.pt"), (2, None), ()),
    ],
)
def test_when_they_are_added(tmp_path, monkeypatch, given, at, words):
    start, resume = at
    (tmp_path / "out" / "sub").mkdir(parents=True)
    (tmp_path / "out" / "ckpt.pt").touch()
    (tmp_path / "out" / "sub" / "deep.pt").touch()
    monkeypatch.setenv("OUT_FOLDER", str(tmp_path / "out"))

    assert added(tmp_path, *given, start=start, resume=resume).words == words


def test_a_later_start_of_a_program_whose_checkpoints_are_sealed_may_have_none_so_far(tmp_path):
    run = RunSettings(resume_args="--init_from=resume")

    more = resume_args(run, start=2, resume=None, cwd=str(tmp_path), sealed=["out/ckpt.pt"])

    assert more == ResumeArgs(why="there is no registered checkpoint so far")


def test_each_start_says_why(tmp_path):
    assert line(added(tmp_path, "-r", start=3)) == (
        "arguments added, since this is start 3 of the run: -r"
    )
    assert line(added(tmp_path, "-r", "x*")) == "no arguments added: nothing matches x*"
    assert added(tmp_path, "--at {step}", resume="/c/latest") == ResumeArgs(
        why="the name of /c/latest ends with no number, which {step} is for"
    )
    assert added(tmp_path, "") == ResumeArgs()
