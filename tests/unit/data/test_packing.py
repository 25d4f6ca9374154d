"""Documents packed into sequences: nothing left out, and nothing seen of a neighbour."""

import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from hpctrain.errors import UsageError
from hpctrain.train.data import streams
from hpctrain.train.data.streams import IGNORED, PackedDocuments, cu_seqlens

END = 99


def packed(folder, documents, seq_len):
    """Of a file in which a token ends each document."""
    tokens = [token for document in documents for token in [*document, END]]
    np.array(tokens, np.uint16).tofile(Path(folder) / "train.bin")
    return PackedDocuments(Path(folder) / "train.bin", seq_len, end_token=END), tokens


def expected(documents, tokens, seq_len):
    """The same, token by token."""
    whose = [n for n, document in enumerate(documents) for _ in [*document, END]]
    for first in range(0, (len(tokens) - 1) // seq_len * seq_len, seq_len):
        sample = {"tokens": [], "targets": [], "position_ids": [], "document_ids": []}
        for at in range(first, first + seq_len):
            same = at > first and whose[at] == whose[at - 1]
            ids, places = sample["document_ids"], sample["position_ids"]
            ids.append(ids[-1] + (not same) if ids else 0)
            places.append(places[-1] + 1 if same else 0)
            sample["tokens"].append(tokens[at])
            sample["targets"].append(tokens[at + 1] if whose[at + 1] == whose[at] else IGNORED)
        yield sample


@settings(max_examples=60)
@given(
    documents=st.lists(st.lists(st.integers(0, 50), max_size=9), min_size=2, max_size=12),
    seq_len=st.integers(1, 12),
)
def test_every_token_is_in_its_document_and_place(documents, seq_len):
    tokens = sum(len(document) + 1 for document in documents)
    if tokens <= seq_len:
        return
    with tempfile.TemporaryDirectory() as folder:
        sequences, tokens = packed(folder, documents, seq_len)

        got = [{k: v.tolist() for k, v in sequences[i].items()} for i in range(len(sequences))]

    assert got == list(expected(documents, tokens, seq_len))


def test_ends_are_found_where_pieces_of_the_file_meet(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "_AT_ONCE", 3)
    documents = [[1, 2], [3], [], [4, 5, 6, 7], [8]]

    sequences, tokens = packed(tmp_path, documents, 4)

    got = [{k: v.tolist() for k, v in sequences[i].items()} for i in range(len(sequences))]
    assert got == list(expected(documents, tokens, 4))


def test_documents_without_tokens_count_nothing(tmp_path):
    from tests.support.tokens import megatron

    path = megatron(tmp_path / "corpus.bin", sequences=[[], [1, 2], [], [], [3, 4, 5]])

    sample = PackedDocuments(path, 4)[0]

    assert sample["document_ids"].tolist() == [0, 0, 1, 1]
    assert sample["targets"].tolist() == [2, IGNORED, 4, 5]


def test_a_batch_of_torchs_and_its_lengths(tmp_path):
    sequences, _ = packed(tmp_path, [[1, 2], [3], [], [4, 5, 6, 7], [8, 9, 10]], 5)
    batch = default_collate([sequences[0], sequences[1]])

    begins, longest = cu_seqlens(batch["document_ids"])

    assert batch["tokens"].dtype == torch.int64
    assert batch["document_ids"].tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]]
    assert (begins.tolist(), begins.dtype, longest) == ([0, 3, 5, 6, 10], torch.int32, 4)


def test_targets_of_other_documents_count_nothing_in_the_loss(tmp_path):
    sequences, _ = packed(tmp_path, [[1], [2], [3]], 2)
    sample = sequences[0]
    logits = torch.zeros(2, 100)
    logits[1, 2] = -1e9  # the neighbour's first token

    loss = cross_entropy(logits, torch.from_numpy(sample["targets"]))

    assert loss.item() == pytest.approx(np.log(100))


def test_a_spawned_worker_finds_the_ends_itself(tmp_path):
    sequences, _ = packed(tmp_path, [[1]] * 5000, 4)
    first = sequences[0]

    sent = pickle.dumps(sequences)

    assert len(sent) < 1000
    again = pickle.loads(sent)[0]  # noqa: S301 - our own bytes
    assert all((again[key] == first[key]).all() for key in first)


def test_a_file_that_does_not_say_where_documents_end_is_refused(tmp_path):
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "train.bin")

    with pytest.raises(UsageError, match="name the token that ends each"):
        PackedDocuments(tmp_path / "train.bin", 4)
