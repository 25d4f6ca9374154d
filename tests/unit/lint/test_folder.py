"""Imports are followed inside the checked folder, and configurations known by who names them."""

from __future__ import annotations

import json

import pytest

from hpctrain.advise.lint.check import check_text, files_to_check
from hpctrain.core.base.files import read_source

ALONE = (
    "from {module} import {name}\nimport torch.distributed as dist\n"
    "if dist.get_rank() == 0:\n    {name}()\n"
)
MEETS = "import torch.distributed as dist\ndef save():\n    dist.barrier()\n"
MAY_MEET = MEETS.replace("save():", "save(meet=0):").replace("dist.b", "meet and dist.b")
NEOX = {
    "num-layers": 12,
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 9},
    "fp16": {"enabled": True},
}
OWN = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}, "colour": "red"}


def found(folder, *files):
    """Codes of errors, warnings and HT113 in each file, by its name."""
    codes = {}
    for path, together in files_to_check([str(one) for one in files or [folder]], pytest.fail):
        findings = check_text(read_source(path), str(path), folder=together)
        codes[path.name] = {
            one.rule.code
            for one in findings
            if one.rule.level != "info" or one.rule.code == "HT113"
        }
    return codes


def write(folder, **files):
    for name, text in files.items():
        path = folder.joinpath(*name.split("__", 1)).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_collective_of_an_imported_function_counts_where_it_is_called(tmp_path):
    write(tmp_path, train=ALONE.format(module="utils", name="save"), utils=MEETS)

    assert found(tmp_path)["train.py"] == {"HT101"}


def test_a_single_file_is_followed_into_files_beside_it(tmp_path):
    write(tmp_path, train=ALONE.format(module="tools.utils", name="save"), tools__utils=MEETS)

    assert found(tmp_path, tmp_path / "train.py") == {"train.py": {"HT101"}}


def test_an_imported_function_that_may_meet_is_a_hint(tmp_path):
    write(tmp_path, train=ALONE.format(module="utils", name="save"), utils=MAY_MEET)

    assert found(tmp_path)["train.py"] == {"HT113"}


def test_a_module_is_found_by_relative_import_through_a_package(tmp_path):
    write(
        tmp_path,
        pkg____init__="from .inner import save\n",
        pkg__inner="from . import comm\ndef save():\n    comm.save()\n",
        pkg__comm=MEETS,
        pkg__train="from . import comm\nimport torch.distributed as dist\n"
        "if dist.get_rank() == 0:\n    comm.save()\n",
        main=ALONE.format(module="pkg", name="save"),
    )

    assert found(tmp_path)["train.py"] == {"HT101"}
    assert found(tmp_path)["main.py"] == {"HT101"}


def test_modules_that_import_each_other_are_read(tmp_path):
    write(
        tmp_path,
        a="from b import two\ndef one():\n    two()\n",
        b="from a import one\nimport torch.distributed as dist\n"
        "def two():\n    one()\n    dist.barrier()\n",
        train=ALONE.format(module="a", name="one"),
    )

    assert found(tmp_path)["train.py"] == {"HT101"}


def test_mpi_in_another_module_counts(tmp_path):
    write(
        tmp_path,
        utils="from mpi4py import MPI\ndef load(p):\n    return MPI.COMM_WORLD.bcast(p)\n",
        train="import utils\nimport torch.distributed as dist\n"
        "if dist.get_rank() == 0:\n    model.load_state_dict(utils.load(path))\n",
    )

    assert found(tmp_path)["train.py"] == {"HT101"}


def test_functions_outside_the_folder_are_not_followed(tmp_path):
    write(tmp_path, utils=MEETS, inner__train=ALONE.format(module="utils", name="save"))

    assert found(tmp_path / "inner") == {"train.py": set()}


@pytest.mark.parametrize("config", [NEOX, OWN])
def test_a_configuration_with_other_keys_is_passed_over(tmp_path, config):
    write(tmp_path, train="import deepspeed\n")
    (tmp_path / "c.json").write_text(json.dumps(config))

    assert found(tmp_path) == {"train.py": set()}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.sh", "deepspeed train.py --epochs 3 \\\n  --deepspeed_config conf/c.json\n"),
        ("run.py", "import deepspeed\nengine = deepspeed.initialize(config='conf/c.json')\n"),
        ("run.py", "import argparse\np.add_argument('--deepspeed', default='c.json')\n"),
    ],
)
def test_a_configuration_that_a_program_names_is_checked(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "c.json").write_text(json.dumps(OWN))

    assert found(tmp_path)["c.json"] == {"HT702"}


def test_set_epoch_may_be_called_in_an_imported_module(tmp_path):
    text = (
        "from engine import train\nfrom torch.utils.data import DistributedSampler\n"
        "s = DistributedSampler(data)\nfor epoch in range(3):\n    train(epoch, s)\n"
    )
    write(tmp_path, train=text, engine="def train(e, s):\n    s.set_epoch(e)\n")
    assert found(tmp_path)["train.py"] == set()

    write(tmp_path, engine="def train(e, s):\n    pass\n")
    assert found(tmp_path)["train.py"] == {"HT301"}


def test_a_program_whose_helpers_can_load_is_not_said_to_load_nothing(tmp_path):
    loop = "for epoch in range(9):\n    train()\n    save_checkpoint(model)\n"
    (tmp_path / "one.py").write_text("from files import save_checkpoint\n" + loop)
    (tmp_path / "two.py").write_text("from more import save_checkpoint\n" + loop)
    (tmp_path / "files.py").write_text("def save_checkpoint(m): ...\ndef load_checkpoint(m): ...\n")
    (tmp_path / "more.py").write_text("def save_checkpoint(m): ...\ndef load_names(m): ...\n")
    (tmp_path / "three.py").write_text("from tools import save_checkpoint\n" + loop)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").write_text("from .disk import *\n")
    (tmp_path / "tools" / "disk.py").write_text((tmp_path / "files.py").read_text())

    codes = found(tmp_path)

    assert codes["one.py"] == codes["three.py"] == set()
    assert codes["two.py"] == {"HT608"}
