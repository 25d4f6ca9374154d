"""What the doctor says of logs that real programs printed, quoted with their addresses."""

from __future__ import annotations

import random

import pytest

from hpctrain.advise.doctor.faults import FAULTS, Certainty, Role
from hpctrain.advise.doctor.lines import plain
from hpctrain.advise.doctor.scan import LogScanner
from hpctrain.advise.doctor.signature import SignatureTable, packaged
from tests.support.quoted_logs import diagnose, quoted

FILES = (
    "quoted.txt",
    "held_out.txt",
    "held_out_2.txt",
    "held_out_3.txt",
    "held_out_4.txt",
    "held_out_5.txt",
    "held_out_6.txt",
)
QUOTED = [log for name in FILES for log in quoted(name)]
EVERY = (*packaged().faults, *packaged().harmless)
EXAMPLES = [
    pytest.param(one, line, id=f"{one.name}-{n}")
    for one in EVERY
    for n, line in enumerate(one.matches)
]
NEAR_MISSES = [
    pytest.param(one, line, id=f"{one.name}-{n}")
    for one in EVERY
    for n, line in enumerate(one.near_misses)
]
WRONG = {
    # The message speaks of a system call alone; that it was the interfaces came out in the thread.
    "https://github.com/NVIDIA/nccl/issues/697",
    # It stood still, which the thread alone says; the log has the hand that interrupted it.
    "https://github.com/open-mmlab/mmdetection/issues/5060",
    # Another rank's log has the reason; here are connections to it that broke.
    "https://github.com/InternLM/xtuner/issues/719",
    # A program's error by its words; that a launcher was missing came out in the thread.
    "https://github.com/hiyouga/LlamaFactory/issues/4557",
    # A file is missing that only its folder's use tells to be a checkpoint's.
    "https://github.com/facebookresearch/PyTorch-BigGraph/issues/142",
}


def read(text, signatures=None):
    scanner = LogScanner("train.log", signatures=signatures)
    scanner.feed(text.encode())
    return [(s.kind, s.role, s.certainty, dict(s.details)) for s in scanner.finish().sightings]


@pytest.mark.parametrize("log", QUOTED, ids=lambda log: log.address.split("github.com/")[1])
def test_a_quoted_log_has_its_fault_or_at_least_no_certain_other_one(log):
    diagnosis = diagnose(log.text)

    assert log.fault in FAULTS
    if diagnosis.kind != log.fault:
        assert log.address in WRONG
        assert diagnosis.certainty is not Certainty.CERTAIN


def test_the_quotes_are_many_and_nine_of_ten_are_right():
    right = [log for log in QUOTED if diagnose(log.text).kind == log.fault]

    assert len(QUOTED) >= 223
    assert len(right) >= 0.9 * len(QUOTED)
    assert len({log.address for log in QUOTED}) == len(QUOTED)


@pytest.mark.parametrize(("one", "line"), EXAMPLES)
def test_an_example_is_read_by_its_signature(one, line):
    signs = [sighting.sign for sighting in scan_all(f"{line}\n").sightings]

    assert signs == ([] if one.role == Role.HARMLESS else [one.name])


@pytest.mark.parametrize(("one", "line"), NEAR_MISSES)
def test_a_near_miss_is_none_of_its_signature(one, line):
    assert one.fits(plain(line).text) is None
    assert one.name not in [sighting.sign for sighting in scan_all(f"{line}\n").sightings]


def test_every_signature_says_something_that_nothing_says_without_it():
    """A signature that is switched off changes what is read of some real line."""
    texts = [line for one in EVERY for line in one.matches] + [log.text for log in QUOTED]
    full = [read(text) for text in texts]

    idle = []
    for one in EVERY:
        without = SignatureTable(other for other in EVERY if other is not one)
        concerned = (at for at, text in enumerate(texts) if any(map(one.fits, text.splitlines())))
        if not any(
            read(texts[at], without) != full[at] for at in (*concerned, *at_own(one, texts))
        ):
            idle.append(one.name)

    assert idle == []


def at_own(one, texts):
    """Where its own examples stand: a prefix may hide the beginning of a line."""
    return [texts.index(line) for line in one.matches]


def scan_all(text):
    scanner = LogScanner("train.log")
    scanner.feed(text.encode())
    return scanner.finish()


def test_names_of_signatures_are_their_own():
    assert len({one.name for one in EVERY}) == len(EVERY)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_nothing_raises(seed):
    chance = random.Random(seed)
    lines = [line for log in QUOTED for line in log.text.splitlines()]
    chance.shuffle(lines)
    pieces = []
    for line in lines[:200]:
        raw = line.encode()
        if chance.random() < 0.3:
            cut = chance.randrange(len(raw) + 1)
            raw = raw[:cut] + chance.randbytes(chance.randrange(20)) + raw[cut:]
        pieces.append(raw + chance.choice([b"\n", b"\r\n", b"\r", b"", b"\n\n"]))
    content = b"".join(pieces) + chance.randbytes(500)

    scanner = LogScanner("train.log")
    while content:
        cut = content.find(b"\n", chance.randrange(4000)) + 1 or len(content)
        scanner.feed(content[:cut])
        content = content[cut:]
    from hpctrain.advise.doctor.judge import judge
    from hpctrain.advise.doctor.words import as_json, as_text

    diagnosis = judge([scanner.finish()])

    assert as_text(diagnosis)
    assert as_json(diagnosis)["code"].startswith("HT8")


@pytest.mark.parametrize("seed", range(6))
def test_blocks_of_any_length_read_the_same(seed):
    chance = random.Random(seed)
    content = "\n".join(log.text for log in QUOTED).encode()
    whole = LogScanner("train.log")
    whole.feed(content)
    parts = LogScanner("train.log")
    while content:
        cut = content.find(b"\n", chance.randrange(3000)) + 1 or len(content)
        parts.feed(content[:cut])
        content = content[cut:]

    assert parts.finish() == whole.finish()
