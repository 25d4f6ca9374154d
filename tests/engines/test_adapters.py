"""peft's adapters: they alone train and are saved; what they adapt is read again at each start."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hpctrain.checkpoint.format.manifest import load as load_manifest
from hpctrain.core.settings.schema import EngineSettings, replaced
from hpctrain.core.settings.spec import load_spec
from hpctrain.core.world import World
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.ledger.run.fence import take_attempt
from hpctrain.train.engines.parallelize import parallelize
from hpctrain.train.joining_ranks import join_world
from tests.support import hub
from tests.support.exchange import Commands
from tests.support.gloo import launch
from tests.support.recipe import assert_same_bits, make_run

STEPS, MIDDLE = 4, 2
RATE = 1e-2


def adapted(model, **options):
    from peft import LoraConfig, get_peft_model

    chosen = {"target_modules": ["q_proj", "v_proj"], "r": 4, "task_type": "CAUSAL_LM"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(model, LoraConfig(**{**chosen, **options}))


def adam(model):
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=RATE)


def share(output, targets):
    logits = output.logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets[:, 1:].flatten()) / 2


def trained(*, folder, last, is_given=False, **options):
    """An attempt on this rank: state of the adapters, logits at the end, or what was refused."""
    import hpctrain

    run = hpctrain.init()
    try:
        if is_given:
            base = hub.loaded(folder)
            torch.manual_seed(5)  # each rank and each start makes the same adapters
            model = adapted(base, **options)
            engine = run.parallelize(model, adam(model))
        else:
            build = lambda: adapted(hub.build(folder.name), **options)  # noqa: E731
            engine = run.parallelize(build, adam, pretrained=folder)
        for _ in run.steps(total=last):
            batch = [hpctrain.Microbatch(hub.tokens(), hub.tokens())]
            engine.forward_backward(batch, share)
            engine.step()
    except HpctrainError as error:
        return str(error)
    state = {
        name: one.full_tensor() if hasattr(one, "full_tensor") else one.clone()
        for name, one in engine.state().shared.items()
    }
    seen = []

    def keep(output, _):
        seen.append(output.logits.clone())
        return output.logits.sum() * 0

    engine.evaluate([hpctrain.Microbatch(hub.tokens(), None)], keep)
    return state, seen[0]


def attempt(run, ranks, **options):
    """What every rank of a run's next attempt says, which is the same."""
    taken = take_attempt(run, job_id="test", restarts=0)
    os.environ["HPCTRAIN_RUN_DIR"] = str(run.root)
    os.environ["HPCTRAIN_ATTEMPT"] = json.dumps(asdict(taken))
    try:
        first, *others = launch(trained, ranks, **options)
    finally:
        del os.environ["HPCTRAIN_RUN_DIR"], os.environ["HPCTRAIN_ATTEMPT"]
    if isinstance(first, str):
        assert others == [first] * len(others)
        return first
    for state, logits in others:
        assert_same_bits(state, first[0])
        assert logits.equal(first[1])
    return first


def newest(run):
    return load_manifest(max(run.checkpoints.glob("step-*")) / "MANIFEST.json")


@pytest.mark.parametrize(
    ("kind", "is_given"),
    [("ddp", False), pytest.param("fsdp2", False, marks=pytest.mark.soak), ("fsdp2", True)],
)
def test_adapters_alone_are_saved_and_go_on_bit_equal(tmp_path, kind, is_given):
    folder = hub.make(tmp_path, "Llama")
    quiet = make_run(tmp_path / "quiet", engine__kind=kind)
    stopped = make_run(tmp_path / "stopped", engine__kind=kind)
    options = {"folder": folder, "is_given": is_given}

    straight, _ = attempt(quiet, 2, last=STEPS, **options)
    attempt(stopped, 2, last=MIDDLE, **options)
    resumed, _ = attempt(stopped, 2, last=STEPS, **options)

    assert_same_bits(straight, resumed)
    names = [entry.name for entry in newest(stopped).tensors]
    weights = [name for name in names if name.startswith("model.")]
    assert len(weights) == 8
    assert all(".lora_" in name for name in names if name.startswith(("model.", "optim.")))
    before, _ = attempt(make_run(tmp_path / "none"), 1, last=0, **options)
    assert all(not resumed[name].equal(before[name]) for name in weights)


