"""What bounds a mesh: how a model can be cut, and which torch and DeepSpeed an engine needs. Pure.

`shape_of_config` reads a Hugging Face config.json by the table `FAMILIES`: numbers that the axes
must divide, and why an axis is not possible, so that a submit refuses what the ranks would refuse.
`balance` cuts layers into pipeline stages of about equal parameters. Lower bounds of releases come
from runs on older ones (docs/development/torch-versions.md); they are checked at submit and on the
nodes. tests/unit/plan/test_decoders.py, test_balance.py, test_versions.py and
tests/engines/test_pretrained.py hold the promises.
"""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from hpctrain.errors import UsageError
from hpctrain.ledger.plan.mesh import ModelShape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpctrain.core.settings.schema import EngineSettings


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

    Args:
        config: Of config.json, or a config object's `to_dict`.
        where: What to call it in a refusal.

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

    Args:
        sizes: Of each link.
        blocks: Which links are blocks; each run gets one at least. There are `count` or more.
        count: How many runs.

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


@dataclass(frozen=True)
class Bounds:
    """Releases of a package that were run.

    Attributes:
        oldest: Older ones are refused.
        newest: Newer ones are let through with a word.
    """

    oldest: str
    newest: str


TORCH = Bounds("2.8", "2.14")
DEEPSPEED = Bounds("0.19.8", "0.19.8")
EXPERTS = "2.12"
"""The first torch whose FSDP2 shards experts over another mesh than the rest (`engine.ep`)."""
PIPELINES = "2.9"
"""The first torch whose pipeline schedules can evaluate (`engine.pp`)."""


def refusal(versions: Mapping[str, str], engine: EngineSettings) -> str | None:
    """Why an engine cannot train with these releases, in one line; None where it can.

    Args:
        versions: "torch" and "deepspeed" to their versions; what is not known is missing or "".
        engine: The run's.
    """
    torch, deepspeed = versions.get("torch", ""), versions.get("deepspeed", "")
    if _older(torch, TORCH.oldest):
        return (
            f"torch {torch} is too old: the engines need {TORCH.oldest} or newer; install one, or "
            "load a newer module in slurm.setup"
        )
    for axis, oldest in (("ep", EXPERTS), ("pp", PIPELINES)):
        size = getattr(engine, axis)
        if _may_be_more_than_1(size) and _older(torch, oldest):
            return (
                f"engine.{axis} {size} needs torch {oldest} or newer, and this is torch {torch}; "
                f"set engine.{axis} to 1, or install a newer torch"
            )
    if engine.kind.startswith("zero") and _older(deepspeed, DEEPSPEED.oldest):
        return (
            f"engine.kind {engine.kind} needs DeepSpeed {DEEPSPEED.oldest} or newer, and this is "
            f"{deepspeed}; run pip install 'hpctrain[deepspeed]', or choose --engine fsdp2"
        )
    return None


def untried(versions: Mapping[str, str], engine: EngineSettings) -> list[str]:
    """Releases newer than any that was run: what a user should know."""
    bounds = {"torch": TORCH}
    if engine.kind.startswith("zero"):
        bounds["deepspeed"] = DEEPSPEED
    return [
        f"{package} {versions[package]} is newer than {bound.newest}, the newest that hpctrain was "
        "run with; tests/engines in a checkout of hpctrain hold it against one process"
        for package, bound in bounds.items()
        if _newer(versions.get(package, ""), bound.newest)
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
    """`2.8.0a0+git` as (2, 8, 0); None for what does not begin like a version."""
    match = _NUMBERS.match(version.strip())
    return tuple(int(part) for part in match[1].split(".")) if match else None
