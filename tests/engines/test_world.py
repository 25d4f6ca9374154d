"""What ranks say to each other when rank 0 alone fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.core.base.env import HPCTRAIN_CONTROL
from tests.support.control_tree import ControlTree
from tests.support.gloo import launch

pytestmark = pytest.mark.quick


class Odd(Exception):
    """Cannot be sent: it does not come back from a pickle."""

    def __init__(self, one, other):
        super().__init__(one)
        self.other = other


RAISED = [
    KeyError("token"),
    ValueError("Expecting value"),
    OSError(116, "Stale"),
    OSError(28, "Full"),
    Odd("a", "b"),
]


def rank(errors):
    from hpctrain.core.world import on_rank_0
    from hpctrain.errors import HpctrainError
    from hpctrain.train.joining_ranks import join_world

    world = join_world(timeout_s=30)
    said = []
    for error in errors:

        def act(error=error):
            raise error

        try:
            on_rank_0(world, act)
        except HpctrainError as told:
            said.append((type(told).__name__, str(told), repr(told.__cause__)))
    return [*said, on_rank_0(world, lambda: "goes on")]


@pytest.mark.parametrize("tree", [0, 2], ids=["gloo", "two nodes"])
def test_any_error_of_rank_0_is_raised_on_every_rank(tree):
    zero, one = launch(rank, 2, tree=tree, errors=RAISED)

    assert zero[-1] == one[-1] == "goes on"
    assert [(kind, text) for kind, text, _ in zero[:-1]] == [
        ("HpctrainError", "rank 0: KeyError: 'token'"),
        ("HpctrainError", "rank 0: ValueError: Expecting value"),
        ("FileSystemFault", "OSError: [Errno 116] Stale"),
        ("CheckpointError", "OSError: [Errno 28] Full"),
        ("HpctrainError", "rank 0: Odd: a"),
    ]
    assert [told[:2] for told in one[:-1]] == [told[:2] for told in zero[:-1]]
    assert "KeyError" in zero[0][2]  # where it happened, its own traceback


@pytest.mark.parametrize("fence", ['{"number": 1}', "{", "[]", "\x00"])
def test_an_odd_attempt_json_ends_all_ranks_and_hangs_none(tmp_path, fence):
    from hpctrain.ledger.run.layout import RunDir

    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    run.fence.write_text(fence)

    said = launch(stage_rank, 2, root=run.root)

    assert said[0] == said[1]
    assert said[0].startswith("rank 0: ")


def stage_rank(root):
    from hpctrain.core.world import on_rank_0
    from hpctrain.errors import HpctrainError
    from hpctrain.ledger.run.fence import read_fence
    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.train.joining_ranks import join_world

    world = join_world(timeout_s=30)
    try:
        on_rank_0(world, lambda: read_fence(RunDir(root)))
    except HpctrainError as error:
        return str(error)
    return ""


def exchanging(folder="", before=None):
    """What carries this rank's values, what its agreement is, and a value of all ranks."""
    from hpctrain.core.world import apart, gather
    from hpctrain.train.joining_ranks import join_world
    from hpctrain.train.runtime.agreement import agreement_of

    if folder:
        os.environ[HPCTRAIN_CONTROL] = folder
    if before is not None:
        before()
    world = join_world(timeout_s=60)
    beside = apart(world, 60)
    values = gather(world, world.rank), gather(beside, world.local_rank), world.ranks_per_node
    return type(world.control).__name__, type(agreement_of(world)).__name__, *values


def test_ranks_of_agents_have_their_control_plane():
    said = launch(exchanging, 4, tree=2)

    expected = "TreeExchange", "LeasedAgreement", [0, 1, 2, 3], [0, 1, 0, 1], 2
    assert said == [expected] * 4


def _another_process_first():
    from hpctrain.node.control.client import ControlClient

    child = os.fork()
    if child == 0:
        ControlClient.take(Path(os.environ[HPCTRAIN_CONTROL]), int(os.environ["RANK"]))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


GLOO = "GlooExchange", "GlooAgreement", [0, 1], [0, 1], 2


def test_a_second_program_of_the_same_ranks_makes_groups_of_its_own():
    """Its ticks would begin anew, and a stop be put where the first program has come to."""
    assert launch(exchanging, 2, tree=1, before=_another_process_first) == [GLOO] * 2


def test_a_launcher_within_a_rank_has_another_world_and_makes_groups_of_its_own():
    with ControlTree(1, 3) as tree:
        assert launch(exchanging, 2, folder=str(tree.folder(0))) == [GLOO] * 2


def test_ranks_that_do_not_see_their_nodes_memory_make_groups_of_their_own(tmp_path):
    assert launch(exchanging, 2, folder=str(tmp_path / "elsewhere")) == [GLOO] * 2


def _sockets(lazy_above):
    import torch
    import torch.distributed as dist

    from hpctrain.core.world import gather_on_0
    from hpctrain.train import joining_ranks as module

    module.LAZY_ABOVE = lazy_above
    world = module.join_world(timeout_s=60)
    dist.all_reduce(torch.ones(1))
    gather_on_0(world, world.rank)
    sockets = sum(path.is_socket() for path in list(Path("/proc/self/fd").iterdir()))
    dist.barrier()
    return sockets, os.environ.get("TORCH_GLOO_LAZY_INIT")


def test_with_many_ranks_gloo_connects_those_that_speak():
    full, lazy = (launch(_sockets, 6, lazy_above=above) for above in (6, 5))

    assert {variable for _, variable in (*full, *lazy)} == {None}, "others' groups are theirs"
    assert max(count for count, _ in lazy[1:]) < max(count for count, _ in full[1:])
