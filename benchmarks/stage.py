"""What nodes read of the Python environment on the shared folder, with `environment.stage` and not.

    python benchmarks/stage.py

Starts the tests' own SLURM and an environment with hpctrain and torch, and counts by strace what
the tasks of two nodes ask of the folder in which the environment and its archive lie. What a
library's pages cost is not seen by strace: files that are opened count with their whole size in a
column of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

if TYPE_CHECKING:
    from tests.support.file_operations import Operation
    from tests.support.slurm_cluster import SlurmCluster

NODES, RANKS = 2, 2
SCRIPT = Path(__file__).parents[1] / "tests" / "support" / "scripts" / "where_from.py"


class Asked(NamedTuple):
    """What was asked of the shared folder.

    Attributes:
        operations: Names looked up, opened and listed.
        read_bytes: By read(2).
        opened_bytes: Sizes of all files that were opened, each counted once.
    """

    operations: int
    read_bytes: int
    opened_bytes: int


def main() -> None:
    """Three starts: without a copy, with one that is made, with one that is there."""
    from tests.support.file_operations import missing
    from tests.support.slurm_cluster import SlurmCluster

    if lacking := missing() + SlurmCluster.missing():
        print(f"left out, missing: {', '.join(lacking)}")
        return
    with SlurmCluster() as slurm, tempfile.TemporaryDirectory() as name:
        from tests.support.small_environment import make_environment

        folder = Path(name)
        make_environment(folder / "shared" / "venv", "hpctrain")
        for node in slurm.nodes:
            (folder / "disk" / node).mkdir(parents=True)
        compile_all(folder)
        shown("not staged", folder, started(slurm, folder, "plain", "no"))
        shown("staged", folder, started(slurm, folder, "first", "yes"))
        shown("staged before", folder, started(slurm, folder, "again", "yes"))


def compile_all(folder: Path) -> None:
    """Write the bytecode, as an installer does: else the first start alone would."""
    python = folder / "shared" / "venv" / "bin" / "python"
    packages = folder / "shared" / "venv" / "lib"
    subprocess.run([python, "-m", "compileall", "-q", packages], check=False, capture_output=True)


def started(slurm: SlurmCluster, folder: Path, name: str, stage: str) -> dict[str, Asked]:
    """Of one run: what each node's ranks, and all else on it, have asked."""
    from hpctrain.ledger.run.layout import RunDir
    from tests.support.scenario import RunHandle

    traces, told = folder / name / "traces", folder / name / "told"
    for path in (traces, told, folder / name / "tools"):
        path.mkdir(parents=True)
    (folder / "go").touch()
    put_in_front(folder / name / "tools", traces)
    env = {key: value for key, value in slurm.env.items() if not key.startswith("PYTHON")}
    env["PATH"] = f"{folder / name / 'tools'}{os.pathsep}{env['PATH']}"
    python = folder / "shared" / "venv" / "bin" / "python"
    done = subprocess.run(
        [
            *(python, "-m", "hpctrain", "submit", "--cluster=slurm", f"--name={name}"),
            *(f"--runs={folder / 'shared' / 'runs'}", "--no-snapshot", "--json"),
            *(f"--nodes={NODES}", f"--ranks-per-node={RANKS}", "--time=10"),
            f"--set=environment.stage={stage}",
            f"--set=environment.stage_dir={folder / 'disk'}/$SLURMD_NODENAME",
            *("--", SCRIPT, told, folder / "go"),
        ],
        cwd=folder,
        env=env,
        check=True,
        capture_output=True,
    )
    submitted = json.loads(done.stdout)
    run = RunDir(Path(submitted["run_dir"]))
    RunHandle(slurm, folder, run, submitted["job_id"]).wait_done()
    return counted(traces, folder)


def put_in_front(tools: Path, traces: Path) -> None:
    """A bash that counts what a task's shell and all that it starts ask."""
    from tests.support.file_operations import STRACE

    strace = " ".join(f"'{word}'" for word in STRACE)
    real = shutil.which("bash")
    name = "$SLURMD_NODENAME.$SLURM_STEP_ID"
    (tools / "bash").write_text(
        f"#!{real}\n"
        f'[ -n "$SLURM_PROCID" ] && [ -z "$COUNTED" ] || exec {real} "$@"\n'
        f'COUNTED=1 exec {strace} -o "{traces}/{name}" {real} "$@"\n'
    )
    (tools / "bash").chmod(0o755)


def counted(traces: Path, folder: Path) -> dict[str, Asked]:
    """By node, and who on it, what was asked of the environment and its archive."""
    from tests.support.file_operations import traced

    shared = [str(folder / "shared" / "venv"), sys.base_prefix]
    shared += map(str, (folder / "shared" / "runs").glob(".environments-*"))
    by_who: defaultdict[str, list[Operation]] = defaultdict(list)
    for path in sorted(traces.iterdir()):
        node = path.name.partition(".")[0]
        for operation in traced(path):
            if any(operation.path.startswith(f"{place}/") for place in shared):
                who = "ranks" if operation.owner.startswith("rank") else "others"
                by_who[f"{node} {who}"].append(operation)
    nodes = {path.name.partition(".")[0] for path in traces.iterdir()}
    names = [f"{node} {who}" for node in sorted(nodes) for who in ("ranks", "others")]
    return {name: summed(by_who[name]) for name in names}


def summed(operations: list[Operation]) -> Asked:
    from tests.support.file_operations import METADATA

    opened = {Path(one.path) for one in operations if one.kind == "open"}
    return Asked(
        sum(one.kind in METADATA for one in operations),
        sum(one.nbytes for one in operations if one.kind == "read"),
        sum(path.stat().st_size for path in opened if path.is_file()),
    )


def shown(what: str, folder: Path, asked: dict[str, Asked]) -> None:
    """Print it, and its ratio to one archive for each node."""
    for who, sums in asked.items():
        print(
            f"{what:13} {who:9} {sums.operations:6} operations, {sums.read_bytes / 1e6:8.1f} MB "
            f"read, files of {sums.opened_bytes / 1e6:8.1f} MB opened"
        )
    facts = list((folder / "shared" / "runs").glob(".environments-*/*.json"))
    if facts:
        archive = json.loads(facts[0].read_text())["size_bytes"]
        read = sum(sums.read_bytes for sums in asked.values()) / NODES
        most = sum(max(sums.read_bytes, sums.opened_bytes) for sums in asked.values()) / NODES
        print(
            f"{what:13} {read / archive:.3f} x one archive ({archive / 1e6:.0f} MB) read by each "
            f"node, {most / archive:.3f} x with all pages of what was opened (goal: at most 1.1)"
        )


if __name__ == "__main__":
    main()
