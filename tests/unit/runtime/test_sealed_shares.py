"""Each file of a checkpoint is read by one rank, and by rank 0 where that rank could not."""

from __future__ import annotations

import pytest
import torch

from hpctrain.checkpoint.sealed import seals
from hpctrain.checkpoint.sealed.files import UnitFile
from hpctrain.checkpoint.tensors.save import SavePlace
from hpctrain.core.settings.schema import CheckpointSettings
from hpctrain.core.world import World
from hpctrain.errors import CheckpointError
from hpctrain.train.runtime import own_loop as sealed
from tests.support.checkpoints import new_run, next_attempt

ALONE = World(0, 0, 1, torch.device("cpu"))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_every_file_is_read_once_and_bytes_are_shared(ranks):
    files = [UnitFile(f"{n}", size, 0) for n, size in enumerate([0, 0, 10, 90, 30, 40, 20, 50])]

    shares = [sealed.share_of(files, rank, ranks) for rank in range(ranks)]

    assert sorted(file.name for share in shares for file in share) == sorted(f.name for f in files)
    heaviest = max(sum(file.size for file in share) for share in shares)
    assert heaviest <= max(90, 240 / ranks + 50)


@pytest.mark.parametrize("path", ["ckpt.pt", "ckpt-5.pt"])
def test_what_a_node_did_not_see_so_far_is_read_by_rank_0(tmp_path, monkeypatch, path):
    run = new_run(tmp_path)
    attempt = next_attempt(run)
    (tmp_path / path).write_bytes(b"weights")
    seal_file, tries = seals.SealPlan.seal_file, []

    def blind_at_first(plan, file, on_bytes=None):
        tries.append(file.name)
        if len(tries) == 1:
            raise FileNotFoundError(2, "No such file or directory", file.name)
        return seal_file(plan, file, on_bytes)

    monkeypatch.setattr(seals.SealPlan, "seal_file", blind_at_first)
    sealed.seal(SavePlace(run, attempt, CheckpointSettings()), ALONE, step=5, path=tmp_path / path)

    (stored,) = seals.listing(run)
    assert [file.size for file in stored.seal.files] == [7]


def test_an_error_leaves_nothing_behind(tmp_path, monkeypatch):
    run = new_run(tmp_path)
    attempt = next_attempt(run)
    (tmp_path / "ckpt.pt").write_bytes(b"weights")

    def refuses(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(seals.SealPlan, "seal_file", refuses)
    with pytest.raises(CheckpointError, match="No space left"):
        sealed.seal(
            SavePlace(run, attempt, CheckpointSettings()), ALONE, step=5, path=tmp_path / "ckpt.pt"
        )
    assert not list(run.sealed.iterdir())
