"""A file of results that anybody may have written: read in bounded time, and judged in words."""

from __future__ import annotations

import json
import math
import os
import random

import pytest

from hpctrain.ledger.run import results
from hpctrain.ledger.run.results import read_results, write_results
from tests.support import fuzzing


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.json"


def test_what_is_written_is_read_and_a_nan_stays_unknown(path):
    write_results(path, {"loss": 2.25, "accuracy": 0.5, "worst": math.nan, "top": math.inf})

    assert json.loads(path.read_text()) == {
        "loss": 2.25, "accuracy": 0.5, "worst": None, "top": None
    }  # fmt: skip
    read = read_results(path)
    assert read.metrics == {"loss": 2.25, "accuracy": 0.5}
    assert read.why == "results.json: worst is not finite; top is not finite"


WRONG = {
    "[1]": "results.json is no object of names and numbers",
    "": "results.json is no JSON: Expecting value: line 1 column 1 (char 0)",
    "{}": "results.json: it names no metric",
    '{"loss": "2"}': "results.json: loss is no number",
    '{"loss": true}': "results.json: loss is no number",
    '{"loss": NaN}': "results.json: loss is not finite",
    '{"loss": 1e999}': "results.json: loss is not finite",
    '{"a\\nb": 1}': "results.json: 'a\\nb' is no name of a metric",
    '{" a": 1}': "results.json: ' a' is no name of a metric",
    '{"\\u001b[2J": 1}': "results.json: '\\x1b[2J' is no name of a metric",
    '{"": 1}': "results.json: '' is no name of a metric",
    json.dumps(dict.fromkeys("abcde")): (
        "results.json: a is not finite; b is not finite; c is not finite (and 2 more)"
    ),
    f'{{"loss": 1{"0" * 400}}}': "results.json: loss is not finite",
}


@pytest.mark.parametrize(("text", "why"), WRONG.items(), ids=range(len(WRONG)))
def test_what_is_wrong_is_said_and_counts_for_nothing(path, text, why):
    path.write_text(text)

    assert read_results(path) == results.Results({}, why)


def test_a_file_that_is_missing_or_endless_or_no_file_is_said(path):
    assert read_results(path).why == ("results.json is not there: the program has reported nothing")
    path.write_text(" " * (results.MOST_BYTES + 1))
    assert read_results(path).why == f"results.json cannot be read: more than {262144} bytes"
    path.unlink()
    os.mkfifo(path)
    assert read_results(path).why == "results.json cannot be read: not an ordinary file"


def test_no_more_metrics_than_anybody_reads(path):
    path.write_text(json.dumps({f"m{n}": n for n in range(results.MOST_METRICS + 2)}))

    read = read_results(path)

    assert len(read.metrics) == results.MOST_METRICS
    assert read.why.startswith("results.json: m256 is beyond 256 metrics; m257 is")


@fuzzing.cases(300, 30_000)
def test_whatever_lies_there_the_metrics_are_finite_and_fit_a_screen(path, begin, end):
    for number in range(begin, end):
        dice = random.Random(fuzzing.SEED + number)
        path.write_bytes(_odd(dice))

        read = read_results(path)

        assert all(math.isfinite(value) for value in read.metrics.values()), number
        assert all(results.is_name(name) for name in read.metrics), number
        assert read.why.isprintable(), number
        assert len(read.why) < 1000, number
        assert read.metrics or read.why, number


def _odd(dice):
    kind = dice.randrange(4)
    if kind == 0:
        return dice.choice(fuzzing.RAW)
    names = [*fuzzing.TEXTS, "loss", "accuracy"]
    content = {dice.choice(names): dice.choice(fuzzing.VALUES) for _ in range(dice.randrange(5))}
    text = json.dumps(content).encode()
    if kind == 1:
        return text
    cut = bytearray(text)
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(len(cut) + 1)
        cut[at : at + dice.randrange(3)] = dice.randbytes(dice.randrange(3))
    return bytes(cut)
