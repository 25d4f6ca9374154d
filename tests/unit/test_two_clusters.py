"""Two workers at most have a SLURM cluster; the others run what needs none, and no file is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.two_clusters import NO_CLUSTER_LEFT, TwoClusters, place

SLURM = [f"tests/slurm/test_{name}.py" for name in "abcd"]
OTHERS = [f"tests/unit/test_{name}.py" for name in "efgh"]


class Worker:
    """What is needed of xdist's: it does what it is told at once."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.shutting_down = False
        self.gateway = SimpleNamespace(id="gw")

    def send_runtest_some(self, numbers):
        assert not self.shutting_down
        self.told += numbers

    def shutdown(self):
        self.shutting_down = True


def ran(files, count, tests=4, after_test=lambda name: None):
    """The files that each of so many workers was given, all of whose tests then ran."""
    collection = [f"{file}::test_{number}" for file in files for number in range(tests)]
    option = SimpleNamespace(loadscopereorder=False)
    config = SimpleNamespace(option=option, getvalue=lambda _: [f"{count}*popen"])
    order = TwoClusters(config)
    workers = [Worker() for _ in range(count)]
    for worker in workers:
        order.add_node(worker)
        order.add_node_collection(worker, collection)
    order.schedule()
    done = {id(worker): 0 for worker in workers}
    while not all(done[id(worker)] == len(worker.told) for worker in workers):
        for worker in workers:  # a test each, by turns
            if done[id(worker)] < len(worker.told):
                number = worker.told[done[id(worker)]]
                done[id(worker)] += 1
                order.mark_test_complete(worker, number)
                after_test(collection[number])
    assert sorted(number for worker in workers for number in worker.told) == list(
        range(len(collection))
    )
    assert order.tests_finished
    assert all(worker.shutting_down for worker in workers)
    return [
        list(dict.fromkeys(collection[number].split("::")[0] for number in worker.told))
        for worker in workers
    ]


@pytest.mark.parametrize("count", [3, 4])
def test_two_workers_take_what_needs_slurm_first(count):
    first, second, *others = ran(SLURM + OTHERS, count)

    assert sorted(file for file in first + second if file in SLURM) == SLURM
    assert [first[0], second[0]] == SLURM[:2]
    assert all(file in OTHERS for worker in others for file in worker)
    assert others[0][0] == OTHERS[0]


def test_the_last_of_many_begins_with_unit_tests():
    engines = [f"tests/engines/test_{name}.py" for name in "abcd"]
    *others, third, last = ran(SLURM + engines + OTHERS, 4)

    assert last[0] == OTHERS[0]
    assert third[0] == engines[0]
    assert not any(file in SLURM for file in third + last)
    assert not any(file in OTHERS for file in [files[0] for files in others])


def test_two_workers_share_all_files_in_order():
    first, second = ran(SLURM + OTHERS, 2)

    assert (first, second) == ((SLURM + OTHERS)[::2], (SLURM + OTHERS)[1::2])


def test_where_all_need_slurm_the_third_worker_has_nothing_to_do():
    assert ran(SLURM, 3)[2] == []
    assert ran(SLURM + OTHERS[:1], 3)[2] == OTHERS[:1]


def test_without_slurm_all_share():
    assert [len(files) for files in ran(OTHERS, 4)] == [1] * 4


CRASHES = """
import os
from pathlib import Path

def test_before():
    pass

def test_crash():
    once = Path(__file__).with_name("once")
    if not once.exists():
        once.touch()
        os.abort()

def test_behind():
    pass
"""
PLUGIN = """
import sys

import pytest

sys.path.insert(0, {root!r})
from tests.support.two_clusters import TwoClusters

@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return TwoClusters(config, log)
"""


@pytest.mark.parametrize("files", [1, 3])
def test_a_worker_that_crashes_fails_one_test_and_the_others_go_on(tmp_path, files):
    """xdist's own schedule waited for ever for a new worker that had nothing to do."""
    root = Path(__file__).parents[2]
    (tmp_path / "conftest.py").write_text(PLUGIN.format(root=str(root)))
    for number in range(files):
        (tmp_path / f"test_a{number}.py").write_text("def test_a(): pass\ndef test_b(): pass\n")
    (tmp_path / "test_z.py").write_text(CRASHES)

    words = ["-q", "-p", "no:cacheprovider", "-n", "1", "--dist", "loadfile", "-rA"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "--no-loadscope-reorder", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "PYTEST_ADDOPTS": "", "PYTHONFAULTHANDLER": ""},
    )

    assert done.returncode == 1, done.stdout + done.stderr
    assert f"1 failed, {2 * files + 2} passed" in done.stdout
    assert "crashed while running" in done.stdout
    assert "PASSED test_z.py::test_behind" in done.stdout


def test_a_file_of_few_tests_is_no_reason_to_stop():
    assert ran(SLURM + OTHERS, 3, tests=1)[2][0] == OTHERS[0]


def test_whole_local_runs_wait_until_no_cluster_is_left():
    files = ["tests/docs/a", "tests/e2e/b", "tests/engines/c", "tests/slurm/d", "tests/unit/e"]

    assert [file[-1] for file in sorted(files, key=place)] == ["d", "c", "e", "a", "b"]


def test_a_file_appears_with_the_end_of_the_last_test_that_needs_a_cluster(tmp_path, monkeypatch):
    path, seen = tmp_path / "over", []
    monkeypatch.setenv(NO_CLUSTER_LEFT, str(path))
    ran(SLURM + OTHERS, 4, after_test=lambda name: seen.append((name, path.exists())))

    of_slurm = [is_over for name, is_over in seen if name.startswith("tests/slurm/")]
    assert of_slurm == [False] * (len(of_slurm) - 1) + [True]
    last = max(n for n, (name, _) in enumerate(seen) if name.startswith("tests/slurm/"))
    assert all(is_over is (n >= last) for n, (_, is_over) in enumerate(seen))
    assert last < len(seen) - 1
