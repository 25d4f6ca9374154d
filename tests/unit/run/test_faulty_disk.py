"""One operation of a disk fails, each in turn: nothing is lost, and what is said is one line.

Through tests/support/client_disk.py, so that it is the system's call that fails, wherever Python or
we make it.
"""

from __future__ import annotations

import itertools
import os

import pytest

from hpctrain.checkpoint.store import find, retention, verify
from hpctrain.cli.main import main
from hpctrain.errors import HpctrainError
from hpctrain.ledger.run import fence
from hpctrain.ledger.run.events import read
from hpctrain.ledger.run.fence import read_fence, take_attempt
from hpctrain.ledger.run.layout import RunDir
from tests.support import checkpoints as support
from tests.support import client_disk
from tests.support.ledger_runs import Story, fields_of, write_event

pytestmark = pytest.mark.fuse
ERRORS = ("ESTALE", "EIO", "ENOSPC", "EDQUOT")
HARMLESS = ({"op": "*", "do": "delay 0.05"}, {"op": "flock", "do": "lost"})
"""Whatever is slow, and whichever lock is none: each alone must be noticed by nobody."""


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faulty")
    with client_disk.mounted(folder / "behind", folder / "here") as rules:
        yield folder / "here", rules


@pytest.fixture(params=[64, pytest.param(4, marks=[pytest.mark.soak, pytest.mark.timeout(0)])])
def faults(disk, request):
    """Of the operations of a piece of work each error meets one in so many."""
    rules, stride = disk[1], request.param
    return lambda work: each_fault(rules, work, stride)


@pytest.fixture
def run(disk, request, monkeypatch):
    monkeypatch.setattr(fence, "LOCK_TIMEOUT_S", 2.0)
    root = disk[0] / request.node.name
    root.mkdir()
    return RunDir(root)


def each_fault(rules, work, stride):
    """Do a piece of work again and again, another operation of it failing each time.

    Yields what failed, what the work gave (None where it raised), and what it raised.
    """
    faults = [{"op": "*", "do": error} for error in ERRORS]
    for number, fault in enumerate([*faults, *HARMLESS]):
        every = stride if fault["op"] == "*" else 1
        for after in itertools.count(every // 4 * (number % 4), every):
            rule = {**fault, "path": "*", "count": 1, "after": after}
            given = raised = None
            with rules.during(rule):
                try:
                    given = work()
                except (HpctrainError, OSError) as problem:
                    raised = str(problem)
            assert raised is None or "\n" not in raised
            assert raised is None or fault not in HARMLESS, (raised, rules.hits())
            if not rules.hits():
                break
            yield rules.hits()[0], given, raised


def test_a_save_is_there_whole_or_was_told_to_have_failed(run, faults):
    attempt = support.next_attempt(run)
    support.save(run, attempt, 1)
    steps = itertools.count(2)
    newest, tried = 1, 0

    for fault, saved, raised in faults(lambda: support.save(run, attempt, next(steps))):
        tried += 1
        there = find.choose(run).checkpoint
        assert verify.verify(there) == [], fault
        assert there.step >= newest, (fault, "an older one came back")
        if raised is None:
            assert there.path == saved[0], (fault, "it was told to be saved")
        newest = there.step
        retention.prune(run, retention.Rules(2), attempt=attempt)

    assert tried > 2
    assert support.save(run, attempt, next(steps))
    assert not list(run.checkpoints.glob(".look*"))


def test_no_fact_that_was_written_is_lost_or_torn(run, disk):
    numbers = itertools.count()
    told = []

    def write():
        number = next(numbers)
        write_event(run, "x", number=number)
        told.append(number)

    for fault, _, _ in each_fault(disk[1], write, 4):
        there = [fields_of(event)["number"] for event in read(run)]
        assert set(told) <= set(there), fault
        assert there == sorted(set(there)), fault

    write()
    assert [fields_of(event)["number"] for event in read(run)][-1] == told[-1]
    assert len(told) > 4


def test_the_fence_is_always_one_attempt_and_never_an_older_one(run, faults):
    newest = take_attempt(run, job_id="7", restarts=0)

    for fault, taken, raised in faults(lambda: take_attempt(run, job_id="7", restarts=0)):
        now = read_fence(run)
        assert now.number >= newest.number, fault
        if raised is None:
            assert now == taken, fault
        newest = now

    newest = read_fence(run)
    assert take_attempt(run, job_id="7", restarts=0).number == newest.number + 1


def test_a_pin_that_was_told_to_be_made_is_there(run, faults):
    attempt = support.next_attempt(run)
    support.save(run, attempt, 1)

    def pin_anew():
        retention.pin(run, 1, reason=os.urandom(4).hex())
        return retention.pinned(run)

    for fault, given, raised in faults(pin_anew):
        assert raised is not None or 1 in given, fault
        assert find.look(run, 1).problem is None, fault


@pytest.mark.parametrize(
    "argv",
    [
        ["status", "lm"],
        ["events", "lm"],
        ["logs", "lm"],
        ["checkpoints", "list", "lm"],
        ["cancel", "lm", "--save"],
    ],
    ids=lambda argv: argv[0],
)
def test_a_command_on_a_disk_that_fails_ends_without_a_traceback(
    run, faults, argv, capsys, monkeypatch
):
    """It shows what it can, or says in one line what it cannot read."""
    monkeypatch.chdir(run.root)
    story = Story(run.root / "runs" / "lm")
    story.submitted("pid-1").started(1, "pid-1")
    story.run.attempt(1).mkdir(parents=True)
    story.run.rank_log(1, 0).write_text("step 1: loss 2\n")
    support.save(story.run, take_attempt(story.run, job_id="7", restarts=0), 1)
    expected = main(argv)
    capsys.readouterr()

    for fault, code, raised in faults(lambda: main(argv)):
        told = capsys.readouterr().err.splitlines()
        assert raised is None, fault
        if fault.startswith(("delay", "lost")):
            assert code == expected, fault
        assert code == expected or len(told) >= 1, (fault, code)
        assert len(told) <= 2, (fault, told)
