"""The shipped model: the same numbers every time, causal, and able to learn."""

import hashlib
import math

import pytest
import torch
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.recipes.lm.model import (
    LM,
    MODEL_BLOCKS,
    Block,
    LMConfig,
    count_parameters,
    flops_per_token,
    rotate,
    token_loss,
)

SMALL = LMConfig(layers=2, dim=32, heads=2, seq_len=16)


def tokens(batch=3, time=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 257, (batch, time), generator=generator)


def digest(model):
    parts = [weight.detach().numpy().tobytes() for weight in model.state_dict().values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def train(steps, seed=1):
    model = LM(SMALL, seed)
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


def test_the_seed_alone_decides_the_weights():
    torch.manual_seed(1)
    one = digest(LM(SMALL, seed=7))
    torch.manual_seed(2)
    other = digest(LM(SMALL, seed=7))

    assert one == other
    assert digest(LM(SMALL, seed=8)) != one


def test_building_a_model_leaves_the_global_generator_alone():
    before = torch.get_rng_state()

    LM(SMALL, seed=7)

    assert torch.equal(torch.get_rng_state(), before)


def test_training_twice_gives_the_same_bits():
    assert train(5) == train(5)


def test_the_model_learns_what_it_is_shown():
    losses, _ = train(60)

    assert losses[0] == pytest.approx(math.log(320), abs=0.2)
    assert losses[-1] < 0.5 * losses[0]


def test_no_position_sees_a_later_one():
    model = LM(SMALL, seed=1)
    text = tokens()
    changed = text.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 257

    before, after = model(text), model(changed)

    assert torch.equal(before[:, :10], after[:, :10])
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


def test_a_sequence_does_not_see_the_others_of_its_batch():
    model = LM(SMALL, seed=1)
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


def test_the_mean_loss_does_not_depend_on_how_a_batch_is_cut():
    model = LM(SMALL, seed=1)
    text = tokens(5, 17)

    whole = token_loss(model(text[:, :-1]), text[:, 1:]).sum()
    cut = sum(token_loss(model(t[:, :-1]), t[:, 1:]).sum() for t in text.split([2, 2, 1]))

    assert cut.item() == pytest.approx(whole.item(), rel=1e-6)


@pytest.mark.parametrize("config", [SMALL, LMConfig(), LMConfig(layers=1, dim=40, heads=4)])
def test_weights_are_counted_without_building_the_model(config):
    model = LM(config, seed=0)

    assert count_parameters(config) == sum(weight.numel() for weight in model.parameters())
    assert not list(model.buffers())


def test_flops_are_those_that_torch_counts():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model = LM(SMALL, seed=0)
    text = tokens(2, SMALL.seq_len)

    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        token_loss(model(text), text).sum().backward()

    norms = sum(w.numel() for name, w in model.named_parameters() if "norm" in name)
    expected = (flops_per_token(SMALL) - 6 * norms) * text.numel()
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-9)


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


def test_bf16_autocast_stays_close_and_warns_of_nothing():
    model = LM(SMALL, seed=1)
    text = tokens()

    full = token_loss(model(text), text)
    with torch.autocast("cpu", torch.bfloat16):
        half = token_loss(model(text), text)
    half.sum().backward()

    assert half.dtype is torch.float32
    assert torch.allclose(half, full, rtol=0.02)


@pytest.mark.parametrize(("dim", "heads"), [(32, 3), (20, 4)])
def test_heads_that_do_not_fit_the_width_are_refused(dim, heads):
    with pytest.raises(UsageError, match=rf"{dim} .*{heads} heads"):
        LMConfig(dim=dim, heads=heads)
