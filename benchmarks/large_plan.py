"""What one rank of many does before it trains a model of 70 or 405 B parameters; no weight is made.

One process stands for a rank among 64 to 512, in torch's process group "fake", whose collectives
move nothing. By Llama's configurations: the model on the meta device, cut over the mesh; memory for
this rank's shards, which nothing touches; what of a checkpoint it reads, weights and moments; and
the table of such a checkpoint, by FSDP2 alone, which has more chunks. Seconds and resident memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import _measure as measure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.checkpoint.format.layout import RankPart

SIZES: dict[str, dict[str, int]] = {
    "70B": {
        "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128_256,
    },
    "405B": {
        "hidden_size": 16_384, "intermediate_size": 53_248, "num_hidden_layers": 126,
        "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128_256,
    },
}  # fmt: skip
CASES = (
    ("70B", 64, 1), ("70B", 64, 8), ("70B", 512, 1), ("70B", 512, 8),
    ("405B", 64, 8), ("405B", 256, 8), ("405B", 512, 1), ("405B", 512, 8),
)  # fmt: skip
NODE_RANKS = 8
LIMIT_S = 10.0


def main() -> None:
    """Each case in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", action="append", help="such as 70B:64:8 (model, ranks, tp)")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    asked = measure.Options(0, 1, 1, tempfile.gettempdir(), given.json)
    named = [case.split(":") for case in given.case or ()]
    cases = [(size, int(ranks), int(tp)) for size, ranks, tp in named] or CASES
    lines = list[measure.Line]()
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for case in cases:
            lines += _lines(case, pool.apply(_case, case))
    measure.show(asked, lines)


def _lines(case: tuple[str, int, int], rows: dict[str, Any]) -> list[measure.Line]:
    size, ranks, tp = case
    which = f"{size}, {ranks} ranks, tp {tp}"
    lines = [
        measure.Line(f"{which}: {name}", row["text"], row["s"], LIMIT_S, "s")
        for name, row in rows["phases"].items()
    ]
    lines.append(
        measure.Line(
            f"{which}: {rows['text']}",
            "",
            sum(row["s"] for row in rows["phases"].values()),
            unit="s",
        )
    )
    return lines


def _case(size: str, ranks: int, tp: int) -> dict[str, Any]:
    """One rank's life until it trains: the last one's, whose shards may be the odd ones."""
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from hpctrain.checkpoint.tensors.boxes import held
    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.train.engines.parallelize import parallelize
    from tests.support.fake_ranks import rank_of

    config = LlamaConfig(**SIZES[size], use_cache=False)
    settings = EngineSettings(kind="fsdp2", precision="bf16", tp=str(tp))
    phases: dict[str, dict[str, Any]] = {}
    with rank_of(ranks - 1, ranks, ranks_per_node=NODE_RANKS) as world:
        with _phase(phases, "model on meta, cut"):
            engine = parallelize(
                lambda: LlamaForCausalLM(config),
                lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
                settings, world, is_restored=True,
            )  # fmt: skip
        with _phase(phases, "what it reads"):
            boxes = held(engine.state(with_optimizer=False), world)
        weights = sum(box.piece.nbytes for box in boxes)
        shapes = {box.piece.name: box.piece.shape for box in boxes}
    table_bytes = _metadata(phases, shapes, ranks)
    text = f"{weights / 1e9:.2f} + {2 * weights / 1e9:.2f} GB; table {table_bytes / 1e6:.0f} MB"
    return {"phases": phases, "text": text}


def _metadata(
    phases: dict[str, dict[str, Any]], shapes: dict[str, tuple[int, ...]], ranks: int
) -> int:
    """What rank 0 makes of all ranks' words at a save, and what each rank makes of it at a load."""
    import pickle

    from hpctrain.checkpoint.format import index, layout, table
    from hpctrain.checkpoint.format.manifest import Manifest

    names = {
        name.replace("model.", kind, 1) + moment: shape
        for name, shape in shapes.items()
        for kind, moment in (("model.", ""), ("optim.", ".exp_avg"), ("optim.", ".exp_avg_sq"))
    }
    sent = [pickle.dumps(_part(rank, ranks, names)) for rank in range(ranks)]
    about = Manifest(
        run_id="bench", name="bench", step=1, world_size=ranks, mesh={}, engine="fsdp2"
    )
    with _phase(phases, "table made by rank 0"):
        parts = [pickle.loads(one) for one in sent]  # noqa: S301 - our own bytes
        files, about.tensors, whole = layout.assemble(parts, about.block_bytes)
        content = whole.dump()
        about.files = [*files, table.entry_of(content)]
    del parts, whole, sent
    with _phase(phases, "table read by a rank"):
        index.parse(content, about)
    return len(content)


def _part(rank: int, ranks: int, names: dict[str, tuple[int, ...]]) -> RankPart:
    """What a rank has to say that has some rows of every tensor."""
    import numpy as np

    from hpctrain.checkpoint.format import shard
    from hpctrain.checkpoint.format.layout import part_of
    from hpctrain.checkpoint.format.shard import ShardPiece, ShardReport

    pieces = list[ShardPiece]()
    for name, shape in names.items():
        rows = -(-shape[0] // ranks)
        first = min(rank * rows, shape[0])
        begin, extent = (first, *[0] * (len(shape) - 1)), (min(rows, shape[0] - first), *shape[1:])
        pieces += [ShardPiece(name, "F32", shape, begin, extent)] * (extent[0] > 0)
    offsets = np.cumsum([80_000, *(piece.nbytes for piece in pieces)], dtype=np.int64)
    blocks = sum(shard.blocks_of(piece.nbytes) for piece in pieces)
    digests = np.random.default_rng(rank).integers(0, 2**64 - 1, blocks, dtype=np.uint64)
    digest = "xxh3_64-blocks:" + "0" * 16
    name = shard.file_name(rank)
    size = int(offsets[-1]) + shard.proof_bytes(blocks)
    return part_of(pieces, ShardReport(name, size, digest, 80_000, offsets[:-1], digests))


@contextmanager
def _phase(phases: dict[str, dict[str, Any]], name: str) -> Iterator[None]:
    peak, began = measure.Peak(), time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    # What the process has freed, and taken again, tells nothing.
    text = f"{peak.nbytes / 1e6:,.0f} MB" if peak.nbytes > 0 else ""
    phases[name] = {"s": seconds, "text": text}


if __name__ == "__main__":
    main()
