"""A Llama on FSDP2 ranks, phase by phase: memory against a shard and the largest block, seconds.

Random weights lie in bf16 safetensors, as Hugging Face has them. Each way begins a model with them,
makes one step, saves, and exports: by a function, as hpctrain takes it; by a whole model on every
rank, as it took it before; and by torch alone (FSDP2 of a model on the meta device, rank 0 reads
and broadcasts, DCP saves). The first is also resumed, by new ranks. Memory is what a rank has for
itself beyond what it began with, looked at each 2 ms; the page cache does not count. Run it in a
memory cgroup to hold all of it to a limit. `--params 20` for a quick look, `--ways` to choose.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import _measure as measure

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.checkpoint.tensors.save import SavePlace
    from hpctrain.core.world import World

VOCABULARY = 32_000
TOKENS = 32
LOOK_S = 0.002
LIMIT = 1.2
PHASES = ("begin", "step", "save", "export", "resume")
WITHIN = ("begin", "save", "resume")
FP32_BYTES = 4


@dataclass(frozen=True)
class Job:
    """Where one way finds the weights, and where it saves and exports."""

    way: str
    hub: Path
    folder: Path
    place: SavePlace


@dataclass
class Phases:
    """What each phase of one rank took.

    Attributes:
        rows: By phase: seconds, peak of memory, and what the rank keeps after it, in bytes.
        base: Memory of its own that the rank began with.
    """

    base: int = 0
    rows: dict[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.base = _own_memory()

    @contextmanager
    def phase(self, name: str, world: World | None) -> Iterator[dict[str, float]]:
        """Measure what is done inside; ranks begin and end it together."""
        from hpctrain.core.world import gather

        row = self.rows.setdefault(name, {})
        done, seen = threading.Event(), [_own_memory()]
        row["began"] = seen[0] - self.base

        def look() -> None:
            while not done.wait(LOOK_S):
                seen.append(max(seen.pop(), _own_memory()))

        looking = threading.Thread(target=look)
        if world is not None:
            gather(world, None)
        began = time.perf_counter()
        looking.start()
        yield row
        if world is not None:
            gather(world, None)
        row["seconds"] = time.perf_counter() - began
        done.set()
        looking.join()
        row["peak"] = max(seen[0], _own_memory()) - self.base


def main() -> None:
    """Write the weights once, then go each way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--params", type=int, default=200, help="millions, in fp32")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ways", default="hpctrain,whole,torch")
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    asked = measure.Options(given.params, 1, given.ranks, given.dir, given.json)
    os.environ["TQDM_DISABLE"] = "1"
    measure.require_memory(2 * asked.state_bytes)
    with measure.scratch(asked, 2 * asked.state_bytes) as folder:
        hub = folder / "hub"
        measure.on_ranks(_write_weights, 1, hub=hub, params=asked.params)
        lines = list[measure.Line]()
        for way in given.ways.split(","):
            (folder / way).mkdir()
            lines += _go(way, asked, hub, folder / way)
            shutil.rmtree(folder / way)
        measure.show(asked, lines, parameters=f"{asked.params} M", ranks=asked.ranks)


def _go(way: str, asked: measure.Options, hub: Path, folder: Path) -> list[measure.Line]:
    from _model import new_place

    place = new_place(folder / "run")
    job = Job(way, hub, folder, place)
    ranks = measure.on_ranks(_torch if way == "torch" else _ours, asked.ranks, job=job)
    if way != "torch":
        (exported,) = measure.on_ranks(_export, 1, job=job)
        ranks[0].rows["export"] = exported.rows["export"]
    if way == "hpctrain":
        for rank, resumed in zip(
            ranks, measure.on_ranks(_resume, asked.ranks, job=job), strict=True
        ):
            rank.rows["resume"] = resumed.rows["resume"]
    return _lines(way, ranks)


