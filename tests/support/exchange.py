"""Runs and checkpoints with known tensors, for tests of export and import."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.checkpoint.exchange import contents
from hpctrain.checkpoint.format import shard
from hpctrain.checkpoint.format.layout import part_of
from hpctrain.checkpoint.format.manifest import Manifest
from hpctrain.checkpoint.format.shard import SAFETENSORS, ShardPiece
from hpctrain.checkpoint.store import commit, find
from hpctrain.checkpoint.tensors.boxes import DTYPES
from hpctrain.cli.main import main
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.ledger.run.fence import take_attempt
from hpctrain.ledger.run.layout import RunDir

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DTYPES_OF_TORCH = [dtype for dtype, word in DTYPES.items() if word in SAFETENSORS]


def made_run(tmp_path: Path, name: str = "lm-1") -> RunDir:
    """A run as `submit --no-submit` leaves it."""
    run = RunDir(tmp_path / "runs" / name)
    run.root.mkdir(parents=True)
    Spec(name, f"id-of-{name}", time.time(), "local", "", Entry("recipe")).dump(run.spec)
    return run


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes, row-major."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def bits(tensors: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """Tensors as something that can be compared, NaN and all."""
    return {name: (one.dtype, tuple(one.shape), raw(one)) for name, one in tensors.items()}


def some(*, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every dtype and odd shapes, under a checkpoint's names."""
    dice = torch.Generator().manual_seed(seed)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=dice)

    tensors = {
        "model.emb.weight": floats(33, 7),
        "model.blocks.0.w": floats(8, 5, 3).to(torch.bfloat16),
        "model.blocks.0.half": floats(6).to(torch.float16),
        "model.blocks.0.double": floats(6).double(),
        "model.scalar": floats(1)[0],
        "model.none": floats(0, 3),
        "model.mask": floats(9) > 0,
        "model.f8": floats(16).to(torch.float8_e4m3fn),
        "model.f8wide": floats(16).to(torch.float8_e5m2),
        "model.complex": torch.complex(floats(4), floats(4)),
        "model.long": torch.arange(5),
        "optim.emb.weight.exp_avg": floats(33, 7),
        "optim.emb.weight.exp_avg_sq": floats(33, 7) ** 2,
        "optim.emb.weight.step": torch.tensor(3.0),
        "tracked.ema.w": floats(3),
        "rng.rank-00000.torch": torch.arange(16, dtype=torch.uint8),
    }
    for dtype in (torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64):
        tensors[f"model.{str(dtype)[6:]}"] = torch.arange(7).to(dtype)
    return tensors


def save(
    run: RunDir,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    ranks: int = 1,
    block_bytes: int = 512,
    **fields: Any,
) -> Path:
    """A committed checkpoint, its tensors cut in rows over so many files."""
    attempt = take_attempt(run, job_id=f"save-{step}", restarts=0)
    staged = commit.stage(run, step, attempt)
    parts = []
    for rank in range(ranks):
        held = [one for item in tensors.items() if (one := _share(*item, rank, ranks))]
        pieces = [piece for piece, _ in held]
        sources = [memoryview(content) for _, content in held]
        path = staged / shard.file_name(rank)
        report = shard.write(path, pieces, sources, block_bytes=block_bytes)
        parts.append(part_of(pieces, report))
    known = {"data": {"samples_consumed": step * 8}, "extra": {"sched": {"best": 0.5}}}
    manifest = Manifest(
        run_id="r", name=run.name, step=step, mesh={"dp": ranks}, engine="ddp",
        block_bytes=block_bytes, **{"world_size": ranks, **known, **fields},
    )  # fmt: skip
    commit.write_table(staged, manifest, parts)
    return commit.publish(run, staged, manifest, attempt)


def _share(
    name: str, tensor: torch.Tensor, rank: int, ranks: int
) -> tuple[ShardPiece, bytes] | None:
    dtype, shape = DTYPES[tensor.dtype], tuple(tensor.shape)
    if not shape or shape[0] < ranks:
        whole = ShardPiece(name, dtype, shape, (0,) * len(shape), shape)
        return (whole, raw(tensor)) if rank == 0 else None
    low, high = shape[0] * rank // ranks, shape[0] * (rank + 1) // ranks
    begin = (low, *(0,) * (len(shape) - 1))
    return ShardPiece(name, dtype, shape, begin, (high - low, *shape[1:])), raw(tensor[low:high])


def loaded(run: RunDir, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a committed checkpoint, through the reader that training uses."""
    words = {word: dtype for dtype, word in DTYPES.items()}
    path, manifest = contents.committed(run, step)
    found = {}
    for one in contents.tensors(path, manifest):
        flat = torch.tensor(one.read()) if one.nbytes else torch.empty(0, dtype=torch.uint8)
        found[one.name] = flat.view(words[one.dtype]).reshape(one.shape)
    return found


def model_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights, without `model.`."""
    return {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}


class Commands:
    """`hpctrain checkpoints` in this process: exit code, stdout, stderr.

    Without the line by which imports warn of a fault in the installed torch, where it is an old one
    (tests/unit/checkpoint/exchange/test_exchange_untrusted.py holds it).
    """

    def __init__(self, runs: Path, capsys: Any) -> None:
        self.runs = runs
        self._capsys = capsys

    def __call__(self, *words: object) -> tuple[int, str, str]:
        """Run one."""
        self._capsys.readouterr()
        code = main(["checkpoints", "--runs", str(self.runs), *map(str, words)])
        captured = self._capsys.readouterr()
        said = captured.err.splitlines(keepends=True)
        return code, captured.out, "".join(line for line in said if "CVE-2026-24747" not in line)

    def refused(self, *words: object) -> str:
        """The one line of a command that is refused."""
        code, out, err = self(*words)
        assert code > 1, (code, out, err)
        assert out == ""
        assert err.count("\n") == 1, err
        assert err.startswith("hpctrain: error: "), err
        return err.removeprefix("hpctrain: error: ").strip()


def names_in(run: RunDir) -> list[str]:
    """What lies in the directory of checkpoints."""
    there = run.checkpoints.iterdir() if run.checkpoints.is_dir() else []
    return sorted(path.name for path in there)


def steps(run: RunDir) -> list[int]:
    """The steps that have a checkpoint."""
    return find.steps(run)
