"""Meshes multiply out and lie in their bounds; where there is none, a submit is refused."""

from __future__ import annotations

import itertools
import json
import re
import time
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cli.main import main
from hpctrain.core import drawing
from hpctrain.core.base.mesh import AXES, Mesh, MicrobatchRules
from hpctrain.core.base.text import placed
from hpctrain.core.settings.check import check, engine_flags, parse_mesh
from hpctrain.core.settings.layers import flag_layer, resolve
from hpctrain.core.settings.schema import EngineSettings, Settings, SlurmSettings, TrainSettings
from hpctrain.core.settings.spec import Entry, Spec, load_spec
from hpctrain.errors import UsageError
from hpctrain.launch import resume
from hpctrain.launch.change import SAME_RUN, ResumeRequest, change_spec
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.plan.mesh import (
    ModelShape,
    Planner,
    divisors,
    meshes,
    passes_of,
    plan_mesh,
    shape_of,
)
from hpctrain.observe.status.screen import StatusScreen
from hpctrain.observe.status.status import Answer, status_of
from hpctrain.observe.status.text import as_json
from tests.support.ledger_runs import Story

SHAPE = ModelShape(layers=4, dim=128, heads=4, hidden=352, seq_len=128, experts=8)


def fsdp2(**bounds):
    return EngineSettings(kind="fsdp2", **bounds)


def settled(*sets, mesh=None, engine=None):
    """Settings and origins of flags, checked by themselves."""
    flags = engine_flags(engine, parse_mesh(mesh) if mesh else None)
    found, origins = resolve([flag_layer(flags, sets)])
    check(found, origins)
    return found, origins


def planned(nodes, ranks, *sets, is_recipe=True, **flags):
    """Meshes of both ends of a node range, as at submit."""
    sets = (f"slurm.nodes={nodes}", f"slurm.ranks_per_node={ranks}", *sets)
    return meshes(*settled(*sets, **flags), is_recipe=is_recipe)


# ---- what is planned


def bound(most):
    pairs = st.tuples(st.integers(1, most), st.integers(1, most)).map(sorted)
    return pairs.map(lambda pair: f"{pair[0]}-{pair[1]}" if pair[0] != pair[1] else str(pair[0]))


@st.composite
def questions(draw):
    """Bounds, nodes and ranks on each; the model's shape in half of them."""
    engine = fsdp2(
        tp=draw(bound(4)),
        pp=draw(bound(4)),
        ep=draw(st.sampled_from(["1", "1-2", "1-4", "2", "4", "3-5"])),
        cp=draw(st.sampled_from(["1", "1", "1", "1-3", "2", "2-4"])),
        dp_replicate=draw(st.sampled_from(["1", "2", "1-3", "2-4"])),
        sequence_parallel=draw(st.booleans()),
        pp_schedule=draw(st.sampled_from(["1f1b", "interleaved", "zero_bubble"])),
    )
    heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    shape = ModelShape(
        layers=draw(st.integers(1, 9)),
        dim=heads * draw(st.sampled_from([2, 10, 32])),
        heads=heads,
        hidden=draw(st.sampled_from([32, 96, 352])),
        seq_len=draw(st.sampled_from([12, 30, 64])),
        experts=draw(st.sampled_from([0, 2, 4, 6])),
    )
    nodes, ranks = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    return engine, nodes, ranks, draw(st.sampled_from([None, shape]))


def within(text, value):
    least, _, most = text.partition("-")
    return int(least) <= value <= int(most or least)


def is_legal(mesh, engine, ranks_per_node, shape):
    """All that is asked of a mesh, said once more and plainly."""
    stages = mesh.pp * (engine.pp_stages_per_rank if engine.pp_schedule != "1f1b" else 1)
    rules = [
        all(
            within(getattr(engine, axis), getattr(mesh, axis)) for axis in ("tp", "pp", "ep", "cp")
        ),
        within(engine.dp_replicate, mesh.dp_replicate),
        mesh.dp_shard % mesh.ep == 0,
        mesh.dp_shard % mesh.cp == 0,
        mesh.ep == 1 or mesh.tp == 1,
        mesh.cp == 1 or mesh.ep == mesh.tp == mesh.pp == 1,
        ranks_per_node % mesh.tp == 0,
    ]
    if shape is not None:
        part = mesh.dp_shard // mesh.ep
        rules += [
            shape.heads % mesh.tp == 0,
            shape.dim % mesh.tp == 0,
            shape.hidden % mesh.tp == 0,
            not engine.sequence_parallel or shape.seq_len % mesh.tp == 0,
            mesh.pp == 1 or stages <= shape.layers,
            mesh.cp == 1 or shape.seq_len % (2 * mesh.cp) == 0,
            mesh.ep == 1 or (shape.experts > 0 and shape.experts % mesh.ep == 0),
            mesh.ep == 1 or shape.dim % part == 0 or shape.hidden % part == 0,
        ]
    return all(rules)


def candidates(engine, ranks_per_node, shape):
    """Sizes within the bounds, whatever the world size."""
    for pp, tp, copies, ep in itertools.product(range(1, 6), repeat=4):
        meshes = [Mesh(pp, copies, ep, tp, ep)]
        if pp == tp == ep == 1:
            meshes += [Mesh(1, copies, cp, cp=cp) for cp in range(2, 6)]
        yield from (mesh for mesh in meshes if is_legal(mesh, engine, ranks_per_node, shape))


