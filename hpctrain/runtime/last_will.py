"""A rank's last will: its state, left in its node's memory when another rank is killed.

Where each rank holds the whole state (DDP), those that are left have all that the dead one had but
its random generators. So each rank keeps at the end of every step what the next one changes beside
weights and moments: generators in memory that outlives it, the rest for itself. At a fault, asked
by its keeper or as its collective fails, it copies its state; nothing else costs a step anything.
A will is of one moment, or none: between the beginning of an update and the end of its step there
is nothing to leave. tests/engines/test_last_will.py and tests/unit/runtime/test_last_will.py hold
the promises.
"""

from __future__ import annotations

import logging
import pickle
import random
import struct
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.base import clock
from hpctrain.checkpoint.format import manifest as manifests
from hpctrain.checkpoint.tensors.boxes import State, bytes_of, held, parts_to_write
from hpctrain.checkpoint.tensors.values import encode
from hpctrain.data.stream_loader import StreamLoader
from hpctrain.engines import state as names
from hpctrain.errors import CheckpointError
from hpctrain.memory.copies import CopyLayout, copy_parts
from hpctrain.memory.copy_plan import CopyPlan
from hpctrain.memory.protocol import KeeperLost
from hpctrain.memory.will_line import WillLine, stand_by
from hpctrain.memory.will_pages import CellState
from hpctrain.runtime.program import DATA, state_of
from hpctrain.testing import points

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.memory.will_pages import WillPage
    from hpctrain.runtime.generators import Generators
    from hpctrain.runtime.program import Program
    from hpctrain.world import World

    _Drawn = tuple[torch.Tensor, Any, dict[str, bytes]]

log = logging.getLogger("hpctrain.runtime")

WAIT_S = 1.0
"""So long may a rank that is asked in the middle of an update take to the end of its step."""
TRIES = 3
"""A rank may go on while it is asked: what it copies then is of no moment, and copied once more."""
MOST_SMALL_BYTES = 1 << 20
"""Of what is tracked beside the model: it is kept at each step."""


@dataclass(frozen=True)
class _Kept:
    """What there was at the end of a step, beside weights and moments.

    Attributes:
        step: Updates applied.
        small: Position in the data, and what else is tracked; of this process alone.
        buffers: By full name, where forward passes may have changed them since.
        versions: Of the weights together, as torch counts changes.
    """

    step: int
    small: bytes
    buffers: dict[str, torch.Tensor]
    versions: int


def why_none(program: Program, world: World) -> str:
    """Why ranks leave no last will; "" where they do."""
    engine = program.engine
    if engine is None or engine.kind != "ddp" or world.world_size == 1:
        return "only where each of several ranks holds the whole state (engine.kind ddp)"
    if world.device.type != "cpu":
        return "nobody has tried it on an accelerator"
    if any(isinstance(each, StreamLoader) for each in (program.data, *program.tracked.values())):
        return "the position in a stream is known to all ranks together alone"
    return ""


