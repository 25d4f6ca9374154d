"""Real ZeRO-1, 2 and 3 checkpoints, written by DeepSpeed on two ranks, are read without DeepSpeed.

What the live engine holds in each rank's partition is the truth that the import is compared with.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.exchange import Commands, bits, loaded, made_run, names_in
from tests.support.gloo import launch
from tests.support.refused_imports import refuse_imports

os.environ["DS_ACCELERATOR"] = "cpu"
RANKS, STEPS, TAG = 2, 3, "global_step3"
VOCABULARY = 33
KINDS: dict[str, dict[str, Any]] = {
    "ZeRO-1": {"stage": 1},
    "ZeRO-1 bf16": {"stage": 1, "bf16": True},
    "ZeRO-2": {"stage": 2},
    "ZeRO-2 round robin": {"stage": 2, "round_robin_gradients": True},
    "ZeRO-3": {"stage": 3, "sub_group_size": 100},
    "ZeRO-3 bf16": {"stage": 3, "bf16": True},
}


class Net(nn.Module):
    """Sizes that no number of ranks divides, a buffer, tied weights, and a part not trained."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, 7)
        self.norm = nn.LayerNorm(7)
        self.fc = nn.Linear(7, 5)
        self.out = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7, bias=False)
        self.head = nn.Linear(7, VOCABULARY, bias=False)
        self.head.weight = self.emb.weight
        self.frozen.weight.requires_grad_(requires_grad=False)
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x):
        hidden = self.norm(self.emb(x).mean(1))
        return self.head(self.frozen(self.out(self.fc(hidden))))


def config(stage, *, bf16=False, **zero):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 500_000,
            "allgather_bucket_size": 500_000,
            **zero,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bf16},
        "gradient_clipping": 0.0,
    }


def adamw(model):
    decay = [p for n, p in model.named_parameters() if p.requires_grad and "norm" not in n]
    rest = [p for n, p in model.named_parameters() if p.requires_grad and "norm" in n]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def batches(rank):
    dice = torch.Generator().manual_seed(100 + rank)
    for _ in range(STEPS):
        x = torch.randint(0, VOCABULARY, (2, 4), generator=dice)
        yield x, torch.randint(0, VOCABULARY, (2,), generator=dice)


def plainly_trained():
    """The same training without DeepSpeed: the mean of both ranks' gradients."""
    torch.manual_seed(0)
    model = Net()
    optimizer = adamw(model)
    for both in zip(*(batches(rank) for rank in range(RANKS)), strict=True):
        optimizer.zero_grad()
        for x, y in both:
            (nn.functional.cross_entropy(model(x), y) / RANKS).backward()
        optimizer.step()
    wanted = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for what, value in optimizer.state.get(parameter, {}).items():
            wanted[f"optim.{name}.{what}"] = value
    return wanted


def every_kind(folders):
    """On every rank: one process group, one engine after the other."""
    warnings.simplefilter("ignore")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else each run compiles it
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    return {
        kind: train_and_save(folders[kind], config(**settings)) for kind, settings in KINDS.items()
    }


def train_and_save(folder, settings):
    """Returns this rank's part of the truth: name to (first element, values)."""
    import deepspeed

    torch.manual_seed(0)
    if settings["zero_optimization"]["stage"] == 3:
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = Net()
    else:
        model = Net()
    optimizer = adamw(model)
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings, dist_init_required=False
    )
    for x, y in batches(dist.get_rank()):
        engine.backward(nn.functional.cross_entropy(engine(x).float(), y))
        engine.step()
    engine.save_checkpoint(str(folder), tag=TAG)
    frozen = model.frozen.weight
    if settings["zero_optimization"]["stage"] == 3:
        with deepspeed.zero.GatheredParameters([frozen]):
            whole = frozen.detach().clone()
        return held_3(model), bits({"frozen": whole})
    return held_1(model, engine.optimizer), bits({"frozen": frozen})


