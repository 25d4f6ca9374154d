"""Values that cannot work, alone or together, are refused before anything is written."""

from __future__ import annotations

import pytest

from hpctrain.core.settings.check import check, node_range, time_s
from hpctrain.core.settings.fields import keys_of
from hpctrain.core.settings.layers import Layer, flag_layer, from_flag, from_table, resolve
from hpctrain.core.settings.schema import sections
from hpctrain.errors import UsageError


def checked(*sets):
    settings, origins = resolve([flag_layer({}, sets)])
    chosen = check(settings, origins)
    return *chosen.upon(settings, origins), chosen.notes


@pytest.mark.parametrize(
    ("text", "expected"), [("1", (1, 1)), ("4", (4, 4)), ("2-4", (2, 4)), ("3-3", (3, 3))]
)
def test_nodes_are_a_number_or_a_range(text, expected):
    assert node_range(text) == expected


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("0", "0 nodes cannot train; it takes at least 1"),
        ("0-2", "0-2 nodes cannot train"),
        ("4-2", r"4-2 has its maximum below its minimum; did you mean 2-4\?"),
        ("3-2", "3-2 has its maximum below its minimum"),
        ("", "it takes N or MIN-MAX"),
        ("-1", "it takes N or MIN-MAX"),
        ("2-", "it takes N or MIN-MAX"),
        ("two", '"two" is not a number of nodes'),
        ("2-4-6", "it takes N or MIN-MAX"),
        ("2\n#SBATCH --x", "it takes N or MIN-MAX"),
    ],
)
def test_impossible_nodes_are_refused(text, match):
    with pytest.raises(UsageError, match=match):
        node_range(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("1:30:15", 5415),
        ("2-0", 2 * 86400),
        ("1-12", 36 * 3600),
        ("1-12:30", 36 * 3600 + 1800),
        ("1-12:30:05", 36 * 3600 + 1805),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(text, expected):
    assert time_s(text) == expected


@pytest.mark.parametrize(
    "text", ["", "0", "0:00:00", "1y", "0h", "h", "5 h", "-5", "1:2:3:4", "1-", "UNLIMITED", "1.5"]
)
def test_a_time_limit_that_is_none_is_refused(text):
    with pytest.raises(UsageError, match="time limit"):
        time_s(text)


def test_every_number_has_a_least_value():
    numbers = [
        key
        for cls in sections().values()
        for key in keys_of(cls).values()
        if key.form in {"integer", "number"}
    ]

    assert len(numbers) > 40
    assert [key.name for key in numbers if key.least is None] == []


def test_a_range_holds_for_what_the_layers_give_together():
    below = Layer("site x", {"checkpoint": {"keep_last": 1}}, lambda *_: "x.toml:2")
    above = flag_layer({}, ["checkpoint.keep_last=2"])

    assert check(*resolve([below, above])).notes == []
    with pytest.raises(
        UsageError, match=r"^x.toml:2: checkpoint.keep_last is 1; it takes at least"
    ):
        check(*resolve([below]))


def test_the_defaults_pass_without_a_word():
    assert checked()[2] == []


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        (
            "train.global_batch=0",
            "flag --set train.global_batch: train.global_batch is 0; it takes at least 1",
        ),
        ("checkpoint.keep_last=1", "checkpoint.keep_last is 1; it takes at least 2"),
        ("train.heads=3", r"train.heads is 3, which does not divide train.dim 128 \(default\)"),
        ("train.dropout=1", "train.dropout is 1.0; it takes 0 to below 1"),
        ("checkpoint.interval_s=-1", "checkpoint.interval_s is -1.0; it takes at least 0"),
        (
            "checkpoint.max_loss_s=0",
            "flag --set checkpoint.max_loss_s: checkpoint.max_loss_s is 0.0; it takes more than 0",
        ),
        ("checkpoint.max_loss_s=-5", "checkpoint.max_loss_s is -5.0; it takes at least 0"),
        ("checkpoint.timeout_s=0", "checkpoint.timeout_s is 0.0; it takes more than 0 seconds"),
        ("checkpoint.write_threads=0", "checkpoint.write_threads is 0; it takes at least 1"),
        ("checkpoint.write_threads=65", "checkpoint.write_threads is 65; it takes at most 64"),
        ("checkpoint.keep_best=-1", "checkpoint.keep_best is -1; it takes at least 0"),
        ("slurm.gpus_per_node=-1", "it takes at least 0"),
        ("slurm.partition=a b", "it takes one word without blanks"),
        ('slurm.account="a\\nb"', "it takes one word without blanks"),
        ("slurm.extra=switches", "each takes one option"),
        ("slurm.extra=--ntasks-per-node=2", "which hpctrain sets; use slurm.ranks_per_node"),
        ("slurm.extra=-N 4", "which hpctrain sets; use slurm.nodes"),
        ("slurm.srun_args=--export-file=e", "ranks would lack what they start with"),
        ("slurm.srun_args=--pty", "nobody is there to type"),
        ("slurm.nodes=0", "flag --set slurm.nodes: slurm.nodes: 0 nodes cannot train"),
        ("slurm.time=soon", '"soon" is not a time limit'),
    ],
)
def test_values_out_of_range_are_refused_with_their_origin(setting, match):
    with pytest.raises(UsageError, match=match) as caught:
        checked(setting)

    assert "\n" not in str(caught.value)


