"""Settings come in layers: later ones win, each value keeps its origin, nothing unknown passes."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields

import pytest

from hpctrain.core.settings import layers
from hpctrain.core.settings.fields import keys_of
from hpctrain.core.settings.layers import read_toml
from hpctrain.core.settings.schema import REMOVED, RENAMED, Settings, sections, value_at
from hpctrain.core.settings.spec import Entry, Spec, load_spec
from hpctrain.errors import UsageError


def layer(values, name="hpctrain.toml"):
    return layers.Layer(name, values, lambda section, key: f"{name}:{section}.{key}")


def source(tmp_path, text, top=("cluster", "site")):
    path = tmp_path / "hpctrain.toml"
    path.write_text(text)
    return layers.from_toml(read_toml(path, shown="hpctrain.toml"), name="hpctrain.toml", top=top)


def test_later_layers_win_and_every_value_has_an_origin():
    site = layer({"slurm": {"nodes": "8", "partition": "gpu"}}, "site x")
    flags = layers.flag_layer({"slurm.nodes": ("--nodes", "2-4"), "slurm.qos": ("--qos", None)})

    settings, origins = layers.resolve([site, flags])

    assert settings.slurm.nodes == "2-4"
    assert settings.slurm.partition == "gpu"
    assert origins["slurm.nodes"] == "flag --nodes"
    assert origins["slurm.partition"] == "site x:slurm.partition"
    assert origins["slurm.qos"] == "default"
    paths = {f"{name}.{f.name}" for name, cls in sections().items() for f in fields(cls)}
    assert set(origins) == paths


def test_layers_lie_on_an_older_runs_settings_without_changing_them():
    base, base_origins = layers.resolve([layer({"train": {"steps": 7}})])

    settings, origins = layers.resolve(
        [layers.flag_layer({"slurm.nodes": ("--nodes", "3")})], base=base, origins=base_origins
    )

    assert (settings.train.steps, settings.slurm.nodes) == (7, "3")
    assert origins["train.steps"] == "hpctrain.toml:train.steps"
    assert base.slurm.nodes == "1"
    assert base_origins["slurm.nodes"] == "default"


def test_settings_are_changed_by_a_layer_alone():
    settings, origins = layers.resolve([])

    with pytest.raises(FrozenInstanceError):
        settings.slurm.nodes = "2"
    with pytest.raises(FrozenInstanceError):
        settings.slurm = settings.slurm

    chosen = layers.Chosen({"slurm.nodes": ("2", "why")}, ["said"])
    above, above_origins = chosen.upon(settings, origins)
    assert (above.slurm.nodes, above_origins["slurm.nodes"]) == ("2", "why")
    assert (settings.slurm.nodes, origins["slurm.nodes"]) == ("1", "default")


def test_lists_of_two_settings_are_not_shared():
    assert Settings().slurm.extra is not Settings().slurm.extra


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[slurm]\nnodes = 4\n\npartiton = 'x'\n",
            "hpctrain.toml:4: slurm.partiton is not a setting; did you mean slurm.partition?",
        ),
        (
            "[slurm]\nlr = 1\n",
            "hpctrain.toml:2: slurm.lr is not a setting; did you mean train.lr?",
        ),
        ("\n[slrum]\nnodes = 4\n", "hpctrain.toml:2: slrum is not a section; did you mean slurm?"),
        (
            "[budget]\nzzzzzz = 4\n",
            (
                "hpctrain.toml:2: budget.zzzzzz is not a setting; "
                "[budget] has preemptions, time_limits, nodes, crashes, storage, no_progress"
            ),
        ),
        (
            "steps = 4\n",
            "hpctrain.toml:1: steps stands outside its table; put it under [profile] or [train]",
        ),
        ("sites = 'x'\n", "hpctrain.toml:1: sites is not a section; did you mean site?"),
        ("[[slurm]]\nnodes=1", "hpctrain.toml:1: slurm must be one table, begun by [slurm]"),
        ("site = 4\n", "hpctrain.toml:1: site is 4; it takes text in quotes"),
        ("env = 4\n", "hpctrain.toml:1: env must be a table of NAME = value"),
    ],
)
def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_name(tmp_path, text, message):
    with pytest.raises(UsageError) as caught:
        layers.resolve([source(tmp_path, text).layer])

    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[train]\nlr = "fast"', 'hpctrain.toml:2: train.lr is "fast"; it takes a number'),
        ("[train]\nlr = nan", "hpctrain.toml:2: train.lr is nan; it takes a number"),
        ("[train]\nsteps = 1.5", "hpctrain.toml:2: train.steps is 1.5; it takes a whole number"),
        ("[train]\nsteps = true", "hpctrain.toml:2: train.steps is true; it takes a whole number"),
        ("[train]\naudit = 1", "hpctrain.toml:2: train.audit is 1; it takes true or false"),
        ("[slurm]\nextra = 'x'", 'hpctrain.toml:2: slurm.extra is "x"; it takes a list of texts'),
        ("[slurm]\nextra = [1]", "hpctrain.toml:2: slurm.extra is [1]; it takes a list of texts"),
        ("[slurm]\nnodes = 1.5", "hpctrain.toml:2: slurm.nodes is 1.5; it takes text"),
        (
            "[engine]\nkind = 'zero'",
            (
                'hpctrain.toml:2: engine.kind is "zero"; '
                "it takes one of ddp, fsdp2, zero0, zero1, zero2, zero3"
            ),
        ),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_line(tmp_path, text, message):
    with pytest.raises(UsageError) as caught:
        layers.resolve([source(tmp_path, text).layer])

    assert str(caught.value) == message


def test_toml_spellings_that_people_write_are_understood(tmp_path):
    text = "[slurm]\nnodes = 4\ntime = 01:30:00\nmem = 0\n[train]\nlr = 1\n"

    settings, _ = layers.resolve([source(tmp_path, text).layer])

    assert (settings.slurm.nodes, settings.slurm.time, settings.slurm.mem) == ("4", "01:30:00", "0")
    assert settings.train.lr == 1.0
    assert isinstance(settings.train.lr, float)


def test_env_and_top_keys_are_taken_apart_from_settings(tmp_path):
    taken = source(tmp_path, 'site = "x"\n[env]\nA = 1\n[slurm]\nnodes = 2\n')

    assert taken.top == {"site": "x"}
    assert taken.env == {"A": 1}
    assert taken.layer.values == {"slurm": {"nodes": 2}}
    assert taken.layer.where("env", "A") == "hpctrain.toml:3"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.steps=500", 500),
        ("train.lr=3e-4", 3e-4),
        ("train.lr=1", 1.0),
        ("train.audit=true", True),
        ("train.audit=False", False),
        ("slurm.nodes=2-4", "2-4"),
        ("slurm.nodes=4", "4"),
        ("slurm.time=01:00:00", "01:00:00"),
        ("slurm.mem=1_000", "1_000"),
        ('slurm.partition="gpu"', "gpu"),
        ("slurm.partition=", ""),
        ("slurm.extra=--x=1", ["--x=1"]),
        ("slurm.extra=['--x=1', '--y']", ["--x=1", "--y"]),
        ("train.data=/a=b", "/a=b"),
    ],
)
def test_set_is_read_by_the_type_of_its_setting(text, expected):
    _, _, value = layers.parse_set(text)

    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("train.steps", r"not of the form section.key=value"),
        ("steps=4", r"not of the form section.key=value"),
        ("train.=4", r"not of the form section.key=value"),
        ("train.stps=4", r"train.stps is not a setting; did you mean train.steps\?"),
        ("trian.steps=4", r"trian is not a section; did you mean train\?"),
        ("train.steps=4.5", r"train.steps is 4.5; it takes a whole number"),
        ("train.steps=many", r'train.steps is "many"; it takes a whole number'),
        (f"train.steps={2**63}", rf"train.steps is {2**63}; it takes a whole number"),
        ("train.audit=1", r'train.audit is "1"; it takes true or false'),
        ("engine.kind=zero", r"it takes one of ddp, fsdp2, zero0, zero1, zero2, zero3"),
    ],
)
def test_a_wrong_set_is_refused_in_the_form_in_which_a_wrong_value_is(text, match):
    """Which check found it is not the user's business: see `check.py`, which names the origin."""
    with pytest.raises(UsageError, match=match) as caught:
        layers.parse_set(text)

    shown = text if "not of the form" in match else text.partition("=")[0]
    assert str(caught.value).startswith(f"flag --set {shown}: ")


