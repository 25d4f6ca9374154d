"""Patterns of checkpoint.sealed: what they stand for, the step in a name, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.checkpoint.sealed.patterns import parse, refuse_wrong
from hpctrain.errors import UsageError
from hpctrain.launch.prepare import SubmitRequest, prepare

CWD = Path("/work/here")
RUN = CWD / "runs" / "gpt"


@pytest.mark.parametrize(
    ("pattern", "name", "step"),
    [
        ("out/checkpoint-*", "out/checkpoint-50", 50),
        ("out/ckpt-*.pt", "out/ckpt-0000050.pt", 50),
        ("out/llama7b-*.pt", "out/llama7b-50.pt", 50),
        ("out/global_step*", "out/global_step50", 50),
        ("logs/*.ckpt", "logs/epoch=3-step=50.ckpt", 50),
        ("out/step-[0-9]*/model.pt", "out/step-50/model.pt", 50),
        ("out/ckpt-????", "out/ckpt-0050", 50),
        ("out/ckpt-[!a]*", "out/ckpt-50", 50),
        ("out/*.pt", "out/epoch3_50.pt", None),
        ("out/*.pt", "out/last.pt", None),
        ("out/ckpt-50.pt", "out/ckpt-50.pt", None),
        ("out/ckpt-*", "out/ckpt-123456789012", None),
    ],
)
def test_the_step_is_what_the_wildcards_stand_for_where_that_is_plain(
    tmp_path, pattern, name, step
):
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.touch()

    (match,) = parse([pattern])[0].matches(tmp_path)

    assert (match.path, match.step) == (path, step)
    assert match.is_written_over == ("*" not in pattern and "?" not in pattern)


def test_links_hidden_files_and_what_was_set_aside_do_not_match(tmp_path):
    for name in ("a-1", "a-2.torn-3", "a-2.torn-3.2", ".a-3.putting-back", "b"):
        (tmp_path / name).touch()
    (tmp_path / "a-last").symlink_to("a-1")

    matches = [m.path.name for p in parse(["a-*, nothing/*"]) for m in p.matches(tmp_path)]

    assert matches == ["a-1"]


def test_an_absolute_pattern_means_the_same_from_every_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "ckpt-50.pt").touch()

    for text in (f"{tmp_path}/out/ckpt-*.pt", "~/out/ckpt-*.pt"):
        (match,) = parse([text])[0].matches(tmp_path / "elsewhere")
        assert (match.path, match.step) == (tmp_path / "out" / "ckpt-50.pt", 50)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("", "is empty"),
        ("ckpt-*,", "is empty"),
        ("./", "is empty"),
        ("/", "is empty"),
        ("~nobody-of-this-name/out/*", "whom nobody knows"),
        ("../out/*", "leaves its folder"),
        ("out/**/ckpt", "whole trees"),
        ("*", "the run's own files"),
        ("run?", "the run's own files"),
        ("runs/gpt", "the run's own files"),
        ("runs/*/checkpoints/*", "the run's own files"),
        ("runs/gpt/output", "the run's own files"),
        ("/wor?", "the run's own files"),
        ("/work/here/runs/gpt/checkpoints/*", "the run's own files"),
    ],
)
def test_what_would_seal_nothing_or_the_runs_own_is_refused_in_a_line(pattern, why):
    with pytest.raises(UsageError, match=why) as caught:
        refuse_wrong([pattern], CWD, RUN)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "pattern",
    [
        "out/*",
        "*.pt",
        "runs/gpt/output/ckpt-*",
        "runs/other/x",
        "ckpt.pt",
        "/scratch/*",
        "~/out/*",
        "/work/here/runs/gpt/output/ckpt-*",
    ],
)
def test_what_is_the_programs_is_not_refused(pattern):
    refuse_wrong([pattern], CWD, RUN)
    refuse_wrong([pattern], None, RUN)


def test_submit_refuses_a_wrong_pattern_in_one_line(tmp_path):
    (tmp_path / "train.py").write_text("pass\n")
    request = SubmitRequest(
        cwd=tmp_path,
        environ={},
        runs=Path("runs"),
        command=["train.py"],
        cluster="local",
        sets=["checkpoint.sealed=../*.pt"],
    )

    with pytest.raises(UsageError, match=r"^checkpoint\.sealed: pattern '\.\./\*\.pt' leaves"):
        prepare(request)
