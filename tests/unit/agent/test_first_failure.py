"""Of all ranks that failed, which one is shown: the cause, not who noticed."""

from __future__ import annotations

import itertools

import pytest

from hpctrain.core.base.records import FailureReport
from hpctrain.node.agent.ranks import ECHOES, SETTLE_S, first_causal, is_echo, settle_s


def failed(rank, summary="ValueError: x", *, t=100.0, kind="exception"):
    return FailureReport(rank, "n1", kind, summary, time=t)


CAUSE = failed(5, t=100.0)
LATER = failed(0, "KeyError: 'y'", t=103.0)
ECHO = failed(1, "RuntimeError: Connection closed by peer [10.0.0.1]:4711", t=99.0)
KILLED = failed(3, "killed by SIGKILL", t=104.0, kind="signal")


@pytest.mark.parametrize(
    ("reports", "first"),
    [
        ([LATER, CAUSE], CAUSE),
        ([ECHO, CAUSE, LATER], CAUSE),
        ([ECHO, KILLED], KILLED),
        ([CAUSE, KILLED], CAUSE),
        ([ECHO], ECHO),
        ([failed(4), failed(2), CAUSE], failed(2)),
    ],
    ids=["earliest", "no echo", "killed before echoes", "by time", "echo alone", "ties by rank"],
)
def test_the_earliest_that_is_no_echo_is_the_cause(reports, first):
    for order in itertools.permutations(reports):
        found = first_causal(order)

        assert (found.rank, found.summary) == (first.rank, first.summary)
        assert found.others == sorted(one.rank for one in reports if one.rank != first.rank)


ABORTED = failed(2, "killed by SIGABRT", kind="signal")
DESYNC = failed(2, "rank 2 is out of step", kind="desync")


@pytest.mark.parametrize("reports", [[ECHO], [CAUSE, ECHO], [ABORTED], [DESYNC], []])
def test_others_have_time_to_report_what_may_be_the_cause(reports):
    assert settle_s(reports) == SETTLE_S


@pytest.mark.parametrize("reports", [[KILLED], [ECHO, KILLED], [ABORTED, CAUSE, KILLED]])
def test_where_a_rank_was_killed_nobody_waits_for_another_cause(reports):
    assert settle_s(reports) < SETTLE_S / 2


def test_without_a_failure_there_is_no_cause():
    assert first_causal([]) is None


@pytest.mark.parametrize("sign", ECHOES)
def test_a_peers_end_is_an_echo_only_where_a_program_says_so(sign):
    assert is_echo(failed(0, f"RuntimeError: {sign} at 3"))
    assert not is_echo(failed(0, f"exit code 1 ({sign})", kind="exit"))
    assert not is_echo(failed(0, "ValueError: no such key"))