def _lines(way: str, ranks: list[Phases]) -> list[measure.Line]:
    lines = list[measure.Line]()
    for phase in PHASES:
        rows = [rank.rows[phase] for rank in ranks if phase in rank.rows]
        if not rows:
            continue
        worst = max(rows, key=lambda row: row["peak"] / row["bound"])
        goal = LIMIT if way == "hpctrain" and phase in WITHIN else None
        value, unit = f"{worst['peak'] / 1e6:,.0f} MB", f"of {worst['bound'] / 1e6:,.0f} MB"
        seconds = {"s": max(row["seconds"] for row in rows)}
        ratio = worst["peak"] / worst["bound"]
        lines.append(measure.Line(f"{way}: {phase}", value, ratio, goal, unit, seconds))
    peaks = [rank.base + max(row["peak"] for row in rank.rows.values()) for rank in ranks]
    lines.append(
        measure.Line(f"{way}: ranks together, with imports", "", sum(peaks) / 1e9, unit="GB")
    )
    return lines


# ---- each way


def _ours(world: World, job: Job) -> Phases:
    """Both ways of `run.parallelize`; a whole model is loaded while it is built."""
    import _model
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    from hpctrain.checkpoint.tensors.save import save
    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.train.engines.engine import Microbatch
    from hpctrain.train.engines.parallelize import parallelize

    config = AutoConfig.from_pretrained(job.hub)
    settings = EngineSettings(kind="fsdp2", precision="fp32", clip_norm=1.0)
    phases = Phases()
    with phases.phase("begin", world) as row:
        if job.way == "whole":
            model = LlamaForCausalLM.from_pretrained(job.hub, dtype=torch.float32)
            engine = parallelize(model, _adam(model), settings, world)
            del model
        else:
            engine = parallelize(
                lambda: LlamaForCausalLM(config), _adam, settings, world, pretrained=job.hub
            )
    shard, block = _kept(engine.model), _largest(engine.model)
    row["bound"] = shard + block
    _require_loaded(engine.model, job.hub)
    tokens = _tokens(world.rank)
    batch = [Microbatch(tokens[:, :-1], tokens[:, 1:], world.rank)]
    with phases.phase("step", world) as row:
        engine.at_step(0)
        engine.forward_backward(batch, lambda out, to: _loss(out, to) / world.world_size)
        engine.step()
    row["bound"] = 4 * shard + block  # gradients and two moments
    with phases.phase("save", world) as row:
        save(job.place, world, engine.state(), _model.manifest(job.place, world, 1))
    _without_leftovers(row, 3 * shard, block)
    return phases


def _resume(world: World, job: Job) -> Phases:
    """New ranks go on from what was saved."""
    from transformers import AutoConfig, LlamaForCausalLM

    from hpctrain.checkpoint.tensors.restore import Wanted, restore
    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.train.engines.parallelize import parallelize

    config = AutoConfig.from_pretrained(job.hub)
    settings = EngineSettings(kind="fsdp2", precision="fp32", clip_norm=1.0)
    phases = Phases()
    with phases.phase("resume", world) as row:
        engine = parallelize(
            lambda: LlamaForCausalLM(config), _adam, settings, world, is_restored=True
        )
        states = []

        def wanted(found: Manifest) -> Wanted:
            states.append(engine.state(saved={entry.name: entry for entry in found.tensors}))
            return Wanted(states[-1], frozenset(states[-1].shared))

        restored = restore(job.place, world, wanted)
        engine.apply(dict(states[-1].shared))
    assert restored.step == 1
    row["bound"] = 3 * _kept(engine.model) + _largest(engine.model)
    return phases


