"""A training loop of one's own that survives preemption: four lines of it are hpctrain's.

hpctrain submit --nodes 2 -- examples/own_loop.py
python examples/own_loop.py                          # the same training here, nothing is saved
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hpctrain

STEPS = 200


def main() -> None:
    """Fit noisy samples of a sine; every rank draws its own."""
    run = hpctrain.init()  # 1: process group, device, stop requests
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    model.to(run.world.device)
    if run.world.is_distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)  # 2: what a checkpoint holds
    for _step in run.steps(total=STEPS):  # 3: from the restored step on; saves, stops, requeues
        x = 6 * torch.rand(256, 1, device=run.world.device) - 3
        loss = nn.functional.mse_loss(model(x), torch.sin(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.log(loss=loss.item())  # 4: TensorBoard and `hpctrain status`


if __name__ == "__main__":
    main()
