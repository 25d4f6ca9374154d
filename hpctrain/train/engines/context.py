"""Context parallelism: ranks that read the same samples, each a part of every sequence.

A sequence is cut into twice as many parts as there are ranks. Each rank has one from the front and
one from the back, so that all have as much to look back on:

    parts   0 1 2 3          rank 0: 0 and 3          rank 1: 1 and 2

Keys and values of all parts are gathered for each attention, and their gradients added up on the
way back; everything else works on positions one by one. What is asked of a model: it takes
``position_ids``, and its attention is Hugging Face's, or a module with an attribute ``attend`` that
it calls as it would call `torch.nn.functional.scaled_dot_product_attention`, always with
``is_causal=True``. tests/engines/test_context.py holds the promises.
"""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812, its usual name
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hpctrain.core.torch_private import map_tensors
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.device_mesh import DeviceMesh

    from hpctrain.train.engines.engine import Loss, Microbatch

SEQUENCE = 1
"""Inputs are [batch, time], activations [batch, time, width]."""
TIME = 2
"""Keys and values are [batch, heads, time, head_dim]."""
NAME = "hpctrain_context"
"""Of the attention function, among transformers' own."""
MEAN = 0.1
"""A loss whose halves do not add up to it, within so much of itself, takes a mean over them."""


