"""The shipped model: the same numbers every time, causal, and able to learn."""

import hashlib
import math

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from hpctrain.errors import UsageError
from hpctrain.recipes.lm.model import (
    LM,
    MLP,
    MODEL_BLOCKS,
    Block,
    Experts,
    LMConfig,
    MoE,
    can_group,
    count_parameters,
    flops_per_token,
    rotate,
    token_loss,
)

GROUPS = TorchVersion(torch.__version__) >= "2.13"
SMALL = LMConfig(layers=2, dim=32, heads=2, seq_len=16)
SPARSE = LMConfig(layers=2, dim=32, heads=2, seq_len=16, experts=5, experts_per_token=2)
SHAPES = pytest.mark.parametrize("config", [SMALL, SPARSE], ids=["dense", "experts"])


def tokens(batch=3, time=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 257, (batch, time), generator=generator)


def digest(model):
    parts = [weight.detach().numpy().tobytes() for weight in model.state_dict().values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def train(config, steps, seed=1):
    model = LM(config, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = tokens(4, 17)
    losses = []
    for _ in range(steps):
        loss = token_loss(model(text[:, :-1]), text[:, 1:]).sum() / text[:, 1:].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, digest(model)


@SHAPES
def test_the_seed_alone_decides_the_weights(config):
    torch.manual_seed(1)
    one = digest(LM(config, seed=7))
    torch.manual_seed(2)
    other = digest(LM(config, seed=7))

    assert one == other
    assert digest(LM(config, seed=8)) != one


def test_building_a_model_leaves_the_global_generator_alone():
    before = torch.get_rng_state()

    LM(SMALL, seed=7)

    assert torch.equal(torch.get_rng_state(), before)


@SHAPES
def test_training_twice_gives_the_same_bits(config):
    assert train(config, 5) == train(config, 5)


@SHAPES
def test_the_model_learns_what_it_is_shown(config):
    losses, _ = train(config, 60)

    assert losses[0] == pytest.approx(math.log(320), abs=0.2)
    assert losses[-1] < 0.5 * losses[0]


@SHAPES
def test_no_position_sees_a_later_one(config):
    model = LM(config, seed=1)
    text = tokens()
    changed = text.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 257

    before, after = model(text), model(changed)

    # Not equal bits: experts multiply as many rows at once as have come to them.
    assert torch.allclose(before[:, :10], after[:, :10], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_the_order_of_earlier_tokens_matters():
    torch.manual_seed(0)
    model = LM(LMConfig(layers=1, dim=32, heads=2, seq_len=16), seed=1)
    text = tokens(1)
    swapped = text[:, [1, 0, *range(2, 16)]]

    assert not torch.allclose(model(text)[:, -1], model(swapped)[:, -1], atol=1e-7)


def test_rotation_keeps_lengths_and_makes_products_depend_on_distance_alone():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 1, 12, 8)

    turned_query, turned_key = rotate(query)[0, 0], rotate(key)[0, 0]

    assert torch.allclose(turned_query.norm(dim=-1), query[0, 0].norm(dim=-1), atol=1e-5)
    products = turned_query @ turned_key.T
    for distance in range(1, 6):
        along = products.diagonal(-distance)
        assert torch.allclose(along, along[0].expand_as(along), atol=1e-4)
    assert not torch.allclose(products[1, 0], products[5, 0], atol=1e-3)


@SHAPES
def test_a_sequence_does_not_see_the_others_of_its_batch(config):
    model = LM(config, seed=1)
    text = tokens()

    assert torch.allclose(model(text)[1:2], model(text[1:2]), atol=1e-5)


def test_the_loss_is_each_sequence_summed_in_fp32():
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 320)
    targets = tokens(3, 5)

    losses = token_loss(logits, targets)
    halved = token_loss(logits.bfloat16(), targets)

    by_hand = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0].sum(1)
    assert torch.allclose(losses, by_hand, atol=1e-4)
    assert losses.shape == (3,)
    assert halved.dtype is torch.float32


@SHAPES
def test_the_mean_loss_does_not_depend_on_how_a_batch_is_cut(config):
    model = LM(config, seed=1)
    text = tokens(5, 17)

    whole = token_loss(model(text[:, :-1]), text[:, 1:]).sum()
    cut = sum(token_loss(model(t[:, :-1]), t[:, 1:]).sum() for t in text.split([2, 2, 1]))

    assert cut.item() == pytest.approx(whole.item(), rel=1e-6)


@pytest.mark.parametrize("config", [SMALL, SPARSE, LMConfig(), LMConfig(layers=1, dim=40, heads=4)])
def test_weights_are_counted_without_building_the_model(config):
    model = LM(config, seed=0)

    assert count_parameters(config) == sum(weight.numel() for weight in model.parameters())
    assert not list(model.buffers())


