"""A program with a mistake: its rank 0 raises, the others wait for it in a collective."""

from __future__ import annotations

import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        check_rate(-0.5)
    dist.barrier()


def check_rate(rate: float) -> None:
    if rate < 0:
        raise ValueError(f"learning rate {rate} is negative")


if __name__ == "__main__":
    main()
