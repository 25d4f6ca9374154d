"""A decoder-only language model, small enough to read in one sitting.

Pre-norm residual blocks of causal attention with rotary positions and a gated MLP, as in Llama
(arXiv 2302.13971). There are no buffers and no biases, and nothing depends on the rank or the world
size.

Where there are experts, each token goes through a few of many such MLPs (`MoE`, arXiv 1701.06538).
No token is ever dropped and no expert has a limit, so what comes out does not depend on how a batch
is cut over microbatches or ranks. For the same reason there is no loss that balances the experts:
the usual one multiplies means over the tokens of a pass, and would be another function at another
number of ranks. tests/engines/test_model.py and test_experts.py hold the promises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812, its usual name
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from hpctrain import cross_entropy
from hpctrain.core.device import nvidia_capability
from hpctrain.errors import UsageError

ROTARY_BASE = 10_000.0
INIT_STD = 0.02
ADDS_TO_RESIDUAL = ("attention.out.weight", "mlp.down.weight", "mlp.experts.down")


class Experts(nn.Module):
    """So many gated MLPs side by side; each takes the tokens that were sorted to it.

    Nothing here knows of other ranks: `tokens_by_expert` is how an engine tells that it may keep
    some of the experts on each rank (`train.engines.experts` says what that asks of a module).
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
        if can_group(tokens, self.gate):
            ends = counts.cumsum(0).to(torch.int32)
            mixed = F.silu(_grouped(tokens, self.gate, ends)) * _grouped(tokens, self.up, ends)
            return _grouped(mixed, self.down, ends)
        rows = torch.split(tokens, counts.tolist())
        weights = (self.gate.unbind(), self.up.unbind(), self.down.unbind())
        return torch.cat(
            [
                F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
                for x, gate, up, down in zip(rows, *weights, strict=True)
            ]
        )


def can_group(tokens: Tensor, weight: Tensor) -> bool:
    """Whether torch multiplies groups of tokens by a matrix each in one call, as fast as it can.

    On a GPU that is so for bf16 from Hopper on; elsewhere torch would ask it for the counts, and
    multiply one by one, as the loop does. A row has to take a multiple of 16 bytes. Older releases
    lack it on a CPU, or were not run.
    """
    dtype = _computed_in(tokens)
    is_known = TorchVersion(torch.__version__) >= "2.13" and hasattr(F, "grouped_mm")
    if not is_known or any(n * dtype.itemsize % 16 for n in weight.shape[1:]):
        return False
    if tokens.device.type == "cpu":
        return dtype in {torch.float32, torch.bfloat16}
    return (
        dtype is torch.bfloat16
        and nvidia_capability(tokens.device) >= (9, 0)
        and not torch.are_deterministic_algorithms_enabled()
    )


def _grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows up to each end times the transpose of one matrix each."""
    dtype = _computed_in(rows)  # torch's own casting passes this function by
    return F.grouped_mm(rows.to(dtype), weight.to(dtype).transpose(1, 2), offs=ends)


def _computed_in(tokens: Tensor) -> torch.dtype:
    kind = tokens.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tokens.dtype


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


@dataclass(frozen=True)
class LMConfig:
    """The shape of a model."""

    layers: int = 4
    dim: int = 128
    heads: int = 4
    seq_len: int = 128
    vocab: int = 320
    """257 byte tokens, padded to a multiple of 64 for the matrix units."""
    dropout: float = 0.0
    """Probability on the embedding and on what each attention and MLP adds."""
    experts: int = 0
    """MLPs in each block, of which a token goes to some; 0 for one that takes all tokens."""
    experts_per_token: int = 2

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise UsageError(
                f"a model of width {self.dim} (train.dim) cannot have {self.heads} heads "
                "(train.heads): each needs an even, whole number of channels; change one of the two"
            )
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise UsageError(
                f"a token cannot go to {self.experts_per_token} (train.experts_per_token) of "
                f"{self.experts} experts (train.experts); use 1 to {max(1, self.experts)}, or "
                "train.experts 0 for a dense model"
            )

    @property
    def hidden(self) -> int:
        """Width of the MLP: 8/3 of the model's; three such matrices cost what two of 4x would."""
        return 32 * math.ceil(8 * self.dim / 3 / 32)


