"""Each thing that can be wrong with a node is named with that node, and with no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.cluster.preflight.checks import Expected, Order, check_facts
from hpctrain.cluster.preflight.checks_between import (
    LOGIN,
    apart,
    check_clocks,
    check_locks,
    check_names,
    check_present,
    check_shared,
)
from hpctrain.cluster.preflight.facts import Gpu, Interface, NodeFacts, Port
from hpctrain.cluster.preflight.rendezvous import Skew
from hpctrain.cluster.preflight.report import PreflightReport, Result, lines
from hpctrain.cluster.preflight.slow_nodes import SearchResult, check_bandwidth, check_products

NODES = ["n1", "n2", "n3", "n4"]
WELL = NodeFacts(
    node="",
    host="host",
    interfaces=[Interface("hsn0", up=True, addresses=["10.0.0.1"])],
    ports=[Port("mlx5_0", 1, "ACTIVE", 400.0, "InfiniBand")],
    efa=[],
    cxi=[],
    gpus=[Gpu(0, "H100", "550.54.15", 0, 18), Gpu(1, "H100", "550.54.15", 0, 18)],
    shm_gib=500.0,
    memlock="unlimited",
    nofile=65536,
    local={"/local": 100.0},
    versions={"python": "3.11.7", "torch": "2.9.0", "nccl": "2.27.3"},
    nccl_conf={},
    resolves_itself=True,
)
SITE = Expected(
    socket_ifnames=["hsn0"],
    hcas=["mlx5_0"],
    rate_gbps=400,
    nics=1,
    link_layer="InfiniBand",
    gpus=2,
    driver_min="535.1",
    nvlinks=18,
    memlock="unlimited",
    shm_gib_min=100.0,
    env={"NCCL_IB_HCA": "=mlx5_0"},
)
NOTHING = Expected()


def nodes(changes=None, count=4):
    """Healthy nodes but for the second, which has these changes."""
    found = [replace(WELL, node=name) for name in NODES[:count]]
    found[1] = replace(found[1], **(changes or {}))
    return found


def of(results, status):
    return [(r.check, r.nodes) for r in results if r.status == status]


@pytest.mark.parametrize("expected", [SITE, NOTHING], ids=["site", "no site"])
def test_healthy_nodes_are_ok_in_every_check(expected):
    results = check_facts(nodes(), expected)

    assert {r.status for r in results} == {"ok"}
    assert len({r.check for r in results}) >= 9


GPUS = WELL.gpus
BAD_PORT = [replace(WELL.ports[0], state="DOWN")]
SICK = [
    ("interfaces", {"interfaces": []}, "hsn0 is not there"),
    ("interfaces", {"interfaces": [Interface("hsn0", up=False, addresses=["1"])]}, "is down"),
    ("interfaces", {"interfaces": [Interface("hsn0", up=True)]}, "has no address"),
    ("adapters", {"ports": []}, "mlx5_0 not there"),
    ("adapters", {"ports": BAD_PORT}, "mlx5_0 is DOWN"),
    ("adapters", {"ports": [replace(WELL.ports[0], rate_gbps=100.0)]}, "mlx5_0:1 at 100 of 400"),
    ("adapters", {"ports": [replace(WELL.ports[0], link_layer="Ethernet")]}, "run Ethernet"),
    ("gpus", {"gpus": GPUS[:1]}, "1 of 2 GPUs"),
    ("driver", {"gpus": [replace(g, driver="520.1") for g in GPUS]}, "older than 535.1"),
    ("gpu memory", {"gpus": [replace(GPUS[0], uncorrected=3), GPUS[1]]}, "GPU 0 has 3"),
    ("nvlink", {"gpus": [GPUS[0], replace(GPUS[1], nvlinks=17)]}, "GPU 1 has 17 of 18"),
    ("memlock", {"memlock": "8192"}, "8192 KiB"),
    ("shm", {"shm_gib": 0.06}, "0.06 GiB"),
    ("version of torch", {"versions": {**WELL.versions, "torch": "2.8.0"}}, "2.9.0 on the others"),
    ("version of nccl", {"versions": {**WELL.versions, "nccl": ""}}, "nccl is none"),
]


@pytest.mark.parametrize(("check", "changes", "says"), SICK, ids=lambda v: str(v)[:30])
def test_what_the_site_says_and_one_node_lacks_is_that_nodes_fault(check, changes, says):
    results = check_facts(nodes(changes), SITE)
    failed = [r for r in results if r.status == "fail"]

    assert (check, ["n2"]) in of(results, "fail")
    assert all(r.nodes == ["n2"] for r in failed)
    assert any(says in r.message for r in failed)


ODD = [
    ("interfaces", {"interfaces": []}),
    ("adapters", {"ports": BAD_PORT}),
    ("gpus", {"gpus": GPUS[:1]}),
    ("driver", {"gpus": [replace(g, driver="560.1") for g in GPUS]}),
    ("nvlink", {"gpus": [GPUS[0], replace(GPUS[1], nvlinks=12)]}),
    ("version of python", {"versions": {**WELL.versions, "python": "3.12.1"}}),
]


@pytest.mark.parametrize(("check", "changes"), ODD, ids=lambda v: str(v)[:30])
def test_without_a_site_the_one_that_differs_from_most_is_named(check, changes):
    results = check_facts(nodes(changes), NOTHING)

    assert (check, ["n2"]) in of(results, "fail")
    assert all(r.nodes == ["n2"] for r in results if r.status == "fail")


def test_of_two_nodes_with_different_versions_neither_is_named():
    results = check_facts(nodes({"versions": {**WELL.versions, "torch": "2.8"}}, 2), NOTHING)

    (failed,) = [r for r in results if r.status == "fail"]
    assert failed.nodes == []
    assert "2.8 on n2" in failed.message
    assert "2.9.0 on n1" in failed.message


def test_an_interface_that_only_one_node_has_is_worth_a_look_and_no_failure():
    more = [*WELL.interfaces, Interface("eno1", up=True, addresses=["10.1.0.1"])]

    results = check_facts(nodes({"interfaces": more}), NOTHING)

    assert of(results, "fail") == []
    assert of(results, "warn") == [("interfaces", ["n2"])]


def test_container_bridges_are_no_interfaces_to_compare():
    more = [*WELL.interfaces, Interface("docker0", up=True, addresses=["172.17.0.1"])]

    assert of(check_facts(nodes({"interfaces": more}), NOTHING), "warn") == []


@pytest.mark.parametrize(
    "name", ["interfaces", "ports", "gpus", "shm_gib", "memlock", "nofile", "versions", "nccl_conf"]
)
@pytest.mark.parametrize("expected", [SITE, NOTHING], ids=["site", "no site"])
def test_what_cannot_be_read_is_unknown_and_neither_ok_nor_a_failure(name, expected):
    results = check_facts(nodes({name: None, "unreadable": {name: "no permission"}}), expected)

    assert [(r.nodes, r.status) for r in results if "no permission" in r.message] == [
        (["n2"], "unknown")
    ]
    assert of(results, "fail") == []


def test_an_nccl_conf_that_the_environment_contradicts_is_told():
    results = check_facts([replace(n, nccl_conf={"NCCL_IB_HCA": "mlx5_3"}) for n in nodes()], SITE)

    (told,) = [r for r in results if r.status == "warn"]
    assert "NCCL_IB_HCA=mlx5_3, the ranks get =mlx5_0" in told.message


def test_hcas_may_be_beginnings_and_name_a_port():
    two = [Port("mlx5_0", n, "ACTIVE", 400.0, "InfiniBand") for n in (1, 2)]
    two[1] = replace(two[1], state="DOWN")

    prefix = replace(SITE, hcas=["mlx5"], hca_prefix=True)
    assert of(check_facts(nodes({"ports": two}), prefix), "fail") == []
    port = replace(SITE, hcas=["mlx5_0:2"])
    assert ("adapters", ["n2"]) in of(check_facts(nodes({"ports": two}), port), "fail")


# -- between the nodes


def test_a_node_that_did_not_answer_is_named():
    assert of(check_present(NODES, {"n3": "did not connect"}), "fail") == [("reach", ["n3"])]
    assert of(check_present(NODES, {}), "ok") == [("reach", [])]


def skews(*offsets, bound=0.001):
    return {name: Skew(offset, bound) for name, offset in zip(NODES[1:], offsets, strict=False)}


@pytest.mark.parametrize(
    ("offsets", "named"),
    [
        ((0.0, 5.0, 0.1), [["n3"]]),
        ((0.0, -5.0, 0.1), [["n3"]]),
        ((-5.0, -5.1, -5.0), [["n1"]]),
        ((0.0, 0.9, -0.5), []),
        ((5.0,), [[]]),
        ((5.0, 0.0, 7.0), [[]]),
    ],
    ids=["ahead", "behind", "the first", "none", "two nodes", "half of them"],
)
def test_the_clock_that_differs_from_most_is_named(offsets, named):
    found = check_clocks("n1", skews(*offsets))

    assert [r.nodes for r in found if r.status == "fail"] == named


def test_a_clock_that_was_asked_too_slowly_is_unknown():
    found = check_clocks("n1", {"n2": Skew(1.5, 0.8), "n3": Skew(0.0, 0.001)})

    assert of(found, "unknown") == [("clock", ["n2"])]
    assert of(found, "fail") == []


def test_names_that_do_not_resolve_are_told_with_who_cannot():
    assert of(check_names({"n1": [], "n2": ["h3"]}), "warn") == [("names", ["n2"])]


FINE = dict.fromkeys(NODES, "")
SEES = dict.fromkeys(NODES, ())
ALL = {node: [*NODES, "n5"] for node in [*NODES, "n5"]}


@pytest.mark.parametrize(
    ("errors", "unseen", "named"),
    [
        ({}, {}, []),
        ({"n2": "OSError: no such directory"}, {"n2": NODES}, [["n2"]]),
        ({}, {"n2": [LOGIN, "n1", "n3", "n4"], "n1": ["n2"], "n3": ["n2"]}, [["n2"]]),
        ({}, {"n2": ["n1", "n3", "n4"]}, [["n2"]]),
        ({}, {"n1": ["n2"], "n3": ["n2"], "n4": ["n2"]}, [["n2"]]),
        ({}, {"n1": ["n3", "n4"], "n2": ["n3", "n4"], "n3": ["n1", "n2"], "n4": ["n1"]}, [[]]),
    ],
    ids=["all well", "cannot write", "own mount", "sees none", "unseen by all", "two halves"],
)
def test_the_node_with_another_directory_is_named(errors, unseen, named):
    found = check_shared("/runs", FINE | errors, SEES | unseen, ALL)

    assert [r.nodes for r in found if r.status == "fail"] == named


def test_locks_that_hold_on_some_nodes_only_are_told():
    assert of(check_locks({"n2": "coherent"}, held=True), "ok") == [("locks", [])]
    mixed = {"n2": "coherent", "n3": "local", "n4": "unknown"}
    assert of(check_locks(mixed, held=True), "warn") == [("locks", ["n3"])]
    assert of(check_locks(mixed, held=True), "unknown") == [("locks", ["n4"])]
    assert of(check_locks({"n2": "local"}, held=False), "unknown") == [("locks", [])]


def verdict(**changes):
    base = {
        "bad": [], "suspects": [], "whole": 40.0, "whole_slow": False, "compared": True,
    }  # fmt: skip
    return SearchResult(**(base | changes))


@pytest.mark.parametrize(
    ("changes", "status", "named"),
    [
        ({}, "ok", []),
        ({"bad": ["n2"], "whole_slow": True}, "fail", ["n2"]),
        ({"suspects": ["n1", "n2"], "whole_slow": True}, "fail", []),
        ({"whole_slow": True}, "warn", []),
        ({"whole": None, "whole_slow": True}, "fail", []),
        ({"compared": False}, "unknown", []),
    ],
)
def test_bandwidth_names_who_was_proved_slow_and_nobody_else(changes, status, named):
    (found,) = check_bandwidth(NODES, verdict(**changes))

    assert (found.status, found.nodes) == (status, named)


def test_a_product_that_differs_or_is_not_finite_is_its_nodes_fault():
    assert of(check_products({"n1": [1.0], "n2": [1.0, 2.0], "n3": [1.0]}), "fail") == [
        ("product", ["n2"])
    ]
    assert of(check_products({"n1": [1.0], "n2": [None], "n3": [1.0]}), "fail") == [
        ("product", ["n2"])
    ]
    assert of(check_products({"n1": [1.0], "n2": [2.0]}), "fail") == [("product", [])]


# -- the report


def test_the_report_is_as_bad_as_its_worst_result_and_comes_back_from_its_file(tmp_path):
    results = [
        Result("a", "ok", "x"),
        Result("b", "unknown", "y"),
        Result("c", "fail", "z", ["n2"]),
    ]
    report = PreflightReport(NODES, results, {"rounds": 3})

    report.dump(tmp_path / "report.json")

    assert report.status == "fail"
    assert PreflightReport(NODES, results[:2]).status == "unknown"
    assert report.bad == {"n2": "c: z"}
    assert PreflightReport.load(tmp_path / "report.json") == report


def test_lines_name_the_nodes_and_shorten_long_lists():
    (line,) = lines([Result("a", "fail", "is slow", [f"n{i}" for i in range(20)])])

    assert line.startswith("fail")
    assert "n7 and 12 more: is slow" in line


def test_facts_and_orders_travel_as_json_and_a_newer_nodes_key_is_left_out():
    assert NodeFacts.from_plain({**WELL.plain(), "news": 1}) == WELL
    order = Order(SITE, nonce="x", bandwidth=False)
    assert Order.from_plain(order.plain()) == order


@pytest.mark.parametrize(
    ("errors", "unseen", "who"),
    [
        ({}, {"n1": [], "n2": []}, ""),
        ({}, {"n1": [], "n2": ["n1"]}, "n2 does not see n1"),
        ({}, {"n1": ["n2"], "n2": ["n1"]}, "n1 does not see n2; n2 does not see n1"),
        ({"n2": "No space left on device"}, {"n1": [], "n2": ["n1"]}, ""),
        ({}, {"n1": [], "n2": ["n1", "n2"]}, ""),  # a server that does not answer there
        ({}, {"n1": [], "n2": ["n1"], "n3": [], "n4": []}, "n2 does not see n1"),
        ({}, {"n1": [], "n2": ["n1"], "n3": [], "n4": [], "n5": []}, ""),
        ({}, {"n1": [], "n2": ["n1", "n3", "n4"], "n3": [], "n4": []}, ""),  # n2 is left behind
    ],
)
def test_nodes_that_share_no_directory_are_refused_and_nobody_else(errors, unseen, who):
    told = apart("/runs", errors, unseen, ALL)

    assert told == who or told.startswith(f"/runs is not one directory for all nodes ({who}): ")
    assert bool(told) == bool(who)
