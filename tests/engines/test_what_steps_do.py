"""What equal losses and weights cannot show: which exchanges a step makes, and in what numbers.

A setting that is ignored trains the same bits, only slower or in more memory. So the operators of
one step are counted, as torch dispatches them.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.checkpoint.format.manifest import TensorEntry
from hpctrain.checkpoint.tensors.boxes import DTYPES
from hpctrain.core.world import World
from hpctrain.errors import UsageError
from hpctrain.train.engines import native
from hpctrain.train.engines import state as names
from hpctrain.train.engines.parallelize import names_of, point_to
from hpctrain.train.joining_ranks import join_world
from tests.support import lm_training as lmt
from tests.support.gloo import launch

pytestmark = pytest.mark.quick

ON_2 = {
    "ddp": {"kind": "ddp"},
    "ddp bf16": {"kind": "ddp", "precision": "bf16"},
    "ddp fp16": {"kind": "ddp", "precision": "fp16"},
    "fsdp2": {},
    "fsdp2 bf16": {"precision": "bf16"},
    "fsdp2 fp16": {"precision": "fp16"},
    "fsdp2 kept": {"reshard_after_forward": False},
    "fsdp2 each pass": {"reduce_each_pass": True},
}
ALONE = World(0, 0, 1, torch.device("cpu"))
UNITS = 4
"""Of FSDP2 in the tiny model: embedding, two blocks, and norm and head. DDP has a bucket for
gradients, and exchanges which parameters were used."""
BLOCKS = 2


class Counting(TorchDispatchMode):
    """How often each operator ran, by its first argument's dtype."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        dtype = next((str(one.dtype) for one in args if isinstance(one, torch.Tensor)), "")
        self.seen[operator.overloadpacket.__name__, dtype.removeprefix("torch.")] += 1
        return operator(*args, **(kwargs or {}))

    def of(self, name):
        return sum(count for (operator, _), count in self.seen.items() if operator == name)

    def dtypes(self, name):
        return {dtype for operator, dtype in self.seen if operator == name}


def counted(engine, passes):
    """Gathers, reductions, and the dtypes of matrix products and of reductions in one step."""
    with Counting() as counting:
        engine.forward_backward(lmt.microbatches(engine, 0, per_rank=passes), lmt.share)
    reduced = "_reduce_scatter_base_"
    return {
        "gathers": counting.of("_allgather_base_"),
        "scatters": counting.of(reduced),
        "sums": counting.of("allreduce_"),
        "products": counting.dtypes("mm"),
        "reduced": counting.dtypes(reduced),
    }


def on_two():
    world = join_world()
    return {
        (name, passes): counted(lmt.engine_of(world, lmt.lm(), **settings), passes)
        for name, settings in ON_2.items()
        for passes in (1, 4)
    }


@functools.cache
def steps():
    """Of both ranks: what each engine does in a step of one pass, and of four."""
    return launch(on_two, 2)


def test_gradients_travel_in_each_pass_where_that_is_asked_for():
    for rank in steps():
        one, four = rank["fsdp2 each pass", 1], rank["fsdp2 each pass", 4]
        assert (one["scatters"], four["scatters"]) == (UNITS, 4 * UNITS)


@pytest.mark.parametrize("name", [name for name in ON_2 if name != "fsdp2 each pass"])
def test_gradients_travel_once_a_step_however_many_passes_it_has(name):
    for rank in steps():
        one, four = rank[name, 1], rank[name, 4]
        assert (one["scatters"], one["sums"]) == (four["scatters"], four["sums"])
        assert one["scatters"] == (0 if name.startswith("ddp") else UNITS)
        assert one["sums"] > (1 if name.startswith("ddp") else 0)  # one is of the step's loss


@pytest.mark.parametrize("name", [name for name in ON_2 if name.startswith("fsdp2")])
def test_blocks_are_gathered_again_backwards_unless_they_are_kept(name):
    for rank in steps():
        for passes in (1, 4):
            backward = 0 if name == "fsdp2 kept" else BLOCKS
            assert rank[name, passes]["gathers"] == passes * (UNITS + backward)


@pytest.mark.parametrize("name", ON_2)
def test_products_are_in_the_precision_asked_for_and_gradients_add_in_fp32(name):
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(name.rpartition(" ")[2], "float32")
    for rank in steps():
        for passes in (1, 4):
            assert rank[name, passes]["products"] == {dtype}
            assert rank[name, passes]["reduced"] <= {"float32"}


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")]
)
def test_one_process_computes_in_the_precision_asked_for_too(precision, dtype):
    engine = lmt.engine_of(ALONE, lmt.lm(), precision=precision)

    assert counted(engine, 2)["products"] == {dtype}
    with Counting() as counting:
        engine.evaluate(lmt.microbatches(engine, 0), lmt.share)
    assert counting.dtypes("mm") == {dtype}


