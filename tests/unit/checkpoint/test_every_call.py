"""Whatever system call of a save, a commit or a purge goes wrong: there is a whole checkpoint.

One process sweeps, saves and prunes by hand; in each of hundreds of runs another call of it is the
one before which it dies, half way through which it dies, or which fails.
"""

from __future__ import annotations

import functools
import shutil
from collections import Counter

import pytest
import torch

from hpctrain.checkpoint.format import shard
from hpctrain.checkpoint.store import find, retention
from hpctrain.checkpoint.tensors.save import SavePlace, commit_together
from hpctrain.core.settings.schema import CheckpointSettings
from hpctrain.core.world import World
from hpctrain.errors import CheckpointError, HpctrainError
from hpctrain.ledger.run.layout import RunDir
from tests.support import checkpoints as support
from tests.support.every_call import BROKEN, DEAD, KINDS, Fault, in_child
from tests.support.loading import loaded

NEWEST, NEXT = 3, 4
TORN = 5
"""The step in the manifest of the torn directory that lies where the next one is to go."""
KEEP_LAST = 2
SAVED, REFUSED = 0, 1
right = functools.cache(support.contents)


@pytest.fixture(scope="module")
def before(memory):
    """Three checkpoints, a torn one in the way of the next, one staged, one half deleted."""
    run = support.new_run(memory / "before")
    attempt = support.next_attempt(run)
    support.save(run, attempt, 1, 2, NEWEST)
    support.stage(run, attempt, NEXT)
    (torn,) = support.save(run, attempt, TORN)
    (torn / support.SHARD_1).unlink()
    torn.rename(find.step_path(run, NEXT))
    (half,) = support.save(run, attempt, TORN + 1)
    (half / "MANIFEST.json").unlink()
    half.rename(half.with_name("step-0000000001.deleting-1"))
    return run


def _save(run, attempt, step):
    """The way of every save, as its one rank goes it: stage, write, gather, publish."""
    world = World(0, 0, 1, torch.device("cpu"))
    retention.sweep(run, attempt)
    pieces = [piece for ours in support.PIECES for piece in ours]
    sources = [memoryview(support.bytes_of(piece, right(step)[piece.name])) for piece in pieces]

    def write(path):
        return shard.write(path, pieces, sources, block_bytes=support.BLOCK_BYTES, step=step)

    place = SavePlace(run, attempt, CheckpointSettings())
    manifest = support.manifest(step, [])
    commit_together(place, world, manifest, pieces=pieces, write=write, started=0.0)


def _save_and_prune(run, attempt, step):
    try:
        _save(run, attempt, step)
    except HpctrainError:
        return REFUSED
    try:
        retention.prune(run, retention.Rules(KEEP_LAST), attempt=attempt)
    except CheckpointError:
        return SAVED  # a disk that is too full, and nothing else
    return SAVED


def _copied(before, to):
    shutil.copytree(before.root, to / before.name, symlinks=True)
    run = RunDir(to / before.name)
    return run, support.next_attempt(run)


def _whole_steps(run):
    """Steps that would be loaded, newest first; each holds its own step's bytes, or this raises."""
    found = [one for one in find.candidates(run) if one.problem is None]
    for one in found:
        assert loaded(one) == right(one.step), f"{one.name} is a mix"
    return [one.step for one in found]


def _check(run, code):
    whole = _whole_steps(run)
    torn = [one.manifest for one in find.candidates(run) if one.problem is not None]
    assert [one.step for one in torn if one] == [TORN] * len(torn), "a torn one was committed"
    assert NEWEST in whole
    assert whole[0] == NEXT if code == SAVED else whole[0] in {NEWEST, NEXT}
    # The next attempt, undisturbed: whatever was left is in nobody's way.
    attempt = support.next_attempt(run)
    step = whole[0] + 1
    _save(run, attempt, step)
    retention.prune(run, retention.Rules(KEEP_LAST), attempt=attempt)
    assert _whole_steps(run) == [step, whole[0]]
    left = [name for name in support.names_in(run) if "staged" in name or "deleting" in name]
    assert left == []


def _tried(before, memory, kind, every):
    """One run for each call at which this can happen; how they ended."""
    out = memory / "said"
    run, attempt = _copied(before, memory / "undisturbed")
    assert in_child(lambda: _save_and_prune(run, attempt, NEXT), None, out) == SAVED
    assert _whole_steps(run) == [NEXT, NEWEST]
    shutil.rmtree(run.root.parent)
    names = out.read_text().split("\n")
    points = [n for n, name in enumerate(names) if not KINDS[kind] or name in KINDS[kind]]
    ends = Counter()
    for at in points[::every]:
        run, attempt = _copied(before, memory / f"{at}")
        code = in_child(lambda r=run, a=attempt: _save_and_prune(r, a, NEXT), Fault(kind, at), out)
        place = f"{names[at]} (call {at} of {len(names)}) {kind}"
        assert code != BROKEN, f"{place}: {out.read_text()}"
        try:
            _check(run, code)
        except (AssertionError, HpctrainError) as error:
            raise AssertionError(f"{place}: {error}; there is {support.names_in(run)}") from error
        shutil.rmtree(memory / f"{at}")
        ends[code] += 1
    return ends


def _check_ends(kind, ends):
    print(f"{kind}: {ends.total()} points: {dict(ends)}")
    if kind.startswith("dies"):
        assert set(ends) == {DEAD}
    elif kind == "takes only half":
        assert set(ends) == {SAVED}
    else:
        assert ends[REFUSED] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_calls_of_save_commit_and_purge_leaves_a_whole_checkpoint(before, memory, kind):
    few = bool(KINDS[kind])

    _check_ends(kind, _tried(before, memory, kind, every=2 if few else 6))


@pytest.mark.soak
def test_a_fault_at_every_call_of_save_commit_and_purge_leaves_a_whole_checkpoint(before, memory):
    points = 0
    for kind in KINDS:
        ends = _tried(before, memory, kind, every=1)
        _check_ends(kind, ends)
        points += ends.total()

    assert points >= 500
