from __future__ import annotations

import pytest

from hpctrain.advise.strategy.choice import cost, saving
from hpctrain.advise.strategy.facts import of_config
from hpctrain.advise.strategy.strategies import Machines
from tests.support.plan_cases import MODELS

LLAMA = of_config(MODELS["llama-7B"], "llama")
RULES = {"save_gbs": None, "max_loss_s": 1800.0, "keep_last": 3, "limit_s": None}


def test_a_checkpoint_holds_masters_and_moments_and_one_more_is_being_written():
    saved = saving(LLAMA.params, Machines(4, 4), **RULES)

    assert saved.nbytes == 12 * LLAMA.params
    assert saved.disk == 4 * saved.nbytes
    assert saved.save_s is None
    assert saved.why.startswith("a first guess")


def test_the_interval_is_the_projects_own():
    saved = saving(LLAMA.params, Machines(4, 4), **(RULES | {"save_gbs": 5.0, "max_loss_s": 1e6}))

    assert saved.save_s == pytest.approx(12 * LLAMA.params / 5e9)
    assert saved.why.startswith("Daly")
    short = saving(LLAMA.params, Machines(4, 4), **(RULES | {"save_gbs": 5.0, "limit_s": 1200.0}))
    assert short.interval_s == 300


def test_the_budget_is_in_hours_and_in_jobs_of_the_queue():
    spent = cost(3600, 10.0, 16, 4 * 3600.0)

    assert (spent.hours, spent.gpu_hours, spent.jobs) == (10, 160, 3)
    assert cost(3600, 10.0, 16, None).jobs is None
    assert cost(3600, None, 16, 60.0).gpu_hours is None
    assert cost(None, 10.0, 16, 60.0).hours is None
