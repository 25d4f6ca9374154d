from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from hpctrain.checkpoint.format.manifest import MANIFEST_NAME
from hpctrain.checkpoint.store import find, verify
from hpctrain.cli import checkpoints
from hpctrain.cli.main import main
from hpctrain.core.base import text
from hpctrain.core.testing import faults
from hpctrain.ledger.run import events as ledger
from tests.support import checkpoints as support


@pytest.fixture
def run(tmp_path):
    run = support.new_run(tmp_path)
    run.spec.write_text("{}\n")
    return run


def call(run, *args):
    """Exit code and stdout of `hpctrain checkpoints`."""
    done = CliRunner().invoke(
        checkpoints.command, ["--runs", str(run.root.parent), *map(str, args)]
    )
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def test_list_tells_each_state_with_its_reason(run, attempt):
    support.save(run, attempt, 1000)
    (torn,) = support.save(run, attempt, 2000)
    (torn / "chunks.table").unlink()
    support.save(run, attempt, 3000)
    verify.set_aside(run, 3000, "damaged bytes", attempt)
    support.stage(run, attempt, 4000)

    code, out = call(run, "list", "gpt-a")

    assert code == 0
    rows = [line.split("  ") for line in out.splitlines()]
    assert [(row[0].strip(), row[-1].strip()) for row in rows] == [
        ("STEP", "STATE"),
        ("4000", "staged: by attempt 1, not committed"),
        ("3000", "set aside: damaged bytes"),
        ("2000", "torn: shard chunks.table is missing"),
        ("1000", "ok"),
    ]
    assert "9.1 KiB" in out.splitlines()[4]
    assert "fsdp2" in out.splitlines()[4]


def test_list_as_json_has_the_same_facts(run, attempt):
    (path,) = support.save(run, attempt, 1000)

    code, out = call(run, "list", "gpt-a", "--json")

    assert code == 0
    assert json.loads(out) == {
        "run": "gpt-a",
        "sealed": [],
        "checkpoints": [
            {
                "step": 1000,
                "name": "step-0000001000",
                "created": 1_700_000_000.5,
                "size_bytes": sum(file.stat().st_size for file in path.iterdir()),
                "world_size": 2,
                "engine": "fsdp2",
                "state": "ok",
                "why": None,
                "pinned": None,
                "evaluation": {},
            }
        ],
    }


@pytest.mark.parametrize("name", ["list", "verify"])
def test_a_run_without_checkpoints_says_so(run, name):
    assert call(run, name, "gpt-a") == (0, "gpt-a has no checkpoints\n")


def test_verify_of_whole_checkpoints_ends_well_and_says_what_it_read(run, attempt):
    support.save(run, attempt, 1000, 2000)
    support.stage(run, attempt, 3000)

    quick = call(run, "verify", "gpt-a")
    deep = call(run, "verify", "gpt-a", "--deep", "--threads", 2)

    each = "step-0000002000: ok\nstep-0000001000: ok\n2 verified "
    assert quick == (0, f"{each}(sizes and tables only, --deep reads every byte), 0 damaged\n")
    assert deep == (0, f"{each}(every byte was read), 0 damaged\n")
    noted = [event.fact.step for event in ledger.read(run) if event.kind == "verified"]
    assert noted == [2000, 1000]


def test_verify_names_file_tensor_and_place_and_exits_7(run, attempt):
    paths = support.save(run, attempt, 1000, 2000, 3000)
    shard = paths[0] / support.SHARD_1
    support.flip_bit(shard, 8 * (shard.stat().st_size - support.PROOF_1 - 1))
    (paths[1] / MANIFEST_NAME).unlink()

    code, out = call(run, "verify", "gpt-a", "--deep")

    assert code == 7
    lines = out.splitlines()
    assert lines[0] == "step-0000003000: ok"
    assert lines[1] == "step-0000002000: manifest is missing"
    assert lines[2].startswith(
        "step-0000001000: shard-00001.safetensors: model.w, block 4 of box [56:96, 0:16]: digest "
    )
    assert lines[3] == "3 verified (every byte was read), 2 damaged"
    assert find.steps(run) == [3000, 2000, 1000]


def test_without_deep_no_byte_of_a_shard_is_read_but_damage_to_tables_is_found(run, attempt):
    paths = support.save(run, attempt, 1000, 2000)
    support.flip_bit(paths[0] / support.SHARD_1, 8 * 2000)
    support.flip_bit(paths[1] / "chunks.table", 8 * 600)

    code, out = call(run, "verify", "gpt-a")

    assert code == 7
    lines = out.splitlines()
    assert lines[0].startswith("step-0000002000: chunks.table: digest xxh3_64:")
    assert lines[1] == "step-0000001000: ok"


