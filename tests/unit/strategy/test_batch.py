from __future__ import annotations

import pytest

from hpctrain.advise.strategy.choice import passes_per_step
from hpctrain.errors import UsageError


def test_the_product_of_the_three_is_the_global_batch():
    assert passes_per_step(96, 8, 4) * 8 * 4 == 96


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((30, 8, 1), "--global-batch 30 cannot be shared by 8 data-parallel ranks"),
        ((30, 8, 1), "nearest: 24 or 32, or 6 data-parallel ranks"),
        ((4, 8, 1), "nearest: 8, or 4 data-parallel ranks"),
        ((96, 8, 5), "--micro-batch 5 does not divide the 12 samples that each of 8"),
        ((96, 8, 5), "data-parallel ranks has of --global-batch 96; nearest: 4 or 6"),
        ((96, 8, 13), "nearest: 12"),
    ],
)  # fmt: skip
def test_what_does_not_come_out_even_is_refused_with_the_nearest(asked, message):
    with pytest.raises(UsageError) as caught:
        passes_per_step(*asked)
    assert message in str(caught.value)