def best(engine, nodes, ranks, shape, among=None):
    """The legal mesh with the smallest pp, tp, dp_replicate, ep, cp, by trying all."""
    among = candidates(engine, ranks, shape) if among is None else among
    sizes = ((m.pp, m.tp, m.dp_replicate, m.ep, m.cp) for m in among)
    meshes = (
        Mesh(pp, copies, nodes * ranks // (pp * tp * copies), tp, ep, cp)
        for pp, tp, copies, ep, cp in sorted(sizes)
        if nodes * ranks % (pp * tp * copies * ep * cp) == 0
    )
    return next((mesh for mesh in meshes if is_legal(mesh, engine, ranks, shape)), None)


@given(questions())
def test_a_mesh_is_the_least_that_its_bounds_and_the_model_allow_or_there_is_none(question):
    engine, nodes, ranks, shape = question
    wanted = best(engine, nodes, ranks, shape)
    if wanted is None:
        with pytest.raises(UsageError) as caught:
            plan_mesh(engine, nodes * ranks, ranks, shape=shape)
        assert "\n" not in str(caught.value)
    else:
        assert plan_mesh(engine, nodes * ranks, ranks, shape=shape) == wanted
        assert wanted.world_size == nodes * ranks


@given(questions())
def test_numbers_of_nodes_that_are_named_have_a_mesh_and_no_nearer_one_has(question):
    engine, nodes, ranks, shape = question
    among = list(candidates(engine, ranks, shape))
    if best(engine, nodes, ranks, shape, among):
        return
    with pytest.raises(UsageError) as caught:
        plan_mesh(engine, nodes * ranks, ranks, shape=shape)
    match = re.search(r"use (?:(\d+) or )?(\d+) nodes?$", str(caught.value))
    named = [int(number) for number in match.groups() if number] if match else []
    farthest = max(named, default=nodes + 20) + 1
    legal = [n for n in range(1, farthest) if best(engine, n, ranks, shape, among)]
    assert named == [n for n in legal if n < nodes][-1:] + [n for n in legal if n > nodes][:1]


@pytest.mark.parametrize("kind", ["zero0", "zero1", "zero2", "zero3", "ddp"])
@pytest.mark.parametrize("world_size", [1, 7])
def test_ddp_copies_and_zero_shards_over_all_ranks(kind, world_size):
    mesh = plan_mesh(EngineSettings(kind=kind), world_size, world_size)

    axis = "dp_replicate" if kind == "ddp" else "dp_shard"
    assert mesh == Mesh(**{axis: world_size})


def test_of_what_is_allowed_data_parallelism_takes_all_it_can():
    allowed = fsdp2(tp="1-8", pp="1-4", dp_replicate="1-2")

    assert plan_mesh(allowed, 16, 8) == Mesh(dp_shard=16)
    assert plan_mesh(fsdp2(tp="2-8", pp="2-4"), 16, 8) == Mesh(pp=2, dp_shard=4, tp=2)
    assert plan_mesh(fsdp2(), 1, 1) == Mesh()
    assert plan_mesh(fsdp2(ep="1-4"), 4, 4) == Mesh(dp_shard=4)
    assert plan_mesh(fsdp2(ep="2-4"), 4, 4) == Mesh(dp_shard=4, ep=2)


def test_a_range_takes_what_the_model_can_be_cut_into():
    engine = fsdp2(tp="3-4", ep="1")

    assert plan_mesh(engine, 12, 12).tp == 3
    assert plan_mesh(engine, 12, 12, shape=SHAPE).tp == 4


def test_experts_are_never_spread_and_cut_at_once_though_the_bounds_would_leave_room():
    shape = ModelShape(layers=1, dim=6, heads=2, hidden=6, seq_len=8, experts=2)
    engine = fsdp2(ep="2", tp="1-2")  # tp 1 leaves 4 ranks to cut a width of 6, tp 2 only 2

    assert Planner(engine, 8, shape).find(8) is None
    assert Planner(engine, 4, shape).find(4) == Mesh(dp_shard=4, ep=2)


def test_the_nearest_nodes_are_found_beyond_those_where_experts_cannot_be_cut():
    shape = ModelShape(layers=1, dim=96, heads=3, hidden=96, seq_len=30, experts=4)

    assert Planner(fsdp2(ep="2"), 2, shape).nearest(11) == [8, 12]


def test_a_tp_group_lies_in_one_node_and_so_does_any_group_of_fewer_ranks_than_a_node_has():
    allowed = fsdp2(tp="3-4")

    assert plan_mesh(allowed, 12, 4) == Mesh(dp_shard=3, tp=4)  # three would lie across two nodes
    assert plan_mesh(allowed, 3, 4) == Mesh(tp=3)


@pytest.mark.parametrize(("dim", "hidden"), [(32, 6), (6, 32)])
def test_an_expert_is_cut_along_whichever_side_its_ranks_divide(dim, hidden):
    shape = ModelShape(layers=1, dim=dim, heads=1, hidden=hidden, seq_len=8, experts=2)

    assert plan_mesh(fsdp2(ep="2"), 8, 8, shape=shape) == Mesh(dp_shard=8, ep=2)
    assert Planner(fsdp2(ep="2"), 14, shape).find(14) is None


def test_a_range_may_begin_with_more_than_the_model_can_be_cut_into():
    many_experts = ModelShape(layers=1, dim=32, heads=1, hidden=32, seq_len=8, experts=8)
    many_heads = ModelShape(layers=1, dim=32, heads=4, hidden=32, seq_len=8)

    assert plan_mesh(fsdp2(ep="3-8"), 8, 8, shape=many_experts) == Mesh(dp_shard=8, ep=4)
    assert plan_mesh(fsdp2(tp="3-8"), 8, 8, shape=many_heads) == Mesh(dp_shard=2, tp=4)


def test_very_many_ranks_a_stage_are_planned_without_trying_them_all():
    began = time.process_time()
    engine = fsdp2(pp="900000000", dp_replicate="1-999999999")

    with pytest.raises(UsageError, match=r"set other bounds$"):
        plan_mesh(engine, 3, 1)

    assert Planner(engine, 1).nearest(3) == []
    assert Planner(fsdp2(pp="900000000"), 8).nearest(3) == []
    assert Planner(fsdp2(pp="900000000", tp="5-8"), 8).nearest(3) == []
    assert time.process_time() - began < 30  # not hours


def test_the_recipes_shape_is_known_without_torch():
    from hpctrain.recipes.lm.model import LMConfig

    for dim in range(2, 1000, 2):
        hidden = LMConfig(layers=3, dim=dim, heads=1, seq_len=64).hidden
        train = TrainSettings(layers=3, dim=dim, heads=1, seq_len=64)
        assert shape_of(train) == ModelShape(3, dim, 1, hidden, 64, 0)


# ---- what is refused, in one line

BAD_MESHES = [
    (
        {"mesh": "tp=4,pp=2", "engine": "fsdp2"},
        (
            "engine.tp 4 x engine.pp 2 (flag --mesh) needs a multiple of 8 ranks; "
            "3 nodes x 4 ranks are 12: use 2 or 4 nodes"
        ),
    ),
    (
        {"mesh": "pp=5", "engine": "fsdp2", "sets": ["train.layers=9"]},
        (
            "engine.pp 5 (flag --mesh) needs a multiple of 5 ranks; "
            "3 nodes x 4 ranks are 12: use 5 nodes"
        ),
    ),
    (
        {"mesh": "pp=2-3,dp_replicate=5", "engine": "fsdp2"},
        (
            "engine.pp 2-3 x engine.dp_replicate 5 (flag --mesh) leaves no mesh of 12 ranks "
            "(3 nodes x 4 ranks): use 5 nodes"
        ),
    ),
    (
        {"mesh": "tp=3", "engine": "fsdp2"},
        "engine.tp 3 (flag --mesh) does not divide train.heads 4; use 1, 2 or 4, or other heads",
    ),
    (
        {"mesh": "tp=3", "engine": "fsdp2", "sets": ["train.heads=3", "train.dim=96"]},
        (
            "engine.tp 3 (flag --mesh) does not divide 256, the width of the MLP that follows from "
            "train.dim 96; use a number that does, or another train.dim"
        ),
    ),
    (
        {"mesh": "tp=2", "engine": "fsdp2", "sets": ["train.seq_len=63"]},
        (
            "engine.tp 2 (flag --mesh) does not divide train.seq_len 63, as "
            "engine.sequence_parallel needs; use a number that does, another train.seq_len, or "
            "engine.sequence_parallel=false"
        ),
    ),
    (
        {"mesh": "tp=8", "engine": "fsdp2", "sets": ["train.heads=8"]},
        (
            "engine.tp 8 (flag --mesh) does not divide the 4 ranks of a node, in which its ranks "
            "must lie; use 1, 2 or 4, or a multiple of 8 ranks per node"
        ),
    ),
    (
        {"mesh": "pp=6", "engine": "fsdp2"},
        (
            "engine.pp 6 (flag --mesh) needs 6 layers, and train.layers is 4; "
            "use 4 at most, or more layers"
        ),
    ),
    (
        {"mesh": "pp=3", "engine": "fsdp2", "sets": ["engine.pp_schedule=interleaved"]},
        (
            "engine.pp 3 (flag --mesh) x engine.pp_stages_per_rank 2 needs 6 layers, and "
            "train.layers is 4; use 2 at most, or more layers"
        ),
    ),
    (
        {
            "mesh": "pp=2",
            "engine": "fsdp2",
            "sets": ["engine.pp_schedule=interleaved", "engine.pp_stages_per_rank=5"],
        },
        (
            "engine.pp 2 (flag --mesh) x engine.pp_stages_per_rank 5 needs 10 layers, and "
            "train.layers is 4; use fewer stages per rank, or more layers"
        ),
    ),
    (
        {"mesh": "cp=3", "engine": "fsdp2", "sets": ["train.seq_len=100"]},
        (
            "engine.cp 3 (flag --mesh) needs a train.seq_len that 6 divides, since each rank has "
            "two parts of a sequence; it is 100"
        ),
    ),
    (
        {"mesh": "ep=2", "engine": "fsdp2"},
        (
            "engine.ep 2 (flag --mesh) needs a model with experts, and train.experts is 0; set it, "
            "or engine.ep 1"
        ),
    ),
    (
        {"mesh": "ep=4", "engine": "fsdp2", "sets": ["train.experts=6"]},
        "engine.ep 4 (flag --mesh) does not divide train.experts 6; use 1, 2, 3 or 6",
    ),
    (
        {"mesh": "ep=4", "engine": "fsdp2", "sets": ["train.experts=4"]},
        (
            "engine.ep 4 (flag --mesh) leaves no mesh of 12 ranks (3 nodes x 4 ranks), since the "
            "ranks with the same experts must divide train.dim 128: use 2 or 4 nodes"
        ),
    ),
    (
        {"engine": "ddp", "sets": ["engine.exact=true"]},
        (
            "flag --set engine.exact: engine.exact is true, which needs train.micro_batch; it is 0 "
            "(default): set how many sequences each pass takes, at any number of ranks"
        ),
    ),
]


@pytest.mark.parametrize(("flags", "message"), BAD_MESHES)
def test_a_mesh_that_does_not_fit_is_refused_with_what_would(flags, message):
    with pytest.raises(UsageError) as caught:
        planned("3", 4, *flags.get("sets", ()), mesh=flags.get("mesh"), engine=flags["engine"])

    assert str(caught.value) == message


EXPERTS = ModelShape(layers=4, dim=32, heads=1, hidden=32, seq_len=8, experts=8)
HEADS = ModelShape(layers=4, dim=24, heads=12, hidden=24, seq_len=24)
TOLD = [
    (
        (fsdp2(pp="2"), 1, 1),
        {},
        "engine.pp 2 needs a multiple of 2 ranks; 1 node x 1 rank is 1: use 2 nodes",
    ),
    ((fsdp2(pp="2"), 3, 2), {}, "engine.pp 2 needs a multiple of 2 ranks; 3 ranks are 3"),
    (
        (fsdp2(pp="3", tp="1-2"), 4, 2),
        {},
        "engine.tp 1-2 x engine.pp 3 leaves no mesh of 4 ranks (2 nodes x 2 ranks): use 3 nodes",
    ),
    (
        (fsdp2(pp="3", tp="2"), 4, 2),
        {"origins": {"engine.pp": "flag --mesh"}},
        (
            "engine.tp 2 x engine.pp 3 (flag --mesh) needs a multiple of 6 ranks; "
            "2 nodes x 2 ranks are 4: use 3 nodes"
        ),
    ),
    (
        (fsdp2(ep="2-4"), 3, 1),
        {"shape": EXPERTS},
        "engine.ep 2-4 leaves no mesh of 3 ranks (3 nodes x 1 rank): use 2 or 4 nodes",
    ),
    (
        (fsdp2(tp="8"), 16, 4),
        {},
        (
            "engine.tp 8 does not divide the 4 ranks of a node, in which its ranks must lie; "
            "use 1, 2 or 4, or a multiple of 8 ranks per node"
        ),
    ),
    (
        (fsdp2(tp="3"), 8, 8),
        {"shape": HEADS},
        (
            "engine.tp 3 does not divide the 8 ranks of a node, in which its ranks must lie; "
            "use 1, 2 or 4, or a multiple of 3 ranks per node"
        ),
    ),
]


@pytest.mark.parametrize(("asked", "known", "message"), TOLD, ids=[row[2][:30] for row in TOLD])
def test_why_there_is_no_mesh_is_told_by_the_bounds_that_are_in_use(asked, known, message):
    with pytest.raises(UsageError) as caught:
        plan_mesh(*asked, **known)

    assert str(caught.value) == message


ZERO_BUBBLE = ["engine.kind=fsdp2", "engine.pp=1-2", "engine.pp_schedule=zero_bubble"]
BAD_COMBINATIONS = [
    (["engine.tp=2"], "engine.tp is 2, which needs engine.kind fsdp2; it is ddp (default)"),
    (["engine.pp=2", "engine.kind=zero1"], "engine.pp is 2, which needs engine.kind fsdp2"),
    (["engine.ep=2-4", "engine.kind=zero3"], "engine.ep is 2-4, which needs engine.kind fsdp2"),
    (["engine.dp_replicate=2"], "engine.dp_replicate is 2, which needs engine.kind fsdp2"),
    (
        ["engine.kind=fsdp2", "engine.ep=2", "engine.tp=2", "train.experts=4"],
        (
            "engine.ep is 2 and engine.tp is 2 (flag --set engine.tp): experts cannot be spread "
            "and cut at once"
        ),
    ),
    (["engine.exact=true", "engine.kind=zero2"], "needs engine.kind ddp or fsdp2; it is zero2"),
    (["engine.exact=true", "engine.kind=zero3"], "needs engine.kind ddp or fsdp2; it is zero3"),
    (
        ["engine.exact=true", "engine.kind=fsdp2", "engine.pp=1-2"],
        "engine.exact is true, which needs engine.pp 1; it is 1-2 (flag --set engine.pp)",
    ),
    (["engine.exact=true", "engine.kind=fsdp2", "engine.ep=2"], "needs engine.ep 1; it is 2"),
    (["engine.exact=true", "engine.kind=fsdp2", "engine.cp=2"], "needs engine.cp 1; it is 2"),
    (
        ["engine.kind=fsdp2", "engine.cp=2", "engine.tp=2"],
        "engine.tp is 2 (flag --set engine.tp): sequences are shared out by plain sharding only",
    ),
    (["engine.cp=2", "engine.kind=ddp"], "engine.cp is 2, which needs engine.kind fsdp2"),
    (
        ["engine.exact=true", "engine.kind=fsdp2", "engine.dp_replicate=2"],
        "needs engine.dp_replicate 1; it is 2",
    ),
    (
        ["engine.exact=true", "engine.kind=fsdp2", "engine.tp=1-2"],
        "needs one number for engine.tp; it is 1-2",
    ),
    (
        ["engine.kind=zero0", "engine.precision=bf16"],
        "engine.precision is bf16, which trains wrong with engine.kind zero0",
    ),
    (["engine.kind=zero0", "engine.precision=fp16"], "choose --engine zero1, or engine.precision"),
    (
        ["engine.kind=zero0", "slurm.gpus_per_node=4"],
        "engine.precision is auto, which means bf16 on a GPU, which trains wrong",
    ),
    (["engine.offload=cpu"], "engine.offload is cpu, which fsdp2 and zero1 to zero3 can do"),
    (["engine.reduce_each_pass=true"], "engine.reduce_each_pass is true, which only fsdp2 can do"),
    (["engine.offload=cpu", "engine.kind=zero0"], "engine.kind is zero0 (flag --set engine.kind)"),
    (
        ["engine.exact=true", "engine.compile=inductor", "train.micro_batch=4"],
        "engine.exact is true, which needs engine.compile no, eager or aot_eager; it is inductor",
    ),
    (
        ["train.experts=1"],
        "train.experts_per_token is 2, more than train.experts 1 (flag --set train.experts)",
    ),
    (
        [*ZERO_BUBBLE, "engine.activation_checkpointing=full"],
        (
            "engine.pp_schedule is zero_bubble, which needs engine.activation_checkpointing no; "
            "it is full (flag --set engine.activation_checkpointing)"
        ),
    ),
    (
        [*ZERO_BUBBLE, "engine.compile=eager"],
        "which needs engine.compile no; it is eager (flag --set engine.compile)",
    ),
    (["engine.kind=fsdp2", "engine.tp=two"], 'engine.tp: "two" is not a number of ranks'),
    (["engine.kind=fsdp2", "engine.tp=2x"], 'engine.tp: "2x" is not a number of ranks'),
    (["engine.kind=fsdp2", "engine.tp=1-1234567890"], "is not a number of ranks"),
    (["engine.kind=fsdp2", "engine.pp=0"], "engine.pp: 0 ranks cannot train; it takes at least 1"),
    (["engine.kind=fsdp2", "engine.pp=4-2"], "maximum below its minimum; did you mean 2-4?"),
    (["engine.pp_stages_per_rank=0"], "engine.pp_stages_per_rank is 0; it takes at least 1"),
]


@pytest.mark.parametrize(("sets", "message"), BAD_COMBINATIONS)
def test_settings_that_no_number_of_ranks_can_mend_are_refused_in_one_line(sets, message):
    with pytest.raises(UsageError) as caught:
        settled(*sets)

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "sets",
    [
        ["engine.tp=1-4"],  # one may go on with ddp at whatever the bounds allow besides
        ["engine.kind=zero0", "engine.precision=fp32", "slurm.gpus_per_node=4"],
        ["engine.kind=zero1", "engine.precision=bf16", "engine.offload=cpu"],
        ["engine.kind=fsdp2", "engine.offload=cpu", "engine.ep=1-2", "engine.tp=2"],
        ["engine.kind=fsdp2", "engine.exact=true", "engine.tp=2", "train.micro_batch=4"],
        ["train.experts=2", "train.experts_per_token=2"],
        ["engine.kind=fsdp2", "engine.compile=inductor"],
    ],
)
def test_what_goes_together_passes(sets):
    settled(*sets)