def test_adapters_go_on_under_another_engine_and_are_what_peft_loads(tmp_path, capsys):
    from peft import PeftModel, get_peft_model_state_dict

    folder = hub.make(tmp_path, "Qwen3")
    run = make_run(tmp_path / "run", engine__kind="fsdp2")
    options = {"folder": folder, "modules_to_save": ["lm_head"]}
    begun, _ = attempt(make_run(tmp_path / "none"), 1, last=0, **options)
    head = begun["model.base_model.model.lm_head.modules_to_save.default.weight"]
    assert head.equal(hub.loaded(folder).lm_head.weight)
    assert not [name for name in begun if "original_module" in name]
    state, _ = attempt(run, 2, last=MIDDLE, **options)
    spec = load_spec(run.spec)
    spec.settings = replaced(spec.settings, {"engine.kind": "ddp"})
    spec.dump(run.spec)

    again, logits = attempt(run, 1, last=MIDDLE, **options)

    assert_same_bits(state, again)
    call = Commands(tmp_path, capsys)
    code, out, _ = call("export", run.root, MIDDLE, tmp_path / "out")
    assert (code, "adapter_model.safetensors" in out) == (0, True)
    there = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert there == ["adapter_config.json", "adapter_model.safetensors"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # peft warns of keys that it misses
        warnings.simplefilter("ignore", FutureWarning)
        model = PeftModel.from_pretrained(hub.loaded(folder), tmp_path / "out").eval()
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert written.keys() == get_peft_model_state_dict(model).keys()
    assert (hub.logits(model) - logits).abs().max() < 1e-5
    assert (hub.logits(hub.loaded(folder)) - logits).abs().max() > 1e-3
    assert model.peft_config["default"].base_model_name_or_path == str(folder)


def test_a_folder_that_has_changed_or_is_gone_is_refused(tmp_path):
    folder = hub.make(tmp_path, "Llama")
    run = make_run(tmp_path / "run", engine__kind="fsdp2")
    attempt(run, 2, folder=folder, last=MIDDLE)
    other = hub.make(tmp_path / "other", "Llama", seed=4)

    said = attempt(run, 2, folder=other, last=STEPS)

    assert f"the adapters were trained on the weights of {folder}, and those of {other}" in said
    shutil.rmtree(folder)
    assert f"{folder}, which the model's weights come from, is not a folder" in attempt(
        run, 2, folder=folder, last=STEPS
    )
    assert "\n" not in said


ENGINES = [
    ({"kind": "zero2"}, "engine zero2 does not"),
    ({"kind": "fsdp2", "tp": "2"}, "engine.tp 2"),
]


def test_an_evaluation_loads_adapters_onto_the_weights_that_they_were_trained_on(tmp_path):
    folder = hub.make(tmp_path, "Llama")
    run = make_run(tmp_path / "run", engine__kind="ddp")
    state, _ = attempt(run, 1, folder=folder, last=MIDDLE)
    weights = {name: one for name, one in state.items() if name.startswith("model.")}
    path = max(run.checkpoints.glob("step-*"))

    for loaded in launch(judged, 2, folder=folder, checkpoint=path):
        assert_same_bits(loaded, weights)

    other = hub.make(tmp_path / "other", "Llama", seed=4)
    said = launch(judged, 2, folder=other, checkpoint=path)
    assert said[0] == said[1]
    assert said[0].startswith("the adapters were trained on the weights of")


def judged(*, folder, checkpoint):
    """What an evaluation's model holds of the training's, or what was refused."""
    import hpctrain

    os.environ["HPCTRAIN_CHECKPOINT"] = str(checkpoint)
    settings = EngineSettings(kind="fsdp2")
    build = lambda: adapted(hub.build(folder.name))  # noqa: E731
    engine = parallelize(build, adam, settings, join_world(), pretrained=folder)
    try:
        hpctrain.evaluation().load(engine)
    except HpctrainError as error:
        return str(error)
    held = engine.state(with_optimizer=False).shared
    return {n: one.full_tensor() if hasattr(one, "full_tensor") else one for n, one in held.items()}


def refusals(folder):
    world, said = join_world(), []
    for options, _ in ENGINES:
        settings = EngineSettings(**options)
        with pytest.raises(UsageError) as error:
            parallelize(
                lambda: adapted(hub.build("Llama")), adam, settings, world, pretrained=folder
            )
        said.append(str(error.value))
    return said


def test_engines_that_do_not_train_adapters_say_so(tmp_path):
    for said in launch(refusals, 2, folder=hub.make(tmp_path, "Llama")):
        for line, (_, expected) in zip(said, ENGINES, strict=True):
            assert expected in line
            assert "choose ddp, or fsdp2" in line
            assert "\n" not in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' begins with values"),
        ({"use_dora": True}, "use_dora begins with values"),
    ],
)
def test_adapters_that_are_made_of_the_weights_are_refused_in_a_function(tmp_path, options, said):
    folder = hub.make(tmp_path, "Llama")
    alone = World(0, 0, 1, torch.device("cpu"))
    with pytest.raises(UsageError, match=said):
        parallelize(
            lambda: adapted(hub.build("Llama"), **options),
            adam,
            EngineSettings(),
            alone,
            pretrained=folder,
        )
