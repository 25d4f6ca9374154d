"""A rank under NVIDIA's nsys: rank -> nsys -> the same rank again, as a program of its own.

The agent's own child stays and waits: torch's elastic agent awaits a value from it, and a rank that
had replaced itself by nsys would never be seen to end. What runs below nsys is the rank in every
other way: its signals, its log, its failure report, its share in the agent's death.

Without an nsys on the node the rank trains without it and says so in its log.
tests/unit/agent/test_nsys.py and tests/engines/test_nsys_run.py hold the promises.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.core.base.env import HPCTRAIN_NSYS
from hpctrain.core.base.process import die_with_parent, own_program
from hpctrain.observe.profile.files import folder_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.core.base.records import RankTask

log = logging.getLogger("hpctrain.agent")


def command(nsys: str, output: Path, program: Sequence[str], *, in_range: bool) -> list[str]:
    """Return the command line; `in_range` records from cudaProfilerStart to cudaProfilerStop only.

    `output` is the report, without its suffix. For the range see `runtime/profiler.py`.
    """
    window = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"] if in_range else []
    return [
        nsys,
        "profile",
        f"--output={output}",
        "--force-overwrite=true",
        "--trace=cuda,nvtx,osrt",
        "--sample=none",
        "--kill=none",  # training goes on when recording has ended
        "--wait=primary",  # a DataLoader worker that lingers must not hold up the rank's end
        *window,
        *program,
    ]


def run_below(task: RankTask, rank: int, attempt_dir: Path) -> bool:
    """Run this rank below nsys and wait; False if it is to run here, SystemExit if it failed."""
    if rank != task.nsys_rank or HPCTRAIN_NSYS in os.environ:
        return False
    nsys = shutil.which("nsys")
    if nsys is None:
        log.warning("there is no nsys on PATH: rank %d trains without it", rank)
        return False
    folder = attempt_dir.parent.parent / "profile" / folder_name(int(attempt_dir.name))
    folder.mkdir(parents=True, exist_ok=True)
    program = own_program("hpctrain.node.agent.rank_exec", json.dumps(asdict(task)))
    words = command(nsys, folder / f"rank-{rank:05d}", program, in_range=task.nsys_in_range)
    log.info("rank %d runs under %s; its report goes to %s", rank, nsys, folder)
    parent = os.getpid()
    with subprocess.Popen(
        words,
        env=environment(os.environ),
        preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509 - nothing else runs here yet
    ) as child:
        code = child.wait()
    if code != 0:
        raise SystemExit(code if code > 0 else 128 - code)
    return True


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What the rank below nsys needs beside what it inherits."""
    here = str(Path(__file__).resolve().parents[2])
    paths = [here, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**environ, HPCTRAIN_NSYS: "1", "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
