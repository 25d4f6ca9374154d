"""Each runtime's command line, held against the examples of its own documentation.

Read on 2026-11-23: apptainer-userdocs 94391c5 (2026-08-12) bind_paths_and_mounts.rst and gpu.rst;
NVIDIA/pyxis 1075199 (2026-05-11) README.md and args.c; eth-cscs/cscs-docs 80abed1 (2026-08-20)
container-engine/edf.md; NERSC/podman-hpc 01b02d6 (2026-04-24) etc/modules.d/gpu.yaml, podman-run(1)
of 5.7.0; NERSC/shifter 84b7d34 (2026-06-05) `shifter --help`; hpc/charliecloud 23de6ee (2024-10-02)
doc/ch-run.rst.
"""

from __future__ import annotations

import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.cluster.scheduler.slurm.client import render_preflight
from hpctrain.cluster.scheduler.slurm.container import (
    container_lines,
    container_start,
    parse_mount,
    runtime_of,
)
from hpctrain.cluster.scheduler.slurm.script import render_script
from hpctrain.cluster.site.schema import About, Container, Partition, Site
from hpctrain.core.settings.fields import keys_of
from hpctrain.core.settings.schema import ContainerSettings, Settings, SlurmSettings
from hpctrain.core.settings.spec import Entry, Evaluates, Spec
from hpctrain.errors import UsageError
from hpctrain.ledger.run.layout import RunDir
from tests.support.patience import PATIENCE_S

RUN = RunDir(Path("/scratch/me/runs/llm-1"))
OWN = "/home/me/llm:/home/me/llm,/scratch/me/runs:/scratch/me/runs"
RUNTIMES = [name for name in keys_of(ContainerSettings)["runtime"].choices if name]


def make_spec(runtime="apptainer", image="/images/torch.sif", gpus=0, cwd="/home/me/llm", **own):
    spec = Spec(
        name="llm-1",
        run_id="0123",
        created=0.0,
        cluster="slurm",
        site="",
        entry=Entry("script", path=f"{cwd}/train.py", cwd=cwd),
        python="/opt/venv/bin/python",
    )
    container = ContainerSettings(image=image, runtime=runtime, **own)
    spec.settings = Settings(slurm=SlurmSettings(gpus_per_node=gpus), container=container)
    return spec


def make_site(runtime="", gpu="", **container):
    site = Site(about=About(name="juniper"), container=Container(runtime=runtime, **container))
    return replace(site, partitions={"gpu": Partition(gpu=gpu)})


def words(spec, site=None):
    return container_start(spec, RUN, site).words


def test_apptainer():
    # $ apptainer exec --bind /data:/mnt my_container.sif ls /mnt
    # $ apptainer exec --nv docker://tensorflow/tensorflow:latest-gpu ...
    spec = make_spec(mounts=["/data:/mnt", "/ref:/ref:ro"], gpus=4, options=["--containall"])

    assert words(spec) == [
        "apptainer",
        "exec",
        "--bind=/data:/mnt",
        "--bind=/ref:/ref:ro",
        "--bind=/home/me/llm:/home/me/llm",
        "--bind=/scratch/me/runs:/scratch/me/runs",
        "--pwd=/home/me/llm",
        "--nv",
        "--containall",
        "/images/torch.sif",
    ]
    assert words(replace_runtime(spec, "singularity"))[0] == "singularity"


def test_a_job_beside_a_run_sees_that_run_inside():
    root = RUN.root
    child = RunDir(root / "evaluations" / "llm-1-eval-9")
    checkpoint = f"{root}/checkpoints/step-0000000009"
    evaluation = replace(make_spec(), evaluates=Evaluates(str(root), 9, checkpoint))
    follower = replace(make_spec(), after=["/project/runs/base"])

    assert f"--bind={root}:{root}" in container_start(evaluation, child, None).words
    assert "--bind=/project/runs/base:/project/runs/base" in words(follower)


def replace_runtime(spec, runtime):
    container = replace(spec.settings.container, runtime=runtime, mounts=["/data:/mnt"])
    return replace(spec, settings=replace(spec.settings, container=container))


def test_charliecloud():
    # $ ch-run [OPTION...] IMAGE -- COMMAND [ARG...]
    spec = make_spec("charliecloud", "/images/torch", mounts=["/data:/mnt/0"])

    assert words(spec)[:2] == ["ch-run", "--bind=/data:/mnt/0"]
    assert "--bind=/home/me/llm:/home/me/llm" in words(spec)
    assert words(spec)[-3:] == ["--cd=/home/me/llm", "/images/torch", "--"]