def policies(offload):
    """With which policy each unit is sharded."""
    seen = []

    def recording(module, **options):
        seen.append(options.get("offload_policy", OffloadPolicy()))
        return fully_shard(module, **options)

    fully_shard, native.fully_shard = native.fully_shard, recording
    lmt.engine_of(join_world(), lmt.lm(), offload=offload)
    return [isinstance(policy, CPUOffloadPolicy) for policy in seen]


def test_offload_gives_every_unit_the_policy_that_keeps_it_on_the_cpu():
    """On a CPU nothing else tells: shards lie there anyway."""
    root = 1
    assert launch(policies, 1, offload="cpu") == [[True] * (UNITS + root)]
    assert launch(policies, 1, offload="none") == [[False] * (UNITS + root)]


SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 320,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip


class Logits(nn.Module):
    """A decoder of transformers that gives its logits alone."""

    def __init__(self, family):
        import transformers

        super().__init__()
        config = getattr(transformers, f"{family}Config")(**SIZES)
        self.decoder = getattr(transformers, f"{family}ForCausalLM")(config)

    def forward(self, tokens):
        return self.decoder(tokens).logits


class ByHand(nn.Module):
    """No head of its own: the embedding's weights are used beside its forward pass."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(320, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.tokens.weight.T


DECODERS = {
    "recipe": lmt.lm,
    "Llama": lambda: Logits("Llama"),
    "Gemma": lambda: Logits("Gemma"),
    "by hand": ByHand,
}
ENDS = {
    "recipe": (["embedding.weight"], ["norm.weight", "head.weight"], []),
    "Llama": (
        ["decoder.model.embed_tokens.weight"],
        ["decoder.model.norm.weight", "decoder.lm_head.weight"],
        [],
    ),
    "Gemma": ([], [], ["decoder.model.embed_tokens.weight", "decoder.model.norm.weight"]),
    "by hand": ([], [], ["tokens.weight", "norm.weight", "norm.bias"]),
}
"""Of each decoder: parameters that are gathered first, last, and during the whole pass."""


def gathered_of(model):
    return [
        name for name, parameter in model.named_parameters() if not hasattr(parameter, "to_local")
    ]


def gathered_when(engine):
    """Of one step: what is gathered in the first block's forward pass, with the loss, and after
    it, and how many gathers and reductions it makes."""
    moments = []
    blocks = next(module for module in engine.model.modules() if isinstance(module, nn.ModuleList))
    blocks[0].register_forward_pre_hook(lambda *_: moments.append(gathered_of(engine.model)))

    def share(logits, targets):
        moments.append(gathered_of(engine.model))
        return lmt.share(logits, targets)

    with Counting() as counting:
        engine.forward_backward(lmt.microbatches(engine, 0, per_rank=1), share)
    counts = counting.of("_allgather_base_"), counting.of("_reduce_scatter_base_")
    moments.append(gathered_of(engine.model))
    engine.optimizer.zero_grad()
    return moments[0], moments[-2], moments[-1], counts


def with_evaluations(engine):
    """Losses and norms of three steps, with forward passes between the backward pass and the
    update, and before a save, that no backward pass follows."""
    numbers = []
    for step in range(3):
        batch = lmt.microbatches(engine, step)
        numbers.append(engine.forward_backward(batch, lmt.share))
        numbers.append(engine.evaluate(batch, lmt.share))
        assert engine.kind == "plain" or not gathered_of(engine.model)
        with torch.no_grad():
            engine.model(batch[0].inputs)
        numbers.append(engine.step())
    engine.state()
    with torch.no_grad():
        engine.model(batch[0].inputs)
    saved = engine.state().shared
    return numbers, [name for name in saved if ".exp_avg" in name], lmt.arrays(saved)


def decoders(world=None):
    world = world or join_world()
    found = {}
    for name, build in DECODERS.items():
        torch.manual_seed(5)
        engine = lmt.engine_of(world, build())
        when = gathered_when(engine) if world.is_distributed else ()
        found[name] = (when, with_evaluations(engine))
    return found


@functools.cache
def decoders_on_two():
    return launch(decoders, 2)


def test_embedding_and_head_are_gathered_when_they_are_needed():
    """A tied head shares its weights with the embedding: they stay gathered in between."""
    for rank in decoders_on_two():
        for name, ((block, loss, after, counts), _) in rank.items():
            first, last, always = ENDS[name]
            assert sorted(p for p in block if ".0." not in p) == sorted(always), name
            assert sorted(loss) == sorted(last + always), name
            assert not after
            units = BLOCKS + bool(first) + bool(last) + bool(always)
            assert counts == (units + BLOCKS, units), name


def test_what_a_forward_pass_without_a_backward_pass_gathers_is_neither_trained_nor_saved():
    alone = decoders(ALONE)
    for rank in decoders_on_two():
        for name, (_, (numbers, moments, saved)) in rank.items():
            _, (expected, its_moments, its_saved) = alone[name]
            assert numbers == pytest.approx(expected, rel=1e-4), name
            assert sorted(moments) == sorted(its_moments), name
            for key, value in its_saved.items():
                assert abs(saved[key] - value).max() < 1e-4, (name, key)


ROUTING = ("sort", "bincount", "all_to_all_single", "mm", "_grouped_mm")


def routed(world=None):
    """How often each operator of an expert's work runs in a step, by what is computed again."""
    world = world or join_world()
    settings = {"ep": "2"} if world.is_distributed else {"kind": "ddp"}
    found = {}
    for how in ("no", "selective", "full"):
        engine = lmt.engine_of(world, lmt.lm(experts=4), activation_checkpointing=how, **settings)
        with Counting() as counting:
            engine.forward_backward(lmt.microbatches(engine, 0, per_rank=1), lmt.share)
        found[how] = {name: counting.of(name) for name in ROUTING}
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_selective_recomputation_does_not_decide_again_where_a_token_goes(ranks):
    for found in [routed(ALONE)] if ranks == 1 else launch(routed, ranks):
        assert found["selective"] == found["no"]
        exchanges = 0 if ranks == 1 else 5  # counts, tokens, answers; tokens and answers backwards
        assert found["no"]["all_to_all_single"] == exchanges * BLOCKS
        products = "_grouped_mm" if TorchVersion(torch.__version__) >= "2.13" else "mm"
        assert found["no"][products] >= 9 * BLOCKS
        assert found["no"]["sort"] == found["full"]["sort"] / 2 > 0
        assert found["full"][products] > found["no"][products]


