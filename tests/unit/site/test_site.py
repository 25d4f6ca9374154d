"""A preset as the rest of hpctrain sees it, and the layers in which it is looked for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpctrain.cluster.site.load import layers, load_site, require_usable
from hpctrain.cluster.site.schema import About, Site
from hpctrain.core.base.files import data_dir
from hpctrain.core.settings.layers import resolve
from hpctrain.errors import UsageError

TEXT = """\
description = "a machine"
[sources]
guide = "a page"
[partitions.gpu]
source = "guide"
gpus_per_node = 4
max_time = 12:00:00
[partitions.gpu.preemption]
mode = "requeue"
[partitions.empty]
[env.multi_node]
NCCL_NET = { value = "IB", why = "the plugin hangs" }
[env.when.new]
nccl = ">=2.27"
set.NCCL_PROTO = "^LL128"
[settings.slurm]
partition = "gpu"
nodes = 4
"""


@pytest.fixture
def juniper(tmp_path):
    """A site in a folder of HPCTRAIN_SITE_PATH, and its file."""
    path = tmp_path / "juniper.toml"
    path.write_text(TEXT)
    return load_site("juniper", environ={"HPCTRAIN_SITE_PATH": str(tmp_path)}), path


def test_values_are_typed_and_what_is_missing_is_unknown(juniper):
    site, _ = juniper

    assert (site.name, site.about.description) == ("juniper", "a machine")
    assert site.partitions["gpu"].max_time == "12:00:00"
    assert site.partitions["gpu"].preemption.mode == "requeue"
    assert site.partitions["gpu"].preemption.grace_s is None
    assert set(site.partitions) == {"gpu", "empty"}
    assert site.env.multi_node == {"NCCL_NET": "IB"}
    assert site.env.when["new"].set == {"NCCL_PROTO": "^LL128"}
    assert site.slurm.account_required is None


def test_every_value_knows_its_file_line_source_and_reason(juniper):
    site, path = juniper

    leaf = site.leaves["partitions", "gpu", "preemption", "mode"]
    assert (leaf.layer, leaf.file, leaf.line, leaf.source) == ("system", str(path), 9, "guide")
    assert site.leaves["env", "multi_node", "NCCL_NET"].why == "the plugin hangs"
    assert site.where("env", "multi_node", "NCCL_NET") == f"site juniper ({path}:12)"
    assert site.where("env", "when", "new") == f"site juniper ({path}:14)"
    assert site.where("network", "kind") == site.where() == "site juniper"


def test_settings_of_a_site_are_a_layer_of_settings(juniper):
    site, path = juniper

    settings, origins = resolve([site.layer])

    assert (settings.slurm.partition, settings.slurm.nodes) == ("gpu", "4")
    assert origins["slurm.partition"] == f"site juniper ({path}:17)"
    assert origins["slurm.qos"] == "default"


def test_a_preset_survives_spec_json(juniper):
    site, _ = juniper

    assert Site.from_plain(json.loads(json.dumps(site.as_plain()))) == site


def test_a_preset_of_another_version_is_refused(juniper):
    plain = juniper[0].as_plain()

    with pytest.raises(UsageError, match="format 7, this hpctrain reads 1"):
        Site.from_plain(plain | {"format": 7})
    with pytest.raises(UsageError, match=r"another version of hpctrain .*'later'"):
        Site.from_plain(plain | {"network": {"later": 1}})
    with pytest.raises(UsageError, match=r"another version of hpctrain .*'lock'"):
        Site.from_plain({key: value for key, value in plain.items() if key != "lock"})


def test_layers_go_from_the_packaged_ones_to_the_users():
    environ = {"HPCTRAIN_SITE_PATH": os.pathsep.join(["/a", "", "/b"]), "HOME": "/home/kim"}

    assert layers(environ) == [
        ("packaged", data_dir("site-configs")),
        ("system", Path("/etc/hpctrain/sites")),
        ("system", Path("/b")),
        ("system", Path("/a")),
        ("user", Path("/home/kim/.config/hpctrain/sites")),
    ]
    assert layers(environ | {"XDG_CONFIG_HOME": "/x"})[-1][1] == Path("/x/hpctrain/sites")
    assert [layer for layer, _ in layers({})] == ["packaged", "system"]


@pytest.mark.parametrize(
    ("stability", "match"),
    [
        ("unverified", 'site juniper is unverified: .* with stability = "local"'),
        ("base", 'site juniper is a base for other presets.* extends = "juniper"'),
    ],
)
def test_a_preset_that_is_not_for_jobs_is_refused(stability, match):
    with pytest.raises(UsageError, match=match):
        require_usable(Site(About(name="juniper", stability=stability)))


@pytest.mark.parametrize("stability", ["reference", "local"])
def test_other_presets_can_be_used(stability):
    require_usable(Site(About(name="juniper", stability=stability)))