def _torch(world: World, job: Job) -> Phases:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as sd
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, LlamaForCausalLM

    config = AutoConfig.from_pretrained(job.hub)
    mesh = init_device_mesh("cpu", (world.world_size,))
    phases = Phases()
    with phases.phase("begin", world) as row:
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model.float()
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        rotary = model.model.rotary_emb  # a buffer that no file holds
        rotary.__init__(config)
        optimizer = _adam(model)
        whole: dict[str, Any] = {}
        if world.rank == 0:
            whole = LlamaForCausalLM.from_pretrained(job.hub, dtype=torch.float32).state_dict()
        options = sd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        sd.set_model_state_dict(model, whole, options=options)
        del whole
    shard, block = _kept(model), _largest(model)
    row["bound"] = shard + block
    _require_loaded(model, job.hub)
    tokens = _tokens(world.rank)
    with phases.phase("step", world) as row:
        _loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    row["bound"] = 4 * shard + block
    with phases.phase("save", world) as row:
        weights, moments = sd.get_state_dict(model, optimizer)
        writer = dcp.FileSystemWriter(job.folder / "dcp")
        dcp.save({"model": weights, "optimizer": moments}, storage_writer=writer)
    _without_leftovers(row, 3 * shard, block)
    with phases.phase("export", world) as row:
        options = sd.StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = dict[str, Any](sd.get_model_state_dict(model, options=options))
        if world.rank == 0:
            whole = {name: tensor.bfloat16() for name, tensor in whole.items()}
            with torch.device("meta"):
                LlamaForCausalLM(config).save_pretrained(job.folder / "out", state_dict=whole)
    row["bound"] = shard + block
    return phases


def _export(world: World, job: Job) -> Phases:  # noqa: ARG001 - alone
    from hpctrain.checkpoint.exchange import contents, export, safetensors

    phases = Phases()
    with phases.phase("export", None) as row:
        path, manifest = contents.committed(job.place.run, 1)
        tensors = export.chosen(path, manifest, everything=False, dtype="BF16", strip="")
        safetensors.write(job.folder / "out", tensors)
    row["bound"] = max(tensor.nbytes for tensor in contents.tensors(path, manifest))
    return phases


# ---- parts


def _write_weights(world: World, hub: Path, params: int) -> None:  # noqa: ARG001 - alone
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    width = 1024 if params >= 100 else 256
    layer = 4 * width**2 + 3 * width * (11 * width // 4)
    layers = max(1, round((params * 1e6 - 2 * VOCABULARY * width) / layer))
    config = LlamaConfig(
        hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, vocab_size=VOCABULARY,
        use_cache=False, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(hub)


def _without_leftovers(row: dict[str, float], kept: int, block: int) -> None:
    """What malloc has kept of a step's gradients and blocks is not the save's."""
    row["peak"] += kept - row["began"]
    row["bound"] = kept + block


def _adam(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def _loss(out: Any, following: Any) -> Any:
    import torch

    logits = out.logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def _tokens(seed: int) -> Any:
    import torch

    return torch.randint(VOCABULARY, (1, TOKENS + 1), generator=torch.Generator().manual_seed(seed))


def _kept(model: Any) -> int:
    """Bytes of this rank's part of the weights."""
    return sum(parameter.to_local().nbytes for parameter in model.parameters())


def _largest(model: Any) -> int:
    """Bytes of the parameters that FSDP2 gathers at once, at most."""
    from torch.distributed.fsdp import FSDPModule

    units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    within = {id(p): unit for unit in units for p in unit.parameters()}  # inner ones come later
    sizes = dict.fromkeys(map(id, units), 0)
    for parameter in model.parameters():
        sizes[id(within[id(parameter)])] += parameter.numel() * FP32_BYTES
    return max(sizes.values())


def _require_loaded(model: Any, hub: Path) -> None:
    """A load that gives wrong values is not worth being measured."""
    from safetensors import safe_open

    (path,) = hub.glob("*.safetensors")
    with safe_open(path, "pt") as file:
        for name, parameter in model.named_parameters():
            first = parameter.__create_chunk_list__()[0].offsets[0]
            own = parameter.to_local()
            rows = file.get_slice(name)[first : first + min(len(own), 8)].float()
            if not own[: len(rows)].equal(rows):
                raise AssertionError(f"{name} was not loaded as the file has it")


def _own_memory() -> int:
    return measure.memory("RssAnon:") + measure.memory("RssShmem:")


if __name__ == "__main__":
    main()