class ContextParallel:
    """What one rank has of each sequence, and how its attention sees the rest."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Have a model, not wrapped yet, work on parts of sequences, in place. Not collective.

        Raises:
            UsageError: the model's attention cannot take it.
        """
        self._mesh = mesh
        self._ranks, self._rank = mesh.size(), mesh.get_local_rank()
        self._is_running = self._is_checked = False
        self._own = 0
        """Positions of this rank in the pass in hand."""
        name = type(model).__name__
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise UsageError(
                f"engine.cp: {name}.forward takes no position_ids, so it cannot be told where its "
                "part of a sequence lies; give it that argument, or set engine.cp to 1"
            )
        if not self._take_over(model):
            raise UsageError(
                f"engine.cp: {name} has no attention that is known: Hugging Face's, or modules "
                "with an attribute `attend` (`hpctrain help plan.md`); set engine.cp to 1"
            )
        model.register_forward_pre_hook(self._add_positions, with_kwargs=True)

    def _take_over(self, model: nn.Module) -> bool:
        own = [module for module in model.modules() if callable(getattr(module, "attend", None))]
        for module in own:
            module.attend = self.attend  # type: ignore[assignment]
        theirs = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "config")]
        for module in theirs:
            module.hpctrain_context = self  # type: ignore[assignment]
        config = getattr(model, "config", None)
        if theirs and config is not None:
            from transformers import AttentionInterface
            from transformers.masking_utils import AttentionMaskInterface

            AttentionInterface.register(NAME, _attend_as_transformers)
            # Masks are made by it, for each part.
            AttentionMaskInterface.register(NAME, lambda *_args, **_kwargs: None)
            for each in {id(m.config): m.config for m in (model, *theirs)}.values():
                each._attn_implementation = NAME  # type: ignore[union-attr]  # noqa: SLF001
        return bool(own or theirs)

    # ---- samples

    def part(self, microbatch: Microbatch) -> Microbatch:
        """This rank's positions of a microbatch: of the inputs, and of targets that have them.

        Raises:
            UsageError: the sequence has no equal parts.
        """
        length = microbatch.inputs.shape[SEQUENCE]
        if length % (2 * self._ranks):
            raise UsageError(
                f"engine.cp {self._ranks} cannot share sequences of {length} positions: each rank "
                f"has two parts of one; make their length a multiple of {2 * self._ranks}"
            )

        def cut(tensor: Tensor) -> Tensor:
            return self._cut(tensor) if _has(tensor, length) else tensor

        targets = map_tensors(Tensor, cut, microbatch.targets)
        return replace(microbatch, inputs=self._cut(microbatch.inputs), targets=targets)

    def _cut(self, tensor: Tensor) -> Tensor:
        parts = tensor.chunk(2 * self._ranks, dim=SEQUENCE)
        return torch.cat([parts[number] for number in self._numbers], dim=SEQUENCE)

    @property
    def _numbers(self) -> tuple[int, int]:
        return self._rank, 2 * self._ranks - 1 - self._rank

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around passes over what `part` gave."""
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def _add_positions(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if not self._is_running:
            raise UsageError(
                "with engine.cp the model works on parts of sequences; call "
                "engine.forward_backward or engine.evaluate, which cut them"
            )
        tokens = args[0] if args else next(iter(kwargs.values()))
        self._own = tokens.shape[SEQUENCE]  # microbatches of a step may have other lengths
        whole = torch.arange(self._own * self._ranks, device=tokens.device)
        positions = self._cut(whole[None]).expand(tokens.shape[0], -1)
        return args, {**kwargs, "position_ids": positions}

    def checked(self, loss: Loss) -> Loss:
        """The loss; its first call shows whether it adds up over positions.

        A mean over a rank's own positions is not its share of the mean over all.
        """

        def added_up(output: Any, targets: Any) -> Tensor:
            value = loss(output, targets)
            if not self._is_checked:
                self._is_checked = True
                self._require_sum(loss, output, targets, value.detach())
            return value

        return added_up

    @torch.no_grad()
    def _require_sum(self, loss: Loss, output: Any, targets: Any, value: Tensor) -> None:
        def half(number: int) -> Callable[[Tensor], Tensor]:
            def cut(tensor: Tensor) -> Tensor:
                return tensor.chunk(2, dim=SEQUENCE)[number] if _has(tensor, self._own) else tensor

            return cut

        halves = [
            loss(map_tensors(Tensor, half(n), output), map_tensors(Tensor, half(n), targets))
            for n in (0, 1)
        ]
        if float((halves[0] + halves[1] - value).abs()) > MEAN * float(value.abs()):
            raise UsageError(
                "with engine.cp the loss must add up over positions, and this one takes a mean "
                "over those that it gets: divide their sum by the number of all positions"
            )

    # ---- attention

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = True,
        dropout_p: float = 0.0,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Attend causally from this rank's positions to all before them. Collective over `cp`.

        Query and result are [batch, heads, this rank's time, head_dim]; key and value may have
        fewer heads. `is_causal` must be true. `scale` is of the products, None for torch's.
        `window` counts the visible positions, its own among them; None for all.
        """
        if not is_causal:
            raise UsageError("engine.cp: attention that is not causal is not known")
        groups = query.shape[1] // key.shape[1]
        keys, values = (self._all(part, groups) for part in (key, value))
        results = []
        each = query.shape[TIME] // 2
        for number, part in zip(self._numbers, query.chunk(2, dim=TIME), strict=True):
            end = (number + 1) * each
            first = 0 if window is None else max(0, number * each - window + 1)
            seen = slice(first, end)
            mask = _mask(each, end - first, window or end, query.device)
            results.append(
                F.scaled_dot_product_attention(
                    part, keys[:, :, seen], values[:, :, seen], mask, dropout_p, scale=scale
                )
            )
        return torch.cat(results, dim=TIME)

    def _all(self, part: Tensor, groups: int) -> Tensor:
        """All positions in their order; each head as often as queries share it."""
        spread = DTensor.from_local(part, self._mesh, [Shard(TIME)], run_check=False)
        whole = spread.redistribute(placements=[Replicate()])
        parts = whole.to_local(grad_placements=[Partial()]).chunk(2 * self._ranks, dim=TIME)
        front = parts[0::2]  # rank r has parts r and 2n - 1 - r
        back = parts[1::2][::-1]
        ordered = torch.cat((*front, *back), dim=TIME)
        return ordered if groups == 1 else ordered.repeat_interleave(groups, dim=1)


def _has(tensor: Tensor, positions: int) -> bool:
    return tensor.ndim > SEQUENCE and tensor.shape[SEQUENCE] == positions


def _mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Return True where a query sees a key; the last query stands at the last key."""
    at = torch.arange(keys - queries, keys, device=device)[:, None]
    keyed = torch.arange(keys, device=device)
    return (keyed <= at) & (keyed > at - window)


def _attend_as_transformers(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    if attention_mask is not None or given.get("softcap") is not None:
        raise UsageError(
            f"engine.cp: {type(module).__name__} has an attention mask or a soft cap, which is not "
            "known; set engine.cp to 1"
        )
    mixed = module.hpctrain_context.attend(
        query,
        key,
        value,
        dropout_p=given.get("dropout") or 0.0,
        scale=given.get("scaling"),
        window=given.get("sliding_window"),
    )
    return mixed.transpose(1, 2).contiguous(), None
