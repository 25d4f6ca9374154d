"""What the lint of tests finds, and what it leaves alone."""

from __future__ import annotations

import textwrap

import pytest

from tests.support.lint_tests import SLEEPS, findings

BOUNDS = {
    "a difference": "assert time.monotonic() - began < 5",
    "from below": "assert 5 > time.perf_counter() - began",
    "at most": "assert time.time() - began <= LIMIT_S / 2",
    "of a name": "took_s = time.monotonic() - began\nassert took_s < 2",
    "of a rounded name": "took_s = round(time.monotonic() - began, 2)\nassert took_s < 2",
    "in a chain": "assert LEASE_S < time.monotonic() - began < 3 * LEASE_S",
    "with a message": "assert done and time.monotonic() - began < 2, 'slow'",
    "of an absolute value": "assert abs(event.t - time.time()) < 5",
    "now and a deadline": "assert time.monotonic() < deadline",
}
FINE = {
    "a lower bound": "assert time.monotonic() - began >= 0.1",
    "a lower bound, from above": "assert LEASE_S < time.monotonic() - began",
    "a clock that is given": "assert clock.monotonic() - began < 5",
    "CPU time": "began = time.process_time()\nassert time.process_time() - began < 2",
    "the end of a poll": "while not done():\n    assert time.monotonic() < deadline",
    "the end of a poll that tries": (
        "while True:\n"
        "    try:\n"
        "        return connect()\n"
        "    except OSError:\n"
        "        assert time.monotonic() - began < 9"
    ),
    "a moment between two others": "assert before <= event.t <= time.time()",
    "a difference of others": "assert after['save_s'] - before['save_s'] < 2",
    "a name of another function": (
        "def other():\n    took_s = time.monotonic() - began\n    return took_s\nassert took_s < 2"
    ),
}


def _test(body):
    return f"import time\ndef test_it():\n{textwrap.indent(body, '    ')}\n"


@pytest.mark.parametrize("body", BOUNDS.values(), ids=BOUNDS)
def test_an_upper_bound_on_a_real_duration_is_found(body):
    [found] = findings(_test(body))

    assert found.line == 2 + len(body.splitlines())
    assert "upper bound" in found.text


@pytest.mark.parametrize("body", FINE.values(), ids=FINE)
def test_what_is_no_bound_on_a_duration_is_left_alone(body):
    assert findings(_test(body)) == []


def test_an_assert_of_a_module_and_of_a_method_are_looked_at_too():
    body = "class Run:\n    def end(self):\n        assert time.time() - self.began < 3\n"
    loose = "began = time.time()\nassert time.time() - began < 3\n"

    assert [found.line for found in findings(body + loose)] == [5, 3]


def test_a_sleep_more_than_is_listed_is_found_and_one_less_as_well():
    source = "time.sleep(1)\nif x:\n    time.sleep(2)\nclock.sleep(3)\nself.sleep(4)\n"

    assert [found.line for found in findings(source)] == [1]
    assert [found.line for found in findings(source, sleeps=1)] == [3]
    assert findings(source, sleeps=2) == []
    [fewer] = findings(source, sleeps=3)
    assert "lower its number" in fewer.text


def test_few_files_are_listed():
    assert len(SLEEPS) < 30


def test_a_file_with_a_finding_is_named_with_its_line(tmp_path, monkeypatch, capsys):
    from tests.support import lint_tests

    (tmp_path / "unit").mkdir()
    (tmp_path / "unit" / "test_it.py").write_text(_test("time.sleep(1)"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "program.py").write_text("time.sleep(1)")
    monkeypatch.setattr(lint_tests, "TESTS", tmp_path)
    monkeypatch.setattr(lint_tests, "SLEEPS", {"unit/gone.py": 1})

    assert lint_tests.main() == 1
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in said] == [
        "tests/unit/test_it.py:3",
        "tests/support/lint_tests.py",
    ]
