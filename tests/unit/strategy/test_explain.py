from __future__ import annotations

from hpctrain.strategy import choice
from hpctrain.strategy.explain import SOURCES, explained, formulas
from hpctrain.strategy.memory import PARTS
from tests.support.plan_cases import ask


def test_every_part_has_a_formula_and_a_source():
    asked = ask()
    row = choice.choose(choice.rows_of(asked))

    assert set(formulas(asked, row)) == set(SOURCES) == set(PARTS)


def test_what_is_shown_adds_up():
    asked = ask(global_batch=64, micro=2)
    for row in choice.rows_of(asked):
        if row.peak is None:
            continue
        text = "\n".join(explained(asked, row))
        shown = [line for line in text.splitlines() if line.startswith("  ") and " GB  " in line]
        sizes = [float(line[16:26]) for line in shown]
        assert abs(sum(sizes[:-1]) - sizes[-1]) < 0.01 * len(sizes), text
