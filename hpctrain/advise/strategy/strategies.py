"""The ways to spread a model over GPUs, from simple to complex, and what each asks of the cluster.

`candidates` lists them for so many nodes and GPUs, in the order in which the first that fits is
taken; a way that the model or the cluster cannot have says why, and so does one that is shown but
never taken by itself. `adapted` lists those that train adapters alone. Pure.
tests/unit/strategy/test_strategies.py holds the order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpctrain.advise.strategy.activations import FP32
from hpctrain.advise.strategy.facts import LLAMA, MOE, ModelFacts
from hpctrain.advise.strategy.memory import Spread
from hpctrain.advise.strategy.peaks import MICROBATCHES
from hpctrain.ledger.plan.mesh import divisors

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Machines:
    """What there is to train on."""

    nodes: int  # of the job
    gpus: int  # of a node
    memory: int | None = None  # bytes of a node's own; None where it is not known

    @property
    def ranks(self) -> int:
        """One for each GPU."""
        return self.nodes * self.gpus


@dataclass(frozen=True)
class Strategy:
    """One way."""

    key: str  # for programs, and `--strategy`
    title: str  # for people
    layout: Spread  # how the model lies on the ranks
    data_ranks: int  # ranks that have samples of their own
    impossible: str = ""  # why it cannot be had here; empty where it can
    aside: str = ""  # why it is shown and never taken by itself; empty for the others
    elsewhere: str = ""  # what another engine or model does for it; empty for hpctrain's own rows

    @property
    def ranks(self) -> int:
        """GPUs that it uses."""
        return self.data_ranks * self.layout.tp * self.layout.pp

    @property
    def least_passes(self) -> int:
        """Of a step: a pipeline waits for too long with fewer."""
        return MICROBATCHES * self.layout.pp if self.layout.pp > 1 else 1


def candidates(model: ModelFacts, cluster: Machines, *, low: int = 2) -> list[Strategy]:
    """Every way that trains all weights, the simplest first."""
    plain = [*_copied(cluster, low), *_sharded(cluster, low)]
    kept = [_changed(way, "selective", selective="products") for way in plain if _is_plain(way)]
    again = [_recomputing(way) for way in plain]
    cut = list(_cut(model, cluster, low))
    piped = list(_piped(model, cluster, low))
    shared = list(_shared_experts(model, cluster, low))
    more = [each for ways in (cut, piped, shared) for each in (*ways, *map(_recomputing, ways))]
    return [*plain, *kept, *again, *_offloaded(again), *more]


FUSED = "norms, activations and loss of one kernel each (Liger, MPT's own, torch.compile)"
HALF = "torchtitan's selective recomputation; hpctrain's keeps every matrix product"
BF16 = "weights, gradients, moments and loss in bf16 (torchtune, KempnerForge); hpctrain keeps fp32"
BF16_WEIGHTS = "weights and gradients in bf16, moments in fp32; hpctrain keeps all in fp32"
LOSS_PARALLEL = "a loss cut over the tp ranks (torchtitan, Megatron-LM)"
FROZEN = "frozen weights, adapters and loss in bf16 (litgpt, torchtune); hpctrain keeps fp32"
PEFT = "frozen weights in bf16, adapters and loss in fp32 (peft); hpctrain keeps all in fp32"


def of_other_engines(
    model: ModelFacts, cluster: Machines, *, low: int = 2, lora: int = 0
) -> list[Strategy]:
    """Return what other engines hold, for comparison: rows of memory and time, never taken.

    `low` is the bytes of a number in products; in fp32 there are no such rows. `lora` is the rank
    of adapters; 0 means all weights.
    """
    if low == FP32:
        return []
    if lora:
        ours = adapted(model, cluster, lora, asked=True)
        theirs = [_elsewhere(way, "bf16", FROZEN, stored=low, loss=low) for way in ours]
        return theirs + [_elsewhere(way, "peft", PEFT, stored=low, casts=True) for way in ours]
    bases = [way for way in (*_copied(cluster, low), *_sharded(cluster, low)) if _is_plain(way)]
    shown = [way for way in bases if not way.aside]
    in_16_bits = {"stored": low, "moment": low, "loss": low}
    ways = [_elsewhere(way, "fused", FUSED, fused=True) for way in shown]
    ways += [_elsewhere(way, "half", HALF, selective="half") for way in bases[-1:]]
    for way in (*shown, *map(_recomputing, bases[-1:])):
        ways.append(_elsewhere(way, "bf16", BF16, **in_16_bits))
        ways.append(_elsewhere(way, "bf16-weights", BF16_WEIGHTS, stored=low))
    cut = [_recomputing(way) for way in _cut(model, cluster, low)]
    ways += [_elsewhere(way, "loss-parallel", LOSS_PARALLEL, loss_parallel=True) for way in cut]
    return [*ways, *(_elsewhere(way, "bf16", BF16, **in_16_bits) for way in cut)]


def _is_plain(way: Strategy) -> bool:
    """Return whether it copies the model, or shards all of it once."""
    layout = way.layout
    return layout.kind in {"single", "ddp", "fsdp2"} and layout.reshard and layout.copies == 1


def _elsewhere(way: Strategy, name: str, what: str, **layout: Any) -> Strategy:
    way = _changed(way, name, **layout)
    return replace(way, aside=f"another engine's: {what}", elsewhere=what)


def adapted(
    model: ModelFacts, cluster: Machines, rank: int, *, asked: bool, low: int = 2
) -> list[Strategy]:
    """Return hpctrain's ways to train adapters of this rank alone.

    Unless `asked`, they are shown for comparison. `low` is the bytes of a number in products.
    """
    kinds = ("single", "ddp", "fsdp2")
    plain = [way for way in (*_copied(cluster, low), *_sharded(cluster, low)) if way.key in kinds]
    ways = [_adapting(model, way, rank, asked=asked) for way in plain]
    return ways + [_recomputing(way) for way in ways]


def _adapting(model: ModelFacts, way: Strategy, rank: int, *, asked: bool) -> Strategy:
    why = "" if model.family == LLAMA else "adapters are counted on decoders like Llama alone"
    aside = way.aside or ("" if asked else f"trains adapters alone: ask for it with --lora {rank}")
    return replace(
        way,
        key=f"lora-{way.key}",
        title=f"LoRA {rank}, {way.title}",
        layout=replace(way.layout, lora=rank),
        impossible=way.impossible or why,
        aside=aside,
    )


def _changed(way: Strategy, name: str, **layout: Any) -> Strategy:
    """Return a way with another layout, and a name behind its key and title."""
    changed = replace(way.layout, **layout)
    return replace(way, key=f"{way.key}+{name}", title=f"{way.title}, {name}", layout=changed)


def _recomputing(way: Strategy) -> Strategy:
    return _changed(way, "recompute", recompute=True)


def _copied(cluster: Machines, low: int) -> Iterator[Strategy]:
    single = "" if cluster.ranks == 1 else f"uses 1 of {cluster.ranks} GPUs"
    yield Strategy("single", "one GPU", Spread("single", low=low), 1, aside=single)
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


def _offloaded(ways: list[Strategy]) -> Iterator[Strategy]:
    """What shards everything may rest on the host; only with blocks computed again, as before."""
    for way in ways:
        if way.layout.kind in {"fsdp2", "zero3"} and way.layout.reshard and way.layout.copies == 1:
            yield _changed(way, "offload", offload=True)


def _piped(model: ModelFacts, cluster: Machines, low: int) -> Iterator[Strategy]:
    """Stages lie across nodes where there are several; each is sharded over its ranks."""
    across = cluster.nodes if cluster.nodes > 1 else cluster.gpus
    for pp in [n for n in divisors(across) if n > 1]:
        rest = cluster.ranks // pp
        layout = Spread("fsdp2", shards=rest, pp=pp, low=low)
        yield Strategy(f"pp{pp}", f"PP {pp} x FSDP2 {rest}", layout, rest, pp_misfit(model, pp))


def _shared_experts(model: ModelFacts, cluster: Machines, low: int) -> Iterator[Strategy]:
    """Experts are shared in a node; a model without any has no such way."""
    if model.family != MOE:
        return
    aside = (
        "engine.ep takes no model of Hugging Face: put the experts into a module of their own "
        "(`hpctrain help plan.md`)"
    )
    for ep in [n for n in divisors(cluster.gpus) if n > 1]:
        layout = Spread("fsdp2", shards=cluster.ranks, ep=ep, low=low)
        why = f"ep {ep} does not divide {model.experts} experts" if model.experts % ep else ""
        title = f"EP {ep} x FSDP2 {cluster.ranks // ep}"
        yield Strategy(f"ep{ep}", title, layout, cluster.ranks, why, aside)


def pp_misfit(model: ModelFacts, pp: int) -> str:
    """Why a model cannot be cut into so many stages; empty where it can."""
    if model.family != LLAMA:
        return "hpctrain cuts decoders like Llama into stages"
    if model.layers < pp:
        return f"{pp} stages need {pp} blocks, and there are {model.layers}"
    return ""


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