def test_sets_of_a_list_add_up_and_other_repeats_are_refused():
    flags = layers.flag_layer({}, ["slurm.extra=--a", "slurm.extra=--b"])
    assert flags.values["slurm"]["extra"] == ["--a", "--b"]

    with pytest.raises(
        UsageError, match=r"slurm.nodes is given twice: flag --nodes and flag --set"
    ):
        layers.flag_layer({"slurm.nodes": ("--nodes", "4")}, ["slurm.nodes=2"])
    with pytest.raises(UsageError, match=r"train.lr is given twice"):
        layers.flag_layer({}, ["train.lr=1", "train.lr=2"])


@pytest.mark.parametrize("path", REMOVED)
def test_a_key_that_was_a_setting_is_refused_with_what_holds_now(path, tmp_path):
    section, _, key = path.partition(".")
    assert key not in keys_of(sections()[section])

    with pytest.raises(UsageError) as caught:
        layers.parse_set(f"{path}=1")
    why = f"{path} is not a setting any more: {REMOVED[path]}; take it out"
    assert str(caught.value) == f"flag --set {path}: {why}"
    read = source(tmp_path, f"[{section}]\n{key} = 1\n")
    with pytest.raises(UsageError) as caught:
        layers.resolve([read.layer])
    assert str(caught.value) == f"hpctrain.toml:2: {why}"


