"""What a plan needs to know of a model: its sizes, and how many parameters lie where.

`of_config` reads them from the values of a Hugging Face config.json, `of_numbers` from a few
numbers; both count parameters as the model's own code makes them. Pure.
tests/unit/strategy/test_facts.py holds the counts against real models.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

LLAMA, GPT2, BERT, MOE = "llama", "gpt2", "bert", "moe"
FAMILIES = {LLAMA: "like Llama", GPT2: "like GPT-2", BERT: "like BERT", MOE: "like Mixtral"}
"""Layouts whose activations are known, tensor by tensor."""
TYPES: Mapping[str, str] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gpt2": GPT2,
    "bert": BERT,
    "mixtral": MOE,
}
"""`model_type` of a config.json to the layout that its code has."""
MOST = 1 << 50
_SUFFIX = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True)
class ModelFacts:
    """A transformer's sizes. Parameters are counts, not bytes."""

    name: str  # for people
    family: str  # one of `FAMILIES`
    layers: int  # blocks
    hidden: int  # width of the residual stream
    heads: int  # attention heads
    kv_heads: int  # heads of key and value
    head_dim: int  # width of a head
    inner: int  # width of the MLP, or of one expert's
    vocab: int  # classes of the logits
    block_params: int  # of one block
    matrix_params: int  # of one block, in matrices outside of experts: what autocast copies
    embed_params: int  # before the blocks
    head_params: int  # behind the blocks, without what is tied
    tied: bool  # the head's matrix is the embedding's
    experts: int = 0  # of a block; 0 for a dense model
    routed: int = 0  # experts that a token goes to
    expert_params: int = 0  # of those, in experts
    basis: str = ""  # where the sizes come from, and what was assumed

    @property
    def params(self) -> int:
        """All of them."""
        return self.layers * self.block_params + self.embed_params + self.head_params

    @property
    def active_params(self) -> int:
        """Those that a token meets in matrix products."""
        idle = self.expert_params * (1 - self.routed / self.experts) if self.experts else 0
        lookups = 0 if self.tied else self.embed_params
        return round(self.params - lookups - self.layers * idle)

    def adapter_params(self, rank: int) -> int:
        """Of one block's adapters, on each of its seven matrices, in a decoder like Llama."""
        attention = 2 * (self.hidden + self.query) + 2 * (self.hidden + self.key)
        return rank * (attention + 3 * (self.hidden + self.inner))

    @property
    def query(self) -> int:
        """Width of all heads' queries."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all heads' keys."""
        return self.kv_heads * self.head_dim


def count_of(text: str, what: str) -> int:
    """A number as people write it: 7B, 124M, 1.5e9.

    Raises:
        UsageError: it is none, or below 1.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
    number = float(match[1]) * _SUFFIX[match[2].upper()] if match else 0
    if not 1 <= number < MOST:
        raise UsageError(f"{what} {text!r} is no number of parameters; write 7B, 124M or 1.5e9")
    return round(number)


def of_config(config: Mapping[str, Any], where: str) -> ModelFacts:
    """A model's sizes from the values of its config.json.

    Raises:
        UsageError: a number that is needed is missing or is no size, or the layout is not known.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in TYPES:
        takes = ", ".join(sorted(TYPES))
        raise UsageError(
            f"{where}: the layout of model_type {str(kind)[:40]!r} is not known (known: {takes}); "
            "leave MODEL out, and give --params, --layers, --hidden, --heads, --vocab and --family"
        )
    family = TYPES[kind]
    return (_older if family in {GPT2, BERT} else _llama)(config, where, family)


def _llama(config: Mapping[str, Any], where: str, family: str) -> ModelFacts:
    size = _Sizes(config, where)
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    is_given = config.get("head_dim") is not None
    head_dim = size("head_dim") if is_given else _per_head(hidden, heads, where)
    kv_heads = size("num_key_value_heads", default=heads)
    inner, vocab = size("intermediate_size"), size("vocab_size")
    experts = size("num_local_experts") if family == MOE else 0
    query, key = heads * head_dim, kv_heads * head_dim
    attention = 2 * hidden * query + 2 * hidden * key
    expert_params = experts * 3 * hidden * inner
    mlp = expert_params + hidden * experts if experts else 3 * hidden * inner
    extra, kind = 2 * hidden, config["model_type"]
    if kind == "qwen2":
        extra += query + 2 * key
    if kind == "qwen3":
        extra += 2 * head_dim
    if kind in {"llama", "qwen3"} and config.get("attention_bias") is True:
        extra += query + 2 * key + hidden
    if kind == "llama" and config.get("mlp_bias") is True:
        extra += 2 * inner + hidden
    tied = config.get("tie_word_embeddings", False) is True
    return ModelFacts(
        name=_name(config, where),
        family=family,
        layers=size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        inner=inner,
        vocab=vocab,
        experts=experts,
        routed=size("num_experts_per_tok") if experts else 0,
        block_params=attention + mlp + extra,
        expert_params=expert_params,
        matrix_params=attention + (hidden * experts if experts else mlp),
        embed_params=vocab * hidden,
        head_params=(0 if tied else vocab * hidden) + hidden,
        tied=tied,
        basis=where,
    )