def test_a_range_of_nodes_is_refused_where_one_of_them_has_no_mesh():
    with pytest.raises(UsageError) as caught:
        planned("2-9", 4, mesh="tp=4,pp=2", engine="fsdp2")

    assert str(caught.value) == (
        "engine.tp 4 x engine.pp 2 (flag --mesh) needs a multiple of 8 ranks; 3 nodes x 4 ranks "
        "are 12, and slurm.nodes 2-9 allows that: 2, 4, 6 and 8 would do; use --nodes 8, or give "
        "an axis a range, e.g. --mesh tp=1-4"
    )


@pytest.mark.parametrize(
    ("nodes", "ranks", "mesh", "told"),
    [
        ("2-13", 1, "pp=2-3", "2-4, 6, 8-10 and 12 would do; use --nodes 8-10, or"),
        ("2-13", 4, "tp=4,pp=2", ": 2, 4, 6, 8, 10 and 12 would do; use --nodes 12, or"),
        ("2-17", 4, "tp=4,pp=2", ": 2, 4, 6, 8, 10, 12 and 2 more would do; use --nodes 16, or"),
    ],
)
def test_the_longest_range_with_the_most_nodes_is_offered_and_only_a_few_are_listed(
    nodes, ranks, mesh, told
):
    with pytest.raises(UsageError) as caught:
        planned(nodes, ranks, mesh=mesh, engine="fsdp2")

    assert told in str(caught.value)


