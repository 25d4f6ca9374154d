from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import tracemalloc
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint.format import index, reader, shard
from hpctrain.checkpoint.format.manifest import BLOCK_BYTES, TABLE_NAME, TensorEntry
from hpctrain.checkpoint.format.reader import CheckpointSource, Target
from hpctrain.checkpoint.format.shard import ShardPiece
from hpctrain.core.base.files import Patience
from hpctrain.core.testing import points
from hpctrain.errors import CheckpointError, FileSystemFault, TornCheckpoint
from tests.support import checkpoints as support
from tests.support import tilings
from tests.support.checkpoints import SHARD_0, SHARD_1
from tests.support.patience import PATIENCE_S
from tests.support.sampling import LIMITS, sample

WHOLE = support.contents(1)
MIB = 1 << 20


def target_of(piece, buffer=None):
    """A destination of the piece's region, full of 0xEE."""
    buffer = bytearray(b"\xee" * piece.nbytes) if buffer is None else buffer
    return Target(piece, buffer)


def box(begin, extent, name="model.w", dtype="F32", shape=(96, 16)):
    return ShardPiece(name, dtype, shape, begin, extent)


def everything():
    """Destinations for all tensors of the small checkpoint."""
    tensors = {piece.name: piece for pieces in support.PIECES for piece in pieces}
    return [
        target_of(box((0,) * len(one.shape), one.shape, one.name, one.dtype, one.shape))
        for one in tensors.values()
    ]


@pytest.fixture
def source(tmp_path):
    """The small checkpoint: see `support.PIECES`."""
    return CheckpointSource(tmp_path, *support.bare(tmp_path, support.PIECES, WHOLE))


@settings(max_examples=300)
@given(
    tilings.checkpoints(),
    st.sampled_from([8, 24, 64]),
    st.sampled_from([1, 100, 256, MIB]),
    st.sampled_from([(1, 0), (3, 64)]),
)
def test_any_region_is_read_from_any_tiling(tmp_path_factory, drawn, block, window, way):
    """Also where each layout has so many files that those near a region are looked for."""
    ranks, wanted = drawn
    threads, few = way
    directory = tmp_path_factory.mktemp("any")
    whole = support.contents(1, ranks)
    manifest, table = support.bare(directory, ranks, whole, block_bytes=block)
    targets = [target_of(piece) for piece in wanted]

    with mock.patch.object(reader, "WINDOW_BYTES", window), mock.patch.object(index, "FEW", few):
        CheckpointSource(directory, manifest, table).read(targets, threads=threads)

    for piece, target in zip(wanted, targets, strict=True):
        assert bytes(target.buffer) == support.bytes_of(piece, whole[piece.name])


@pytest.mark.parametrize("limit", LIMITS)
def test_any_changed_byte_of_a_chunk_is_found_by_a_full_read_and_named(source, limit):
    missed = []
    for number, name in enumerate((SHARD_0, SHARD_1)):
        rows = slice(*source.rows.rows_in(number))
        start = int(source.rows.offset[rows][0])
        with (source.path / name).open("r+b", buffering=0) as file:
            for at in sample(range(start, support.SHARDS[name]), limit):
                byte = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << at % 8]), at)
                with contextlib.suppress(TornCheckpoint):
                    source.read(everything())
                    missed.append((name, at))
                os.pwrite(file.fileno(), byte, at)

    assert missed == []
    source.read(everything())


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (box((0, 0), (96, 16)), r"model\.w, block 3 of box \[56:96, 0:16\]: digest xxh3_64:"),
        (box((90, 3), (1, 5)), r"model\.w, block 4 of box \[56:96, 0:16\]"),
        (box((60, 2), (30, 3)), r"model\.w, block 3 of box \[56:96, 0:16\]"),
    ],
)
def test_damage_is_told_with_file_tensor_and_place(source, wanted, said):
    for distance in (1, 600):
        path = source.path / SHARD_1
        support.flip_bit(path, 8 * (path.stat().st_size - support.PROOF_1 - distance))

    with pytest.raises(TornCheckpoint, match=f"^{SHARD_1}: {said}.*manifest says xxh3_64:"):
        source.read([target_of(wanted)])


def test_damage_outside_of_the_blocks_that_are_read_is_no_obstacle(source):
    path = source.path / SHARD_1
    support.flip_bit(path, 8 * (path.stat().st_size - support.PROOF_1 - 1))

    read = source.read([target_of(box((0, 0), (80, 16)))])

    assert read == 3584 + support.PROOF_0 + 1536 + support.PROOF_1


