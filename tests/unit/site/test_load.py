"""A site is read from every layer that has a say; wrong files are one line with their place."""

from __future__ import annotations

import re

import pytest

from hpctrain.cluster.site import load as load_module
from hpctrain.cluster.site.load import identities, load_site, site_files, site_names
from hpctrain.cluster.site.sheet import check_locked
from hpctrain.errors import NotFound, UsageError


class Layers:
    """Folders of one test's own in place of every layer's."""

    def __init__(self, root):
        self.root = root
        self.environ = {
            "HPCTRAIN_SITE_PATH": f"{root}/first:{root}/second",
            "XDG_CONFIG_HOME": str(root / "config"),
        }

    def write(self, place, name, text):
        folder = self.root / {"user": "config/hpctrain/sites"}.get(place, place)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.toml"
        path.write_text(text)
        return path

    def load(self, name):
        return load_site(name, environ=self.environ)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.setattr(load_module, "SYSTEM_SITES", tmp_path / "etc")
    monkeypatch.setattr(load_module, "data_dir", lambda kind: tmp_path / "packaged")
    return Layers(tmp_path)


def test_layers_are_laid_upon_each_other_key_by_key(tree):
    keys = ("mpi", "constraint", "qos_default", "account_hint", "export")
    values = ('"1"', '"1"', '"1"', '"1"', '"none"')
    places = ("packaged", "etc", "second", "first", "user")
    for n, place in enumerate(places):
        lines = [
            f"{key} = {value.replace('1', str(n + 1))}"
            for key, value in list(zip(keys, values, strict=True))[n:]
        ]
        tree.write(place, "juniper", "\n".join(["[slurm]", *lines]))

    site = tree.load("juniper")

    slurm = site.slurm
    assert (slurm.mpi, slurm.constraint, slurm.qos_default) == ("1", "2", "3")
    assert (slurm.account_hint, slurm.export) == ("4", "none")
    leaves = [site.leaves["slurm", key] for key in keys]
    assert [leaf.layer for leaf in leaves] == [
        "packaged", "system", "system", "system", "user",
    ]  # fmt: skip
    assert [leaf.line for leaf in leaves] == [2] * len(places)
    assert leaves[3].file == str(tree.root / "first/juniper.toml")
    assert [one.path.rsplit("/", 2)[-2] for one in site.files] == [
        "packaged", "etc", "second", "first", "sites",
    ]  # fmt: skip


def test_lists_replace_and_lists_with_add_append(tree):
    tree.write(
        "packaged",
        "juniper",
        "[sources]\nguide = 'x'\n[modules]\nsource = 'guide'\nload = ['a', 'b']\nuse = ['x']\n",
    )
    tree.write(
        "etc",
        "juniper",
        "[modules]\nload_add = ['b', 'c']\nuse = ['y']\n"
        "[slurm]\nsbatch_env_add = ['SBATCH_QOS']\n"
        "[settings.slurm]\nsetup_add = ['ulimit -l unlimited']\n",
    )

    site = tree.load("juniper")

    assert site.modules.load == ["a", "b", "c"]
    assert site.modules.use == ["y"]
    assert site.slurm.sbatch_env == ["SBATCH_ACCOUNT", "SBATCH_QOS"]
    assert site.settings == {"slurm": {"setup": ["ulimit -l unlimited"]}}
    leaf = site.leaves["modules", "load"]
    assert (leaf.layer, leaf.source) == ("system", "guide")


def test_a_preset_is_laid_on_what_it_extends_without_becoming_it(tree):
    tree.write(
        "packaged", "fabric", "stability = 'base'\ndescription = 'b'\n[env.common]\nA = 1\nB = 1\n"
    )
    tree.write(
        "packaged",
        "other",
        "extends = 'fabric'\ncontact = 'c'\n[detect]\nhostname = ['x']\npriority = 3\n"
        "[env.common]\nB = 2\nC = 2\n[partitions.gpu]\n",
    )
    tree.write("etc", "fabric", "[env.common]\nA = 9\n")
    tree.write("user", "mine", "extends = 'other'\n[env.common]\nC = 3\n")

    site = tree.load("mine")

    assert site.env.common == {"A": "9", "B": "2", "C": "3"}
    assert set(site.partitions) == {"gpu"}
    assert (site.about.name, site.about.stability, site.about.contact) == ("mine", "local", "")
    assert (site.detect.hostname, site.detect.priority) == ([], 0)
    assert [one.name for one in site.files] == ["fabric", "fabric", "other", "mine"]
    assert site.where("env", "common", "B") == (f"site mine ({tree.root}/packaged/other.toml:7)")


