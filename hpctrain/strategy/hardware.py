"""What a plan knows of GPUs: memory, peak, links. From makers' data sheets; a guess is never made.

`find_gpu` takes a name as people and presets write it. Where a name fits several GPUs, or none,
their memory has to be given: `--gpu-mem`. Pure. tests/unit/strategy/test_hardware.py holds it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from hpctrain.errors import UsageError
from hpctrain.history.progress import peak_flops

GB = 10**9


@dataclass(frozen=True)
class Accelerator:
    """One accelerator.

    Attributes:
        name: For people.
        memory: Bytes; a data sheet's GB are taken as 10^9, which none falls short of.
        flops: FLOP/s in 16 bits at best, without sparsity; None where it is not known.
        link: Bytes/s that it sends to others of its node at best (NVLink, Infinity Fabric); None
            where it is not known, or there is none.
        bf16: Whether its matrix units take bf16; None where it is not known.
        source: Where the numbers come from.
    """

    name: str
    memory: int
    flops: float | None = None
    link: float | None = None
    bf16: bool | None = None
    source: str = "--gpu-mem"


def _gpu(
    name: str, gb: int, torch_name: str, link_gbs: float, source: str, *, bf16: bool = True
) -> Accelerator:
    link = link_gbs * GB if link_gbs else None
    return Accelerator(name, gb * GB, peak_flops(torch_name), link, bf16, source)


GPUS: dict[str, Accelerator] = {
    "v100-16gb": _gpu("V100 16 GB", 16, "Tesla V100-SXM2-16GB", 150, "V100 data sheet", bf16=False),
    "v100-32gb": _gpu("V100 32 GB", 32, "Tesla V100-SXM2-32GB", 150, "V100 data sheet", bf16=False),
    "a100-sxm-40gb": _gpu("A100 SXM 40 GB", 40, "NVIDIA A100-SXM4-40GB", 300, "A100 data sheet"),
    "a100-sxm-80gb": _gpu("A100 SXM 80 GB", 80, "NVIDIA A100-SXM4-80GB", 300, "A100 data sheet"),
    "a100-pcie-40gb": _gpu("A100 PCIe 40 GB", 40, "A100-PCIE-40GB", 32, "A100 data sheet"),
    "a100-pcie-80gb": _gpu("A100 PCIe 80 GB", 80, "NVIDIA A100 80GB PCIe", 32, "A100 data sheet"),
    "h100-sxm": _gpu("H100 SXM 80 GB", 80, "NVIDIA H100 80GB HBM3", 450, "H100 data sheet"),
    "h100-pcie": _gpu("H100 PCIe 80 GB", 80, "NVIDIA H100 PCIe", 64, "H100 data sheet"),
    "h100-nvl": _gpu("H100 NVL 94 GB", 94, "NVIDIA H100 NVL", 300, "H100 data sheet"),
    "h200": _gpu("H200 SXM 141 GB", 141, "NVIDIA H200", 450, "H200 data sheet"),
    "gh200-96gb": _gpu("GH200 96 GB", 96, "NVIDIA GH200 480GB", 450, "GH200 data sheet"),
    "gh200-144gb": _gpu("GH200 144 GB", 144, "NVIDIA GH200 144G HBM3e", 450, "GH200 data sheet"),
    "b200": _gpu("B200 180 GB", 180, "NVIDIA B200", 900, "DGX B200 data sheet"),
    "a40": _gpu("A40 48 GB", 48, "NVIDIA A40", 32, "A40 data sheet"),
    "a10": _gpu("A10 24 GB", 24, "NVIDIA A10", 32, "A10 data sheet"),
    "l40s": _gpu("L40S 48 GB", 48, "NVIDIA L40S", 32, "L40S data sheet"),
    "l4": _gpu("L4 24 GB", 24, "NVIDIA L4", 32, "L4 data sheet"),
    "mi250x": _gpu("MI250X, one die 64 GB", 64, "AMD Instinct MI250X", 50, "MI250X data sheet"),
    "mi300x": _gpu("MI300X 192 GB", 192, "AMD Instinct MI300X", 448, "MI300X data sheet"),
}  # fmt: skip
"""By the name that `--gpu` takes."""


def find_gpu(name: str) -> list[str]:
    """Keys of the GPUs that a name fits: one, several ("A100"), or none.

    Args:
        name: As a preset or a person writes it: "A100 PCIe 40 GB", "h100".
    """
    words = set(re.findall(r"(?<![a-z])[a-z]+\d+[a-z]*|(?<!\d)\d+gb|pcie|nvl|sxm", _spelled(name)))
    words -= {"hbm2", "hbm2e", "hbm3", "hbm3e"}  # the driver names the memory: H100 80GB HBM3
    return [key for key, gpu in GPUS.items() if words and words <= _words(key, gpu)]


def _words(key: str, gpu: Accelerator) -> set[str]:
    return {*key.split("-"), f"{gpu.memory // GB}gb"}


def _spelled(name: str) -> str:
    return re.sub(r"(?<!\d)(\d+)\s*gb", r"\1gb", name.lower().replace("-", " "))


def _agreed(name: str, gpus: list[Accelerator]) -> Accelerator | None:
    """What all of these have in common; None where it is not their memory."""
    if len({gpu.memory for gpu in gpus}) != 1:
        return None
    first = gpus[0]
    if len(gpus) == 1:
        return first
    same = {
        field: getattr(first, field)
        for field in ("flops", "link", "bf16", "source")
        if len({getattr(gpu, field) for gpu in gpus}) == 1
    }
    return Accelerator(name, first.memory, **same)


def gpu_of(name: str | None, memory_gb: float | None, where: str) -> Accelerator:
    """The GPU that is meant.

    Args:
        name: As given, or a preset's; None where nothing says.
        memory_gb: Of `--gpu-mem`, which wins over a data sheet.
        where: What said the name, for a refusal.

    Raises:
        UsageError: its memory is not known.
    """
    if memory_gb is not None and not 0 < memory_gb < 100_000:  # noqa: PLR2004 - no GPU has more
        raise UsageError(f"--gpu-mem {memory_gb:g} is no size in GB; write e.g. --gpu-mem 80")
    keys = find_gpu(name) if name else []
    if memory_gb is not None:
        return _given(name, [GPUS[key] for key in keys], round(memory_gb * GB))
    if name is None:
        raise UsageError(
            "which GPU is not known here: give --gpu NAME, --gpu-mem GB or --site with --partition"
        )
    if not keys:
        raise UsageError(
            f"{where} says {name}, a GPU whose memory is not known here (known: "
            f"{', '.join(GPUS)}): give --gpu-mem GB"
        )
    gpu = _agreed(name, [GPUS[key] for key in keys])
    if gpu is None:
        raise UsageError(
            f"{where} says {name}, which fits {', '.join(keys)}: give --gpu with one of them, or "
            "--gpu-mem GB"
        )
    return gpu


def _given(name: str | None, gpus: list[Accelerator], memory: int) -> Accelerator:
    """With the memory that was given; the rest as of the GPUs that fit the name and have it."""
    alike = [gpu for gpu in gpus if abs(gpu.memory - memory) < 2 * GB]
    common = _agreed(name or "GPU", alike) if alike else None
    if common is None:
        return Accelerator(name or "GPU", memory)
    return replace(common, memory=memory, source=f"--gpu-mem; {common.source}")
