"""A rank's connections fit its limit of open files, which is raised as far as it goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.core.base.process import BASE, MOST, PER_RANK, needed, warning
from tests.support.gloo import launch
from tests.support.patience import PATIENCE_S

LIMITED = """
import json, resource, socket, sys
from hpctrain.core.base.process import needed, raise_limit
soft, hard, world_size = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
limit = raise_limit()
kept = []
try:
    while 2 * len(kept) < needed(world_size) - 16:  # this process has some open itself
        kept.append(socket.socketpair())
except OSError as error:
    kept = [error.errno]
told = [limit, resource.getrlimit(resource.RLIMIT_NOFILE), 2 * len(kept)]
kept.clear()
print(json.dumps(told))
"""


def limited(soft, hard, world_size):
    words = [sys.executable, "-c", LIMITED, *map(str, (soft, hard, world_size))]
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def test_the_connections_of_1024_ranks_fit_once_the_limit_is_raised():
    limit, now, opened = limited(1024, 4096, 1024)

    assert (limit, now) == (4096, [4096, 4096])
    assert opened >= 1024 * PER_RANK >= 1024, "more than the usual soft limit"


def test_a_hard_limit_that_is_too_small_is_told_in_a_line():
    limit, now, opened = limited(256, 1024, 1024)

    assert (limit, now, opened) == (1024, [1024, 1024], 2), "it failed"
    told = warning(1024, limit, "n1")
    assert told.startswith("each of 1024 ranks may need 1280 open files, and n1 allows 1024")
    assert "\n" not in told


def test_a_limit_that_is_large_enough_is_left_alone_and_not_told():
    assert limited(4096, 4096, 2)[:2] == [4096, [4096, 4096]]
    assert warning(512, needed(512), "n1") == ""
    assert warning(512, needed(512) - 1, "n1") != ""
    assert needed(100_000) <= MOST


HPCTRAIN = (sys.executable, "-m", "hpctrain")
SHOW = """
import pathlib, resource
pathlib.Path("limit.txt").write_text(str(resource.getrlimit(resource.RLIMIT_NOFILE)))
"""


def test_the_ranks_of_an_unchanged_program_have_the_limit_that_their_agent_raised(tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    words = ["submit", "--cluster=local", "--nodes=1", "--ranks-per-node=1", "--no-snapshot"]
    words += ["--name=r", "--set=preflight.enabled=no", "--", "show.py"]
    low = ["sh", "-c", 'ulimit -Sn 300; ulimit -Hn 3000; exec "$@"', "sh"]

    for command in ([*low, *HPCTRAIN, *words], [*HPCTRAIN, "logs", "r", "-f"]):
        subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "HPCTRAIN_LOCAL_DIR": str(tmp_path / "local")},
            check=True,
            capture_output=True,
            timeout=PATIENCE_S,
        )

    assert (tmp_path / "limit.txt").read_text() == "(3000, 3000)"


def _open_files():
    import torch
    import torch.distributed as dist

    from hpctrain.core.world import apart, broadcast
    from hpctrain.train.joining_ranks import join_world

    before = len(list(Path("/proc/self/fd").iterdir()))
    world = join_world()
    beside = apart(world, 60.0)
    for each in (world, beside):
        broadcast(each, 1)
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    after = len(list(Path("/proc/self/fd").iterdir()))
    dist.barrier()
    return after - before


@pytest.mark.parametrize(("tree", "groups"), [(1, PER_RANK), (0, 3)], ids=["agents", "gloo"])
def test_each_further_rank_costs_a_rank_what_is_counted_for_it(tree, groups):
    """Without agents our two exchanges are groups like the program's."""
    few, more = (launch(_open_files, ranks, tree=tree)[1:] for ranks in (2, 5))  # 0 has the store

    assert max(more) - max(few) == 3 * groups
    assert max(few) <= 2 * groups + BASE // 8
