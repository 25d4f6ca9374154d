"""A site file's keys and values are checked one by one, and the reference says the same."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from pathlib import Path

import jsonschema
import pytest

from hpctrain.cluster.site import schema
from hpctrain.cluster.site.load import load_site
from hpctrain.cluster.site.sheet import take_apart
from hpctrain.core.base.files import data_dir
from hpctrain.core.settings.fields import keys_of
from hpctrain.core.settings.layers import read_toml
from hpctrain.errors import UsageError

DOCS = Path(__file__).parents[3] / "docs"
PRESETS = sorted(data_dir("site-configs").glob("*.toml"))
GENERATED = runpy.run_path(str(DOCS / "generate_site_reference.py"))


@pytest.fixture
def sheet(tmp_path):
    def take(text, layer="system"):
        path = tmp_path / "bad.toml"
        path.write_text(text)
        return take_apart(read_toml(path, shown="bad.toml"), name="bad", layer=layer)

    return take


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("descripton = 'x'", "1): descripton is not a key of a site preset; did you mean desc"),
        ("grace_s = 1", "did you mean partitions.X.preemption.grace_s?"),
        ("[checkpoint]", "it belongs under [settings.checkpoint]"),
        ("[zzz]", "1): zzz is not a key of a site preset; there are schema, name, "),
        ("[slurm]\npartition = 'x'", "2): slurm.partition is not a key of a site preset; as a def"),
        ("[slurm]\nqos = 'x'", "as a default of hpctrain's settings it belongs under [settings.s"),
        ("[slurm]\nforbiden = []", "did you mean slurm.forbidden?"),
        ("[network]\nflock = 'none'", "did you mean storage.flock?"),
        ("[expect]\nzzz = 1", "[expect] has driver_min, nvlinks, memlock"),
        ("[slurm]\nrequeue_add = []", "slurm.requeue_add is not a key"),
        ("[env]\nNCCL_NET = 'IB'", "put it under [env.common], [env.single_node]"),
        ("[settings.slrm]", "settings.slrm is no section of hpctrain's settings; did you mean"),
        ("[settings.zzz]", "there are slurm, "),
        ("[settings.slurm]\npartiton = 'x'", "2): slurm.partiton is not a setting; did you mean"),
        ("[settings.slurm]\ngpus_per_node = 'x'", '2): slurm.gpus_per_node is "x"; it takes'),
        ("[partitions.g.preemption]\ngrace = 1", "did you mean partitions.g.preemption.grace_s?"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_name(sheet, text, message):
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        sheet(text)

    assert str(error.value).startswith("site bad (bad.toml:")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("description = 4", "1): description is 4; it takes text in quotes"),
        ("[slurm]\nrequeue = 'yes'", '2): slurm.requeue is "yes"; it takes true or false'),
        ("[slurm]\nkill_wait_s = 30.5", "slurm.kill_wait_s is 30.5; it takes a whole number"),
        ("[slurm]\nkill_wait_s = true", "slurm.kill_wait_s is true; it takes a whole number"),
        ("[slurm]\nkill_wait_s = -1", "slurm.kill_wait_s is -1; it takes at least 0"),
        ("[baseline]\ntolerance = nan", "baseline.tolerance is NaN; it takes a number"),
        ("[slurm]\nextra = '--x'", 'slurm.extra is "--x"; it takes a list of texts'),
        ("[slurm]\nextra = [1]", "slurm.extra is [1]; it takes a list of texts"),
        ("[slurm]\nforbidden = ['gres']", 'has "gres"; it takes an option such as --gres=gpu:4'),
        ('[slurm]\nextra = ["--x=1\\n#SBATCH"]', "control characters"),
        ('[slurm]\nconstraint = "a\\nb"', "one line without control characters"),
        ("[slurm]\naccount_env = ['']", 'slurm.account_env has ""; leave empty texts out'),
        ("slurm = 3", "1): slurm is 3; it takes a table"),
        ("partitions = [1]", "partitions is [1]; it takes tables under names of their own"),
        ("[partitions]\ngpu = 4", "2): partitions.gpu is 4; it takes a table"),
        ("['partitions'.'a b']", "'a b' cannot name a table here"),
        ("[env]\ncommon = 'x'", 'env.common is "x"; it takes a table of NAME = text'),
        ("[network]\nkind = 'infiniband'", 'network.kind is "infiniband"; it takes one of ib, sl'),
        ("[slurm]\nexport = ''", 'slurm.export is ""; it takes one of all, none, unset'),
        ("[partitions.g]\nmax_time = '2 days'", 'max_time is "2 days"; it takes [days-]hours'),
        ("[partitions.g]\nmax_time = '1:99:00'", "it takes [days-]hours:minutes:seconds"),
        ("[partitions.g.walltime_bins]\n'91' = '2:00:00'", "cannot be a name in [partitions.g.wa"),
        ("[partitions.g.walltime_bins]\n1-91 = '2h'", 'walltime_bins.1-91 is "2h"; it takes [days'),
        ("reviewed = 'today'", 'reviewed is "today"; it takes a date such as 2026-01-31'),
        ("[env.when.x]\nnccl = '2.27'", 'is "2.27"; it takes conditions such as >=2.27'),
        ("[env.when.x]\nnccl = '>=2.27 <3'", "it takes conditions such as"),
        ("[env.when.x]\ngpu = 'A100('", "which is no regular expression: missing ), unterminated"),
        ("[detect]\nhostname = ['*login']", "which is no regular expression: nothing to repeat"),
        ("[detect.env]\nSYSTEM = '['", "2): detect.env.SYSTEM is"),
        ("[detect.file]\n'etc/x' = 'y'", "'etc/x' cannot be a name in [detect.file]; an absolute"),
        ("[env.common]\nnccl_net = 'x'", "'nccl_net' cannot be a name in [env.common]; capital"),
        ("[env.common]\nRANK = 1", "2): RANK is set by hpctrain for each rank; leave it out"),
        ("[env.common]\nA = true", "env.A is true; it takes text or a number"),
        ("[env.common.A]\nwhy = 'x'", "env.common.A is a table without `value`; add it"),
        ("[env.common]\nA = { value = '1', soruce = 'a' }", "did you mean source?"),
        ("[env.common]\nA = { value = '1', why = 3 }", "env.common.A.why is 3; it takes text"),
        ("[slurm]\nsource = 3", "2): source is 3; it takes a name of [sources]"),
        ("schema = 2", "schema is 2, this hpctrain knows up to 1; use a newer hpctrain"),
        ("name = 'good'", 'name is "good" in a file that is called bad; give both the same'),
        ("[partitions.g]\ncpus_per_node = 0", "cpus_per_node is 0; it takes at least 1"),
        ("[baseline]\ntolerance = 1.5", "baseline.tolerance is 1.5; it takes at most 1"),
        ("[lock]\nkeys = ['slurm.acount_env']", "lock.keys has slurm.acount_env, which no preset "),
        ("[lock]\nkeys = ['env.common.X', 'slurm.x_extra']", "did you mean slurm.extra?"),
        ("[lock]\nkeys = ['settings.slurm.partiton']", "did you mean settings.slurm.partition?"),
        ("[lock]\nkeys = ['description']", "lock.keys has description, which no preset can have"),
        ("[lock]\nkeys_add = ['env..X']", "lock.keys has env..X"),
        ("[lock]\nkeys = ['partitions..qos']", "lock.keys has partitions..qos"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_its_line_and_what_the_key_takes(sheet, text, message):
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        sheet(text)

    assert "\n" not in str(error.value)


def test_every_fault_of_a_file_is_told_at_once(sheet):
    with pytest.raises(UsageError) as error:
        sheet(
            "[slurm]\nkill_wait_s = 'x'\nrequeue = 3\n" + "".join(f"z{n} = 1\n" for n in range(9))
        )

    message = str(error.value)
    assert message.startswith("site bad (bad.toml:2): slurm.kill_wait_s")
    assert message.endswith("; 10 other faults: `hpctrain sites validate bad.toml`")
    assert error.value.faults[1][0] == "bad.toml:3"
    assert error.value.faults[1][1].startswith("slurm.requeue is 3")
    assert len(error.value.faults) == 11


@pytest.mark.parametrize(
    "lock",
    ["env", "env.common", "env.when.new.set.A", "settings", "settings.slurm", "settings.train.lr",
     "partitions", "partitions.gpu", "partitions.gpu.preemption.mode", "network.hcas"],
)  # fmt: skip
def test_a_lock_names_values_or_whole_tables(sheet, lock):
    assert sheet(f"[lock]\nkeys = ['{lock}']").leaves["lock", "keys"].value == [lock]


@pytest.mark.parametrize("layer", ["user", "project"])
def test_a_lock_of_the_users_own_is_refused(sheet, layer):
    with pytest.raises(UsageError, match=rf"\[lock\] has no effect in the {layer} layer"):
        sheet("[lock]\nkeys = []", layer)


def test_numbers_become_text_in_an_environment_and_dates_and_times_in_texts(sheet):
    leaves = sheet(
        "reviewed = 2026-01-31\n[env.common]\nA = 41\nB = { value = 1.5 }\n"
        "[partitions.g]\nmax_time = 02:00:00\nmem_gib = 64\n"
    ).leaves

    assert leaves["reviewed",].value == "2026-01-31"
    assert leaves["env", "common", "A"].value == "41"
    assert leaves["env", "common", "B"].value == "1.5"
    assert leaves["partitions", "g", "max_time"].value == "02:00:00"
    assert leaves["partitions", "g", "mem_gib"].value == 64.0


def test_faults_are_told_in_the_order_of_their_lines(sheet):
    with pytest.raises(UsageError, match=r"^site bad \(bad.toml:1\): name is ") as error:
        sheet("name = 'good'\nzzz = 1\n")
    assert [place for place, _ in error.value.faults] == ["bad.toml:1", "bad.toml:2"]


def test_a_source_may_have_any_name(sheet):
    leaves = sheet("[sources]\nsource = 'x'\n'a page' = 'y'\n").leaves

    assert set(leaves) == {("sources", "source"), ("sources", "a page")}


def test_the_nearest_source_holds(sheet):
    leaves = sheet(
        "source = 'top'\n[partitions]\nsource = 'all'\n[partitions.a]\nqos = 'x'\n"
        "gpu = { value = 'y', source = 'own' }\n[partitions.b]\nsource = 'b'\n"
        "preemption.mode = 'none'\n[slurm]\nmpi = 'pmix'\n"
    ).leaves

    assert {".".join(path): leaf.source for path, leaf in leaves.items()} == {
        "partitions.a.qos": "all",
        "partitions.a.gpu": "own",
        "partitions.b.preemption.mode": "b",
        "slurm.mpi": "top",
    }


def test_the_reference_page_and_the_json_schema_are_current():
    assert (DOCS / "site-presets.md").read_text() == GENERATED["page"](), "run: make settings"
    written = json.loads((DOCS / "site.schema.json").read_text())
    assert written == GENERATED["json_schema"](), "run: make settings"


def test_every_key_stands_on_the_reference_page():
    page = (DOCS / "site-presets.md").read_text()
    classes = [schema.About, *schema.TABLES.values(), schema.Partition, schema.Preemption]

    keys = [key for cls in [*classes, schema.When] for key in keys_of(cls).values()]
    assert not [key.name for key in keys if key.inner is None and f"| `{key.name}` |" not in page]
    assert not [key.name for key in keys if not key.doc]


def test_the_pages_example_loads(tmp_path):
    example = (DOCS / "site-presets.md").read_text().split("```toml\n")[1].split("```")[0]
    (tmp_path / "juniper.toml").write_text(example)

    site = load_site("juniper", environ={"HPCTRAIN_SITE_PATH": str(tmp_path)})

    assert site.leaves["partitions", "gpu", "max_time"].source == "guide"


@pytest.fixture(scope="module")
def validator():
    jsonschema.Draft202012Validator.check_schema(GENERATED["json_schema"]())
    return jsonschema.Draft202012Validator(GENERATED["json_schema"]())


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_packaged_preset_conforms_to_the_json_schema(validator, path):
    validator.validate(tomllib.loads(path.read_text()))


@pytest.mark.parametrize(
    "text",
    ["zzz = 1", "[slurm]\nzzz = 1", "[slurm]\nrequeue = 'yes'", "[network]\nkind = 'infiniband'",
     "[partitions.g]\nmax_time = '2 days'", "[env.common]\nnccl_net = 'x'", "reviewed = 'today'",
     "[env.common]\nA = { value = '1', zzz = 1 }", "[slurm]\nforbidden = ['gres']",
     "[env.when.x]\nnccl = '2.27'", "[slurm]\nkill_wait_s = -1", "[settings.slurm]\nzzz = 1",
     "[partitions.g.walltime_bins]\n'91' = '2:00:00'", "[detect.file]\n'etc/x' = 'y'"],
)  # fmt: skip
def test_what_hpctrain_refuses_the_json_schema_refuses(validator, sheet, text):
    assert not validator.is_valid(tomllib.loads(text))
    with pytest.raises(UsageError):
        sheet(text)


def test_what_hpctrain_takes_the_json_schema_takes(validator, sheet):
    text = (
        "source = 'a'\n[sources]\na = 'x'\n[slurm]\nextra_add = ['--x']\nqos_default = ''\n"
        "[partitions.source]\nqos = { value = 'q', why = 'w' }\n"
        "[env.common]\nsource = 'a'\nA = 1\n[env.when.x]\nset = { B = '2' }\n"
        "[settings.slurm]\nnodes = 4\nextra_add = ['--y']\n"
    )

    validator.validate(tomllib.loads(text))
    assert sheet(text).added.keys() == {("slurm", "extra"), ("settings", "slurm", "extra")}
