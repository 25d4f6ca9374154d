"""The program of one_file.py with the lines that make hpctrain its witness and its warner."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from one_file import batch_of, model_of, parse, save
from torch.nn.parallel import DistributedDataParallel

import hpctrain


def main() -> None:
    asked = parse()
    run = hpctrain.init()
    rank, path = dist.get_rank(), asked.out / "ckpt.pt"
    asked.out.mkdir(parents=True, exist_ok=True)
    model = DistributedDataParallel(model_of(seed=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if run.resume_path is not None:
        state = torch.load(run.resume_path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    run.at(first)
    for step in range(first + 1, asked.steps + 1):
        began = time.monotonic()
        source, target = batch_of(step, rank)
        loss = torch.nn.functional.mse_loss(model(source), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(max(0.0, asked.step_s - (time.monotonic() - began)))
        if rank == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
        run.at(step, loss=loss.item())
        stop = run.should_stop()
        if stop or step % asked.every == 0:
            if rank == 0:
                state = {"step": step, "model": model.state_dict()}
                save(
                    state | {"optimizer": optimizer.state_dict()},
                    path,
                    die=not first and step == asked.die_in_save,
                )
            run.sealed(step, path)
        if stop:
            run.leave()
    weights = sum(parameter.abs().sum().item() for parameter in model.parameters())
    if rank == 0:
        print(f"result {weights:.9f}", flush=True)
    run.leave()


if __name__ == "__main__":
    main()
