"""Every packaged preset loads, keeps the rules, has its sources, renders, and has a page."""

from __future__ import annotations

import datetime as dt
import re
import runpy
import subprocess
from pathlib import Path

import pytest

from hpctrain.cluster.site.detect import Surroundings, detect
from hpctrain.cluster.site.environment import Versions, derive
from hpctrain.cluster.site.load import load_site
from hpctrain.cluster.site.schema import About, Preemption
from hpctrain.core.settings.layers import Layer, resolve
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.ledger.run.layout import RunDir

TOP = Path(__file__).parents[2]
PAGES = TOP / "docs" / "sites"
GENERATOR = runpy.run_path(str(TOP / "docs" / "generate_sites.py"))
NAMES = sorted(path.stem for path in (TOP / "site-configs").glob("*.toml"))
SITES = {name: GENERATOR["load"](name) for name in NAMES}
SOURCED = [name for name, site in SITES.items() if site.about.stability != "local"]
CLUSTERS = [name for name, site in SITES.items() if site.about.stability == "reference"]
SLINGSHOT = [name for name in CLUSTERS if SITES[name].network.kind == "slingshot"]
GUIDE = TOP / "docs" / "sites.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)\)")
REVIEWED = dt.date(2026, 11, 22)
EXPECTED = (
    "stability",
    "env.when.plugin_1_5.set.FI_EFA_USE_DEVICE_RDMA",
    "env.when.plugin_1_6.set.FI_EFA_USE_DEVICE_RDMA",
)
PUBLISHED = {
    "frontier",
    "lumi-g",
    "clariden",
    "isambard-ai",
    "mila",
    "vista",
    "lonestar6",
    "sherlock",
    "snellius",
    "aws-p5",
    "azure-ndv5",
    "coreweave-h100",
    "oci-h100",
    "gcp-a3mega",
    "juwels-booster",
    "leonardo",
    "perlmutter",
}
HEADERS = {
    "perlmutter": ["--constraint=gpu", "--gpus-per-node=4", "--qos=regular"],
    "juwels-booster": ["--gres=gpu:4", "--partition=booster"],
    "leonardo": ["--gres=gpu:4", "--partition=boost_usr_prod"],
}
"""What a job of four nodes asks for."""
HERE = {
    "perlmutter": [
        {"environ": {"NERSC_HOST": "perlmutter"}},
        {"files": {"/etc/clustername": "perlmutter"}},
    ],
    "juwels-booster": [{"environ": {"SYSTEMNAME": "juwelsbooster"}}],
    "leonardo": [{"host": "login02.leonardo.local"}],
}
NOT_HERE = [
    {"environ": {"NERSC_HOST": "muller"}, "host": "login01"},
    {"environ": {"SYSTEMNAME": "juwels"}},
    {"environ": {"SYSTEMNAME": "jupiter"}},
    {"host": "login02.leonardo.local.example"},
]
"""A test system of NERSC's, other machines of JSC's, and a name that only begins alike."""


def environment(name, nodes):
    derived = derive(SITES[name], nodes=nodes, versions=Versions(nccl="2.28"), run_dir="")
    return {variable: value.value for variable, value in derived.values.items()}


def script(name, nodes):
    """A batch script as a user of that site gets it, partition and GPUs taken from the preset."""
    from hpctrain.cluster.scheduler.slurm.script import render_script

    site = SITES[name]
    asked = {"nodes": str(nodes), "time": "0:10:00"}
    for partition, limits in list(site.partitions.items())[:1]:
        asked["partition"] = partition
        asked["gpus_per_node"] = limits.gpus_per_node or 4
    flags = Layer("flags", {"slurm": asked}, lambda *_: "flag")
    settings, _ = resolve([site.layer, flags])
    spec = Spec(
        name="try",
        run_id="0123",
        created=0.0,
        cluster="slurm",
        site=name,
        entry=Entry("recipe"),
        settings=settings,
        python="/opt/venv/bin/python",
        preset=site.as_plain(),
    )
    return render_script(spec, RunDir(Path("/runs/try")), "try-12ab")


def test_the_published_clusters_are_there():
    assert set(CLUSTERS) == PUBLISHED


@pytest.mark.parametrize("name", NAMES)
def test_preset_loads_as_users_load_it(name):
    about = load_site(name, environ={}).about

    assert about.name == name
    assert about.description
    assert about.contact or about.stability == "local"


@pytest.mark.parametrize("name", NAMES)
def test_preset_has_no_error_and_no_warning(name):
    """But for what a skeleton is warned of, and a variable that only old plugins need."""
    from hpctrain.cluster.site.validate import validate

    findings = validate(SITES[name], today=REVIEWED)
    told = {f"{f.level} {f.path}" for f in findings if f.level in {"error", "warning"}}

    assert told - {f"warning {path}" for path in EXPECTED} == set()
    assert ("warning stability" in told) == (SITES[name].about.stability == "unverified")


@pytest.mark.parametrize("name", SOURCED)
def test_every_value_has_its_source(name):
    site = SITES[name]
    about = set(About.__dataclass_fields__)
    bare = [path for path, leaf in site.leaves.items() if path[0] not in about and not leaf.source]

    assert bare == []


@pytest.mark.parametrize("name", SOURCED)
def test_no_source_stands_there_for_nothing(name):
    site = SITES[name]
    used = {leaf.source for leaf in site.leaves.values()}
    own = {
        path[1]
        for path, leaf in site.leaves.items()
        if path[0] == "sources" and Path(leaf.file).stem == name
    }

    assert own - used <= {"none"}


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_preset_renders(name, nodes):
    text = script(name, nodes)
    header = [line for line in text.splitlines() if line.startswith("#SBATCH")]

    assert f"#SBATCH --nodes={nodes}" in header
    for option in SITES[name].slurm.required:
        assert f"#SBATCH {option}" in header
    for option in SITES[name].slurm.forbidden:
        assert not [line for line in header if re.match(rf"#SBATCH {option}\b", line)]
    for module in SITES[name].modules.load:
        assert f"module load {module}" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize("name", SLINGSHOT)
