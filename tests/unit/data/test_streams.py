"""Token files of other programs are read as they are, and what is damaged is one line."""

import os
import pickle
import random
import struct
import tracemalloc

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hpctrain.errors import NotFound, UsageError
from hpctrain.train.data.streams import TokenSequences, open_stream
from hpctrain.train.data.tokens import write_tokens
from tests.support.fuzzing import cases, chances
from tests.support.tokens import DOCUMENTS, MEGATRON_CODES, megatron

FLAT = [token for document in DOCUMENTS for token in document]
ENDS = [3, 3, 4, 9, 11]


def arrow(folder, rows=DOCUMENTS, **saving):
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(str(folder), **saving)
    return folder


def row_of(stream):
    return stream.read(0, stream.length).tolist()


# ---- what is read


@pytest.mark.parametrize("dtype", MEGATRON_CODES)
@pytest.mark.parametrize("modes", [False, True])
def test_megatrons_files_of_any_dtype(tmp_path, dtype, modes):
    stream = open_stream(megatron(tmp_path / "corpus.bin", dtype=dtype, modes=modes))

    assert row_of(stream) == FLAT
    assert stream.document_ends().tolist() == ENDS


@pytest.mark.parametrize("name", ["corpus.bin", "corpus.idx", "corpus"])
def test_megatrons_files_by_any_of_their_names(tmp_path, name):
    megatron(tmp_path / "corpus.bin")

    assert row_of(open_stream(tmp_path / name)) == FLAT


def test_a_megatron_document_of_several_sequences_ends_once(tmp_path):
    stream = open_stream(megatron(tmp_path / "corpus.bin", documents=[0, 2, 5]))

    assert stream.document_ends().tolist() == [3, 11]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_bare_numbers_as_nanogpt_writes_them(tmp_path, dtype):
    np.arange(7, dtype=dtype).tofile(tmp_path / "train.bin")

    stream = open_stream(tmp_path / "train.bin", dtype=dtype)

    assert row_of(stream) == list(range(7))
    assert stream.document_ends() is None


def test_our_own_files_say_their_dtype(tmp_path):
    chunks = [np.array(FLAT, "<u4").tobytes()]
    write_tokens(tmp_path / "t.bin", chunks, dtype="uint32", vocabulary=99, source={})

    assert row_of(open_stream(tmp_path / "t.bin")) == FLAT


@pytest.mark.parametrize("shards", [1, 3])
def test_folders_of_hugging_face_also_of_several_files(tmp_path, shards):
    stream = open_stream(arrow(tmp_path / "saved", num_shards=shards))

    assert row_of(stream) == FLAT
    assert stream.document_ends().tolist() == ENDS
    for first in range(stream.length):
        for last in range(first + 1, stream.length + 1):
            assert stream.read(first, last).tolist() == FLAT[first:last]


def test_rows_of_a_fixed_size_and_large_lists_are_read_too(tmp_path):
    rows = [[1, 2], [3, 4], [5, 6]]
    for number, feature in enumerate(
        [
            datasets.List(datasets.Value("uint16"), length=2),
            datasets.LargeList(datasets.Value("int64")),
        ]
    ):
        folder = tmp_path / f"{number}"
        saved = datasets.Dataset.from_dict(
            {"ids": rows}, features=datasets.Features({"ids": feature})
        )
        saved.save_to_disk(str(folder))

        assert row_of(open_stream(folder, column="ids")) == [1, 2, 3, 4, 5, 6]


def test_sequences_share_a_token_and_are_what_a_loader_reads(tmp_path):
    sequences = TokenSequences(megatron(tmp_path / "corpus.bin"), seq_len=4)

    assert len(sequences) == 2
    assert [s.tolist() for s in (sequences[0], sequences[1])] == [FLAT[0:5], FLAT[4:9]]
    batch = next(iter(DataLoader(sequences, batch_size=2)))
    assert (batch.dtype, tuple(batch.shape)) == (torch.int64, (2, 5))
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"sequence {index} is not one of 2"):
            sequences[index]


