"""What torch, Python and the kernel have written is read; what is something else is not known."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.node.hangs.evidence import (
    Collective,
    Frame,
    Front,
    frames_of,
    process_state,
    recorded_of,
)

ENTRY = {
    "collective_seq_id": 3,
    "input_dtypes": ["Float"],
    "input_sizes": [[4, 2]],
    "is_p2p": False,
    "op_id": 3,
    "output_dtypes": ["Float"],
    "output_sizes": [[4, 2]],
    "p2p_seq_id": 0,
    "pg_id": 0,
    "process_group": ["0", "default_pg"],
    "profiling_name": "gloo:all_reduce",
    "record_id": 3,
    "retired": False,
    "state": "scheduled",
    "time_created_ns": 1795440852709248741,
}
STATUS = {"last_completed_collective": "2", "last_enqueued_collective": "3"}
DUMP = {
    "entries": [ENTRY],
    "pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}},
    "pg_status": {"0": STATUS, "5": STATUS},
    "version": "2.10",
}
STACKS = """Thread 0x00007f3a (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x00007f3b (most recent call first):
  File "/home/a b/train.py", line 23 in fetch_rows
  File "<string>", line ??? in <module>
"""


def test_what_torch_2_13_writes_is_read():
    recorded = recorded_of(json.dumps(DUMP))

    assert recorded is not None
    assert recorded.fronts == {"0": Front(3, 2)}
    assert recorded.collectives == (
        Collective("0", 3, "all_reduce", ((4, 2),), ("Float",), 1795440852709248741),
    )


def test_none_so_far_is_zero_and_what_two_ranks_send_is_left_out():
    status = STATUS | {"last_completed_collective": "-1"}
    dump = {"entries": [ENTRY, ENTRY | {"is_p2p": True}], "pg_status": {"0": status}}
    recorded = recorded_of(json.dumps(dump))

    assert recorded is not None
    assert recorded.fronts == {"0": Front(3, 0)}
    assert len(recorded.collectives) == 1


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{}", '{"entries": 3}', '{"entries": [3]}', b"\xff", "[" * 100_000],
)
def test_what_is_no_recording_is_not_known(text):
    assert recorded_of(text) is None


@given(st.recursive(st.none() | st.integers() | st.text(max_size=3), st.lists, max_leaves=5))
def test_a_recording_with_something_else_in_it_is_not_known(value):
    for name in ("collective_seq_id", "input_sizes", "input_dtypes", "process_group"):
        recorded = recorded_of(json.dumps(DUMP | {"entries": [ENTRY | {name: value}]}))
        assert recorded is None or isinstance(recorded.collectives[0], Collective)


def test_the_main_threads_frames_are_read_innermost_first():
    assert frames_of(STACKS) == (
        Frame("/home/a b/train.py", 23, "fetch_rows"),
        Frame("<string>", 0, "<module>"),
    )


def test_no_stacks_are_not_known():
    assert frames_of("") is None
    assert frames_of("Fatal error") is None
    assert frames_of("Current thread 0x1 (most recent call first):\n  <no Python frame>\n") == ()


@pytest.mark.parametrize(
    ("stat", "state"),
    [
        ("12 (python) S 1 2", "S"),
        ("12 (a) b (c)) T 1", "T"),
        ("", ""),
        ("12 (x", ""),
        ("1 (x)", ""),
    ],
)
def test_the_state_of_a_process_whatever_it_is_called(stat, state):
    assert process_state(stat) == state
