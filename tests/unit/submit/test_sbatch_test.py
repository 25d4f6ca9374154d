"""`hpctrain sites test` renders what a submit would and tells what sbatch says, case by case."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.cluster.scheduler.slurm.client import SlurmCluster, check_accepted
from hpctrain.errors import ChecksFailed, ClusterError, ClusterUnreachable, UsageError
from hpctrain.launch.preflight import try_site

PRESET = """\
schema = 1
name = "mine"
[slurm]
required = ["--network=disable_rdzv_get"]
[partitions.gpu]
gpus_per_node = 4
max_nodes = 1
[partitions.big]
gpus_per_node = 8
min_nodes = 2
max_nodes = 4
[partitions.special]
auto = false
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(PRESET)
    return str(path)


def attempt(mine, tmp_path, ask, **asked):
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "sbatch").touch(mode=0o755)

    class Asks(SlurmCluster):
        def check_script(self, script):
            return check_accepted(script, ask)

    environ = {"PATH": str(bin_dir)}
    return try_site(mine, **asked, cwd=tmp_path, environ=environ, cluster=Asks())


def test_each_partition_is_tried_at_the_nodes_that_it_is_for(mine, tmp_path):
    scripts = []

    def ask(command):
        *words, path = command
        assert words == ["sbatch", "--test-only"]
        scripts.append(Path(path).read_text())
        if "--partition=big" in scripts[-1]:
            raise ClusterError("SLURM refused: too many GPUs")
        return ""

    trials = attempt(mine, tmp_path, ask)

    assert [(t.partition, t.nodes, t.gpus_per_node, t.accepted, t.why) for t in trials] == [
        ("gpu", 1, 4, True, ""),
        ("big", 2, 8, False, "SLURM refused: too many GPUs"),
    ]
    assert scripts == [t.script for t in trials]
    assert all("#SBATCH --network=disable_rdzv_get\n" in script for script in scripts)


def test_a_named_partition_is_tried_whatever_it_is_for(mine, tmp_path):
    trials = attempt(mine, tmp_path, lambda _: "", partitions=["special"])

    assert [(t.partition, t.nodes, t.accepted) for t in trials] == [
        ("special", 1, True),
        ("special", 2, True),
    ]


def test_what_hpctrain_itself_refuses_is_told_like_a_refusal_of_sbatch(mine, tmp_path):
    trials = attempt(mine, tmp_path, lambda _: "", partitions=["gpu"], nodes=[2])

    assert [(t.accepted, t.script) for t in trials] == [(False, "")]
    assert "gpu takes" in trials[0].why


def test_without_an_answer_nothing_is_called_refused(mine, tmp_path):
    def ask(_):
        raise ClusterUnreachable("slurmctld does not answer")

    with pytest.raises(ClusterUnreachable):
        attempt(mine, tmp_path, ask)


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"partitions": ["gpo"]}, UsageError, "did you mean gpu"),
        ({"nodes": [9]}, ChecksFailed, "no partition that submit may choose for 9 nodes"),
    ],
)
def test_a_wrong_question_is_refused(mine, tmp_path, asked, error, words):
    with pytest.raises(error, match=words):
        attempt(mine, tmp_path, lambda _: "", **asked)