def test_a_row_is_mapped_and_not_copied(tmp_path):
    np.zeros(1 << 22, np.uint16).tofile(tmp_path / "train.bin")
    tracemalloc.start()
    try:
        stream = open_stream(tmp_path / "train.bin")
        view = stream.read(0, stream.length)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 1 << 20
    assert not view.flags.owndata


@pytest.mark.parametrize("make", [megatron, arrow])
def test_a_spawned_worker_is_sent_a_path_and_no_tokens(tmp_path, make):
    many = [list(range(256))] * 400
    path = tmp_path / "corpus.bin"
    megatron(path, sequences=many) if make is megatron else arrow(path, many)
    sequences = TokenSequences(path, seq_len=100)
    first = sequences[0]

    sent = pickle.dumps(sequences)

    assert len(sent) < 1000
    assert (pickle.loads(sent)[0] == first).all()  # noqa: S301 - our own bytes


# ---- what is refused


def corrupt(path, at, form, *values):
    raw = bytearray(path.read_bytes())
    struct.pack_into(form, raw, at, *values)
    path.write_bytes(raw)


SIZES, POINTERS, LAST = 34, 34 + 4 * 5, 34 + 12 * 5


@pytest.mark.parametrize(
    ("at", "form", "value", "why"),
    [
        (0, "<B", 0, "does not begin as an index of Megatron's"),
        (9, "<Q", 2, "is of version 2"),
        (17, "<B", 7, "dtype has the code 7"),
        (18, "<Q", 2**63, "is it cut off"),
        (26, "<Q", 2**64 - 1, "is it cut off"),
        (SIZES, "<i", -1, "a sequence has a negative length"),
        (SIZES, "<i", 4, "do not lie one behind the other"),
        (SIZES + 16, "<i", 2**31 - 1, "its index says"),
        (POINTERS + 8, "<q", -8, "do not lie one behind the other"),
        (LAST, "<q", 1, "end at sequence 5 of 5"),
        (LAST + 8, "<q", 4, "documents are not in order"),
        (LAST + 40, "<q", 6, "end at sequence 6 of 5"),
    ],
)
def test_an_index_that_cannot_be_is_refused(tmp_path, at, form, value, why):
    path = megatron(tmp_path / "corpus.bin")
    corrupt(path.with_suffix(".idx"), at, form, value)

    with pytest.raises(UsageError, match=why):
        open_stream(path)


def test_files_that_were_cut_off_are_refused(tmp_path):
    path = megatron(tmp_path / "corpus.bin")
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    with pytest.raises(UsageError, match="has 20 bytes, its index says 22; is it cut off"):
        open_stream(path)
    path.write_bytes(whole)
    index = path.with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(UsageError, match="is it cut off"):
        open_stream(path)


@pytest.mark.parametrize("name", ["corpus.bin", "corpus.idx"])
def test_files_with_more_than_the_index_says_are_refused(tmp_path, name):
    path = megatron(tmp_path / "corpus.bin")
    with (tmp_path / name).open("ab") as file:
        file.write(bytes(8))

    with pytest.raises(UsageError, match=name):
        open_stream(path)


def test_an_index_without_its_file_is_not_there(tmp_path):
    megatron(tmp_path / "corpus.bin").unlink()

    with pytest.raises(NotFound, match=r"corpus\.bin"):
        open_stream(tmp_path / "corpus.idx")


