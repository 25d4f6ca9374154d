"""Batch scripts of odd folders, names and settings, really run by bash: nothing in them is run."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.cluster.scheduler.slurm.script import render_script
from hpctrain.core.settings.fields import keys_of
from hpctrain.core.settings.schema import ContainerSettings
from hpctrain.core.settings.spec import load_spec
from hpctrain.errors import HpctrainError
from hpctrain.launch.prepare import prepare
from hpctrain.ledger.run.layout import RunDir
from tests.support.fuzzing import Faults, cases, chances, odd_text
from tests.support.submit_requests import request_of

SETTINGS = (
    "partition", "account", "qos", "constraint", "reservation", "exclude", "mem", "network", "time",
    "extra", "srun_args",
)  # fmt: skip
SRUN = '#!/bin/bash\nprintf "%s\\0" "$HPCTRAIN_RUN_DIR" "$HPCTRAIN_TOKEN" "$@" > "$SEEN"\n'
KEYS = keys_of(ContainerSettings)
MOST_NAME_BYTES = 200


@pytest.fixture
def bench(tmp_path):
    """Programs that stand in for srun and python, and a script to train."""
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("python", "#!/bin/bash\n"), ("sbatch", "#!/bin/bash\n")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "train.py").touch()
    return tmp_path


def _folder(chance):
    """A name that a folder of runs can have."""
    text = odd_text(chance).replace("\0", "").replace("/", "").encode()[:MOST_NAME_BYTES]
    name = text.decode(errors="ignore")
    return name if name not in {"", ".", ".."} else "plain"


def _prepared(bench, chance):
    """A run that could be submitted, with odd things wherever something can stand."""
    sets = [f"slurm.{chance.choice(SETTINGS)}={odd_text(chance)}" for _ in range(2)]
    sets.append(f"slurm.extra=--comment={odd_text(chance)}")
    args = [odd_text(chance).replace("\0", "") for _ in range(3)]
    request = request_of(
        cwd=bench,
        environ={"PATH": str(bench / "bin"), "HPCTRAIN_SITE_PATH": ""},
        runs=Path(_folder(chance)),
        command=["train.py", *args],
        sets=sets if chance.random() < 0.7 else (),
        env=[f"A={odd_text(chance)}"],
        cluster="slurm",
        snapshot=False,
    )
    try:
        prepared = prepare(request)
        spec = prepared.spec
        spec.python = str(bench / "bin" / "python")
        if chance.random() < 0.5:
            spec.settings = replace(spec.settings, container=_container(chance))
        root = prepared.runs / spec.name
        return spec, root, args, render_script(spec, RunDir(root), f"{spec.name}-1a")
    except HpctrainError:  # refused, which most are
        return None


def _container(chance):
    """Settings of which submit has looked at none but what a script can hold."""
    odd = [odd_text(chance).replace("\0", "") for _ in range(4)]
    return ContainerSettings(
        image=f"a{odd[0]}",
        runtime=chance.choice([name for name in KEYS["runtime"].choices if name]),
        env=[f"B={odd[1]}", "NOT_THERE"],
        python=f"p{odd[2]}",
        options=[f"--x={odd[3]}"],
    )


def _ran(bench, root, text):
    """What srun was given by the script."""
    root.mkdir(parents=True, exist_ok=True)
    script = bench / "script.sh"
    script.write_text(text)
    env = {"PATH": f"{bench}/bin:{os.environ['PATH']}", "SEEN": str(bench / "seen")}
    env |= {"SLURM_NNODES": "1", "SLURM_JOB_ID": "7"}
    (bench / "seen").unlink(missing_ok=True)
    done = subprocess.run(
        ["bash", str(script)], cwd=bench, env=env, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    return (bench / "seen").read_bytes().split(b"\0")[:-1]


@cases(40, 2_500)
def test_nothing_in_a_script_is_run(bench, begin, end):
    faults, ran = Faults(), 0

    def one(chance):
        nonlocal ran
        found = _prepared(bench, chance)
        if found is None:
            return
        spec, root, args, text = found
        seen = _ran(bench, root, text)
        ran += 1
        assert seen[0] == os.fsencode(root)
        assert seen[1] == f"{spec.name}-1a".encode()
        box = spec.settings.container
        assert seen[-1] == os.fsencode(box.python if box.image else spec.python)
        first = len(seen) - 1 - seen[::-1].index(os.fsencode(root))
        inside = [*box.options, box.env[0], f"A={spec.env['A']}"] if box.image else []
        assert [text for text in inside if text.encode() not in seen] == []
        own_output = f"{root}/jobs/{spec.name}-1a" if "%" in f"{root}{spec.name}" else ""
        assert seen[first + 1] == os.fsencode(own_output)
        assert [arg for arg in spec.settings.slurm.srun_args if arg.encode() not in seen] == []
        spec.dump(root / "spec.json")
        assert load_spec(root / "spec.json").entry.args == args
        assert not list(bench.rglob("pwned"))

    for number, chance in chances(begin, end):
        faults.of(f"{number}", lambda chance=chance: one(chance))
    assert faults.found == []
    assert ran > (number - begin) // 5
