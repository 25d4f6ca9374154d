"""A mixture of experts: many MLPs, of which each token goes through a few (arXiv 1701.06538).

No token is ever dropped and no expert has a limit, so what comes out does not depend on how a batch
is cut over microbatches or ranks. For the same reason there is no loss that balances the experts:
the usual one multiplies means over the tokens of a pass, and would be another function at another
number of ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812, its usual name
from torch import Tensor, nn


class Experts(nn.Module):
    """So many gated MLPs side by side; each takes the tokens that were sorted to it.

    Nothing here knows of other ranks: `tokens_by_expert` is how an engine tells that it may keep
    some of the experts on each rank (`hpctrain.engines.experts` says what that asks of a module).
    """

    tokens_by_expert = True

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, hidden, dim))
        self.up = nn.Parameter(torch.empty(experts, hidden, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, hidden))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Each token through its expert.

        An expert without a token has a gradient of zeros, not none, so that the optimizer does the
        same to it wherever it lies.

        Args:
            tokens: [tokens, dim], those of the first expert first.
            counts: [experts] integers, how many tokens each has.
        """
        rows = torch.split(tokens, counts.tolist())
        weights = (self.gate.unbind(), self.up.unbind(), self.down.unbind())
        return torch.cat(
            [
                F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
                for x, gate, up, down in zip(rows, *weights, strict=True)
            ]
        )


class MoE(nn.Module):
    """A router that chooses experts for each token, and the experts."""

    def __init__(self, dim: int, hidden: int, experts: int, per_token: int) -> None:
        super().__init__()
        self.per_token = per_token
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = Experts(dim, hidden, experts)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, dim] to the same shape."""
        tokens = x.flatten(0, 1)
        shares, chosen = self.choose(tokens)
        # Sorted and put back by permutations, and added along a dimension: in the same order each
        # time, which adding rows at their index would not promise on a GPU.
        order = chosen.flatten().argsort(stable=True)
        copies = tokens[:, None].expand(-1, self.per_token, -1).flatten(0, 1)
        counts = chosen.flatten().bincount(minlength=self.router.out_features)
        done = self.experts(copies[order], counts)
        answers = done[order.argsort()].unflatten(0, (-1, self.per_token))
        mixed: Tensor = (answers * shares[:, :, None]).sum(dim=1)
        return mixed.type_as(x).view_as(x)

    def choose(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """How much of each chosen expert, and which: both [tokens, per token], the first in fp32.

        Of equal scores the first expert wins: bf16 makes equal ones often, and top-k leaves open
        which it takes.
        """
        scores = self.router(tokens).float().softmax(dim=-1)
        ranked, experts = scores.sort(dim=-1, descending=True, stable=True)
        best = ranked[:, : self.per_token]
        return best / best.sum(dim=-1, keepdim=True), experts[:, : self.per_token]
