"""Odd inputs by the thousand, each from a number: what broke once can be made again.

A short round runs with the other tests, a long one under `make soak`.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 2**31, 2**63, 2**80, -(2**70), 10**300, 1.5, -0.0, 1e18, 1e300,
    1e308, "", "x", "17", "-1", "nan", "inf", "NaN", "1e999", "9" * 400, "--all", "../../etc",
    "a\0b", "\ud800", "\udfff tail", "\x1b]52;c;YQ==\x07", "\x1b[2K\r", "a\nb", "\u2028",
    "y" * 5000, [], [None], [1, "n1", None], [[]], [[[[1]]]], [-1, 2**70, "\ud800"], {}, {"a": 1},
    {"step": "x"}, [{"step": []}, {"name": 3}], {"\ud800": {"b": []}}, {"": None},
)  # fmt: skip
"""What a field may hold that nobody meant."""
WORDS = ("hang", "retry", "sigquit", "", "DONE", "stop ", "preempted2")
"""What a newer version may say where this one knows a closed set."""
RAW = (
    b"", b"{", b"{}", b"[]", b"null", b"\0" * 200, b"\xff\xfe", b'{"t": NaN, "kind": "done"}',
    b'{"t": 1e999, "kind": "done"}', b'{"t": "x", "kind": "done"}', b'{"t": 1, "kind": 5}',
    b'{"t": 1, "kind": "submit_intent"}', b'{"t": 1, "kind": "attempt_ended", "attempt": 1}',
    b'{"t": 1, "kind": "x", "y": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"t": 1, "kind": "done", "kind": "saved", "t": true}', b'{"t": ' + b"9" * 5000 + b"}",
    b'{"t": 1, "kind": "steps", "attempt": 1, "first": 1, "last": Infinity}',
)  # fmt: skip
TIMES = (0, -1, -1e12, 1.0, 4e9, 2.5e11, 2.6e11, 1e15, 1e18, 1e300, -62135596801.0, 2**63)
SEED = 20261122


def cases(short: int, long: int) -> pytest.MarkDecorator:
    """Parametrizes `number` of a test twice: a few of the cases always, all of them in a soak."""
    return pytest.mark.parametrize(
        ("begin", "end"),
        [
            pytest.param(0, short, id=f"{short}"),
            pytest.param(short, long, id=f"{long}", marks=pytest.mark.soak),
        ],
    )


def odd(chance: random.Random) -> Any:
    """A value that nobody meant."""
    return chance.choice(WORDS) if chance.random() < 0.15 else chance.choice(VALUES)


def mutated(lines: list[bytes], chance: random.Random) -> list[bytes]:
    """A ledger with a few things wrong."""
    lines = list(lines)
    for _ in range(chance.choice((1, 1, 2, 3, 6))):
        change = chance.choice(_CHANGES)
        at = chance.randrange(len(lines))
        lines[at : at + 1] = change(lines[at], chance)
        if not lines:
            lines = [b""]
    return lines


def _fact(line: bytes) -> dict[str, Any]:
    try:
        fact = json.loads(line)
    except (ValueError, RecursionError):
        return {"t": 1.0, "kind": "done"}
    return fact if isinstance(fact, dict) else {"t": 1.0, "kind": "done"}


def _line(fact: dict[str, Any]) -> bytes:
    return json.dumps(fact).encode()


def _other_value(line: bytes, chance: random.Random) -> list[bytes]:
    fact = _fact(line)
    if fact:
        fact[chance.choice(sorted(fact))] = odd(chance)
    return [_line(fact)]


def _no_key(line: bytes, chance: random.Random) -> list[bytes]:
    fact = _fact(line)
    if fact:
        fact.pop(chance.choice(sorted(fact)))
    return [_line(fact)]


def _all_values(line: bytes, chance: random.Random) -> list[bytes]:
    fact = _fact(line)
    return [
        _line({name: odd(chance) if name not in {"t", "kind"} else fact[name] for name in fact})
    ]


def _other_time(line: bytes, chance: random.Random) -> list[bytes]:
    fact = _fact(line)
    names = [name for name in fact if name in {"t", "heard", "ended_at", "job_started"}] or ["t"]
    return [_line(fact | {chance.choice(names): chance.choice(TIMES)})]


def _other_attempt(line: bytes, chance: random.Random) -> list[bytes]:
    return [_line(_fact(line) | {"attempt": chance.choice((None, 0, -1, 1, 3, 10**9, 2**70, "1"))})]


def _new_kind(line: bytes, chance: random.Random) -> list[bytes]:
    return [_line(_fact(line) | {"kind": chance.choice(("hang", "", "\ud800", "steps ", "done"))})]


def _strange_line(line: bytes, chance: random.Random) -> list[bytes]:
    return [line, chance.choice(RAW)]


def _cut(line: bytes, chance: random.Random) -> list[bytes]:
    return [line[: chance.randrange(len(line) + 1)]]


def _flipped(line: bytes, chance: random.Random) -> list[bytes]:
    if not line:
        return [line]
    at = chance.randrange(len(line))
    return [line[:at] + bytes([chance.randrange(256)]) + line[at + 1 :]]


def _gone(line: bytes, chance: random.Random) -> list[bytes]:
    del line, chance
    return []


def _twice(line: bytes, chance: random.Random) -> list[bytes]:
    del chance
    return [line, line]


_CHANGES: tuple[Callable[[bytes, random.Random], list[bytes]], ...] = (
    _other_value, _other_value, _other_value, _no_key, _no_key, _all_values, _other_time,
    _other_attempt, _new_kind, _strange_line, _cut, _flipped, _gone, _twice,
)  # fmt: skip


def chances(begin: int, end: int) -> Iterator[tuple[int, random.Random]]:
    """A number, and a source of chance that is its own."""
    for number in range(begin, end):
        yield number, random.Random(SEED * 100_003 + number)
