"""The ways to spread a model over GPUs, from simple to complex, and what each asks of the cluster.

`candidates` lists them for so many nodes and GPUs, in the order in which the first that fits is
taken; a way that the model or the cluster cannot have says why. Pure.
tests/unit/strategy/test_strategies.py holds the order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpctrain.plan.mesh import divisors
from hpctrain.strategy.activations import FP32
from hpctrain.strategy.facts import LLAMA
from hpctrain.strategy.memory import Spread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.strategy.facts import ModelFacts


@dataclass(frozen=True)
class Machines:
    """What there is to train on.

    Attributes:
        nodes: Of the job.
        gpus: Of a node.
    """

    nodes: int
    gpus: int

    @property
    def ranks(self) -> int:
        """One for each GPU."""
        return self.nodes * self.gpus


@dataclass(frozen=True)
class Strategy:
    """One way.

    Attributes:
        key: For programs, and `--strategy`.
        title: For people.
        layout: How the model lies on the ranks.
        data_ranks: Ranks that have samples of their own.
        impossible: Why it cannot be had here; empty where it can.
    """

    key: str
    title: str
    layout: Spread
    data_ranks: int
    impossible: str = ""

    @property
    def ranks(self) -> int:
        """GPUs that it uses."""
        return self.data_ranks * self.layout.tp


def candidates(model: ModelFacts, cluster: Machines, *, low: int = 2) -> list[Strategy]:
    """Every way, the simplest first."""
    plain = [*_copied(cluster, low), *_sharded(cluster, low)]
    cut = list(_cut(model, cluster, low))
    return [*plain, *map(_recomputing, plain), *cut, *map(_recomputing, cut)]


def _recomputing(way: Strategy) -> Strategy:
    layout = replace(way.layout, recompute=True)
    return replace(way, key=f"{way.key}+recompute", title=f"{way.title}, recompute", layout=layout)


def _copied(cluster: Machines, low: int) -> Iterator[Strategy]:
    single = "" if cluster.ranks == 1 else f"uses 1 of {cluster.ranks} GPUs"
    yield Strategy("single", "one GPU", Spread("single", low=low), 1, single)
    if cluster.ranks > 1:
        yield Strategy("ddp", f"DDP x{cluster.ranks}", Spread("ddp", low=low), cluster.ranks)


def _sharded(cluster: Machines, low: int) -> Iterator[Strategy]:
    ranks = cluster.ranks
    if ranks == 1:
        return
    whole = Spread("fsdp2", shards=ranks, low=low)
    kept = replace(whole, reshard=False)
    yield Strategy("fsdp2-no-reshard", f"FSDP2 no reshard x{ranks}", kept, ranks)
    if low != FP32:
        for stage in (1, 2):
            layout = Spread(f"zero{stage}", shards=ranks, low=low)
            yield Strategy(f"zero{stage}", f"DeepSpeed ZeRO-{stage} x{ranks}", layout, ranks)
    yield Strategy("fsdp2", f"FSDP2 x{ranks}", whole, ranks)
    if low != FP32:
        layout = Spread("zero3", shards=ranks, low=low)
        yield Strategy("zero3", f"DeepSpeed ZeRO-3 x{ranks}", layout, ranks)
    if cluster.nodes > 1 and cluster.gpus > 1:
        hybrid = replace(whole, shards=cluster.gpus, copies=cluster.nodes)
        title = f"HSDP {cluster.nodes} copies x {cluster.gpus} shards"
        yield Strategy("hsdp", title, hybrid, ranks)


def _cut(model: ModelFacts, cluster: Machines, low: int) -> Iterator[Strategy]:
    """Tensor parallel ranks lie in one node; what each has is sharded over the others."""
    for tp in [n for n in divisors(cluster.gpus) if n > 1]:
        rest = cluster.ranks // tp
        layout = Spread("fsdp2", shards=rest, tp=tp, low=low)
        why = tp_misfit(model, tp)
        yield Strategy(f"tp{tp}", f"TP {tp} x FSDP2 {rest}", layout, rest, why)


def tp_misfit(model: ModelFacts, tp: int) -> str:
    """Why a model's matrices cannot be cut over so many ranks; empty where they can."""
    if model.family != LLAMA:
        return "hpctrain cuts decoders like Llama along tp"
    for size, name in (
        (model.heads, "heads"),
        (model.kv_heads, "key and value heads"),
        (model.inner, "the MLP's width"),
        (model.vocab, "the vocabulary"),
    ):
        if size % tp:
            return f"tp {tp} does not divide {name} {size:,}"
    return ""
