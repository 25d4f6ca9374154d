"""However an sbatch option is spelt, it is the same option: for locks, refusals and our own."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from hpctrain.core.settings.check import check
from hpctrain.core.settings.external import (
    LONG,
    OURS,
    PASSED,
    REFUSED,
    SRUN_REFUSED,
    name_of,
    names_of,
)
from hpctrain.core.settings.schema import Settings, SlurmSettings
from hpctrain.errors import UsageError

ANSWERS = Path(__file__).parents[2] / "data" / "slurm-answers"
MANUAL = Path("/usr/share/man/man1/sbatch.1.gz")


def options_of(told):
    """The long names in what `sbatch --help` prints."""
    return set(re.findall(r"^ {1,6}(?:-\w, )?--([a-z][a-z0-9-]+)", told, re.MULTILINE))


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


@pytest.mark.parametrize("version", ["22.05", "24.11", "26.05"])
def test_every_option_of_sbatch_is_set_by_us_or_refused_or_passed_through(version):
    """`tests/slurm/test_adapter.py` asks the sbatch of each version that is here."""
    told = (ANSWERS / version / "sbatch_help.txt").read_text()

    assert len(options_of(told)) > 80
    assert options_of(told) <= {*OURS, *REFUSED, *PASSED}


def test_no_option_is_of_two_classes():
    assert not OURS.keys() & REFUSED.keys()
    assert not PASSED & {*OURS, *REFUSED}


@pytest.mark.parametrize(
    ("option", "way_out"),
    [
        ("--export=NONE", "use --env or [env] for variables"),
        ("--export-f=x", "use --env or [env] for variables"),
        ("--wait", "use hpctrain status RUN --watch"),
        ("-W", "use hpctrain status RUN --watch"),
        ("-HW", "use hpctrain status RUN --watch"),
        ("--test-only", "use hpctrain check or hpctrain submit --dry-run"),
        ("--parsable", "which hpctrain sets; use --json"),
        ("--chdir=/x", "go there"),
        ("-D/x", "go there"),
        ("--uid=me", "log in as that user"),
        ("-h", "type sbatch --help"),
        ("-Mother", "submit on a login node of that cluster"),
        ("--get-user-env", "put more into slurm.setup"),
    ],
)
def test_what_would_break_a_run_or_its_submission_is_refused_with_the_way_out(option, way_out):
    with pytest.raises(UsageError) as caught:
        check(Settings(slurm=SlurmSettings(extra=[option])), {})
    assert str(caught.value).startswith(f"default: slurm.extra has {option}")
    assert way_out in str(caught.value)


@pytest.mark.parametrize("name", sorted(SRUN_REFUSED))
def test_what_would_break_the_start_of_agents_is_refused_of_srun_too(name):
    with pytest.raises(UsageError, match=f"slurm.srun_args has --{name}: "):
        check(Settings(slurm=SlurmSettings(srun_args=[f"--{name}"])), {})


@pytest.mark.parametrize("name", sorted(PASSED))
def test_all_others_go_through(name):
    check(Settings(slurm=SlurmSettings(extra=[f"--{name}=1"])), {})
