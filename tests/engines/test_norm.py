"""One gradient norm over any mesh, clipping by it, and the loss scale that follows it."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.core.base.mesh import Mesh
from hpctrain.core.world import World
from hpctrain.errors import CheckpointError
from hpctrain.train.engines.norm import CPU_CHUNK, LossScale, global_norm
from tests.support.gloo import launch

pytestmark = pytest.mark.quick

SHAPES = [(7, 5), (12,), (3, 4, 2)]


def _gradients(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _norms():
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from hpctrain.core.base.mesh import Mesh
    from hpctrain.train.engines.norm import clip_factor, global_norm, local, scale_
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    first, second, third = _gradients()
    sharded = [
        first,  # the same on every rank
        distribute_tensor(second, mesh, [Replicate(), Shard(0)]),
        distribute_tensor(third, mesh["b"], [Shard(0)]),  # its mesh does not know of axis a
    ]
    norm = global_norm(sharded, Mesh(dp_shard=4), world)
    stages = _gradients(world.rank // 2)  # a pipeline: each half holds gradients of its own
    of_stages = global_norm(stages, Mesh(pp=2, dp_shard=2), world)
    scale_(sharded, clip_factor(norm, 1.0))
    clipped = global_norm(sharded, Mesh(dp_shard=4), world)
    return norm, of_stages, clipped, [local(one).clone() for one in sharded]


def test_the_norm_counts_each_element_once_whatever_the_mesh():
    answers = launch(_norms, 4)

    whole = math.sqrt(sum(float(g.double().square().sum()) for g in _gradients()))
    other = math.sqrt(sum(float(g.double().square().sum()) for g in _gradients(1)))
    assert {norm for norm, *_ in answers} == {answers[0][0]}
    assert answers[0][0] == pytest.approx(whole, rel=1e-12)
    assert answers[0][1] == pytest.approx(math.hypot(whole, other), rel=1e-12)
    assert answers[0][2] == pytest.approx(1.0, rel=1e-5)
    assert answers[0][3][0].allclose(_gradients()[0] / whole)


class Largest(TorchDispatchMode):
    """The most elements of a new fp64 tensor."""

    most = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float64:
            self.most = max(self.most, out.untyped_storage().nbytes() // 8)
        return out


def test_a_norm_takes_little_memory_and_leaves_the_gradients_alone():
    alone = World(0, 0, 1, torch.device("cpu"))
    gradients = [torch.randn(3, CPU_CHUNK).T, torch.randn(5), torch.randn(9)]
    before = [gradient.clone() for gradient in gradients]

    with Largest() as largest:
        norm = global_norm(gradients, Mesh(), alone)
        assert largest.most == CPU_CHUNK

    wide = [gradient.double() for gradient in gradients]
    assert norm == global_norm(wide, Mesh(), alone)
    assert norm == pytest.approx(torch.cat([each.flatten() for each in wide]).norm().item())
    for kept, gradient, double in zip(before, gradients, wide, strict=True):
        assert gradient.equal(kept)
        assert double.equal(kept.double())


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_halves_the_scale_and_the_step_does_not_count(bad):
    scale = LossScale(scale=1024.0)

    assert not scale.update(bad)
    assert scale.scale == 512.0


def test_the_scale_follows_torch_s_own_through_good_and_bad_steps():
    ours = LossScale(scale=64.0, growth_interval=3)
    torchs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for bad in [False, False, False, True, False, False, False, False, True, True]:
        torchs.scale(parameter.sum() * (math.inf if bad else 1.0)).backward()
        torchs.step(optimizer)
        torchs.update()
        optimizer.zero_grad()
        ours.update(math.inf if bad else 1.0)

        assert ours.scale == torchs.get_scale()


def test_the_scale_goes_on_from_its_state_and_from_that_of_torch_s_scaler():
    ours = LossScale()
    ours.load_state_dict({"scale": 8.0, "good_steps": 4})
    assert ours.state_dict() == {"scale": 8.0, "good_steps": 4}

    ours.load_state_dict({"scale": 2.0, "_growth_tracker": 1, "growth_factor": 2.0})
    assert ours.state_dict() == {"scale": 2.0, "good_steps": 1}
    with pytest.raises(CheckpointError, match="not the state of a loss scale"):
        ours.load_state_dict({"lr": 1.0})