def test_podman():
    # $ podman run -v ~/bundle:/bundle:ro --workdir DIR --network=host fedora ...
    spec = make_spec("podman-hpc", "docker.io/pytorch/pytorch:2.9", gpus=4)
    of_podman = make_spec("podman", "img", gpus=1)

    assert words(spec)[:2] == ["podman-hpc", "run"]
    assert words(spec)[-2:] == ["--gpu", "docker.io/pytorch/pytorch:2.9"]
    # Without these the inside would have another network, 64 MB of shared memory, another user.
    shared = {"--network=host", "--ipc=host", "--pid=host", "--userns=keep-id", "--env-host"}
    assert shared <= set(words(spec))
    assert "--volume=/home/me/llm:/home/me/llm" in words(spec)
    assert "--device=nvidia.com/gpu=all" in words(of_podman)


def test_shifter():
    # $ shifter --image=docker:ubuntu/17.10; --volume=/scratch/path/to/my/data:/data
    spec = make_spec("shifter", "docker:nersc/pytorch:24.08", mounts=["/d:/data"], gpus=4)

    assert words(spec) == [
        "shifter",
        "--image=docker:nersc/pytorch:24.08",
        "--volume=/d:/data",
        "--volume=/home/me/llm:/home/me/llm",
        "--volume=/scratch/me/runs:/scratch/me/runs",
        "--workdir=/home/me/llm",
        "--module=gpu",
        "--",
    ]


def test_pyxis():
    # $ srun --container-image=almalinux:9 --container-mounts=/etc/os-release:/host/os-release ...
    site = make_site("enroot-pyxis", binds=["/fabric"], env_pass=["NCCL_FASTRAK_IFNAME"])
    spec = make_spec("", "nvcr.io#nvidia/pytorch:25.10-py3", env=["HF_HOME", "A=b,c"])

    start = container_start(spec, RUN, site)

    assert start.words == []
    assert start.srun == [
        "--container-image=nvcr.io#nvidia/pytorch:25.10-py3",
        f"--container-mounts=/fabric:/fabric,{OWN}",
        "--container-workdir=/home/me/llm",
        "--no-container-remap-root",
        "--container-env=NCCL_FASTRAK_IFNAME,HF_HOME",
    ]


def test_cscs_ce_has_its_file_beside_the_script():
    # edf.md: the image with # behind its registry, a list of mounts SOURCE:DESTINATION[:FLAGS]
    spec = make_spec("cscs-ce", "nvcr.io#nvidia/pytorch:22.12-py3", mounts=["/data:/data:ro"])

    start = container_start(spec, RUN, None)

    assert tomllib.loads(start.edf) == {
        "image": "nvcr.io#nvidia/pytorch:22.12-py3",
        "mounts": [
            "/data:/data:ro",
            "/home/me/llm:/home/me/llm",
            "/scratch/me/runs:/scratch/me/runs",
        ],
        "workdir": "/home/me/llm",
    }
    assert "--environment=/scratch/me/runs/llm-1/jobs/tok.toml" in lines(spec)


def test_cscs_ce_expands_what_stands_in_an_images_path():
    # run.md has ${SCRATCH} in front of an image that was pulled by hand
    edf = container_start(make_spec("cscs-ce", "${SCRATCH}/a+b.sqsh"), RUN, None).edf

    assert tomllib.loads(edf)["image"] == "${SCRATCH}/a+b.sqsh"


@pytest.mark.parametrize("name", ["ubuntu", "/users/me/.edf/ubuntu.toml"])
def test_cscs_ce_builds_upon_the_users_own_file(name):
    edf = container_start(make_spec("cscs-ce", name), RUN, None).edf

    assert tomllib.loads(edf)["base_environment"] == name
    assert "image" not in tomllib.loads(edf)


def lines(spec, site=None):
    return "\n".join(container_lines(spec, RUN, "tok", site))


@pytest.mark.parametrize(
    ("runtime", "gpu", "expected"),
    [
        ("apptainer", "MI250X", "--rocm"),
        ("apptainer", "H100", "--nv"),
        ("podman", "AMD Instinct MI300A", "--device=/dev/kfd"),
    ],
)
def test_the_sites_gpus_say_which_driver(runtime, gpu, expected):
    assert expected in words(make_spec(runtime, gpus=8), make_site(gpu=gpu))
    assert expected not in words(make_spec(runtime, gpus=0), make_site(gpu=gpu))


def test_ones_own_words_for_gpus_stand_alone():
    chosen = words(make_spec(gpus=4, options=["--nvccli"]))

    assert "--nv" not in chosen
    assert "--nvccli" in chosen


