"""Which site this is: whole matches only, the stronger signal first, a tie refused with reasons."""

from __future__ import annotations

import pytest

from hpctrain.cluster.site import load
from hpctrain.cluster.site.detect import Surroundings, choose, detect, look_around
from hpctrain.cluster.site.schema import About, Detect, Site
from hpctrain.errors import UsageError


def preset(name, *, stability="reference", **rules):
    return Site(About(name=name, stability=stability), detect=Detect(**rules))


def surroundings(*, environ=None, host="", fqdn="", cluster=None, files=None):
    return Surroundings(
        environ=environ or {},
        hostname=host,
        fqdn=lambda: fqdn,
        slurm_cluster=lambda: cluster,
        read_first_line=(files or {}).get,
    )


def chosen(sites, here):
    found = detect(sites, here)
    return found.chosen.name if found and found.chosen else None


@pytest.mark.parametrize(
    ("rules", "here", "reason"),
    [
        ({"env": {"S": "jun.*"}}, {"environ": {"S": "juniper"}}, "the variable S is juniper"),
        ({"file": {"/etc/s": "j"}}, {"files": {"/etc/s": "j"}}, "the first line of /etc/s is j"),
        ({"hostname": [r"j\d+"]}, {"host": "j12"}, "the host is called j12"),
        (
            {"hostname": [r"j\d+\.x\.org"]},
            {"host": "j1", "fqdn": "j1.x.org"},
            "the host is called j1.x.org",
        ),
    ],
)
def test_each_signal_tells_a_site_and_why(rules, here, reason):
    found = detect([preset("juniper", **rules), preset("willow")], surroundings(**here))

    assert [(match.name, match.reasons) for match in found.matches] == [("juniper", (reason,))]
    assert found.require_one() is found.chosen


@pytest.mark.parametrize(
    ("rules", "here"),
    [
        ({"env": {"S": "juniper"}}, {"environ": {"S": "juniper2"}}),
        ({"env": {"S": "juniper"}}, {"environ": {"S": "xjuniper"}}),
        ({"env": {"S": ".*"}}, {"environ": {"T": "x"}}),
        ({"file": {"/etc/s": ".*"}}, {}),
        ({"file": {"/etc/s": "juniper"}}, {"files": {"/etc/s": "juniper2"}}),
        ({"hostname": ["nid"]}, {"host": "nid001234", "fqdn": "nid001234.local"}),
        ({"hostname": ["login1"]}, {"host": "xlogin1"}),
        ({"slurm_cluster": [".*"]}, {"cluster": None}),
        ({}, {"host": ""}),
    ],
)
def test_a_part_of_a_text_is_no_match(rules, here):
    assert detect([preset("juniper", **rules)], surroundings(**here)) is None


def test_a_stronger_signal_wins_and_all_matches_are_told():
    here = surroundings(environ={"S": "x"}, host="j1", files={"/m": "x"})
    sites = [
        preset("by-host", hostname=["j1"]),
        preset("by-file", file={"/m": "x"}),
        preset("by-env", env={"S": "x"}, hostname=["j1"]),
    ]

    found = detect(sites, here)

    assert found.chosen.name == "by-env"
    assert [match.name for match in found.matches] == ["by-env", "by-file", "by-host"]
    assert found.matches[0].reasons == ("the variable S is x", "the host is called j1")


def test_a_higher_priority_wins_over_a_stronger_signal():
    here = surroundings(environ={"S": "x"}, host="j1")

    assert (
        chosen([preset("a", env={"S": "x"}), preset("b", hostname=["j1"], priority=1)], here) == "b"
    )


def test_two_sites_that_match_alike_are_refused_with_both_reasons():
    here = surroundings(host="j1", environ={"S": "x"})
    sites = [
        preset("a1", hostname=["j1"]),
        preset("b1", hostname=["j.*"]),
        preset("c1", env={"S": "x"}, priority=-1),
    ]

    found = detect(sites, here)

    assert found.chosen is None
    with pytest.raises(UsageError) as error:
        found.require_one()
    assert str(error.value).startswith(
        "2 sites match here: a1 because the host is called j1; b1 because the host is called j1; "
        "name one with --site"
    )


