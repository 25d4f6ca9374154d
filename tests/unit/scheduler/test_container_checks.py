"""A container held against the login node: image, machines, runtime; before there is a job."""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.cluster.scheduler.base import Accounting
from hpctrain.cluster.scheduler.slurm import facts
from hpctrain.cluster.scheduler.slurm.client import SlurmCluster
from hpctrain.cluster.scheduler.slurm.container import runtime_of
from hpctrain.cluster.scheduler.slurm.container_checks import (
    COMMANDS,
    SRUN_OPTIONS,
    check_container,
    check_mount_points,
    image_path,
)
from hpctrain.cluster.site.schema import About, Container, Site
from hpctrain.core.settings.fields import keys_of
from hpctrain.core.settings.schema import ContainerSettings, Settings, SlurmSettings
from hpctrain.errors import ChecksFailed, NotFound
from tests.support import users
from tests.unit.scheduler.test_container import RUN, make_spec
from tests.unit.scheduler.test_image_file import sif

ANSWERS = Path(__file__).parents[2] / "data" / "slurm-answers"
ORIGINS = {"container.image": "flag --set", "container.runtime": "hpctrain.toml:3"}


def make(image, runtime="apptainer", setup=(), partition=""):
    slurm = SlurmSettings(setup=list(setup), partition=partition)
    return Settings(slurm=slurm, container=ContainerSettings(image=str(image), runtime=runtime))


def site_with(runtime):
    return replace(Site(about=About(name="juniper")), container=Container(runtime=runtime))


def asked(*machines, srun=None):
    return Accounting(
        lambda: None,
        lambda: None,
        machines=lambda _: frozenset(machines) or None,
        srun_help=lambda: srun,
    )


def look(settings, folder, site=None, accounting=None):
    more = {"folder": folder, "environ": os.environ, "accounting": accounting}
    return check_container(settings, ORIGINS, site, **more)


