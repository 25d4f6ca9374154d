"""A run resumes to the bit wherever its files have gone, with any sizes of parameters."""

from __future__ import annotations

import hashlib
import os
import shutil

import pytest
import torch
from torch import nn

from hpctrain.checkpoint.store import find
from hpctrain.ledger.run.layout import RunDir
from tests.support.gloo import launch
from tests.support.resumed import resumed, start, undisturbed, values


class Uneven(nn.Module):
    """Parameters of no elements and of one, a buffer of none, and one that is never used."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.none = nn.Parameter(torch.empty(0))
        self.no_rows = nn.Parameter(torch.empty(0, 7))
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("no_columns", torch.empty(3, 0))

    def forward(self, x):
        return self.layer(x).sum() * self.scale + self.none.sum() + self.no_rows.sum()


def trained(run, model, total):
    """Train a model, and return its optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(total):
        optimizer.zero_grad()
        model(torch.full((2, 4), step / 5)).backward()
        optimizer.step()
    return optimizer


def program(run, total):
    model = Uneven()
    optimizer = trained(run, model, total)
    return values(model), [sorted(state) for state in optimizer.state.values()]


def _newest(run):
    return find.look(RunDir(run), 3).path


def _link(path, target):
    shutil.move(path, target)
    path.symlink_to(target)


def folder_of_checkpoints_is_a_link(run):
    _link(run / "checkpoints", run.parent / "elsewhere")
    return run


def checkpoint_is_a_link(run):
    _link(_newest(run), run.parent / "elsewhere")
    return run


def checkpoint_is_a_relative_link(run):
    newest = _newest(run)
    shutil.move(newest, run / "kept")
    newest.symlink_to("../kept")
    return run


def shards_are_links(run):
    for shard in _newest(run).glob("shard-*"):
        _link(shard, run.parent / shard.name)
    return run


def run_is_a_link(run):
    (run.parent / "link").symlink_to(run)
    return run.parent / "link"


def run_was_moved(run):
    return shutil.move(run, run.parent / "another name")


def run_was_copied(run):
    return shutil.copytree(run, run.parent / "copy")


def run_has_hard_links(run):
    return shutil.copytree(run, run.parent / "copy", copy_function=os.link)


PLACES = [
    folder_of_checkpoints_is_a_link,
    checkpoint_is_a_link,
    checkpoint_is_a_relative_link,
    shards_are_links,
    run_is_a_link,
    run_was_moved,
    run_was_copied,
    run_has_hard_links,
]


@pytest.mark.parametrize("move", PLACES, ids=lambda move: move.__name__)
def test_a_run_goes_on_to_the_bit_from_where_its_files_are_now(tmp_path, move):
    expected = undisturbed(tmp_path, program, 6)
    start(tmp_path / "run", program, 3)

    resumed = start(move(tmp_path / "run"), program, 6)

    assert resumed == expected


def spread_rank(folder):
    """Train two steps, and two more from the checkpoint, on shards of which some have nothing."""
    from torch.distributed.fsdp import fully_shard

    def shards(run, total):
        model = Uneven()
        model.scale = nn.Parameter(torch.tensor([2.0]))  # FSDP2 takes no scalars
        for empty in (model.none, model.no_rows):
            empty.requires_grad = False  # nor gradients without elements
        fully_shard(model)
        trained(run, model, total)
        return {name: one.full_tensor().tolist() for name, one in model.named_parameters()}

    expected = undisturbed(folder, shards, 4)
    start(folder / "run", shards, 2)
    return start(folder / "run", shards, 4) == expected


def test_shards_of_no_elements_are_saved_and_loaded(tmp_path):
    assert launch(spread_rank, 3, folder=tmp_path) == [True] * 3


# ---- large ones


class Parts(nn.Module):
    """As many parameters as asked for, each of one element."""

    def __init__(self, count):
        super().__init__()
        self.parts = nn.ParameterList(
            [nn.Parameter(torch.tensor([n / count])) for n in range(count)]
        )


def of_many_parts(count):
    def run_it(run, total):
        model = Parts(count)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
        run.track(model=model, optimizer=optimizer)
        for _ in run.steps(total):
            optimizer.zero_grad()
            torch.cat([*model.parts]).square().sum().backward()
            optimizer.step()
        steps = {float(state["step"]) for state in optimizer.state.values()}
        return torch.cat([*model.parts]).tolist(), steps

    return run_it


@pytest.mark.parametrize("count", [3_000, pytest.param(100_000, marks=pytest.mark.soak)])
@pytest.mark.timeout(1800)
def test_a_model_of_many_parameters_goes_on(tmp_path, count):
    run_it = of_many_parts(count)

    assert resumed(tmp_path, run_it, 1, 2) == undisturbed(tmp_path, run_it, 2)


BYTES = (1 << 32) + 5


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_tensor_of_more_than_four_gigabytes_goes_on(tmp_path):
    """It needs 14 GB of memory and 13 GB of disk."""

    def run_it(run, total):
        model = nn.Linear(1, 1)
        content = torch.zeros(BYTES, dtype=torch.uint8)
        if total == 1:
            for part in content.split(1 << 28):
                part.copy_(torch.randint(256, part.shape, dtype=torch.uint8))
        model.register_buffer("large", content)
        run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        steps = run.steps(total)
        next(steps)
        parts = [one.numpy() for one in content.split(1 << 28)]
        digests = [hashlib.blake2b(part, digest_size=8).hexdigest() for part in parts]
        list(steps)
        return digests

    before = start(tmp_path, run_it, 1)
    after = start(tmp_path, run_it, 2, checkpoint__keep_last=2)
    shutil.rmtree(tmp_path)

    assert after == before
    assert len(set(before)) == len(before)
