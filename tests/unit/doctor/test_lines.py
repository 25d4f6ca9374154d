"""Who wrote a line and when, in the ways of several launchers."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpctrain.advise.doctor.lines import clock, plain, rank_of_file
from hpctrain.advise.doctor.scan import LogScanner


@pytest.mark.parametrize(
    ("raw", "text", "rank"),
    [
        ("[rank3]: ValueError: no", "ValueError: no", 3),
        ("[default5]:ValueError: no", "ValueError: no", 5),
        ("[1,2]<stderr>:ValueError: no", "ValueError: no", 2),
        ("12: ValueError: no", "ValueError: no", 12),
        ("(Worker pid=12, ip=10.0.0.1) ValueError: no", "ValueError: no", None),
        ("(pid=12) ValueError: no", "ValueError: no", None),
        ("│ ValueError: no                      │", "ValueError: no", None),
        ("\x1b[31mValueError: no\x1b[0m", "ValueError: no", None),
        ("Traceback (most recent call last): (RANK 7)", None, 7),
        ("[E321 02:07:08 x.cpp:1] [Rank 4] late", None, 4),
        ("ValueError: 3: no", "ValueError: 3: no", None),
        (
            "E0227 17:39:41.51 29 site-packages/torch/distributed/elastic/x.py:732] ValueError: no",
            "ValueError: no",
            None,
        ),
        (
            "[2024-05-10 22:43:34,776] torch.distributed.run: [WARNING] ValueError: no",
            "ValueError: no",
            None,
        ),
        ("ERROR:torch.distributed.elastic.multiprocessing.api:failed", "failed", None),
    ],
)
def test_a_line_is_freed_of_what_launchers_put_before_it(raw, text, rank):
    line = plain(raw)

    assert line.rank == rank
    assert text is None or line.text == text


def test_the_prefix_beats_a_rank_inside_which_may_be_one_of_a_group():
    assert plain("[rank13]:[E218 04:54:22.8 x.cpp:616] [Rank 1] Watchdog").rank == 13


def test_clocks_of_one_kind_are_in_order():
    early, late = clock("[E321 02:07:08.4 x.cpp:1] a"), clock("[E1206 02:07:08.4 x.cpp:1] b")
    assert early is not None
    assert late is not None
    assert early.form == late.form
    assert early.at < late.at
    other = clock("[2024-02-16 05:48:02,123] c")
    assert other is not None
    assert other.form != early.form
    assert clock("no time at all") is None


@pytest.mark.parametrize(
    ("name", "rank"), [("rank-00003.log", 3), ("log_12.err", 12), ("train.log", None)]
)
def test_a_file_s_name_tells_its_rank(name, rank):
    assert rank_of_file(name) == rank


PREFIXES = (
    "[rank{rank}]: ",
    "[default{rank}]:",
    "[1,{rank}]<stderr>:",
    "[RANK {rank}] ",
    "{rank}: ",
    "2026-11-28T10:11:12.123Z ",
    "[2026-11-28 10:11:12,123] ",
    "\x1b[36m",
    "stderr: ",
    "(Worker pid=12, ip=10.0.0.1) ",
    "worker-1: ",
    "E0227 17:39:41.51 29 site-packages/torch/distributed/elastic/x.py:732] ",
)
ERROR = "KeyError: 'weight'"


@settings(deadline=None)
@given(st.lists(st.sampled_from(PREFIXES), max_size=4, unique=True), st.integers(0, 99_999))
@example(["{rank}: ", "stderr: ", "[2026-11-28 10:11:12,123] "], 3)  # a rank is no node's name
def test_up_to_four_prefixes_hide_no_traceback(prefixes, rank):
    """`srun --label` before torch's [rank0]:, or torchrun's [default0]: before it, hid them all."""
    before = "".join(prefix.format(rank=rank) for prefix in prefixes)
    scanner = LogScanner("train.log")
    for line in ("Traceback (most recent call last):", '  File "/a.py", line 1, in f', ERROR):
        scanner.feed(f"{before}{line}\n".encode())
    [found] = scanner.finish().sightings

    assert (found.text, found.kind, found.place) == (ERROR, "code", "/a.py:1 in f")
    assert found.rank == (rank if "{rank}" in "".join(prefixes) else None)


def test_the_innermost_rank_counts():
    """The outer one may be a node's task of srun, or a rank's number on its node."""
    assert plain("1: [default0]:[rank8]: ValueError: no").rank == 8


def test_a_clock_is_no_rank():
    """TensorFlow's and ParlAI's lines begin with the hour."""
    assert plain("22:36:41.807253: E 44422 xla_util.cc:76] StackTrace:").rank is None
    assert plain("3: 22:36:41.807253: E 44422 xla_util.cc:76] StackTrace:").rank == 3


def test_what_is_drawn_over_itself_is_lines_of_their_own():
    scanner = LogScanner("train.log")
    scanner.feed(
        b" 1%|#  | 1/9\r 2%|#  | 2/9\r[rank1]: torch.OutOfMemoryError: CUDA out of memory.\n"
    )

    [found] = scanner.finish().sightings
    assert (found.kind, found.rank) == ("gpu_oom", 1)