def held_1(model, zero):
    """What this rank's flat partitions hold of each parameter, as the engine maps them."""
    held = {}
    for name, parameter in model.named_parameters():
        mapping = parameter._hp_mapping if parameter.requires_grad else None
        if mapping is None:
            continue
        mine, theirs = mapping.lp_fragment_address, mapping.hp_fragment_address
        storage = mapping.hp_fragment.untyped_storage().data_ptr()
        (flat,) = [
            one
            for one in zero.single_partition_of_fp32_groups
            if one.untyped_storage().data_ptr() == storage
        ]
        for what, values in {"": flat, **zero.optimizer.state[flat]}.items():
            if values.dim():
                part = values.detach()[theirs.start : theirs.start + theirs.numel].clone()
                held[f"{name}:{what}"] = (mine.start, part.numpy())
    return held


def held_3(model):
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    held = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            whole = {"": safe_get_full_fp32_param(parameter)}
            for what in ("exp_avg", "exp_avg_sq"):
                whole[what] = safe_get_full_optimizer_state(parameter, what)
            for what, values in whole.items():
                held[f"{name}:{what}"] = (0, values.detach().reshape(-1).numpy().copy())
    return held


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Of each kind: its directory, the truth, and the weight that is not trained."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed  # noqa: F401 - once, not in every rank
    folders = {kind: tmp_path_factory.mktemp("ds") for kind in KINDS}
    results = launch(every_kind, RANKS, folders=folders)
    return {
        kind: (folders[kind], truth([one[kind] for one in results]), results[0][kind][1]["frozen"])
        for kind in KINDS
    }


def truth(results):
    """All ranks' parts put together, under our names."""
    shapes = {name: one.shape for name, one in Net().named_parameters()}
    wanted = {}
    for held, _ in results:
        for key, (start, values) in held.items():
            name, _, what = key.partition(":")
            full = f"optim.{name}.{what}" if what else f"model.{name}"
            flat = wanted.setdefault(full, torch.full((shapes[name].numel(),), float("nan")))
            flat[start : start + len(values)] = torch.from_numpy(values)
    assert not any(flat.isnan().any() for flat in wanted.values()), "the truth has holes"
    wanted = {
        full: flat.view(
            shapes[full.partition(".")[2].removesuffix(".exp_avg").removesuffix(".exp_avg_sq")]
        )
        for full, flat in wanted.items()
    }
    for name in {full.removeprefix("model.") for full in wanted if full.startswith("model.")}:
        wanted[f"optim.{name}.step"] = torch.tensor(float(STEPS))
    return wanted


@pytest.fixture
def run(tmp_path):
    return made_run(tmp_path)


@pytest.fixture
def call(tmp_path, capsys):
    return Commands(tmp_path / "runs", capsys)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "bf16" not in kind])
def test_everything_is_where_plain_training_has_it(run, call, saved, kind):
    """By values, whatever DeepSpeed's own maps say: with round robin those are wrong."""
    call("import", saved[kind][0], "--run", run.name, "--step", STEPS)

    found, wanted = loaded(run, STEPS), plainly_trained()

    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "round robin" not in kind])
def test_masters_moments_and_steps_come_by_name_bit_for_bit(run, call, saved, kind):
    folder, wanted, frozen = saved[kind]

    code, out, err = call("import", folder, "--run", run.name, "--step", STEPS)

    assert code == 0, err
    assert "from deepspeed, each read back and the same" in out
    found = loaded(run, STEPS)
    beside = {name: found.pop(name) for name in ("model.scale", "model.frozen.weight")}
    tied = found.pop("model.head.weight")
    assert bits(found) == bits(wanted)
    assert torch.equal(tied, found["model.emb.weight"])
    assert torch.equal(beside["model.scale"].float(), torch.full((3,), 2.0))
    assert bits({"frozen": beside["model.frozen.weight"]})["frozen"] == frozen