def test_a_range_of_nodes_of_which_none_has_a_mesh_names_the_nearest():
    with pytest.raises(UsageError, match=r"5 nodes x 1 rank are 5: use 4 or 8 nodes$"):
        planned("5-7", 1, mesh="pp=4", engine="fsdp2")


def test_a_range_of_nodes_with_a_mesh_each_has_one_at_both_ends():
    found = planned("1-4", 4, mesh="tp=4,pp=1-2", engine="fsdp2")

    assert found == {1: Mesh(tp=4), 4: Mesh(dp_shard=4, tp=4)}
    assert planned("2", 4) == {2: Mesh(dp_replicate=8)}


def test_a_model_that_is_not_ours_is_cut_as_its_owner_says():
    assert planned("1", 3, mesh="tp=3", engine="fsdp2", is_recipe=False) == {1: Mesh(tp=3)}
    assert planned("1", 2, "engine.exact=true", engine="ddp", is_recipe=False) == {
        1: Mesh(dp_replicate=2)
    }


@pytest.mark.parametrize(
    ("engine", "mesh", "passes"),
    [
        (EngineSettings(), Mesh(dp_replicate=4), MicrobatchRules()),
        (
            EngineSettings(exact=True),
            Mesh(dp_replicate=4),
            MicrobatchRules(leaves=True, equal=True),
        ),
        (fsdp2(pp="2"), Mesh(pp=2, dp_shard=2), MicrobatchRules(equal=True, at_least=2)),
        (fsdp2(pp="2", pp_schedule="gpipe"), Mesh(pp=2), MicrobatchRules(equal=True)),
        (
            fsdp2(pp="3", pp_schedule="interleaved"),
            Mesh(pp=3),
            MicrobatchRules(equal=True, at_least=3, multiple_of=3),
        ),
        (
            fsdp2(pp="3", pp_schedule="zero_bubble"),
            Mesh(pp=3),
            MicrobatchRules(equal=True, at_least=3, multiple_of=3),
        ),
    ],
)
def test_a_step_is_cut_as_the_schedule_and_exact_training_ask(engine, mesh, passes):
    assert passes_of(engine, mesh) == passes


