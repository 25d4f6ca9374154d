"""What a plan knows of GPUs: memory, peak, links. gpus.toml has the numbers and their sources.

`find_gpu` takes a name as people and presets write it. Where a name fits several GPUs, or none,
their memory has to be given: `--gpu-mem`. Pure.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.errors import UsageError
from hpctrain.ledger.history.progress import peak_flops

GB = 10**9


@dataclass(frozen=True)
class Accelerator:
    """One accelerator."""

    name: str  # for people
    memory: int  # bytes that torch can use; where that is not known, the data sheet's GB x 10^9
    # FLOP/s in 16 bits at best, without sparsity; None where it is not known
    flops: float | None = None
    # bytes/s that it sends to others of its node at best (NVLink, Infinity Fabric); None where it
    # is not known, or there is none
    link: float | None = None
    bf16: bool | None = None  # whether its matrix units take bf16; None where it is not known
    source: str = "--gpu-mem"  # where the numbers come from
    family: str = ""  # key of its rows in utilization.toml; empty where it is not known
    sold_gb: int = 0  # the GB in its name; 0 where it has none

    @property
    def shown(self) -> str:
        """Its memory for people, e.g. 84.9 GB."""
        return f"{round(self.memory / GB, 1):g} GB"


def _read() -> dict[str, Accelerator]:
    path = Path(__file__).with_name("gpus.toml")
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return {key: _gpu(key, **values) for key, values in table.items()}


def _gpu(
    key: str,
    *,
    name: str,
    gb: int,
    torch_name: str,
    link_gbs: float,
    source: str,
    bf16: bool = True,
    gib: float | None = None,
) -> Accelerator:
    peak, family = peak_flops(torch_name), key.partition("-")[0]
    memory = gb * GB if gib is None else round(gib * 2**30)
    return Accelerator(name, memory, peak, link_gbs * GB, bf16, source, family, gb)


GPUS: dict[str, Accelerator] = _read()
"""By the name that `--gpu` takes; gpus.toml lists them."""


def find_gpu(name: str) -> list[str]:
    """Return keys of the GPUs that a name fits: one, several ("A100"), or none.

    A preset or a person writes the name: "A100 PCIe 40 GB", "h100".
    """
    if name.lower() in GPUS:
        return [name.lower()]
    spelled = re.sub(r"(?<!\d)(\d+)\s*gb", r"\1gb", name.lower().replace("-", " "))
    words = set(re.findall(r"(?<![a-z])[a-z]+\d+[a-z]*|(?<!\d)\d+gb|pcie|nvl|sxm", spelled))
    words -= {"hbm2", "hbm2e", "hbm3", "hbm3e"}  # the driver names the memory: H100 80GB HBM3
    own = {key: {*key.split("-"), f"{gpu.sold_gb}gb"} for key, gpu in GPUS.items()}
    return [key for key in GPUS if words and words <= own[key]]


def _agreed(name: str, memory: int, gpus: list[Accelerator]) -> Accelerator:
    """Return a GPU of this memory with the facts on which all of these agree."""
    same = {
        field: getattr(gpus[0], field)
        for field in ("flops", "link", "bf16", "source", "family", "sold_gb")
        if len({getattr(gpu, field) for gpu in gpus}) == 1
    }
    return Accelerator(gpus[0].name if len(gpus) == 1 else name, memory, **same)


def gpu_of(name: str | None, memory_gb: float | None, where: str) -> Accelerator:
    """Return the GPU that is meant; `memory_gb` of `--gpu-mem` wins over a data sheet.

    `where` is what gave the name, for an error.

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
    gpus = [GPUS[key] for key in keys]
    if len({gpu.memory for gpu in gpus}) != 1:
        raise UsageError(
            f"{where} says {name}, which fits {', '.join(keys)}: give --gpu with one of them, or "
            "--gpu-mem GB"
        )
    return _agreed(name, gpus[0].memory, gpus)


def _given(name: str | None, gpus: list[Accelerator], memory: int) -> Accelerator:
    """Return the GPU of this name with the memory that was given.

    Where the name fits several GPUs, those with about this memory count, else all of them. Speed
    and links stay known as far as they agree: a variant with other memory computes as fast.
    """
    if not gpus:
        return Accelerator(name or "GPU", memory)
    alike = [gpu for gpu in gpus if abs(gpu.sold_gb * GB - memory) < 2 * GB] or gpus
    common = _agreed(name or "GPU", memory, alike)
    return replace(common, source=f"--gpu-mem; {common.source}")
