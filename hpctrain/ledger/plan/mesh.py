"""The mesh that so many ranks make, within what the user allows and what the model can be cut into.

`refusal` says which torch and DeepSpeed an engine needs, from runs on older ones
(docs/development/torch-versions.md).

Pure, without torch. tests/unit/plan/test_mesh.py, which compares `shape_of` with the recipe's
model, test_decoders.py, test_balance.py, test_versions.py and tests/engines/test_pretrained.py hold
the promises.
"""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.mesh import ANY_PASSES, Mesh, MicrobatchRules, plan_micro_batches
from hpctrain.core.base.text import count, in_nodes, one_of
from hpctrain.core.settings.check import bounds, node_range
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hpctrain.core.settings.schema import EngineSettings, Settings, TrainSettings

NEAREST_WITHIN = 4096
"""Other numbers of nodes that are tried, to name the nearest ones that have a mesh."""
LOOPED = frozenset({"interleaved", "zero_bubble"})
"""Values of `engine.pp_schedule` with several stages on a rank."""
FITTING_SHOWN = 6
"""Ranges of nodes that a refusal names; a list of all would not fit its line."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes.

    Attributes:
        layers: Blocks, which a pipeline shares out.
        hidden: Width of the MLP, or of each expert.
        seq_len: Positions of a sequence; 0 where it is not known.
        experts: In each block; 0 for a dense model.
        kv_heads: Heads of key and value; 0 for as many as `heads`.
        vocab: Rows of the embedding; 0 where it need not be divided.
        source: The file that says so; empty for the settings of the recipe.
        refused: Axis to the reason why this model cannot be cut along it.
    """

    layers: int
    dim: int
    heads: int
    hidden: int
    seq_len: int
    experts: int = 0
    kv_heads: int = 0
    vocab: int = 0
    source: str = ""
    refused: Mapping[str, str] | None = None


_SIZES = {
    "layers": ("train.layers", "num_hidden_layers"),
    "dim": ("train.dim", "hidden_size"),
    "heads": ("train.heads", "num_attention_heads"),
    "hidden": ("the MLP's width", "intermediate_size"),
    "kv_heads": ("the model's key and value heads", "num_key_value_heads"),
    "vocab": ("the vocabulary's size", "vocab_size"),
}
"""The names of a shape's sizes: among our settings, and in a config.json."""


def _named(shape: ModelShape, size: str) -> str:
    """A size as the user knows it, with its value, e.g. "train.heads 4"."""
    ours, theirs = _SIZES[size]
    value = getattr(shape, size)
    return f"{theirs} {value} of {shape.source}" if shape.source else f"{ours} {value}"


