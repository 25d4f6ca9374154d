"""`hpctrain checkpoints pin`, `prune` and `rm`: nothing goes without a word, or against one."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys

import click
import pytest

from hpctrain.checkpoint.format.manifest import MANIFEST_NAME
from hpctrain.checkpoint.store import commit, find, retention
from hpctrain.cli import checkpoints_keep
from hpctrain.cli.main import main
from hpctrain.core.base.text import size
from hpctrain.core.settings.schema import replaced
from hpctrain.core.settings.spec import load_spec
from tests.support import checkpoints as support
from tests.support.ledger_runs import Story, local_job


@pytest.fixture
def story(tmp_path, monkeypatch):
    """A run that ended well, with three checkpoints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPCTRAIN_RUNS", raising=False)
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    story = Story(tmp_path / "runs" / "gpt-a").submitted("local-17").started(1, "local-17")
    story.restored(1).ended(1, "completed", "stop")
    save(story.run, {1000: 3.0, 2000: 1.0, 3000: 2.0})
    return story


@pytest.fixture
def run(story):
    return story.run


@pytest.fixture
def call(capsys):
    """Exit code, stdout and stderr of `hpctrain checkpoints`."""

    def call(*words):
        code = main(["checkpoints", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def terminal(monkeypatch):
    """Somebody at a terminal who answers every question so, and counts them."""
    asked = []

    def answer(text):
        def answered(prompt):
            asked.append(prompt)
            sys.stdout.write(prompt)
            return text

        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(click.termui, "visible_prompt_func", answered)
        return asked

    return answer


def save(run, losses):
    """Checkpoints with a loss each; None for one at which nothing was logged."""
    attempt = support.next_attempt(run)
    for step, loss in losses.items():
        staged, listed = support.stage(run, attempt, step)
        listed.metrics = {} if loss is None else {"loss": loss}
        commit.publish(run, staged, listed, attempt)


def change(run, **settings):
    """Other settings [checkpoint] of the run."""
    spec = load_spec(run.spec)
    named = {f"checkpoint.{name}": value for name, value in settings.items()}
    spec.settings = replaced(spec.settings, named)
    spec.dump(run.spec)


def bytes_of(run, *steps):
    return sum(retention.size_of(run, step) for step in steps)


def test_a_pin_is_made_shown_and_taken_away(run, call):
    assert call("pin", "gpt-a", 1000, "--reason", "table 2")[:2] == (
        0,
        "step 1000 of gpt-a is pinned\n",
    )
    again = call("pin", "gpt-a", 1000, "--reason", "table 2")
    assert again[:2] == (0, "step 1000 of gpt-a was pinned already\n")

    listed = call("list", "gpt-a")[1].splitlines()
    assert listed[-1].endswith("  ok, pinned (table 2)")
    assert listed[-2].endswith("  ok")
    rows = json.loads(call("list", "gpt-a", "--json")[1])["checkpoints"]
    assert [row["pinned"] for row in rows] == [None, None, "table 2"]

    assert call("pin", "gpt-a", 1000, "--remove")[1] == "step 1000 of gpt-a is no longer pinned\n"
    assert call("pin", "gpt-a", 1000, "--remove")[1] == "step 1000 of gpt-a was not pinned\n"
    assert retention.pinned(run) == {}


def test_a_pin_without_a_word_is_shown_too(run, call):
    call("pin", "gpt-a", 1000)

    assert call("list", "gpt-a")[1].splitlines()[-1].endswith("  ok, pinned")


def test_pins_that_cannot_be_made_are_refused_in_one_line(run, call):
    (find.step_path(run, 2000) / MANIFEST_NAME).unlink()

    code, _, err = call("pin", "gpt-a", 1500)
    assert (code, err.count("\n")) == (4, 1)
    assert "no checkpoint of step 1500; there are: 3000, 2000, 1000" in err
    code, _, err = call("pin", "gpt-a", 2000)
    assert (code, err.count("\n")) == (7, 1)
    assert "torn and was not pinned: manifest is missing" in err
    assert call("pin", "gpt-a", 1000, "--remove", "--reason", "x")[0] == 2


def test_pruning_goes_by_the_runs_settings(run, call):
    change(run, keep_last=2)
    freed = bytes_of(run, 1000)

    code, out, _ = call("prune", "gpt-a", "--json")

    assert code == 0
    assert json.loads(out) == {
        "run": "gpt-a",
        "dry_run": False,
        "freed_bytes": freed,
        "deleted": [{"step": 1000, "size_bytes": freed}],
        "kept": [
            {"step": 3000, "size_bytes": bytes_of(run, 3000), "why": ["newest"]},
            {"step": 2000, "size_bytes": bytes_of(run, 2000), "why": ["newest"]},
        ],
    }
    assert find.steps(run) == [3000, 2000]


def test_a_dry_run_tells_what_would_go_and_why_the_rest_stays_and_deletes_nothing(run, call):
    save(run, {4000: 4.0, 5000: 5.0})
    retention.pin(run, 1000, "table 2")
    words = ("--keep-last", 1, "--keep-every", 3000, "--keep-best", 1, "--metric", "loss")

    code, out, _ = call("prune", "gpt-a", *words, "--dry-run")

    assert code == 0
    rows = [line.split("KiB")[1].split(maxsplit=1) for line in out.splitlines()[1:6]]
    assert rows == [
        ["stays", "newest"],
        ["would", "go"],
        ["stays", "every 3000"],
        ["stays", "best loss (1)"],
        ["stays", "pinned (table 2)"],
    ]
    assert out.splitlines()[-1].startswith("1 checkpoint of gpt-a would go, ")
    assert out.splitlines()[-1].endswith(" KiB; nothing was deleted (--dry-run)")
    assert find.steps(run) == [5000, 4000, 3000, 2000, 1000]


def test_a_dry_run_and_the_pruning_after_it_agree(run, call):
    words = ("prune", "gpt-a", "--keep-last", 1, "--keep-best", 1, "--highest", "--json")
    dry = json.loads(call(*words, "--dry-run")[1])
    done = json.loads(call(*words)[1])

    assert dry.pop("dry_run")
    assert not done.pop("dry_run")
    assert dry == done
    assert [row["step"] for row in done["deleted"]] == [2000]
    assert find.steps(run) == [3000, 1000]


def test_the_last_valid_one_stays_and_is_named(run, call):
    for step in (2000, 3000):
        (find.step_path(run, step) / MANIFEST_NAME).unlink()

    code, out, _ = call("prune", "gpt-a", "--keep-last", 1, "--json")

    assert code == 0
    kept = {row["step"]: row["why"] for row in json.loads(out)["kept"]}
    assert kept[1000] == ["last valid", "newest"]
    assert find.steps(run) == [3000, 2000, 1000]


@pytest.mark.parametrize("words", [("--metric", "los", "--keep-best", 1), ()])
def test_a_metric_that_no_checkpoint_has_prunes_nothing(run, call, words):
    change(run, keep_last=2, keep_best=2, best_metric="accuracy")

    code, _, err = call("prune", "gpt-a", *words)

    assert (code, err.count("\n")) == (2, 1)
    assert "has the metric" in err
    assert "there are: loss; --keep-best 0 does without" in err
    assert find.steps(run) == [3000, 2000, 1000]
    assert call("prune", "gpt-a", "--keep-best", 0)[0] == 0
    assert find.steps(run) == [3000, 2000]


def test_a_metric_that_was_never_a_number_keeps_none_for_it(run, call):
    save(run, {4000: math.nan})
    for step in (1000, 2000, 3000):
        retention.remove(run, [step])
    save(run, {5000: None, 6000: None})

    assert call("prune", "gpt-a", "--keep-last", 1, "--keep-best", 3)[0] == 0
    assert find.steps(run) == [6000]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--metric", "loss"), "need --keep-best"),
        (("--highest",), "need --keep-best"),
        (("--keep-best", 1, "--metric", ""), "--keep-best needs a name"),
        (("--keep-last", 0), "--keep-last"),
        (("--keep-every", -1), "--keep-every"),
    ],
)
def test_flags_that_mean_nothing_are_refused(run, call, words, said):
    code, _, err = call("prune", "gpt-a", *words)

    assert (code, err.count("\n")) == (2, 1)
    assert said in err
    assert find.steps(run) == [3000, 2000, 1000]


