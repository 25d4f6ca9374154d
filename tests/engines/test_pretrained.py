"""Models that begin with the weights of a Hugging Face folder, read by range into the shards."""

from __future__ import annotations

import gc
import json
import struct
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hpctrain.checkpoint.exchange import export, safetensors
from hpctrain.checkpoint.format.manifest import load as load_manifest
from hpctrain.core.settings.schema import EngineSettings
from hpctrain.core.world import World
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.ledger.plan.mesh import FAMILIES
from hpctrain.train.engines import pretrained
from hpctrain.train.engines.engine import Microbatch
from hpctrain.train.engines.parallelize import _mesh_of, parallelize
from hpctrain.train.joining_ranks import join_world
from tests.support import fuzzing, hub, layouts
from tests.support.gloo import launch

ALONE = World(0, 0, 1, torch.device("cpu"))
NAME = "model.safetensors"


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def begun(folder, build, world=ALONE, **settings):
    options = EngineSettings(**{"precision": "fp32", **settings})
    return parallelize(build, adam, options, world, seed=5, pretrained=folder)


def weights_of(engine):
    return {
        name.removesuffix(".weight"): value
        for name, value in layouts.whole(engine).items()
        if not name.endswith((".exp_avg", ".exp_avg_sq", ".step"))
    }


# ---- the same bits and logits under every engine, there and back

ENGINES = {
    "ddp": {"kind": "ddp"},
    "fsdp2": {"kind": "fsdp2"},
    "tp": {"kind": "fsdp2", "tp": "2", "sequence_parallel": False},
    "pp": {"kind": "fsdp2", "pp": "2", "pp_schedule": "gpipe"},
    "zero3": {"kind": "zero3"},
}


def logits_of(engine):
    seen = []

    def keep(output, _):
        seen.append(output.logits.detach().clone())
        return output.logits.sum() * 0

    engine.evaluate([Microbatch(hub.tokens(), None)], keep)
    return seen[0] if seen else None  # of a pipeline the last stage has them


def share(output, targets):
    logits = output.logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits.float(), targets[:, 1:].flatten()) / 2


def there_and_back(root, families):
    """Each family under each engine: as it begins, and after a step that is saved."""
    warnings.simplefilter("ignore")  # DeepSpeed's imports
    pretrained.READ_BYTES = 300  # several reads for each tensor
    world, values = join_world(), {}
    for family in families:
        for name, options in ENGINES.items():
            build = partial(hub.build, family)
            engine = begun(root / family, build, world, **options)
            first = weights_of(engine), logits_of(engine)
            engine.forward_backward([Microbatch(hub.tokens(), hub.tokens())], share)
            engine.step()
            layouts.save(engine, root / f"{family}-{name}", 1)
            values[family, name] = (*first, logits_of(engine))
            del engine
            gc.collect()
    return values


def exported(root, folder, out):
    (step,) = root.rglob("MANIFEST.json")
    manifest = load_manifest(step)
    tensors = export.chosen(step.parent, manifest, everything=False, dtype=None, strip="")
    tensors = safetensors.untied(folder, tensors)
    safetensors.write(out, tensors, beside=safetensors.beside(folder, tensors))
    return out


FEW = ("Qwen3", "Gemma")
"""Norms of heads, in fp16; a tied head, in bf16."""


