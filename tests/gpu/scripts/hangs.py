"""Stands still at step 5 of its first attempt: the GPU computes for hours before an all-reduce."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import hpctrain

HOURS = 1 << 50
"""Cycles of a GPU's clock."""

run = hpctrain.init()
model = torch.nn.Linear(8, 8).to(run.world.device)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
run.track(model=model, optimizer=optimizer)
is_first = Path(os.environ["HPCTRAIN_ATTEMPT_DIR"]).name == "0001"


def waits_for_the_device(total: torch.Tensor, step: int) -> float:
    is_bad = is_first and step == 5
    if is_bad and run.world.device.type == "cuda":
        torch.cuda._sleep(HOURS)
    elif is_bad:
        time.sleep(3600)
    dist.all_reduce(total)
    return total.item()


for step in run.steps(total=8):
    loss = model(torch.ones(2, 8, device=run.world.device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.log(loss=waits_for_the_device(loss.detach(), step))
