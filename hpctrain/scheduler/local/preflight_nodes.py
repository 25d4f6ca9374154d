"""The nodes of a preflight on the embedded cluster: processes of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import TYPE_CHECKING

from hpctrain.base.env import (
    HPCTRAIN_MASTER_ADDR,
    HPCTRAIN_NODES,
    HPCTRAIN_PORT,
    HPCTRAIN_PREFLIGHT_KEY,
)
from hpctrain.base.process import free_port, own_program
from hpctrain.scheduler.slurm.environment import clean

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.run.layout import RunDir

END_S = 5.0


class LocalNodes:
    """Nodes of `hpctrain preflight` as processes of this machine."""

    def __init__(
        self, run: RunDir, token: str, count: int, python: str, environ: Mapping[str, str]
    ) -> None:
        """Start them.

        Args:
            run: The preflight's folder.
            token: Its name.
            count: How many nodes.
            python: The interpreter.
            environ: Their environment.

        Raises:
            ClusterError: no port is free.
        """
        env = {
            **clean(environ).env,
            HPCTRAIN_NODES: ",".join(f"local{rank}" for rank in range(count)),
            HPCTRAIN_PORT: str(free_port(token, 0)),
            HPCTRAIN_MASTER_ADDR: "127.0.0.1",
            HPCTRAIN_PREFLIGHT_KEY: (run.root / "@key").read_text(),
        }
        self.name = f"{count} processes of this machine"
        with (run.jobs / f"{token}.out").open("ab") as output:
            self._nodes = [
                subprocess.Popen(
                    own_program(
                        "hpctrain.preflight.node",
                        *(str(run.root), str(rank)),
                        python=python,
                        unbuffered=True,
                    ),
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
                for rank in range(count)
            ]

    def waits_for(self) -> str:
        """Nothing."""
        return ""

    def is_over(self) -> bool:
        """Whether all processes have ended."""
        return all(node.poll() is not None for node in self._nodes)

    def cancel(self) -> None:
        """Kill them, with what they have started."""
        for node in self._nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(END_S)

    def release(self) -> None:
        """End what a node has left behind."""
        self.cancel()