@pytest.mark.parametrize(
    "families",
    [
        pytest.param(FEW, id="few"),
        pytest.param(
            tuple(family for family in hub.FAMILIES if family not in FEW),
            id="the others",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_hugging_face_weights_go_there_and_back_under_every_engine(tmp_path, families):
    """The bits of `from_pretrained` in fp32; its logits; and those of what was exported."""
    theirs = {family: hub.loaded(hub.make(tmp_path, family)) for family in families}

    (_, values) = launch(there_and_back, 2, root=tmp_path, families=families)

    assert {family for family, _ in values} == set(families)

    for (family, engine), (weights, logits, later) in values.items():
        reference = theirs[family]
        named = dict(reference.named_parameters())
        assert weights.keys() == named.keys(), engine
        assert not [name for name in named if not weights[name].equal(named[name])], engine
        assert (logits - hub.logits(reference)).abs().max() < 1e-5, (family, engine)
        name = f"{family}-{engine}"
        out = exported(tmp_path / name, tmp_path / family, tmp_path / f"out-{name}")
        again = hub.loaded(out)
        assert (later - hub.logits(again)).abs().max() < 1e-5, (family, engine)
        assert (later - logits).abs().max() > 1e-3, (family, engine)
        assert again.config.tie_word_embeddings == reference.config.tie_word_embeddings


def of_type(kind):
    import transformers

    sizes = {**hub.SIZES, "num_key_value_heads": 2}
    return transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **sizes), attn_implementation="eager"
    )


def types_under(axis):
    """Logits of each type of model that the table has, cut and whole."""
    world, values = join_world(), {}
    for kind in sorted(FAMILIES[axis]):
        settings = EngineSettings(**{"precision": "fp32", **ENGINES[axis]})
        cut, whole = (
            parallelize(partial(of_type, kind), adam, options, place, seed=5)
            for options, place in ((settings, world), (EngineSettings(precision="fp32"), ALONE))
        )
        values[kind] = (logits_of(cut), logits_of(whole))
    return values


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_what_submit_lets_through_is_taken_by_the_engines(axis):
    (_, values) = launch(types_under, 2, axis=axis)

    assert values.keys() == FAMILIES[axis]
    for kind, (cut, whole) in values.items():
        assert (cut - whole).abs().max() < 1e-5, kind


def recipe():
    from hpctrain.recipes.lm.model import LM, LMConfig

    return LM(LMConfig(layers=2, dim=16, heads=4, seq_len=layouts.SEQ_LEN), seed=1)


def under_axes(folder):
    world, values = join_world(), {}
    for axis in ("tp", "pp"):
        engine = begun(folder, recipe, world, kind="fsdp2", **{axis: "2"})
        values[axis] = weights_of(engine)
    return values


def test_parts_of_matrices_and_of_layers_are_read_too(tmp_path):
    model = recipe()
    save_file({name: value.half() for name, value in model.state_dict().items()}, tmp_path / NAME)

    for values in launch(under_axes, 2, folder=tmp_path):
        for weights in values.values():
            for name, value in model.named_parameters():
                assert weights[name].equal(value.half().float()), name


def peak_and_bytes(folder, layers, width):
    """How far memory rose while a model was read, and the bytes that were asked of the files."""
    world = join_world()
    options = EngineSettings(kind="fsdp2", precision="fp32")
    parallelize(lambda: tower(2, 8), adam, options, world)  # what torch itself loads
    asked = []
    rows = safetensors.StoredTensor.rows

    def counted(self, first, count):
        asked.append(len(content := rows(self, first, count)))
        return content

    safetensors.StoredTensor.rows = counted
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    begun(folder, lambda: tower(layers, width), world, kind="fsdp2")
    return memory("VmHWM") - before, sum(asked)


def tower(layers, width):
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(key))
    return int(line.split()[1]) * 1024


def test_a_rank_reads_its_rows_alone_and_holds_its_shards_and_one_tensor(tmp_path):
    layers, width, ranks = 8, 3072, 4  # glibc gives back at once what is larger than 32 MiB
    save_file(tower(layers, width).bfloat16().state_dict(), tmp_path / NAME)
    tensor = width * width * 4

    for peak, asked in launch(peak_and_bytes, ranks, folder=tmp_path, layers=layers, width=width):
        assert asked == layers * tensor / 2 / ranks
        assert peak < 1.2 * (layers * tensor / ranks + tensor)


# ---- names, what is missing, what does not fit


