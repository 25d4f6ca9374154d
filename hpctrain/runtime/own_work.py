"""How long a rank works by itself in a step before it first waits for the others.

In a step all ranks take equally long: the slow one keeps the rest waiting. What tells them apart is
the time up to a rank's last gradient. Under DDP that is a moment that can be seen, since gradients
travel behind the backward pass and are waited for at its end. Where a model is sharded, ranks wait
for each other all along the way; nothing is claimed there.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


class OwnWork:
    """Measures one rank's own work; `take` gives it for a window of steps."""

    def __init__(
        self,
        model: nn.Module | None,
        *,
        elsewhere_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Put hooks on a model that is wrapped in DDP; any other is left alone.

        Args:
            model: What the program trains.
            elsewhere_s: Seconds so far that count as no work: waiting for data, saving.
            clock: Monotonic seconds.
        """
        self._clock = clock
        self._elsewhere_s = elsewhere_s
        self._gpu = False
        self._hooks: dict[int, Any] = {}
        self._latest: int | None = None
        self._start: tuple[Any, float] | None = None
        self._end: tuple[Any, float] | None = None
        self._seconds, self._counted = 0.0, 0
        if isinstance(model, DistributedDataParallel):
            self._watch(model)

    def _watch(self, model: nn.Module) -> None:
        for number, parameter in enumerate(model.parameters()):
            self._gpu = self._gpu or parameter.is_cuda
            if parameter.requires_grad:
                hook = partial(self._has_gradient, number)
                added = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooks[number] = added

    def _has_gradient(self, number: int, _: torch.Tensor) -> None:
        self._latest = number
        self._end = (self._moment(), self._elsewhere_s())

    def _moment(self) -> Any:
        """Now, on the device that does the work."""
        if not self._gpu:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def step_began(self) -> None:
        """A step begins."""
        if self._hooks:
            self._start, self._end = (self._moment(), self._elsewhere_s()), None

    def step_done(self) -> None:
        """A step is done; one whose last gradient was not seen does not count."""
        if self._start is None or self._end is None:
            return
        if len(self._hooks) > 1:
            self._keep_the_latest()
        passed = self._between(self._start[0], self._end[0])
        if passed is not None:
            self._seconds += max(0.0, passed - (self._end[1] - self._start[1]))
            self._counted += 1

    def _keep_the_latest(self) -> None:
        """The first step has shown whose gradient comes last; a hook on each would cost more."""
        for number in [number for number in self._hooks if number != self._latest]:
            self._hooks.pop(number).remove()

    def _between(self, start: Any, end: Any) -> float | None:
        if not self._gpu:
            return float(end - start)
        if not end.query():  # nor is it waited for: a step must not be slower for being measured
            return None
        return float(start.elapsed_time(end)) / 1e3

    def take(self, steps: int) -> float | None:
        """Seconds in the last `steps` steps, and begin anew; None where they are not known."""
        seconds, counted = self._seconds, self._counted
        self._seconds, self._counted = 0.0, 0
        return seconds * steps / counted if counted else None
