"""What commands show of a program's own checkpoints; strangers' and damaged seals in one line."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from hpctrain.checkpoint.format.manifest import bytes_digest
from hpctrain.checkpoint.sealed import files as manifest
from hpctrain.checkpoint.sealed import seals
from hpctrain.cli import checkpoints
from hpctrain.cli.runs import _report
from hpctrain.core.settings.schema import CheckpointSettings, Settings
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.errors import FileSystemFault, HpctrainError, NoCheckpoint
from hpctrain.launch.resume import plan_resume
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import CheckpointSealed
from hpctrain.observe.status.reader import StatusReader, _checkpoints
from tests.support import checkpoints as support
from tests.support.fuzzing import cases, chances, odd
from tests.support.ledger_runs import event_of
from tests.support.sealed import choose, seal


@pytest.fixture
def run(tmp_path):
    run = support.new_run(tmp_path)
    run.spec.write_text("{}\n")
    return run


@pytest.fixture
def attempt(run):
    return support.next_attempt(run)


@pytest.fixture
def out(run, attempt, tmp_path):
    """Three saves of new names, the newest changed and the second pruned; then one path twice."""
    out = tmp_path / "out"
    for step in (50, 100, 150):
        folder = out / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "model.bin").write_bytes(b"%d" % step * 100)
        seal(run, attempt, folder, step)
    (out / "checkpoint-100").rename(out / "pruned")
    (out / "checkpoint-150" / "model.bin").write_bytes(b"x")
    return out


def call(run, *args):
    done = CliRunner().invoke(
        checkpoints.command, ["--runs", str(run.root.parent), *map(str, args)]
    )
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def test_status_shows_the_newest_that_was_sealed(run, attempt, tmp_path):
    saved = tmp_path / "ckpt.pt"
    saved.write_bytes(b"weights")
    seal(run, attempt, saved, None)

    newest = StatusReader(run.root.parent).look(run).checkpoint

    assert newest is not None
    assert (newest.step, newest.size_bytes, newest.name) == (None, 7, str(saved))


def test_status_says_why_seals_cannot_be_listed(run, out, monkeypatch):
    def fault(_run):
        raise FileSystemFault("sealed: Stale file handle")

    monkeypatch.setattr(seals, "listing", fault)

    seen = StatusReader(run.root.parent).look(run)

    assert seen.checkpoint is None
    assert [one.reason for one in seen.skipped] == ["sealed: Stale file handle"]


def test_list_shows_what_is_there_and_what_is_gone(run, out):
    code, text = call(run, "list", "gpt-a", "--json")
    rows = json.loads(text)["sealed"]

    assert code == 0
    assert [(row["step"], row["state"]) for row in rows] == [
        (150, "changed"),
        (100, "gone"),
        (50, "ok"),
    ]
    assert rows[2]["path"] == str(out / "checkpoint-50")
    shown = call(run, "list", "gpt-a")[1]
    assert "gone" in shown
    assert "no checkpoints" not in shown


def test_verify_finds_damage_and_takes_what_was_pruned_for_none(run, out):
    code, text = call(run, "verify", "gpt-a", "--deep", "--json")
    assert code == 7
    assert json.loads(text)["damaged"] == 1
    (out / "checkpoint-150" / "model.bin").write_bytes(b"150" * 100)
    assert call(run, "verify", "gpt-a", "--deep")[0] == 0
    (out / "checkpoint-150" / "model.bin").write_bytes(b"151" * 100)
    assert call(run, "verify", "gpt-a")[0] == 0, "sizes alone"
    assert call(run, "verify", "gpt-a", "150", "--deep")[0] == 7


def test_path_is_that_of_the_newest_whole_one_or_of_a_step(run, attempt, out):
    (out / "checkpoint-50" / "model.bin").touch()  # no copy of it could be named instead
    assert call(run, "path", "gpt-a") == (0, f"{out / 'checkpoint-50'}\n")
    with pytest.raises(HpctrainError, match="no complete registered checkpoint of step 150"):
        call(run, "path", "gpt-a", "150")
    one = out / "ckpt.pt"
    for content in (b"1", b"2"):
        one.write_bytes(content)
        stored = seal(run, attempt, one, None, copy=True)
    assert call(run, "path", "gpt-a") == (0, f"{one}\n")
    one.write_bytes(b"torn")
    assert call(run, "path", "gpt-a") == (0, f"{stored.copy}\n")


def test_a_run_that_has_sealed_nothing_says_so(run):
    with pytest.raises(HpctrainError, match="gpt-a has no registered checkpoints"):
        call(run, "path", "gpt-a")


def spec_of(cwd, *patterns):
    return Spec(
        name="gpt-a",
        run_id="0",
        created=0.0,
        cluster="local",
        site="",
        entry=Entry(kind="script", path="train.py", args=[], cwd=str(cwd)),
        settings=Settings(checkpoint=CheckpointSettings(sealed=list(patterns))),
        origins={},
    )


def test_resume_does_not_begin_anew_where_somebody_has_removed_the_seals(run, tmp_path):
    path = tmp_path / "out-50"
    ledger.append(run, CheckpointSealed(path=str(path), step=50, by="program"), attempt=1)

    with pytest.raises(
        NoCheckpoint, match=r"newest of .*out-50, and no record of them is left .*--from 0"
    ):
        plan_resume(run, spec_of(tmp_path), None)

    assert plan_resume(run, spec_of(tmp_path), 0).checkpoint is None
    assert plan_resume(run, spec_of(tmp_path, "out-*"), None).checkpoint is None, "sealed anew"


def test_resume_shows_what_the_next_start_is_given(run, out):
    spec = spec_of(out.parent)
    plan = plan_resume(run, spec, None)

    assert (plan.step, plan.checkpoint) == (50, str(out / "checkpoint-50"))
    assert [(row["step"], row["taken"]) for row in plan.looked_at] == [
        (150, False),
        (100, False),
        (50, True),
    ]
    assert plan_resume(run, spec, 50).step == 50
    assert (out / "checkpoint-150").exists(), "nothing is changed"


def test_status_and_cancel_name_the_newest_of_the_programs_own(run, out):
    newest, skipped = _checkpoints(run, RunHistory())

    assert (newest.name, newest.step) == (str(out / "checkpoint-50"), 50)
    assert [one.step for one in skipped] == [150, 100]
    history = RunHistory.of([event_of(1.0, "sealed", 1, {"path": "/out/ckpt.pt"})])
    said = _report(run, "7", history, asked=False, saves=False)
    where = "its newest registered checkpoint is /out/ckpt.pt"
    assert said == f"cancelled job 7 of {run.name}; {where}"


def proved(raw):
    """SEAL.json with these values, as its writer's own digest proves it."""
    body = json.dumps(raw, indent=1).removesuffix("\n}").encode("ascii", "replace")
    return body + manifest.sealed_by(bytes_digest(body))


