"""engine.exact: the same bits at any number of data-parallel ranks."""

import hashlib
import logging
import os

import pytest

from hpctrain.core.base.mesh import MicrobatchRules
from hpctrain.errors import UsageError
from hpctrain.train.data.batches import GlobalBatches, cut_step
from hpctrain.train.data.order import SampleOrder
from tests.support.gloo import launch
from tests.support.recipe import assert_same_bits, full_state, losses, make_run, train
from tests.support.sampling import some

SEQ_LEN, PER_LEAF = 8, 2
CASES = [
    {"kind": "ddp", "leaves": 12},
    {"kind": "ddp", "leaves": 7, "precision": "bf16"},
    {"kind": "fsdp2", "leaves": 12, "precision": "bf16"},
    {"kind": "fsdp2", "leaves": 7},
    {"kind": "fsdp2", "leaves": 7, "sometimes": True},
    {"kind": "ddp", "leaves": 7, "sometimes": True},
]

OTHERWISE = [
    (CASES[1], {"activation_checkpointing": "selective"}),
    (CASES[3], {"activation_checkpointing": "full"}),
    (CASES[3], {"activation_checkpointing": "selective", "compile": "aot_eager"}),
    (CASES[3], {"offload": "cpu"}),
]
"""What only changes where and when things are computed, dropout included."""


def named(case):
    return " ".join(f"{key}={value}" for key, value in case.items())


def lm(*, sometimes=False):
    """The recipe's tiny model.

    With `sometimes`, half of the leaves do not use its last norm, and there are ranks that hold
    nothing of a parameter that has three rows only.
    """
    import torch

    from hpctrain.recipes.lm.model import LM, LMConfig

    model = LM(LMConfig(layers=2, dim=16, heads=2, seq_len=SEQ_LEN, dropout=0.1), seed=3)
    if sometimes:
        model.few = torch.nn.Linear(16, 3, bias=False)
        model.few.weight.data.copy_(torch.linspace(-0.1, 0.1, 48).view(3, 16))

        def forward(tokens):
            x = model.dropout(model.embedding(tokens))
            for block in model.blocks:
                x = block(x)
            x = x + model.few(x).mean(dim=-1, keepdim=True)
            return model.head(model.norm(x) if int(tokens[0, 0]) % 2 else x)

        model.forward = forward
    return model


def engine_of(world, model, **settings):
    import torch

    from hpctrain.core.base.mesh import Mesh
    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.train.engines.engine import EngineInputs
    from hpctrain.train.engines.exact import ExactCopies
    from hpctrain.train.engines.parallelize import parallelize

    # full_tensor() of a test is nothing that training does
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    chosen = EngineSettings(**{"exact": True, "precision": "fp32", **settings})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    if not world.is_distributed:
        known = frozenset(model.state_dict())
        return ExactCopies("plain", model, optimizer, EngineInputs(chosen, world, Mesh(), known))
    return parallelize(model, optimizer, chosen, world)


def microbatches(step):
    import torch

    from hpctrain.train.engines.engine import Microbatch

    found = []
    for piece in step.pieces:
        text = [
            torch.randint(0, 257, (SEQ_LEN + 1,), generator=torch.Generator().manual_seed(index))
            for index in piece.indices
        ]
        tokens = torch.stack(text)
        targets = (tokens[:, 1:], torch.tensor(piece.weights))
        found.append(Microbatch(tokens[:, :-1], targets, piece.leaf))
    return found


def share_of(samples):
    from hpctrain.recipes.lm.model import token_loss

    def share(logits, targets):
        # The second part is not weighted: what a spare pass leaves must not count all the same.
        mean = (token_loss(logits, targets[0]) * targets[1]).sum() / (samples * SEQ_LEN)
        return mean + 1e-3 * logits.float().square().mean()

    return share


