"""Models and steps whose exact peak the formulas of `hpctrain plan` are held against.

Real architectures of transformers, smaller than people train them; nothing of them is computed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.advise.strategy.choice import PlanRequest
from hpctrain.advise.strategy.facts import of_config
from hpctrain.advise.strategy.hardware import Accelerator
from hpctrain.advise.strategy.memory import Batch, Spread
from hpctrain.advise.strategy.peaks import peak, stage_peaks
from hpctrain.advise.strategy.strategies import Machines
from hpctrain.advise.strategy.timing import Links

if TYPE_CHECKING:
    from hpctrain.advise.strategy.memory import Peak

MODELS: dict[str, dict[str, Any]] = {
    "llama-156M": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 1024,
        "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 32_000,
    },
    "llama-20M": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512,
        "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 8, "vocab_size": 4096,
    },
    "llama-748M": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 5632, "num_hidden_layers": 12, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": 32_000,
    },
    "llama-7B": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32_000,
    },
    "llama-405B": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16_384,
        "intermediate_size": 53_248, "num_hidden_layers": 126, "num_attention_heads": 128,
        "num_key_value_heads": 8, "vocab_size": 128_256,
    },
    "gpt2-124M": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 12,
        "n_head": 12, "vocab_size": 50_257, "n_positions": 4096,
    },
    "bert-335M": {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 1024,
        "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        "vocab_size": 30_522, "max_position_embeddings": 4096,
    },
    "bert-52M": {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 768,
        "num_hidden_layers": 4, "num_attention_heads": 12, "intermediate_size": 3072,
        "vocab_size": 30_522, "max_position_embeddings": 512,
    },
    "mixtral-270M": {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 1024,
        "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 32_000, "num_local_experts": 8,
        "num_experts_per_tok": 2, "experts_implementation": "grouped_mm",
    },
    "mixtral-45M": {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 512,
        "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 1024, "num_local_experts": 8,
        "num_experts_per_tok": 2, "experts_implementation": "grouped_mm",
    },
    "mixtral-12M": {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 2048, "num_local_experts": 8,
        "num_experts_per_tok": 2, "experts_implementation": "grouped_mm",
    },
}  # fmt: skip

Case = tuple[str, dict[str, Any]]
FSDP2 = {"kind": "fsdp2", "ranks": 8}
NO_RESHARD = {**FSDP2, "reshard": False}
HSDP = {**FSDP2, "copies": 2}
DDP = {"kind": "ddp", "ranks": 8}
SINGLE = {"kind": "single"}
SMALL = {"micro": 1, "seq": 512}
LONG = {"micro": 4, "seq": 2048}
AGAIN = {"recompute": True}

QUICK: list[Case] = [
    ("llama-156M", {**SINGLE, **LONG}),
    ("gpt2-124M", {**DDP, **SMALL}),
    ("llama-20M", {**FSDP2, **SMALL, **AGAIN, "offload": True}),
    ("llama-20M", {**FSDP2, **SMALL, "pp": 2, "stage": 0, "passes": 8}),
    ("llama-20M", {**FSDP2, **SMALL, "lora": 16}),
    ("mixtral-12M", {**FSDP2, **SMALL, "ep": 4, "real": True}),
    ("llama-156M", {**FSDP2, **SMALL, "selective": True}),
    ("bert-52M", {**FSDP2, "micro": 1, "seq": 64, "passes": 2, "each_pass": True}),
]
"""Of each family and each way, in seconds."""
MORE: list[Case] = [
    ("llama-156M", {**FSDP2, **SMALL, **AGAIN}),
    ("llama-156M", {**NO_RESHARD, **LONG}),
    ("bert-52M", {**HSDP, **SMALL, **AGAIN}),
    ("mixtral-270M", {**FSDP2, **SMALL}),
    ("llama-156M", {**FSDP2, "ranks": 2, "micro": 1, "seq": 64, "offload": True}),
    ("gpt2-124M", {**FSDP2, **LONG, "passes": 2}),
    ("llama-20M", {**FSDP2, **SMALL, "offload": True}),
    ("gpt2-124M", {**FSDP2, "micro": 1, "seq": 64, "passes": 2, "offload": True}),
    ("llama-20M", {**FSDP2, **SMALL, "pp": 2, "stage": 1, "passes": 8}),
    ("llama-20M", {**SINGLE, **SMALL, "lora": 16}),
]
"""As quick; in `make soak`."""

_DENSE = ("llama-156M", "llama-748M", "gpt2-124M", "bert-335M")
EVERY: list[Case] = [
    *((name, {**way, **size, **more})
      for name in _DENSE for way in (SINGLE, DDP, FSDP2) for size in (SMALL, LONG)
      for more in ({}, AGAIN)),
    *((name, {**way, "micro": 2, "seq": 1024, **more})
      for name in (*_DENSE, "mixtral-270M")
      for way, more in ((NO_RESHARD, {}), (HSDP, AGAIN), (FSDP2, {"passes": 2}))),
    *(("mixtral-270M", {**FSDP2, **size, **more})
      for size in (SMALL, LONG) for more in ({}, AGAIN)),
    *(("llama-7B", {"kind": "fsdp2", "ranks": ranks, "micro": 1, "seq": 4096, **more})
      for ranks in (16, 64) for more in ({}, AGAIN, {"reshard": False})),
    ("llama-156M", {**SINGLE, **LONG, "bf16": False}),
    ("bert-335M", {**FSDP2, **LONG, "bf16": False}),
]  # fmt: skip


TENSOR: list[Case] = [
    ("llama-20M", {**FSDP2, "tp": tp, "real": True, "micro": micro, "seq": 512, **more})
    for tp, micro, more in ((2, 1, {}), (4, 2, {}), (4, 2, AGAIN), (2, 4, AGAIN), (8, 4, {}))
]  # fmt: skip
"""Their embedding looks at values: they are computed, on this machine's processors."""


