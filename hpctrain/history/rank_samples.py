"""Samples of each rank's time and memory (lines of ranks.jsonl), and GPUs' peaks. Pure.

The peaks are for model FLOPs utilisation: dense bf16, fp16 where a GPU has no bf16. Only names that
`torch.cuda.get_device_name` gives and whose makers' data sheets say a number are known; for any
other, a slice of a GPU (MIG) among them, no MFU is better than a wrong one.
tests/unit/history/test_speed.py holds the promises.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from hpctrain.run.event_fields import finite, whole


@dataclass(frozen=True)
class RankSample:
    """Where the ranks' time went in a window of steps; seconds are sums over the window.

    Attributes:
        t: End of the window.
        attempt: Whose.
        step: Last step.
        steps: How many.
        wall_s: Per rank: all of the window.
        data_s: Per rank: waiting for data.
        own_s: Per rank: its work before it first waits for others; None where nobody can tell.
        peak_bytes: Per rank: memory in use at most.
        reserved_bytes: Per rank: memory taken from the device.
        retries: Per rank: allocations that needed the cache to be emptied first.
    """

    t: float
    attempt: int
    step: int
    steps: int
    wall_s: tuple[float, ...]
    data_s: tuple[float, ...] | None = None
    own_s: tuple[float, ...] | None = None
    peak_bytes: tuple[float, ...] | None = None
    reserved_bytes: tuple[float, ...] | None = None
    retries: tuple[float, ...] | None = None

    @property
    def busy_s(self) -> tuple[float, ...]:
        """What tells the slow rank from those that wait for it; the whole time where unknown."""
        return self.wall_s if self.own_s is None else self.own_s


def rank_sample(line: bytes, attempt: int) -> RankSample | None:
    """One line of an attempt's ranks.jsonl; None for what is no whole sample."""
    try:
        raw = json.loads(line)
    except ValueError:  # torn, or not UTF-8
        return None
    if not isinstance(raw, dict):
        return None
    t, steps, wall_s = finite(raw.get("t")), whole(raw.get("steps")), _each(raw.get("wall_s"))
    if t is None or not steps or steps < 0 or not wall_s:
        return None
    names = ("data_s", "own_s", "mem_peak_bytes", "mem_reserved_bytes", "mem_retries")
    optional = [_each(raw.get(name), len(wall_s)) for name in names]
    return RankSample(t, attempt, whole(raw.get("step")) or 0, steps, wall_s, *optional)


def newest_sample(content: bytes, attempt: int) -> RankSample | None:
    """The last whole sample at the end of a ranks.jsonl; None where there is none."""
    lines = reversed(content.split(b"\n"))
    return next((found for line in lines if (found := rank_sample(line, attempt))), None)


def _each(value: object, ranks: int = 0) -> tuple[float, ...] | None:
    """A number per rank, else None."""
    if not isinstance(value, list) or (ranks and len(value) != ranks):
        return None
    found = [finite(one) for one in value]
    return None if None in found else tuple(one for one in found if one is not None)


_PEAKS: tuple[tuple[str, float], ...] = (
    # NVIDIA Tesla V100 data sheet (2020): tensor performance, fp16; it has no bf16.
    (r"Tesla V100-SXM2-(16|32)GB(-LS)?", 125e12),
    (r"Tesla V100-PCIE-(16|32)GB", 112e12),
    # NVIDIA A100 data sheet (2021): the same for SXM and PCIe.
    (r"(NVIDIA )?A100-SXM4-(40|80)GB", 312e12),
    (r"(NVIDIA )?A100-PCIE-40GB", 312e12),
    (r"NVIDIA A100 80GB PCIe", 312e12),
    # NVIDIA H100 data sheet (2023): half of the numbers with sparsity.
    (r"NVIDIA H100 80GB HBM3", 989.4e12),
    (r"NVIDIA H100 PCIe", 756e12),
    (r"NVIDIA H100 NVL", 835e12),
    # NVIDIA H200 and GH200 data sheets (2024): the compute of an H100 SXM.
    (r"NVIDIA H200", 989.4e12),
    (r"NVIDIA GH200 (480GB|120GB|144G HBM3e)", 989.4e12),
    # NVIDIA DGX B200 data sheet (2024): 72 PFLOPS of fp8 in 8 GPUs, bf16 dense a quarter each.
    (r"NVIDIA B200", 2250e12),
    # NVIDIA A40, A10, L40S and L4 data sheets (2021 to 2023): without sparsity.
    (r"(NVIDIA )?A40", 149.7e12),
    (r"(NVIDIA )?A10", 125e12),
    (r"NVIDIA L40S", 362e12),
    (r"NVIDIA L4", 121e12),
    # AMD Instinct MI250X data sheet (2021): 383 TFLOPS, torch sees each of its two dies as a GPU.
    (r"AMD Instinct MI250X", 191.5e12),
    # AMD Instinct MI300X data sheet (2023).
    (r"AMD Instinct MI300X", 1307.4e12),
)


def peak_flops(device: str) -> float | None:
    """FLOP/s of one device at best; None for one whose peak is not known.

    Args:
        device: As `torch.cuda.get_device_name` says it.
    """
    name = device.strip()
    return next((peak for pattern, peak in _PEAKS if re.fullmatch(pattern, name)), None)