class Body(nn.Module):
    base_model_prefix = "model"
    _keys_to_ignore_on_load_unexpected = ("old_table",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.register_buffer("table", torch.ones(2), persistent=False)


class Headed(nn.Module):
    base_model_prefix = "model"

    def __init__(self, *, tied=False, classes=4) -> None:
        super().__init__()
        self.model = Body()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, classes, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def stored(folder, model, **changes):
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    tensors |= changes
    save_file({name: one for name, one in tensors.items() if one is not None}, folder / NAME)
    return folder


def values_of(folder, build):
    return begun(folder, build).model.state_dict()


def test_names_may_have_the_models_prefix_or_lack_it(tmp_path):
    body = Body()
    save_file(body.state_dict(), tmp_path / NAME)

    values = values_of(tmp_path, Headed)

    assert all(values[f"model.{name}"].equal(value) for name, value in body.state_dict().items())
    save_file({f"model.{n}": value for n, value in body.state_dict().items()}, tmp_path / NAME)
    values = values_of(tmp_path, Body)
    assert all(values[name].equal(value) for name, value in body.state_dict().items())


def test_what_the_folder_lacks_is_the_models_own_init_and_said(tmp_path, caplog):
    full = Headed()
    stored(tmp_path, full, **{"head.weight": None})
    caplog.set_level("INFO", "hpctrain.train.engines")

    engine = begun(tmp_path, Headed)

    fresh = parallelize(Headed, adam, EngineSettings(), ALONE, seed=5).model
    assert engine.model.head.weight.equal(fresh.head.weight)
    assert engine.model.embedding.weight.equal(full.embedding.weight)
    assert engine.model.model.table.equal(torch.ones(2))
    assert f"{tmp_path} has no head.weight: made by the model's own init" in caplog.text


@pytest.mark.parametrize("kept", ["embedding.weight", "head.weight"])
def test_tied_weights_may_go_by_either_name(tmp_path, kept):
    full = Headed(tied=True)
    other = ({"embedding.weight", "head.weight"} - {kept}).pop()
    stored(tmp_path, full, **{other: None})

    model = begun(tmp_path, lambda: Headed(tied=True)).model

    assert model.head.weight is model.embedding.weight
    assert model.head.weight.equal(full.head.weight)


def test_old_files_buffers_are_passed_over_as_transformers_does(tmp_path):
    stored(
        tmp_path, Body(), **{"layers.0.rotary_emb.inv_freq": torch.ones(3)}, old_table=torch.ones(1)
    )

    assert begun(tmp_path, Body)


def quantized():
    return {"head.weight": torch.ones(4, 3).to(torch.float8_e4m3fn)}


@pytest.mark.parametrize(
    ("build", "changes", "said"),
    [
        (Headed, {"more.weight": torch.ones(2)}, "holds more.weight, which Headed does not have"),
        (
            lambda: Headed(classes=5),
            {},
            "holds head.weight as F32[4,3] and the model's is F32[5,3]",
        ),
        (Headed, quantized(), "holds head.weight as F8_E4M3[4,3] and the model's is F32[4,3]"),
        (lambda: Headed(tied=True), {}, "embedding.weight and head.weight of"),
        (lambda: nn.Linear(2, 2), {}, "holds none of the model's tensors"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, build, changes, said):
    stored(tmp_path, Headed(), **changes)

    with pytest.raises(HpctrainError) as error:
        begun(tmp_path, build)
    assert said in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_not_there_and_a_model_that_is_given_are_refused(tmp_path):
    with pytest.raises(HpctrainError, match="is not a folder here"):
        begun(tmp_path / "gone", Headed)
    with pytest.raises(UsageError, match="give it a function that builds one"):
        parallelize(
            Body(), adam(Body()), EngineSettings(), ALONE, pretrained=stored(tmp_path, Body())
        )


def test_the_folder_of_the_settings_is_taken_and_an_argument_goes_before_it(tmp_path):
    full = stored(tmp_path, Body())

    by_setting = begun(None, Body, pretrained=str(full)).model
    by_argument = begun(full, Body, pretrained=str(tmp_path / "gone")).model

    for name, value in load_file(full / NAME).items():
        assert by_setting.get_parameter(name).equal(value)
        assert by_argument.get_parameter(name).equal(value)


def test_ranks_take_the_mesh_that_submit_has_planned_by_the_config():
    """Submit has read 9 heads in config.json: 2 of a range would be refused by the engine."""
    world = World(0, 0, 6, torch.device("cpu"), control=cast("Any", object()), ranks_per_node=6)
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 9, "vocab_size": 66}
    with torch.device("meta"):
        model = hub.build("Llama", **sizes, hidden_size=72)
    settings = EngineSettings(kind="fsdp2", tp="2-3", pretrained="hub")

    assert _mesh_of(model, settings, world, None).tp == 3
    assert _mesh_of(model, replace(settings, pretrained=""), world, None).tp == 2


def test_a_resumed_model_does_not_open_the_folder(tmp_path):
    gone = tmp_path / "gone"

    engine = parallelize(Body, adam, EngineSettings(), ALONE, is_restored=True, pretrained=gone)

    assert not any(parameter.is_meta for parameter in engine.model.parameters())


# ---- whoever wrote the files


def cut_while_read(folder):
    """Rank 1 cannot read what rank 0's header names: both say so."""
    world = join_world()
    if world.rank == 1:
        read = safetensors.StoredTensor.rows

        def cut(self, first, count):
            raise safetensors.CheckpointError(f"{self.path} ends at byte 3: it was cut")

        safetensors.StoredTensor.rows = cut
    try:
        begun(folder, Headed, world, kind="fsdp2")
    except HpctrainError as error:
        return str(error)
    finally:
        if world.rank == 1:
            safetensors.StoredTensor.rows = read


def test_a_file_that_one_rank_cannot_read_ends_all_of_them_with_one_line(tmp_path):
    stored(tmp_path, Headed())

    said = launch(cut_while_read, 2, folder=tmp_path)

    assert said == [f"rank 1: {tmp_path / NAME} ends at byte 3: it was cut"] * 2


def test_a_file_that_was_cut_after_its_header_was_read_is_no_weight(tmp_path):
    stored(tmp_path, Headed())
    (tensor, *_) = safetensors.read_header(tmp_path / NAME).tensors
    content = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(content[: tensor.position + 4])

    with pytest.raises(HpctrainError, match="it was cut"):
        tensor.rows(0, tensor.shape[0])


def odd_headers(dice, content):
    """A file with something wrong in its header, or its length, or after it."""
    (length,) = struct.unpack("<Q", content[:8])
    entries = json.loads(content[8 : 8 + length])
    body = content[8 + length :]
    where = dice.choice([name for name in entries if name != "__metadata__"])
    match dice.randrange(6):
        case 0:
            entries[where][dice.choice(["dtype", "shape", "data_offsets", "more"])] = fuzzing.odd(
                dice
            )
        case 1:
            entries[where]["data_offsets"][dice.randrange(2)] = fuzzing.odd(dice)
        case 2:
            entries[where]["shape"] = [dice.choice([0, 1, 7, 2**40, 2**70])] * dice.choice(
                [1, 3, 99]
            )
        case 3:
            entries[dice.choice([str(fuzzing.odd(dice)), "a\nb", "\ud800"])] = entries.pop(where)
        case 4:
            entries = fuzzing.odd(dice)
        case 5:
            body = body[: dice.randrange(len(body))] if dice.random() < 0.5 else body + b"x"
    text = json.dumps(entries).encode()
    if dice.random() < 0.2:
        at = dice.randrange(len(text))
        text = text[:at] + dice.choice(fuzzing.RAW) + text[at + 1 :]
    size = dice.choice([len(text)] * 9 + [0, 1, 2**31, 2**63, 2**64 - 1])
    return struct.pack("<Q", size) + text + body


def odd_index(dice, index):
    entries = json.loads(json.dumps(index))
    names = entries["weight_map"]
    where = dice.choice(sorted(names))
    match dice.randrange(4):
        case 0:
            names[where] = fuzzing.odd(dice)
        case 1:
            names[str(fuzzing.odd(dice))] = names.pop(where)
        case 2:
            entries["weight_map"] = fuzzing.odd(dice)
        case 3:
            entries = fuzzing.odd(dice)
    text = json.dumps(entries).encode()
    return dice.choice(fuzzing.RAW) if dice.random() < 0.1 else text


@fuzzing.cases(300, 6000)
def test_odd_headers_and_indexes_are_read_or_refused_in_one_line(tmp_path, begin, end):
    folder = tmp_path / "hub"
    folder.mkdir()
    model = Headed()
    stored(folder, model)
    (folder / NAME).rename(folder / "a.safetensors")
    index = {"weight_map": dict.fromkeys(model.state_dict(), "a.safetensors")}
    good = {"a.safetensors": (folder / "a.safetensors").read_bytes()}
    good[safetensors.INDEX] = json.dumps(index).encode()
    refused = []
    for number, dice in fuzzing.chances(begin, end):
        odd = dict(good)
        if number % 2:
            odd[safetensors.INDEX] = odd_index(dice, index)
        else:
            odd["a.safetensors"] = odd_headers(dice, good["a.safetensors"])
        for name, content in odd.items():
            (folder / name).write_bytes(content)
        try:
            opened = pretrained.open_folder(folder, model, ALONE)
            values = [opened.whole(name) for name in model.state_dict() if name in opened]
            opened.agree(ALONE)
            assert values
        except HpctrainError as error:
            refused.append(str(error))
    assert len(refused) > (number - begin) // 2
    for line in refused:
        assert len(line) < 500, line
        assert line.isprintable(), line