class LastWill:
    """One rank's. Its calls are the training thread's, but for `write`."""

    def __init__(self, world: World, program: Program, folder: Path, attempt: int) -> None:
        """Nothing is kept.

        Args:
            world: The ranks.
            program: What trains.
            folder: Of the round, where the keeper is met.
            attempt: The round's number.
        """
        self._world, self._program = world, program
        self._where = (folder, world.rank, attempt)
        self._lock = threading.Lock()
        self._is_left = False
        self._kept: _Kept | None = None
        self._came: threading.Event | None = None
        """Set at the end of the next step, where somebody waits for that."""
        self._step = -1
        self._small = _SmallState(program)
        self._generators: _Generators | None = None
        self._page: WillPage | None = None
        self._line: WillLine | None = None
        self._manifest: Manifest | None = None

    def warm_up(self, state: State, manifest: Manifest) -> None:
        """Take memory, without waiting for it, and be ready to be asked. After the first step."""
        if why := why_none(self._program, self._world):
            if self._world.rank == 0:
                log.info("no last will: %s", why)
            return
        self._manifest = manifest
        self._generators = _Generators(self._program.generators, self._world, manifest.block_bytes)
        plan = self._plan(State(state.shared), manifest)[0]
        assert self._program.optimizer is not None, "it has stepped"  # noqa: S101 - our own bug
        self._program.optimizer.register_step_pre_hook(lambda *_: self._before_update())
        if self._program.engine is not None:
            self._program.engine.on_step = self._ahead_of_update
        stand_by(lambda: self.write(0.0))
        threading.Thread(
            target=self._stand_by, args=(plan.size,), name="hpctrain-will", daemon=True
        ).start()

    def at_end_of(self, step: int) -> None:
        """A step is done, and the next one has not begun: keep what that one changes."""
        if self._page is None or self._generators is None or step == self._step:
            return
        self._kept = None
        self._generators.keep(self._page, step, is_ahead=False)
        small = self._small.taken()
        if len(small) > MOST_SMALL_BYTES:
            self._give_up(f"{len(small):,} bytes are tracked beside the model")
            return
        self._step = step
        self._kept = _Kept(step, small, self._small.buffers(), self._small.versions())
        self._page.come_to(step)
        if self._came is not None:
            self._came.set()

    def write(self, wait_s: float) -> None:
        """Leave the will, once. From any thread.

        Args:
            wait_s: For the end of a step that is about to end.
        """
        with self._lock:
            if self._is_left or self._line is None:
                return
            self._is_left = True
            try:
                self._write(self._line, wait_s)
            except Exception as error:  # noqa: BLE001 - whatever it is, the rank is about to end
                log.warning("this rank has left no last will: %s", error)

    # ---- the thread that waits to be asked

    def _stand_by(self, nbytes: int) -> None:
        try:
            line = WillLine(*self._where)
            assert self._generators is not None, "made before"  # noqa: S101 - our own bug
            page = line.be_heir(nbytes, self._generators.plan)
        except KeeperLost as error:
            log.warning("no last will: %s", error)
            return
        self._line = line
        self._page = page
        while line.wait():
            self.write(WAIT_S)

    def _write(self, line: WillLine, wait_s: float) -> None:
        asking = line.again()
        try:
            for left in reversed(range(TRIES)):
                kept = self._settled(wait_s)
                if kept is None:
                    asking.refuse("it was in the middle of an update")
                    return
                if not asking.may_write(kept.step):
                    return  # another rank of the node has left one that is as new
                plan = self._copy(asking.memory, kept)
                points.reach("memory.willed", step=kept.step, rank=self._world.rank)
                is_whole = self._kept is kept and self._small.versions() == kept.versions
                asking.written(kept.step, plan if is_whole else None, again=bool(left))
                if is_whole:
                    return
        finally:
            asking.close()

    def _settled(self, wait_s: float) -> _Kept | None:
        """What was kept of the step that the weights are of; None in the middle of an update."""
        came = self._came = threading.Event()
        if self._kept is None and wait_s:
            clock.wait(came, wait_s)
        return self._kept

    def _copy(self, memory: memoryview, kept: _Kept) -> CopyPlan:
        points.reach("memory.will", step=kept.step, rank=self._world.rank)
        engine, template = self._program.engine, self._manifest
        assert engine is not None and template is not None, "nobody asks before"  # noqa: PT018, S101
        shared = {**engine.state().shared, **kept.buffers}
        data, tracked = pickle.loads(kept.small)  # noqa: S301 - this process has made it
        data, own_tensors = encode(data, f"tracked.{DATA}")
        shared |= own_tensors
        extra = {}
        for name, value in tracked.items():
            extra[name], own_tensors = encode(value, f"tracked.{name}")
            shared |= own_tensors
        manifest = replace(
            template, step=kept.step, created=clock.now(), data=data, extra=extra, metrics={}
        )
        plan, layout, parts = self._plan(State(shared), manifest)
        if plan.size > len(memory):
            raise CheckpointError(f"it needs {plan.size:,} bytes, and there are {len(memory):,}")
        memory[: plan.head] = layout.header
        copy_parts(memory, parts, plan).wait()
        return plan

    def _plan(self, state: State, manifest: Manifest) -> tuple[CopyPlan, CopyLayout, list[Any]]:
        """How the state of all ranks lies in one copy: the part behind those of the ranks."""
        ranks = self._world.world_size
        parts = parts_to_write(held(state, replace(self._world, rank=0, world_size=1)))
        layout = CopyLayout([part.piece for part in parts], ranks, manifest.block_bytes)
        facts = {"part": layout.facts, "manifest": manifests.plain(manifest)}
        head = len(layout.header)
        sizes, block_bytes = layout.sizes, manifest.block_bytes
        return CopyPlan(ranks + 1, ranks, head, sizes, block_bytes, facts), layout, parts

    # ---- the training thread

    def _ahead_of_update(self) -> None:
        """All have given their gradients, and none the norm's part without which none goes on.

        So whoever comes to the end of this step knows that each rank, dead or alive, has been here.
        """
        if self._page is not None and self._generators is not None and self._step >= 0:
            self._generators.keep(self._page, self._step + 1, is_ahead=True)

    def _before_update(self) -> None:
        self._kept = None
        if self._page is not None:
            self._page.change()

    def _give_up(self, why: str) -> None:
        log.warning("no last will: %s", why)
        self._page = None
        if self._line is not None:
            self._line.leave()