def test_values_of_several_files_come_in_the_schemas_order(tree):
    tree.write("packaged", "fabric", "[env.common]\nA = 1\n[network]\nkind = 'ib'\n")
    tree.write(
        "packaged",
        "juniper",
        "extends = 'fabric'\n[settings.slurm]\nmem = '0'\n[env.multi_node]\nB = 1\n"
        "[partitions.gpu]\nqos = 'x'\n[env.common]\nC = 1\n[slurm]\nmpi = 'x'\n",
    )

    assert [".".join(path) for path in tree.load("juniper").leaves] == [
        "extends",
        "slurm.mpi",
        "partitions.gpu.qos",
        "network.kind",
        "env.common.A",
        "env.common.C",
        "env.multi_node.B",
        "settings.slurm.mem",
    ]


def test_a_higher_layer_can_change_what_a_preset_extends(tree):
    for name in ("ib", "tcp"):
        tree.write("packaged", name, f"[network]\nkind = '{name}'\n")
    tree.write("packaged", "juniper", "extends = 'ib'\n")
    tree.write("user", "juniper", "extends = 'tcp'\n")

    assert tree.load("juniper").network.kind == "tcp"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a1": "b1", "b1": "c1", "c1": "a1"}, "extends goes in a circle: a1 -> b1 -> c1 -> a1"),
        (
            {"a1": "b1", "b1": "b1"},
            "site b1 (.*b1.toml:2): extends goes in a circle: a1 -> b1 -> b1",
        ),
        ({"a1": "a1"}, "a1 -> a1; a file is laid on lower ones of its name by itself; take one"),
        (
            {"a1": "fabrik", "fabric": None},
            'site a1 (.*a1.toml:2): extends: there is no site "fabrik"; did you mean fabric?',
        ),
    ],
)
def test_what_a_preset_extends_must_be_there_and_end(tree, files, message):
    for name, extends in files.items():
        tree.write("etc", name, f"\nextends = '{extends}'\n" if extends else "")

    with pytest.raises(UsageError, match=re.escape(message).replace(r"\.\*", ".*")):
        tree.load("a1")


def test_sources_of_two_files_that_have_one_name_stay_apart(tree):
    tree.write(
        "packaged",
        "fabric",
        "[sources]\na = 'vendor'\n[env.common]\nsource = 'a'\nA = 1\nB = 1\n",
    )
    tree.write(
        "packaged",
        "juniper",
        "extends = 'fabric'\n[sources]\na = 'site'\n[env.common]\nsource = 'a'\nB = 2\n",
    )
    tree.write(
        "etc", "juniper", "[sources]\nown = 'x'\n[env.common]\nC = { value = 3, source = 'a' }"
    )

    site = tree.load("juniper")

    told = {
        path[-1]: site.about.sources[leaf.source]
        for path, leaf in site.leaves.items()
        if path[0] == "env"
    }
    assert told == {"A": "vendor", "B": "site", "C": "site"}
    assert site.about.sources == {"a.2": "vendor", "a": "site", "own": "x"}


def test_a_source_must_be_among_the_sources(tree):
    path = tree.write(
        "etc", "juniper", "[sources]\nguide = 'x'\n[slurm]\nsource = 'giude'\nmpi = 'y'"
    )

    message = (
        f'site juniper ({path}:5): the source of slurm.mpi is "giude", which [sources] does not '
        "have; did you mean guide?"
    )
    with pytest.raises(UsageError, match=re.escape(message)):
        tree.load("juniper")


def test_locks_hold_against_users_but_not_against_admins(tree):
    tree.write(
        "packaged",
        "juniper",
        "[lock]\nkeys = ['slurm.mpi', 'env.common', 'settings.slurm.partition']\n"
        "[slurm]\nmpi = 'a'\nconstraint = 'a'\n[env.common]\nA = 1\nB = 1\n",
    )
    tree.write("etc", "juniper", "[slurm]\nmpi = 'b'\n")
    user = tree.write(
        "user",
        "juniper",
        "[slurm]\nmpi = 'c'\nconstraint = 'c'\n[env.common]\nA = 1\nB = 2\n"
        "[settings.slurm]\npartition = 'x'\n",
    )

    site = tree.load("juniper")

    assert site.overridden == {
        ("slurm", "mpi"): f"user ({user}:2)",
        ("env", "common", "B"): f"user ({user}:6)",
        ("settings", "slurm", "partition"): f"user ({user}:8)",
    }
    with pytest.raises(
        UsageError, match=r"slurm.mpi is locked by .*/packaged/juniper.toml:2\) and"
    ):
        check_locked(site, {}, allow=False)


def test_an_old_name_of_a_setting_counts_as_its_new_one(tree):
    tree.write("packaged", "juniper", "[settings.alive]\nmemory_peer = 'auto'\n")
    file = tree.write("etc", "juniper", "[settings.alive]\nspares = 1\nmemory_buddy = 'no'\n")

    site = tree.load("juniper")

    assert site.settings == {"alive": {"memory_peer": "no", "spares": 1}}
    assert site.layer.where("alive", "memory_peer") == f"site juniper ({file}:3)"


