"""Iterable datasets of the real libraries over real ranks: 4, then 2, then 3 of them."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest

from hpctrain.errors import HpctrainError
from tests.support.gloo import launch
from tests.support.sampling import some

SHARDS, EACH = 12, 20


class Numbers:
    """A class of a user's own, with state: some shards, each of so many numbers."""

    def __init__(self, shards, each=EACH):
        self.shards, self.each, self.at = list(shards), each, 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        while self.at < len(self.shards) * self.each:
            shard, number = divmod(self.at, self.each)
            self.at += 1
            yield self.shards[shard] * self.each + number


def of_the_user(reader, readers):
    return Numbers(range(SHARDS)[reader::readers])


def uneven(reader, readers):
    """Readers of very different lengths, two of them without a sample."""
    return Numbers([reader], each=reader * 3 if reader > 1 else 0)


def hugging_face(kind):
    from datasets import Dataset

    rows = Dataset.from_dict({"i": list(range(SHARDS * EACH))})
    stream = rows.to_iterable_dataset(num_shards=5 if kind == "few shards" else SHARDS)
    if kind == "mapped":
        stream = stream.map(lambda row: {"i": row["i"]}, batched=True, batch_size=7)
    if kind in {"buffered", "shards shuffled"}:
        stream = stream.shuffle(seed=3, buffer_size=8 if kind == "buffered" else 1)
    return stream


