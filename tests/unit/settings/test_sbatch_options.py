"""However an sbatch option is spelt, it is the same option: for locks, refusals and our own."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from hpctrain.errors import UsageError
from hpctrain.settings.check import check
from hpctrain.settings.sbatch_options import LONG, name_of, names_of
from hpctrain.settings.schema import Settings, SlurmSettings

MANUAL = Path("/usr/share/man/man1/sbatch.1.gz")


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("--partition=debug", ["--partition"]),
        ("--partition debug", ["--partition"]),
        ("--partit=debug", ["--partition"]),
        ("-pdebug", ["--partition"]),
        ("-p debug", ["--partition"]),
        ("-p", ["--partition"]),
        ("-Hpdebug", ["--hold", "--partition"]),
        ("-H -pdebug", ["--hold", "--partition"]),
        ("--hold --partition=debug", ["--hold", "--partition"]),
        ("'--partition=debug'", ["--partition"]),
        ("--exclusi", ["--exclusive"]),
        ("--nodel=n1", ["--nodelist"]),
        ("--licens=none", ["--licenses"]),
        ("--outpu=", ["--output"]),
        ("--no-requ", ["--no-requeue"]),
        ("-N8", ["--nodes"]),
        ("-t10-0", ["--time"]),
        ("--time", ["--time"]),
        ("--tasks-per-node=2", ["--ntasks-per-node"]),
        ("--mem 4G", ["--mem"]),
        ("-G4", ["--gpus"]),
        ("--container-image=x", ["--container-image"]),  # a plugin's
        ("--container=x", ["--container"]),
        ("--cpu_bind=x", ["--cpu_bind"]),
        ("-l", ["-l"]),
        ("--", []),
        ("-", []),
    ],
)
def test_an_option_is_known_by_its_long_name(option, names):
    assert names_of(option) == names
    assert name_of(option) == (names[0] if names else option)


@pytest.mark.parametrize("option", ["--no", "--mem-per=4", "--g=1", "--node=3", "--ntasks-per=1"])
def test_what_may_be_one_or_another_is_refused(option):
    with pytest.raises(UsageError, match="is short for several of sbatch's options"):
        names_of(option)


@pytest.mark.parametrize(
    "option",
    [
        *("-N8", "-t10-0", "-Jx", "-ox", "--outpu=x", "--no-requ", "-pdebug", "--partit=x", "-Hpx"),
        *("--hold -p x", "--arra=1-3", "-QAother", "--tasks=4", "--tasks-per=2"),
    ],
)
def test_what_hpctrain_sets_itself_is_not_set_beside_it(option):
    with pytest.raises(UsageError, match="which hpctrain sets; use"):
        check(Settings(slurm=SlurmSettings(extra=[option])), {})


@pytest.mark.parametrize("option", ["--switches=1", "-L a:2", "--bb=x", "--container-image=p"])
def test_other_options_go_through(option):
    check(Settings(slurm=SlurmSettings(extra=[option])), {})


def test_every_option_of_the_manual_is_known():
    """Of the version that is installed here; where there is none, of none."""
    text = gzip.decompress(MANUAL.read_bytes()).decode() if MANUAL.exists() else ""
    heads = re.findall(r"^\.TP\n\\fB(?:\\-\w\\fR, \\fB)?\\-\\-([a-z\\0-9-]+)", text, re.MULTILINE)

    assert not MANUAL.exists() or len(heads) > 50
    assert {head.replace("\\", "").removesuffix("f") for head in heads} <= LONG
