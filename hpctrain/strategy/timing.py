"""How long a step takes by arithmetic, and what travels for it; not known where a fact is missing.

Compute is the model's operations by a share of the GPU's peak (`SHARE_OF_PEAK`), traffic is bytes
by the link's rate, and the longer of the two counts: they overlap at best. A floor for planning, no
promise. Pure. tests/unit/strategy/test_timing.py holds the volumes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.strategy.activations import FP32

if TYPE_CHECKING:
    from hpctrain.strategy.facts import ModelFacts
    from hpctrain.strategy.hardware import Accelerator
    from hpctrain.strategy.memory import Batch
    from hpctrain.strategy.strategies import Machines, Strategy

SHARE_OF_PEAK = 0.4
"""What large transformers reach in training: 38 to 43 % for Llama 3 405B on up to 16,384 H100
("The Llama 3 Herd of Models", 2024, table 4); less with little work for each GPU."""
AROUND = 0.25
"""The estimate is no better than this either way."""


@dataclass(frozen=True)
class Links:
    """How fast a GPU sends, bytes/s; None where it is not known.

    Attributes:
        inside: To others of its node.
        between: To other nodes, this GPU's share of the node's adapters.
    """

    inside: float | None
    between: float | None


@dataclass(frozen=True)
class Traffic:
    """Bytes that one GPU sends in a step.

    Attributes:
        inside: At most to others of its node.
        between: To ranks on other nodes too.
    """

    inside: float
    between: float

    @property
    def nbytes(self) -> float:
        """Of both."""
        return self.inside + self.between


@dataclass(frozen=True)
class StepTime:
    """Of one step.

    Attributes:
        seconds: None where it is not known.
        compute_s: The part that is products; None where the GPU's peak is not known.
        traffic_s: The part that travels; None where a rate is not known.
        basis: What it rests on, or what is missing.
    """

    seconds: float | None
    compute_s: float | None
    traffic_s: float | None
    basis: str


def flops_of_step(model: ModelFacts, batch: Batch, way: Strategy) -> float:
    """FLOP of one GPU in a step.

    Two for each weight and token, thrice: forward, and twice that backward; and attention's
    products of positions, 12 times layers x width x sequence for a token, half of it where
    positions see only those before them. Recomputation adds a forward pass of the blocks.
    """
    causal = 1.0 if model.family == "bert" else 0.5
    attention = 12 * model.layers * model.query * batch.seq * causal
    token = 6 * model.active_params + attention
    if way.layout.recompute:
        blocks = 2 * (model.active_params - model.vocab * model.hidden)
        token += blocks + attention / 3
    return token * batch.tokens * batch.passes / way.layout.tp


def traffic_of_step(model: ModelFacts, batch: Batch, way: Strategy, cluster: Machines) -> Traffic:
    """What a GPU sends: a ring's (n - 1) / n of the bytes at each gather and each reduction."""
    layout, low = way.layout, way.layout.low
    params = model.params / layout.tp
    inside = between = 0.0

    def add(nbytes: float, ranks: int, *, stays: bool) -> None:
        nonlocal inside, between
        sent = nbytes * (ranks - 1) / ranks
        inside, between = (inside + sent, between) if stays else (inside, between + sent)

    fits = cluster.nodes == 1
    if layout.kind == "ddp":
        add(2 * FP32 * params, way.data_ranks, stays=fits)
    elif layout.kind == "fsdp2":
        stays = fits or layout.shards * layout.tp <= cluster.gpus
        gathers = 2 * batch.passes if layout.reshard else batch.passes
        add(gathers * low * params, layout.shards, stays=stays)
        add(FP32 * params, layout.shards, stays=stays)
        add(2 * FP32 * params / layout.shards, layout.copies, stays=fits)
    elif layout.kind.startswith("zero"):
        reductions = 1 if layout.kind == "zero1" else batch.passes
        gathers = 2 * batch.passes if layout.kind == "zero3" else 1
        add(low * params * (reductions + gathers), layout.shards, stays=fits)
    # Attention and MLP: a gather and a reduction of positions each, forward and backward; one more
    # gather of each for the gradients of their weights.
    positions = 10 * model.layers * low * model.hidden * batch.tokens * batch.passes
    add(positions, layout.tp, stays=True)
    return Traffic(inside, between)


def step_time(flops: float, traffic: Traffic, gpu: Accelerator, links: Links) -> StepTime:
    """By arithmetic; not known where the GPU's peak or a link that is used is not."""
    compute = None if gpu.flops is None else flops / (gpu.flops * SHARE_OF_PEAK)
    sides = ((traffic.inside, links.inside, "in a node"), (traffic.between, links.between, "nodes"))
    missing = [f"the rate between {place}" if place == "nodes" else f"the rate {place}"
               for nbytes, rate, place in sides if nbytes and not rate]  # fmt: skip
    sent = None if missing else sum(n / rate for n, rate, _ in sides if n and rate)
    if compute is None:
        missing.insert(0, f"the peak of {gpu.name}")
    if compute is None or sent is None:
        return StepTime(None, compute, sent, f"not known: {', '.join(missing)}")
    basis = f"{SHARE_OF_PEAK:.0%} of {gpu.name}'s peak, links at their rate; formula only"
    return StepTime(max(compute, sent), compute, sent, basis)