def trained(engine, leaves, *, steps=2):
    """Losses, norms, a validation loss, the next random number, a hash of all weights."""
    import torch

    samples = leaves * PER_LEAF - 1  # the last leaf is smaller
    share = share_of(samples)
    order, place = SampleOrder(1000, 5), (engine.data_rank, engine.data_ranks)
    data = GlobalBatches(order, samples, *place, PER_LEAF, passes=engine.passes)
    seen = []
    for step in range(steps):
        engine.at_step(step)
        seen.append(engine.forward_backward(microbatches(data.next_step()), share).hex())
        seen.append(engine.step().hex())
        held_out = cut_step(
            range(1000, 1000 + 9), *place, PER_LEAF, index=int, passes=engine.passes
        )
        seen.append(engine.evaluate(microbatches(held_out), share_of(9)).hex())
        seen.append(float(torch.rand(())).hex())
    weights = engine.state().shared.items()
    whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in weights}
    flat = [whole[name].detach().reshape(-1).float() for name in sorted(whole)]
    return [*seen, hashlib.sha256(torch.cat(flat).numpy().tobytes()).hexdigest()]


def train_all(cases, *, plain=False):
    """What training left in each case, by its name."""
    import warnings

    from hpctrain.train.joining_ranks import join_world

    # torch's compiler asks for a gradient where there is none, and warns of it
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    if plain:
        del os.environ["RANK"]
    world = join_world()
    found = {}
    for case in cases:
        settings = dict(case)
        leaves, model = settings.pop("leaves"), lm(sometimes=settings.pop("sometimes", False))
        found[named(case)] = trained(engine_of(world, model, **settings), leaves)
    return found


@pytest.fixture(scope="module")
def alone():
    """What one rank gets."""
    (found,) = launch(train_all, 1, cases=CASES)
    return found


# And 4, in tests/slurm/test_engines.py.
@pytest.mark.parametrize("ranks", [3, *some([2, 6, 8], 1)])
def test_losses_norms_and_weights_are_the_same_bits_at_any_number_of_ranks(alone, ranks):
    for found in launch(train_all, ranks, cases=CASES):
        assert found == alone


def test_where_and_when_things_are_computed_changes_no_bit(alone):
    same = {named({**case, **changes}): alone[named(case)] for case, changes in OTHERWISE}

    cases = [{**case, **changes} for case, changes in OTHERWISE]
    for found in launch(train_all, 2, cases=cases):
        assert found == same


def test_a_process_without_a_group_gets_the_bits_of_ddp(alone):
    cases = [case for case in CASES if case["kind"] == "ddp"]

    (found,) = launch(train_all, 1, cases=cases, plain=True)

    assert found == {name: alone[name] for name in map(named, cases)}