def changed(content, chance):
    """A seal that somebody has damaged or made up."""
    way = chance.randrange(4)
    if way == 0:
        return content[: chance.randrange(len(content))]
    if way == 1:
        at = chance.randrange(len(content))
        return content[:at] + bytes([chance.randrange(256)]) + content[at + 1 :]
    raw = json.loads(content)
    del raw["self_digest"]
    where = raw["files"][0] if way == 2 else raw
    where[chance.choice(list(where))] = odd(chance)
    return proved(raw)


@cases(150, 10_000)
def test_no_seal_makes_more_than_a_line(run, attempt, tmp_path, begin, end):
    path = tmp_path / "out-50"
    path.write_bytes(b"weights")
    stored = seal(run, attempt, path, 50)
    file = stored.folder / "SEAL.json"
    whole = file.read_bytes()
    for number, chance in chances(begin, end):
        file.write_bytes(changed(whole, chance))
        for act in (
            lambda: call(run, "list", "gpt-a"),
            lambda: call(run, "list", "gpt-a", "--json"),
            lambda: call(run, "verify", "gpt-a", "--deep"),
            lambda: choose(run, attempt),
        ):
            assert "\n" not in said_by(act), number
        left = list(tmp_path.glob("out-50*"))
        assert [one.read_bytes() for one in left] == [b"weights"], "renamed at most"
        left[0].rename(path)


def said_by(act):
    """The line of an error of ours; any other is raised."""
    try:
        act()
    except HpctrainError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("path", "/tmp/../etc/passwd"),  # noqa: S108
        ("path", "relative"),
        ("path", "/tmp/a\0b"),  # noqa: S108
        ("files", []),
        ("files", [{"name": "../out-50", "size": 7, "digest": "xxh3_64:0000000000000000"}]),
        ("files", [{"name": "/etc/passwd", "size": 7, "digest": "xxh3_64:0000000000000000"}]),
        ("files", [{"name": "out-50", "size": -1, "digest": "xxh3_64:0000000000000000"}]),
        ("files", [{"name": "out-50", "size": 7, "digest": "md5:00"}]),
        ("step", -1),
        ("created", float("nan")),
        ("is_copy", "yes"),
    ],
)
def test_a_seal_that_proves_itself_is_looked_at_all_the_same(run, attempt, tmp_path, field, value):
    path = tmp_path / "out-50"
    path.write_bytes(b"weights")
    stored = seal(run, attempt, path, 50)
    raw = json.loads((stored.folder / "SEAL.json").read_bytes())
    del raw["self_digest"]
    (stored.folder / "SEAL.json").write_bytes(proved(raw | {field: value}))

    code, text = call(run, "list", "gpt-a")

    assert code == 0
    assert "torn: SEAL.json is not as hpctrain writes it" in text
