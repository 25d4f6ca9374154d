"""A loop on a DeepSpeed engine, ZeRO-1: each rank writes its part of a checkpoint's folder."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import deepspeed
import torch

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
    deepspeed.init_distributed("gloo")
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
        },
    )
    rank, step = torch.distributed.get_rank(), 0
    if run.resume_path is not None:
        engine.load_checkpoint(str(run.resume_path.parent), tag=run.resume_path.name)
        step = int(run.resume_path.name.removeprefix("step-"))
    while step < asked.steps:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        source = torch.randn(4, WIDTH, generator=generator)
        target = source.sum(dim=1, keepdim=True).sin()
        loss = torch.nn.functional.mse_loss(engine(source), target)
        engine.backward(loss)
        engine.step()
        step += 1
        time.sleep(asked.step_s)
        if rank == 0:
            print(f"step {step}", flush=True)
        run.at(step, loss=loss.item())
        stop = run.should_stop()
        if stop or step % asked.every == 0:
            engine.save_checkpoint(str(asked.out), tag=f"step-{step}")
            run.sealed(step, asked.out / f"step-{step}")
        if stop:
            run.leave()
    if rank == 0:
        weights = sum(parameter.abs().sum().item() for parameter in model.parameters())
        print(f"result {weights:.9f}", flush=True)
    run.leave()


if __name__ == "__main__":
    main()
