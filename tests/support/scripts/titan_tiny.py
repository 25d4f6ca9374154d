"""torchtitan's llama3 with one layer and plain attention, which CPUs have; words of our own.

`titan_tiny.py` writes the words and their tokenizer into the working directory.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

STEPS, EVERY, SEQUENCES, TOKENS = 20, 8, 2, 64


def tiny() -> Trainer.Config:
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    model = config.model_spec.model
    model.layers = model.layers[:1]
    model.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    config.training = TrainingConfig(
        local_batch_size=SEQUENCES, seq_len=TOKENS, steps=STEPS, disable_cuda_graphs=True
    )
    config.parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    config.checkpoint = CheckpointManager.Config(enable=True, interval=EVERY)
    config.validator.enable = False
    config.debug.seed = 1
    return config


def write() -> None:
    words = [f"w{number}" for number in range(50)]
    draw = random.Random(0)
    texts = [{"text": " ".join(draw.choices(words, k=100))} for _ in range(200)]
    data, tokenizer = Path("tests/assets/c4_test"), Path("tests/assets/tokenizer")
    for folder in (data, tokenizer):
        folder.mkdir(parents=True)
    (data / "data.json").write_text("\n".join(map(json.dumps, texts)))
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *words])}
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(tokenizer / "tokenizer.json"))
    marks = {"bos_token": "<s>", "eos_token": "</s>"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(marks))


if __name__ == "__main__":
    write()
