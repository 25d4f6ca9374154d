"""What ranks say to each other when rank 0 alone fails."""

from __future__ import annotations

import pytest

from tests.support.gloo import launch


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
    from hpctrain.errors import HpctrainError
    from hpctrain.world import join_world, on_rank_0

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


def test_any_error_of_rank_0_is_raised_on_every_rank():
    zero, one = launch(rank, 2, errors=RAISED)

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
    from hpctrain.run.layout import RunDir

    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    run.fence.write_text(fence)

    said = launch(stage_rank, 2, root=run.root)

    assert said[0] == said[1]
    assert said[0].startswith("rank 0: ")


def stage_rank(root):
    from hpctrain.errors import HpctrainError
    from hpctrain.run.fence import read_fence
    from hpctrain.run.layout import RunDir
    from hpctrain.world import join_world, on_rank_0

    world = join_world(timeout_s=30)
    try:
        on_rank_0(world, lambda: read_fence(RunDir(root)))
    except HpctrainError as error:
        return str(error)
    return ""
