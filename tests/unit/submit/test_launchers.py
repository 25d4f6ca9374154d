"""A launcher's command is taken apart by its own table, or refused; nothing is guessed."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.core.settings.schema import SlurmSettings
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.launch.launchers import disagreements, inside, launchers, unwrap
from hpctrain.launch.prepare import prepare
from tests.support.submit_requests import request_of


@pytest.mark.parametrize(
    ("command", "left"),
    [
        ("torchrun train.py --lr 1", "train.py --lr 1"),
        ("torchrun --standalone --nproc_per_node=8 train.py -m x", "train.py -m x"),
        ("torchrun --rdzv-backend c10d --rdzv-endpoint a:1 -r3 -t 1 train.py", "train.py"),
        ("torchrun -m pkg.train --lr 1", "-m pkg.train --lr 1"),
        ("torchrun --no-python ./a.out x", "./a.out x"),
        ("/opt/venv/bin/torchrun --nnodes 1:4 train.py", "train.py"),
        ("-m torch.distributed.run --nnodes 2 train.py", "train.py"),
        ("accelerate launch --multi_gpu --num_processes 8 run.py --cpu", "run.py --cpu"),
        ("accelerate-launch --module pkg.train", "-m pkg.train"),
        ("-m accelerate.commands.launch run.py", "run.py"),
        ("deepspeed --num_gpus 8 train.py --deepspeed x", "train.py --deepspeed x"),
        ("srun -l -N2 --ntasks-per-node=4 --kill-on-bad-exit=1 python x.py", "python x.py"),
        ("srun -- ./a.out -N 3", "./a.out -N 3"),
    ],
)
def test_what_the_launcher_starts_is_left(command, left):
    assert " ".join(unwrap(command.split()).command) == left


@pytest.mark.parametrize("command", ["train.py torchrun", "-m pkg.run", "bash x", "uv run x", "-m"])
def test_other_commands_are_no_launchers(command):
    assert unwrap(command.split()) is None


def test_what_accelerate_would_set_is_set():
    words = "--mixed_precision=BF16 --cpu --num_cpu_threads_per_process 4 --use_deepspeed "
    words += "--zero_stage 2 --dynamo_backend inductor run.py"
    unwrapped = unwrap(["accelerate", "launch", *words.split()])

    assert {name: value for name, (value, _) in unwrapped.env.items()} == {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "4",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
        "ACCELERATE_DYNAMO_BACKEND": "inductor",
    }
    assert unwrapped.env["OMP_NUM_THREADS"][1].startswith("accelerate launch --num_cpu_threads")
    assert "ACCELERATE_MIXED_PRECISION=bf16" in unwrapped.notes[0]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("deepspeed train.py", "--local_rank"),
        ("deepspeed --no_local_rank train.py", ""),
        ("-m torch.distributed.launch train.py", "--local-rank"),
        ("-m torch.distributed.launch --use_env train.py", ""),
        ("torchrun train.py", ""),
    ],
)
def test_ranks_get_their_number_as_that_launcher_gives_it(command, option):
    assert unwrap(command.split()).local_rank == option


def test_what_has_no_effect_is_said_with_what_has():
    command = "torchrun --standalone --max-restarts 3 --tee 3 train.py"
    (note,) = unwrap(command.split()).notes

    assert note == (
        "torchrun is left out: hpctrain starts the ranks, and they run train.py; without effect: "
        "--standalone, --max-restarts (run.restarts_in_job), --tee (`hpctrain logs`)"
    )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("torchrun --nproc 8 train.py", "torchrun --nproc: is not an option"),
        ("torchrun --nproc-per-nod 8 train.py", "did you mean --nproc-per-node"),
        ("torchrun --nproc-per-node", "its value is missing"),
        ("torchrun --nproc-per-node=some train.py", "'some' is no number of ranks"),
        ("torchrun --nnodes 1:2:3 train.py", "no number of nodes"),
        ("torchrun --nnodes 0 train.py", "no number of nodes"),
        ("torchrun --standalone=1 train.py", "--standalone takes no value"),
        ("torchrun -q train.py", "torchrun -q: is not an option"),
        ("torchrun --m pkg", "--m: is not an option"),
        ("torchrun --standalone", "names no program"),
        ("torchrun --virtual-local-rank train.py", "LOCAL_RANK"),
        ("torchrun -m --no-python pkg", "a module and no Python at once"),
        ("-m torch.distributed.run", "names no program"),
        ("accelerate config", "only `accelerate launch` trains"),
        ("accelerate", "only `accelerate launch` trains"),
        ("accelerate launch --config_file x.yaml run.py", "--env ACCELERATE_MIXED_PRECISION"),
        ("accelerate launch --mixed_precision fp8 run.py", "it takes no, fp16, bf16"),
        ("accelerate launch --use_fsdp run.py", "--env .ACCELERATE_USE_FSDP=true"),
        ("accelerate launch --num_processes many run.py", "no number of ranks"),
        ("deepspeed --hostfile x train.py", "the scheduler chooses the nodes"),
        ("deepspeed --include x train.py", "slurm.exclude"),
        ("srun --mpi=pmix ./a", r"slurm.srun_args=\[\"--mpi=pmix\"\]"),
        ("srun -N x ./a", "no number of nodes"),
        ("mpirun -n 4 ./a", "hpctrain starts the ranks"),
        ("sbatch x.sh", "hpctrain asks for the job itself"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_line(command, message):
    with pytest.raises(UsageError, match=message) as caught:
        unwrap(command.split())

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("command", "slurm", "said"),
    [
        ("torchrun --nproc-per-node 8 t", {}, "each node has 1 rank.s.: say --ranks-per-node 8"),
        ("torchrun --nproc-per-node 8 t", {"gpus_per_node": 8}, ""),
        ("torchrun --nproc-per-node gpu t", {}, ""),
        ("torchrun --nnodes 2 t", {"nodes": "1-2"}, "the job has 1-2: say --nodes 2"),
        ("torchrun --nnodes 1:2 t", {"nodes": "1-2"}, ""),
        ("accelerate launch --num_processes 8 t", {"nodes": "2", "ranks_per_node": 4}, ""),
        ("accelerate launch --num_processes 8 t", {"nodes": "2"}, "2 node.s. of 1 rank"),
        ("srun -n 4 t", {"nodes": "1-4"}, ""),
    ],
)
def test_other_numbers_than_the_jobs_are_said(command, slurm, said):
    notes = disagreements(unwrap(command.split()).asked, SlurmSettings(**slurm))

    assert len(notes) == bool(said)
    assert not said or re.search(said, notes[0])


def test_a_submit_takes_launchers_apart_also_one_in_another(tmp_path):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "hpctrain.toml").write_text("[env]\nACCELERATE_MIXED_PRECISION = 'no'\n")
    command = "srun -N 2 accelerate launch --mixed_precision fp16 --num_processes 2 train.py -x"
    request = request_of(
        cwd=tmp_path,
        environ={"PATH": ""},
        runs=tmp_path / "runs",
        command=command.split(),
        nodes="2",
    )
    prepared = prepare(request)

    spec = prepared.spec
    assert (spec.entry.path, spec.entry.args) == (str(tmp_path / "train.py"), ["-x"])
    assert spec.env == {"ACCELERATE_MIXED_PRECISION": "fp16"}
    assert spec.env_origins == {"ACCELERATE_MIXED_PRECISION": "accelerate launch --mixed_precision"}
    assert [note.partition(":")[0] for note in prepared.notes[:2]] == [
        "srun is left out",
        "accelerate launch is left out",
    ]


def test_launchers_inside_a_shell_script_are_seen():
    assert inside("#!/bin/bash\nset -e\n  exec torchrun --nproc-per-node 8 t.py\n") == (
        "torchrun",
        3,
    )
    assert inside("python3 -u -m torch.distributed.run t.py") is not None
    assert inside("# torchrun\necho torchrun\ntorchrunner x\n") is None


OPTIONS = {
    "torchrun": ("torch.distributed.run", "get_args_parser"),
    "accelerate launch": ("accelerate.commands.launch", "launch_command_parser"),
}
SECRET = ("aws-access-key-id", "aws-secret-access-key", "vm", "env")
PARTS = ("fsdp-", "megatron-lm-", "fp8-", "parallelism-config-")


@pytest.mark.parametrize("launcher", OPTIONS)
def test_the_table_agrees_with_the_launchers_own_parser(launcher):
    """But for accelerate's parts of what is refused as a whole."""
    module, parser = OPTIONS[launcher]
    actions = getattr(importlib.import_module(module), parser)()._actions
    table = launchers()[launcher].options
    wrong = []
    for action in actions:
        for name in action.option_strings:
            key = name.lstrip("-").replace("_", "-")
            if key in {"h", "help", *SECRET} or key.startswith(PARTS):
                continue
            if key not in table or table[key].takes is not (action.nargs != 0):
                wrong.append(name)

    assert wrong == []


