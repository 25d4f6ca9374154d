"""`hpctrain doctor` on logs and on runs."""

from __future__ import annotations

import json

import pytest

from hpctrain.cli.main import main

OOM = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "job.log"
    path.write_text("step 1 loss: 2.0\n" + OOM)
    return path


def test_a_log_is_told_with_verdict_evidence_and_what_to_do(log, capsys):
    assert main(["doctor", "--log", str(log)]) == 0

    out = capsys.readouterr().out
    assert out.startswith("Verdict       a GPU ran out of memory on rank 3")
    assert "certain (HT801, gpu_oom)" in out
    assert f"{log}:2 (rank 3)" in out
    assert "recompute activations" in out


def test_json_has_everything(log, capsys):
    assert main(["doctor", "--log", str(log), "--json"]) == 0

    document = json.loads(capsys.readouterr().out)
    assert document["code"] == "HT801"
    assert document["certainty"] == "certain"
    assert document["evidence"][0]["line"] == 2
    assert document["run"] is None
    assert document["format"] == 1


def test_a_log_that_says_nothing_is_told_so_and_fails(tmp_path, capsys):
    log = tmp_path / "job.log"
    log.write_text("all is well\n")

    assert main(["doctor", "--log", str(log)]) == 1
    assert "nothing in 1 line of 1 log says why" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["--log", "absent.log"], 4, "absent.log: there is no such file or folder"),
        (["--log", "/dev/null"], 2, "/dev/null cannot be read: not an ordinary file"),
        (["lm-3", "--log", "x.log"], 2, "not both"),
        (["absent", "--runs", "."], 4, "no run 'absent'"),
    ],
)
def test_a_mistake_is_one_line(words, code, why, *, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    assert main(["doctor", *words]) == code

    error = capsys.readouterr().err
    assert why in error
    assert error.count("\n") == 1


def test_what_a_log_says_to_a_terminal_is_not_obeyed(tmp_path, capsys):
    log = tmp_path / "job.log"
    log.write_text("\x1b]0;evil\x07 OSError: [Errno 28] No space left on device\n")

    assert main(["doctor", "--log", str(log)]) == 0
    assert "\x1b]" not in capsys.readouterr().out