@SHAPES
def test_flops_are_those_that_torch_counts(monkeypatch, config):
    # torch counts none of it
    monkeypatch.delattr(torch.nn.functional, "grouped_mm", raising=False)
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model = LM(config, seed=0)
    text = tokens(2, config.seq_len)

    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        token_loss(model(text), text).sum().backward()

    norms = sum(w.numel() for name, w in model.named_parameters() if "norm" in name)
    expected = (flops_per_token(config) - 6 * norms) * text.numel()
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-9)


def test_a_token_costs_the_experts_that_it_goes_to_and_the_router():
    unused = 3 * 3 * SPARSE.dim * SPARSE.hidden * SPARSE.layers

    assert count_parameters(SPARSE) - count_parameters(SPARSE, active=True) == unused
    assert count_parameters(SMALL, active=True) == count_parameters(SMALL)


def test_each_token_is_the_sum_of_what_its_best_experts_say():
    torch.manual_seed(0)
    moe = MoE(dim=32, hidden=96, experts=5, per_token=2)
    for weight in moe.parameters():
        nn.init.normal_(weight, std=0.2)
    x = torch.randn(3, 7, 32)

    by_hand = torch.zeros_like(x)
    for sequence in range(3):
        for position in range(7):
            token = x[sequence, position]
            share, best = moe.router(token).softmax(-1).topk(2)
            for part, expert in zip(share / share.sum(), best, strict=True):
                mlp = MLP(SMALL)
                for name in ("gate", "up", "down"):
                    getattr(mlp, name).weight = nn.Parameter(getattr(moe.experts, name)[expert])
                by_hand[sequence, position] += part * mlp(token)

    assert torch.allclose(moe(x), by_hand, atol=1e-5)


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 0], [0, 9, 0, 0]], ids=str)
@pytest.mark.parametrize("cast", [False, True], ids=["fp32", "bf16"])
def test_experts_in_one_call_say_what_they_say_one_by_one(monkeypatch, counts, cast):
    torch.manual_seed(4)
    experts, tokens = Experts(16, 32, 4), torch.randn(sum(counts), 16, requires_grad=True)
    for weight in experts.parameters():
        nn.init.normal_(weight)
    found = []
    for together in (True, False):
        if not together:
            monkeypatch.delattr(torch.nn.functional, "grouped_mm", raising=False)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            assert can_group(tokens, experts.gate) == (together and GROUPS)
            said = experts(tokens, torch.tensor(counts))
        inputs = (tokens, *experts.parameters())
        found.append((said, *torch.autograd.grad(said, inputs, torch.ones_like(said))))
    assert found[0][0].dtype is (torch.bfloat16 if cast else torch.float32)
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)


def test_rows_that_torch_cannot_group_go_one_by_one():
    assert not can_group(torch.ones(2, 6), Experts(6, 32, 2).gate)
    assert not can_group(torch.ones(2, 8).double(), Experts(8, 32, 2).gate)


def test_of_experts_with_one_score_the_first_ones_are_chosen():
    moe = MoE(dim=32, hidden=96, experts=64, per_token=3)
    nn.init.zeros_(moe.router.weight)

    shares, chosen = moe.choose(torch.ones(50, 32))

    assert chosen.tolist() == [[0, 1, 2]] * 50
    assert torch.allclose(shares, torch.tensor(1 / 3))


def test_what_experts_add_to_the_residual_stream_begins_small():
    weights = dict(LM(SPARSE, seed=1).named_parameters())

    assert weights["blocks.0.mlp.experts.up"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["blocks.0.mlp.experts.down"].std().item() == pytest.approx(0.01, rel=0.05)


def test_blocks_are_where_engines_look_for_them():
    model = LM(SMALL, seed=0)

    assert isinstance(model.blocks, nn.ModuleList)
    assert len(model.blocks) == SMALL.layers
    assert all(isinstance(block, MODEL_BLOCKS) for block in model.blocks)
    assert Block in MODEL_BLOCKS


def test_dropout_acts_in_training_only():
    config = LMConfig(layers=1, dim=32, heads=2, seq_len=16, dropout=0.5)
    model = LM(config, seed=1)
    text = tokens()

    assert not torch.equal(model(text), model(text))
    model.eval()
    assert torch.equal(model(text), model(text))


@SHAPES
def test_bf16_autocast_stays_close_and_warns_of_nothing(config):
    model = LM(config, seed=1)
    text = tokens()

    full = token_loss(model(text), text)
    with torch.autocast("cpu", torch.bfloat16):
        half = token_loss(model(text), text)
    half.sum().backward()

    assert half.dtype is torch.float32
    assert torch.allclose(half, full, rtol=0.02)


@pytest.mark.parametrize("chosen", [0, 5])
def test_more_experts_for_a_token_than_there_are_is_refused(chosen):
    with pytest.raises(UsageError, match=rf"to {chosen} \(train.experts_per_token\) of 4 experts"):
        LMConfig(experts=4, experts_per_token=chosen)


@pytest.mark.parametrize(("dim", "heads"), [(32, 3), (20, 4)])
def test_heads_that_do_not_fit_the_width_are_refused(dim, heads):
    with pytest.raises(UsageError, match=rf"{dim} .*{heads} heads"):
        LMConfig(dim=dim, heads=heads)
