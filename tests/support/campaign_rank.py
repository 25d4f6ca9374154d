"""One rank of a campaign's pair: it restores, sweeps, and saves step after step until it dies."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import signal
import struct
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.format import manifest as manifest_format
from hpctrain.core.base.process import die_with_parent, print_to
from hpctrain.core.testing import points
from tests.support import gloo, sharded

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.ledger.run.layout import RunDir

RANKS = 2
KEEP_LAST = 2
PATIENCE_S = 60.0
"""For whatever must happen; a lane that waits longer has found a hang."""
BULK = "model.bulk"
"""A tensor that is quickly made and takes a while to write, so that kills hit the writing."""
SOON_S = 0.002
POINTS = 11
"""That a rank passes in a save, about."""


class Doom:
    """Says to a rank that it is to die in its next save, and when.

    A share from 0 is of the time that a save takes. Below 0 it is how many fault points are passed
    before, and a part of SOON_S.

    Memory that parent and ranks share: a parent that had to wake up first would seldom hit a save
    of some milliseconds on a busy machine.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * RANKS)

    def set(self, rank: int, share: float) -> None:
        struct.pack_into("d", self._memory, 8 * rank, share)

    def share(self, rank: int) -> float:
        return float(struct.unpack_from("d", self._memory, 8 * rank)[0])


class Voice:
    """What a rank says; it dies in the save of which it says that it has begun, if it has to."""

    def __init__(self, pipe: int, doom: Doom, rank: int) -> None:
        self._pipe = pipe
        self._doom = doom
        self._rank = rank
        self._save_s = 0.03
        self._doomed = False

    def __call__(self, kind: str, step: int = 0, **more: Any) -> None:
        line = json.dumps({"kind": kind, "step": step, **more}).encode() + b"\n"
        os.write(self._pipe, line)
        self._save_s = more.get("seconds", self._save_s)
        share = self._doom.share(self._rank) if kind == "begun" else 0.0
        if share and not self._doomed:
            self._doomed = True  # counting would begin anew with each save, and never end
            self._obey(share)

    def _obey(self, share: float) -> None:
        if share > 0:
            _die_in(share * self._save_s)
        else:
            after, part = divmod(-share, 1)
            self._die_behind_point(int(after), part * SOON_S)

    def _die_behind_point(self, count: int, seconds: float) -> None:
        """Most of a save is waiting; what is over in a moment is hit from a point beside it."""
        left = itertools.count(count, -1)
        points.handler = lambda _: _die_in(seconds) if next(left) == 0 else None


def _die_in(seconds: float) -> None:
    kill = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    kill.daemon = True
    kill.start()


@dataclass(frozen=True)
class Part:
    """What a rank is told.

    Attributes:
        rank: Which.
        run: Where to save.
        attempt: By which right.
        mode: "sync" or "async".
        engine: "ddp" or "fsdp2".
        number: Of the pair.
    """

    rank: int
    run: RunDir
    attempt: Attempt
    mode: str
    engine: str
    number: int


def be_rank(say: Voice, part: Part, log: Path) -> None:
    """Train until killed; never returns."""
    try:
        die_with_parent(os.getppid())
        print_to(log)
        _Rank(say, part).train()
    except BaseException:  # noqa: BLE001 - it stands in the log, and the rank has ended
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(1)


