"""PyTorch's tutorial program in small: it destroys its process group before its model is gone."""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model: torch.nn.Module, data: DataLoader) -> None:
        self.model = DistributedDataParallel(model)
        self.data = data
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(self, epochs: int) -> None:
        for epoch in range(epochs):
            for source, target in self.data:
                self.optimizer.zero_grad()
                torch.nn.functional.mse_loss(self.model(source), target).backward()
                self.optimizer.step()
            print(f"epoch {epoch}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--keep-gil", action="store_true", help="until this thread waits itself")
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    data = TensorDataset(torch.rand(512, 20), torch.rand(512, 1))
    sampler = DistributedSampler(data)
    trainer = Trainer(torch.nn.Linear(20, 1), DataLoader(data, batch_size=32, sampler=sampler))
    trainer.train(asked.epochs)
    if asked.keep_gil:
        sys.setswitchinterval(600)
        source, target = next(iter(trainer.data))
        torch.nn.functional.mse_loss(trainer.model(source), target).backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    print("returned", flush=True)
