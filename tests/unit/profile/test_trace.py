"""Shares from traces as Kineto writes them; tests/engines/test_profile_run.py reads real ones."""

from __future__ import annotations

import gzip
import json

import pytest

from hpctrain.observe.profile.trace import Kind, TraceUnreadable, read_trace
from tests.support.traces import CPU, GPU


def write(folder, text):
    path = folder / "rank-00003.steps-100-100.pt.trace.json.gz"
    path.write_bytes(gzip.compress(text.encode()))
    return path


def percents(shares):
    return {kind: round(100 * share) for kind, share in shares.items()}


def test_a_gpu_trace_is_divided_by_what_the_gpu_does(tmp_path):
    found = read_trace(write(tmp_path, GPU), 3)

    assert (found.device, found.rank, found.seconds) == ("gpu", 3, 0.001)
    assert found.steps == {100: 0.001}
    assert percents(found.shares) == {
        Kind.COMPUTE: 35,
        Kind.COMMUNICATION: 30,  # the 350 us less the 50 beside which the GEMM ran
        Kind.MEMORY: 10,  # 40 of the copy, 60 of cudaMalloc
        Kind.DATA: 9,  # 120 us less the 30 in which the copy ran already
        Kind.SAVE: 10,
        Kind.HOST: 6,
    }
    assert found.hidden == pytest.approx(0.05)


def test_a_cpu_trace_is_divided_by_what_its_threads_do(tmp_path):
    found = read_trace(write(tmp_path, CPU), 0)

    assert found.device == "cpu"
    assert percents(found.shares) == {
        Kind.COMPUTE: 24,  # the layer, and 4 around the wait
        Kind.COMMUNICATION: 46,  # 20 of gloo alone, 26 of the wait
        Kind.MEMORY: 0,
        Kind.DATA: 20,  # stacking a batch is loading, not computing
        Kind.SAVE: 0,
        Kind.HOST: 10,
    }
    assert found.hidden == pytest.approx(0.1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[: len(whole) // 2],
        lambda whole: b"not gzip" + whole,
        lambda whole: whole[:20] + b"\0\0\0\0" + whole[24:],
        lambda _whole: gzip.compress(b'{"events": []}'),
        lambda _whole: gzip.compress(json.dumps({"traceEvents": []}).encode()),
        lambda _whole: gzip.compress(b"[1, 2]"),
        lambda _whole: gzip.compress(b'{"traceEvents": [1]}'),
        lambda _whole: gzip.compress(b'{"traceEvents": [{"ph": "X"}]}'),
        lambda _whole: gzip.compress(
            b'{"traceEvents": [{"ph": "X", "name": "ProfilerStep#1", "ts": 1, "dur": 0}]}'
        ),
    ],
)
def test_a_damaged_trace_is_one_line(tmp_path, damage):
    path = write(tmp_path, GPU)
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(TraceUnreadable, match=r"cannot be read|holds no step") as told:
        read_trace(path, 3)
    assert "\n" not in str(told.value)
