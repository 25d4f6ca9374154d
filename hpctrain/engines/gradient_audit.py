"""Ranks that compute each other's gradients now and then: whose device computes wrong.

A wrong gradient is added to those of the others, and the weights of all ranks are wrong alike:
comparing them shows nothing. Only the exact engine gives the same bits for the same microbatch on
another rank, so that it alone can be audited. Parameters' `.grad`, random numbers and buffers are
as before afterwards. tests/engines/test_gradient_audit.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpctrain.engines.digests import digest_of
from hpctrain.engines.engine import Microbatch
from hpctrain.engines.exact.engine import seed_of
from hpctrain.engines.step_guard import KeptState
from hpctrain.guards.audits import GradientDigests, disputes, judged, right_of
from hpctrain.world import gather

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.engines.engine import Loss
    from hpctrain.engines.exact.copies import ExactCopies
    from hpctrain.guards.audits import AuditVerdict, Dispute


class GradientAudit:
    """One rank's side."""

    def __init__(
        self,
        engine: ExactCopies,
        every: int,
        hear: Callable[[int, Sequence[AuditVerdict]], None],
    ) -> None:
        """Nothing is audited so far.

        Args:
            engine: Copies of a model that train exactly.
            every: Steps from one audit to the next.
            hear: Is told the step and who is wrong, on every rank; nothing where all agree.
        """
        self._engine = engine
        self._every = every
        self._hear = hear
        self._kept = KeptState(engine.model, engine.world.device)
        self._trained = [weight for weight in engine.model.parameters() if weight.requires_grad]

    def look(self, microbatches: Sequence[Microbatch], loss: Loss) -> None:
        """Before a step's passes: audit the first of its microbatches, if it is time to.

        Collective. The loss must depend on the model's output and the targets alone.
        """
        engine, ranks = self._engine, self._engine.world.world_size
        if ranks == 1 or (engine.begun + 1) % self._every:
            return
        if not all(gather(engine.world, len(microbatches) > 0)):
            return  # the engine says what is wrong, on every rank
        own = microbatches[0]
        rank = engine.world.rank
        self._kept.keep()
        try:
            neighbours = self._pass_left(own, rank, ranks)
            answer = self._digest(own, loss), self._digest(neighbours, loss)
            answers = [GradientDigests(*each) for each in gather(engine.world, answer)]
            disputed = disputes(answers)
            opinions = self._ask(disputed, own, loss) if disputed else {}
        finally:
            self._kept.put_back()
        if disputed:
            self._hear(engine.begun + 1, judged(answers, disputed, opinions))

    def _digest(self, microbatch: Microbatch, loss: Loss) -> str:
        """Of the gradient of a microbatch, whoever's it is."""
        engine = self._engine
        torch.manual_seed(seed_of(engine.seed, engine.begun, microbatch.leaf))
        with engine.autocast():
            value = loss(engine.model(microbatch.inputs), microbatch.targets)
        return digest_of(torch.autograd.grad(value, self._trained, allow_unused=True))

    def _ask(self, disputed: Sequence[Dispute], own: Microbatch, loss: Loss) -> dict[Dispute, str]:
        """What third ranks come to. Collective."""
        rank, opinion = self._engine.world.rank, {}
        for number, each in enumerate(disputed):
            if each.third is None:
                continue
            if rank == each.owner:
                self._send(own, each.third)
            elif rank == each.third:
                opinion[number] = self._digest(self._receive(each.owner), loss)
        rows = gather(self._engine.world, sorted(opinion.items()))
        return {disputed[number]: said for row in rows for number, said in row}

    # ---- microbatches on their way

    def _pass_left(self, own: Microbatch, rank: int, ranks: int) -> Microbatch:
        """The right neighbour's microbatch, for this rank's own, which goes to the left one."""
        left, right = (rank - 1) % ranks, right_of(rank, ranks)
        if rank % 2 == 0:  # else all would wait for somebody to receive
            self._send(own, left)
            return self._receive(right)
        theirs = self._receive(right)
        self._send(own, left)
        return theirs

    def _send(self, microbatch: Microbatch, to: int) -> None:
        plain = [_moved(microbatch.inputs, "cpu"), _moved(microbatch.targets, "cpu")]
        device = self._engine.world.device
        dist.send_object_list([*plain, microbatch.leaf], dst=to, device=device)

    def _receive(self, sender: int) -> Microbatch:
        given: list[Any] = [None, None, None]
        device = self._engine.world.device
        dist.recv_object_list(given, src=sender, device=device)
        inputs, targets, leaf = given
        return Microbatch(_moved(inputs, device), _moved(targets, device), leaf)


def _moved(value: Any, device: torch.device | str) -> Any:
    """The same with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_moved(each, device) for each in value)
    if isinstance(value, list):
        return [_moved(each, device) for each in value]
    if isinstance(value, dict):
        return {key: _moved(each, device) for key, each in value.items()}
    return value
