"""Prove hpctrain on this machine's GPU: `make gpu`, or `python3 -m tests.gpu` from a checkout.

The parts run in order of value, each in a process of its own and within its time limit. Together
they take 8 minutes at most. gpu-results.json and gpu-results.md are written as tests end.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gpu.results import FAILED, NOT_RUN, PASSED, REHEARSED, TABLE_NAME, Results, Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TOP = Path(__file__).parents[2]
HERE = Path(__file__).parent
TOTAL_S = 480.0
REHEARSAL = 3
"""So many times its limit may a part take on a CPU: a busy machine of two cores takes long."""
LEAST_S = 10.0
"""With less time left no part begins: torch and CUDA alone take that."""
END_S = 3.0
"""From SIGTERM to SIGKILL for a part whose time is up."""
NO_GPU = 3
NO_TESTS, NOT_CHOSEN = 5, "no test was chosen"
"""How pytest ends there."""
SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Part:
    """Files of tests that one process runs.

    Attributes:
        name: For `--only`.
        limit_s: On a GPU.
        files: In this folder.
    """

    name: str
    limit_s: float
    files: tuple[str, ...]


PARTS = (
    Part("device", 25, ("test_device.py",)),
    Part("saves", 30, ("test_saves.py",)),
    Part("engines", 55, ("test_engines.py",)),
    Part("runs", 70, ("test_runs.py",)),
    Part("speed", 50, ("test_save_speed.py",)),
    Part("steps", 80, ("test_steps.py",)),
    Part("watch", 45, ("test_watch.py",)),
    Part("ranks", 20, ("test_ranks.py",)),
    Part("faults", 25, ("test_faults.py",)),
    Part("kill", 25, ("test_kill_time.py",)),
    Part("compiled", 55, ("test_compiled.py",)),
)
"""In order of value."""


def main(argv: Sequence[str]) -> int:
    """Run the parts; 0 where every test passed, 1 otherwise, 3 without a GPU."""
    given, began = _arguments(argv), time.monotonic()
    if given.dry:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a rehearsal is one on a GPU machine too
    os.environ["PYTHONPATH"] = os.pathsep.join(_import_path(given.wheels))
    about = _about(is_dry=given.dry)
    if "device" not in about and not given.dry:
        print(f"no GPU here (torch: {about['torch']}); `make gpu-dry` rehearses on the CPU")
        return NO_GPU
    chosen = [part for part in PARTS if not given.only or part.name in given.only]
    if given.together:
        files = tuple(name for part in chosen for name in part.files)
        chosen = [Part("together", sum(part.limit_s for part in chosen), files)]
    rows = {part.name: Row(NOT_RUN, "the run ended before it") for part in chosen}
    Results(about, rows).write(given.out)
    results = _run_all(chosen, given, began)
    print((given.out / TABLE_NAME).read_text())
    for name, row in {**results.parts, **results.tests}.items():
        if row.outcome in {FAILED, NOT_RUN}:
            print(f"{row.outcome}: {name}: {row.why}")
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(results.counts.items()))
    print(f"{counts or 'no tests'}; results: {given.out / TABLE_NAME}")
    return 0 if results.is_good else 1


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python3 -m tests.gpu", description=about)
    add = parser.add_argument
    names = [part.name for part in PARTS]
    add("--only", action="append", choices=names, help="run this part; may be repeated")
    add("-k", default="", metavar="EXPRESSION", help="run the tests that pytest's -k chooses")
    add("--dry", action="store_true", help="rehearse on the CPU")
    add("--together", action="store_true", help="all parts in one process, which is quicker")
    add("--wheels", type=Path, help="folder of wheels; what the machine lacks is installed")
    out = Path(os.environ.get("OUT") or TOP / "build" / "gpu")
    add("--out", type=Path, default=out, help="folder of the results; $OUT, or build/gpu")
    add("--seconds", type=float, default=TOTAL_S, help="for everything together")
    return parser.parse_args(argv)


def _import_path(wheels: Path | None) -> list[str]:
    """Return the folders to import from: the checkout, then what the machine lacked."""
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    lacking = [path for path in sorted((wheels or TOP / "none").glob("*.whl")) if _lacks(path)]
    if not lacking:
        return [str(TOP), *before]
    site = TOP / "build" / "gpu-site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    pip += ["--no-compile", "--no-cache-dir", "--upgrade", "--target", str(site)]
    subprocess.run([*pip, *map(str, lacking)], check=True)
    print(f"installed into {site}: {', '.join(path.name for path in lacking)}")
    return [str(TOP), *before, str(site)]


def _lacks(wheel: Path) -> bool:
    """Return whether the machine lacks a distribution: its own are kept, as its torch is."""
    try:
        metadata.distribution(wheel.name.partition("-")[0])
    except metadata.PackageNotFoundError:
        return True
    return False


ABOUT = """
import json, torch
said = {"torch": torch.__version__}
if torch.cuda.is_available():
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    said["device"] = f"{torch.cuda.get_device_name(0)}, {gib:.0f} GiB"
    said["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps(said))
"""


def _about(*, is_dry: bool) -> dict[str, Any]:
    """Return when and on what this runs. Another process asks torch: this one needs no CUDA."""
    words = [sys.executable, "-c", ABOUT]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    failed = {"torch": done.stderr.strip().rpartition("\n")[2]}
    git = ["git", "-C", str(TOP), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": commit or "not known",
        "ran as": "a rehearsal on a CPU, which proves nothing of a GPU" if is_dry else "on the GPU",
        **(json.loads(done.stdout) if done.returncode == 0 else failed),
        "Python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def _run_all(parts: Sequence[Part], given: argparse.Namespace, began: float) -> Results:
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)  # what a part leaves behind is this one's
    for part in parts:
        left = given.seconds - (time.monotonic() - began)
        limit = min(left, part.limit_s * (REHEARSAL if given.dry else 1))
        row, at = Row(NOT_RUN, "no time was left"), time.monotonic()
        if left > LEAST_S:
            print(f"# {part.name} (at most {limit:.0f} s)", flush=True)
            row = _run(part, given, limit)
            row.seconds = round(time.monotonic() - at, 1)
        results = Results.read(given.out)
        results.parts[part.name] = row
        if row.why == NOT_CHOSEN:
            del results.parts[part.name]
        results.about["seconds"] = round(time.monotonic() - began, 1)
        results.write(given.out)
    return Results.read(given.out)


def _run(part: Part, given: argparse.Namespace, limit_s: float) -> Row:
    """Run one part; what its tests said is in the results already."""
    words = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "-rN"]
    words += ["-c", str(HERE / "runner.ini"), "--rootdir", str(TOP), "--confcutdir", str(HERE)]
    words += ["-p", "tests.gpu.recording", "--gpu-results", str(given.out)]
    words += ["-p", "no:cacheprovider", *(["-k", given.k] if given.k else [])]
    words += [str(HERE / name) for name in part.files]
    with subprocess.Popen(words, cwd=TOP, start_new_session=True) as tests:
        try:
            code: int | None = tests.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            tests.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                tests.wait(END_S)
        _end_rest()
    if code is None:
        return Row(FAILED, f"its {limit_s:.0f} s were up")
    if code == NO_TESTS:
        return Row(NOT_RUN, NOT_CHOSEN)
    why = f"pytest ended with {code}" if code else ""
    return Row(FAILED if code else REHEARSED if given.dry else PASSED, why)


def _end_rest() -> None:
    """End all that a part has left: it would hold the GPU's memory and disturb the next part."""
    while left := list(_children(os.getpid())):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        yield from map(int, path.read_text().split())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
