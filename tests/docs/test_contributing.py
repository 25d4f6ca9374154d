"""What contributing.md says goes together does: who adds one of them is told of the rest."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from hpctrain.core.base.records import EndReason
from hpctrain.core.settings.check import NEWS
from hpctrain.core.settings.fields import keys_of
from hpctrain.core.settings.schema import EngineSettings
from hpctrain.ledger.history import run_state as causes
from hpctrain.ledger.plan import decide, interval
from hpctrain.node.agent.notify import Notification
from tests.docs.test_pages import table

TOP = Path(__file__).parents[2]
DOCS = TOP / "docs"
FOR_GOOD = {EndReason.COMPLETED, EndReason.STOPPED, EndReason.CANCELLED, EndReason.FENCED}
"""After these nothing follows, so no budget counts them."""
NOT_DECIDED = {EndReason.FENCED, EndReason.UNKNOWN}
"""Nobody decides them at the end of an attempt: others took the run away, or nobody was there."""


def test_each_reason_after_which_a_run_may_start_again_has_a_budget():
    assert set(decide._LIMITS) == set(EndReason) - FOR_GOOD


def test_each_reason_has_a_cause_for_people():
    assert set(causes._CAUSE_BY_REASON) | causes._OF_PROGRAM == set(EndReason)


def test_each_reason_is_a_failure_without_warning_or_one_with_for_the_interval_between_saves():
    counted = (interval._SUDDEN - {None}) | interval._WARNED

    assert counted == set(EndReason) - FOR_GOOD - {EndReason.USER_ERROR}


def test_each_reason_stands_in_the_table_of_ends():
    recorded = {row[6] for row in table(DOCS / "staying-alive.md", "ranks")}

    assert recorded == {reason.value for reason in set(EndReason) - NOT_DECIDED}


def test_each_engine_has_its_row_and_is_run_by_tests():
    kinds = keys_of(EngineSettings)["kind"].choices
    rows = [row[0].strip("`") for row in table(DOCS / "plan.md", "`engine.kind`")]
    tests = [*(TOP / "tests/engines").glob("*.py"), *(TOP / "tests/support").glob("*.py")]
    run = set(re.findall(r'"((?:ddp|[a-z]+\d))"', "".join(path.read_text() for path in tests)))

    assert rows == list(kinds)
    assert set(kinds) <= run


def test_each_piece_of_news_has_its_row_and_so_has_what_it_holds():
    page = DOCS / "watching.md"
    named = [name for row in table(page, "field") for name in re.findall(r"`(\w+)`", row[0])]

    assert [row[0].strip("`") for row in table(page, "news")] == list(NEWS)
    assert named == [field.name for field in fields(Notification)]
