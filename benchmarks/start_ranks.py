"""Start of 8 ranks: our agent against torchrun and spawn, on the same program in the same run.

Printed: seconds from starting the launcher to the end of the first DDP step on all ranks, and the
ratio. Run it on a quiet machine: python benchmarks/start_ranks.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS = 8
REPEATS = 3
PROGRAM = """
import os, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(4, 64)).sum().backward()
optimizer.step()
dist.barrier()
if dist.get_rank() == 0:
    open(os.environ["DONE_FILE"], "w").write(str(time.time()))
dist.destroy_process_group()
"""


def timed(command: list[str], done: Path, env: dict[str, str]) -> float:
    """Seconds until rank 0 says that the first step is done."""
    started = time.time()
    subprocess.run(
        command,
        check=True,
        env={**os.environ, **env, "DONE_FILE": str(done)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    seconds = float(done.read_text()) - started
    done.unlink()
    return seconds


def ours(folder: Path, script: Path, method: str) -> tuple[float, float]:
    """A job of one local node with 8 ranks: seconds from its start on, and from its imports on."""
    from hpctrain.cluster.scheduler import local as client
    from hpctrain.core.settings.schema import RunSettings, Settings, SlurmSettings
    from hpctrain.core.settings.spec import Entry, Spec
    from hpctrain.ledger.run import events
    from hpctrain.ledger.run.event_types import AttemptStarted
    from hpctrain.ledger.run.layout import RunDir

    root = Path(tempfile.mkdtemp(dir=folder))
    settings = Settings(
        slurm=SlurmSettings(ranks_per_node=RANKS), run=RunSettings(start_method=method)
    )
    entry = Entry("script", str(script), cwd=str(root))
    spec = Spec("bench", "id", time.time(), "local", "", entry, settings, python=sys.executable)
    spec.dump(root / "spec.json")
    os.environ["HPCTRAIN_LOCAL_DIR"] = str(root / "local")
    record = client.create(
        client.LocalJobRecord("", "bench", str(RunDir(root).root), 1, 1, 600, 60)
    )
    done = root / "done"
    started = time.time()
    seconds = timed(
        [sys.executable, "-m", "hpctrain.entry.local_controller", record.job_id],
        done,
        {"HPCTRAIN_LOCAL_DIR": str(root / "local")},
    )
    begun = next(
        event.fact for event in events.read(RunDir(root)) if isinstance(event.fact, AttemptStarted)
    )
    return seconds, seconds - ((begun.imported or 0.0) - started)


def main() -> None:
    """Measure each in turn, so that a busy moment hits all of them alike."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "first_step.py"
        script.write_text(PROGRAM)
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={RANKS}",
            str(script),
        ]
        rows: dict[str, list[float]] = {
            "torchrun": [],
            "hpctrain, spawn": [],
            "hpctrain, fork": [],
            "fork, imports done": [],
        }
        for _ in range(REPEATS):
            rows["torchrun"].append(timed(torchrun, folder / "done", {"OMP_NUM_THREADS": "1"}))
            rows["hpctrain, spawn"].append(ours(folder, script, "spawn")[0])
            cold, warm = ours(folder, script, "fork")
            rows["hpctrain, fork"].append(cold)
            rows["fork, imports done"].append(warm)
    base = min(rows["torchrun"])
    for label, seconds in rows.items():
        times = " ".join(f"{s:.2f}" for s in seconds)
        print(
            f"{label:18} best {min(seconds):6.2f} s   "
            f"{base / min(seconds):5.2f} x torchrun's speed   ({times})"
        )


if __name__ == "__main__":
    main()
