"""Pairs of ranks that save step after step and are killed, and what the next pair finds.

A pair is two forked ranks on gloo: it restores, sweeps, and then saves until somebody dies. Each
rank says what it does in lines on a pipe; whoever kills it compares that with the run's directory.
Every value in a checkpoint is a function of its tensor's name and the step (`sharded.py`), so a
rank sees a mix of two steps as such.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.format import manifest
from hpctrain.checkpoint.store import find
from hpctrain.ledger.run.fence import take_attempt
from hpctrain.ledger.run.layout import RunDir
from tests.support import patience
from tests.support.campaign_rank import (
    KEEP_LAST,
    POINTS,
    RANKS,
    Doom,
    Part,
    Voice,
    be_rank,
    names_in,
    preload,
)

if TYPE_CHECKING:
    from collections.abc import Callable


HALF = 0.5
KINDS = {
    "sync": ("rank 0", "rank 1", "all"),
    "async": ("rank 0", "rank 1", "all", "writer 0", "writer 1"),
}
"""Whom a kill can hit, by the mode of the saves."""


@dataclass
class Kill:
    """One kill and what it hit.

    Attributes:
        kind: Whom; see KINDS.
        hit: A save had begun and not ended by the word of one who died; of a writer: it failed.
        staged: A staged directory was left.
        deleting: A half deleted checkpoint was left: it was in a purge.
    """

    kind: str
    hit: bool
    staged: bool = False
    deleting: bool = False


@dataclass
class Lane:
    """One run directory, killed again and again; `seed` repeats it.

    Attributes:
        root: Of the run.
        mode: "sync" or "async".
        kills: How many.
        seed: Of whom, and when.
    """

    root: Path
    mode: str
    kills: int
    seed: int
    done: list[Kill] = field(default_factory=list)
    seconds: float = 0.0
    resumes: int = 0

    def run(self) -> Lane:
        """Kill as often as asked for.

        Raises:
            AssertionError: a promise was broken; with the seed, the kill's number, what was said.
        """
        preload()
        run = RunDir(self.root)
        run.root.mkdir(parents=True)
        dice = random.Random(self.seed)
        started = time.monotonic()
        while len(self.done) < self.kills:
            engine = dice.choice(("ddp", "fsdp2"))
            pair = Pair(run, self.mode, engine, number=self.resumes)
            try:
                self._one_pair(run, pair, dice)
            except AssertionError as error:
                pair.end()
                raise AssertionError(
                    f"{error}\nseed {self.seed}, mode {self.mode}, kill {len(self.done)}\n"
                    f"in the directory: {names_in(run)}\n{pair.story()}"
                ) from error
            self.resumes += 1
        last = Pair(run, self.mode, "ddp", number=self.resumes)
        _check_resume(run, last, _newest(run))
        last.hear("saved", times=2)
        last.end()
        self.seconds = time.monotonic() - started
        return self

    def _one_pair(self, run: RunDir, pair: Pair, dice: random.Random) -> None:
        """From one resume to the death of a rank; writers may die in between."""
        _check_resume(run, pair, pair.newest_before)
        pair.hear("begun", times=dice.choice((1, 2, 2, 3)))
        while True:
            kind = dice.choice(KINDS[self.mode])
            victim, _, number = kind.partition(" ")
            if victim == "writer":
                time.sleep(dice.uniform(0.0, pair.save_s()))
                self.done.append(_kill_writer(pair, int(number)))
                continue
            victims = list(range(RANKS)) if kind == "all" else [int(number)]
            pair.kill(victims, dice)
            self.done.append(_check_dead(run, pair, kind, victims))
            return


def run_lanes(lanes: list[Lane], *, at_once: int = 2) -> list[Lane]:
    """All lanes, so many at a time, each in a process of its own."""
    preload()
    with ProcessPoolExecutor(at_once, mp_context=get_context("fork")) as pool:
        return list(pool.map(Lane.run, lanes))


def summary(lanes: list[Lane]) -> str:
    """What a campaign has shown, in one line."""
    kills = [kill for lane in lanes for kill in lane.done]
    kinds = Counter(kill.kind for kill in kills)
    hit = Counter(kill.kind for kill in kills if kill.hit)
    parts = ", ".join(f"{kind}: {kinds[kind]} ({hit[kind]})" for kind in sorted(kinds))
    return (
        f"{len(kills)} kills, {sum(hit.values())} in a save, "
        f"{sum(kill.staged for kill in kills)} left something staged, "
        f"{sum(kill.deleting for kill in kills)} something half deleted; "
        f"by whom (in a save): {parts}; "
        f"{sum(lane.resumes for lane in lanes)} resumes; "
        f"{sum(lane.seconds for lane in lanes):.0f} s of lanes; "
        f"seeds {[lane.seed for lane in lanes]}"
    )


class Pair:
    """Two ranks of one attempt, and what they have said."""

    def __init__(self, run: RunDir, mode: str, engine: str, *, number: int) -> None:
        self.newest_before = _newest(run)
        self.said: list[list[dict[str, Any]]] = [[] for _ in range(RANKS)]
        self._heard: Counter[tuple[int, str]] = Counter()
        self._rest = [b""] * RANKS
        self._pipes: list[int] = []
        self._pids: list[int] = []
        self._log = run.root / "ranks.log"
        self._doom = Doom()
        attempt = take_attempt(run, job_id="campaign", restarts=0)
        for rank in range(RANKS):
            ours, theirs = os.pipe()
            pid = os.fork()
            if pid == 0:
                part = Part(rank, run, attempt, mode, engine, number)
                be_rank(Voice(theirs, self._doom, rank), part, self._log)
            os.close(theirs)
            self._pipes.append(ours)
            self._pids.append(pid)

    def hear(self, kind: str, *, times: int = 1, least_step: int = 0) -> list[dict[str, Any]]:
        """Wait until every rank has said something so many more times; the last of each."""
        return [self._hear_one(rank, kind, times, least_step) for rank in range(RANKS)]

    def writer(self, rank: int) -> int:
        """The process that writes a rank's shards just now."""
        self._take(0.0)
        return next(int(word["writer"]) for word in reversed(self.said[rank]) if word.get("writer"))

    def last(self, rank: int, kind: str) -> int:
        """The newest step of which a rank has said that; 0 if of none."""
        self._take(0.0)
        return max((word["step"] for word in self.said[rank] if word["kind"] == kind), default=0)

    def is_saving(self, rank: int) -> bool:
        """Whether the last that a rank has said is that a save has begun."""
        self._take(0.0)
        return bool(self.said[rank]) and self.said[rank][-1]["kind"] == "begun"

    def save_s(self) -> float:
        """How long a save takes about now."""
        self._take(0.0)
        took = [word["seconds"] for word in self.said[0] if word["kind"] == "saved"]
        return max(0.01, took[-1]) if took else 0.05

    def kill(self, ranks: list[int], dice: random.Random) -> None:
        """SIGKILL in a save; the others must then end by themselves, and so must every writer."""
        by_time = dice.random() < HALF
        for rank in ranks:
            self._doom.set(rank, dice.uniform(0.01, 1.1) if by_time else -dice.uniform(0, POINTS))
        self._wait()
        writers = {word["writer"] for rank in self.said for word in rank if word.get("writer")}
        for pid in writers:
            _until(lambda pid=pid: _is_gone(pid), f"writer {pid} outlives its rank")

    def end(self) -> None:
        """Kill whatever is left of it."""
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        self._wait()

    def story(self) -> str:
        """What the ranks said last, and what stands in their log."""
        lines = [f"rank {rank}: {words[-6:]}" for rank, words in enumerate(self.said)]
        return "\n".join([*lines, self._log.read_text(errors="replace")[-3000:]])

    def _hear_one(self, rank: int, kind: str, times: int, least_step: int) -> dict[str, Any]:
        def there() -> bool:
            self._take(0.02)
            words = self._of(rank, kind, least_step)
            enough = len(words) >= self._heard[rank, kind] + times
            assert enough or self._pipes[rank] >= 0, f"rank {rank} ended and never said {kind!r}"
            return enough

        _until(there, f"rank {rank} does not say {kind!r} {times} more times")
        self._heard[rank, kind] += times
        return self._of(rank, kind, least_step)[self._heard[rank, kind] - 1]

    def _of(self, rank: int, kind: str, least_step: int) -> list[dict[str, Any]]:
        return [w for w in self.said[rank] if w["kind"] == kind and w["step"] >= least_step]

    def _take(self, timeout_s: float) -> None:
        """Read what has been said; a rank that has ended says nothing more."""
        open_ones = [pipe for pipe in self._pipes if pipe >= 0]
        if not open_ones:
            return
        ready, _, _ = select.select(open_ones, [], [], timeout_s)
        for pipe in ready:
            rank = self._pipes.index(pipe)
            content = os.read(pipe, 1 << 16)
            if not content:
                os.close(pipe)
                self._pipes[rank] = -1
            *lines, self._rest[rank] = (self._rest[rank] + content).split(b"\n")
            self.said[rank] += [json.loads(line) for line in lines]

    def _wait(self) -> None:
        """Until both ranks have ended and all that they said is read."""
        while self._pids:
            pid = self._pids[-1]
            _until(lambda pid=pid: os.waitpid(pid, os.WNOHANG)[0], f"rank of pid {pid} hangs")
            self._pids.pop()
        while any(pipe >= 0 for pipe in self._pipes):
            self._take(1.0)


