"""Digests of tensors, by which ranks compare what should be the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import xxhash

from hpctrain.engines.norm import local

if TYPE_CHECKING:
    from collections.abc import Iterable


def bytes_of(part: torch.Tensor) -> memoryview:
    """The bytes of a tensor in host memory; not copied where it is contiguous."""
    flat = part.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def sum_of(part: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits as integers, on its device: one flipped bit changes it."""
    flat = part.contiguous().reshape(-1)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    return flat.view(whole).sum(dtype=torch.int64)


def digest_of(tensors: Iterable[torch.Tensor | None]) -> str:
    """Of these tensors in their order; waits for the device. A missing one is not one of zeros."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(b"\0" if tensor is None else b"\1")
        if tensor is None:
            continue
        part = local(tensor).detach()
        if part.device.type == "cpu":
            digest.update(bytes_of(part))
        else:
            digest.update(int(sum_of(part)).to_bytes(8, "little", signed=True))
    return digest.hexdigest()
