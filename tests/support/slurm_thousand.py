"""A SLURM of as many nodes as this machine can bear, what it is asked, and what it takes.

Every node is a slurmd of its own, and every task a process. What runs on them is light
(`agent_stand_in`): torch in a thousand agents takes more memory than there is.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support import processes
from tests.support.agent_stand_in import OF_OTHER_NODES
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_config import Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.slurm_cluster import Record

TOP = Path(__file__).parents[2]
OF_DAEMONS = frozenset(
    {
        "ACCOUNTING_UPDATE_MSG",
        "MESSAGE_EPILOG_COMPLETE",
        "MESSAGE_NODE_REGISTRATION_STATUS",
        "MESSAGE_TASK_EXIT",
        "REQUEST_COMPLETE_BATCH_SCRIPT",
        "REQUEST_COMPLETE_PROLOG",
        "REQUEST_NODE_REGISTRATION_STATUS",
        "REQUEST_STATS_INFO",
        "REQUEST_STEP_COMPLETE",
    }
)
"""What slurmd's and slurmdbd tell it by themselves, some of it once for each node; and sdiag."""
OF_A_LOOK = ("REQUEST_FED_INFO", "REQUEST_JOB_INFO_SINGLE")
"""What `scontrol show job` asks."""


class ManyNodes(SlurmCluster):
    """A cluster of so many nodes."""

    def __init__(self, count: int) -> None:
        super().__init__(shape=Shape.of(count))
        self._own_looks = 0

    def run(
        self, *argv: str, check: bool = False, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """As every cluster's, with more patience: while all nodes begin, slurmctld gets no CPU."""
        return super().run(*argv, check=check, timeout=max(timeout, self.patience_s))

    def job(self, job_id: str) -> Record:
        """As every cluster's; `questions` leaves it out, since it is the test that asks."""
        self._own_looks += 1
        return super().job(job_id)

    @property
    def patience_s(self) -> float:
        """So long may anything take that all nodes take part in: they share a few CPUs."""
        return 60.0 + len(self.nodes)

    def questions(self) -> Counter[str]:
        """How often slurmctld was asked what; not by its daemons and by the test's own looks."""
        said = self.run("sdiag", check=True).stdout
        rows = re.findall(r"^\s*([A-Z_]+)\s*\(\s*\d+\) count:(\d+)", said, re.MULTILINE)
        asked = Counter({name: int(count) for name, count in rows if name not in OF_DAEMONS})
        return asked - Counter(dict.fromkeys(OF_A_LOOK, self._own_looks))

    def memory_mib(self) -> dict[str, float]:
        """What each program of the cluster takes in all, shared pages counted once."""
        taken: Counter[str] = Counter()
        for pid in self._daemons.descendants():
            try:
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            pss = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
            taken[processes.executable(pid)] += int(pss[1]) if pss else 0
        return {name: round(kib / 1024, 1) for name, kib in taken.most_common(6)}

    def cli(self, cwd: Path, *args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run hpctrain's command line, with the patience that so many nodes on few CPUs need."""
        done = subprocess.run(
            [sys.executable, "-m", "hpctrain", *args],
            cwd=cwd,
            env={**self.env, "PYTHONPATH": str(TOP), "XDG_STATE_HOME": str(cwd / "state")},
            capture_output=True,
            text=True,
            timeout=self.patience_s,
            check=False,
        )
        assert done.returncode == code, (
            f"{args}: exit {done.returncode}\n{done.stdout[-3000:]}{done.stderr}"
        )
        return done


def stand_in_python(folder: Path) -> Path:
    """A python that starts stand-ins in the place of what a job starts on its nodes."""
    path, python = folder / "python", shlex.quote(sys.executable)
    path.write_text(f"""#!/bin/bash
export PYTHONPATH={shlex.quote(str(TOP))}
case " $* " in
*" -m hpctrain.entry.slurm_task "*)
run=${{!#}}
[ "$SLURM_NODEID" != 0 ] || exec {python} -P -u -m tests.support.agent_stand_in "$run"
{OF_OTHER_NODES}
;;
*" -m hpctrain.cluster.preflight.node "*)
exec {python} -P -u -m tests.support.patient_preflight "${{@: -2}}"
;;
*) exec {python} "$@" ;;
esac
""")
    path.chmod(0o755)
    return path


@dataclass
class Diary:
    """What each part of a story took: seconds, and questions to slurmctld; told at once."""

    cluster: ManyNodes
    say: Callable[[str], None]
    rows: dict[str, tuple[float, Counter[str]]] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what happens inside."""
        before, began = self.cluster.questions(), time.monotonic()
        yield
        took_s = time.monotonic() - began
        asked = self.cluster.questions()
        asked.subtract(before)
        self.rows[name] = (took_s, Counter({n: c for n, c in asked.items() if c}))
        self.say(f"  {name}: {took_s:.1f} s, asked {asked.total()}: {dict(self.rows[name][1])}")

    def asked(self, name: str) -> int:
        """How many questions a part took."""
        return self.rows[name][1].total()