def shape_of(train: TrainSettings) -> ModelShape:
    """The shape of the shipped recipe's model."""
    hidden = 32 * -(-8 * train.dim // 96)
    return ModelShape(train.layers, train.dim, train.heads, hidden, train.seq_len, train.experts)


def misfit(axis: str, ranks: int, engine: EngineSettings, shape: ModelShape) -> str:
    """Why a model cannot be cut over so many ranks of an axis; empty where it can.

    Axes other than "tp", "pp", "ep" and "cp" always fit.
    """
    if ranks == 1:
        return ""
    if shape.refused and axis in shape.refused:
        return shape.refused[axis]
    why = {"tp": _tp_misfit, "pp": _pp_misfit, "ep": _ep_misfit, "cp": _cp_misfit}.get(axis)
    return why(ranks, engine, shape) if why is not None else ""


def _tp_misfit(tp: int, engine: EngineSettings, shape: ModelShape) -> str:
    if shape.heads % tp:
        use = _divisors(shape.heads)
        return f"does not divide {_named(shape, 'heads')}; use {use}, or other heads"
    if shape.dim % tp:
        return f"does not divide {_named(shape, 'dim')}; use a number that does"
    if shape.hidden % tp and not shape.source:
        return (
            f"does not divide {shape.hidden}, the width of the MLP that follows from train.dim "
            f"{shape.dim}; use a number that does, or another train.dim"
        )
    for size in ("kv_heads", "hidden", "vocab"):
        if getattr(shape, size) % tp:
            return f"does not divide {_named(shape, size)}; use a number that does"
    if engine.sequence_parallel and shape.seq_len % tp:
        return (
            f"does not divide train.seq_len {shape.seq_len}, as engine.sequence_parallel needs; "
            "use a number that does, another train.seq_len, or engine.sequence_parallel=false"
        )
    return ""


def _pp_misfit(pp: int, engine: EngineSettings, shape: ModelShape) -> str:
    on_each = stages_per_rank(engine)
    if pp * on_each <= shape.layers:
        return ""
    stages = "" if on_each == 1 else f" x engine.pp_stages_per_rank {on_each}"
    most = shape.layers // on_each
    instead = f"{most} at most" if most else "fewer stages per rank"
    has = _named(shape, "layers") if shape.source else f"train.layers is {shape.layers}"
    return (
        f"{stages} needs {pp * on_each} layers, and {has}; use {instead}, or more layers"
    ).removeprefix(" ")


def _ep_misfit(ep: int, engine: EngineSettings, shape: ModelShape) -> str:
    del engine
    if not shape.experts:
        return "needs a model with experts, and train.experts is 0; set it, or engine.ep 1"
    if shape.experts % ep:
        return f"does not divide train.experts {shape.experts}; use {_divisors(shape.experts)}"
    return ""


def _cp_misfit(cp: int, engine: EngineSettings, shape: ModelShape) -> str:
    del engine
    if shape.seq_len % (2 * cp):
        return (
            f"needs a train.seq_len that {2 * cp} divides, since each rank has two parts of a "
            f"sequence; it is {shape.seq_len}"
        )
    return ""


def _divisors(number: int) -> str:
    return one_of(divisors(number))


def divisors(number: int) -> list[int]:
    """All that divide it, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def plan_mesh(
    engine: EngineSettings,
    world_size: int,
    ranks_per_node: int,
    *,
    shape: ModelShape | None = None,
    origins: Mapping[str, str] | None = None,
) -> Mesh:
    """The mesh of so many ranks, within the settings' bounds; the same wherever it is asked for.

    Of several it is the one with the smallest pp, then the smallest tp, dp_replicate and ep: what
    the user allowed at least, since each of these costs more than plain sharding, which takes the
    ranks that are left. The ranks of a tp group lie in one node.

    If the model's `shape` is known, its numbers are divided without a rest. `origins` are for
    messages.

    Raises:
        UsageError: the bounds leave no mesh; with the nearest numbers of nodes that have one.
    """
    planner = Planner(engine, ranks_per_node, shape, origins or {})
    planner.check()
    mesh = planner.find(world_size)
    if mesh is None:
        raise UsageError(planner.refusal(world_size))
    return mesh


class Planner:
    """Finds meshes for one set of bounds.

    Attributes:
        limits: What each bounded axis may be.

    Raises:
        UsageError: a bound is no range, or goes with another engine.
    """

    def __init__(
        self,
        engine: EngineSettings,
        ranks_per_node: int,
        shape: ModelShape | None = None,
        origins: Mapping[str, str] | None = None,
    ) -> None:
        self.engine = engine
        self.ranks_per_node = ranks_per_node
        self.shape = shape
        self.origins = origins or {}
        self.limits = bounds(engine, origins)

    def check(self) -> None:
        """Refuse what no number of nodes can fix.

        Raises:
            UsageError: the model cannot be cut so, or a tp group does not fit into a node.
        """
        if self.engine.kind != "fsdp2":
            return
        for axis, limit in self.limits.items():
            if not any(self._fits(axis, ranks) for ranks in limit[: self._most_parts]):
                assert self.shape is not None  # noqa: S101 - without one everything fits
                why = misfit(axis, limit.start, self.engine, self.shape)
                raise UsageError(f"{self._with_origin(axis)} {why}")
        ranks = self.ranks_per_node
        inside = [n for n in divisors(ranks) if self._cuts("tp", n)]
        if not any(n in self.limits["tp"] for n in inside):
            multiple = self.limits["tp"].start
            raise UsageError(
                f"{self._with_origin('tp')} does not divide the {count(ranks, 'rank')} of a node, "
                f"in which its ranks must lie; use {one_of(inside)}, or a multiple of {multiple} "
                "ranks per node"
            )

    def find(self, world_size: int) -> Mesh | None:
        """The mesh of so many ranks; None without one."""
        if self.engine.kind == "ddp":
            return Mesh(dp_replicate=world_size)
        if self.engine.kind != "fsdp2":
            return Mesh(dp_shard=world_size)
        return next(self._meshes(world_size), None)

    def _meshes(self, world_size: int) -> Iterator[Mesh]:
        for pp in self._sizes("pp", world_size):
            for tp in self._sizes("tp", world_size // pp):
                if world_size > self.ranks_per_node and self.ranks_per_node % tp:
                    continue
                for copies in self._sizes("dp_replicate", world_size // pp // tp):
                    shard = world_size // pp // tp // copies
                    yield from self._within(Mesh(pp, copies, shard, tp))

    def _within(self, mesh: Mesh) -> Iterator[Mesh]:
        """The same with the sharded ranks shared out: by experts, or by parts of the sequence."""
        for ep in self._sizes("ep", mesh.dp_shard):
            for cp in self._sizes("cp", mesh.dp_shard):
                full = replace(mesh, ep=ep, cp=cp)
                goes = sum(size > 1 for size in (ep, mesh.tp)) < 2  # noqa: PLR2004 - one of both
                alone = cp == 1 or (ep, mesh.tp, mesh.pp) == (1, 1, 1)
                if goes and alone and self._spreads(full):
                    yield full

    def _sizes(self, axis: str, ranks: int) -> list[int]:
        return [n for n in divisors(ranks) if self._fits(axis, n)]

    def _fits(self, axis: str, ranks: int) -> bool:
        return ranks in self.limits[axis] and self._cuts(axis, ranks)

    def _cuts(self, axis: str, ranks: int) -> bool:
        return self.shape is None or not misfit(axis, ranks, self.engine, self.shape)

    def _spreads(self, mesh: Mesh) -> bool:
        """Whether the ranks that have the same experts can cut each of them evenly."""
        parts = mesh.dp_shard // mesh.ep
        if self.shape is None or mesh.ep == 1:
            return True
        return self.shape.dim % parts == 0 or self.shape.hidden % parts == 0

    @property
    def _most_parts(self) -> int:
        """More than this a model cannot be cut into along any axis."""
        shape = self.shape
        return 1 if shape is None else max(1, shape.heads, shape.layers, shape.experts)

    # ---- what to say where there is none

    def refusal(self, world_size: int) -> str:
        """Why there is no mesh of so many ranks, and what to do."""
        nodes, rest = divmod(world_size, self.ranks_per_node)
        if rest:
            return self.why_not(world_size, count(world_size, "rank"))
        near = self.nearest(nodes)
        instead = f"use {in_nodes(near)}" if near else "set other bounds"
        asked = f"{in_nodes([nodes])} x {count(self.ranks_per_node, 'rank')}"
        return f"{self.why_not(world_size, asked)}: {instead}"

    def why_not(self, world_size: int, asked: str) -> str:
        """Why there is no mesh of so many ranks.

        `asked` is the same number as a user knows it, e.g. "3 nodes x 4 ranks".
        """
        names = self.names()
        multiple = prod(limit.start for limit in self.limits.values())
        is_fixed = all(len(limit) == 1 for limit in self.limits.values())
        if is_fixed and world_size % multiple:
            verb = "is" if world_size == 1 else "are"
            needed = count(multiple, "rank")
            return f"{names} needs a multiple of {needed}; {asked} {verb} {world_size}"
        why = f"{names} leaves no mesh of {count(world_size, 'rank')} ({asked})"
        if self.shape is not None and self.limits["ep"].start > 1 and not world_size % multiple:
            why += f", since the ranks with the same experts must divide train.dim {self.shape.dim}"
        return why

    def names(self) -> str:
        """The bounds that are in use, and where they came from."""
        used = [axis for axis, limit in self.limits.items() if limit != range(1, 2)]
        names = " x ".join(f"engine.{axis} {getattr(self.engine, axis)}" for axis in used)
        origins = dict.fromkeys(self.origins.get(f"engine.{axis}", "default") for axis in used)
        places = [origin for origin in origins if origin != "default"]
        return f"{names} ({', '.join(places)})" if places else names

    def wider(self) -> str:
        """A flag with more room for the axis that asks for most."""
        axis, limit = max(self.limits.items(), key=lambda item: item[1].start)
        return f"--mesh {axis}=1-{limit.stop - 1}"

    def nearest(self, nodes: int) -> list[int]:
        """The next lower and the next higher number of nodes with a mesh, as far as there are."""
        below = range(nodes - 1, max(0, nodes - 1 - NEAREST_WITHIN), -1)
        above = range(nodes + 1, nodes + 1 + NEAREST_WITHIN)
        sides = (next((n for n in side if self.at(n)), 0) for side in (below, above))
        return [n for n in sides if n]

    def at(self, nodes: int) -> Mesh | None:
        """The mesh on so many nodes; None without one."""
        return self.find(nodes * self.ranks_per_node)

    def _with_origin(self, axis: str) -> str:
        origin = self.origins.get(f"engine.{axis}", "default")
        where = "" if origin == "default" else f" ({origin})"
        return f"engine.{axis} {getattr(self.engine, axis)}{where}"


def meshes(
    settings: Settings,
    origins: Mapping[str, str],
    *,
    is_recipe: bool,
    shape: ModelShape | None = None,
) -> dict[int, Mesh]:
    """The mesh at the fewest and at the most nodes, by their number.

    Where hpctrain chooses the nodes, those at every number that has one.

    `shape` is of another model than the recipe's, where it is known.

    Raises:
        UsageError: some number of nodes in the range has no mesh, or the model cannot be cut so.
    """
    if settings.engine.exact and is_recipe and settings.train.micro_batch == 0:
        raise UsageError(
            f"{origins.get('engine.exact', 'default')}: engine.exact is true, which needs "
            f"train.micro_batch; it is 0 ({origins.get('train.micro_batch', 'default')}): set how "
            "many sequences each pass takes, at any number of ranks"
        )
    shape = shape_of(settings.train) if is_recipe else shape
    planner = Planner(settings.engine, settings.slurm.ranks(), shape, origins)
    planner.check()
    low, high = node_range(settings.slurm.nodes)
    if settings.shape.choose in {"nodes", "both"}:
        every = {n: mesh for n in range(low, high + 1) if (mesh := planner.at(n)) is not None}
        if every:
            return every
    _require_all(planner, low, high)
    return {nodes: mesh for nodes in (low, high) if (mesh := planner.at(nodes)) is not None}


def _require_all(planner: Planner, low: int, high: int) -> None:
    """Refuse where the scheduler could choose a number of nodes that has no mesh."""
    fitting = [nodes for nodes in range(low, high + 1) if planner.at(nodes) is not None]
    if len(fitting) == high - low + 1:
        return
    first = next(nodes for nodes in range(low, high + 1) if nodes not in set(fitting))
    if low == high or not fitting:
        raise UsageError(planner.refusal(first * planner.ranks_per_node))
    nodes = f"{in_nodes([first])} x {count(planner.ranks_per_node, 'rank')}"
    why = planner.why_not(first * planner.ranks_per_node, nodes)
    raise UsageError(
        f"{why}, and slurm.nodes {low}-{high} allows that: {_ranges(fitting)} would do; use "
        f"{_offer(fitting)}, or give an axis a range, e.g. {planner.wider()}"
    )


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Numbers as ranges of adjoining ones."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _ranges(numbers: list[int]) -> str:
    runs = [str(a) if a == b else f"{a}-{b}" for a, b in _runs(numbers)]
    left = len(runs) - FITTING_SHOWN
    if left > 0:
        return f"{', '.join(runs[:FITTING_SHOWN])} and {left} more"
    return " and ".join([*([", ".join(runs[:-1])] if runs[:-1] else []), runs[-1]])


def _offer(fitting: list[int]) -> str:
    """What one could ask for instead: the longest range that fits, with the most nodes."""
    first, last = max(_runs(fitting), key=lambda run: (run[1] - run[0], run[1]))
    return f"--nodes {first}" if first == last else f"--nodes {first}-{last}"


def stages_per_rank(engine: EngineSettings) -> int:
    """How many stages of a pipeline each of its ranks has."""
    return engine.pp_stages_per_rank if engine.pp_schedule in LOOPED else 1


def cuts_batch(settings: Settings, mesh: Mesh) -> bool:
    """Whether every data rank of the recipe's mesh gets samples of the unchanged global batch."""
    train = settings.train
    if mesh.data_ranks > train.global_batch:
        return False
    passes = passes_of(settings.engine, mesh)
    try:
        plan_micro_batches(train.global_batch, mesh.data_ranks, train.micro_batch, passes)
    except ValueError:
        return False
    return True


def passes_of(engine: EngineSettings, mesh: Mesh) -> MicrobatchRules:
    """The same as `Engine.passes` will be."""
    if mesh.pp > 1:
        if engine.pp_schedule in LOOPED:
            return MicrobatchRules(equal=True, at_least=mesh.pp, multiple_of=mesh.pp)
        return MicrobatchRules(equal=True, at_least=mesh.pp if engine.pp_schedule == "1f1b" else 1)
    return MicrobatchRules(leaves=True, equal=True) if engine.exact else ANY_PASSES


DECODERS = frozenset({"llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma"})
FAMILIES: Mapping[str, frozenset[str]] = {
    "tp": DECODERS | {"gemma2", "gemma3_text"},
    "pp": DECODERS,
    "ep": frozenset(),
    "cp": DECODERS | {"gemma3_text"},
}
"""Axis to the model types that can be cut along it."""
TIES = frozenset({"tp", "pp"})
"""Axes along which a model can be cut whose embedding is its head."""
SHOWN = 40
MANY = 1 << 40
"""Larger sizes are no model's."""


def shape_of_config(config: Mapping[str, Any], where: str) -> ModelShape:
    """A model's sizes and what it cannot be cut along.

    `config` is of config.json, or a config object's `to_dict`. A refusal calls it `where`.

    Raises:
        UsageError: a size of a known family is no whole number.
    """
    kind = config.get("model_type")
    kind = kind if isinstance(kind, str) else ""
    refused = {
        axis: f"cannot cut a model of type {str(kind)[:SHOWN]!r} ({where}): {_takes(families)}"
        for axis, families in FAMILIES.items()
        if kind not in families
    }
    if config.get("tie_word_embeddings") is True:
        for axis in {"tp", "pp"} - TIES - refused.keys():
            refused[axis] = f"cannot cut a model whose embedding is its head ({where})"
    if not any(kind in families for families in FAMILIES.values()):
        return ModelShape(0, 0, 0, 0, 0, source=where, refused=refused)
    heads = _number(config, "num_attention_heads", where)
    return ModelShape(
        layers=_number(config, "num_hidden_layers", where),
        dim=_number(config, "hidden_size", where),
        heads=heads,
        hidden=_number(config, "intermediate_size", where),
        seq_len=0,
        kv_heads=_number(config, "num_key_value_heads", where, default=heads),
        vocab=_number(config, "vocab_size", where),
        source=where,
        refused=refused,
    )


def _takes(families: frozenset[str]) -> str:
    takes = ", ".join(sorted(families)) or "none of Hugging Face's"
    return (
        f"it takes {takes}; for a ModelPlan of your own leave engine.pretrained out and call "
        "run.parallelize(..., pretrained=FOLDER)"
    )


def _number(config: Mapping[str, Any], key: str, where: str, *, default: int = 0) -> int:
    value = config.get(key)
    if value is None and default:
        return default
    if type(value) is not int or not 0 < value < MANY:
        raise UsageError(f"{where} has {key} = {str(value)[:SHOWN]!r}, which is no size")
    return value


def balance(sizes: Sequence[int], blocks: Sequence[bool], count: int) -> list[range]:
    """Cut a chain into runs, so that the largest is as small as can be and the rest are alike.

    `blocks` says which links are blocks: there are `count` or more, and each run gets one at least.

    Returns:
        The links of each run, by their places.
    """
    totals = [0, *accumulate(sizes)]
    seen = [0, *accumulate(map(int, blocks))]

    def size(start: int, end: int) -> float:
        return totals[end] - totals[start] if seen[end] > seen[start] else math.inf

    def square(start: int, end: int) -> float:
        return size(start, end) ** 2 if size(start, end) <= largest else math.inf

    largest, _ = _cheapest(len(sizes), count, size, max)
    _, runs = _cheapest(len(sizes), count, square, operator.add)
    return runs


def _cheapest(
    length: int,
    count: int,
    cost: Callable[[int, int], float],
    add: Callable[[float, float], float],
) -> tuple[float, list[range]]:
    """The best way to cut [0, length) into runs, given what a run costs, and how costs add up."""
    best: dict[int, tuple[float, list[range]]] = {0: (0.0, [])}
    for _ in range(count):
        longer = {}
        for end in range(1, length + 1):
            starts = [start for start in best if start < end]
            if starts:
                costs = [add(best[start][0], cost(start, end)) for start in starts]
                start = starts[costs.index(min(costs))]
                longer[end] = (min(costs), [*best[start][1], range(start, end)])
        best = longer
    return best[length]


_NUMBERS = re.compile(r"v?(\d+(?:\.\d+)*)")


TORCH, DEEPSPEED = "2.8", "0.19.8"
"""The oldest that were run; older ones are refused."""
NEWEST = {"torch": "2.14", "deepspeed": "0.19.8"}
"""The newest that were run; newer ones are let through with a word."""
EXPERTS = "2.12"
"""The first torch whose FSDP2 shards experts over another mesh than the rest (`engine.ep`)."""
PIPELINES = "2.9"
"""The first torch whose pipeline schedules can evaluate (`engine.pp`)."""


def refusal(versions: Mapping[str, str], engine: EngineSettings) -> str | None:
    """Why an engine cannot train with these releases, in one line; None where it can.

    `versions` has "torch" and "deepspeed"; what is not known is missing or "".
    """
    torch, deepspeed = versions.get("torch", ""), versions.get("deepspeed", "")
    if _older(torch, TORCH):
        return (
            f"torch {torch} is too old: the engines need {TORCH} or newer; install one, or "
            "load a newer module in slurm.setup"
        )
    for axis, oldest in (("ep", EXPERTS), ("pp", PIPELINES)):
        size = getattr(engine, axis)
        if _may_be_more_than_1(size) and _older(torch, oldest):
            return (
                f"engine.{axis} {size} needs torch {oldest} or newer, and this is torch {torch}; "
                f"set engine.{axis} to 1, or install a newer torch"
            )
    if engine.kind.startswith("zero") and _older(deepspeed, DEEPSPEED):
        return (
            f"engine.kind {engine.kind} needs DeepSpeed {DEEPSPEED} or newer, and this is "
            f"{deepspeed}; run pip install 'hpctrain[deepspeed]', or choose --engine fsdp2"
        )
    return None


def untried(versions: Mapping[str, str], engine: EngineSettings) -> list[str]:
    """Name the releases that are newer than any that was run: private parts may have changed."""
    packages = ["torch", "deepspeed"] if engine.kind.startswith("zero") else ["torch"]
    return [
        f"{package} {versions[package]} is newer than {NEWEST[package]}, the newest that hpctrain "
        "was run with; tests/engines in a checkout of hpctrain hold it against one process"
        for package in packages
        if _newer(versions.get(package, ""), NEWEST[package])
    ]


def _may_be_more_than_1(axis: str) -> bool:
    return axis.strip().rpartition("-")[2] != "1"


def _older(version: str, bound: str) -> bool:
    numbers = _numbers(version)
    return numbers is not None and numbers < (_numbers(bound) or ())


def _newer(version: str, bound: str) -> bool:
    """Newer by the numbers that the bound has: 2.14.1 is no newer than 2.14."""
    numbers, most = _numbers(version), _numbers(bound) or ()
    return numbers is not None and numbers[: len(most)] > most


def _numbers(version: str) -> tuple[int, ...] | None:
    match = _NUMBERS.match(version.strip())
    return tuple(int(part) for part in match[1].split(".")) if match else None
