"""Logs are read however they were written, one block at a time."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import random
import resource
import subprocess
import sys
import zlib
from types import SimpleNamespace

import pytest

from hpctrain.advise.doctor import files
from hpctrain.advise.doctor.files import inputs, scan
from hpctrain.advise.doctor.judge import judge
from hpctrain.errors import NotFound, UsageError

FULL = "loss: 1.0\nOSError: [Errno 28] No space left on device\n"


def kind_of(*names):
    logs, notes = scan(inputs([str(name) for name in names]))
    return judge(logs).kind, notes


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_log_of_any_encoding_of_ascii_is_read(tmp_path, encoding):
    log = tmp_path / "job.log"
    log.write_bytes(("\xe9t\xe9\n" + FULL).encode(encoding))

    assert kind_of(log) == ("storage_full", [])


def test_a_line_that_the_last_part_of_a_log_cuts_is_not_read(tmp_path):
    path = tmp_path / "rank-0.log"
    path.write_text("the words of a KeyError: 'w'\nstep 1\n")
    log = files.LogInput("rank-0.log", path, tail_bytes=len("KeyError: 'w'\nstep 1\n"))

    [facts], notes = scan([log])

    assert (facts.sightings, facts.lines, len(notes)) == ([], 1, 1)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_packed_logs_are_unpacked(tmp_path, pack):
    log = tmp_path / "job.log.packed"
    log.write_bytes(pack(b"loss: 1.0\n" * 100 + FULL.encode()))

    assert kind_of(log) == ("storage_full", [])


def test_a_packed_log_that_is_torn_is_read_as_far_as_it_goes(tmp_path):
    log = tmp_path / "job.log.gz"
    log.write_bytes(gzip.compress((FULL + "x" * 100_000 + "\n").encode())[:-9])

    kind, notes = kind_of(log)

    assert kind == "storage_full"
    assert "ends early" in notes[0]


TORN = "Compressed file ended before the end-of-stream marker was reached"
PACKERS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
STORY = "".join(f"step {n}: loss: {n * 7919 % 1000}\n" for n in range(400)) + FULL


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
def test_a_packed_log_gives_what_came_wherever_it_is_torn(tmp_path, pack):
    log, packed = tmp_path / "job.log", pack(STORY.encode())
    kept, said = [], set()
    for end in range(len(packed) - 1, 6, -(len(packed) // 40)):
        log.write_bytes(packed[:end])
        try:
            (facts,), notes = scan(inputs([str(log)]))
        except UsageError as error:
            kept.append(0)
            said.add(str(error))
        else:
            kept.append(facts.lines)
            said.update(notes)

    refused = f"{log}: nothing of it can be read ({TORN})"
    assert said == {f"{log} ends early: {TORN}", *([refused] if 0 in kept else [])}
    assert kept == sorted(kept, reverse=True)
    assert kept[0] == STORY.count("\n")


def test_a_short_log_whose_check_is_cut_off_is_read_to_its_last_line(tmp_path):
    log = tmp_path / "short.gz"
    log.write_bytes(gzip.compress(STORY.encode())[:-6])

    kind, notes = kind_of(log)

    assert kind == "storage_full"
    assert notes == [f"{log} ends early: {TORN}"]


@pytest.mark.parametrize("lines", range(20, 60, 5))
def test_a_wrong_check_at_its_end_takes_no_line_from_a_packed_log(tmp_path, lines):
    log = tmp_path / "job.log.gz"
    packed = bytearray(gzip.compress("".join(STORY.splitlines(keepends=True)[:lines]).encode()))
    packed[-6] ^= 1
    log.write_bytes(packed)

    (facts,), notes = scan(inputs([str(log)]))

    assert facts.lines == lines
    assert len(notes) == 1
    assert notes[0].startswith(f"{log} ends early: CRC check failed")


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
@pytest.mark.parametrize("behind", [b"", b"\0" * 100_000, b"\0\0no log"])
def test_what_stands_behind_a_packed_log_takes_nothing_from_it(tmp_path, pack, behind):
    log = tmp_path / "job.log"
    log.write_bytes(pack(b"step 1\n") + pack(STORY.encode()) + behind)

    (facts,), notes = scan(inputs([str(log)]))

    assert facts.lines == 1 + STORY.count("\n")
    assert notes == [] or behind


def test_a_damaged_place_costs_what_lies_behind_it_and_little_before(tmp_path):
    log = tmp_path / "job.log"
    pack = zlib.compressobj(wbits=31)
    text = "".join(f"{n * 2654435761 % 2**32:x}\n" for n in range(30_000)).encode()
    before = pack.compress(text) + pack.flush(zlib.Z_FULL_FLUSH)
    log.write_bytes(before + b"\x07" * 200_000)  # no block is of that type

    (facts,), notes = scan(inputs([str(log)]))

    assert 30_000 - 2_000 < facts.lines <= 30_000
    assert notes == [f"{log} ends early: Error -3 while decompressing data: invalid block type"]


def test_a_packed_log_for_which_there_is_no_memory_is_told_of(tmp_path, monkeypatch):
    class Greedy:
        def read1(self, _):
            raise MemoryError

    monkeypatch.setitem(files._PACKED, b"\x1f\x8b", lambda _: Greedy())
    log = tmp_path / "job.log"
    log.write_bytes(gzip.compress(FULL.encode()))

    with pytest.raises(UsageError, match="read \\(it needs more memory than there is"):
        scan(inputs([str(log)]))


@pytest.mark.parametrize("seed", range(40))
def test_whatever_a_packed_log_holds_it_is_read_or_refused(tmp_path, seed):
    draw, log = random.Random(seed), tmp_path / "job.log"
    packed = bytearray(draw.choice([*PACKERS.values()])(STORY.encode()))
    for _ in range(draw.randrange(1, 5)):
        at = draw.randrange(len(packed))
        packed[at : at + draw.randrange(9)] = draw.randbytes(draw.randrange(9))
    log.write_bytes(packed)

    with contextlib.suppress(UsageError):
        scan(inputs([str(log)]))


def test_standard_input_is_read(monkeypatch):
    monkeypatch.setattr(
        sys, "stdin", SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(FULL.encode())))
    )

    assert kind_of("-") == ("storage_full", [])


def test_no_header_of_a_packed_log_asks_for_more_memory_than_a_log_needs(tmp_path):
    log = tmp_path / "job.log.xz"
    large = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 20}]
    packed = bytearray(lzma.compress(FULL.encode(), check=lzma.CHECK_NONE, filters=large))
    at = packed.index(b"\x21\x01") + 2
    packed[at] = 40  # 4 GiB
    packed[20:24] = zlib.crc32(packed[12:20]).to_bytes(4, "little")
    log.write_bytes(packed)

    with pytest.raises(UsageError, match=r"nothing of it can be read \(Memory usage limit"):
        scan(inputs([str(log)]))


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_how_much_was_read_is_told_as_it_is_on_disk(tmp_path, pack):
    log, told = tmp_path / "job.log", []
    log.write_bytes(pack(random.Random(1).randbytes(3 << 20).hex().encode()))

    scan(inputs([str(log)]), told.append)

    assert sum(told) == log.stat().st_size
    assert len(told) > 2


def test_a_folder_gives_its_logs_and_leaves_out_what_is_none(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-00003.log").write_text(FULL)
    (tmp_path / "logs" / "model.pt").write_bytes(b"\0\1\2" * 100)
    (tmp_path / "core.123").write_bytes(b"\x7fELF\1\2\3\4\5" * 100)
    (tmp_path / "empty.log").touch()

    logs, notes = scan(inputs([str(tmp_path)]))

    assert [log.source for log in logs] == [str(tmp_path / "logs" / "rank-00003.log")]
    assert judge(logs).evidence[0].rank == 3
    assert notes == [f"{tmp_path / 'core.123'} was left out: it is no text"]


@pytest.mark.parametrize(
    ("content", "why"), [(b"", "it is empty"), (b"\x7fELF\1\2\3\4\5" * 100, "it is no text")]
)
def test_a_named_file_that_is_no_log_is_one_clear_line(tmp_path, content, why):
    log = tmp_path / "job.log"
    log.write_bytes(content)

    with pytest.raises(UsageError, match=why):
        scan(inputs([str(log)]))


def test_what_is_not_there_is_told(tmp_path):
    with pytest.raises(NotFound, match="no such file"):
        inputs([str(tmp_path / "absent.log")])
    with pytest.raises(NotFound, match="has no log"):
        inputs([str(tmp_path)])
    with pytest.raises(UsageError, match="read once"):
        inputs(["-", "-"])


def test_holes_of_a_network_s_disk_are_no_binary(tmp_path):
    log = tmp_path / "job.log"
    log.write_bytes(b"\0" * 70_000 + FULL.encode())

    assert kind_of(log)[0] == "storage_full"


def test_a_line_without_an_end_is_cut_and_the_rest_is_read(tmp_path):
    log = tmp_path / "job.log"
    log.write_bytes(b"it/s 99 " * (2 << 20) + b"\n" + FULL.encode())

    assert kind_of(log)[0] == "storage_full"


def test_a_last_line_without_its_newline_is_read(tmp_path):
    log = tmp_path / "job.log"
    log.write_text(FULL.rstrip())

    assert kind_of(log)[0] == "storage_full"


def test_no_more_than_a_piece_of_an_endless_line_is_held(tmp_path, monkeypatch):
    log = tmp_path / "job.log"
    log.write_bytes(b"it/s 99 " * (1 << 18) + b"\n" + FULL.encode())
    monkeypatch.setattr(files, "MOST_LINE", 1 << 16)
    monkeypatch.setattr(files, "BLOCK", 1 << 14)
    fed = []
    feed = files.LogScanner.feed
    monkeypatch.setattr(
        files.LogScanner, "feed", lambda self, block: (fed.append(len(block)), feed(self, block))
    )

    assert kind_of(log)[0] == "storage_full"
    assert max(fed) < 1 << 18


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))
from hpctrain.advise.doctor.files import inputs, scan
from hpctrain.advise.doctor.judge import judge
logs, notes = scan(inputs(sys.argv[1:]))
print(judge(logs).kind, logs[0].lines)
"""


def in_limited_memory(log):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(log)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def long_log(path, size):
    """A log of errors that are survived, losses and one fault near its end."""
    line = b"2024-05-01 12:00:00 iteration 1200 | lm loss: 2.345678E+00 | grad norm: 0.312 |\n"
    odd = b"WARNING: retry after ConnectionError: HTTP 503\n"
    block = (line * 200 + odd) * 60
    with path.open("wb") as file:
        for _ in range(size // len(block) + 1):
            file.write(block)
        file.write(b"OSError: [Errno 28] No space left on device\n")
    return path


def test_memory_is_bounded_by_a_block(tmp_path):
    log = long_log(tmp_path / "job.log", 24 << 20)

    kind, lines = in_limited_memory(log)

    assert kind == "storage_full"
    assert int(lines) > 200_000


@pytest.mark.soak
def test_memory_is_bounded_for_a_long_log(tmp_path):
    log = long_log(tmp_path / "job.log", 700 << 20)

    kind, _ = in_limited_memory(log)

    assert kind == "storage_full"
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 400 << 10
