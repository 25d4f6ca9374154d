"""Comments hide what they name, and nothing else."""

from __future__ import annotations

from hpctrain.advise.lint.check import RuleChoice, check_text, ignore_comments

PROGRAM = """\
import torch.distributed as dist
rank = dist.get_rank()
if rank == 0:
    dist.barrier(){same}
if rank == 1:
    {above}
    dist.all_reduce(
        t,
        op=dist.ReduceOp.SUM,
    )
"""


def told(same="", above="pass"):
    text = PROGRAM.format(same=same, above=above)
    return [(one.rule.code, one.line) for one in check_text(text, "program.py")]


def test_without_comments_both_are_told():
    assert told() == [("HT101", 4), ("HT101", 7)]


def test_a_comment_hides_its_line_or_the_next_one():
    assert told(same="  # hpctrain: ignore HT101") == [("HT101", 7)]
    assert told(above="# hpctrain: ignore HT101") == [("HT101", 4)]


def test_a_comment_hides_only_what_it_names():
    assert told(same="  # hpctrain: ignore HT102") == [
        ("HT101", 4),
        ("HT002", 4),
        ("HT101", 7),
    ]


def test_a_comment_that_names_nothing_hides_nothing():
    assert ("HT002", 4) in told(same="  # hpctrain: ignore")
    assert ("HT101", 4) in told(same="  # hpctrain: ignore")


def test_a_comment_for_another_rule_is_not_idle_where_that_rule_did_not_look():
    text = PROGRAM.format(same="  # hpctrain: ignore HT101", above="pass")

    found = check_text(text, "program.py", RuleChoice(select=("HT2", "HT0")))

    assert found == []


def test_words_in_a_string_are_no_comment():
    assert ignore_comments('x = "# hpctrain: ignore HT101"\n') == []


def test_what_is_idle_is_named():
    (finding,) = check_text("x = 1  # hpctrain: ignore HT101, HT203\n", "program.py")

    assert finding.message == "HT101, HT203 is not found there"
    (finding,) = check_text("x = 1  # hpctrain: ignore\n", "program.py")
    assert finding.message == "name the codes to ignore"
