"""A loop on Accelerate, which has no callbacks: the lines that are hpctrain's stand in the loop."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

import hpctrain

WIDTH = 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--every", type=int, default=20)
    asked = parser.parse_args()
    run = hpctrain.init()
    # The plain sampler draws an epoch's order anew at each start: other samples, another result.
    order = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=order)
    set_seed(1)
    source = torch.randn(4096, WIDTH)
    data = TensorDataset(source, source.sum(dim=1, keepdim=True).sin())
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=4, shuffle=True)
    )
    step = 0
    if run.resume_path is not None:
        accelerator.load_state(str(run.resume_path))
        step = int(run.resume_path.name.removeprefix("step-"))
    while step < asked.steps:
        loader.set_epoch(step // len(loader))
        for source, target in accelerator.skip_first_batches(loader, step % len(loader)):
            loss = torch.nn.functional.mse_loss(model(source), target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            time.sleep(asked.step_s)
            accelerator.print(f"step {step}", flush=True)
            run.at(step, loss=loss.item())
            stop = run.should_stop()
            if stop or step % asked.every == 0:
                folder = asked.out / f"step-{step}"
                accelerator.save_state(str(folder))
                run.sealed(step, folder)
            if stop:
                run.leave()
            if step == asked.steps:
                break
    weights = sum(parameter.abs().sum().item() for parameter in model.parameters())
    accelerator.print(f"result {weights:.9f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