def test_one_node_of_slingshot_is_not_forced_onto_the_plugin(name):
    """SLURM sets up no network for a job of one node, and the plugin would not start there."""
    assert "NCCL_NET" not in environment(name, 1)
    if SITES[name].env.multi_node:
        assert "NCCL_NET" in environment(name, 2)


@pytest.mark.parametrize("name", CLUSTERS)
def test_alternative_rendezvous_comes_with_its_flag(name):
    wanted = environment(name, 2).get("FI_CXI_RDZV_PROTO") == "alt_read"

    assert wanted == ("--network=disable_rdzv_get" in SITES[name].slurm.required)


@pytest.mark.parametrize("name", HEADERS)
def test_a_job_of_four_nodes_asks_for_what_the_cluster_wants(name):
    header = [line for line in script(name, 4).splitlines() if line.startswith("#SBATCH")]

    assert {f"#SBATCH {option}" for option in ("--nodes=4", *HEADERS[name])} <= set(header)


def found_at(*, environ=None, host="", files=None):
    """The packaged site that is chosen on a machine."""
    here = Surroundings(environ or {}, host, lambda: host, lambda: None, (files or {}).get)
    detected = detect(SITES.values(), here)
    return detected.chosen.name if detected and detected.chosen else None


@pytest.mark.parametrize(("name", "here"), [(name, here) for name in HERE for here in HERE[name]])
def test_a_cluster_is_known_by_what_its_pages_name(name, here):
    assert found_at(**here) == name


@pytest.mark.parametrize("here", NOT_HERE)
def test_a_machine_beside_a_cluster_is_not_taken_for_it(here):
    assert found_at(**here) is None


def test_ranks_on_juwels_meet_over_infiniband():
    """Nodes of different cells reach each other under the name with an i only."""
    network = SITES["juwels-booster"].network
    told = environment("juwels-booster", 4)

    assert (network.rendezvous_host, network.resolve) == ("{host}i", "ipv4")
    assert (told["NCCL_SOCKET_IFNAME"], told["GLOO_SOCKET_IFNAME"]) == ("=ib0", "ib0")


def test_pages_are_current():
    written = GENERATOR["pages"]()
    there = {path.stem: path.read_text() for path in PAGES.glob("*.md")}

    assert set(there) == {*NAMES, "README"}
    stale = [name for name, text in written.items() if there[name] != text]
    assert not stale, "run: python docs/generate_sites.py"


@pytest.mark.parametrize("name", [*NAMES, "README"])
def test_links_of_pages_lead_to_files(name):
    path = PAGES / f"{name}.md"
    targets = [link for link in LINK.findall(path.read_text()) if "://" not in link]

    assert targets
    assert [link for link in targets if not (path.parent / link).exists()] == []


@pytest.mark.parametrize(
    ("preemption", "said"),
    [
        (Preemption("none"), ["not preempted"]),
        (Preemption("requeue", grace_s=0), ["no notice", "last committed checkpoint", "puts"]),
        (Preemption("requeue", 120, "SIGTERM"), ["120 s of notice by SIGTERM", "loses no step"]),
        (Preemption("requeue"), ["not documented", "last committed checkpoint"]),
        (Preemption("cancel", 60), ["60 s of notice", "does not put the job back", "resume"]),
        (Preemption("cancel", exempt_s=3600), ["first 3600 s", "does not put the job back"]),
        (Preemption("suspend"), ["no step is lost"]),
    ],
    ids=lambda value: str(getattr(value, "mode", "")),
)
def test_page_says_what_a_preemption_costs(preemption, said):
    words = GENERATOR["in_words"](preemption)

    assert [part for part in said if part not in words] == []


def guide_blocks(kind):
    return [text for language, text in BLOCK.findall(GUIDE.read_text()) if language == kind]


def test_the_guides_preset_is_a_good_one(tmp_path):
    from hpctrain.cluster.site.validate import validate

    path = tmp_path / "juniper.toml"
    path.write_text(guide_blocks("toml")[0])
    site = load_site(str(path), environ={})

    found = [f for f in validate(site, today=REVIEWED) if f.level in {"error", "warning"}]
    assert found == []
    assert site.partitions["scavenge"].preemption.grace_s == 120
    assert site.network.kind == "ib"


@pytest.mark.two_users  # a lock holds where the file is another user's
def test_the_guides_overlay_and_lock_are_read(tmp_path):
    overlay, lock = guide_blocks("toml")[1:]
    (tmp_path / "aws-p5.toml").write_text(f"{overlay}\n{lock}")
    site = load_site("aws-p5", environ={"HPCTRAIN_SITE_PATH": str(tmp_path)})

    assert site.partitions["p5"].max_time == "72:00:00"
    assert site.network.kind == "efa"
    assert "env.multi_node.NCCL_NET" in site.lock.keys


def test_the_guides_commands_are_known():
    from hpctrain.cli.main import COMMANDS
    from hpctrain.cli.sites import command as sites

    lines = [line for block in guide_blocks("console") for line in block.splitlines()]
    called = [words[1] for line in lines if len(words := line.split("hpctrain ", 1)) == 2]

    assert called
    for words in map(str.split, called):
        if words[0] == "sites":
            assert words[1] in sites.commands, words
        else:
            assert words[0] in {*COMMANDS, "preflight"}, words
