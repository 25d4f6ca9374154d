"""Whatever a log holds, nothing of `doctor` raises: signs with far too much in each place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.advise.doctor.judge import judge
from hpctrain.advise.doctor.lines import plain, rank_of_file
from hpctrain.advise.doctor.scan import LogScanner
from hpctrain.advise.doctor.signature import packaged
from hpctrain.advise.doctor.words import as_json, as_text, gpu_memory
from tests.support.fuzzing import Faults, cases, chances
from tests.support.hostile_patterns import Found, probes

if TYPE_CHECKING:
    import random

SIGNATURES = (*packaged().faults, *packaged().harmless)
WORDS = [*packaged().words]
DIGITS = 4400
"""More than int() takes."""
PREFIXES = (
    "", "[rank9]: ", "[default0]:", "[1,2]<stderr>:", "[RANK 3] ", "n1: n1:1:2 [0] ", "7: ",
    "(Worker pid=1, ip=10.0.0.1) ", "\N{BOX DRAWINGS LIGHT VERTICAL} ", "stderr: ", "  rank : 1 ",
)  # fmt: skip
NUMBERS = ("9" * DIGITS, "-1", "1e999", "9" * 400, "0", "1.2.3", "", "\u0663", "nan", "1" * 7)


def read(*blocks, source="x.log"):
    """All that `doctor` does with a log but to print it."""
    scanner = LogScanner(source, rank_of_file(source), attempt=1)
    for block in blocks:
        scanner.feed(block)
    diagnosis = judge([scanner.finish()])
    return as_text(diagnosis) + str(as_json(diagnosis))


@pytest.mark.parametrize("sign", SIGNATURES, ids=lambda sign: sign.name)
def test_no_place_of_a_sign_takes_too_much(sign):
    found = Found(sign.pattern, 0, frozenset(), sign.name)
    lines = [
        f"{sign.words[0]} {WORDS[0].decode()} {text}\n".encode("utf-8", "surrogateescape")
        for text in probes(found, DIGITS, ("9",))
    ]

    assert read(*lines)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_no_number_of_a_prefix_is_too_long(prefix):
    for number in NUMBERS:
        odd = "".join(number if char.isdigit() else char for char in prefix)
        for line in (f"{odd}RuntimeError: x", f"{odd}Traceback (most recent call last):", odd):
            assert plain(line).text is not None
            assert read(f"{line}\n{line}\n".encode("utf-8", "replace"))


@pytest.mark.parametrize("number", NUMBERS)
def test_sizes_of_an_allocator_may_be_no_numbers(number):
    line = (
        f"torch.OutOfMemoryError: Tried to allocate {number} GiB. total capacity of {number} GiB "
        f"{number} GiB is allocated by PyTorch"
    )

    assert len(gpu_memory(line)) == 2
    assert read(f"{line}\n".encode())


def test_ranks_without_end_are_not_counted_to():
    """A line that names rank 999999999 had all ranks below it listed."""
    line = (
        "[rank{0}]:[E1 02:07:08.4 x.cpp:607] [Rank {0}] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, Timeout(ms)=1) ran for 2 milliseconds\n"
    )

    assert "1000000" not in read("".join(map(line.format, ("0", "9" * 9, "9" * 40))).encode())


@cases(short=60, long=6000)
def test_lines_of_signs_in_any_order_are_read(begin, end):
    faults = Faults()
    for number, chance in chances(begin, end):
        lines = [_line(chance) for _ in range(chance.randrange(1, 30))]
        content = "".join(lines).encode("utf-8", "surrogatepass")
        if chance.random() < 0.3:
            at = chance.randrange(len(content) + 1)
            content = content[:at] + chance.randbytes(9) + content[at:]
        faults.of(f"case {number}", lambda content=content: read(content))

    assert faults.found == []


def _line(chance: random.Random) -> str:
    sign = chance.choice(SIGNATURES)
    words = [
        chance.choice(sign.words),
        chance.choice(WORDS).decode(),
        *map(str, chance.sample(NUMBERS, 2)),
    ]
    words.append(chance.choice((*STARTS, *PREFIXES)))
    chance.shuffle(words)
    return chance.choice(PREFIXES) + chance.choice(("", " ")).join(words) + chance.choice(ENDS)


STARTS = (
    "Traceback (most recent call last):", '  File "/a.py", line 1, in f', "ValueError: x",
    "During handling of the above exception, another exception occurred:", "  raise x",
    "The above exception was the direct cause of the following exception:", "=====",
    "Current thread 0x1 (most recent call first):", "Fatal Python error: x", "Last error:",
    "loss: nan", "loss: 1", "loss scale: 0, reducing to 1", "Exception ignored in: x",
    "NCCL INFO NET/IB : Using x", "NCCL version 2.1", "20260101 10:10:10 attempt 1",
)  # fmt: skip
ENDS = ("\n", "\r\n", "\r", "\n\n", "\0\n", "")


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.binary(max_size=60) | st.sampled_from(WORDS), max_size=40))
def test_any_bytes_are_read(pieces):
    assert read(b" ".join(pieces))


class LookedAt(bytes):
    """A block that counts how many of its bytes were looked at, again and again."""

    count_of_bytes = 0

    def find(self, word, start=0, end=None):
        at = super().find(word, start, len(self) if end is None else end)
        type(self).count_of_bytes += (at if at >= 0 else len(self)) - start
        return at

    def rfind(self, word, start, end):
        at = super().rfind(word, start, end)
        type(self).count_of_bytes += end - max(at, start)
        return at

    def count(self, word, start=0, end=None):
        last = len(self) if end is None else end
        type(self).count_of_bytes += last - start
        return super().count(word, start, last)


@pytest.mark.parametrize(
    "line",
    [b"loss: nan\n", b"reducing loss scale to 2\n", b"error at 1%\r", b"error at 1%", b"Xid\n\r"],
)
def test_no_byte_of_a_block_is_looked_at_for_each_of_its_lines(line):
    """Every loss that was nan had all lines of its 4 MiB before it counted: minutes for 9 MB."""
    looked = []
    for lines in (500, 1000, 2000):
        LookedAt.count_of_bytes = 0
        read(LookedAt(line * lines))
        looked.append(LookedAt.count_of_bytes)

    assert looked[2] - looked[1] < 2.2 * (looked[1] - looked[0])
