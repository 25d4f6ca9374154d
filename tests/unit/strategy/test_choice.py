"""The seeds' rules: which strategy follows from what does not fit (W23: by bytes, not by names)."""

from __future__ import annotations

import pytest

from hpctrain.errors import ChecksFailed, UsageError
from hpctrain.strategy import choice
from tests.support.plan_cases import ask


def taken(asked):
    row = choice.choose(choice.rows_of(asked))
    return row.way.key if row else None


def test_what_fits_with_its_optimizer_is_copied():
    assert taken(ask("gpt2-124M", gb=40)) == "ddp"
    assert taken(ask("llama-7B", gb=200)) == "ddp"


def test_where_the_optimizer_does_not_fit_its_state_is_sharded_and_weights_stay():
    rows = {row.way.key: row for row in choice.rows_of(ask(gb=80))}

    assert not rows["ddp"].fits
    assert "most is moments" in rows["ddp"].why
    assert taken(ask(gb=80)) == "fsdp2-no-reshard"


def test_where_the_parameters_do_not_fit_they_are_sharded_too():
    assert taken(ask(gb=30)) == "fsdp2"


def test_beyond_that_matrices_are_cut_over_the_gpus_of_a_node():
    large = {"model": "llama-405B", "nodes": 64, "seq": 512}
    asked = ask(**large)
    needed = {row.way.key: row.peak.needed for row in choice.rows_of(asked)}
    sharded = min(needed[key] for key in needed if not key.startswith("tp"))
    cut = min(needed[key] for key in needed if key.startswith("tp"))
    assert cut < sharded

    key = taken(ask(**large, gb=(cut + sharded) / 2e9))
    assert key is not None
    assert key.startswith("tp")


def test_where_a_batch_is_too_small_for_so_many_copies_matrices_are_cut():
    key = taken(ask(nodes=16, seq=4096, global_batch=16))

    assert key == "tp8"


def test_recomputation_comes_before_matrices_are_cut_and_after_sharding():
    keys = [row.way.key for row in choice.rows_of(ask())]

    order = ["single", "ddp", "fsdp2-no-reshard", "zero1", "zero2", "fsdp2", "zero3", "hsdp"]
    order += ["ddp+recompute", "tp2"]
    assert [key for key in keys if key in order] == order
    assert taken(ask(gb=15)) == "fsdp2+recompute"


def test_one_gpu_of_many_is_never_taken_and_alone_it_is():
    assert not {row.way.key: row for row in choice.rows_of(ask("gpt2-124M"))}["single"].fits
    assert taken(ask("gpt2-124M", nodes=1, gpus=1)) == "single"


def test_the_largest_micro_batch_that_fits_is_taken():
    (row,) = [r for r in choice.rows_of(ask("gpt2-124M", gb=40, global_batch=1024))
              if r.way.key == "ddp"]  # fmt: skip

    assert row.batch.micro * row.batch.passes == 64
    asked = ask("gpt2-124M", gb=40, global_batch=1024, micro=row.batch.micro * 2)
    (larger,) = [r for r in choice.rows_of(asked) if r.way.key == "ddp"]
    assert row.fits
    assert not larger.fits


def test_a_micro_batch_that_was_asked_for_is_kept():
    rows = choice.rows_of(ask("gpt2-124M", global_batch=64, micro=2))

    assert {row.batch.micro for row in rows if row.batch} == {2}


def test_impossible_batches_are_refused():
    with pytest.raises(UsageError, match="--global-batch 17 cannot be shared by 16"):
        choice.rows_of(ask(global_batch=17))


def test_models_that_cannot_be_cut_say_why():
    rows = {row.way.key: row for row in choice.rows_of(ask("mixtral-270M"))}

    assert rows["tp2"].why == "hpctrain cuts decoders like Llama along tp"
    assert not rows["tp2"].fits


def test_where_nothing_fits_the_nearest_is_named():
    asked = ask(gb=2)
    plan = choice.StrategyPlan(asked, choice.rows_of(asked), None)

    with pytest.raises(ChecksFailed, match="nothing fits 2 GB on 16 GPUs; the nearest is"):
        choice.require_chosen(plan)


def test_another_strategy_can_be_asked_for_by_its_name():
    rows = choice.rows_of(ask(gb=80))

    assert choice.choose(rows, "hsdp").way.key == "hsdp"
    with pytest.raises(
        UsageError, match="--strategy magic: there is none here; choose from single"
    ):
        choice.choose(rows, "magic")


def test_advice_tells_of_gradients_that_wait():
    asked = ask(gb=80, global_batch=64, micro=1)
    row = choice.choose(choice.rows_of(asked), "fsdp2")

    assert any("gradients wait in whole" in note for note in choice.advice(asked, row))