def test_deepspeeds_table_agrees_with_its_parser():
    source = importlib.util.find_spec("deepspeed").submodule_search_locations[0]
    tree = ast.parse(Path(source, "launcher", "runner.py").read_text())
    told = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument":
            actions = [ast.unparse(word.value) for word in call.keywords if word.arg == "action"]
            names = [name.value for name in call.args if isinstance(name, ast.Constant)]
            told |= {name: actions != ["'store_true'"] for name in names if name.startswith("-")}
    options = launchers()["deepspeed"].options
    names = {name.lstrip("-").replace("_", "-"): takes for name, takes in told.items()}
    names = {name: takes for name, takes in names.items() if name not in {"h", "help"}}

    assert {name: option.takes for name, option in options.items()} == names


HEADS = ["torchrun", "srun", "deepspeed", "accelerate launch", "-m torch.distributed.launch", "-m"]
NAMES = sorted({f"--{name}" for launcher in launchers().values() for name in launcher.options})
WORDS = st.one_of(
    st.sampled_from([*NAMES, "-m", "-r", "-N2", "-", "--", "-q", "--=x", "-=", "train.py", "8"]),
    st.sampled_from(NAMES).map(lambda name: f"{name}=8"),
    st.text(max_size=8),
    st.text(max_size=8).map(lambda text: f"--{text}"),
    st.text(max_size=4).map(lambda text: f"-{text}"),
)


@given(head=st.sampled_from(HEADS), words=st.lists(WORDS, max_size=6))
def test_whatever_stands_behind_a_launcher_there_is_a_program_or_one_line(head, words):
    try:
        unwrapped = unwrap([*head.split(), *words])
    except HpctrainError:
        return
    if unwrapped is not None:
        assert unwrapped.command
        assert unwrapped.command[-1] == words[-1]
        disagreements(unwrapped.asked, SlurmSettings())
