"""A node's GPUs, as nvidia-smi or rocm-smi tells them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from hpctrain.preflight.facts import Gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    Command = Callable[[Sequence[str]], str]

NVIDIA_FIELDS = "index,name,driver_version,ecc.errors.uncorrected.volatile.total"
_CARD = re.compile(r"card(\d+)")


def read_gpus(root: Path, command: Command) -> list[Gpu]:
    """The GPUs of this node; none where there is neither a driver nor its tool.

    Args:
        root: In front of /dev.
        command: Runs a command within a time-out.

    Raises:
        OSError: there is a driver, and its tool is missing: nobody can say how many there are.
        Unanswered: the tool failed, or took too long.
    """
    for read, tool, device in (
        (read_nvidia, "nvidia-smi", "dev/nvidiactl"),
        (read_rocm, "rocm-smi", "dev/kfd"),
    ):
        try:
            return read(command)
        except FileNotFoundError:
            if (root / device).exists():
                raise OSError(f"/{device} is there and {tool} is not") from None
    return []


def read_nvidia(command: Command) -> list[Gpu]:
    """GPUs by nvidia-smi."""
    text = command(["nvidia-smi", f"--query-gpu={NVIDIA_FIELDS}", "--format=csv,noheader,nounits"])
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line]
    links = parse_nvlinks(command(["nvidia-smi", "nvlink", "--status"])) if rows else {}
    return [
        Gpu(int(index), name, driver, int(errors) if errors.isdigit() else None,
            links.get(int(index)))
        for index, name, driver, errors in rows
    ]  # fmt: skip


def parse_nvlinks(text: str) -> dict[int, int]:
    """GPU to its NVLink connections that are up, from `nvidia-smi nvlink --status`."""
    found: dict[int, int] = {}
    gpu: int | None = None
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            gpu = int(match[1])
            found[gpu] = 0
        elif gpu is not None and re.search(r"Link \d+: [\d.]+ GB/s", line):
            found[gpu] += 1
    return found


def read_rocm(command: Command) -> list[Gpu]:
    """GPUs by rocm-smi."""
    args = ["rocm-smi", "--showproductname", "--showdriverversion", "--json"]
    raw = json.loads(command(args))
    driver = str(raw.get("system", {}).get("Driver version", ""))
    cards = [(int(match[1]), value) for key, value in raw.items() if (match := _CARD.match(key))]
    return [
        Gpu(index, str(card.get("Card series") or card.get("Card Series") or ""), driver)
        for index, card in sorted(cards, key=lambda pair: pair[0])
    ]
