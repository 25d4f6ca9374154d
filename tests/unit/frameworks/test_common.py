"""What a framework's callback refuses in a line, and what it survives."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace

import pytest

import hpctrain
from hpctrain.errors import CheckpointError, Fenced, UsageError
from hpctrain.frameworks import meet, need, seal


def test_a_framework_that_has_not_met_the_other_ranks_is_refused():
    run = SimpleNamespace(world=SimpleNamespace(world_size=4))
    meet(run, "the Trainer", 4, "do this")
    with pytest.raises(
        UsageError, match=r"^the Trainer trains on 1 ranks, the run has 4: do this$"
    ):
        meet(run, "the Trainer", 1, "do this")


@pytest.mark.parametrize(
    ("since", "below", "why"),
    [
        ("1", "2", r"torch \S+ was not tried with this hpctrain: pip install 'torch>=1,<2'"),
        ("99.5", "100", r"torch \S+ was not tried with this hpctrain: pip install .*"),
    ],
)
def test_a_version_that_was_not_tried_is_refused_in_a_line(since, below, why):
    with pytest.raises(UsageError) as refused:
        need("torch", since=since, below=below)
    assert re.fullmatch(why, str(refused.value))
    need("torch", since="2.8", below="3")


def test_a_library_that_is_not_there_is_named_with_what_to_install():
    with pytest.raises(UsageError) as refused:
        need("no-such-library", since="1.2", below="2")
    assert str(refused.value) == (
        "no-such-library is not installed: pip install 'no-such-library>=1.2,<2'"
    )


def sealing(error):
    """A run whose seal fails."""

    def sealed(*_):
        raise error

    return SimpleNamespace(world=SimpleNamespace(rank=0), sealed=sealed)


def test_a_seal_that_fails_costs_itself(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "hpctrain"):
        seal(sealing(CheckpointError("the disk is full")), 7, tmp_path)
    assert caplog.messages == ["step 7 is not registered: the disk is full; training continues"]

    with pytest.raises(Fenced):
        seal(sealing(Fenced("a newer attempt")), 7, tmp_path)


def test_a_framework_that_is_not_known_is_an_attribute_error():
    assert dir(hpctrain.frameworks) == ["huggingface", "lightning"]
    with pytest.raises(AttributeError, match="has no attribute 'keras'"):
        _ = hpctrain.frameworks.keras