# ---- flags


def test_the_mesh_flag_names_axes():
    assert parse_mesh("tp=4,pp=1-2") == {"tp": "4", "pp": "1-2"}
    assert parse_mesh(" ep = 2 , dp_replicate=3") == {"ep": "2", "dp_replicate": "3"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpp=2", "no axis; did you mean tp?"),
        ("dp_replicas=2", "did you mean dp_replicate?"),
        ("x=2", "there are tp, pp, ep, cp, dp_replicate"),
        ("dp=2", "data-parallel ranks take what the other axes leave"),
        ("tp=2,dp_shard=2", "data-parallel ranks take what the other axes leave"),
        ("tp", "not of the form AXIS=N"),
        ("tp=", 'tp: "" is not a number of ranks'),
        ("tp=0", "tp: 0 ranks cannot train; it takes at least 1"),
        ("tp=2,pp=4-2", "pp: 4-2 has its maximum below its minimum"),
        ("tp=2,tp=4", "tp is given twice"),
        ("", '"" is no axis'),
    ],
)
def test_a_mesh_flag_that_is_none_is_refused_with_what_stood_there(text, message):
    with pytest.raises(UsageError) as caught:
        parse_mesh(text)

    assert str(caught.value).startswith(f"--mesh {text}: ")
    assert message in str(caught.value)


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("HPCTRAIN_RUNS", "HPCTRAIN_SITE", "HPCTRAIN_SITE_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


SUBMIT = ["submit", "--cluster", "local", "--name", "r", "--engine", "fsdp2"]


def test_engine_and_mesh_are_settings_with_their_origin(work, capsys):
    argv = [*SUBMIT, "--no-submit", "--ranks-per-node", "4", "--mesh", "tp=2,pp=1-2"]
    assert main(argv) == 0

    spec = load_spec(work / "runs" / "r" / "spec.json")
    engine = spec.settings.engine
    assert (engine.kind, engine.tp, engine.pp, engine.ep) == ("fsdp2", "2", "1-2", "1")
    assert spec.origins["engine.kind"] == "flag --engine"
    assert spec.origins["engine.pp"] == "flag --mesh"
    assert spec.origins["engine.ep"] == "default"
    assert "mesh  dp_shard=2 tp=2\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--nodes", "3", "--ranks-per-node", "4", "--mesh", "tp=4,pp=2"],
            "needs a multiple of 8 ranks; 3 nodes x 4 ranks are 12: use 2 or 4 nodes",
        ),
        (["--mesh", "tpp=4"], "did you mean tp?"),
        (["--engine", "zero7"], "'zero7' is not one of 'ddp', 'fsdp2', 'zero0'"),
        (["--mesh", "tp=2", "--set", "engine.tp=4"], "engine.tp is given twice: flag --mesh"),
    ],
)
@pytest.mark.parametrize("how", ["--dry-run", "--no-submit"])
def test_a_submit_without_a_mesh_is_one_line_and_leaves_nothing(work, capsys, how, argv, message):
    assert main([*SUBMIT, how, *argv]) == 2

    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(work.iterdir()) == []