class _SmallState:
    """What a checkpoint holds beside weights and moments."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._weights: list[torch.Tensor] = []
        self._tables: list[tuple[dict[str, torch.Tensor | None], str, str]] = []
        self._copies: list[dict[str, torch.Tensor]] = [{}, {}]
        self._is_looked_at = False

    def taken(self) -> bytes:
        """Position in the data, and what is tracked."""
        program = self._program
        data = program.data.state_dict() if program.data is not None else {}
        tracked = {name: state_of(thing) for name, thing in program.tracked.items()}
        return pickle.dumps((data, tracked), pickle.HIGHEST_PROTOCOL)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Copies of the buffers that are saved, which stay until the call after the next.

        All of them each time: torch counts no change of what its batch norm changes.
        """
        self._look()
        self._copies.reverse()
        now = {name: table[key] for table, key, name in self._tables}
        there = {name: buffer.detach() for name, buffer in now.items() if buffer is not None}
        copies = self._copies[0]
        for name, buffer in there.items():
            copy = copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (buffer.shape, buffer.dtype):
                copies[name] = torch.empty_like(buffer)
        into = {name: copies[name] for name in there}
        if into:
            torch._foreach_copy_(list(into.values()), list(there.values()))
        return into

    def versions(self) -> int:
        """Another number after each change of a weight."""
        self._look()
        return sum(weight._version for weight in self._weights)  # noqa: SLF001 - no public name

    def _look(self) -> None:
        model = self._program.model
        if self._is_looked_at or model is None:
            return
        self._is_looked_at = True
        self._weights = list(model.parameters())
        for name, (module, key) in names.persistent_buffers(model).items():
            self._tables.append((module._buffers, key, name))  # noqa: SLF001 - as it is by then


class _Generators:
    """This rank's random generators, written into its page as a checkpoint would hold them."""

    def __init__(self, generators: Generators, world: World, block_bytes: int) -> None:
        self._live = generators
        parts = parts_to_write(held(State(own=generators.capture()), world))
        self._layout = CopyLayout([part.piece for part in parts], world.rank, block_bytes)
        header, facts = self._layout.header, {"part": self._layout.facts}
        self.plan = CopyPlan(
            world.world_size + 1, world.rank, len(header), self._layout.sizes, block_bytes, facts
        )
        self._at: dict[str, tuple[int, int]] = {}
        low = len(header)
        for piece in self._layout.pieces:
            self._at[piece.name.split(".", 2)[2]] = (low, piece.nbytes)
            low += piece.nbytes
        self._nbytes = low
        self._ahead: _Drawn | None = None

    def keep(self, page: WillPage, step: int, *, is_ahead: bool) -> None:
        """Write the generators as they are.

        Args:
            page: This rank's.
            step: Which they are of.
            is_ahead: Of its update, and not of its end.
        """
        now = (torch.get_rng_state(), random.getstate(), self._live.texts())
        state = CellState.AHEAD
        if not is_ahead:
            before, self._ahead = self._ahead, None
            written = page.state_of(step)
            if before is not None and written == CellState.AHEAD and _same(before, now):
                page.settle(step)
                return
            state = CellState.OTHER if written == CellState.AHEAD else CellState.SAME
        else:
            self._ahead = now
        cell = page.open_cell(step)
        self._put(cell, *now)
        page.close_cell(step, self._nbytes, state)

    def _put(
        self, cell: memoryview, of_torch: torch.Tensor, of_python: Any, texts: dict[str, bytes]
    ) -> None:
        header = self._layout.header
        cell[: len(header)] = header
        low, nbytes = self._at["torch"]
        cell[low : low + nbytes] = bytes_of(of_torch)
        version, words, gauss = of_python
        low, nbytes = self._at["python"]
        struct.pack_into(f"={nbytes // 8}q", cell, low, version, *words)
        low, _ = self._at["python_gauss"]
        struct.pack_into("=d", cell, low, float("nan") if gauss is None else gauss)
        for name, text in texts.items():
            low, nbytes = self._at[name]
            cell[low : low + nbytes] = text


def _same(before: _Drawn, now: _Drawn) -> bool:
    return before[1:] == now[1:] and torch.equal(before[0], now[0])