def test_weights_are_those_of_deepspeeds_own_script(run, call, saved):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    folder, _, _ = saved["ZeRO-2 round robin"]
    call("import", folder / TAG, "--run", run.name, "--step", 3, "--what", "model")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = get_fp32_state_dict_from_zero_checkpoint(str(folder))

    mine = {name.removeprefix("model."): tensor for name, tensor in loaded(run, 3).items()}
    assert bits(mine) == bits({name: tensor.float() for name, tensor in theirs.items()})


def test_deepspeed_itself_is_not_needed(run, saved, tmp_path):
    folder, _, _ = saved["ZeRO-3"]
    refuse_imports(tmp_path, "deepspeed")
    command = [sys.executable, "-m", "hpctrain", "checkpoints", "import", folder]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}

    done = subprocess.run(
        [*command, "--run", run.name, "--step", "3"],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr


def lacking_a_rank(folder):
    (folder / TAG / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()


def lacking_the_first_rank(folder):
    (folder / TAG / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()


def lacking_the_model(folder):
    (folder / TAG / "mp_rank_00_model_states.pt").unlink()


def tensor_parallel(folder):
    path = folder / TAG / "mp_rank_00_model_states.pt"
    shutil.copy(path, path.with_name("mp_rank_01_model_states.pt"))


def latest_names_nothing(folder):
    (folder / "latest").write_text("global_step9")


def latest_leads_away(folder):
    (folder / "latest").write_text("../../etc")


def cut(folder):
    path = folder / TAG / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:3000])


def change(folder, name, edit):
    from torch.serialization import safe_globals

    from hpctrain.checkpoint.exchange.from_deepspeed import ALLOWED

    path = folder / TAG / name
    with safe_globals(ALLOWED):
        tree = torch.load(path, weights_only=True)
    edit(tree)
    for key in ("zero_stage", "loss_scaler", "param_slice_mappings"):
        if key in tree.get("optimizer_state_dict", {}):
            tree["optimizer_state_dict"][key] = 1
    torch.save(tree, path)


def another_step(folder):
    def edit(tree):
        tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] += 1

    change(folder, "zero_pp_rank_1_mp_rank_00_optim_states.pt", edit)


def shorter(folder):
    def edit(tree):
        groups = tree["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        groups[0] = groups[0][:-40]

    change(folder, "zero_pp_rank_1_mp_rank_00_optim_states.pt", edit)


def elastic(folder):
    def edit(tree):
        tree["optimizer_state_dict"]["base_optimizer_state"] = [{}]

    for rank in range(RANKS):
        change(folder, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", edit)


def more_parameters(folder):
    def edit(tree):
        tree["param_shapes"][0]["fc.weight"] = torch.Size([500])

    change(folder, "mp_rank_00_model_states.pt", edit)


def no_shapes(folder):
    change(folder, "mp_rank_00_model_states.pt", lambda tree: tree.pop("param_shapes"))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lacking_a_rank, "has 1 ranks' files and was saved by [2]"),
        (lacking_the_first_rank, "lacks optim states of some rank; there are those of [1]"),
        (lacking_the_model, "lacks model states of some rank"),
        (tensor_parallel, "only data parallel ZeRO is read"),
        (latest_names_nothing, "names 'global_step9', which is not there"),
        (latest_leads_away, "which is not there"),
        (cut, "is cut, damaged, or no torch.save file"),
        (another_step, "step is not the same on all ranks"),
        (shorter, "is not cut in equal parts"),
        (elastic, "elastic_checkpoint, whose optimizer state is not read"),
        (more_parameters, "group 0 is shorter than its parameters"),
        (no_shapes, "is not a ZeRO checkpoint as DeepSpeed 0.19 writes it: KeyError"),
    ],
)
def test_what_is_not_whole_or_not_understood_is_one_line(run, call, saved, damage, why):
    tmp_path = run.root.parent.parent
    folder = tmp_path / "copy"
    shutil.copytree(saved["ZeRO-1"][0], folder)
    damage(folder)

    line = call.refused("import", folder, "--run", run.name, "--step", 3)

    assert why in line
    assert names_in(run) == []
