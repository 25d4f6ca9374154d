"""The releases of torch and DeepSpeed that an engine works with. Pure.

The lower bounds were found by running the engines on older releases (docs/torch-versions.md). Asked
at submit, of what is installed beside the interpreter, and again on the nodes, of what was
imported: a job's own modules may bring another torch. tests/unit/plan/test_versions.py holds the
promises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.settings.schema import EngineSettings

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
