"""A new run that begins with a checkpoint of another: what of it is taken, and its copy.

The checkpoint is copied into the new run before its job is submitted, each tensor proved as it is
read and read back, so that the other run may prune or go on as it likes. From then on the new run
has a checkpoint of its own, like any other. tests/unit/submit/test_begin_from.py and
tests/e2e/test_begin_from.py hold the promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.store import find
from hpctrain.errors import NoCheckpoint, TornCheckpoint, UsageError
from hpctrain.run.find_run import find_run
from hpctrain.run.ownership import own_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hpctrain.checkpoint.exchange.contents import Tensor
    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.run.layout import RunDir
    from hpctrain.settings.spec import Spec

LEFT_OUT = ("optimizer", "data")
"""What one may begin anew: the optimizer with all that is tracked beside the model, or the place in
the data with the number of the step."""
_OF_DATA = "tracked.data"


@dataclass(frozen=True)
class BeginFrom:
    """A checkpoint of another run.

    Attributes:
        run: The other run.
        step: Of the checkpoint.
        path: Where it lies.
        manifest: Its own.
        without: What of it is left out, among `LEFT_OUT`.
    """

    run: RunDir
    step: int
    path: Path
    manifest: Manifest
    without: tuple[str, ...]

    @property
    def first_step(self) -> int:
        """The step at which the new run begins: 0 where it begins its data anew."""
        return 0 if "data" in self.without else self.step

    @property
    def line(self) -> str:
        """What is taken, for the user."""
        left = f", without its {' and '.join(self.without)}" if self.without else ""
        begins = f"; the first step is {self.first_step + 1}"
        return f"step {self.step} of {self.run.name}{left}{begins}"

    def tensors(self) -> list[Tensor]:
        """What the new run gets of it."""
        from hpctrain.checkpoint.exchange.contents import OPTIM, RNG, TRACKED, tensors

        taken = tensors(self.path, self.manifest)
        if "optimizer" in self.without:
            taken = [
                t for t in taken if not t.name.startswith((OPTIM, TRACKED)) or _is_data(t.name)
            ]
        if "data" in self.without:
            taken = [t for t in taken if not t.name.startswith(RNG) and not _is_data(t.name)]
        return taken

    def state(self) -> dict[str, Any]:
        """The fields of its manifest that go with them."""
        from hpctrain.checkpoint.exchange.contents import CARRIED

        left = {"optimizer": ("extra",), "data": ("data", "rng", "world_size", "mesh")}
        dropped = {name for part in self.without for name in left[part]}
        return {name: getattr(self.manifest, name) for name in CARRIED if name not in dropped}


def _is_data(name: str) -> bool:
    return name == _OF_DATA or name.startswith(f"{_OF_DATA}.")


def begin_from(asked: str, without: Sequence[str], *, runs: Path) -> BeginFrom:
    """Find what `--from RUN[@STEP]` names.

    Args:
        asked: A run as users name runs, with or without a step; its newest checkpoint by default.
        without: Of `LEFT_OUT`.
        runs: The folder of all runs.

    Raises:
        NotFound: there is no such run, or no checkpoint of that step.
        NoCheckpoint: the run has none that this could be begun with, with what to do.
        TornCheckpoint: the one that was named is torn.
        ChecksFailed: somebody else may have written the run.
        UsageError: the step is no number.
    """
    from hpctrain.checkpoint.exchange.contents import MODEL, committed

    name, at, text = asked.partition("@")
    if at and not text.isdecimal():
        raise UsageError(f"--from {asked}: {text!r} is no step; write RUN@STEP, e.g. lm-3@4000")
    run = find_run(name, runs=runs)
    own_spec(run, named=name)
    step = int(text) if at else None
    if step is None:
        newest = find.choose(run).checkpoint
        if newest is None:
            raise NoCheckpoint(f"--from {asked}: {_none_in(run)}")
        step = newest.step
    path, manifest = committed(run, step)
    if not any(entry.name.startswith(MODEL) for entry in manifest.tensors):
        raise NoCheckpoint(f"--from {asked}: step {step} of {run.name} has no model's weights")
    return BeginFrom(run, step, path, manifest, tuple(dict.fromkeys(without)))


def _none_in(run: RunDir) -> str:
    from hpctrain.checkpoint.sealed.resume import glance

    if glance(run)[0] is not None:
        return (
            f"the checkpoints of {run.name} are its program's own; have the program load one: "
            f"`hpctrain checkpoints path {run.name}` prints where the newest lies"
        )
    return f"{run.name} has no whole checkpoint (`hpctrain checkpoints list {run.name}`)"


def copy_into(
    run: RunDir, spec: Spec, begin: BeginFrom, on_bytes: Callable[[int], None] = lambda _: None
) -> None:
    """Give a new run its first checkpoint.

    Args:
        run: The new run; no job of it is there yet.
        spec: Its own.
        begin: What it begins with.
        on_bytes: Told of bytes written and of bytes compared.

    Raises:
        CheckpointError: there is no room, or what was written does not read back the same.
        TornCheckpoint: the other run's checkpoint is damaged.
    """
    from hpctrain.checkpoint.exchange import import_into
    from hpctrain.checkpoint.exchange.contents import Contents

    source = Contents("hpctrain", begin.path, [], full_names=True, state=begin.state())
    at = begin.first_step
    try:
        import_into.write(run, spec.run_id, at, source, begin.tensors(), on_bytes=on_bytes)
    except TornCheckpoint as error:
        others = [step for step in find.steps(begin.run) if step != begin.step]
        hint = f"; try --from {begin.run.name}@{others[0]}" if others else ""
        raise TornCheckpoint(f"{begin.path} is damaged: {error}{hint}") from None
