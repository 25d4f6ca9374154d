"""What lies in a Hugging Face folder beside the weights: read with distrust, no torch.

`read_config` and `require_weights` are for a submit; `beside` and `untied` for an export that
`from_pretrained` shall load, `adapters` for one of peft's. tests/unit/plan/test_decoders.py,
tests/unit/checkpoint/exchange/test_exchange_export.py and tests/engines/test_adapters.py hold the
promises.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.exchange import safetensors
from hpctrain.checkpoint.exchange.contents import same
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hpctrain.checkpoint.exchange.contents import Tensor

CONFIG = "config.json"
MAX_CONFIG = 16 << 20
COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Data alone: a folder's Python files stay behind, since `from_pretrained` may run them."""
MAX_COPIED = 256 << 20
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
HEAD = "lm_head.weight"
BASE = "base_weights"
"""Of a manifest's `extra`: what adapters stand on, and their config."""
ADAPTER = "adapter_model"
_LORA = re.compile(r"\.(lora_\w+)\.default(?=\.|$)")
_SAVED = re.compile(r"\.modules_to_save\.default\.")


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        UsageError: it has none, or something else under that name.
    """
    path = folder / CONFIG
    try:
        if not path.is_file():
            raise UsageError(f"{folder} has no {CONFIG}: it is no folder of Hugging Face's")
        with path.open("rb") as file:
            config = json.loads(file.read(MAX_CONFIG))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is no JSON") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path} is no table of a model's sizes")
    return config


def require_weights(folder: Path) -> None:
    """Look whether the weights' files are there, without opening them.

    Raises:
        CheckpointError: they are not, or an index names other ones.
    """
    safetensors.files(folder)


def beside(folder: Path, tensors: Sequence[Tensor]) -> dict[str, bytes]:
    """Return the files beside an export's weights by name, from the weights' original folder.

    config.json gets the dtype that the weights have now. Otherwise `from_pretrained` would round
    them to the dtype that they were loaded in.

    Raises:
        UsageError: it is no such folder, or a file of it cannot be read.
    """
    config = read_config(folder)
    floats = {DTYPE_NAMES[one.dtype] for one in tensors if one.dtype in DTYPE_NAMES}
    config.pop("torch_dtype", None)  # as older ones call it
    if len(floats) == 1:
        config["dtype"] = floats.pop()
    files = {CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
    for name in COPIED:
        path = folder / name
        try:
            if path.is_file():
                with path.open("rb") as file:
                    files[name] = file.read(MAX_COPIED + 1)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        if len(files.get(name, b"")) > MAX_COPIED:
            raise UsageError(f"{path} is larger than any tokenizer's file; take it out of --like")
    return files


def untied(folder: Path, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The weights without a head that is the embedding, as transformers writes them."""
    config = read_config(folder)
    (head, *_) = [*(one for one in tensors if one.name == HEAD), None]
    if config.get("tie_word_embeddings") is not True or head is None:
        return list(tensors)
    alike = (one for one in tensors if one is not head and one.text == head.text)
    is_tied = any(same(one.read(), head.read()) for one in alike if "embed" in one.name)
    return [one for one in tensors if one is not head or not is_tied]


def adapters(
    extra: Mapping[str, Any], tensors: Sequence[Tensor]
) -> tuple[list[Tensor], dict[str, bytes]]:
    """Return a checkpoint's adapters under peft's names, and the config file beside them.

    `extra` is the manifest's, with BASE. `tensors` have their names in the wrapped model.
    """
    base = extra[BASE]
    config = base["adapter_config"] | {
        "base_model_name_or_path": base["source"],
        "inference_mode": True,
    }
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    named = [_SAVED.sub(".", _LORA.sub(r".\1", one.name)) for one in tensors]
    renamed = [replace(one, name=name) for one, name in zip(tensors, named, strict=True)]
    return renamed, {"adapter_config.json": text.encode()}