class _Rank:
    def __init__(self, say: Voice, part: Part) -> None:
        import torch

        from hpctrain.checkpoint.tensors.save import SavePlace, Saver
        from hpctrain.core.settings.schema import CheckpointSettings
        from hpctrain.core.world import World

        torch.set_num_threads(1)
        _add_bulk()
        self.say, self.part = say, part
        cpu = torch.device("cpu")
        self.world = World(part.rank, part.rank, RANKS, cpu, _join(part))
        self.place = SavePlace(part.run, part.attempt, CheckpointSettings(keep_last=KEEP_LAST))
        is_async = part.mode == "async"
        self.saver = Saver(self.place, self.world, after=self._prune) if is_async else None
        self.mesh = sharded.mesh_of(self.world, part.engine)

    def train(self) -> None:
        from hpctrain.checkpoint.store.retention import sweep
        from hpctrain.core.world import gather, on_rank_0

        step = self._restore()
        run, attempt = self.part.run, self.part.attempt
        on_rank_0(self.world, lambda: sweep(run, attempt))
        left = [name for name in names_in(run) if manifest_format.parse_step(name) is None]
        gather(self.world, "looked")
        self.say("swept", step, left=left)
        while True:
            step += 1
            gather(self.world, step)  # as training does: whoever has lost a peer hears of it
            self._save(step)

    def _restore(self) -> int:
        from hpctrain.checkpoint.tensors.boxes import State
        from hpctrain.checkpoint.tensors.restore import Wanted, restore

        tensors = self._tensors(None)
        own = sharded.own(self.world, None)
        fresh = frozenset(name for name in tensors if name.startswith("optim."))
        arena = self.saver.arena if self.saver is not None else None
        wanted = Wanted(State(tensors, own), fresh)
        restored = restore(self.place, self.world, lambda _: wanted, arena=arena)
        wrong = []
        if restored.step:
            right = sharded.own(self.world, restored.step)
            wrong = sharded.wrong(tensors, restored.step)
            wrong += [name for name in own if own[name].tolist() != right[name].tolist()]
        self.say(
            "restored", restored.step, wrong=wrong, skipped=[vars(row) for row in restored.skipped]
        )
        return restored.step

    def _save(self, step: int) -> None:
        from hpctrain.checkpoint.tensors.boxes import State

        state = State(self._tensors(step), sharded.own(self.world, step))
        manifest = sharded.manifest(self.world, step)
        manifest.block_bytes = 1 << 16
        started = time.monotonic()
        act = self._in_front if self.saver is None else self._behind
        error = act(state, manifest)
        if error is not None:
            self.say("failed", step, why=str(error)[:300])
            return
        self.say("saved", step, seconds=time.monotonic() - started)
        if self.saver is None and self.world.rank == 0:
            self._prune(None)

    def _in_front(self, state: Any, manifest: Any) -> Exception | None:
        from hpctrain.checkpoint.tensors.save import save
        from hpctrain.errors import CheckpointError

        self.say("begun", manifest.step)
        try:
            save(self.place, self.world, state, manifest)
        except CheckpointError as error:
            return error
        return None

    def _behind(self, state: Any, manifest: Any) -> Exception | None:
        assert self.saver is not None
        self.saver.begin(state, manifest)
        self.say("begun", manifest.step, writer=self.saver._writer.pid)
        for tensor in state.shared.values():  # training goes on, and overwrites what was copied
            (tensor.to_local() if hasattr(tensor, "to_local") else tensor).zero_()
        outcome = self.saver.land()
        assert outcome is not None
        return outcome.error

    def _tensors(self, step: int | None) -> dict[str, Any]:
        return sharded.spread(self.world, self.part.engine, step, self.mesh)

    def _prune(self, _: Any) -> None:
        from hpctrain.checkpoint.store.retention import Rules, prune

        prune(self.part.run, Rules(KEEP_LAST), attempt=self.part.attempt)


def names_in(run: RunDir) -> list[str]:
    """Everything that lies in the directory of checkpoints, if there is one."""
    if not run.checkpoints.exists():
        return []
    return sorted(path.name for path in run.checkpoints.iterdir())


def preload() -> None:
    """Import once in the parent what every rank needs."""
    import hpctrain.checkpoint.store.retention
    import hpctrain.checkpoint.tensors.restore
    import hpctrain.checkpoint.tensors.save
    import hpctrain.core.settings.schema  # noqa: F401

    gloo.preload()


def _add_bulk() -> None:
    """In this process only."""
    import torch

    small = sharded.content
    shape = (1024, 1024)
    sharded.SHAPES[BULK] = ("float32", shape)
    sharded.content = lambda name, step: (
        torch.full(shape, float(step)) if name == BULK else small(name, step)
    )


def _join(part: Part) -> Any:
    import torch.distributed as dist

    from hpctrain.train.joining_ranks import GlooExchange

    limit = timedelta(seconds=PATIENCE_S)
    # A file, no server: one in the parent has a thread, which a forked rank's garbage collector
    # would wait for, and aborts on.
    common = dist.FileStore(str(part.run.root / f"store-{part.number}"), RANKS)
    dist.init_process_group("gloo", store=common, rank=part.rank, world_size=RANKS, timeout=limit)
    return GlooExchange(PATIENCE_S)
