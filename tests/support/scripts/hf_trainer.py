"""A small language model under the Trainer of transformers, as its documentation shows it.

`--told` adds hpctrain's callback; without it nothing here knows of hpctrain but the name of the
variable that holds the path from which the program is to go on.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import hpctrain

LENGTH = 32


class Text(Dataset):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(256, (LENGTH,), generator=generator)
        return {"input_ids": ids, "labels": ids}


class Steps(TrainerCallback):
    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def on_step_end(self, args, state, control, **_):
        time.sleep(self.pause_s)
        if state.is_world_process_zero:
            print(f"step {state.global_step}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--told", action="store_true")
    asked = parser.parse_args()
    set_seed(1)
    config = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=1,
        n_head=2,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    arguments = TrainingArguments(
        output_dir=asked.out,
        max_steps=asked.steps,
        per_device_train_batch_size=2,
        save_steps=asked.every,
        save_total_limit=3,
        logging_steps=50,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    callbacks: list[TrainerCallback] = [Steps(asked.step_s)]
    if asked.told:
        run = hpctrain.init()
        callbacks.append(hpctrain.frameworks.huggingface.HuggingFaceCallback(run))
    model = GPT2LMHeadModel(config)
    trainer = Trainer(model, arguments, train_dataset=Text(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=os.environ.get("HPCTRAIN_RESUME"))
    if trainer.is_world_process_zero():
        weights = sum(parameter.abs().sum().item() for parameter in model.parameters())
        print(f"result {weights:.9f}", flush=True)


if __name__ == "__main__":
    main()