def test_a_parameter_that_is_lost_while_the_model_is_spread_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    before = names_of(model)
    model[1] = nn.Identity()

    with pytest.raises(UsageError, match=r"^1\.bias is lost .*: it would not train$"):
        point_to(optimizer, model, before, may_lack=False)
    point_to(optimizer, model, before, may_lack=True)
    assert [id(one) for one in optimizer.param_groups[0]["params"]] == list(before)[:2]


def counts_after(world, kind, *, save):
    """Adam's counts, losses and weights after two steps, with a save before the first or not."""
    engine = lmt.engine_of(world, lmt.lm(), kind=kind)
    at_save = lmt.arrays(engine.state().shared) if save else {}
    trained = lmt.train(engine, 2)
    counts = dict(_counts(lmt.arrays(engine.state().shared)))
    return dict(_counts(at_save)), counts, trained


def _counts(state):
    return ((name, float(value)) for name, value in state.items() if name.endswith(".step"))


def with_and_without(world=None):
    world = world or join_world()
    return {
        (kind, save): counts_after(world, kind, save=save)
        for kind in ("ddp", "fsdp2")
        for save in (True, False)
        if world.is_distributed or kind == "ddp"
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_before_the_first_step_changes_nothing_of_what_follows(ranks):
    """Torch makes state by a real step, and would leave Adam's count at 1."""
    for found in [with_and_without(ALONE)] if ranks == 1 else launch(with_and_without, ranks):
        for kind in {kind for kind, _ in found}:
            at_save, counts, trained = found[kind, True]
            _, expected, untouched = found[kind, False]
            assert at_save == {}
            assert counts.keys() == expected.keys()
            assert set(counts.values()) == set(expected.values()) == {2.0}
            assert trained.losses == untouched.losses
            assert trained.norms == untouched.norms
            for name, weight in untouched.weights.items():
                assert (trained.weights[name] == weight).all(), name


class CountsInPython(torch.optim.SGD):
    """An optimizer whose count of steps is a plain number, as some people's are."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                held = self.state[parameter]
                held["step"] = held.get("step", 0) + 1


def entries_of(state):
    """What a manifest says of some tensors."""
    return {
        name: TensorEntry(name, DTYPES[tensor.dtype], tuple(tensor.shape))
        for name, tensor in state.items()
    }


def through_a_checkpoint(model, optimizer, state):
    """Load a state as a resume does."""
    wanted = names.wanted(model, optimizer, entries_of(state))
    assert wanted.keys() == state.keys()
    for name, tensor in wanted.items():
        tensor.copy_(state[name])
    names.apply(model, optimizer, wanted)


def test_a_count_that_is_a_plain_number_comes_back_as_one():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = CountsInPython(model.parameters(), lr=0.1)
    fresh = CountsInPython(other.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.step()

    through_a_checkpoint(other, fresh, names.collect(model, optimizer))

    assert [held["step"] for held in fresh.state.values()] == [3, 3]
    assert {type(held["step"]) for held in fresh.state.values()} == {int}


def test_a_load_makes_state_without_a_step_of_the_optimizer():
    """A step has effects that nobody knows of an optimizer that is not torch's."""
    torch.manual_seed(0)
    model, other = nn.Linear(3, 5), nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    fresh.step = None
    state = {name: tensor.clone() for name, tensor in names.collect(model, optimizer).items()}

    through_a_checkpoint(other, fresh, state)

    back = names.collect(other, fresh)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    assert [parameter.grad for parameter in other.parameters()] == [None, None]
