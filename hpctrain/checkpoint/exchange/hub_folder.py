"""What lies in a Hugging Face folder beside the weights: read with distrust, no torch.

tests/unit/plan/test_decoders.py holds the promises.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.exchange import safetensors
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = "config.json"
MAX_CONFIG = 16 << 20


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
