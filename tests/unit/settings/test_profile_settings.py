"""[profile] and --profile: what is understood, refused in one line, or noted."""

from __future__ import annotations

import pytest

from hpctrain.core.settings.check import (
    check_profile,
    parse_profile,
    profile_flags,
    rank_set,
    step_range,
)
from hpctrain.core.settings.schema import ProfileSettings, Settings
from hpctrain.errors import UsageError


def settings(**profile):
    return Settings(profile=ProfileSettings(**profile))


@pytest.mark.parametrize(
    ("text", "found"), [("", None), ("100:103", (100, 103)), ("7", (7, 7)), (" 1:1 ", (1, 1))]
)
def test_steps(text, found):
    assert step_range(text) == found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("100-103", "FIRST:LAST"),
        ("0:3", "the first step of a run is 1"),
        ("9:3", "before the first"),
        ("1:101", "101 steps"),
    ],
)
def test_steps_that_cannot_be_are_refused_with_their_origin(text, why):
    with pytest.raises(UsageError, match=rf'^hpctrain.toml:3: profile.steps is "{text}".*{why}'):
        check_profile(settings(steps=text), {"profile.steps": "hpctrain.toml:3"}, 8)


def test_ranks():
    assert rank_set("7,0,7") == (0, 7)
    assert rank_set("all") is None
    with pytest.raises(UsageError, match=r'profile.ranks is "0-7"; it takes ranks'):
        rank_set("0-7")


def test_the_flag_is_read_as_a_person_writes_it():
    wanted = {"steps": "100:103", "ranks": "0,7"}

    assert parse_profile("steps=100:103,ranks=0,7") == wanted
    assert parse_profile("steps=100:103 ranks=0,7") == wanted
    assert parse_profile("ranks=0,7,steps=100:103") == wanted
    assert parse_profile("steps=5,memory") == {"steps": "5", "memory": True}
    assert profile_flags(wanted)["profile.ranks"] == ("--profile", "0,7")
    assert profile_flags(None) == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ranks=0", "which steps"),
        ("steps=1:2,rank=0", '"rank=0" is not understood'),
        ("steps=1:2,7", '"7" is not understood'),
        ("steps=1:2,steps=3:4", "steps is given twice"),
        ("steps=a", "FIRST:LAST"),
    ],
)
def test_a_flag_that_is_not_understood_is_one_line_with_an_example(text, why):
    with pytest.raises(UsageError, match=why) as refused:
        parse_profile(text)
    assert str(refused.value).startswith(f"--profile {text}: ")


def test_a_rank_that_there_will_never_be_is_refused():
    with pytest.raises(UsageError, match=r"names rank 8; there are 8 at most: 0 to 7"):
        check_profile(settings(steps="1:2", ranks="8,0"), {}, 8)
    check_profile(settings(steps="1:2", ranks="0,8"), {}, 9)
    check_profile(settings(steps="1:2", ranks="all"), {}, 8)


def test_what_has_no_effect_is_said():
    flag = {"profile.ranks": "flag --set profile.ranks"}

    assert check_profile(settings(ranks="0"), {}, 8) == []
    assert check_profile(settings(ranks="1"), flag, 8) == [
        "profile.ranks has no effect without profile.steps"
    ]
    [note] = check_profile(settings(steps="1:2", memory=True), {}, 8)
    assert "nothing to record on a CPU" in note