# ---- what is mounted


def test_what_lies_in_a_mount_is_not_mounted_again():
    spec = make_spec(cwd="/scratch/me/code", mounts=["/scratch"])

    assert [word for word in words(spec) if "--bind" in word] == ["--bind=/scratch:/scratch"]


def test_a_read_only_mount_does_not_keep_the_run_from_writing():
    binds = [w for w in words(make_spec(mounts=["/scratch:/scratch:ro"])) if "--bind" in w]

    assert binds[0] == "--bind=/scratch:/scratch:ro"  # parents first, or it would hide what follows
    assert "--bind=/scratch/me/runs:/scratch/me/runs" in binds[1:]


def test_of_mounts_in_each_other_the_outer_comes_first():
    # The inner one would be hidden else.
    mounts = ["/z/a/b:/d/b/c", "/a:/d", "/y:/d/b"]

    binds = [w for w in words(make_spec(mounts=mounts)) if "--bind" in w]

    assert [bind for bind in binds if ":/d" in bind] == [
        "--bind=/a:/d",
        "--bind=/y:/d/b",
        "--bind=/z/a/b:/d/b/c",
    ]


def test_folders_that_settings_name_are_mounted():
    spec = make_spec()
    settings = spec.settings
    settings = replace(settings, engine=replace(settings.engine, pretrained="/models/qwen"))
    settings = replace(
        settings, checkpoint=replace(settings.checkpoint, sealed=["/ckpt/out/step-*", "out/*"])
    )
    spec.settings = settings
    spec.entry.python_path = ["/home/me/lib"]

    chosen = words(spec)

    for path in ("/models/qwen", "/ckpt/out", "/home/me/lib"):
        assert f"--bind={path}:{path}" in chosen


@pytest.mark.parametrize("cwd", ["/", "/usr", "/opt"])
def test_a_folder_of_the_images_own_is_refused(cwd):
    with pytest.raises(UsageError, match=f"the working directory is {cwd}, and inside"):
        words(make_spec(cwd=cwd))


@pytest.mark.parametrize("text", ["data", "/a:b", "/a:/b:rx", "/a:/b:ro:x", "", "/a:/"])
def test_what_is_no_mount_is_refused_in_a_line(text):
    with pytest.raises(UsageError, match=r"hpctrain.toml:3: .* is no mount; it takes SRC"):
        parse_mount(text, "hpctrain.toml:3")


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_path_with_a_colon_is_refused_by_all(runtime):
    spec = make_spec(runtime, cwd="/home/me/a:b")

    with pytest.raises(UsageError, match=f"':' in its name, which a mount of {runtime} cannot"):
        container_start(spec, RUN, None)


@pytest.mark.parametrize(
    ("runtime", "path"),
    [
        ("apptainer", "/d/a,b"),
        ("apptainer", '/d/a"b'),
        ("enroot-pyxis", "/d/a b"),
        ("enroot-pyxis", "/d/a,b"),
        ("shifter", "/d/a;b"),
        ("cscs-ce", "/d/a b"),
    ],
)
def test_a_path_that_a_runtime_would_cut_is_refused(runtime, path):
    with pytest.raises(UsageError, match="cannot hold: choose another folder"):
        container_start(make_spec(runtime, mounts=[path]), RUN, None)


def test_charliecloud_has_no_read_only_mounts():
    with pytest.raises(UsageError, match="charliecloud has no read-only mounts"):
        words(make_spec("charliecloud", mounts=["/data:/data:ro"]))


# ---- which runtime


def test_the_sites_runtime_unless_the_user_names_one():
    container = ContainerSettings(image="x.sif")

    assert runtime_of(ContainerSettings(), None) == ""
    assert runtime_of(container, make_site("shifter")) == "shifter"
    assert runtime_of(replace(container, runtime="apptainer"), make_site("shifter")) == "apptainer"


@pytest.mark.parametrize("site", [None, make_site(), make_site("none")])
def test_an_image_that_nothing_would_start_is_refused(site):
    with pytest.raises(UsageError, match=r"flag --container: container.image is x.sif.*runtime"):
        runtime_of(ContainerSettings(image="x.sif"), site, {"container.image": "flag --container"})


# ---- the batch script