def test_a_run_without_checkpoints_has_nothing_to_prune(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    Story(tmp_path / "runs" / "gpt-b")

    assert call("prune", "gpt-b", "--keep-best", 1)[:2] == (
        0,
        "deleted 0 checkpoints of gpt-b, 0 B freed\n",
    )


def test_what_a_live_attempt_uses_is_neither_pruned_nor_removed(story, run, call, tmp_path):
    local_job(tmp_path / "local", "local-18", state="RUNNING")
    story.submitted("local-18", "tok-2").started(2, "local-18").restored(2, 2000)

    code, out, _ = call("prune", "gpt-a", "--keep-last", 1, "--json")
    assert code == 0
    assert [row["step"] for row in json.loads(out)["deleted"]] == [1000]
    assert json.loads(out)["kept"][1]["why"] == ["in use"]

    for words in (("prune", "gpt-a", "--keep-last", 1), ("rm", "gpt-a", 2000, "--yes", "--force")):
        code, _, err = call(*words)
        assert (code, err.count("\n")) == (5, 1)
        assert "attempt 2 is running on it: it restored step 2000; wait until" in err
    assert find.steps(run) == [3000, 2000]


def test_what_a_dead_job_left_without_an_end_can_be_deleted(story, run, call, tmp_path):
    local_job(tmp_path / "local", "local-18", state="FAILED")
    story.submitted("local-18", "tok-2").started(2, "local-18").restored(2, 1000)

    planned = json.loads(call("prune", "gpt-a", "--keep-last", 2, "--dry-run", "--json")[1])
    assert [row["step"] for row in planned["deleted"]] == [1000]
    assert call("prune", "gpt-a", "--keep-last", 2)[0] == 0
    assert call("rm", "gpt-a", 2000, "--yes")[0] == 0
    assert find.steps(run) == [3000]


def test_where_the_scheduler_is_silent_the_ledger_counts(story, run, call, monkeypatch):
    story.submitted("local-18", "tok-2").started(2, "local-18")
    spec = load_spec(run.spec)
    spec.cluster = "slurm"
    spec.dump(run.spec)
    monkeypatch.setenv("PATH", "/nowhere")

    code, _, err = call("rm", "gpt-a", 1000, "--yes")

    assert code == 5
    assert "attempt 2 is choosing which checkpoint to load" in err
    assert find.steps(run) == [3000, 2000, 1000]


@pytest.fixture
def evaluated(story):
    """Every checkpoint is due; step 2000 was evaluated, and step 3000 in vain."""
    spec = load_spec(story.run.spec)
    rules = {"keep_last": 1, "keep_best": 1, "best_metric": "eval.loss"}
    spec.settings = replaced(
        spec.settings,
        {"evaluate.script": "eval.py"} | {f"checkpoint.{name}": v for name, v in rules.items()},
    )
    spec.dump(story.run.spec)
    for step in (1000, 2000, 3000):
        story.saved(1, step)
    story.add("evaluated", step=2000, run="gpt-a-eval-2000", metrics={"loss": 2.25})
    story.add("evaluated", step=3000, run="gpt-a-eval-3000", metrics={}, why="exit code 1")
    save(story.run, {4000: None})
    return story


def test_what_is_to_be_evaluated_is_pruned_once_it_was(evaluated, run, call):
    code, out, _ = call("prune", "gpt-a", "--dry-run")

    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    whys = {int(line.split()[0]): line for line in lines if line[:1].isdigit()}
    assert whys[1000].endswith("stays to be evaluated")
    assert whys[2000].endswith("stays best eval.loss (2.25)")
    assert whys[3000].endswith("would go")
    assert call("prune", "gpt-a")[0] == 0
    assert find.steps(run) == [4000, 2000, 1000]
    evaluated.add("evaluated", step=1000, run="gpt-a-eval-1000", metrics={"loss": 2.0})
    assert call("prune", "gpt-a")[0] == 0
    assert find.steps(run) == [4000, 1000]


def test_rm_says_what_force_takes_away(evaluated, run, call):
    retention.pin(run, 2000)

    code, _, err = call("rm", "gpt-a", 1000, "--yes")
    assert (code, err.count("\n")) == (3, 1)
    assert "step 1000 of gpt-a is to be evaluated and was not deleted" in err
    code, _, err = call("rm", "gpt-a", 1000, 2000, 3000, "--yes", "--force")

    assert code == 0
    assert err.splitlines() == [
        "hpctrain: --force also takes what is pinned: step 2000",
        "hpctrain: --force also takes what is to be evaluated: step 1000",
    ]
    assert find.steps(run) == [4000]


def test_rm_says_what_it_frees(run, call):
    freed = bytes_of(run, 1000, 2000)

    code, out, _ = call("rm", "gpt-a", 2000, 1000, 1000, "--yes", "--json")

    assert code == 0
    facts = json.loads(out)
    assert facts["freed_bytes"] == freed
    assert [row["step"] for row in facts["deleted"]] == [1000, 2000]
    assert find.steps(run) == [3000]
    save(run, {4000: None})
    words = size(bytes_of(run, 3000))
    assert call("rm", "gpt-a", 3000, "--yes")[1] == (
        f"deleted 1 checkpoint of gpt-a, {words} freed\n"
    )


def test_without_a_terminal_and_without_yes_nothing_goes(run, call):
    code, _, err = call("rm", "gpt-a", 1000)

    assert code == 2
    assert err == (
        "hpctrain: error: nothing was deleted: there is no terminal to ask on; add --yes\n"
    )
    assert find.steps(run) == [3000, 2000, 1000]


def test_on_a_terminal_the_answer_decides(run, call, terminal):
    terminal("n")
    assert call("rm", "gpt-a", 1000)[0] == 130
    assert find.steps(run) == [3000, 2000, 1000]

    terminal("y")
    assert call("rm", "gpt-a", 1000)[0] == 0
    assert find.steps(run) == [3000, 2000]


def test_what_was_pinned_while_the_question_stood_stays(run, call, terminal, monkeypatch):
    terminal("y")
    monkeypatch.setattr(
        click.termui, "visible_prompt_func", lambda _: retention.pin(run, 1000) and "y"
    )

    assert call("rm", "gpt-a", 1000, 2000)[0] == 3
    assert find.steps(run) == [3000, 2000, 1000]


def test_a_question_does_not_mix_with_json(run, call, terminal):
    terminal("y")

    out = call("rm", "gpt-a", 1000, "--json")[1]

    assert json.loads(out)["run"] == "gpt-a"


def test_what_is_refused_is_not_asked_about(run, call, terminal):
    asked = terminal("y")
    retention.pin(run, 1000, "table 2")

    code, _, err = call("rm", "gpt-a", 1000, 2000)
    assert (code, err.count("\n")) == (3, 1)
    assert "is pinned (table 2)" in err
    assert "`hpctrain checkpoints pin gpt-a 1000 --remove`, or add --force" in err
    code, _, err = call("rm", "gpt-a", 1000, 2000, 3000, 1500)
    assert (code, "no checkpoint of step 1500" in err) == (4, True)
    retention.unpin(run, 1000)
    code, _, err = call("rm", "gpt-a", 1000, 2000, 3000)
    assert (code, "step 3000 is the last valid checkpoint" in err) == (3, True)
    assert find.steps(run) == [3000, 2000, 1000]
    assert call("rm", "gpt-a", 1000, 2000, 3000, "--force", "--yes")[0] == 0
    assert find.steps(run) == []
    assert asked == []


@pytest.mark.parametrize("name", ["pin", "prune", "rm"])
def test_help_shows_examples_that_parse(name, call):
    code, out, _ = call(name, "--help")

    assert code == 0
    command = getattr(checkpoints_keep, f"{name}_command")
    examples = [line for line in command.epilog.splitlines() if "hpctrain " in line]
    assert all(line.strip() in out for line in examples)
    for line in examples:
        words = shlex.split(re.split(r"\s{3,}", line.strip())[0])
        assert words[:3] == ["hpctrain", "checkpoints", name]
        assert command.make_context(name, words[3:]).params["run"] == "lm-3"
    assert examples


@pytest.mark.parametrize(
    "words",
    [("prune", "gpt-a", "--dry-run"), ("rm", "gpt-a", "1000", "--yes"), ("pin", "gpt-a", "1000")],
)
def test_nothing_here_needs_torch(run, words):
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from hpctrain.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, "checkpoints", *words],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
