"""Experts on several ranks, of which one is there: an even exchange of tokens.

The other ranks answer nothing, and how many tokens travel is told by values: as many are taken to
come as go. tests/engines/test_strategy_measured.py holds the promises.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.train.engines import experts

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Exchange(torch.autograd.Function):
    """What travels comes as another tensor, forwards and backwards."""

    @staticmethod
    def forward(_context: Any, tokens: torch.Tensor) -> torch.Tensor:
        """As many as go."""
        return tokens.clone()

    @staticmethod
    def backward(_context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """The same of their gradients."""
        return gradients[0].clone()


@contextlib.contextmanager
def even_exchange() -> Iterator[None]:
    """Tokens of the other ranks come as this rank's go."""
    own: Any = experts
    counts, tokens = own.all_to_all, own.all_to_all_with_gradient

    def same(given: torch.Tensor, *_sizes: Any) -> torch.Tensor:
        return given.clone()

    def travelled(given: torch.Tensor, *_sizes: Any) -> torch.Tensor:
        out: torch.Tensor = _Exchange.apply(given)  # type: ignore[no-untyped-call]
        return out

    own.all_to_all, own.all_to_all_with_gradient = same, travelled
    try:
        yield
    finally:
        own.all_to_all, own.all_to_all_with_gradient = counts, tokens
