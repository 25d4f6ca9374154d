"""Sites are found by name in a known order; their values carry file and line."""

from __future__ import annotations

import os

import pytest

from hpctrain.errors import NotFound, UsageError
from hpctrain.settings.check import check
from hpctrain.settings.merge import resolve
from hpctrain.site.load import find_sites, load_site
from hpctrain.site.paths import data_dir, site_search


@pytest.fixture
def sites(tmp_path):
    folder = tmp_path / "sites"
    folder.mkdir()
    (folder / "juniper.toml").write_text(
        'description = "a machine"\n[slurm]\npartition = "gpu"\n[env]\nNCCL_SOCKET_IFNAME = "hsn"\n'
    )
    return folder


def test_a_sites_values_and_environment_carry_file_and_line(sites):
    site = load_site("juniper", search=[sites])

    settings, origins = resolve([site.layer])

    assert site.description == "a machine"
    assert settings.slurm.partition == "gpu"
    assert origins["slurm.partition"] == f"site juniper ({sites}/juniper.toml:3)"
    assert site.env == {"NCCL_SOCKET_IFNAME": "hsn"}
    assert site.where("env", "NCCL_SOCKET_IFNAME") == f"site juniper ({sites}/juniper.toml:5)"


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("junipr", r'there is no site "junipr"; did you mean juniper\?'),
        ("zzz", r'there is no site "zzz"; there are: juniper \(looked in '),
        ("", "there is no site"),
        ("../sites/juniper", "there is no site"),
    ],
)
def test_an_unknown_site_is_refused_with_the_nearest_name_and_where_was_looked(sites, name, match):
    with pytest.raises(NotFound, match=match):
        load_site(name, search=[sites])


def test_a_site_can_be_named_by_its_file(sites):
    assert load_site(str(sites / "juniper.toml"), search=[]).name == "juniper"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            "[slurm]\npartiton = 'x'\n",
            r"site bad \(.*bad.toml:2\): slurm.partiton is not a setting",
        ),
        ("nodes = 4\n", r"site bad \(.*bad.toml:1\): nodes stands outside its table"),
        ("[env]\nRANK = 0\n", r"site bad \(.*bad.toml:2\): RANK is set by hpctrain"),
        ("[slurm\n", r"bad.toml is not valid TOML"),
    ],
)
def test_a_wrong_site_file_is_refused_with_its_line(sites, text, match):
    (sites / "bad.toml").write_text(text)

    with pytest.raises(UsageError, match=match):
        resolve([load_site("bad", search=[sites]).layer])


def test_the_first_folder_wins_and_a_missing_one_is_passed_over(sites, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "juniper.toml").write_text("")
    (other / "a.toml").write_text("")

    found = find_sites([tmp_path / "missing", other, sites])

    assert found == {"a": other / "a.toml", "juniper": other / "juniper.toml"}


def test_the_search_goes_from_the_users_folders_to_those_that_come_with_hpctrain():
    search = site_search({"HPCTRAIN_SITE_PATH": os.pathsep.join(["/a", "", "/b"])})

    assert [str(folder) for folder in search[:3]] == ["/a", "/b", "/etc/hpctrain/sites"]
    assert search[3] == data_dir("site-configs")


@pytest.mark.parametrize(
    "path", sorted(data_dir("site-configs").glob("*.toml")), ids=lambda p: p.stem
)
def test_every_site_that_comes_with_hpctrain_loads_and_passes_the_checks(path):
    settings, origins = resolve([load_site(path.stem, search=[path.parent]).layer])

    check(settings, origins)


def test_the_local_site_is_there():
    assert "local" in find_sites([data_dir("site-configs")])