def torchdata(reader, readers):
    from torchdata.stateful_dataloader import StatefulDataLoader

    own = list(range(SHARDS * EACH))[reader::readers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, to torchdata 0.11
        return StatefulDataLoader(own, batch_size=None, shuffle=True)


class Nodes:
    def __call__(self, reader, readers):
        from torchdata import nodes

        own = list(range(SHARDS * EACH))[reader::readers]
        return nodes.Loader(nodes.Batcher(nodes.IterableWrapper(own), 1, drop_last=False))


def web_dataset(folder):
    import webdataset

    urls = [str(folder / f"{shard}.tar") for shard in range(SHARDS)]
    for shard, url in enumerate(urls):
        with webdataset.TarWriter(url) as tar:
            for number in range(EACH):
                index = shard * EACH + number
                tar.write({"__key__": f"{index:05d}", "txt": str(index)})

    def share(reader, readers):
        own = urls[reader::readers]
        return own and webdataset.WebDataset(own, shardshuffle=False, nodesplitter=None).decode()

    return share


def number_of(sample):
    if isinstance(sample, list):
        return number_of(sample[0])
    if isinstance(sample, dict):
        return int(sample["i"] if "i" in sample else sample["txt"])
    return int(sample)


def numbers_of(samples):
    return [number_of(sample) for sample in samples]


def alone_or_together():
    """How this rank's loader speaks with those of the others."""
    from hpctrain.core.world import gather
    from hpctrain.train.joining_ranks import join_world
    from hpctrain.train.runtime.program import Program

    world = join_world()
    return {"place": Program(world).data_place, "gather": partial(gather, world)}


def attempt(dataset, state, steps, *, workers=0, **rules):
    """What this rank's batches used, and the state behind them; of an epoch for `steps` < 0."""
    from hpctrain.train.data.stream_loader import StreamLoader, StreamRules

    loader = StreamLoader(
        dataset,
        StreamRules(**{"global_batch": 10, **rules}),
        {"workers": workers, "collate_fn": numbers_of},
        **alone_or_together(),
        watch=nullcontext(),
    )
    if state is not None:
        loader.load_state_dict(state)
    used, weights = [], []

    def note(batch):
        (piece,) = loader.taken.pieces
        used.extend(n for n, weight in zip(batch, piece.weights, strict=True) if weight)
        weights.append(loader.weight)

    if steps < 0:
        for batch in loader:
            note(batch)
    for _ in range(steps):
        note(next(loader))
    state = loader.state_dict()
    loader.close()
    return used, weights, json.loads(json.dumps(state))


def live(dataset, lives, **rules):
    """All samples that the ranks of each life have used, and the last state."""
    state, samples = None, []
    for ranks, steps in lives:
        rows = launch(attempt, ranks, dataset=dataset, state=state, steps=steps, **rules)
        samples += [sample for used, _, _ in rows for sample in used]
        assert all(of_rank == rows[0][2] for _, _, of_rank in rows)
        state = rows[0][2]
        assert len({len(weights) for _, weights, _ in rows}) == 1
        for of_step in zip(*(weights for _, weights, _ in rows), strict=True):
            assert sum(of_step) == pytest.approx(ranks)
    return samples, state


DATASETS = {
    "a user's class": (of_the_user, {}),
    "Hugging Face": ("plain", {}),
    "Hugging Face, few shards": ("few shards", {}),
    "Hugging Face, mapped": ("mapped", {}),
    "Hugging Face, shards shuffled": ("shards shuffled", {}),
    "Hugging Face, buffer": ("buffered", {"replay": True}),
    "torchdata": (torchdata, {}),
    "torchdata.nodes": (Nodes(), {}),
    "webdataset": (web_dataset, {"replay": True}),
    "a reader for each sample and more": (of_the_user, {"readers": 17}),
}


@pytest.mark.parametrize(("name", "workers"), some(list(product(DATASETS, [0, 2])), 4))
def test_each_sample_is_used_once_over_4_2_and_3_ranks(name, workers, tmp_path):
    dataset, rules = DATASETS[name]
    if isinstance(dataset, str):
        dataset = hugging_face(dataset)
    if dataset is web_dataset:
        dataset = web_dataset(tmp_path)

    samples, state = live(dataset, [(4, 5), (2, 7), (3, -1)], workers=workers, **rules)

    assert Counter(samples) == Counter(range(SHARDS * EACH))
    assert (state["epoch"], state["samples_consumed"]) == (1, SHARDS * EACH)


def test_ranks_that_run_out_at_different_times_keep_step_with_weight_0():
    samples, state = live(uneven, [(3, 3), (4, -1)], readers=8)

    expected = [r * r * 3 + n for r in range(2, 8) for n in range(r * 3)]
    assert sorted(samples) == sorted(expected)
    assert state["epoch"] == 1


def test_as_many_ranks_go_on_as_if_nothing_had_stopped_them():
    for workers in (0, 2):
        stopped, _ = live(of_the_user, [(2, 3), (2, 4)], workers=workers)
        first, second = (
            [row[0] for row in launch(attempt, 2, dataset=of_the_user, state=None, steps=7,
                                      workers=workers)]
        )  # fmt: skip
        assert stopped == first[:15] + second[:15] + first[15:] + second[15:]


def _fails(dataset):
    """What each rank says of a reader that raises, and how it goes on."""
    from hpctrain.train.data.stream_loader import StreamLoader, StreamRules

    loader = StreamLoader(
        dataset,
        StreamRules(8, readers=4),
        {"collate_fn": numbers_of},
        **alone_or_together(),
        watch=nullcontext(),
    )
    used, lines = [], []
    while loader.epoch == 0:
        try:
            batch = next(loader)
        except (OSError, HpctrainError) as error:
            lines.append((type(error).__name__, str(error), *getattr(error, "__notes__", [])))
            continue
        if loader.epoch == 0:
            used += batch[: int(sum(loader.taken.pieces[0].weights))]
    return used, lines


class Unsteady(Numbers):
    """Raises once in the life of a process, at the sixth number of shard 2."""

    raised = False

    def __iter__(self):
        for number in super().__iter__():
            if number == 2 * EACH + 6 and not Unsteady.raised:
                Unsteady.raised = True
                raise OSError("stale file handle")
            yield number


def unsteady(reader, readers):
    return Unsteady([reader])


def test_a_reader_that_raises_is_said_on_every_rank_and_its_batch_is_the_next_one_again():
    rows = launch(_fails, 2, dataset=unsteady)

    assert sorted(sample for used, _ in rows for sample in used) == list(range(4 * EACH))
    (own,), (other,) = (lines for _, lines in rows)
    assert own[:2] == ("OSError", "stale file handle")
    assert own[2] == "run.stream_loader: reader 2 of 4, after 6 samples of epoch 0"
    assert other[0] == "HpctrainError"
    assert "rank 0 could not read its batch: OSError: stale file handle" in other[1]