def _older(config: Mapping[str, Any], where: str, family: str) -> ModelFacts:
    """Of GPT-2 and BERT: matrices with biases, two of them in the MLP, and learnt positions."""
    size = _Sizes(config, where)
    names = ["n_embd", "n_head", "n_layer"]
    if family == BERT:
        names = ["hidden_size", "num_attention_heads", "num_hidden_layers"]
    (hidden, heads, layers), vocab = map(size, names), size("vocab_size")
    tied = family == BERT or config.get("tie_word_embeddings", True) is not False
    if family == GPT2:
        inner = size("n_inner", default=4 * hidden)
        embed = (vocab + size("n_positions", default=1024)) * hidden
        head = 2 * hidden + (0 if tied else vocab * hidden)
    else:
        inner = size("intermediate_size")
        rows = vocab + size("max_position_embeddings") + size("type_vocab_size", default=2)
        embed, head = rows * hidden + 2 * hidden, hidden * hidden + 3 * hidden + vocab
    matrices = 4 * hidden * hidden + 2 * hidden * inner
    return ModelFacts(
        name=_name(config, where),
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=_per_head(hidden, heads, where),
        inner=inner,
        vocab=vocab,
        block_params=matrices + 9 * hidden + inner,
        matrix_params=matrices,
        embed_params=embed,
        head_params=head,
        tied=tied,
        basis=where,
    )


class _Sizes:
    """Whole numbers of a config.json."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config, self._where = config, where

    def __call__(self, key: str, *, default: int = 0) -> int:
        value = self._config.get(key)
        if value is None and default:
            return default
        if type(value) is not int or not 0 < value < MOST:
            said = "has no" if value is None else f"has {str(value)[:40]!r} as"
            raise UsageError(f"{self._where}: {said} {key}, which a plan needs as a whole number")
        return value


def _per_head(hidden: int, heads: int, where: str) -> int:
    if hidden % heads:
        raise UsageError(
            f"{where}: num_attention_heads {heads} does not divide hidden_size {hidden}"
        )
    return hidden // heads


def _name(config: Mapping[str, Any], where: str) -> str:
    given = config.get("_name_or_path")
    return given if isinstance(given, str) and given else where


def of_numbers(
    *,
    params: int | None,
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    family: str = LLAMA,
    inner: int = 0,
    kv_heads: int = 0,
    tied: bool = False,
) -> ModelFacts:
    """A model of these sizes. Without `inner` it follows from `params`, else from the family.

    Raises:
        UsageError: they do not fit each other.
    """
    if hidden % heads:
        raise UsageError(f"--heads {heads} does not divide --hidden {hidden}; use one that does")
    if family == MOE:
        raise UsageError("a model with experts needs its config.json: numbers do not say enough")
    if params and not inner:
        rest = params - vocab * hidden * (1 if tied or family != LLAMA else 2) - hidden
        key = (kv_heads or heads) * (hidden // heads)
        attention = 2 * hidden * hidden + 2 * hidden * key + 2 * hidden  # and two norms
        inner = round((rest / layers - attention) / ((3 if family == LLAMA else 2) * hidden))
        if inner < 1:
            raise UsageError(
                f"--params {params:,} is less than {layers} layers of --hidden {hidden} with a "
                f"--vocab of {vocab:,} have in attention and embedding alone"
            )
    inner = inner or (round(8 * hidden / 3) if family == LLAMA else 4 * hidden)
    values: dict[str, Any] = {"model_type": {LLAMA: "llama", GPT2: "gpt2", BERT: "bert"}[family]}
    if family == GPT2:
        values |= {"n_embd": hidden, "n_head": heads, "n_layer": layers, "n_inner": inner}
    values |= {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied or family != LLAMA,
    }
    facts = of_config(values, "the numbers given")
    total = f"{facts.params / 1e9:.2f}B" if facts.params >= MOST_MILLIONS else "a small"
    basis = f"numbers; {FAMILIES[family]}, MLP of {inner:,}"
    return replace(facts, name=f"{total} model", basis=basis)


MOST_MILLIONS = 10_000_000
