"""How many files and connections a process may have open, and how many a rank needs.

Each rank has a connection to every other in each of three process groups: the program's, the one
for our own exchanges, and the one for saves behind training. tests/engines/test_open_files.py
measures that with real ranks.
"""

from __future__ import annotations

import resource

PER_RANK = 3
BASE = 256
"""Logs, data files, libraries, GPU devices, DataLoader workers' pipes."""
MOST = 1 << 20
"""Programs that go through all that may be open would take minutes where there is no limit."""


def raise_limit() -> int:
    """Raise the soft limit to the hard one, for this process and all that it starts.

    Returns the limit that holds now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def needed(world_size: int) -> int:
    """What each of so many ranks may have open at a time."""
    return BASE + PER_RANK * world_size


def warning(world_size: int, limit: int, node: str) -> str:
    """What to say where a limit is too small for so many ranks; "" where it is not."""
    if limit >= needed(world_size):
        return ""
    return (
        f"each of {world_size} ranks may need {needed(world_size)} open files, and {node} allows "
        f"{limit} (ulimit -Hn): connections may fail with 'Too many open files'; have the limit "
        "raised (limits.conf, or LimitNOFILE of slurmd), or use fewer ranks"
    )