TASK = """
while [ ! -e "$OUT/relay" ]; do sleep 0.01; done
while [ "$1" != bash ]; do shift; done
export SLURMD_NODENAME=n1 SLURM_PROCID=0
exec "$@"
"""
RUNTIME = """
printf '%s\\n' "${PYTHONPATH-unset}" "${CONDA_PREFIX-unset}" >"$OUT/outside"
while [ "$1" != -- ]; do shift; done
shift
export BASE=image FOO=image
exec "$@"
"""
ASKS = """
case "$*" in *" relay "*)
  echo "$* $HPCTRAIN_RELAY" >"$OUT/relay.new"
  mv "$OUT/relay.new" "$OUT/relay" # srun waits for it: after that the script kills this process
  exec sleep 60 ;;
esac
"""
PYTHON = """
printf '%s\\n' "$@" >"$OUT/args"
env -0 >"$OUT/env"
"""


def play(folder, spec, **env):
    """The script with a stand-in for srun, for ch-run and for the image's python."""
    programs = {"srun": TASK, "ch-run": RUNTIME, "python3": PYTHON, "python": ASKS}
    for name, text in programs.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(0o755)
    spec.python = str(folder / "python")
    run = RunDir(folder / "a run")
    script = folder / "script.sh"
    script.write_text(render_script(spec, run, "tok"))
    done = subprocess.run(
        ["bash", script],
        env={"PATH": f"{folder}:/usr/bin:/bin", "OUT": str(folder), "SLURM_NNODES": "1"}
        | {"SLURM_JOB_ID": "7"}
        | env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    inside = (folder / "env").read_text().split("\0")
    return dict(line.split("=", 1) for line in inside if line), run


def test_the_task_starts_inside_with_its_variables(tmp_path):
    spec = make_spec("charliecloud", "/i", env=["A=x 'y' \"z\" $HOME,\\", "PASSED", "NOT_THERE"])
    spec.env = {"FOO": "of the run's [env] }\"`$", "BAR": "run", "LD_LIBRARY_PATH": "/opt/lib"}

    host = {"PYTHONPATH": "/host", "CONDA_PREFIX": "/host/conda", "LD_LIBRARY_PATH": "/host/lib"}
    inside, run = play(tmp_path, spec, PASSED="a b", BAR="job", TMPDIR="/local/7", **host)

    args = (tmp_path / "args").read_text().splitlines()
    assert args == ["-P", "-u", "-m", "hpctrain.entry.slurm_task", str(run.root)]
    assert (tmp_path / "outside").read_text().split() == ["unset", "unset"]
    assert inside["A"] == "x 'y' \"z\" $HOME,\\"
    assert inside["PASSED"] == "a b"
    assert "NOT_THERE" not in inside
    assert inside["FOO"] == "of the run's [env] }\"`$"  # not the image's
    assert inside["BAR"] == "job"  # which wins over [env], as outside
    assert inside["LD_LIBRARY_PATH"] == "/opt/lib"  # the job's is the host's
    assert inside["BASE"] == "image"
    assert inside["USER"]  # ch-run starts nothing without it
    assert "TMPDIR" not in inside
    assert inside["HPCTRAIN_RUN_DIR"] == str(run.root)
    assert inside["HPCTRAIN_RELAY"] == f"{run.jobs}/tok.port"
    assert "slurm_batch relay" in (tmp_path / "relay").read_text()


def test_setup_lines_may_make_what_is_passed(tmp_path):
    spec = make_spec("charliecloud", "/i", env=["FROM_SETUP"])
    setup = replace(spec.settings.slurm, setup=["export FROM_SETUP=1"])
    spec.settings = replace(spec.settings, slurm=setup)

    assert play(tmp_path, spec)[0]["FROM_SETUP"] == "1"


@pytest.mark.parametrize("text", ["1A=x", "A-B", "=x", "A B=c"])
def test_a_variable_that_is_none_is_refused(text):
    with pytest.raises(UsageError, match="takes NAME=VALUE, or the NAME"):
        lines(make_spec(env=[text]))


def test_the_edf_is_written_before_srun_reads_it(tmp_path):
    spec = make_spec("cscs-ce", "nvcr.io#x/y:1")
    run = RunDir(tmp_path / "o'run")
    text = "\n".join(container_lines(spec, run, "tok", None))

    subprocess.run(["bash", "-c", f'{text}\nhpctrain_container; echo "$?"'], check=True)

    assert tomllib.loads((run.jobs / "tok.toml").read_text())["image"] == "nvcr.io#x/y:1"


def test_without_an_image_the_script_has_no_word_of_it():
    assert "hpctrain_container()" not in render_script(make_spec(image=""), RUN, "tok")


def test_a_preflight_looks_at_the_nodes_from_inside():
    text = render_preflight(make_spec(gpus=1), RUN, "tok")

    assert "hpctrain_task=(apptainer exec " in text
    assert '"${hpctrain_task[@]}"' in text