@pytest.mark.two_users  # a lock holds where the file is another user's
def test_a_site_can_be_named_by_its_file_with_bases_beside_it(tree):
    tree.write("etc", "juniper", "[slurm]\nmpi = 'x'\nconstraint = 'x'\n")
    path = tree.write("drafts", "juniper", "extends = 'fabric'\n[lock]\nkeys = ['slurm.mpi']\n")
    tree.write("drafts", "fabric", "[slurm]\nmpi = 'b'\n")
    tree.write("etc", "fabric", "[slurm]\nmpi = 'a'\ngres_name = 'a'\n")

    site = tree.load(str(path))

    assert (site.name, site.slurm.mpi, site.slurm.constraint) == ("juniper", "b", "")
    assert site.slurm.gres_name == "a"
    assert site.leaves["lock", "keys"].layer == "file"
    with pytest.raises(NotFound, match=r"drafts/zzz.toml is not there; check the path"):
        tree.load(str(path.with_name("zzz.toml")))


def test_a_projects_file_is_named_by_its_path(tree):
    path = tree.write("project", "site", "name = 'mine'\n[slurm]\nmpi = 'b'\n")

    site = tree.load(str(path))

    assert (site.name, site.slurm.mpi, len(site.files)) == ("mine", "b", 1)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("junipr", r'there is no site "junipr"; did you mean juniper\?'),
        (
            "zzz",
            r"there are: juniper \(looked in \S+/config/hpctrain/sites, \S+/first, ",
        ),
        ("", "there is no site"),
        ("../etc/juniper", "there is no site"),
        ("..", "there is no site"),
    ],
)
def test_an_unknown_site_is_refused_with_the_nearest_name_and_where_was_looked(tree, name, match):
    tree.write("etc", "juniper", "")

    with pytest.raises(NotFound, match=match):
        tree.load(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = 1\n[slurm\n", "/bad.toml is not valid TOML: Expected ']' at the end of a table "),
        ("a = 1\n[slurm\n", "(at line 2, column 7)"),
        ("[slurm]\nmpi = 1\n", "/bad.toml:2): slurm.mpi is 1; it takes text in quotes"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_its_place(tree, text, message):
    tree.write("user", "bad", text)

    with pytest.raises(UsageError, match=re.escape(message)):
        tree.load("bad")


def test_a_file_that_cannot_be_read_is_refused_and_hides_no_other(tree):
    tree.write("etc", "juniper", "")
    (tree.root / "etc" / "bad.toml").mkdir()

    with pytest.raises(UsageError, match=r"etc/bad.toml cannot be read: Is a directory"):
        tree.load("bad")
    assert site_names(tree.environ) == ["bad", "juniper"]
    assert tree.load("juniper").name == "juniper"


def test_a_folder_that_is_none_is_refused(tree):
    (tree.root / "first").write_text("")

    with pytest.raises(UsageError, match=r"/first cannot be read: Not a directory"):
        site_names(tree.environ)
    with pytest.raises(UsageError, match=r"/first/juniper.toml cannot be read: Not a directory"):
        tree.load("juniper")


def test_a_file_whose_name_can_be_no_sites_is_refused(tree):
    tree.write("etc", "Juniper 2", "")

    with pytest.raises(UsageError, match='"Juniper 2" cannot be a site\'s name; it takes 2 to 32'):
        tree.load("Juniper 2")


def test_files_of_a_site_are_told_from_the_lowest_layer_on(tree):
    for place in ("user", "first", "packaged"):
        tree.write(place, "juniper", "")
    (tree.root / "packaged" / "willow.toml.orig").write_text("")

    assert site_names(tree.environ) == ["juniper"]
    assert [layer for layer, _ in site_files(tree.environ)["juniper"]] == [
        "packaged", "system", "user",
    ]  # fmt: skip


def test_identities_are_those_that_load_gives(tree):
    tree.write("packaged", "fabric", "stability = 'base'\n[env.common]\nA = 1\n")
    tree.write(
        "packaged",
        "juniper",
        "extends = 'fabric'\nstability = 'reference'\n[sources]\na = 'x'\n[detect]\nsource = 'a'\n"
        "hostname = ['j1']\n",
    )
    tree.write("etc", "juniper", "[detect]\nhostname_add = ['j2']\nenv = { S = 'x' }\n")
    tree.write("user", "mine", "[detect]\npriority = 1\n")

    found = identities(tree.environ)

    assert [site.name for site in found] == ["juniper", "mine"]
    for site in found:
        whole = tree.load(site.name)
        assert site.detect == whole.detect
        assert site.about.stability == whole.about.stability