def _check_resume(run: RunDir, pair: Pair, newest: int) -> None:
    """The pair found the newest committed step, all of it, and left nothing that was staged."""
    for rank, word in enumerate(pair.hear("restored")):
        assert word["step"] == newest, f"rank {rank} restored {word['step']}, newest is {newest}"
        assert word["wrong"] == [], f"rank {rank} got wrong values: {word['wrong']}"
    left = pair.hear("swept")[0]["left"]
    assert left == [], f"not swept: {left}"
    assert find.set_aside(run) == [], "a kill must not damage a committed checkpoint"


def _kill_writer(pair: Pair, rank: int) -> Kill:
    """Kill a rank's writer: that save fails on all ranks or on none, and the next ones pass."""
    begun = pair.last(0, "begun")
    failed = pair.last(0, "failed")
    os.kill(pair.writer(rank), signal.SIGKILL)
    saved = pair.hear("saved", least_step=begun + 2)
    assert [word["step"] for word in saved] == [saved[0]["step"]] * RANKS
    fates = [
        {word["step"]: word["kind"] for word in words if word["kind"] in {"saved", "failed"}}
        for words in pair.said
    ]
    common = fates[0].keys() & fates[1].keys()
    unlike = [step for step in common if fates[0][step] != fates[1][step]]
    assert unlike == [], f"ranks disagree on what became of steps {unlike}"
    return Kill(f"writer {rank}", hit=pair.last(0, "failed") > failed)


def _check_dead(run: RunDir, pair: Pair, kind: str, victims: list[int]) -> Kill:
    """Whatever was acknowledged is there, and all that has a committed name is whole."""
    found = find.candidates(run)
    torn = [one.name for one in found if one.problem is not None]
    assert torn == [], f"torn: {torn}"
    told = max(pair.last(rank, "saved") for rank in range(RANKS))
    newest = _newest(run)
    assert newest >= max(told, pair.newest_before), f"step {told} was saved, newest is {newest}"
    assert len(found) >= min(KEEP_LAST, newest), f"kept only {[one.step for one in found]}"
    return Kill(
        kind,
        hit=any(pair.is_saving(rank) for rank in victims),
        staged=bool(find.staged(run)),
        deleting=any(manifest.parse_aside(name, manifest.DELETING) for name in names_in(run)),
    )


def _newest(run: RunDir) -> int:
    return max((one.step for one in find.candidates(run) if one.problem is None), default=0)


def _until(holds: Callable[[], object], why: str) -> None:
    patience.until(holds, why)


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


# ---- in the ranks
