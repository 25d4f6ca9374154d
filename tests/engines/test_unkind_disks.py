"""What a file system's errors do to a restore of real ranks: tried again, then told; nothing lost.

An error that one rank alone meets is put in at the real call by `hpctrain.core.testing.faults`.
"""

from __future__ import annotations

import contextlib
import io
import shutil

import pytest

from hpctrain.checkpoint.format.manifest import MANIFEST_NAME, TABLE_NAME
from hpctrain.checkpoint.format.shard import file_name
from hpctrain.checkpoint.store import find
from hpctrain.core.testing import faults
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.layout import RunDir
from tests.support import sharded
from tests.support.gloo import launch
from tests.support.ledger_runs import write_event

OLD, NEW = 10, 20
PLACES = [
    ("choose.list", 0), ("read.manifest", 0),
    ("read.table", 0), ("read.table", 1), ("read.block", 0), ("read.block", 1),
]  # fmt: skip
"""What is read of a checkpoint, and by which rank; rank 0 alone lists and chooses."""
ERRORS = ["ESTALE", "ETIMEDOUT", "EIO", "EACCES", "EMFILE", "ENOTCONN"]


def save_rank(root):
    from hpctrain.checkpoint.tensors.boxes import State
    from hpctrain.checkpoint.tensors.save import save
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    place = sharded.place(world, root)
    for step in (OLD, NEW):
        state = State(sharded.spread(world, "ddp", step), sharded.own(world, step))
        save(place, world, state, sharded.manifest(world, step))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with checkpoints of two steps, of which the ledger knows."""
    root = tmp_path_factory.mktemp("saved") / "run"
    launch(save_rank, 2, root=root)
    for step in (OLD, NEW):
        write_event(RunDir(root), "saved", attempt=1, step=step)
    return root


@pytest.fixture
def root(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def load_rank(root, cases, spoil=None):
    """Restore under each list of faults; see `_load`."""
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    return [_load(world, root, text, spoil) for text in cases]


def _load(world, root, text, spoil=None):
    """What was restored or refused, what this rank said, and how long it took not to."""
    import torch

    from hpctrain.checkpoint.tensors.boxes import State
    from hpctrain.checkpoint.tensors.restore import Wanted, restore
    from hpctrain.core.base import files

    files.FIRST_WAIT_S = 0.01
    place = sharded.place(world, root, patience_s=0.04)
    tensors = sharded.spread(world, "ddp", None)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    if spoil is not None:
        spoil(world, root)
    answer = {}
    with faults.armed(text), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            restored = restore(place, world, lambda _: Wanted(State(tensors, {})))
        except Exception as error:  # noqa: BLE001 - the test asks which
            answer = {"error": type(error).__name__, "why": str(error)}
        else:
            answer["step"] = restored.step
            answer["wrong"] = sharded.wrong(tensors, restored.step) if restored.step else []
    lines = said.getvalue().splitlines()
    answer["said"] = [line for line in lines if not line.startswith("hpctrain: fault: ")]
    answer["touched"] = [n for n in before if not torch.equal(before[n], tensors[n])]
    return answer


def untouched(root):
    """Whether both checkpoints lie where they lay, whole, and the ledger tells of nothing else."""
    run = RunDir(root)
    looked = [(one.step, one.problem) for one in find.candidates(run)]
    kinds = {event.kind for event in ledger.read(run)}
    return looked == [(NEW, None), (OLD, None)] and kinds == {"saved"} and not find.set_aside(run)


def test_an_error_of_the_file_system_is_never_taken_for_damage(root):
    cases = [
        f"fail:{point},rank={rank},error={error}" for point, rank in PLACES for error in ERRORS
    ]

    for case, *answers in zip(cases, *launch(load_rank, 2, root=root, cases=cases), strict=True):
        assert [answer.get("error") for answer in answers] == ["FileSystemFault"] * 2, case
        assert [answer["touched"] for answer in answers] == [[], []], case
        assert len({answer["why"] for answer in answers}) == 1, case
        rank = 1 if "rank=1" in case else 0
        assert len(answers[rank]["said"]) >= 2, case
        assert "tried again in" in answers[rank]["said"][0]
        assert answers[1 - rank]["said"] == [], case
    assert untouched(root)


def test_an_error_that_passes_costs_nothing_but_a_moment(root):
    cases = [f"fail:{point},rank={rank},error=ESTALE,hit=1" for point, rank in PLACES]

    for case, *answers in zip(cases, *launch(load_rank, 2, root=root, cases=cases), strict=True):
        for answer in answers:
            assert (answer.get("step"), answer.get("wrong")) == (NEW, []), case
        assert sum(len(answer["said"]) for answer in answers) == 1, case
    assert untouched(root)


@pytest.mark.parametrize("name", [file_name(0), TABLE_NAME])
def test_a_file_that_one_node_does_not_see_is_not_damaged(root, name):
    def hide(world, root):
        from hpctrain.checkpoint.format import reader, table

        if world.rank == 1:  # a client whose directory is older than the checkpoint
            if name == TABLE_NAME:
                real = table.read_file
                table.read_file = lambda path, manifest: real(path.with_name("not-yet"), manifest)
            else:
                real_file = reader.ChunkFiles._file
                reader.ChunkFiles._file = lambda self, number, _: real_file(self, number, "not-yet")

    for (answer,) in launch(load_rank, 2, root=root, cases=[""], spoil=hide):
        assert answer["error"] == "FileSystemFault"
        assert "rank 1" in answer["why"]
        assert answer["touched"] == []
    assert untouched(root)


@pytest.mark.parametrize(("number", "why"), [(5, "reads up to 4"), (2, "hpctrain 0.1.0 can")])
def test_another_format_is_refused_and_neither_passed_over_nor_moved(root, number, why):
    path = find.step_path(RunDir(root), NEW) / MANIFEST_NAME
    path.write_text(f'{{"format": {number}, "something": "else"}}\n')
    before = sorted(one.name for one in RunDir(root).checkpoints.iterdir())

    for (answer,) in launch(load_rank, 2, root=root, cases=[""]):
        assert answer["error"] == "OtherFormat"
        assert f"format {number}" in answer["why"]
        assert why in answer["why"]
    assert sorted(one.name for one in RunDir(root).checkpoints.iterdir()) == before


def _damage_all(run):
    for step in find.steps(run):
        (find.step_path(run, step) / file_name(0)).write_bytes(b"")


def _remove_all(run):
    shutil.rmtree(run.checkpoints)


@pytest.mark.parametrize(
    ("lose", "why"),
    [(_damage_all, "shard-00000.safetensors is 0 bytes"), (_remove_all, "none lies in")],
)
def test_a_run_that_has_saved_never_begins_anew_unasked(root, lose, why):
    run = RunDir(root)
    lose(run)

    for (answer,) in launch(load_rank, 2, root=root, cases=[""]):
        assert answer["error"] == "NoCheckpoint"
        assert f"run has saved up to step {NEW}" in answer["why"]
        assert why in answer["why"]
        assert f"`hpctrain resume {run.typed} --from 0`" in answer["why"]

    write_event(run, "submitted", token="t", job_id="7", from_step=0)
    for (answer,) in launch(load_rank, 2, root=root, cases=[""]):
        assert answer["step"] == 0
    assert find.steps(run) == []
    write_event(run, "restored", attempt=3, step=0, checkpoint=None)  # as the run tells it
    for (answer,) in launch(load_rank, 2, root=root, cases=[""]):
        assert answer["step"] == 0  # the requeue of a run that has begun anew
