"""What SLURM knows of the user and of its partitions, asked only where it matters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


def _nothing(partition: str) -> None:
    """Nobody can say."""
    del partition


@dataclass(frozen=True)
class Accounting:
    """Questions; each answers None where it cannot be asked, or knows nothing of the user.

    Attributes:
        accounts: The user's.
        qos: The user's.
        cpus_per_gpu: CPUs for each GPU of a job that asks for none, by the partition's name, or ""
            for the default one.
    """

    accounts: Callable[[], Collection[str] | None]
    qos: Callable[[], Collection[str] | None]
    cpus_per_gpu: Callable[[str], int | None] = _nothing


def of_slurm() -> Accounting:
    """Who answers by sacctmgr and scontrol, each question when it is needed."""

    def accounts() -> Collection[str] | None:
        from hpctrain.scheduler.slurm import facts

        return facts.accounts()

    def qos() -> Collection[str] | None:
        from hpctrain.scheduler.slurm import facts

        return facts.qos()

    def cpus_per_gpu(partition: str) -> int | None:
        from hpctrain.scheduler.slurm import facts

        return facts.cpus_per_gpu(partition)

    return Accounting(accounts, qos, cpus_per_gpu)
