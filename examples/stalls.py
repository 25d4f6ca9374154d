"""A training that stalls: at step 20 rank 0 alone comes to a barrier, for docs/staying-alive.md.

hpctrain lint examples/stalls.py                     # finds it, and runs nothing
hpctrain submit --cluster local --ranks-per-node 2 -- examples/stalls.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hpctrain

STEPS = 40
STALL = 20


def main() -> None:
    """Fit a line to a sine, until rank 0 waits for ranks that do not come."""
    run = hpctrain.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(total=STEPS):
        x = 6 * torch.rand(64, 1) - 3
        loss = nn.functional.mse_loss(model(x), torch.sin(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == STALL and run.world.rank == 0:
            dist.barrier()
        run.log(loss=loss.item())


if __name__ == "__main__":
    main()