@pytest.mark.parametrize("distance", [1, 48])
def test_damage_to_a_shards_digests_is_told_as_such(source, distance):
    path = source.path / SHARD_1
    support.flip_bit(path, 8 * (path.stat().st_size - distance))

    with pytest.raises(TornCheckpoint, match=rf"^{SHARD_1}: digests \[3000:3048\]: digest of the"):
        source.read([target_of(box((90, 3), (1, 5)))])


def test_a_damaged_chunk_table_is_found_when_it_is_opened(source):
    support.flip_bit(source.path / TABLE_NAME, 8 * 600)

    with pytest.raises(TornCheckpoint, match=f"^{TABLE_NAME}: digest"):
        CheckpointSource.open(source.path, source.manifest)


def test_truncation_at_any_length_is_found_and_the_file_named(source):
    size = support.SHARDS[SHARD_0]
    for length in range(size - 1, 0, -(size // 100)):
        os.truncate(source.path / SHARD_0, length)
        with pytest.raises(TornCheckpoint) as caught:
            source.read(everything())
        assert str(caught.value) == (f"shard {SHARD_0} is {length:,} bytes, manifest says {size:,}")


def test_a_missing_shard_is_named(source):
    (source.path / SHARD_1).unlink()

    with pytest.raises(TornCheckpoint, match=f"^shard {SHARD_1} is missing$"):
        source.read(everything())
    assert source.read([target_of(box((0, 0), (56, 16)))]) == 3584 + support.PROOF_0


def test_an_error_of_the_disk_names_the_file(source, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(FileSystemFault, match=rf"^shard {SHARD_0} cannot be read: \[Errno 5\]"):
        source.read(everything())


def test_a_fault_put_at_the_read_point_is_the_disks(source, monkeypatch):
    def reach(name, **_):
        if name == "read.block":
            raise OSError(5, "put there")

    monkeypatch.setattr(points, "reach", reach)
    with pytest.raises(FileSystemFault, match="put there"):
        source.read(everything())


def test_a_handle_that_went_stale_is_opened_again(source, monkeypatch):
    stale, real_open, real_read = set(), os.open, os.preadv

    def opened(path, *args, **options):
        handle = real_open(path, *args, **options)
        if opened.first:
            stale.add(handle)
        else:
            stale.discard(handle)
        opened.first = False
        return handle

    def read(handle, *args):
        if handle in stale:
            raise OSError(116, "Stale file handle")
        return real_read(handle, *args)

    opened.first = True
    patient = CheckpointSource.open(source.path, source.manifest, Patience(0.01))
    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "preadv", read)

    assert patient.read(everything()) > 0


def test_calls_that_give_less_than_asked_for_are_repeated(source, monkeypatch):
    real = os.preadv

    def few(file, buffers, position):
        first = next(buffer for buffer in buffers if len(buffer))
        return real(file, [first[:7]], position)

    monkeypatch.setattr(os, "preadv", few)
    targets = everything()
    source.read(targets)

    for target in targets:
        assert bytes(target.buffer) == WHOLE[target.piece.name]


def test_swapped_shards_of_one_size_are_found(tmp_path):
    ranks = [[box((0, 0), (48, 16))], [box((48, 0), (48, 16))]]
    source = CheckpointSource(tmp_path, *support.bare(tmp_path, ranks, WHOLE))
    (tmp_path / SHARD_0).rename(tmp_path / "spare")
    (tmp_path / SHARD_1).rename(tmp_path / SHARD_0)
    (tmp_path / "spare").rename(tmp_path / SHARD_1)

    for row in (0, 48):
        with pytest.raises(TornCheckpoint, match="damaged bytes"):
            source.read([target_of(box((row, 0), (1, 1)))])


def test_a_shard_of_another_run_is_found(source, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    support.bare(other, support.PIECES, support.contents(2))
    shutil.copy(other / SHARD_0, source.path / SHARD_0)

    with pytest.raises(TornCheckpoint, match=f"^{SHARD_0}: digests .*damaged bytes"):
        source.read(everything())


def misfits():
    whole = box((0, 0), (96, 16))
    return {
        "model.v is not in the checkpoint": box((0, 0), (96, 16), "model.v"),
        "model.w is F32[96,16] in the checkpoint, BF16[96,16] is wanted": replace(
            whole, dtype="BF16"
        ),
        "model.w is F32[96,16] in the checkpoint, F32[96,15] is wanted": box(
            (0, 0), (96, 15), shape=(96, 15)
        ),
        "model.w is F32[96,16], and [7, 16] from [90, 0] is not in it": box((90, 0), (7, 16)),
        "model.w is F32[96,16], and [96, 16] from [1, 0] is not in it": box((1, 0), (96, 16)),
        "model.w is F32[96,16], and [7] from [0, 0] is not in it": box((0, 0), (7,)),
        "model.w is F32[96,16], and [2] from [1535] is not in it": replace(
            whole, begin=(1535,), extent=(2,), flat=True
        ),
    }


@pytest.mark.parametrize("said", misfits())
def test_what_does_not_fit_is_refused_before_a_byte_is_read(source, monkeypatch, said):
    monkeypatch.setattr(os, "preadv", None)
    good = target_of(box((0, 0), (96, 16)))

    with pytest.raises(CheckpointError) as caught:
        source.read([good, target_of(misfits()[said])])

    assert str(caught.value) == f"{source.path.name} cannot be loaded here: {said}"
    assert set(good.buffer) == {0xEE}


@pytest.mark.parametrize(
    "buffer",
    [bytearray(5), bytes(6144), np.zeros((16, 96), np.float32).T, np.zeros((97, 16), np.float32)],
    ids=["short", "read-only", "in another order", "long"],
)
def test_memory_that_is_not_the_boxs_is_refused(source, buffer):
    with pytest.raises(CheckpointError, match=r"6,144 writable ones in a row are wanted$"):
        source.read([target_of(box((0, 0), (96, 16)), buffer)])


def test_of_many_misfits_three_are_told_and_the_rest_counted(source):
    targets = [target_of(box((0, 0), (96, 16), f"new.{number}")) for number in range(5)]

    with pytest.raises(CheckpointError) as caught:
        source.read(targets)

    assert str(caught.value).endswith(
        ": new.0 is not in the checkpoint; new.1 is not in the checkpoint; "
        "new.2 is not in the checkpoint (and 2 more)"
    )


def test_a_region_that_no_chunk_covers_is_never_left_as_it_was(source):
    first, *rest = source.manifest.tensors
    source.manifest.tensors[:] = [TensorEntry(first.name, first.dtype, (98, 16)), *rest]
    wanted = target_of(box((90, 0), (8, 16), shape=(98, 16)))

    with pytest.raises(CheckpointError, match=r"model\.w lacks 32 of the elements that are wanted"):
        source.read([wanted])


def test_memory_of_any_kind_is_filled(tmp_path):
    ranks = [
        [
            ShardPiece("c", "C64", (3, 2), (0, 0), (3, 2)),
            ShardPiece("b", "BOOL", (), (), ()),
            ShardPiece("n", "F32", (0,), (0,), (0,)),
        ]
    ]
    whole = {"c": np.arange(6, dtype=np.complex64).tobytes(), "b": b"\1", "n": b""}
    source = CheckpointSource(tmp_path, *support.bare(tmp_path, ranks, whole))
    many, scalar = np.zeros((3, 2), np.complex64), np.zeros((), bool)
    empty = np.zeros(0, np.float32)

    pieces = ranks[0]
    buffers = [many, scalar, empty]
    source.read([target_of(piece, buffer) for piece, buffer in zip(pieces, buffers, strict=True)])

    assert many.ravel().tolist() == list(range(6))
    assert scalar
    assert source.read([]) == source.read([target_of(pieces[2], empty)]) == 0


def test_names_and_entries_are_those_of_the_manifest(source):
    assert source.names == ["model.w", "model.b", "optim.step", "model.none"]
    assert source.entry("model.b") == TensorEntry("model.b", "BF16", (100,))
    with pytest.raises(CheckpointError, match=r"^model\.c is not in the checkpoint"):
        source.entry("model.c")


@pytest.mark.parametrize("threads", [1, 3])
def test_all_bytes_that_were_read_are_told(source, monkeypatch, threads):
    monkeypatch.setattr(reader, "WINDOW_BYTES", 1)
    told, reached = [], []
    monkeypatch.setattr(points, "reach", lambda name, **about: reached.append((name, about)))

    total = source.read(everything(), threads=threads, on_bytes=told.append)

    proofs = support.PROOF_0 + support.PROOF_1
    assert total == sum(told) == sum(len(content) for content in WHOLE.values()) + proofs
    blocks = [about for name, about in reached if name == "read.block"]
    assert sum(about["bytes"] for about in blocks) == total
    assert {about["path"].name for about in blocks} == {SHARD_0, SHARD_1}
    assert reached[-1] == ("read.done", {"path": source.path, "step": 1000, "bytes": total})


def test_threads_read_at_the_same_time(source, monkeypatch):
    monkeypatch.setattr(reader, "WINDOW_BYTES", 1)
    together, came = threading.Barrier(3), set()

    def meet(_):
        if threading.get_ident() not in came:
            came.add(threading.get_ident())
            together.wait(timeout=PATIENCE_S)

    source.read(everything(), threads=3, on_bytes=meet)

    assert len(came) == 3


def test_the_first_damage_stops_all_threads():
    everybody, taken, many = threading.Barrier(8), [], 1_000_000

    def work(items):
        mine = next(items)
        everybody.wait(timeout=PATIENCE_S)
        if mine == 7:
            raise TornCheckpoint("the last one's")
        taken.extend(items)
        return 0

    with pytest.raises(TornCheckpoint, match="the last one's"):
        reader.in_threads(range(many), 8, work)
    assert len(taken) < many - 8


def count_calls(monkeypatch):
    calls, real = [], os.preadv

    def counted(file, buffers, position):
        calls.append((position, sum(map(len, buffers))))
        return real(file, buffers, position)

    monkeypatch.setattr(os, "preadv", counted)
    return calls


def test_neighbouring_chunks_are_read_in_one_call(tmp_path, monkeypatch):
    pieces = [ShardPiece(f"t{n}", "U8", (10,), (0,), (10,)) for n in range(300)]
    source = CheckpointSource(
        tmp_path, *support.bare(tmp_path, [pieces], support.contents(1, [pieces]))
    )
    calls = count_calls(monkeypatch)

    source.read([target_of(piece) for piece in pieces])
    # The digests once; the kernel takes 1,024 buffers, MAX_PARTS keeps below it.
    assert len(calls) == 1 + 2
    calls.clear()
    source.read([target_of(piece) for piece in pieces if piece.name != "t7"])

    assert len(calls) == 1 + 3


def test_small_blocks_make_no_more_buffers_than_the_kernel_takes(tmp_path):
    ranks = [[ShardPiece("t", "U8", (100_000,), (0,), (100_000,))]]
    whole = support.contents(1, ranks)
    source = CheckpointSource(tmp_path, *support.bare(tmp_path, ranks, whole, block_bytes=8))
    target = target_of(ShardPiece("t", "U8", (100_000,), (3,), (99_990,)))

    source.read([target])

    assert bytes(target.buffer) == whole["t"][3:99_993]


def test_blocks_that_hold_nothing_of_a_column_are_not_read(tmp_path):
    rows = ShardPiece("t", "U8", (20, 256), (0, 0), (20, 256))
    whole = support.contents(1, [[rows]])
    source = CheckpointSource(tmp_path, *support.bare(tmp_path, [[rows]], whole, block_bytes=64))
    column = ShardPiece("t", "U8", (20, 256), (0, 70), (20, 50))
    target = target_of(column)

    assert source.read([target]) == 20 * 64 + 8 * (1 + 20 * 256 // 64)
    assert target.buffer == support.bytes_of(column, whole["t"])


@pytest.mark.parametrize("ranks", [3, 8])
def test_no_more_than_115_percent_of_what_is_needed_is_read(tmp_path, ranks):
    shape = (4096, 2048)
    saved = [[box((at, 0), (1024, 2048), shape=shape)] for at in range(0, 4096, 1024)]
    content = {"model.w": np.arange(4096 * 2048, dtype=np.uint32).tobytes()}
    manifest = support.manifest(1000, [], block_bytes=BLOCK_BYTES)
    parts = []
    for rank, (piece,) in enumerate(saved):
        low = piece.begin[0] * 8192
        data = memoryview(content["model.w"])[low : low + piece.nbytes]
        report = shard.write(tmp_path / shard.file_name(rank), [piece], [data])
        parts.append(support.part_of([piece], report))
    support.commit.write_table(tmp_path, manifest, parts)
    source = CheckpointSource.open(tmp_path, manifest)
    per = -(-4096 // ranks)

    total = 0
    for low in range(0, 4096, per):
        rows = min(per, 4096 - low)
        target = target_of(box((low, 0), (rows, 2048), shape=shape))
        total += source.read([target])
        assert target.buffer == content["model.w"][low * 8192 : (low + rows) * 8192]

    assert total <= 1.15 * len(content["model.w"])


@pytest.mark.parametrize("columns", [(0, 4096), (100, 1000)])
def test_beside_the_destination_little_memory_is_taken(tmp_path, columns):
    shape = (4096, 4096)
    piece = box((0, 0), shape, shape=shape)
    content = np.arange(4096 * 4096, dtype=np.uint32).reshape(shape)
    manifest = support.manifest(1000, [], block_bytes=BLOCK_BYTES)
    report = shard.write(tmp_path / SHARD_0, [piece], [content.reshape(-1).data.cast("B")])
    support.commit.write_table(tmp_path, manifest, [support.part_of([piece], report)])
    low, count = columns
    into = np.empty((4096, count), np.uint32)
    target = target_of(box((0, low), (4096, count), shape=shape), into)

    tracemalloc.start()
    CheckpointSource.open(tmp_path, manifest).read([target], threads=2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert (into == content[:, low : low + count]).all()
    assert peak <= 8 * MIB


def test_reading_and_verifying_need_no_torch():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import hpctrain.checkpoint.format.reader, hpctrain.checkpoint.store.verify\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
