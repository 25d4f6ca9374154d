"""A small model under Lightning's Trainer; `--told` adds hpctrain's callback."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

import hpctrain

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 64


class Batches:
    """Batches that follow from their number, and a loader that can say where it is."""

    def __init__(self, count: int) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.count, self.at = count, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while self.at < self.count:
            generator = torch.Generator().manual_seed(self.at * self.ranks + self.rank)
            self.at += 1
            source = torch.randn(4, WIDTH, generator=generator)
            yield source, source.sum(dim=1).sin()
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
        )

    def training_step(self, batch, _index):
        source, target = batch
        return torch.nn.functional.mse_loss(self.layers(source).squeeze(1), target)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Steps(Callback):
    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def on_train_batch_end(self, trainer, *_):
        time.sleep(self.pause_s)
        if trainer.is_global_zero:
            print(f"step {trainer.global_step}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--told", action="store_true")
    asked = parser.parse_args()
    lightning.seed_everything(1, verbose=False)
    callbacks: list[Callback] = [Steps(asked.step_s)]
    if asked.told:
        run = hpctrain.init()
        callbacks.append(
            hpctrain.frameworks.lightning.LightningCallback(run, every_n_steps=asked.every)
        )
    else:
        callbacks.append(
            ModelCheckpoint(asked.out, "{step}", every_n_train_steps=asked.every, save_top_k=-1)
        )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_steps=asked.steps,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(
        model,
        Batches(asked.steps),
        ckpt_path=os.environ.get("HPCTRAIN_RESUME"),
    )
    if trainer.is_global_zero:
        weights = sum(parameter.abs().sum().item() for parameter in model.parameters())
        print(f"result {weights:.9f}", flush=True)


if __name__ == "__main__":
    main()
