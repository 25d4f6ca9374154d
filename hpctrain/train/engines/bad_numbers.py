"""Where in a step's passes a number is not finite: on which rank, in which pass, at what parameter.

Gradients that have travelled tell nothing of it: one rank's NaN is everybody's then. So while a
step is computed again, hooks look at what this rank computes by itself, before anything travels:
what layers give, and the gradients of their parameters. Nothing is hooked otherwise.
tests/engines/test_nonfinite.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from hpctrain.train.engines.names import modules
from hpctrain.train.engines.norm import local

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from torch import nn

WEIGHTS, OUTPUT, LOSS, GRADIENT, UNKNOWN = range(5)
"""Where a number was found, the surest sign of its origin first."""


@dataclass(frozen=True)
class Found:
    """Something that is not finite, as this rank has it.

    Attributes:
        place: One of those above; UNKNOWN where this rank has found nothing by itself.
        microbatch: Which of this rank's in the step, from 0 on; None where nobody knows.
        parameter: Name of the first parameter, "" where nobody knows.
    """

    place: int = UNKNOWN
    microbatch: int | None = None
    parameter: str = ""


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all of this rank's part of a tensor is; waits for the device."""
    part = local(tensor)
    if not part.is_floating_point():
        return True
    return bool(torch.isfinite(part.detach()).all())


def first_of(named: Iterable[tuple[str, torch.Tensor | None]]) -> str:
    """The name of the first tensor that is not finite; "" for none."""
    return next((name for name, t in named if t is not None and not is_finite(t)), "")


class BadNumbers:
    """Checks, while entered, what a model's layers return and their gradients.

    `found` is the first thing that was not finite, or None. `passes` counts the losses so far: it
    shows which pass is running.
    """

    def __init__(self, model: nn.Module) -> None:
        self.found: Found | None = None
        self.passes = 0
        self._model = model
        self._handles: list[Any] = []
        self._armed: dict[int, nn.Parameter] = {}

    def __enter__(self) -> Self:
        for module, stem in {module: stem for stem, module in modules(self._model)}.items():
            own = next((key for key, p in module._parameters.items() if p is not None), None)  # noqa: SLF001 - its own alone
            if own is not None:
                before = module.register_forward_pre_hook(self._arm(stem))
                self._handles += [before, module.register_forward_hook(self._look(stem + own))]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._armed.clear()

    def came_to(self, loss: torch.Tensor) -> None:
        """A pass has come to its loss."""
        if self.found is None and not is_finite(loss):
            self.found = Found(LOSS, self.passes)
        self.passes += 1

    def _arm(self, stem: str) -> Any:
        """Parameters are hooked when they are used: a sharded one is another tensor then."""

        def hook(module: nn.Module, _args: Any) -> None:
            for key, parameter in module._parameters.items():  # noqa: SLF001 - its own alone
                if parameter is None or not parameter.requires_grad or id(parameter) in self._armed:
                    continue
                self._armed[id(parameter)] = parameter
                name = stem + key
                handle = parameter.register_hook(self._note(name))  # type: ignore[no-untyped-call]
                self._handles.append(handle)

        return hook

    def _note(self, name: str) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            if self._may_name and not is_finite(gradient):
                before = self.found.microbatch if self.found is not None else self.passes - 1
                place = GRADIENT if self.found is None else self.found.place
                self.found = Found(place, before, name)

        return hook

    def _look(self, name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            given = output if isinstance(output, tuple | list) else [output]
            tensors = [each for each in given if isinstance(each, torch.Tensor)]
            if self.found is None and not all(map(is_finite, tensors)):
                self.found = Found(OUTPUT, self.passes, name)

        return hook

    @property
    def _may_name(self) -> bool:
        """Whether a parameter is wanted: nothing was found yet, or a loss alone."""
        return self.found is None or not self.found.parameter