class Attention(nn.Module):
    """Each position looks at itself and what came before."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, config.dim, bias=False)
        self.value = nn.Linear(config.dim, config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.attend = F.scaled_dot_product_attention
        """What an engine replaces where ranks share sequences (`train.engines.context`)."""

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """[batch, time, dim] to the same shape; see `rotate` for the positions."""
        query, key, value = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        query, key = rotate(query, positions), rotate(key, positions)
        mixed = self.attend(query, key, value, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class MLP(nn.Module):
    """SwiGLU: one half of the hidden layer gates the other (arXiv 2002.05202)."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, dim] to the same shape."""
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    """One layer: look around, then think; each adds to what is there."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.mlp = (
            MoE(config.dim, config.hidden, config.experts, config.experts_per_token)
            if config.experts
            else MLP(config)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """[batch, time, dim] to the same shape."""
        looked: Tensor = x + self.dropout(self.attention(self.attention_norm(x), positions))
        thought: Tensor = looked + self.dropout(self.mlp(self.mlp_norm(looked)))
        return thought


class LM(nn.Module):
    """The model, on the CPU, with the same weights for the same seed wherever it is built."""

    def __init__(self, config: LMConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        # On "meta" nothing is drawn from torch's global generator, whose state is the run's own.
        with torch.device("meta"):
            self.embedding = nn.Embedding(config.vocab, config.dim)
            self.dropout = nn.Dropout(config.dropout)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = nn.RMSNorm(config.dim, eps=1e-5)
            self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self.to_empty(device="cpu")
        self.init_weights(seed)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Logits of the next token: [batch, time] integers to [batch, time, vocab].

        Args:
            tokens: What they follow.
            position_ids: [batch, time], where each stands in its sequence; None for 0, 1, ...
        """
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x) if position_ids is None else block(x, position_ids)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draw every weight from the seed alone; what adds to the residual stream begins small."""
        generator = torch.Generator().manual_seed(seed)
        residual_std = INIT_STD / math.sqrt(2 * self.config.layers)
        for name, weight in self.named_parameters():
            if name.endswith("norm.weight"):
                weight.fill_(1.0)
            else:
                adds = name.endswith(ADDS_TO_RESIDUAL)
                weight.normal_(0.0, residual_std if adds else INIT_STD, generator=generator)


MODEL_BLOCKS: tuple[type[nn.Module], ...] = (Block,)
"""What an engine shards, gathers and recomputes as one unit."""


def rotate(x: Tensor, positions: Tensor | None = None) -> Tensor:
    """Turn pairs of channels by angles that grow with the position (RoPE, arXiv 2104.09864).

    Computed anew from [batch, heads, time, head_dim]: a table would be a buffer, to be broadcast
    by DDP and rounded by a mixed-precision engine. Positions are [batch, time]; None for 0, 1, ...
    """
    time, half = x.shape[-2], x.shape[-1] // 2
    channels = torch.arange(half, device=x.device, dtype=torch.float32)
    if positions is None:
        positions = torch.arange(time, device=x.device)[None]
    angles = positions[:, None, :, None].float() * ROTARY_BASE ** (-channels / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.type_as(x)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in fp32, summed over each sequence: [batch, time, vocab] to [batch]."""
    return cross_entropy(logits, targets).sum(dim=1)


def count_parameters(config: LMConfig, *, active: bool = False) -> int:
    """How many weights a model of this shape has.

    Args:
        config: The shape.
        active: Count only the experts that one token goes to: what it costs to compute, where the
            whole number is what it costs to hold.
    """
    mlp = 3 * config.dim * config.hidden
    if config.experts:
        mlp *= config.experts_per_token if active else config.experts
        mlp += config.dim * config.experts  # the router sees every token
    block = 4 * config.dim**2 + mlp + 2 * config.dim
    return config.layers * block + 2 * config.vocab * config.dim + config.dim


def flops_per_token(config: LMConfig) -> int:
    """Floating-point operations of training on one token, both ways (arXiv 2204.02311, B).

    Six for each weight that the token meets but the embedding's, which is looked up; the causal
    half of attention counts in full, as is usual, and recomputed activations do not.
    """
    multiplied = count_parameters(config, active=True) - config.vocab * config.dim
    return 6 * multiplied + 12 * config.layers * config.dim * config.seq_len
