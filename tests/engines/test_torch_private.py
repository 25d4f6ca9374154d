"""A torch that lacks one of its private names ends one engine with one line, and not the others."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hpctrain.train.engines
from hpctrain.core import torch_private
from hpctrain.core.settings.schema import EngineSettings
from hpctrain.core.world import World
from hpctrain.errors import UsageError
from hpctrain.train.engines import parallelize as spread

ENGINES = Path(hpctrain.train.engines.__file__).parent
PRIVATE = re.compile(r"torch\.(?:\w+\.)*_[a-z]")


def private_imports(path):
    """Imports of modules or names of torch that begin with an underscore."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for alias in node.names:
                if PRIVATE.match(f"{node.module}.{alias.name}"):
                    yield f"{path.name}: {node.module}.{alias.name}"
        if isinstance(node, ast.Import):
            yield from (f"{path.name}: {a.name}" for a in node.names if PRIVATE.match(a.name))


def test_no_other_module_of_the_engines_imports_what_torch_does_not_promise():
    found = [line for path in sorted(ENGINES.glob("*.py")) for line in private_imports(path)]

    assert found == []


LACKING = """
import importlib
for module, names in {names}.items():
    held = importlib.import_module(module)
    for name in names:
        vars(held).pop(name, None)  # older releases have some of them not
import hpctrain.train.engines.parallelize, hpctrain.train.engines.pipeline
import hpctrain.train.engines.exact
from hpctrain.core import torch_private
import torch
from hpctrain.train.engines.parallelize import parallelize
from hpctrain.core.settings.schema import EngineSettings
from hpctrain.core.world import World
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
parallelize(model, optimizer, EngineSettings(), World(0, 0, 1, torch.device("cpu")))
nothing = [None] * 4
for act in (
    lambda: torch_private.cuts_over(None),
    lambda: torch_private.all_to_all(*nothing),
):
    try:
        act()
    except Exception as error:
        print(type(error).__name__, error)
"""
OLDER = {
    "torch.distributed.fsdp._fully_shard._fsdp_common": ["ShardPlacementResult"],
    "torch.distributed._functional_collectives": ["all_to_all_single"],
}


def test_engines_are_imported_and_train_where_names_that_they_do_not_use_are_missing():
    done = subprocess.run(
        [sys.executable, "-c", LACKING.format(names=OLDER)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("UsageError engine.ep needs torch.distributed.fsdp._fully_shard.")
    assert f".ShardPlacementResult, which torch {torch.__version__} has not" in first
    assert second.startswith("UsageError engine.ep needs torch.distributed._functional_collectives")


def test_the_axis_of_a_mesh_that_cannot_be_cut_is_named():
    with pytest.raises(UsageError, match=r"engine\.ep needs DeviceMesh\._unflatten, which torch"):
        torch_private.split_axis(object(), "dp_shard", (1, 2), ("ep_shard", "ep"))


def test_a_pipelines_step_is_told_only_what_its_release_knows():
    def newer(*_args, target=None, return_outputs=True): ...
    def older(*_args, target=None, **kwargs): ...

    assert torch_private.without_outputs(SimpleNamespace(step=newer)) == {"return_outputs": False}
    assert torch_private.without_outputs(SimpleNamespace(step=older)) == {}


def test_ranks_refuse_a_torch_that_a_module_has_brought(monkeypatch):
    monkeypatch.setattr(spread.torch, "__version__", "2.7.1")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    with pytest.raises(UsageError, match=r"^torch 2\.7\.1 is too old"):
        spread.parallelize(model, optimizer, EngineSettings(), World(0, 0, 1, torch.device("cpu")))