@pytest.mark.parametrize("deep", [[], ["--deep"]])
def test_verify_as_json_lists_problems_and_exits_7(run, attempt, deep):
    (path,) = support.save(run, attempt, 1000)
    os.truncate(path / "chunks.table", 1)

    code, out = call(run, "verify", "gpt-a", "--json", *deep)

    assert code == 7
    assert json.loads(out) == {
        "run": "gpt-a",
        "sealed": [],
        "deep": bool(deep),
        "damaged": 1,
        "unreadable": 0,
        "checkpoints": [
            {
                "step": 1000,
                "name": "step-0000001000",
                "problems": ["shard chunks.table is 1 bytes, manifest says 814"],
                "unreadable": [],
            }
        ],
    }


@pytest.mark.parametrize(
    ("point", "state"),
    [("read.manifest", "unreadable"), ("read.table", "ok"), ("read.block", "ok")],
)
def test_what_cannot_be_read_is_told_and_is_not_called_damaged(run, attempt, point, state):
    support.save(run, attempt, 1000)

    with faults.armed(f"fail:{point},error=ESTALE"):
        listed = call(run, "list", "gpt-a", "--json")
        verified = call(run, "verify", "gpt-a", "--deep", "--json")
        told = call(run, "verify", "gpt-a", "--deep")

    (row,) = json.loads(listed[1])["checkpoints"]
    assert (listed[0], row["state"]) == (0, state)
    facts = json.loads(verified[1])
    assert (verified[0], facts["damaged"], facts["unreadable"]) == (7, 0, 1)
    assert "Stale file handle" in facts["checkpoints"][0]["unreadable"][0]
    assert told[1].endswith("0 damaged, 1 could not be read\n")
    assert not [e for e in ledger.read(run) if e.kind == "verified"]


def test_a_newer_format_is_shown_as_what_it_is(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    (path / "MANIFEST.json").write_text('{"format": 5}\n')

    code, out = call(run, "list", "gpt-a")

    assert code == 0
    assert (
        "other format: step-0000001000: manifest has format 5, this hpctrain reads up to 4" in out
    )


def test_a_checkpoint_under_another_steps_name_fails_verification(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    path.rename(find.step_path(run, 2000))

    code, out = call(run, "verify", "gpt-a")

    assert code == 7
    assert "manifest is of step 1000, not 2000" in out


@pytest.mark.parametrize("name", sorted(checkpoints.command.commands))
def test_the_folder_of_runs_may_stand_behind_each_command_too(name):
    (option,) = [one for one in checkpoints.command.commands[name].params if one.name == "runs"]

    assert option.opts == ["--runs"]


def test_the_folder_of_runs_behind_the_command_is_the_one_that_counts(run, attempt, tmp_path):
    support.save(run, attempt, 1000)
    where = ["--runs", str(tmp_path / "other"), "list", "gpt-a", "--runs", str(run.root.parent)]

    done = CliRunner().invoke(checkpoints.command, where)

    assert done.exit_code == 0
    assert "1000" in done.stdout


def test_one_step_can_be_verified_alone(run, attempt):
    older, _ = support.save(run, attempt, 1000, 2000)
    (older / MANIFEST_NAME).unlink()

    assert call(run, "verify", "gpt-a", 2000)[0] == 0
    assert call(run, "verify", "gpt-a", 1000)[0] == 7


def test_a_step_that_is_not_there_is_an_error_with_those_that_are(run, attempt, capsys):
    support.save(run, attempt, 1000)

    code = main(["checkpoints", "--runs", str(run.root.parent), "verify", "gpt-a", "1500"])

    assert code == 4
    assert capsys.readouterr().err == (
        "hpctrain: error: gpt-a has no checkpoint of step 1500; there are: 1000\n"
    )


def test_the_exit_code_of_damage_reaches_the_shell(run, attempt):
    (path,) = support.save(run, attempt, 1000)
    (path / MANIFEST_NAME).unlink()

    assert main(["checkpoints", "--runs", str(run.root.parent), "verify", "gpt-a"]) == 7


@pytest.mark.parametrize(
    ("size", "said"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 1024**3 // 2, "1.5 GiB")],
)
def test_sizes_are_told_in_the_largest_unit_that_leaves_one(size, said):
    assert text.size(size) == said


def test_nothing_here_needs_torch(run, attempt):
    support.save(run, attempt, 1000)
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from hpctrain.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    args = ["checkpoints", "--runs", str(run.root.parent), "verify", "gpt-a", "--deep"]

    done = subprocess.run(
        [sys.executable, "-c", program, *args], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
