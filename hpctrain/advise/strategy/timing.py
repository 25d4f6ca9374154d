"""How long a step takes by arithmetic, and what travels for it; not known where a fact is missing.

Compute is the model's work (`work_of_step`) by a share of the GPU's peak, traffic is bytes by the
link's rate, and the longer of the two counts: they overlap at best. utilization.toml has the share
that tuned programs reach, and the range in which published runs lie around the plan. Pure.
tests/unit/strategy/test_published.py holds that against published runs, test_timing.py the volumes.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.advise.strategy.activations import FP32, products_of

if TYPE_CHECKING:
    from hpctrain.advise.strategy.facts import ModelFacts
    from hpctrain.advise.strategy.hardware import Accelerator
    from hpctrain.advise.strategy.memory import Batch, Spread
    from hpctrain.advise.strategy.strategies import Machines, Strategy

ANY = "any"
"""Family of the rows for GPUs without published runs: the lowest of all families counts."""
ALIKE = {"h200": "h100", "gh200": "h100"}
"""GPUs with the compute of another one."""
MOST_OPERATIONS = 4 / 3
"""Of a step that computes each block again, to one that does not: it takes no less time, though
published runs with recomputation may come from better tuned programs than those without."""


def kind_of(layout: Spread) -> str:
    """Return the kind of run: "plain", "half", "full", or "tp" where matrices are cut."""
    if layout.tp > 1:
        return "tp"
    return "full" if layout.recompute else "half" if layout.selective == "half" else "plain"


def share_of(family: str, layout: Spread) -> tuple[float, str]:
    """Return the share of the peak for a kind of run, and the family of GPUs that it is known of.

    Where no such run was published, that of the GPU with the same compute counts; else the GPU's
    own runs without recomputation, slowed as on other GPUs (`any`).
    """
    kind = kind_of(layout)
    share, measured_on = _of_kind(family, kind)
    if kind == "full":
        share = min(share, MOST_OPERATIONS * _of_kind(family, "plain")[0])
    return share, measured_on


def _of_kind(family: str, kind: str) -> tuple[float, str]:
    table = _read()
    for key in (family, ALIKE.get(family, "")):
        if kind in table.get(key, {}):
            return table[key][kind], key
    lowest = table[ANY]
    own = table.get(family, lowest).get("plain", lowest["plain"])
    return own / lowest["plain"] * lowest[kind], ANY


@functools.cache
def _read() -> dict[str, dict[str, Any]]:
    path = Path(__file__).with_name("utilization.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Links:
    """How fast a GPU sends, bytes/s; None where it is not known."""

    inside: float | None  # to others of its node
    between: float | None  # to other nodes, this GPU's share of the node's adapters
    host: float | None = None  # to the memory of its own node


@dataclass(frozen=True)
class Traffic:
    """Bytes that one GPU sends in a step."""

    inside: float  # at most to others of its node
    between: float  # to ranks on other nodes too
    host: float = 0.0  # to and from the memory of its node, where state is offloaded

    @property
    def nbytes(self) -> float:
        """Of all three."""
        return self.inside + self.between + self.host


@dataclass(frozen=True)
class StepTime:
    """Of one step."""

    seconds: float | None  # none where it is not known
    compute_s: float | None  # the part that is products; None where the GPU's peak is not known
    traffic_s: float | None  # the part that travels; None where a rate is not known
    basis: str  # what it rests on, or what is missing
    # range in which published runs lie around their plan
    least_s: float | None = None
    most_s: float | None = None


ATTENTION_COST = 1.5
"""Time of attention's operations, where that of a matrix product's is 1: flash kernels are slower
(Dao, FlashAttention-2, 2023: 1.3 on an A100; 1.8 on an H100)."""
ELEMENTWISE_COLUMNS = 400
"""Norms, activation functions and additions read and write memory; they take as long as products
over so many more columns. Calibration runs of 2,048 to 4,096 columns give 300 to 700."""

CASTS_COST = 1.3
"""Time of a step whose adapters cast their inputs to fp32 (peft), where that of others is 1: the
published runs of such programs took 1.2 to 1.5."""


def work_of_step(model: ModelFacts, batch: Batch, way: Strategy) -> float:
    """Return FLOP of matrix products that take as long as all that a GPU computes in a step."""
    products, attention = operations_of_step(model, batch, way)
    work = (products + ATTENTION_COST * attention) * (CASTS_COST if way.layout.casts else 1)
    return work * (1 + ELEMENTWISE_COLUMNS / model.hidden)


def operations_of_step(model: ModelFacts, batch: Batch, way: Strategy) -> tuple[float, float]:
    """Return FLOP of weights, and of attention's products of positions.

    Two for each weight and token, thrice: forward, and twice that backward; and 12 times layers x
    width x sequence for a token, half of it where positions see only those before them.
    Recomputation adds a forward pass of the blocks. Frozen weights have no gradients: two for each,
    twice. A stage of a pipeline has its part of the model, and waits for the others (`bubble`).
    """
    causal = 1.0 if model.family == "bert" else 0.5
    attention = 12 * model.layers * model.query * batch.seq * causal
    token = (4 if way.layout.lora else 6) * model.active_params
    if way.layout.recompute:
        token += 2 * (model.active_params - model.vocab * model.hidden)
        attention *= 4 / 3
    if way.layout.selective == "half":
        token += 2 * model.layers * sum(out * into for out, into in products_of(model)[1::2])
    token += 6 * model.layers * model.adapter_params(way.layout.lora)
    tokens = batch.tokens * batch.passes / way.layout.tp / way.layout.pp
    busy = 1 - bubble(batch, way)
    return token * tokens / busy, attention * tokens / busy


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
    work: float, traffic: Traffic, gpu: Accelerator, links: Links, layout: Spread
) -> StepTime:
    """Compute a step's time; not known if the GPU's peak or the rate of a used link is not.

    `work` (see `work_of_step`) and `traffic` are of one GPU. `layout` says what is computed again,
    which decides on the share of the peak.
    """
    sides = (
        (traffic.inside, links.inside, "in a node"),
        (traffic.between, links.between, "nodes"),
        (traffic.host, links.host, "to the host (--host-gbs)"),
    )
    # A ring over nodes is as slow as what leaves them: its part in a node need not be known.
    slow = traffic.between and layout.tp == 1
    missing = [f"the rate between {place}" if place == "nodes" else f"the rate {place}"
               for nbytes, rate, place in sides
               if nbytes and not rate and not (slow and place == "in a node")]  # fmt: skip
    sent = None if missing else sum(n / rate for n, rate, _ in sides if n and rate)
    share, measured_on = share_of(gpu.family, layout)
    compute = None if gpu.flops is None else work / (gpu.flops * share)
    if compute is None:
        missing.insert(0, f"the peak of {gpu.name}")
    if compute is None or sent is None:
        return StepTime(None, compute, sent, f"not known: {', '.join(missing)}")
    spread = _read()["spread"]
    others = ", as on other GPUs" if measured_on == ANY else ""
    basis = (
        f"{share:.0%} of {gpu.name}'s peak{others}, links at their rate; {spread['runs']} "
        f"published runs took {spread['least']:.2g} to {spread['most']:.2g} times their plan"
    )
    if traffic.host:
        basis += "; the host's own update of the weights is not in it"
    seconds = max(compute, sent)
    least = max(seconds * spread["least"], sent)
    return StepTime(seconds, compute, sent, basis, least, seconds * spread["most"])
