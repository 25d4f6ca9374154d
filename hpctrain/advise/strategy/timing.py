"""How long a step takes by arithmetic, and what travels for it; not known where a fact is missing.

Compute is the model's operations by a share of the GPU's peak (`utilization`), traffic is bytes by
the link's rate, and the longer of the two counts: they overlap at best. Published runs say how far
that holds (tests/unit/strategy/test_published.py). Pure. tests/unit/strategy/test_timing.py holds
the volumes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.advise.strategy.activations import FP32, products_of
from hpctrain.advise.strategy.utilization import share_of

if TYPE_CHECKING:
    from hpctrain.advise.strategy.facts import ModelFacts
    from hpctrain.advise.strategy.hardware import Accelerator
    from hpctrain.advise.strategy.memory import Batch, Spread
    from hpctrain.advise.strategy.strategies import Machines, Strategy


@dataclass(frozen=True)
class Links:
    """How fast a GPU sends, bytes/s; None where it is not known.

    Attributes:
        inside: To others of its node.
        between: To other nodes, this GPU's share of the node's adapters.
        host: To the memory of its own node.
    """

    inside: float | None
    between: float | None
    host: float | None = None


@dataclass(frozen=True)
class Traffic:
    """Bytes that one GPU sends in a step.

    Attributes:
        inside: At most to others of its node.
        between: To ranks on other nodes too.
        host: To and from the memory of its node, where state is offloaded.
    """

    inside: float
    between: float
    host: float = 0.0

    @property
    def nbytes(self) -> float:
        """Of all three."""
        return self.inside + self.between + self.host


@dataclass(frozen=True)
class StepTime:
    """Of one step.

    Attributes:
        seconds: None where it is not known.
        compute_s: The part that is products; None where the GPU's peak is not known.
        traffic_s: The part that travels; None where a rate is not known.
        basis: What it rests on, or what is missing.
        least_s: At the highest share of the peak that published runs of this kind reached.
        most_s: At the lowest.
    """

    seconds: float | None
    compute_s: float | None
    traffic_s: float | None
    basis: str
    least_s: float | None = None
    most_s: float | None = None


def flops_of_step(model: ModelFacts, batch: Batch, way: Strategy) -> float:
    """FLOP of one GPU in a step.

    Two for each weight and token, thrice: forward, and twice that backward; and attention's
    products of positions, 12 times layers x width x sequence for a token, half of it where
    positions see only those before them. Recomputation adds a forward pass of the blocks. Frozen
    weights have no gradients: two for each, twice. A stage of a pipeline has its part of the model,
    and waits for the others (`bubble`).
    """
    causal = 1.0 if model.family == "bert" else 0.5
    attention = 12 * model.layers * model.query * batch.seq * causal
    token = (4 if way.layout.lora else 6) * model.active_params + attention
    if way.layout.recompute:
        blocks = 2 * (model.active_params - model.vocab * model.hidden)
        token += blocks + attention / 3
    if way.layout.selective == "half":
        token += 2 * model.layers * sum(out * into for out, into in products_of(model)[1::2])
    token += 6 * model.layers * model.adapter_params(way.layout.lora)
    own = token * batch.tokens * batch.passes / way.layout.tp / way.layout.pp
    return own / (1 - bubble(batch, way))


def bubble(batch: Batch, way: Strategy) -> float:
    """Share of a step in which a pipeline's rank waits: (p - 1) / (m + p - 1), under 1F1B.

    For p stages and m microbatches: Huang et al., GPipe, 2019; 1F1B has the same.
    """
    waits = way.layout.pp - 1
    return waits / (batch.passes + waits)


def traffic_of_step(model: ModelFacts, batch: Batch, way: Strategy, cluster: Machines) -> Traffic:
    """What a GPU sends: a ring's (n - 1) / n of the bytes at each gather and each reduction."""
    layout, low = way.layout, way.layout.low
    params = model.params / layout.tp / layout.pp
    learnt = model.layers * model.adapter_params(layout.lora) if layout.lora else params
    experts = model.layers * model.expert_params if layout.ep > 1 else 0  # cut over other ranks
    inside = between = 0.0
    beside = max(1, cluster.gpus // layout.tp)

    def add(nbytes: float, ranks: int, *, stays: bool, beside: int = beside) -> None:
        """Count a ring over ranks of which `beside` lie in one node: one of these leaves it."""
        nonlocal inside, between
        sent = nbytes * (ranks - 1) / ranks
        out = 0.0 if stays else sent / beside
        inside, between = inside + sent - out, between + out

    fits = cluster.nodes == 1
    if layout.kind == "ddp":
        add(2 * FP32 * learnt, way.data_ranks, stays=fits)
    elif layout.kind == "fsdp2":
        stays = fits or layout.shards * layout.tp <= cluster.gpus
        each = _gathers(batch, layout) * low
        add(each * (params - experts), layout.shards, stays=stays)
        reductions = batch.passes if layout.each_pass else 1
        add(FP32 * (learnt - experts) * reductions, layout.shards, stays=stays)
        add((each + FP32) * experts / layout.ep, layout.shards // layout.ep, stays=stays)
        add(2 * FP32 * learnt / layout.shards, layout.copies, stays=fits, beside=1)
    elif layout.kind.startswith("zero"):
        reductions = 1 if layout.kind == "zero1" else batch.passes
        gathers = 2 * batch.passes if layout.kind == "zero3" else 1
        add(low * params * (reductions + gathers), layout.shards, stays=fits)
    # Attention and MLP: a gather and a reduction of positions each, forward and backward; one more
    # gather of each for the gradients of their weights.
    tokens = batch.tokens * batch.passes
    add(10 * model.layers * low * model.hidden * tokens, layout.tp, stays=True)
    # Tokens go to their experts and back, in the forward and in the backward pass.
    add(4 * model.layers * model.routed * low * model.hidden * tokens, layout.ep, stays=True)
    # A stage hands activations on, and gradients back.
    handed = 2 * low * model.hidden * tokens * (layout.pp > 1)
    inside, between = (inside + handed, between) if fits else (inside, between + handed)
    return Traffic(inside, between, _to_host(params, batch, layout))


def _gathers(batch: Batch, layout: Spread) -> int:
    """How often a step gathers each weight; a stage of a pipeline does so once."""
    if layout.pp > 1:
        return 1
    return 2 * batch.passes if layout.reshard else batch.passes


def _to_host(params: float, batch: Batch, layout: Spread) -> float:
    """Of a rank's shards: read for each gather in fp32 (DeepSpeed's in 16 bits), gradients back."""
    if not layout.offload:
        return 0.0
    read = FP32 if layout.kind == "fsdp2" else layout.low
    returned = FP32 * (1 if layout.kind == "fsdp2" else batch.passes)
    return params / layout.shards * (2 * batch.passes * read + returned)


def step_time(
    flops: float,
    traffic: Traffic,
    gpu: Accelerator,
    links: Links,
    layout: Spread | None = None,
) -> StepTime:
    """Compute a step's time; not known if the GPU's peak or the rate of a used link is not.

    `flops` and `traffic` are of one GPU. `layout` says what is computed again, which decides on the
    share of the peak.
    """
    sides = (
        (traffic.inside, links.inside, "in a node"),
        (traffic.between, links.between, "nodes"),
        (traffic.host, links.host, "to the host (--host-gbs)"),
    )
    # A ring over nodes is as slow as what leaves them: its part in a node need not be known.
    slow = traffic.between and (layout is None or layout.tp == 1)
    missing = [f"the rate between {place}" if place == "nodes" else f"the rate {place}"
               for nbytes, rate, place in sides
               if nbytes and not rate and not (slow and place == "in a node")]  # fmt: skip
    sent = None if missing else sum(n / rate for n, rate, _ in sides if n and rate)
    share = share_of(gpu.family, layout)
    compute = None if gpu.flops is None else flops / (gpu.flops * share.typical)
    if compute is None:
        missing.insert(0, f"the peak of {gpu.name}")
    if compute is None or sent is None:
        return StepTime(None, compute, sent, f"not known: {', '.join(missing)}")
    basis = f"{share.basis} of {gpu.name}'s peak, links at their rate"
    if traffic.host:
        basis += "; the host's own update of the weights is not in it"
    slowest, fastest = (compute * share.typical / edge for edge in (share.low, share.high))
    return StepTime(
        max(compute, sent), compute, sent, basis, max(fastest, sent), max(slowest, sent)
    )
