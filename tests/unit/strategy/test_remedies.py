"""What would make a set-up fit is named: a plan never stops at "nothing fits"."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from hpctrain.advise.strategy import choice
from hpctrain.advise.strategy.choice import elsewhere_notes, remedies
from hpctrain.errors import ChecksFailed
from tests.support.plan_cases import ask

ONE = {"nodes": 1, "gpus": 1, "seq": 2048, "global_batch": 1}


def rows_of(asked):
    return {row.way.key: row for row in choice.rows_of(asked)}


def test_a_row_that_is_too_large_names_its_nearest_relative_that_fits():
    rows = rows_of(ask(gb=40, micro=4, global_batch=64))

    assert not rows["fsdp2"].fits
    assert rows["fsdp2"].why.endswith("; fits with selective")
    smaller = rows_of(ask(gb=30, micro=4, global_batch=64))
    assert smaller["fsdp2"].why.endswith("; fits with recompute")


def test_where_nothing_of_hpctrains_fits_other_engines_and_more_gpus_are_named():
    asked = ask(gb=80, **ONE)
    rows = choice.rows_of(asked)
    found = remedies(asked, rows)

    assert choice.choose(rows) is None
    assert found[0].startswith("2 GPUs (--nodes 2 --global-batch 2): ")
    assert any(text.startswith("one GPU, recompute, bf16: ") for text in found)
    assert any(
        "another engine's: weights, gradients, moments and loss in bf16" in text for text in found
    )
    assert any(text.startswith("LoRA 16, one GPU") for text in found)
    assert found[-1].startswith("a GPU with ")
    assert "(gh200-144gb, h200, b200, mi300x)" in found[-1], "those with enough, smallest first"
    with pytest.raises(ChecksFailed, match=r"engines fits 80 GB on 1 GPU;.*What fits: 2 GPUs"):
        choice.require_chosen(choice.StrategyPlan(asked, rows, None))


def test_the_number_of_gpus_that_is_named_does_fit_and_half_of_it_does_not():
    asked = ask(gb=80, **ONE)
    (first, *_) = remedies(asked, choice.rows_of(asked))
    nodes = int(first.split()[0])

    for count, fits in ((nodes, True), (nodes // 2, False)):
        cluster = replace(asked.cluster, nodes=count)
        row = choice.choose(choice.rows_of(replace(asked, cluster=cluster, global_batch=count)))
        assert (row is not None and not row.way.layout.offload) is fits


def test_a_smaller_micro_batch_is_named_where_it_would_do():
    asked = ask(gb=24, micro=16, global_batch=256)
    found = remedies(asked, choice.rows_of(asked))

    assert found[0].startswith("--micro-batch 1: FSDP2 x16")


def test_gradients_that_do_not_fit_in_whole_are_reduced_in_each_pass():
    few, many = (rows_of(ask(gb=gb, micro=1, global_batch=64))["fsdp2"] for gb in (30, 80))

    assert few.fits
    assert few.way.layout.each_pass
    assert few.way.title == "FSDP2 x16, reduced each pass"
    assert not many.way.layout.each_pass, "reducing once a step sends less"
    notes = choice.advice(ask(gb=30, micro=1, global_batch=64), few)
    assert any("set engine.reduce_each_pass to true" in note for note in notes)


def test_other_engines_rows_are_never_taken_and_say_whose_they_are():
    rows = rows_of(ask(gb=40, **ONE))
    theirs = [row for row in rows.values() if row.way.elsewhere]

    assert {"single+fused", "single+half", "single+bf16", "single+bf16-weights"} <= set(rows)
    assert not any(row.fits or not row.way.elsewhere for row in theirs)
    assert all("another engine's: " in row.why for row in theirs)


def test_a_chosen_row_that_recomputes_names_the_engine_that_need_not():
    asked = ask("gpt2-124M", gb=14, micro=8, global_batch=128, seq=1024)
    rows = choice.rows_of(asked)
    recomputing = {row.way.key: row for row in rows}["fsdp2+recompute"]

    (note,) = elsewhere_notes(asked, rows, recomputing)
    assert note.startswith("another engine fits without recomputing all: DDP x16, fused, ")


def test_a_chosen_row_that_offloads_names_the_number_of_gpus_that_need_not():
    asked = ask(gb=8, micro=1)
    rows = choice.rows_of(asked)
    row = choice.choose(rows)

    assert row is not None
    assert row.way.layout.offload
    assert elsewhere_notes(asked, rows, row)[0].startswith("without the host's memory: 32 GPUs")


def test_a_large_plan_takes_no_more_than_a_second_and_a_half():
    asked = ask("llama-405B", gb=80, nodes=2, seq=4096, global_batch=4096)
    begun = time.process_time()
    rows = choice.rows_of(asked)
    remedies(asked, rows)

    assert time.process_time() - begun < 1.5
