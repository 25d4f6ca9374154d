"""Run directories with a long and eventful past, written at once, for tests of the report."""

from __future__ import annotations

import json
import math
import random
from typing import TYPE_CHECKING, Any

from hpctrain.core.settings.schema import Settings
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.ledger.run.layout import RunDir

if TYPE_CHECKING:
    from pathlib import Path

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
"""What a program may print, and a page must show as it is."""
BEGIN = 1_763_700_000.0
TOKENS = 131_072


class Tale:
    """Writes a ledger and samples of ranks; time goes on as the tale does."""

    def __init__(self, root: Path, *, seed: int = 1, nodes: int = 4, per_node: int = 4) -> None:
        root.mkdir(parents=True)
        self.run = RunDir(root)
        self.t = BEGIN
        self.nodes = [f"gpu{number:02d}" for number in range(1, nodes + 1)]
        self.ranks = nodes * per_node
        self.step = 0
        self.number = 0
        self._requeues = 0
        self._began = self.t
        self.settings = Settings()
        self.lines: list[str] = []
        self._random = random.Random(seed)

    def write(self) -> RunDir:
        """Write what was told; may be called once."""
        entry = Entry(kind="recipe", cwd=str(self.run.root))
        root = self.run.root
        Spec(root.name, "id", BEGIN, "local", "", entry, self.settings).dump(self.run.spec)
        self.run.events.write_text("".join(self.lines))
        return self.run

    def add(self, kind: str, **fields: Any) -> Tale:
        fact = {"t": round(self.t, 3), "kind": kind, "attempt": self.number or None, **fields}
        self.lines.append(json.dumps(fact) + "\n")
        return self

    def submitted(self, total: int = 12_000) -> Tale:
        self.add("submit_intent", token="tok-1", script="tok-1.sh", attempt=None)
        more = {"token": "tok-1", "job_id": "4711", "cluster": "slurm", "total_steps": total}
        return self.add("submitted", attempt=None, **more)

    def attempt(
        self,
        *,
        queue_s: float = 0.0,
        startup_s: float = 60.0,
        restore_s: float = 20.0,
        inside: bool = False,
    ) -> Tale:
        """The next attempt waits, starts, restores; `inside` its job goes on, without a queue."""
        self.t += queue_s
        self.number += 1
        self._requeues += 0 if inside or self.number == 1 else 1
        self._began = self._began if inside else self.t
        began = self._began
        self.t += startup_s
        self.add(
            "attempt_started",
            job_id="4711",
            nodes=self.nodes,
            world_size=self.ranks,
            ranks_per_node=self.ranks // len(self.nodes),
            restarts=self._requeues,
            token="x",
            by="restart" if inside else "start",
            batch_started=began,
            job_started=began,
            agent_started=began + 5,
            imported=began + 20,
        )
        self.add("phase", name="initialised", device="NVIDIA A100-SXM4-40GB")
        self.t += restore_s
        name = f"step-{self.step:010d}" if self.step else None
        return self.add("restored", step=self.step, checkpoint=name, seconds=restore_s, skipped=[])

    def train(
        self, marks: int, *, steps: int = 20, step_s: float = 3.0, save_every: int = 10
    ) -> Tale:
        """So many marks; every tenth is followed by a save."""
        self.t += 2 * step_s
        self.step += 1
        self._mark(self.step, self.step, step_s, 0.0)
        self.add("phase", name="first_step", data_s=0.1, save_s=0.0)
        data_s = save_s = 0.0
        for number in range(1, marks + 1):
            noise = self._random.uniform(0.97, 1.06)
            first, self.step = self.step + 1, self.step + steps
            seconds = steps * step_s * noise
            data_s += 0.08 * seconds
            self.t += seconds
            self._mark(first, self.step, seconds, data_s, save_s=round(save_s, 3))
            if number % save_every == 0:
                self.t += 0.9
                save_s += 0.9
                self.saved()
        return self

    def saved(self) -> Tale:
        name = f"checkpoints/step-{self.step:010d}"
        cost = {"bytes": 101 * 2**30, "seconds": 21.5, "stall_s": 0.9, "waited_s": 0.0}
        return self.add("saved", step=self.step, mode="async", checkpoint=name, **cost)

    def _mark(self, first: int, last: int, seconds: float, data_s: float, **more: float) -> None:
        jitter = self._random.uniform(-0.06, 0.06)
        step_s = seconds / (last - first + 1)
        self.add(
            "steps",
            first=first,
            last=last,
            sample_first=(first - 1) * 64,
            sample_last=last * 64,
            loss=round(1.9 + 9 * math.exp(-last / 900) + jitter, 4),
            seconds=round(seconds, 3),
            data_s=round(data_s, 3),
            p50_s=round(step_s * 0.98, 4),
            p95_s=round(step_s * 1.07, 4),
            tokens=TOKENS * (last - first + 1),
            grad_norm=round(0.8 + abs(jitter) * 4, 4),
            **more,
        )

    def sample(self, *, every: int = 1, slow: int = 9, by: float = 0.12) -> Tale:
        """Samples of the ranks for this attempt's marks; one rank is slow."""
        path = self.run.rank_times(self.number)
        path.parent.mkdir(parents=True, exist_ok=True)
        mine = [json.loads(line) for line in self.lines]
        marks = [e for e in mine if e["kind"] == "steps" and e["attempt"] == self.number]
        samples = [self._sample(mark, slow, by) for mark in marks[::every]]
        path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        return self

    def _sample(self, mark: dict[str, Any], slow: int, by: float) -> dict[str, Any]:
        wall = mark["seconds"]
        own = [0.7 * wall * self._random.uniform(0.98, 1.02) for _ in range(self.ranks)]
        if slow < self.ranks:
            own[slow] *= 1 + by
        return {
            "t": mark["t"],
            "step": mark["last"],
            "steps": mark["last"] - mark["first"] + 1,
            "wall_s": [wall] * self.ranks,
            "data_s": [0.06 * wall + 0.001 * rank for rank in range(self.ranks)],
            "own_s": own,
            "mem_peak_bytes": [(34 + rank % 4) * 2**30 for rank in range(self.ranks)],
            "mem_reserved_bytes": [(38 + rank % 2) * 2**30 for rank in range(self.ranks)],
            "mem_retries": [rank % 4 for rank in range(self.ranks)],
        }

    def failed(self, node: str, summary: str, traceback: str = "", rank: int = 5) -> Tale:
        more = {"rank": rank, "node": node, "kind_of": "exception", "others": [0, 1]}
        return self.add("failure", summary=summary, traceback=traceback, **more)

    def ended(self, reason: str, following: str, *, after_s: float = 8.0, **more: Any) -> Tale:
        self.t += after_s
        return self.add("attempt_ended", reason=reason, next=following, by="agent", **more)

    def go_back(self, step: int) -> Tale:
        """What was done after this step is lost."""
        self.step = step
        return self


def eventful(root: Path, *, seed: int = 1) -> Tale:
    """Preempted, killed with its node, raised an error, ran into its limit, done."""
    tale = Tale(root, seed=seed).submitted()
    tale.attempt(queue_s=900).train(120).sample().saved()
    tale.add("stop_requested", cause="sigterm").ended("preempted", "requeue")
    tale.attempt(queue_s=4400).train(125).sample()
    kept = tale.step - 100
    tale.failed("gpu02", "killed by SIGKILL", "")
    tale.ended("node_failed", "requeue", after_s=140, heard=tale.t).go_back(kept)
    tale.attempt(queue_s=500).train(43).sample()
    kept = tale.step - 60
    trace = f'Traceback (most recent call last):\n  File "train.py", line 7\n{NASTY}\n'
    tale.failed("<b>gpu02</b>", f"ValueError: bad batch {NASTY}", trace)
    tale.ended("crashed", "restart").go_back(kept)
    tale.attempt(inside=True, startup_s=25).train(150).sample().saved()
    tale.add("stop_requested", cause="sigusr2").ended("timed_out", "requeue")
    tale.attempt(queue_s=1500).train(160).sample().saved()
    tale.add("done", step=tale.step)
    return tale.ended("completed", "stop")
