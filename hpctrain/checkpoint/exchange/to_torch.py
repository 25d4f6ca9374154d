"""Export as one file that `torch.load(weights_only=True)` opens.

Written as torch.save would, but tensor by tensor: torch.save wants all of them in memory at once.
"""

from __future__ import annotations

import io
import math
import pickle  # only its Pickler: nothing is read with it
import struct
import zipfile
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.checkpoint.exchange import contents
from hpctrain.checkpoint.exchange.contents import Tensor
from hpctrain.checkpoint.exchange.export import Written, compare, flush, placing
from hpctrain.checkpoint.exchange.untrusted import LAYOUT, LAYOUT_KEY, leaves_of, load
from hpctrain.checkpoint.tensors.boxes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpctrain.checkpoint.exchange.export import OnBytes

ROOT = "archive"
ALIGN = 64
"""Bytes of a tensor start at a multiple of this, as in torch's own files."""
LOCAL_HEADER, ZIP64_EXTRA, PADDING_ID = 30, 20, 0x4246
OVERHEAD = 512
"""Bytes that the archive takes for each tensor besides its own, at most."""
STORAGES: dict[str, Any] = {
    "F64": torch.DoubleStorage, "F32": torch.FloatStorage, "F16": torch.HalfStorage,
    "BF16": torch.BFloat16Storage, "C64": torch.ComplexFloatStorage,
    "C128": torch.ComplexDoubleStorage, "I64": torch.LongStorage,
    "I32": torch.IntStorage, "I16": torch.ShortStorage, "I8": torch.CharStorage,
    "U8": torch.ByteStorage, "BOOL": torch.BoolStorage,
}  # fmt: skip
"""As torch has written these since 1.6; dtypes that are newer have none, and need a newer torch."""


def write(
    path: Path,
    tensors: Sequence[Tensor],
    *,
    step: int,
    state: dict[str, object] | None = None,
    on_bytes: OnBytes = lambda _: None,
) -> Written:
    """Write, flush, read back with torch and compare; only then give the file its name.

    With `state`, the rest of a checkpoint that is exported whole, `tensors` have our names; else
    they are weights without ``model.``. `on_bytes` gets the bytes written and the bytes compared.

    Raises:
        UsageError: the file is there already.
        CheckpointError: there is no room, the disk refused, or what was read back is not the same.
    """
    need = sum(tensor.nbytes + OVERHEAD for tensor in tensors)
    with placing(path.parent, [path.name], need) as place:
        temporary = place(path.name)
        _write(temporary, tensors, _tree(tensors, step, state), on_bytes)
        flush(temporary)
        tree = load(temporary)
        got = {
            name: tensor
            for name, tensor in _names(tree, whole=state is not None).items()
            if isinstance(tensor, Tensor)
        }
        verified = compare(tensors, got, on_bytes)
        del tree
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return Written([(path, path.stat().st_size)], len(tensors), nbytes, verified)


def _tree(tensors: Sequence[Tensor], step: int, state: dict[str, object] | None) -> dict[str, Any]:
    """The dictionary that the user gets, a slot in place of each tensor."""
    slots = [_Slot(str(number), tensor) for number, tensor in enumerate(tensors)]
    if state is None:
        return {"model": {slot.tensor.name: slot for slot in slots}, "step": step}
    model: dict[str, _Slot] = {}
    others: dict[str, _Slot] = {}
    objects = contents.parts_of_objects(tensor.name for tensor in tensors)
    optimizer: dict[str, dict[str, _Slot]] = {}
    for slot in slots:
        name = slot.tensor.name
        owner, _, key = name.removeprefix(contents.OPTIM).rpartition(".")
        is_number = key.rpartition(":")[2] in contents.NUMBERS
        if name.startswith(contents.MODEL) and name not in objects:
            model[name.removeprefix(contents.MODEL)] = slot
        elif name.startswith(contents.OPTIM) and name not in objects and owner and not is_number:
            optimizer.setdefault(owner, {})[key] = slot
        else:
            others[name] = slot
    return {
        LAYOUT_KEY: LAYOUT,
        "model": model,
        "optimizer": optimizer,
        "others": others,
        "step": step,
        "state": state,
    }


def _names(tree: dict[str, Any], *, whole: bool) -> dict[str, Tensor | None]:
    tensors: dict[str, Tensor | None] = {}
    for leaf in leaves_of(tree, "the export"):
        top, *rest = leaf.path
        if leaf.tensor is None:
            continue
        prefix = {"model": contents.MODEL if whole else "", "optimizer": contents.OPTIM}.get(
            str(top), ""
        )
        tensors[prefix + ".".join(map(str, rest))] = leaf.tensor
    return tensors


class _Slot:
    """Stands for a tensor in the pickle."""

    def __init__(self, key: str, tensor: Tensor) -> None:
        self.key = key
        self.tensor = tensor


class _Storage:
    """Stands for a tensor's bytes in the pickle."""

    def __init__(self, slot: _Slot) -> None:
        self.slot = slot


class _Pickler(pickle.Pickler):
    """Writes slots as torch.save writes tensors whose bytes lie in the archive."""

    def reducer_override(self, obj: object) -> Any:
        """How to write a slot; everything else as usual."""
        if not isinstance(obj, _Slot):
            return NotImplemented
        shape = obj.tensor.shape
        stride = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
        hooks: OrderedDict[str, object] = OrderedDict()
        place = (_Storage(obj), 0, shape, stride, False, hooks)
        # The names of functions that torch's own files have, and that its reader allows.
        if obj.tensor.dtype in STORAGES:
            return torch._utils._rebuild_tensor_v2, place  # noqa: SLF001
        return torch._utils._rebuild_tensor_v3, (*place, TORCH_DTYPES[obj.tensor.dtype])  # noqa: SLF001

    def persistent_id(self, obj: object) -> Any:
        """What leads to a storage's record: its kind, its name, its device, its elements."""
        if not isinstance(obj, _Storage):
            return None
        tensor = obj.slot.tensor
        if tensor.dtype in STORAGES:
            count = math.prod(tensor.shape)
            return ("storage", STORAGES[tensor.dtype], obj.slot.key, "cpu", count)
        return ("storage", torch.UntypedStorage, obj.slot.key, "cpu", tensor.nbytes)


def _write(path: Path, tensors: Sequence[Tensor], tree: dict[str, Any], on_bytes: OnBytes) -> None:
    text = io.BytesIO()
    _Pickler(text, protocol=2).dump(tree)
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED, allowZip64=True) as archive:
        _put(archive, "data.pkl", text.getbuffer())
        _put(archive, "byteorder", memoryview(b"little"))
        for number, tensor in enumerate(tensors):
            content = tensor.read()
            _put(archive, f"data/{number}", content.data)
            on_bytes(tensor.nbytes)
        _put(archive, "version", memoryview(b"3\n"))


def _put(archive: zipfile.ZipFile, name: str, content: memoryview) -> None:
    """One record, its bytes at a multiple of ALIGN."""
    record = zipfile.ZipInfo(f"{ROOT}/{name}")
    record.compress_type = zipfile.ZIP_STORED
    record.file_size = len(content)
    position = archive.fp.tell() if archive.fp else 0
    start = position + LOCAL_HEADER + len(record.filename) + ZIP64_EXTRA + 4
    gap = -start % ALIGN
    record.extra = struct.pack("<HH", PADDING_ID, gap) + b"Z" * gap
    with archive.open(record, "w", force_zip64=True) as out:
        out.write(content)