def test_the_best_by_an_evaluation_needs_one():
    best = ["checkpoint.keep_best=1", "checkpoint.best_metric=eval.loss"]

    with pytest.raises(
        UsageError, match=r"best_metric is eval\.loss, which an evaluation finds, and"
    ):
        checked(*best)
    checked(*best, "evaluate.script=python evaluate.py")


@pytest.mark.parametrize(
    "sets",
    [
        ["checkpoint.interval_s=0", "checkpoint.interval_steps=0"],
        ["checkpoint.interval_s=0", "checkpoint.interval_steps=10"],
        ["checkpoint.interval_s=60", "checkpoint.interval_steps=10"],
        ["checkpoint.max_loss_s=0.5", "checkpoint.timeout_s=0.5", "checkpoint.keep_best=0"],
        ["checkpoint.write_threads=1"],
        ["checkpoint.write_threads=64"],
    ],
)
def test_any_way_to_say_when_to_save_is_fine_and_so_are_the_bounds_themselves(sets):
    assert checked(*sets)[2] == []


def test_a_default_lead_is_lowered_to_fit_a_short_limit_and_this_is_said():
    settings, origins, notes = checked("slurm.time=2")

    assert settings.slurm.signal_lead_s == 40
    assert origins["slurm.signal_lead_s"] == "default, lowered to fit slurm.time"
    assert len(notes) == 1
    assert "warn 40 s before the time limit of 120 s" in notes[0]


def test_a_chosen_lead_past_half_of_the_limit_is_refused():
    assert checked("slurm.time=2", "slurm.signal_lead_s=60")[0].slurm.signal_lead_s == 60

    with pytest.raises(
        UsageError, match=r"is 61, more than half of the time limit of 120 s .*--time"
    ):
        checked("slurm.time=2", "slurm.signal_lead_s=61")


def test_a_lead_that_sbatch_cannot_hold_is_refused():
    with pytest.raises(UsageError, match="sbatch takes at most 65535"):
        checked("slurm.time=10-0", "slurm.signal_lead_s=70000")


def test_environment_values_may_be_numbers_and_hold_equal_signs():
    assert from_table({"A": 1, "B": "x", "C": 0.5}, str) == {"A": "1", "B": "x", "C": "0.5"}
    assert from_flag("A=b=c") == ("A", "b=c")
    assert from_flag("A=") == ("A", "")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("TOKEN", "not of the form NAME=VALUE"),
        ("1A=x", "cannot name an environment variable"),
        ("A B=x", "cannot name an environment variable"),
        ("=x", "cannot name an environment variable"),
        ("RANK=3", "RANK is set by hpctrain for each rank; leave it out"),
        ("A=\0", "NUL"),
    ],
)
def test_a_variable_that_could_not_work_is_refused(text, match):
    with pytest.raises(UsageError, match=match):
        from_flag(text)


def test_true_is_no_environment_value_since_programs_differ_in_what_they_read():
    with pytest.raises(
        UsageError, match=r"hpctrain.toml:A: env.A is true; it takes text or a number"
    ):
        from_table({"A": True}, lambda name: f"hpctrain.toml:{name}")