def test_bare_numbers_that_cannot_be_are_refused(tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(b"abc")
    with pytest.raises(UsageError, match="3 bytes are not a whole number of uint16 tokens"):
        open_stream(path)
    with pytest.raises(UsageError, match="dtype='float32' is not one of uint16, uint32"):
        open_stream(path, dtype="float32")
    path.write_bytes(struct.pack("<i", 20240520) + bytes(1020))
    with pytest.raises(UsageError, match=r"header of llm\.c"):
        open_stream(path)


def test_too_few_tokens_for_a_sequence_are_refused(tmp_path):
    path = megatron(tmp_path / "corpus.bin")
    with pytest.raises(UsageError, match="has 11 tokens, too few for one sequence of 11"):
        TokenSequences(path, seq_len=11)
    with pytest.raises(UsageError, match="seq_len=0 is not"):
        TokenSequences(path, seq_len=0)
    path.with_suffix(".idx").unlink()
    path.write_bytes(b"")
    with pytest.raises(UsageError, match="has 0 tokens"):
        TokenSequences(path, seq_len=4)


def test_folders_that_are_none_of_hugging_face_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no state\.json"):
        open_stream(tmp_path)
    both = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"input_ids": DOCUMENTS})})
    both.save_to_disk(str(tmp_path / "both"))
    with pytest.raises(UsageError, match="holds several datasets"):
        open_stream(tmp_path / "both")
    assert row_of(open_stream(tmp_path / "both" / "train")) == FLAT
    with pytest.raises(UsageError, match="no column 'text'; there are input_ids"):
        open_stream(tmp_path / "both" / "train", column="text")


@pytest.mark.parametrize("rows", [["a text"], [[0.5]], [1, 2]])
def test_columns_that_are_no_lists_of_tokens_are_refused(tmp_path, rows):
    with pytest.raises(UsageError, match="not of lists of whole numbers"):
        open_stream(arrow(tmp_path / "saved", rows))


def test_a_column_with_missing_values_is_refused(tmp_path):
    for number, rows in enumerate([[[1], None], [[1, None]]]):
        with pytest.raises(UsageError, match="rows without a value"):
            open_stream(arrow(tmp_path / f"{number}", rows))


def test_what_datasets_cannot_load_is_one_line(tmp_path):
    folder = arrow(tmp_path / "saved")
    (folder / "state.json").write_text("{}")

    with pytest.raises(UsageError, match="datasets cannot load it") as refused:
        open_stream(folder)

    assert "\n" not in str(refused.value)


def test_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "train.bin")

    with pytest.raises(UsageError, match="not an ordinary file"):
        open_stream(tmp_path / "train.bin")


@cases(400, 20_000)
def test_damaged_indexes_are_one_line_and_take_no_memory(tmp_path, begin, end):
    """A stranger's index: read as it says, or refused; never another error, never much memory."""
    path = megatron(tmp_path / "corpus.bin")
    index = path.with_suffix(".idx")
    whole = index.read_bytes()
    refused, most_bytes = [], 0
    tracemalloc.start()
    try:
        for number, chance in chances(begin, end):
            index.write_bytes(damage(whole, chance))
            before, _ = tracemalloc.get_traced_memory()  # what is kept here grows
            tracemalloc.reset_peak()
            try:
                stream = open_stream(path)
                assert len(row_of(stream)) == stream.length
                ends = stream.document_ends()
                assert ends[-1] == stream.length
                assert (np.diff(ends) >= 0).all(), number
            except UsageError as error:
                refused.append(str(error))
            _, peak = tracemalloc.get_traced_memory()
            most_bytes = max(most_bytes, peak - before)
    finally:
        tracemalloc.stop()

    assert len(refused) > (end - begin) * 0.6
    assert not [line for line in refused if "\n" in line]
    assert most_bytes < 1 << 20


def damage(whole, chance: random.Random):
    raw = bytearray(whole)
    for _ in range(chance.choice((1, 1, 2, 5))):
        kind = chance.randrange(5)
        at = chance.randrange(len(raw)) if raw else 0
        if kind == 0:
            del raw[at:]
        elif kind == 1 and raw:
            raw[at] ^= 1 << chance.randrange(8)
        elif kind == 2:
            raw[at:at] = chance.randbytes(chance.randrange(1, 20))
        elif kind == 3:
            raw[at : at + 8] = struct.pack("<q", chance.choice((-1, 0, 1, 2**31, 2**62, -(2**63))))
        else:
            raw[at : at + 4] = struct.pack("<i", chance.choice((-1, 0, 1, 2**31 - 1, -(2**31))))
    return bytes(raw)
