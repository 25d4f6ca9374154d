"""What a Hugging Face config.json says of the ways in which its model can be cut.

`FAMILIES` is the table: model types that can be cut along each axis. `shape_of_config`
gives the numbers that the axes have to divide, and for each axis that the model does not take the
reason, so that a submit refuses before anything waits in a queue what the ranks would refuse.

Pure. tests/unit/plan/test_decoders.py holds the promises, tests/engines/test_pretrained.py that
the engines take what the table says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpctrain.errors import UsageError
from hpctrain.plan.mesh import ModelShape

if TYPE_CHECKING:
    from collections.abc import Mapping


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
