from __future__ import annotations

import pytest

from hpctrain.advise.strategy import choice
from hpctrain.advise.strategy.screen import PARTS, explained
from tests.support.plan_cases import ask, for_key


@pytest.mark.parametrize("key", ["fsdp2", "pp2+recompute", "zero3+recompute+offload", "ep8"])
def test_every_part_of_every_way_has_a_formula_and_a_source(key):
    asked = for_key(key)
    row = choice.choose(choice.rows_of(asked), key)

    text = "\n".join(explained(asked, row))

    shown = [part for part, nbytes in row.peak.parts.items() if nbytes]
    assert text.count("from: ") == len(shown)
    assert all(PARTS[part]["source"] in text for part in shown)
    away = text.partition("not at this moment: ")[2].partition("\n")[0].split(", ")
    assert {*shown, *away} == set(PARTS)
    assert ("each node's own memory holds 60.65 GB: weights" in text) is row.way.layout.offload


def test_a_formula_has_the_rows_own_numbers():
    asked = ask(lora=16)
    row = choice.choose(choice.rows_of(asked), "lora-fsdp2")

    text = "\n".join(explained(asked, row))

    assert "4 B x 6,738,415,616 parameters / 16" in text
    assert "8 B x 39,976,960 trained parameters / 16" in text


@pytest.mark.parametrize("more", [{"global_batch": 64, "micro": 2}, {"lora": 16}])
def test_what_is_shown_adds_up(more):
    asked = ask(**more)
    for row in choice.rows_of(asked):
        if row.peak is None:
            continue
        text = "\n".join(explained(asked, row))
        shown = [line for line in text.splitlines() if line.startswith("  ") and " GB  " in line]
        sizes = [float(line[16:26]) for line in shown]
        assert abs(sum(sizes[:-1]) - sizes[-1]) < 0.01 * len(sizes), text
