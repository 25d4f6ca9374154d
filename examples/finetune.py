"""Train a Hugging Face decoder of any size under any engine; no rank ever holds it whole.

hpctrain submit --nodes 4 --engine fsdp2 -- examples/finetune.py hub/llama tokens.bin
hpctrain checkpoints export RUN 1000 out/ --like hub/llama       # what from_pretrained loads
"""

import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hpctrain
from hpctrain import Microbatch

STEPS, GLOBAL_BATCH, MICRO_BATCH, SEQ_LEN = 1000, 32, 4, 1024


def share_of_loss(output: Any, targets: Any) -> torch.Tensor:
    """A microbatch's share of the step's mean loss: shares are added, over passes and ranks.

    A sum over its tokens, not a mean: with engine.cp it has a part of each sequence.
    """
    following, weights = targets
    each = hpctrain.cross_entropy(output.logits, following)
    return (each.sum(1) * weights).sum() / (GLOBAL_BATCH * SEQ_LEN)


def main(folder: str, tokens: str) -> None:
    """Train the folder's model on a file of tokens."""
    run = hpctrain.init()
    config = AutoConfig.from_pretrained(folder, use_cache=False)
    engine = run.parallelize(  # functions: the model is made on each rank shard by shard
        lambda: AutoModelForCausalLM.from_config(config),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-5),
        pretrained=folder,
    )
    data = run.loader(
        hpctrain.TokenSequences(tokens, SEQ_LEN),
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
    )
    for _step in run.steps(total=STEPS):
        passes = []
        for text, piece in zip(next(data), data.taken.pieces, strict=True):
            row = text.to(run.world.device)
            weights = torch.tensor(piece.weights, device=row.device)
            passes.append(Microbatch(row[:, :-1], (row[:, 1:], weights), piece.leaf))
        loss = engine.forward_backward(passes, share_of_loss)
        run.log(loss=loss, grad_norm=engine.step(), tokens=GLOBAL_BATCH * SEQ_LEN)


if __name__ == "__main__":
    main(*sys.argv[1:])
