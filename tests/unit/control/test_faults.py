"""Whatever dies, stands still or garbles in the tree: one stop tick, or one clear failure.

    HPCTRAIN_SEED=7 HPCTRAIN_TREE_FAULTS=200 pytest -m soak tests/unit/control/test_faults.py

Without them the seed is the clock's, and a soak tries 1,000 points. Each line of a soak tells what
came of one fault.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter

import pytest

from tests.support.control_faults import FRAME_FAULTS, LASTING, PROCESS_FAULTS, drawn, run_round

MANY = int(os.environ.get("HPCTRAIN_TREE_FAULTS", "1000"))
FAULTS = ("none", *PROCESS_FAULTS, *FRAME_FAULTS, *LASTING)
SHORT = 2
OVER = "over before the fault"


def found(fault, seeds, tmp_path, **drawing):
    """What came of rounds with a fault; none may be wrong."""
    words = Counter()
    for seed in seeds:
        plan = drawn(seed, fault, **drawing)
        folder = tmp_path / str(seed)
        folder.mkdir()
        outcome = run_round(plan, folder)
        assert outcome.found_wrong(plan) == [], plan
        words[outcome.word if outcome.happened or fault == "none" else OVER] += 1
    return words


@pytest.mark.parametrize("fault", FAULTS)
def test_one_stop_tick_or_one_clear_failure(fault, tmp_path):
    words = found(fault, range(SHORT), tmp_path, most=(3, 2))

    assert words.total() == SHORT


@pytest.mark.soak
def test_a_thousand_faults(tmp_path, capsys):
    """Rounds that are over before their fault comes are told, and do not count."""
    seed = int(os.environ.get("HPCTRAIN_SEED", str(int(time.time()))))
    of: dict[str, Counter[str]] = {fault: Counter() for fault in FAULTS}
    came = 0
    for fault in itertools.cycle(FAULTS):
        words = found(fault, [seed], tmp_path)
        of[fault] += words
        came += OVER not in words and fault != "none"
        with capsys.disabled():
            print(f"{came} seed {seed} {fault}: {dict(of[fault])}", flush=True)
        if came == MANY:
            return
        seed += 1


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["stop node", "stop rank", "stop all"])
def test_what_stands_still_for_30_s_is_waited_for(fault, tmp_path):
    assert found(fault, range(3), tmp_path, stopped_s=30.0).total() == 3
