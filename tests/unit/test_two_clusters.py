"""Two workers at most have a SLURM cluster; the others run what needs none, and no file is lost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.two_clusters import TwoClusters, place

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


def ran(files, count, tests=4):
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


def test_two_workers_share_all_files_in_order():
    first, second = ran(SLURM + OTHERS, 2)

    assert (first, second) == ((SLURM + OTHERS)[::2], (SLURM + OTHERS)[1::2])


def test_where_all_need_slurm_the_third_worker_has_nothing_to_do():
    assert ran(SLURM, 3)[2] == []
    assert ran(SLURM + OTHERS[:1], 3)[2] == OTHERS[:1]


def test_without_slurm_all_share():
    assert [len(files) for files in ran(OTHERS, 4)] == [1] * 4


def test_a_file_of_few_tests_is_no_reason_to_stop():
    assert ran(SLURM + OTHERS, 3, tests=1)[2][0] == OTHERS[0]


def test_whole_local_runs_wait_until_no_cluster_is_left():
    files = ["tests/docs/a", "tests/e2e/b", "tests/engines/c", "tests/slurm/d", "tests/unit/e"]

    assert [file[-1] for file in sorted(files, key=place)] == ["d", "c", "e", "a", "b"]
