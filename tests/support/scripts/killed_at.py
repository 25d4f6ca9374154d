"""The shipped recipe, in which ranks are killed at a chosen place of a chosen step.

KILLED is a list of "attempt:rank:step:place", separated by commas. Places: `forward`, `backward`
(in the middle of it), `reduce` (gradients are there, their norm is not), `norm` (it is), `update`
(the optimizer is about to change weights), `tail` (it has); a number: so many milliseconds after
the forward pass has begun.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import Any

from hpctrain.recipes.lm import train
from hpctrain.train.engines.native import Native


def _places() -> dict[int, str]:
    """By step: where this rank is killed in this attempt."""
    attempt, rank = json.loads(os.environ["HPCTRAIN_ATTEMPT"])["number"], int(os.environ["RANK"])
    places = {}
    for one in filter(None, os.environ.get("KILLED", "").split(",")):
        of_attempt, of_rank, step, place = one.split(":")
        if (int(of_attempt), int(of_rank)) == (attempt, rank):
            places[int(step)] = place
    return places


def main() -> None:
    places = _places()

    def reach(engine: Any, place: str) -> None:
        # `begun` is how many updates are applied: the step in hand is one more.
        at, kill = places.get(engine.begun + 1, ""), (os.getpid(), signal.SIGKILL)
        if at == place:
            os.kill(*kill)
        elif place == "forward" and at.isdigit():
            threading.Timer(int(at) / 1000, os.kill, kill).start()

    accumulate, backward, norm, update = (
        Native.accumulate,
        Native.backward,
        Native.norm,
        Native.update,
    )

    def killed_in_forward(self: Any, *given: Any) -> Any:
        reach(self, "forward")
        return accumulate(self, *given)

    def killed_in_backward(self: Any, loss: Any) -> None:
        loss.register_hook(lambda _: reach(self, "backward"))
        backward(self, loss)

    def killed_in_reduce(self: Any, gradients: Any) -> Any:
        reach(self, "reduce")
        value = norm(self, gradients)
        reach(self, "norm")
        return value

    def killed_in_update(self: Any) -> Any:
        # The last of all hooks: the others are there since the first step.
        hook = self.optimizer.register_step_pre_hook(lambda *_: reach(self, "update"))
        value = update(self)
        hook.remove()
        reach(self, "tail")
        return value

    Native.accumulate, Native.backward = killed_in_forward, killed_in_backward
    Native.norm, Native.update = killed_in_reduce, killed_in_update
    train.main()


if __name__ == "__main__":
    main()
