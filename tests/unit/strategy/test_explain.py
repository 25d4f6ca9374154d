from __future__ import annotations

import pytest

from hpctrain.advise.strategy import choice
from hpctrain.advise.strategy.screen import SOURCES, explained, formulas
from tests.support.plan_cases import ask, for_key


def test_every_part_has_a_formula_and_a_source():
    asked = ask()
    row = choice.choose(choice.rows_of(asked))

    assert set(formulas(asked, row)) == set(SOURCES)


@pytest.mark.parametrize("key", ["pp2+recompute", "zero3+recompute+offload", "ep8", "lora-fsdp2"])
def test_every_part_of_the_newer_ways_has_a_formula_too(key):
    asked = for_key(key)
    row = choice.choose(choice.rows_of(asked), key)

    said = formulas(asked, row)
    assert set(said) == set(SOURCES)
    layout, weights = row.way.layout, said["weights"]
    assert ("parameters of a stage" in weights) is (layout.pp > 1)
    assert ("of adapters" in weights) is (layout.lora > 0)
    assert ("which rest on the host" in weights) is layout.offload
    assert ("microbatches in flight" in said["activations"]) is (layout.pp > 1)
    assert ("of its experts one in 8" in said["gathered units"]) is (layout.ep == 8)
    text = "\n".join(explained(asked, row))
    assert ("each node's own memory holds 60.65 GB: (4 + 4 + 8 + 2) B" in text) is layout.offload


def test_weights_in_4_bits_are_explained_by_their_bits():
    asked = ask(lora=16)
    (row,) = [row for row in choice.rows_of(asked) if row.way.layout.quantised]

    said = formulas(asked, row)
    assert said["weights"].startswith("0.516 B x 6,476,005,376 parameters in 4 bits + 2 B x ")
    assert "16 bits wide for a moment" in said["16-bit copies"]


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
