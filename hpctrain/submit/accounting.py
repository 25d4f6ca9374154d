"""What SLURM's accounting knows of the user, asked only where a preset makes it matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


@dataclass(frozen=True)
class Accounting:
    """Two questions; each answers None where it cannot be asked, or knows nothing of the user."""

    accounts: Callable[[], Collection[str] | None]
    qos: Callable[[], Collection[str] | None]


def of_slurm() -> Accounting:
    """Who answers by sacctmgr, each question when it is needed."""

    def accounts() -> Collection[str] | None:
        from hpctrain.slurm import cluster_facts

        return cluster_facts.accounts()

    def qos() -> Collection[str] | None:
        from hpctrain.slurm import cluster_facts

        return cluster_facts.qos()

    return Accounting(accounts, qos)