# ---- resume


def a_spec(nodes="2", ranks=4, **engine):
    spec = Spec("r", "id", 0.0, "local", "", Entry(kind="recipe", cwd="/"))
    spec.settings = Settings(
        slurm=SlurmSettings(nodes=nodes, ranks_per_node=ranks), engine=EngineSettings(**engine)
    )
    return spec


def changed(spec, nodes=None, engine=None, mesh=None, sets=()):
    flags = {"slurm.nodes": ("--nodes", nodes), **engine_flags(engine, mesh)}
    return change_spec(spec, ResumeRequest(flags, sets))[0]


def test_a_resume_on_nodes_without_a_mesh_is_refused_before_it_is_submitted():
    with pytest.raises(UsageError, match=r"3 nodes x 4 ranks are 12: use 2 or 4 nodes$"):
        changed(a_spec(kind="fsdp2", tp="4", pp="2"), nodes="3")


def test_a_resume_may_change_the_engine_and_its_mesh():
    spec = changed(a_spec(kind="ddp"), engine="fsdp2", mesh={"tp": "2"})
    assert (spec.settings.engine.kind, spec.settings.engine.tp) == ("fsdp2", "2")
    assert spec.origins["engine.tp"] == "flag --mesh"

    assert changed(spec, engine="zero3", mesh={"tp": "1"}).settings.engine.kind == "zero3"
    with pytest.raises(UsageError, match=r"needs engine\.kind fsdp2; it is zero3"):
        changed(spec, engine="zero3")


@pytest.mark.parametrize(
    ("change", "was"),
    [
        ("train.seed=1", 1234),
        ("train.seq_len=64", 128),
        ("train.layers=5", 4),
        ("train.dim=64", 128),
        ("train.heads=2", 4),
        ("train.experts=4", 0),
        ("train.experts_per_token=1", 2),
        ("train.data=/other", "'.*'"),
        ("train.data_limit_mb=9", 8.0),
    ],
)
def test_a_resume_with_another_model_or_other_samples_is_refused(change, was):
    name = change.partition("=")[0]
    with pytest.raises(
        UsageError, match=rf"^{name} was {was} and cannot become .* start a new run"
    ):
        changed(a_spec(), sets=[change])


def test_all_that_makes_it_another_run_is_tried_above():
    [marks] = test_a_resume_with_another_model_or_other_samples_is_refused.pytestmark
    tried = {change.partition("=")[0].removeprefix("train.") for change, _ in marks.args[1]}

    assert tried == set(SAME_RUN)


