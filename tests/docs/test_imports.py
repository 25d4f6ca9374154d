"""The login node's half can be imported where torch, and mostly where numpy, cannot."""

from __future__ import annotations

import ast
import subprocess
import sys

from tests.support.rooms import PACKAGE, dotted, find, short

LOGIN_ROOMS = (
    "base",
    "check",
    "checkpoint.format",
    "checkpoint.store",
    "cli",
    "doctor",
    "drill",
    "history",
    "logs",
    "nccl",
    "plan",
    "preflight",
    "profile",
    "report",
    "run",
    "scheduler",
    "scheduler.slurm",
    "settings",
    "site",
    "status",
    "strategy",
    "launch",
)
LOGIN_MODULES = ("errors", "terminal", "entry.slurm_task", "entry.slurm_batch")
TENSORS = {
    "preflight.collective",
    "strategy.measure_child",
    "strategy.stand_in_device",
}
BYTES = {
    *(
        f"checkpoint.format.{name}"
        for name in ("geometry", "index", "layout", "reader", "shard", "table")
    ),
    "checkpoint.store.verify",
    "checkpoint.tensors.writer",
    "checkpoint.tensors.writer_process",
}
"""They handle what lies in the files and import numpy; `submit` and `status` need none."""
CODE = """
import importlib, sys
REFUSED = set(sys.argv[1].split(","))

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ImportError(f"{name} imported")

sys.meta_path.insert(0, Refuse())
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}")
"""


def test_rooms_of_the_login_node_import_without_torch_and_numpy():
    without = TENSORS | BYTES
    names = {path.with_suffix("").as_posix().replace("/", "."): name for path, name in _modules()}
    assert without <= names.keys() | BYTES
    assert _import([name for shown, name in names.items() if shown not in without]) == ""


def test_what_handles_a_checkpoints_bytes_imports_without_torch():
    assert _import([f"hpctrain.{name}" for name in BYTES], "torch,tensorboard") == ""


def _modules():
    paths = [find(name) for name in LOGIN_MODULES]
    for room in LOGIN_ROOMS:
        inside = sorted(find(room).glob("*.py"))
        assert inside, room
        paths += [path for path in inside if path.stem != "__init__"]
    return [(short(path), dotted(path)) for path in paths]


def test_the_refusal_refuses():
    assert "torch imported" in _import(["hpctrain.checkpoint.tensors.save"], "torch")


def _import(modules, refused="torch,numpy,tensorboard"):
    command = [sys.executable, "-c", CODE, refused, *modules]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_what_runs_as_a_program_begins_below_its_last_function():
    """`python -m` would otherwise call functions that are not defined yet."""
    early = []
    for path in sorted(PACKAGE.rglob("*.py")):
        body = ast.parse(path.read_text()).body
        early += [
            str(path)
            for statement in body[:-1]
            if isinstance(statement, ast.If) and "__main__" in ast.unparse(statement.test)
        ]
    assert early == []