@pytest.fixture
def bin_folder(tmp_path, monkeypatch):
    """PATH has nothing but what a test puts there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.fixture
def runtimes(bin_folder):
    """All runtimes are here."""
    for name in COMMANDS.values():
        (bin_folder / name).write_text("#!/bin/sh\n")
        (bin_folder / name).chmod(0o755)


def test_every_runtime_is_looked_for():
    choices = keys_of(ContainerSettings)["runtime"].choices
    assert {*COMMANDS, *SRUN_OPTIONS, ""} == set(choices)


@pytest.mark.parametrize(
    ("image", "runtime", "path"),
    [
        ("/i/x.sif", "apptainer", "/i/x.sif"),
        ("x.sif", "apptainer", "/work/x.sif"),
        ("box", "singularity", "/work/box"),
        ("docker://ubuntu:24.04", "apptainer", None),
        ("oci-archive:/i/x.tar:latest", "apptainer", "/i/x.tar"),
        ("docker-archive:x.tar", "podman", "/work/x.tar"),
        ("/i/x.sqsh", "enroot-pyxis", "/i/x.sqsh"),
        ("./x.sqsh", "enroot-pyxis", "/work/x.sqsh"),
        ("nvcr.io#nvidia/pytorch:25.01-py3", "enroot-pyxis", None),
        ("docker.io/pytorch/pytorch:latest", "podman-hpc", None),
        ("docker:me/img:1", "shifter", None),
        ("torch", "charliecloud", None),
        ("/i/torch", "charliecloud", "/i/torch"),
        ("pytorch", "cscs-ce", None),
        ("edf/pytorch.toml", "cscs-ce", "/work/edf/pytorch.toml"),
        ("$SCRATCH/x.sqsh", "enroot-pyxis", None),
    ],
)
def test_what_is_a_path_depends_on_the_runtime(image, runtime, path):
    found = image_path(image, runtime, Path("/work"))
    assert found == (None if path is None else Path(path))


@pytest.mark.parametrize("image", ["gone.sif", "/gone/x.sif", "a\0b.sif", "x" * 300 + ".sif"])
def test_an_image_that_is_not_there_is_refused_in_a_line(tmp_path, runtimes, image):
    with pytest.raises(
        NotFound, match=r"^flag --set: container.image is .*nothing is there"
    ) as raised:
        look(make(image), tmp_path)
    assert "\n" not in str(raised.value)
    assert "\0" not in str(raised.value)


def test_an_image_that_cannot_be_read_is_refused(tmp_path, runtimes):
    (tmp_path / "dev.sif").symlink_to("/dev/null")
    with pytest.raises(ChecksFailed, match=r"cannot be read: not an ordinary file"):
        look(make("dev.sif"), tmp_path)


@pytest.mark.two_users
def test_an_image_of_another_user_that_is_closed_is_refused(common_path):
    image = common_path / "x.sif"
    image.write_bytes(sif(b"02"))
    image.chmod(0o600)
    code = (
        "from pathlib import Path\n"
        "from hpctrain.cluster.scheduler.slurm.container_checks import _check_image\n"
        "from hpctrain.errors import ChecksFailed\n"
        "import sys\n"
        "try:\n    _check_image(Path(sys.argv[1]), 'image', '', [], None)\n"
        "except ChecksFailed as error:\n    print(error)\n"
    )
    done = users.run_as(users.STRANGER, [sys.executable, "-c", code, str(image)])
    assert done.stdout == f"image is {image}, which cannot be read: Permission denied\n"


def test_an_image_that_a_setup_line_brings_may_be_missing(tmp_path, runtimes):
    settings = make(tmp_path / "x.sif", setup=[f"cp /archive/x.sif {tmp_path}/x.sif"])
    _, notes = look(settings, tmp_path)
    assert notes == [(f"flag --set: container.image is {tmp_path}/x.sif, which is not here: "
                     "slurm.setup must bring it")]  # fmt: skip


def test_a_relative_image_is_kept_with_its_whole_path(tmp_path, runtimes):
    (tmp_path / "x.sif").write_bytes(sif(b"02"))
    settings, notes = look(make("x.sif"), tmp_path, accounting=asked("x86_64"))
    assert (settings.container.image, notes) == (str(tmp_path / "x.sif"), [])


def test_an_image_for_other_machines_is_refused(tmp_path, runtimes):
    (tmp_path / "x.sif").write_bytes(sif(b"04"))
    path = re.escape(str(tmp_path / "x.sif"))
    with pytest.raises(ChecksFailed, match=rf"^flag --set: container.image is {path}, made for "
                       r"aarch64, and the nodes of partition gpu are x86_64"):  # fmt: skip
        look(make("x.sif", partition="gpu"), tmp_path, accounting=asked("x86_64"))


def test_of_nodes_of_two_kinds_one_is_enough_and_it_is_said(tmp_path, runtimes):
    (tmp_path / "x.sif").write_bytes(sif(b"04"))
    _, notes = look(make("x.sif"), tmp_path, accounting=asked("x86_64", "aarch64"))
    assert notes == [("flag --set: container.image is for aarch64; some nodes of the default "
                     "partition are x86_64")]  # fmt: skip


def test_elsewhere_than_on_a_login_node_nothing_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(SlurmCluster, "missing", lambda *_: "there is no sbatch on PATH")
    settings = make("gone.sif")
    more = {"folder": tmp_path, "environ": os.environ, "accounting": None}
    assert SlurmCluster().check_container(settings, ORIGINS, None, **more) == (settings, [])


def test_where_nobody_knows_the_nodes_another_machine_is_only_a_note(tmp_path, runtimes):
    own, other = (b"02", b"04") if platform.machine() == "x86_64" else (b"04", b"02")
    (tmp_path / "x.sif").write_bytes(sif(other))
    _, notes = look(make("x.sif"), tmp_path, accounting=asked())
    assert len(notes) == 1
    assert "nobody could say of the nodes" in notes[0]
    (tmp_path / "x.sif").write_bytes(sif(own))
    assert look(make("x.sif"), tmp_path)[1] == []


def test_garbage_in_an_image_is_not_known_and_refuses_nothing(tmp_path, runtimes):
    for content in (b"", b"hsqs" + bytes(99), b"\x7fELF", sif(b"04")[:45], b"\xff" * 4096):
        (tmp_path / "x.sif").write_bytes(content)
        assert look(make("x.sif"), tmp_path, accounting=asked("x86_64"))[1] == []


@pytest.mark.parametrize(
    ("places", "mounts", "options", "missing"),
    [
        (["scratch/me/runs", "home/me/llm"], [], [], ""),
        (["scratch/me/runs"], [], [], "/home/me/llm"),
        (["scratch", "home/me/llm"], ["/scratch"], [], ""),
        (["scratch/me/runs", "home/me/llm", "data"], ["/x:/data", "/y:/data/y"], [], ""),
        (["scratch/me/runs", "home/me/llm"], ["/opt/x:/data"], [], "/data"),
        (["scratch/me/runs", "home/me/llm"], ["/opt/x:/tmp/x"], [], ""),
        ([], [], ["--write-fake=64m"], ""),
    ],
)
def test_a_folder_as_image_has_a_place_for_each_mount(tmp_path, places, mounts, options, missing):
    for place in places:
        (tmp_path / "image" / place).mkdir(parents=True)
    (tmp_path / "image").mkdir(exist_ok=True)
    spec = make_spec("charliecloud", str(tmp_path / "image"), mounts=mounts, options=options)

    if not missing:
        check_mount_points(spec, RUN, None)
        return
    with pytest.raises(ChecksFailed, match=rf" and {missing} has no place there"):
        SlurmCluster().render(spec, RUN, "tok")


# ---- runtimes


def test_a_runtime_that_is_not_here_is_refused_with_those_that_are(tmp_path, bin_folder):
    (bin_folder / "ch-run").write_text("#!/bin/sh\n")
    (bin_folder / "ch-run").chmod(0o755)
    message = (
        r"^hpctrain.toml:3: container.runtime is apptainer, and there is no apptainer on PATH here "
        r"\(charliecloud is here\): "
    )
    with pytest.raises(ChecksFailed, match=message):
        look(make("docker://x"), tmp_path)


@pytest.mark.parametrize(
    ("setup", "site", "note"),
    [
        (["module load apptainer"], None, "the job's modules or slurm.setup must bring it"),
        ([], site_with("apptainer"), "says that nodes have it"),
    ],
)
def test_a_runtime_that_something_may_bring_is_a_note(tmp_path, bin_folder, setup, site, note):
    _, notes = look(make("docker://x", setup=setup), tmp_path, site)
    assert len(notes) == 1
    assert notes[0].startswith("there is no apptainer on PATH here")
    assert note in notes[0]


@pytest.mark.parametrize(("runtime", "option"), SRUN_OPTIONS.items())
def test_what_srun_starts_is_known_by_its_options(tmp_path, bin_folder, runtime, option):
    settings = make("docker.io#x", runtime)
    with pytest.raises(ChecksFailed, match=f"srun has no {option} here"):
        look(settings, tmp_path, accounting=asked(srun="Usage: srun [OPTIONS...]"))
    for answer in (f"  {option}=NAME ...", None):
        assert look(settings, tmp_path, accounting=asked(srun=answer))[1] == []


@pytest.mark.parametrize(("theirs", "has"), [("shifter", "has shifter"), ("none", "has none")])
def test_a_runtime_other_than_the_sites_is_said(tmp_path, runtimes, theirs, has):
    _, notes = look(make("docker://x"), tmp_path, site_with(theirs))
    assert len(notes) == 1
    assert notes[0].startswith("hpctrain.toml:3: container.runtime is apptainer, and ")
    assert notes[0].endswith(has)


def test_the_sites_own_runtime_needs_no_setting(tmp_path, runtimes):
    settings = make("docker://x", runtime="")
    assert runtime_of(settings.container, site_with("shifter")) == "shifter"
    assert look(settings, tmp_path, site_with("shifter"))[1] == []


def test_an_environment_file_must_be_there(tmp_path, bin_folder):
    (tmp_path / "torch.toml").write_text('image = "nvcr.io#nvidia/pytorch:25.01-py3"\n')
    assert look(make("torch.toml", "cscs-ce"), tmp_path)[1] == []
    with pytest.raises(NotFound):
        look(make("gone.toml", "cscs-ce"), tmp_path)


# ---- what is asked of SLURM


@pytest.mark.parametrize("version", ["", "22.05", "24.11", "26.05"])
def test_slurm_tells_what_the_nodes_of_a_partition_are(version):
    partitions = (ANSWERS / version / "show_partitions.txt").read_text()
    nodes = (ANSWERS / version / "show_nodes.txt").read_text()
    assert facts.read_machines(partitions, nodes, "") == {"x86_64"}
    assert facts.read_machines(partitions, nodes.replace("Arch=x86_64", "Arch=aarch64"), "") == {
        "aarch64"
    }
    assert facts.read_machines(partitions, nodes, "no-such") == frozenset()


def test_partitions_are_kept_apart():
    partitions = ("PartitionName=a\n   Default=YES\n   Nodes=n[1-2]\n\n"
                  "PartitionName=b\n   Default=NO\n   Nodes=g1\n\n")  # fmt: skip
    nodes = ("NodeName=n1 Arch=x86_64 CPUs=2\n\nNodeName=n2 CPUs=2\n\n"
             "NodeName=g1 Arch=aarch64 CPUs=2\n\n")  # fmt: skip
    assert facts.read_machines(partitions, nodes, "") == {"x86_64"}
    assert facts.read_machines(partitions, nodes, "b") == {"aarch64"}
    assert facts.read_machines(partitions, nodes, "a,b") == {"x86_64", "aarch64"}


# ---- the command


def test_submit_refuses_in_a_line_and_makes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SlurmCluster, "missing", lambda *_: "")
    (tmp_path / "x.sif").write_bytes(sif(b"04"))
    words = ["submit", "--cluster=slurm", "--no-submit", "--set=container.runtime=charliecloud",
             "--set=slurm.setup=['true']"]  # fmt: skip
    assert main([*words, "--set=container.image=gone.sif"]) == NotFound.exit_code
    err = capsys.readouterr().err
    assert "flag --set container.image: container.image is" in err
    assert "Traceback" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.sif"]


def test_what_is_seen_only_as_the_script_is_written_makes_nothing_either(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SlurmCluster, "missing", lambda *_: "")
    (tmp_path / "image").mkdir()
    words = ["submit", "--cluster=slurm", "--container=./image", "--set=slurm.setup=['true']"]
    words += ["--set=container.runtime=charliecloud", "--set=container.mounts=['/opt:/data']"]

    assert main(words) == ChecksFailed.exit_code

    assert "/data has no place there" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["image"]
