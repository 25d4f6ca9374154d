"""Whatever the text is, it is checked or said to be unreadable; nothing is raised."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.advise.lint.check import check_text

HERE = Path(__file__).parent
TEXTS = [(HERE / name).read_text() for name in ("planted.txt", "cases.txt")]
WORDS = sorted(set(" ".join(TEXTS).split()))
PATHS = ("program.py", "ds_config.json", "hpctrain.toml")


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.text() | st.lists(st.sampled_from(WORDS)).map(" ".join), st.sampled_from(PATHS))
def test_any_text_is_read(text, path):
    for one in check_text(text, path):
        assert one.message


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
    st.sampled_from(["zero_optimization", "train_batch_size", "fp16", "bf16", "optimizer"]),
)
def test_any_configuration_is_read(value, key):
    import json

    text = json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 1}, key: value})

    check_text(text, "ds_config.json")


@pytest.mark.parametrize("seed", range(60))
def test_a_program_with_lines_lost_and_doubled_is_read(seed):
    draw = random.Random(seed)
    lines = TEXTS[0].splitlines(keepends=True)
    for _ in range(draw.randrange(1, 8)):
        place = draw.randrange(len(lines))
        action = draw.randrange(3)
        if action == 0:
            del lines[place]
        elif action == 1:
            lines.insert(place, draw.choice(lines))
        else:
            lines[place] = lines[place][draw.randrange(len(lines[place])) :]
    text = "".join(lines)

    check_text(text, "program.py")


@pytest.mark.parametrize(
    "text",
    [
        "(" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        "-" * 100_000 + "1",
        "not " * 100_000 + "x",
        "x" + ".y" * 10_000,
        "f" + "()" * 5_000,
        "1" + " + 1" * 20_000,
        "".join(f"{' ' * n}if x:\n" for n in range(99)) + " " * 99 + "pass",
        "if x:\n    pass\n" + "elif x:\n    pass\n" * 3_000,
        "x = lambda: " * 5_000 + "1",
        "\0",
        "\ufeffimport torch",
        "x = 1\f\ny = 2",
        "a = '\u2028'\r\nif x:\r\n    dist.barrier()",
        "{" * 100_000,
        "import os\nos.environ.get()\nos.environ[...]\nos.getenv(*a, **b)\nprint(*c)",
    ],
    ids=range(16),
)
@pytest.mark.parametrize("path", PATHS)
def test_what_is_deep_long_or_odd_is_read(text, path):
    for one in check_text(text, path):
        assert one.message