def a_plan(chosen, origins, saved_engine="ddp", saved_mesh=None):
    """A resume's plan over a checkpoint of 8 ranks."""
    found = meshes(chosen, origins, is_recipe=True)
    ends = [
        resume.NodeMesh(n, chosen.slurm.ranks(), mesh, resume.batch_text(chosen, mesh))
        for n, mesh in found.items()
    ]
    return resume.ResumePlan(
        run="r",
        step=5,
        checkpoint="step-0000000005",
        saved_world_size=8,
        saved_engine=saved_engine,
        saved_mesh={"dp_replicate": 8} if saved_mesh is None else saved_mesh,
        engine=chosen.engine.kind,
        looked_at=resume.looked_at((5, "step-0000000005"), []),
        meshes=ends,
    )


def test_a_plan_shows_the_mesh_of_each_end_and_what_it_was():
    sets = ["slurm.nodes=2-4", "slurm.ranks_per_node=4", "train.micro_batch=4"]
    plan = a_plan(*settled(*sets, engine="fsdp2", mesh="tp=2,pp=2"))

    assert resume.as_text(plan).splitlines()[2:] == [
        "saved by     8 ranks, ddp",
        "mesh         2 nodes x 4 ranks: fsdp2, pp=2 dp_shard=2 tp=2; was ddp, dp_replicate=8",
        "batch        32 = 2 data ranks x 4 passes of up to 4",
        "mesh         4 nodes x 4 ranks: fsdp2, pp=2 dp_shard=4 tp=2; was ddp, dp_replicate=8",
        "batch        32 = 4 data ranks x 2 passes of up to 4",
    ]


def test_a_plan_of_the_same_mesh_says_nothing_of_what_it_was():
    same = a_plan(*settled("slurm.nodes=2", "slurm.ranks_per_node=4"))
    imported = a_plan(*settled("slurm.nodes=3"), saved_engine="import", saved_mesh={})
    other = a_plan(*settled("slurm.nodes=3", "slurm.ranks_per_node=4"))

    assert "mesh         2 nodes x 4 ranks: ddp, dp_replicate=8\n" in resume.as_text(same)
    assert "was" not in resume.as_text(imported)
    assert "dp_replicate=12; was ddp, dp_replicate=8\n" in resume.as_text(other)
    assert "shares differ by one sample" in resume.as_text(other)


def test_a_plan_as_json_has_the_mesh():
    sets = ["slurm.nodes=2", "slurm.ranks_per_node=2"]
    plan = a_plan(*settled(*sets, engine="fsdp2", mesh="tp=2,pp=2"))

    (mesh,) = json.loads(json.dumps(asdict(plan)))["meshes"]

    assert mesh["mesh"] == {"pp": 2, "dp_replicate": 1, "dp_shard": 1, "tp": 2, "ep": 1, "cp": 1}


def test_ranks_that_take_the_same_samples_count_once_and_a_pipeline_is_filled():
    sets = ["slurm.ranks_per_node=4", "train.global_batch=6"]
    (end,) = a_plan(*settled(*sets, engine="fsdp2", mesh="pp=4")).meshes

    assert end.batch == (
        "6 = 1 data rank x 4 passes of up to 2, shares differ by one sample (the loss is weighted)"
    )


# ---- who stands where


def rank_map(mesh, nodes, each):
    return drawing.drawn(drawing.rank_map(mesh, nodes, each, width=200), 200).splitlines()


