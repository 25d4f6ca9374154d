from __future__ import annotations

import pytest

from hpctrain.advise.strategy.facts import of_config
from hpctrain.advise.strategy.strategies import Machines, adapted, candidates, pp_misfit, tp_misfit
from tests.support.plan_cases import MODELS

LLAMA = of_config(MODELS["llama-7B"], "llama")


def keys(nodes, gpus):
    return [way.key for way in candidates(LLAMA, Machines(nodes, gpus))]


def test_one_gpu_has_three_ways():
    assert keys(1, 1) == ["single", "single+selective", "single+recompute"]


def test_selective_recomputation_comes_between_none_and_all():
    each = keys(1, 8)

    for key in ("ddp", "fsdp2"):
        assert each.index(key) < each.index(f"{key}+selective") < each.index(f"{key}+recompute")


def test_copies_of_shards_need_several_nodes_with_several_gpus():
    assert "hsdp" in keys(2, 4)
    assert "hsdp" not in keys(1, 8)
    assert "hsdp" not in keys(8, 1)


def test_matrices_are_cut_inside_a_node_alone():
    assert [key for key in keys(4, 4) if key.startswith("tp")] == [
        "tp2", "tp4", "tp2+recompute", "tp4+recompute",
    ]  # fmt: skip


def test_every_way_uses_the_gpus_that_it_says():
    for way in candidates(LLAMA, Machines(4, 8)):
        layout = way.layout
        assert (
            layout.kind in {"single", "ddp"}
            or layout.shards * layout.copies * layout.tp * layout.pp == 32
        ), way.key
        assert way.ranks == (1 if layout.kind == "single" else 32)


@pytest.mark.parametrize(
    ("model", "tp", "why"),
    [
        ("llama-7B", 4, ""),
        ("llama-156M", 8, "tp 8 does not divide key and value heads 4"),
        ("llama-7B", 64, "tp 64 does not divide heads 32"),
        ("gpt2-124M", 2, "hpctrain cuts decoders like Llama along tp"),
    ],
)
def test_what_cannot_be_cut_says_why(model, tp, why):
    assert tp_misfit(of_config(MODELS[model], model), tp) == why


def test_stages_lie_across_nodes_and_in_one_node_across_its_gpus():
    assert [key for key in keys(4, 8) if key.startswith("pp")] == [
        "pp2", "pp4", "pp2+recompute", "pp4+recompute",
    ]  # fmt: skip
    assert [key for key in keys(1, 2) if key.startswith("pp")] == ["pp2", "pp2+recompute"]


@pytest.mark.parametrize(
    ("model", "pp", "why"),
    [
        ("llama-7B", 4, ""),
        ("llama-20M", 8, "8 stages need 8 blocks, and there are 4"),
        ("bert-52M", 2, "hpctrain cuts decoders like Llama into stages"),
    ],
)
def test_what_has_no_stages_says_why(model, pp, why):
    assert pp_misfit(of_config(MODELS[model], model), pp) == why


def test_one_gpu_and_more_train_adapters_and_other_families_say_why_not():
    assert [way.key for way in adapted(LLAMA, Machines(1, 1), 8, asked=True)] == [
        "lora-single", "lora-single+recompute",
    ]  # fmt: skip
    ways = adapted(of_config(MODELS["bert-52M"], "bert"), Machines(1, 8), 8, asked=True)
    assert all("decoders like Llama alone" in way.impossible for way in ways)
