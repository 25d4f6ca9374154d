"""What the doctor says of logs that real programs printed, quoted with their addresses."""

from __future__ import annotations

import random

import pytest

from hpctrain.doctor.faults import Certainty, FaultKind
from hpctrain.doctor.scan import LogScanner
from hpctrain.doctor.signatures import SIGNS
from tests.support.quoted_logs import FOLDER, diagnose, quoted

FILES = (
    "quoted.txt",
    "held_out.txt",
    "held_out_2.txt",
    "held_out_3.txt",
    "held_out_4.txt",
    "held_out_5.txt",
)
QUOTED = [log for name in FILES for log in quoted(name)]
WORDINGS = [
    line.split(" | ", 2)
    for line in (FOLDER / "wordings.txt").read_text().splitlines()
    if line.strip()
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


def read(text, signs=SIGNS):
    scanner = LogScanner("train.log", signs=signs)
    scanner.feed(text.encode())
    return [(s.kind, s.role, s.certainty, dict(s.details)) for s in scanner.finish().sightings]


@pytest.mark.parametrize("log", QUOTED, ids=lambda log: log.address.split("github.com/")[1])
def test_a_quoted_log_has_its_fault_or_at_least_no_certain_other_one(log):
    diagnosis = diagnose(log.text)

    assert log.fault in {kind.value for kind in FaultKind}
    if diagnosis.kind != log.fault:
        assert log.address in WRONG
        assert diagnosis.certainty is not Certainty.CERTAIN


def test_the_quotes_are_many_and_nine_of_ten_are_right():
    right = [log for log in QUOTED if diagnose(log.text).kind == log.fault]

    assert len(QUOTED) >= 223
    assert len(right) >= 0.9 * len(QUOTED)
    assert len({log.address for log in QUOTED}) == len(QUOTED)


@pytest.mark.parametrize(("name", "source", "line"), WORDINGS, ids=[w[0] for w in WORDINGS])
def test_a_wording_is_read_by_its_signature(name, source, line):
    scanner = LogScanner("train.log")
    scanner.feed(f"{line}\n".encode())

    assert [s.sign for s in scanner.finish().sightings] == [name], source


def test_every_signature_says_something_that_nothing_says_without_it():
    """A signature that is switched off changes what is read of some real line."""
    lines = [line for _, _, line in WORDINGS]
    texts = [*lines, *(log.text for log in QUOTED)]
    full = [read(text) for text in texts]
    scanner_names = [{s.sign for s in scan_all(text).sightings} for text in texts]

    idle = []
    for sign in SIGNS:
        without = tuple(other for other in SIGNS if other is not sign)
        concerned = [at for at, names in enumerate(scanner_names) if sign.name in names]
        if not any(read(texts[at], without) != full[at] for at in concerned):
            idle.append(sign.name)

    assert idle == []


def scan_all(text):
    scanner = LogScanner("train.log")
    scanner.feed(text.encode())
    return scanner.finish()


def test_names_of_signatures_are_their_own():
    assert len({sign.name for sign in SIGNS}) == len(SIGNS)


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
    from hpctrain.doctor.judge import judge
    from hpctrain.doctor.text import as_json, as_text

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