ZERO: list[Case] = [
    (name, {"kind": f"zero{stage}", "ranks": ranks, "micro": 1, "seq": seq, **more})
    for stage in (1, 2, 3)
    for name, ranks, seq, more in (
        ("llama-156M", 4, 128, {}), ("llama-156M", 32, 128, AGAIN), ("llama-20M", 8, 1024, {}),
        ("llama-20M", 8, 1024, AGAIN),
    )
]  # fmt: skip
"""DeepSpeed's engine as hpctrain sets it, on this machine's processors."""


_HALF = {"micro": 2, "seq": 1024, "passes": 2}
OFFLOAD: list[Case] = [
    *((name, {**FSDP2, **size, **more, "offload": True})
      for name in ("llama-156M", "llama-748M", "gpt2-124M")
      for size in (SMALL, LONG) for more in ({}, AGAIN)),
    *((name, {**FSDP2, **_HALF, "offload": True})
      for name in ("llama-156M", "llama-748M", "gpt2-124M")),
    ("llama-156M", {**FSDP2, **SMALL, **AGAIN, "ranks": 2, "offload": True}),
    *(("llama-20M", {**FSDP2, **SMALL, **more, "offload": True}) for more in ({}, AGAIN)),
]  # fmt: skip
"""On a device that stands in for a GPU: its tensors are counted, those of the host are not."""

_FEW = {"micro": 1, "seq": 64}
THIN: list[Case] = [
    *((name, {**FSDP2, **_FEW, **more, **away})
      for name in ("llama-20M", "gpt2-124M", "bert-52M")
      for more in ({}, AGAIN, {"passes": 2}) for away in ({}, {"offload": True})),
    *(("llama-156M", {**FSDP2, **_FEW, **more, "ranks": 2, "offload": True})
      for more in ({}, AGAIN, {"passes": 2})),
    *((name, {**way, **_FEW}) for name in ("llama-20M", "gpt2-124M")
      for way in (NO_RESHARD, HSDP)),
    ("llama-20M", {**FSDP2, **_FEW, "lora": 16}),
]  # fmt: skip
"""Of few tokens: what rests, what is gathered and what is reduced decides, moment by moment."""

