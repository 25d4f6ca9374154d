"""Odd inputs by the thousand, each from a number: what broke once can be made again.

A short round runs with the other tests, a long one under `make soak`. HPCTRAIN_SEED changes the
inputs. HPCTRAIN_FUZZ_S lets a round take so many seconds, whatever its length is otherwise.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
import traceback
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
TEXTS = (
    "", " ", "-", "--", "--help", "-x", ".", "..", "../up", "/etc/passwd", "a/b", "a b", "a'b",
    'a"b', "$(touch pwned)", "`touch pwned`", "; touch pwned;", "x\ntouch pwned\n",
    "\ntouch pwned\n#", "&& touch pwned", "| touch pwned", "'; touch pwned; '",
    '"; touch pwned; "', "$'\\ntouch pwned'", "\n#SBATCH --wrap=x", "%j", "%%n", "\\", "\\n",
    "a\\", "#", "!", "~", "*", "{a,b}", "${IFS}", "a=b", "\t", "\r", "\v", "\f", "\x1b[2J",
    "\u2028", "\u202e", "ü", "\U0001f600", "x" * 300, "9" * 400, "1e999", "nan", "-1", "0", "1",
    "2-4", "4-2", "1:2:3:4", "99999999999", "0x10", "1_000", "true", "None", "[", "]", "[]",
    '["a"]', "[1, 2]", "{}", "{a=1}", '"', "'", '"""', "[" * 1500, "[" * 1500 + "]" * 1500,
    '["' + "x" * 100 + '"]', "01:30:00", "1979-05-27", "inf", "0x" + "f" * 5000, "9" * 5000,
    "1" + "0" * 308,
)  # fmt: skip
"""What a name, a setting or an argument may be that nobody meant."""
TIMES = (0, -1, -1e12, 1.0, 4e9, 2.5e11, 2.6e11, 1e15, 1e18, 1e300, -62135596801.0, 2**63)
SECONDS = float(os.environ.get("HPCTRAIN_FUZZ_S", "0"))
SEED = int(os.environ.get("HPCTRAIN_SEED", "20261128"))


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


def odd_text(chance: random.Random) -> str:
    """One of the texts, two of them, or a few characters of any kind."""
    kind = chance.randrange(4)
    if kind == 0:
        return "".join(chr(chance.choice((chance.randrange(1, 128), chance.randrange(1, 0xD7FF))))
                       for _ in range(chance.randrange(1, 12)))  # fmt: skip
    if kind == 1:
        return chance.choice(TEXTS) + chance.choice(TEXTS)
    return chance.choice(TEXTS)


def damaged(text: str, chance: random.Random) -> str:
    """A text with a part cut off, doubled, replaced, or other than it was."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        at, to = sorted(chance.randrange(len(text) + 1) for _ in range(2))
        to = min(to, at + chance.choice((1, 3, 30, 10_000)))
        lines = text.split("\n")
        line = chance.randrange(len(lines))
        text = chance.choice(
            (
                text[:at],
                text[:at] + text[to:],
                text[:at] + odd_text(chance) + text[to:],
                text[:to] + text[at:],
                "\n".join([*lines[:line], *lines[line + 1 :]]),
                "\n".join([*lines[:line], chance.choice(lines), *lines[line:]]),
                "\n".join([*lines[:line], _odd_value(lines[line], chance), *lines[line + 1 :]]),
            )
        )
    return text


def _odd_value(line: str, chance: random.Random) -> str:
    """`NAME=VALUE` or `NAME = VALUE` with another value."""
    name, equals, _ = line.partition("=")
    return f"{name}{equals}{odd_text(chance)}"


class Faults:
    """Calls what is tried, and keeps what it raises and may not raise."""

    def __init__(self, *allowed: type[Exception]) -> None:
        self.found: list[str] = []
        self._allowed = allowed

    def of(self, what: str, call: Callable[[], object]) -> None:
        """Call it; an error that is allowed is a good answer."""
        try:
            call()
        except self._allowed:
            pass
        except Exception as error:  # noqa: BLE001 - every one is a fault, and all are to be seen
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
            self.found.append(f"{what}: {type(error).__name__}: {str(error)[:80]} at {place}")


def chances(begin: int, end: int) -> Iterator[tuple[int, random.Random]]:
    """A number, and a source of chance that is its own."""
    deadline_s = time.monotonic() + SECONDS
    for number in itertools.count(begin) if SECONDS else range(begin, end):
        if SECONDS and time.monotonic() > deadline_s:
            print(
                f"seed {SEED}: cases {begin:,} to {number - 1:,}", file=sys.__stdout__, flush=True
            )
            return
        yield number, random.Random(SEED * 100_003 + number)
