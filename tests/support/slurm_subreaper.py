"""Holds every process of a test cluster, and kills them all when its parent is gone.

    python -m tests.support.slurm_subreaper FOLDER

It is a child subreaper: whatever its daemons start (slurmstepd forks itself away, jobs daemonise)
stays its descendant, so that teardown finds everything by parentage and nothing by name. Requests
come as JSON lines on stdin, `{"argv": [...], "env": {...}, "log": path}`; the answer is the pid.
It sweeps and leaves at the end of stdin, at SIGTERM, and when its parent has died.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support import processes

PR_SET_CHILD_SUBREAPER = 36
LOCK = "replica_server.lock"
"""Held by the replica server as long as it lives: who can take it has found a dead cluster."""
PARENT_CHECK_S = 1.0
KEEP = "HPCTRAIN_KEEP_CLUSTER"
"""Set to anything: the folder with its logs outlives the cluster."""


def hold_lock(folder: Path) -> int:
    """Lock FOLDER/replica server.lock for as long as this process lives, however it ends."""
    fresh = folder / f"{LOCK}.fresh"
    handle = os.open(fresh, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    fresh.rename(folder / LOCK)  # never seen unlocked: that would mean a dead replica server
    return handle


def spawn(request: dict[str, object]) -> int:
    """Start one daemon in a session of its own and return its pid."""
    argv, env = request["argv"], request["env"]
    with Path(str(request["log"])).open("ab") as log:
        child = subprocess.Popen(
            argv,  # type: ignore[call-overload]
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    pid: int = child.pid
    child.returncode = 0  # reap() waits for it; Popen must not
    return pid


def reap() -> bool:
    """Collect every child that has ended, own or inherited; False when there is no child at all."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def sweep(limit_s: float = 20.0) -> bool:
    """Kill all descendants, however fast they fork, and wait for their end; True if it came."""
    deadline = time.monotonic() + limit_s
    while reap():
        if time.monotonic() > deadline:
            return False
        processes.kill_all(processes.descendants(os.getpid()))
        time.sleep(0.01)
    return True


def serve(parent: int) -> None:
    """Answer requests until stdin ends or the parent is gone."""
    os.set_blocking(0, False)
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        while os.getppid() == parent:
            ready = selector.select(PARENT_CHECK_S)
            reap()
            if not ready:
                continue
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                print(spawn(json.loads(line)), flush=True)


def main() -> int:
    """Serve, then sweep and remove the folder."""
    folder = Path(sys.argv[1])
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")

    def leave(*_: object) -> None:
        raise SystemExit

    signal.signal(signal.SIGTERM, leave)
    hold_lock(folder)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        serve(parent)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        clean = sweep()
        if clean and os.environ.get(KEEP):
            (folder / LOCK).unlink(missing_ok=True)  # a lock that nobody holds is a dead cluster's
        elif clean:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