STAGES: list[Case] = [
    ("llama-156M", {**FSDP2, **size, "pp": pp, "stage": stage, "passes": 4 * pp, **more})
    for pp, stage in ((2, 0), (2, 1), (4, 0))
    for size in (SMALL, {"micro": 2, "seq": 2048}) for more in ({}, AGAIN)
] + [("llama-156M", {**FSDP2, **SMALL, "pp": 4, "stage": 1, "passes": 16})]  # fmt: skip
"""Of pipelines: one stage each, by hpctrain's own engine and torch's 1F1B."""

ADAPTERS: list[Case] = [
    *(("llama-156M", {**way, **size, **more, "lora": 16})
      for way in (FSDP2, SINGLE, DDP) for size in (SMALL, LONG) for more in ({}, AGAIN)),
    ("llama-748M", {**FSDP2, **SMALL, **AGAIN, "lora": 16}),
    ("llama-748M", {**SINGLE, **LONG, "lora": 16}),
    ("llama-748M", {**SINGLE, **SMALL, **AGAIN, "lora": 64}),
    ("llama-156M", {**FSDP2, **LONG, "lora": 64}),
    *(("llama-156M", {**way, **_HALF, "lora": 16}) for way in (FSDP2, SINGLE)),
]  # fmt: skip
"""As peft wraps a model."""

_QUARTER = {"micro": 1, "seq": 256}
_FOUR = {"micro": 4, "seq": 512}
EXPERTS: list[Case] = [
    (name, {**FSDP2, "ep": ep, "real": True, **size})
    for name, ep, size in (
        ("mixtral-45M", 2, _QUARTER), ("mixtral-45M", 8, _QUARTER),
        ("mixtral-45M", 8, {**_QUARTER, **AGAIN}), ("mixtral-45M", 4, _FOUR),
        ("mixtral-45M", 4, {**_FOUR, **AGAIN}), ("mixtral-45M", 4, {**_QUARTER, "passes": 2}),
        ("mixtral-12M", 2, SMALL), ("mixtral-12M", 4, SMALL), ("mixtral-12M", 8, SMALL),
        ("mixtral-12M", 4, _FOUR), ("mixtral-12M", 4, {**_FOUR, **AGAIN}),
        ("mixtral-12M", 8, {**SMALL, **AGAIN}),
        ("mixtral-12M", 2, {"micro": 2, "seq": 512, "passes": 2}),
    )
]  # fmt: skip
"""Blocks of a Mixtral with the recipe's experts, as many tokens coming as going."""

_KEPT = {"selective": True}
_REDUCED = {"passes": 2, "each_pass": True}
SELECTIVE: list[Case] = [
    *((name, {**way, **size, **_KEPT})
      for name in ("llama-156M", "llama-748M", "gpt2-124M", "bert-335M")
      for way in (SINGLE, FSDP2) for size in (SMALL, LONG)),
    *((name, {**FSDP2, **size, **_REDUCED})
      for name in ("llama-156M", "gpt2-124M", "bert-52M") for size in (SMALL, _FEW)),
    ("llama-748M", {**FSDP2, **SMALL, **AGAIN, **_REDUCED}),
]  # fmt: skip
"""Products kept and the rest computed again; gradients reduced in each pass."""

ALL: list[Case] = [
    *EVERY, *TENSOR, *ZERO, *OFFLOAD, *THIN, *STAGES, *ADAPTERS, *EXPERTS, *SELECTIVE
]  # fmt: skip
"""Each once, as tests/data/plan-peaks.md lists them."""