@pytest.mark.parametrize("path", REMOVED)
def test_a_spec_that_has_it_is_read(path, tmp_path):
    Spec("a", "id", 1.0, "local", "", Entry("recipe")).dump(tmp_path / "spec.json")
    raw = json.loads((tmp_path / "spec.json").read_text())
    section, _, key = path.partition(".")
    raw["settings"][section][key] = "auto"
    raw["origins"][path] = "flag --set"
    (tmp_path / "spec.json").write_text(json.dumps(raw))

    spec = load_spec(tmp_path / "spec.json")
    assert (spec.settings, spec.origins) == (Settings(), {})


OLD_NAMES = {"alive.memory_buddy": "alive.memory_peer"}
"""Written out here: one that is lost from the table would only be a test less."""


def test_each_old_name_of_a_setting_is_tested():
    assert RENAMED == OLD_NAMES


@pytest.mark.parametrize(("old", "new"), OLD_NAMES.items())
def test_an_old_name_of_a_setting_is_read_everywhere_and_never_written(old, new, tmp_path):
    section, _, key = old.partition(".")
    assert key not in keys_of(sections()[section])
    value = "no"
    assert value_at(Settings(), new) != value

    assert layers.parse_set(f"{old}={value}") == (*new.split("."), value)
    flags = layers.flag_layer({}, [f"{old}={value}"])
    read = source(tmp_path, f'[{section}]\n{key} = "{value}"\n')
    for layer, origin in ((flags, f"flag --set {new}"), (read.layer, "hpctrain.toml:2")):
        settings, origins = layers.resolve([layer])
        assert (value_at(settings, new), origins[new]) == (value, origin)
        assert old not in origins

    Spec("a", "id", 1.0, "local", "", Entry("recipe")).dump(tmp_path / "spec.json")
    raw = json.loads((tmp_path / "spec.json").read_text())
    raw["settings"][section][key] = value
    del raw["settings"][section][new.partition(".")[2]]
    raw["origins"][old] = "hpctrain.toml:2"
    raw["chosen"] = [old]
    (tmp_path / "spec.json").write_text(json.dumps(raw))

    spec = load_spec(tmp_path / "spec.json")
    assert (value_at(spec.settings, new), spec.origins) == (value, {new: "hpctrain.toml:2"})
    assert value_at(spec.given()[0], new) == value_at(Settings(), new)
    spec.dump(tmp_path / "spec.json")
    assert key not in json.loads((tmp_path / "spec.json").read_text())["settings"][section]