def test_slurms_cluster_name_alone_tells_only_a_preset_that_was_written_at_the_site():
    here = surroundings(cluster="cluster", host="j1")

    assert chosen([preset("x", slurm_cluster=["cluster"])], here) is None
    assert chosen([preset("x", slurm_cluster=["cluster"], stability="local")], here) == "x"
    assert chosen([preset("x", slurm_cluster=["cluster"], hostname=["j1"])], here) == "x"


def test_a_base_is_never_matched_and_an_unverified_preset_never_chosen():
    here = surroundings(host="j1")
    base = preset("base", hostname=["j1"], stability="base")
    skeleton = preset("skeleton", hostname=["j1"], stability="unverified", priority=5)

    found = detect([base, skeleton], here)

    assert found.chosen is None
    assert [(one.name, bool(one.passed_over)) for one in found.matches] == [("skeleton", True)]
    real = preset("real", hostname=["j1"])
    alike = preset("alike", hostname=["j1"], stability="unverified")
    assert chosen([skeleton, alike, real], here) == "real"
    assert len(detect([skeleton, real, preset("twin", hostname=["j1"])], here).tied) == 2


def test_slurm_and_the_resolver_are_asked_only_where_a_site_needs_them():
    def must_not():
        raise AssertionError

    here = Surroundings({"S": "x"}, "j1", must_not, must_not, lambda _: None)

    assert chosen([preset("a", env={"S": "x"}), preset("b", hostname=["j1"])], here) == "a"


def test_this_machine_is_asked_once(tmp_path):
    asked = []
    marker = tmp_path / "marker"
    marker.write_text("juniper \nsecond\n")

    here = look_around({}, lambda: asked.append(1) or "c")

    assert (here.slurm_cluster(), here.slurm_cluster(), asked) == ("c", "c", [1])
    assert here.read_first_line(str(marker)) == "juniper"
    assert here.read_first_line(str(tmp_path / "missing")) is None
    assert here.hostname
    assert here.fqdn()
    assert look_around({"SLURM_CLUSTER_NAME": "j"}, lambda: "c").slurm_cluster() == "j"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Sites of one folder only; writes another one."""
    monkeypatch.setattr(load, "SYSTEM_SITES", tmp_path / "etc")
    monkeypatch.setattr(load, "data_dir", lambda kind: tmp_path / "sites")
    (tmp_path / "sites").mkdir()

    def write(name, text):
        (tmp_path / name).write_text(text)

    write("sites/juniper.toml", "stability = 'reference'\n[detect]\nhostname = ['j1']\n")
    write("sites/willow.toml", "stability = 'unverified'\n[detect]\nhostname = ['w1']\n")
    return write


def test_a_named_site_is_taken_and_nothing_is_looked_for(tree):
    site, how = choose("juniper", {}, surroundings(host="w1"))

    assert (site.name, how) == ("juniper", "site juniper, as named")


def test_no_site_can_be_asked_for(tree):
    assert choose("none", {}, surroundings(host="j1")) == (None, "no site, as asked for")


def test_a_named_site_that_is_unverified_is_refused(tree):
    with pytest.raises(UsageError, match=r"willow .* is unverified"):
        choose("willow", {}, surroundings())


def test_a_detected_site_is_taken_with_its_reason(tree):
    site, how = choose(None, {}, surroundings(host="j1"))

    assert site.name == "juniper"
    assert how == "site juniper, because the host is called j1 (--site none for no site)"


def test_an_unverified_site_that_matches_is_told_of_and_not_used(tree):
    site, how = choose(None, {}, surroundings(host="w1"))

    assert site is None
    assert how.startswith("no site: willow matches (the host is called w1) but its preset is unver")
    assert choose(None, {}, surroundings(host="x"))[1] == "no site: none matches here"


def test_two_matching_sites_stop_a_choice(tree):
    tree("sites/other.toml", "[detect]\nhostname = ['j.*']\n")

    with pytest.raises(UsageError, match=r"2 sites match here: juniper because .*; other because"):
        choose(None, {}, surroundings(host="j1"))
    assert choose("other", {}, surroundings(host="j1"))[0].name == "other"


def test_a_wrong_file_that_could_be_this_sites_is_not_passed_over(tree):
    tree("sites/other.toml", "[detect]\nhostname = 'j1'\n")

    with pytest.raises(
        UsageError, match=r"other.toml:2\): detect.hostname is \"j1\"; it takes a li"
    ):
        choose(None, {}, surroundings(host="j1"))
    assert choose("juniper", {}, surroundings(host="j1"))[0].name == "juniper"