def measured(cases: list[Case], patience_s: float) -> list[int]:
    """Exact peaks, bytes; DeepSpeed's cases in a process each, since it keeps its groups."""
    alone = [number for number, (_, step) in enumerate(cases) if step["kind"].startswith("zero")]
    groups = [[n] for n in alone]
    groups.append([n for n in range(len(cases)) if n not in alone])
    peaks = dict[int, int]()
    for group in groups:
        each = [{**_source(*cases[n]), "steps": [cases[n][1]]} for n in group]
        answers = child(each, patience_s) if group else []
        for number, answer in zip(group, answers, strict=True):
            (step,) = answer["steps"]
            assert "error" not in step, (title(cases[number]), step)
            peaks[number] = int(step["peak"])
    return [peaks[number] for number in range(len(cases))]


def child(questions: list[dict[str, Any]], patience_s: float) -> list[dict[str, Any]]:
    """Return what `plan_child` answers to each question."""
    with tempfile.TemporaryDirectory(prefix="plan-child-") as folder:
        answer = Path(folder, "answer.json")
        subprocess.run(
            [sys.executable, "-m", "tests.support.plan_child", str(answer)],
            input=json.dumps(questions), text=True, timeout=patience_s, check=True,
            stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        return json.loads(answer.read_bytes())


def _source(name: str, step: dict[str, Any]) -> dict[str, Any]:
    if "ep" in step:  # a model whose experts an engine takes
        return {"callable": f"tests.support.mixtral:{name.lower().replace('-', '_')}"}
    return {"config": MODELS[name]}


def predicted(case: Case) -> Peak:
    """What the formulas say."""
    name, step = case
    kind, copies = step["kind"], step.get("copies", 1)
    tp, pp = step.get("tp", 1), step.get("pp", 1)
    layout = Spread(
        kind,
        shards=step.get("ranks", 1) // copies // tp // pp if kind not in {"single", "ddp"} else 1,
        copies=copies,
        tp=tp,
        recompute=step.get("recompute", False),
        selective="products" if step.get("selective") else "",
        each_pass=step.get("each_pass", False),
        reshard=step.get("reshard", True),
        low=2 if step.get("bf16", True) else 4,
        offload=step.get("offload", False),
        pp=pp,
        ep=step.get("ep", 1),
        lora=step.get("lora", 0),
    )
    batch, model = Batch(step["micro"], step["seq"], step.get("passes", 1)), MODELS[name]
    facts = of_config(model, name)
    if pp > 1:
        return stage_peaks(facts, batch, layout)[step["stage"]]
    return peak(facts, batch, layout)


def title(case: Case) -> str:
    """A case in words."""
    name, step = case
    said = {key: value for key, value in step.items() if key not in {"kind", "real"}}
    words = [key if value is True else f"{key}={value}" for key, value in said.items()]
    return f"{name} {step['kind']} {' '.join(words)}"


def ask(
    model: str = "llama-7B",
    *,
    gb: float = 80.0,
    nodes: int = 2,
    gpus: int = 8,
    seq: int = 2048,
    **more: Any,
) -> PlanRequest:
    """A question for a plan, on GPUs of which all is known."""
    facts = of_config(MODELS[model], model)
    batch = {"global_batch": nodes * gpus} | more
    gpu = Accelerator("GPU", round(gb * 1e9), 300e12, 300e9, bf16=True)
    return PlanRequest(facts, Machines(nodes, gpus), gpu, Links(300e9, 25e9), seq, **batch)


def for_key(key: str, **more: Any) -> PlanRequest:
    """A question among whose answers is the strategy of this key."""
    needs: dict[str, Any] = {}
    if key.startswith("pp"):
        needs = {"global_batch": 128}
    if key.startswith("ep"):
        needs = {"model": "mixtral-270M"}
    if key.startswith("lora"):
        needs = {"lora": 16}
    return ask(**(needs | more))