@pytest.mark.parametrize("most", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_with_a_fixed_tensor_parallel_axis_they_are_the_same_bits_too(most):
    case = {"kind": "fsdp2", "leaves": 5, "tp": "2"}

    first, *others = (launch(train_all, 2 * ranks, cases=[case]) for ranks in (1, most))

    for found in (*first, *(rank for ranks in others for rank in ranks)):
        assert found == first[0]


def train_stock(case, monkey):
    """The same with one piece taken out that the promise stands on."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    from hpctrain.train.engines import exact

    if monkey == "scatter":
        real = FSDPModule.set_custom_reduce_scatter

        def torchs(module, comm):
            del comm
            real(module, DefaultReduceScatter())

        FSDPModule.set_custom_reduce_scatter = torchs
        exact.ExactShards.after_pass = lambda self, now: None
    else:
        exact.seed_of = lambda seed, step, leaf: int(os.environ["RANK"])
    return train_all([case])


@pytest.mark.parametrize("monkey", ["scatter", "seeds"])
def test_other_sums_and_other_random_numbers_give_other_bits(alone, monkey):
    """So the tests above can see what they are there to see."""
    case = CASES[3]

    found, *_ = launch(train_stock, 3, case=case, monkey=monkey)

    assert found[named(case)][0] != alone[named(case)][0] or monkey == "scatter"
    assert found[named(case)][-1] != alone[named(case)][-1]


def test_a_resume_on_another_number_of_ranks_goes_on_with_the_same_bits(tmp_path):
    options = {"engine__kind": "fsdp2", "engine__exact": True, "train__micro_batch": 5}
    quiet = make_run(tmp_path / "quiet", **options)
    train(quiet, 2)
    run = make_run(tmp_path / "run", **options)

    train(run, 3, stop_at=3)
    train(run, 1, stop_at=8)
    train(run, 4)

    assert_same_bits(full_state(run, 12), full_state(quiet, 12))
    assert losses(run) == losses(quiet)


WORDS = [
    "was given [None, None]",
    "was given [",
    "was given [",
    "call engine.step before the next",
    "cannot run microbatches one by one",
    "backward pass twice in a microbatch",
]


def refusals():
    """What each way of use that cannot be exact is told, on this rank."""
    from hpctrain.train.joining_ranks import join_world

    world = join_world()
    engine = engine_of(world, lm(), kind="fsdp2")
    place, share = (engine.data_rank, engine.data_ranks), share_of(8)
    good = cut_step(range(8), *place, PER_LEAF, index=int, passes=engine.passes)
    other = cut_step(range(8), *place, PER_LEAF, index=int)
    swapped = cut_step(
        range(8), 1 - place[0], place[1], PER_LEAF, index=int, passes=MicrobatchRules(leaves=True)
    )
    told = []

    def tries(act):
        with pytest.raises(UsageError) as refused:
            act()
        told.append(str(refused.value))

    tries(lambda: engine.forward_backward(microbatches(other), share))
    tries(lambda: engine.forward_backward(microbatches(swapped), share))
    tries(lambda: engine.forward_backward(microbatches(good)[: 1 + place[0]], share))
    engine.forward_backward(microbatches(good), share)
    tries(lambda: engine.forward_backward(microbatches(good), share))
    engine.step()
    engine.forward_backward(microbatches(good), share)
    tries(lambda: engine.microbatch(last=True).__enter__())
    engine.step()
    twice = lm()
    twice.blocks.append(twice.blocks[0])
    engine = engine_of(world, twice, kind="fsdp2")
    tries(lambda: engine.forward_backward(microbatches(good), share))
    return told


def test_microbatches_that_cannot_be_exact_are_refused_on_every_rank():
    for rank, told in enumerate(launch(refusals, 2)):
        assert len(told) == len(WORDS)
        for line, words in zip(told, WORDS, strict=True):
            assert words in line
        assert f"rank {rank} was given [None, None]" in told[0]


@pytest.mark.parametrize(
    ("settings", "mesh", "fused", "norm", "words"),
    [
        ({"kind": "fsdp2"}, {"pp": 2}, False, "LayerNorm", "engine.pp = 2"),
        ({"kind": "fsdp2"}, {"dp_shard": 2, "ep": 2}, False, "LayerNorm", "engine.ep = 2"),
        ({"kind": "fsdp2"}, {"dp_replicate": 2}, False, "LayerNorm", "engine.dp_replicate = 2"),
        ({"compile": "inductor"}, {}, False, "LayerNorm", "engine.compile = aot_eager or no"),
        ({}, {}, True, "LayerNorm", "fused=False"),
        ({}, {}, False, "BatchNorm1d", "1 is a batch norm"),
    ],
)
def test_what_cannot_be_exact_is_refused(settings, mesh, fused, norm, words):
    from torch import nn
    from torch.optim import AdamW

    from hpctrain.core.base.mesh import Mesh
    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.train.engines.exact import refuse

    model = nn.Sequential(nn.Linear(2, 2), getattr(nn, norm)(2))
    chosen = EngineSettings(exact=True, **settings)

    with pytest.raises(UsageError, match=words):
        refuse(chosen, model, AdamW(model.parameters(), fused=fused), Mesh(**mesh))
    refuse(EngineSettings(), nn.Linear(2, 2), AdamW(model.parameters()), Mesh(dp_replicate=2))


def one_process_in_bf16():
    from hpctrain.train.joining_ranks import join_world

    del os.environ["RANK"]
    with pytest.raises(UsageError, match="needs a process group for one rank too"):
        engine_of(join_world(), lm(), kind="fsdp2", precision="bf16")


def test_a_process_without_a_group_that_would_round_otherwise_than_fsdp2_is_refused():
    launch(one_process_in_bf16, 1)


@pytest.mark.parametrize("most", [1, 3, 5, 100])
def test_buckets_hold_each_element_once_in_order(most):
    from hpctrain.train.engines.exact import buckets

    cut = buckets([4, 0, 1, 7], most)

    elements = [(part.tensor, at) for bucket in cut for part in bucket for at in part.elements]
    assert elements == [
        (tensor, at) for tensor, size in enumerate([4, 0, 1, 7]) for at in range(size)
    ]
    for bucket in cut:
        ends = [part.offset + len(part.elements) for part in bucket]
        assert [part.offset for part in bucket] == [0, *ends[:-1]]
        assert ends[-1] <= most
