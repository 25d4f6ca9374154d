"""The seeds' rules: which strategy follows from what does not fit (W23: by bytes, not by names)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.advise.strategy import choice
from hpctrain.advise.strategy.choice import gigabytes
from hpctrain.errors import ChecksFailed, UsageError
from tests.support.plan_cases import ask


def taken(asked):
    row = choice.choose(choice.rows_of(asked))
    return row.way.key if row else None


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(49_900_000, "49.9 MB"), (50_000_000, "0.1 GB"), (1_234_000, "1.23 MB"), (7e9, "7.0 GB")],
)
def test_what_a_plan_lacks_is_never_shown_as_nothing(nbytes, shown):
    assert gigabytes(int(nbytes)) == shown


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
    ours = [row for row in choice.rows_of(asked) if row.peak and not row.way.elsewhere]
    needed = {row.way.key: row.peak.needed for row in ours}
    apart = ("tp", "pp", "lora")
    sharded = min(
        needed[key] for key in needed if not key.startswith(apart) and "offload" not in key
    )
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
    order += ["ddp+recompute", "fsdp2+recompute+offload", "zero3+recompute+offload"]
    order += ["tp2", "tp2+recompute", "pp2", "pp2+recompute", "lora-ddp"]
    assert [key for key in keys if key in order] == order
    assert taken(ask(gb=15)) == "fsdp2+recompute"


def test_the_host_is_used_where_nothing_that_stays_on_the_gpus_fits():
    rows = {row.way.key: row for row in choice.rows_of(ask(gb=12, micro=1))}
    away, cut = rows["fsdp2+recompute+offload"], rows["tp8+recompute"]
    assert away.fits
    assert cut.fits

    assert choice.choose([away, cut]) is cut
    assert choice.choose([away]) is away
    assert taken(ask(gb=8, micro=1)) == "fsdp2+recompute+offload"


def test_a_row_within_the_plans_own_error_may_fit_and_is_taken_where_nothing_surely_does():
    """By tensors, without what is allowed beside them, 6 % less."""
    asked = replace(ask(micro=1), gpu=replace(ask().gpu, memory=1))
    needs = {row.way.key: row.peak for row in choice.rows_of(asked) if row.peak}
    peak = needs["fsdp2+recompute"]
    for memory, may_fit in (
        (peak.needed - 1, True),
        (round(peak.nbytes * 0.95), True),
        (round(peak.nbytes * 0.93), False),
    ):
        gpu = replace(asked.gpu, memory=memory)
        rows = {row.way.key: row for row in choice.rows_of(replace(asked, gpu=gpu))}
        row = rows["fsdp2+recompute"]
        assert (row.fits, row.may_fit) == (False, may_fit)
        assert row.why.startswith("may fit: ") is may_fit
        sure = rows["fsdp2+recompute+offload"]
        assert choice.choose([row]) is (row if may_fit else None)
        assert choice.choose([row, sure]) is (sure if sure.fits else row if may_fit else None)


def test_a_row_of_another_engine_is_known_to_a_fifth_and_never_taken():
    asked = ask(micro=1)
    rows = {row.way.key: row for row in choice.rows_of(asked)}
    peak = rows["fsdp2+bf16"].peak
    for share, may_fit in ((0.81, True), (0.79, False)):
        gpu = replace(asked.gpu, memory=round(peak.nbytes * share))
        row = choice.row_of(replace(asked, gpu=gpu), rows["fsdp2+bf16"].way)
        assert (row.is_held, row.may_fit) == (False, may_fit)
        assert choice.choose([row]) is None


@pytest.mark.parametrize(
    ("memory", "fits", "said"),
    [
        (None, True, "54.0 GB of a node's memory, whose size is not known (--node-mem)"),
        (100, True, "54.0 GB of a node's memory of 100.0 GB"),
        (50, False, "54.0 GB of a node's memory, which has 50.0 GB"),
    ],
)
def test_a_node_has_to_hold_what_is_offloaded(memory, fits, said):
    asked = ask(gb=40)
    machines = replace(asked.cluster, memory=memory and memory * 10**9)
    rows = {row.way.key: row for row in choice.rows_of(replace(asked, cluster=machines))}

    row = rows["fsdp2+recompute+offload"]
    assert row.fits is fits
    assert row.why.endswith(said.replace("54.0", f"{row.host / 1e9:.1f}"))
    assert row.host == pytest.approx(8 * 16 * asked.model.params / 16)
    assert rows["zero3+recompute+offload"].host == pytest.approx(8 * 18 * asked.model.params / 16)
    assert rows["fsdp2+recompute"].host == 0


def test_a_pipeline_wants_four_microbatches_for_each_stage():
    few = {row.way.key: row for row in choice.rows_of(ask(global_batch=16))}
    many = {row.way.key: row for row in choice.rows_of(ask(global_batch=128))}

    assert few["pp2"].batch is None
    assert few["pp2"].why == "2 stages want 8 passes a step, and there are 2: --global-batch 64"
    assert many["pp2"].batch.passes == 8
    assert many["pp2"].batch.micro == 2
    alone = {row.way.key: row for row in choice.rows_of(ask(global_batch=64, micro=1))}
    assert alone["pp2"].batch.passes == 8
    given = {row.way.key: row for row in choice.rows_of(ask(global_batch=64, micro=2))}
    assert given["pp2"].why.endswith("there are 4: --global-batch 128")


def test_adapters_are_never_taken_by_those_who_train_all_weights():
    rows = choice.rows_of(ask(gb=9))

    shown = [row for row in rows if row.way.layout.lora]
    assert {row.way.layout.lora for row in shown} == {choice.SHOWN_RANK}
    assert not any(row.fits for row in shown)
    assert shown[1].why == "trains adapters alone: ask for it with --lora 16"
    assert choice.choose(rows) is None or not choice.choose(rows).way.layout.lora


def test_who_asks_for_adapters_gets_them_alone():
    rows = choice.rows_of(ask(gb=80, lora=32))

    assert {row.way.layout.lora for row in rows} == {32}
    assert choice.choose(rows).way.key == "lora-ddp"
    with pytest.raises(UsageError, match="frozen weights, adapters and loss in bf16"):
        choice.choose(rows, "lora-ddp+bf16")


def test_experts_on_several_ranks_are_shown_and_taken_when_asked_for():
    rows = choice.rows_of(ask("mixtral-270M", gb=80))
    keys = {row.way.key: row for row in rows}

    assert not keys["ep8"].fits
    assert keys["ep8"].peak is not None
    assert keys["ep8"].why.startswith("engine.ep takes no model of Hugging Face")
    assert choice.choose(rows, "ep8").way.layout.ep == 8
    assert "ep2" not in {row.way.key for row in choice.rows_of(ask())}


def test_a_checkpoint_of_adapters_holds_them_alone():
    asked = ask(lora=16)
    rows = {row.way.key: row for row in choice.rows_of(asked)}

    saved = choice.saved_params(asked, rows["lora-ddp"])
    assert saved == 32 * 16 * (4 * 2 * 4096 + 3 * (4096 + 11_008))


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

    said = "no strategy of hpctrain's engines fits 2 GB on 16 GPUs; the nearest is"
    with pytest.raises(ChecksFailed, match=said):
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
