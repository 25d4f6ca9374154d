"""Tiny folders as Hugging Face's hub has them, and what transformers itself makes of them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = {
    "Llama": "bfloat16",
    "Qwen3": "float16",
    "Mistral": "float32",
    "Olmo2": "bfloat16",
    "Gemma": "bfloat16",
}
"""Each with the type that its files are in. Gemma ties its head."""
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "use_cache": False, "attn_implementation": "eager",
}  # fmt: skip
SHARD = "20KB"


def config_of(family: str, **sizes: Any) -> Any:
    import transformers

    return getattr(transformers, f"{family}Config")(**{**SIZES, **sizes})


def build(family: str, **sizes: Any) -> Any:
    import transformers

    return getattr(transformers, f"{family}ForCausalLM")(config_of(family, **sizes))


def make(root: Path, family: str, *, seed: int = 3, **sizes: Any) -> Path:
    """A folder with random weights, in several files with an index; norms differ from one too."""
    import torch

    torch.manual_seed(seed)
    model = build(family, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    folder = root / family
    model.to(getattr(torch, FAMILIES[family])).save_pretrained(folder, max_shard_size=SHARD)
    assert (folder / "model.safetensors.index.json").exists()
    return folder


def loaded(folder: Path) -> Any:
    """The folder as `from_pretrained` has it, in fp32."""
    import torch
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()


def tokens() -> Any:
    import torch

    return torch.arange(24).view(2, 12) % SIZES["vocab_size"]


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(tokens()).logits