@given(
    st.tuples(*[st.integers(1, 3)] * 4).flatmap(
        lambda sizes: st.tuples(
            st.just(Mesh(*sizes)), st.sampled_from(divisors(Mesh(*sizes).world_size))
        )
    )
)
def test_every_rank_has_a_place_of_its_own_and_stands_in_one_row(case):
    mesh, each = case
    nodes = [f"n{number}" for number in range(1, mesh.world_size // each + 1)]

    found = placed(mesh, nodes, each)

    assert [row["rank"] for row in found] == list(range(mesh.world_size))
    assert len({tuple(row[axis] for axis in AXES) for row in found}) == mesh.world_size
    rows = rank_map(mesh, nodes, each)[1:]
    if not any(row.startswith("...") for row in rows):
        ranges = [row.split()[1].partition("-") for row in rows]
        ends = [(int(first), int(last or first)) for first, _, last in ranges]
        listed = [rank for first, last in ends for rank in range(first, last + 1)]
        assert listed == list(range(mesh.world_size))


def test_tensor_parallel_ranks_are_beside_each_other_and_experts_within_the_shards():
    mesh = Mesh(pp=2, dp_replicate=2, dp_shard=4, ep=2)

    assert [mesh.place(rank)["dp_replicate"] for rank in range(8)] == [0] * 4 + [1] * 4
    assert [mesh.place(rank)["ep"] for rank in range(4)] == [0, 1, 0, 1]
    assert [Mesh(dp_shard=2, tp=2).place(rank)["tp"] for rank in range(4)] == [0, 1, 0, 1]
    assert mesh.place(8)["pp"] == 1


def test_ranks_that_share_sequences_lie_side_by_side_and_read_the_same_samples():
    mesh = Mesh(dp_replicate=2, dp_shard=4, cp=2)

    assert mesh.data_ranks == 4
    assert [mesh.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [mesh.cp_rank(rank) for rank in range(8)] == [0, 1] * 4
    assert [mesh.place(rank)["cp"] for rank in range(8)] == [0, 1] * 4
    assert [mesh.dp_rank(rank) for rank in range(8)] == list(range(8))
    assert mesh.text == "dp_replicate=2 dp_shard=4 cp=2"


def test_a_node_that_lies_across_a_stage_has_a_row_for_each_part():
    rows = rank_map(Mesh(pp=2, dp_shard=3, tp=2), ["a", "b", "c"], 4)

    assert rows == [
        "node  ranks  pp  dp_shard  tp",
        "a     0-3    0   0-1       0-1",
        "b     4-5    0   2         0-1",
        "b     6-7    1   0         0-1",
        "c     8-11   1   1-2       0-1",
    ]


def test_a_row_holds_every_combination_of_its_places_also_where_a_node_cuts_a_tp_group():
    assert rank_map(Mesh(dp_shard=5, tp=2), ["a", "b"], 5) == [
        "node  ranks  dp_shard  tp",
        "a     0-1    0         0-1",
        "a     2-3    1         0-1",
        "a     4      2         0",
        "b     5      2         1",
        "b     6-7    3         0-1",
        "b     8-9    4         0-1",
    ]


def test_experts_have_a_column_and_one_process_has_one_as_well():
    experts = rank_map(Mesh(dp_shard=4, ep=2), ["a", "b"], 2)

    assert experts == [
        "node  ranks  dp_shard  ep",
        "a     0-1    0-1       0-1",
        "b     2-3    2-3       0-1",
    ]
    assert [row.split() for row in rank_map(Mesh(), ["a"], 1)] == [
        ["node", "ranks", "dp_shard"],
        ["a", "0", "0"],
    ]
    assert Mesh().as_dict() == {"dp_shard": 1}
    assert Mesh(pp=2, ep=2).text == "pp=2 ep=2"


def test_nodes_are_folded_and_rows_left_out_only_where_there_are_too_many():
    nodes = [f"n{number}" for number in range(1, 14)]

    assert len(rank_map(Mesh(dp_shard=8), nodes[:8], 1)) == 1 + 8
    assert len(rank_map(Mesh(dp_shard=9), nodes[:9], 1)) == 1 + 1
    assert len(rank_map(Mesh(pp=12), nodes[:12], 1)) == 1 + 12
    assert rank_map(Mesh(pp=13), nodes, 1)[-1].startswith("... 1 row")
    copies = rank_map(Mesh(dp_replicate=3, dp_shard=4), nodes[:12], 1)
    assert [row.split()[0] for row in copies[1:]] == ["n[1-4]", "n[5-8]", "n[9-12]"]


def test_ranks_that_are_not_there_have_no_place():
    assert [row["rank"] for row in placed(Mesh(dp_shard=4), ["a"], 2)] == [0, 1]
    assert [row["node"] for row in placed(Mesh(dp_shard=3), ["a", "b"], 2)] == ["a", "a", "b"]


def test_many_nodes_are_folded_by_stage_and_the_screen_stays_short():
    nodes = [f"n{number}" for number in range(1, 65)]

    folded = rank_map(Mesh(pp=2, dp_shard=32, tp=8), nodes, 8)
    long = rank_map(Mesh(pp=64, tp=8), nodes, 8)

    assert folded[1].split() == ["n[1-32]", "0-255", "0", "0-31", "0-7"]
    assert len(folded) == 3
    assert len(long) == 15
    assert set(long[-3].split()) == {"..."}
    assert long[-2].split() == ["n64", "504-511", "63", "0-7"]
    assert long[-1] == "... 52 rows more (--json has all)"


# ---- status


@pytest.fixture
def story(tmp_path):
    return Story(tmp_path / "lm").submitted().started(1, nodes=("n1", "n2")).restored(1)


def said(story, attempt, **axes):
    mesh = {**dict.fromkeys((*AXES, "ep"), 1), **axes}
    return story.add("mesh", attempt, engine="fsdp2", ranks_per_node=2, **mesh)


def as_text(status):
    return drawing.drawn(StatusScreen(status), 80)


def shown(story):
    return status_of(RunHistory.read(story.run), Answer(None), name="lm", now=story.t)


def test_status_shows_the_mesh_of_the_newest_attempt_and_who_stands_where(story):
    said(story, 1, pp=2, tp=2)

    text = as_text(shown(story))

    assert "mesh        fsdp2, pp=2 tp=2 (2 nodes x 2 ranks)\n" in text
    assert "            n1    0-1    0   0-1\n            n2    2-3    1   0-1\n" in text
    mesh = json.loads(json.dumps(as_json(shown(story))))["mesh"]
    assert mesh["mesh"]["pp"] == 2
    assert mesh["ranks"][2]["node"] == "n2"


def test_status_without_a_word_on_the_mesh_shows_none_and_an_older_ones_is_over(story):
    assert "mesh" not in as_text(shown(story))
    said(story, 1, pp=2, tp=2).ended(1, "preempted", "requeue")
    story.started(2, nodes=("n3",))

    assert "mesh" not in as_text(shown(story))
    assert as_json(shown(story))["mesh"] is None
    said(story, 1, pp=4)  # an old attempt that goes on writing
    assert as_json(shown(story))["mesh"] is None


def test_status_of_plain_data_parallelism_needs_no_map(story):
    said(story, 1, dp_shard=4)

    lines = as_text(shown(story)).splitlines()

    at = lines.index("mesh        fsdp2, dp_shard=4 (2 nodes x 2 ranks)")
    assert not lines[at + 1].startswith(" ")


def test_one_process_has_no_mesh_to_show(story):
    assert "mesh" not in as_text(shown(said(story, 1)))


def test_a_mesh_that_makes_no_sense_does_not_keep_the_screen_from_being_shown(story):
    story.add("mesh", 1, engine=None, pp="two", tp=-3, dp_shard=64, ranks_per_node=0)

    assert "mesh        " in as_text(shown(story))
    as_json(shown(story))
