"""`hpctrain status` of a run of 8,192 ranks and 30 days, made up on disk.

    python benchmarks/status_large.py

What grows is there: a ledger with a mark a minute and 30 attempts of 1,024 nodes, a log and its
times for each rank, samples of all ranks, and three checkpoints with a file for each rank (sparse).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.ledger.run.layout import RunDir

RANKS, RANKS_PER_NODE = 8192, 8
DAYS, ATTEMPTS = 30, 30
CHECKPOINTS = 3
ROUNDS = 3
GOAL_S = 1.0


def main() -> None:
    """Make the run and time the command."""
    with tempfile.TemporaryDirectory() as name:
        run = make_run(Path(name) / "runs" / "large", RANKS)
        size = run.events.stat().st_size / 1e6
        for words in (["status"], ["status", "--json"]):
            seconds = min(timed(run, words) for _ in range(ROUNDS))
            verdict = "reached" if seconds <= GOAL_S else "MISSED"
            print(
                f"{' '.join(words)}: {seconds:.2f} s of {RANKS:,} ranks, {size:.0f} MB of events; "
                f"goal <= {GOAL_S:g} s {verdict}"
            )


def timed(run: RunDir, words: list[str]) -> float:
    """Seconds of the whole command."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "hpctrain", *words, str(run.root)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def make_run(root: Path, ranks: int) -> RunDir:
    """The directory as it would lie there."""
    from tests.support.ledger_runs import Story

    run = Story(root, t=time.time() - DAYS * 86400).run
    run.events.write_text("".join(ledger(ranks)))
    folder = run.attempt(ATTEMPTS)
    folder.mkdir(parents=True)
    for rank in range(ranks):
        log = run.rank_log(ATTEMPTS, rank)
        log.write_text("step 1\n")
        log.with_suffix(".times").write_text("1 7\n")
    row = [1.2345] * ranks
    sample = {"t": time.time(), "step": 1, "steps": 10, "wall_s": row, "data_s": row, "own_s": row}
    run.rank_times(ATTEMPTS).write_text((json.dumps(sample) + "\n") * 40)
    for step in range(1, CHECKPOINTS + 1):
        make_checkpoint(run, step * 1000, ranks)
    return run


def ledger(ranks: int) -> Iterator[str]:
    """Its lines, oldest first."""
    begin = time.time() - DAYS * 86400
    nodes = [f"node{number:05d}" for number in range(ranks // RANKS_PER_NODE)]
    marks = DAYS * 1440 // ATTEMPTS
    yield line(begin, "submitted", None, job_id="local-1", cluster="local", nodes="1024")
    for number in range(1, ATTEMPTS + 1):
        t, step = begin + (number - 1) * marks * 60.0, (number - 1) * marks * 10
        where = {"job_id": "local-1", "restarts": number - 1, "nodes": nodes, "by": "start"}
        yield line(t, "attempt_started", number, **where, world_size=ranks, ranks_per_node=8)
        yield line(t + 9, "restored", number, step=step, seconds=3.0, checkpoint=None, skipped=[])
        for mark in range(1, marks + 1):
            last = step + mark * 10
            counts = {"sample_first": (last - 10) * 512, "sample_last": last * 512}
            times = {"seconds": 60.001, "p50_s": 5.98765, "p95_s": 6.12345, "data_s": mark * 0.12}
            sums = {"tokens": 20971520, "flops": 1.23456e18, "slow_rank": 7, "slow_by": 0.0412}
            loss = {"loss": 2.123456, "grad_norm": 0.987654}
            more = {**counts, **times, **sums, **loss}
            yield line(t + mark * 60 - 1, "steps", number, first=last - 9, last=last, **more)
            if mark % 30 == 0:
                name = f"step-{last:010d}"
                saved = {"bytes": 4096, "seconds": 3.0, "stall_s": 0.4, "checkpoint": name}
                yield line(t + mark * 60, "saved", number, step=last, **saved)
        if number < ATTEMPTS:
            end = {"reason": "preempted", "next": "requeue", "by": "agent", "facts": {}}
            yield line(t + marks * 60, "attempt_ended", number, **end)


def line(t: float, kind: str, attempt: int | None, **fields: object) -> str:
    """One fact."""
    return json.dumps({"t": round(t, 3), "kind": kind, "attempt": attempt} | fields) + "\n"


def make_checkpoint(run: RunDir, step: int, ranks: int) -> None:
    """A whole one, but for its bytes."""
    from hpctrain.checkpoint.format import manifest as manifests
    from hpctrain.checkpoint.format import shard
    from hpctrain.checkpoint.format.manifest import FileEntry, Manifest

    path = run.checkpoints / manifests.step_name(step)
    path.mkdir(parents=True)
    digest = "xxh3_64-blocks:" + "0" * 16
    files = [FileEntry(shard.file_name(rank), 1 << 30, digest) for rank in range(ranks)]
    files.append(FileEntry(manifests.TABLE_NAME, 1 << 20, "xxh3_64:" + "0" * 16))
    for entry in files:
        with (path / entry.name).open("wb") as file:
            os.truncate(file.fileno(), entry.size)
    about = Manifest(
        run_id="id", name=run.name, step=step, world_size=ranks, mesh={"dp": ranks},
        engine="fsdp2", files=files,
    )  # fmt: skip
    manifests.dump(about, path / manifests.MANIFEST_NAME)


if __name__ == "__main__":
    main()
