"""A preset that contradicts itself, or SLURM, or nature is told so, at its line."""

from __future__ import annotations

import re
from datetime import date

import pytest

from hpctrain.cluster.site.load import load_site
from hpctrain.cluster.site.validate import validate

TODAY = date(2026, 11, 21)
GOOD = """\
contact = "help@juniper.example"
reviewed = "2026-06-01"

[slurm]
account_required = true
forbidden = ["--gres", "--mem"]
requeue = true

[partitions.gpu]
gpus_per_node = 4
cpus_per_node = 56
max_time = "12:00:00"
max_nodes = 100

[partitions.gpu.walltime_bins]
1-91 = "2:00:00"
92- = "12:00:00"

[partitions.gpu.preemption]
mode = "requeue"
grace_s = 120
signal = "SIGTERM"

[network]
kind = "ib"
socket_ifnames = ["ib0"]
hcas = ["mlx5_0", "mlx5_1"]
nics_per_node = 2
rendezvous_host = "{host}i"

[env.common]
NCCL_CROSS_NIC = "1"
NCCL_NET_GDR_LEVEL = { value = "PHB", why = "each adapter hangs at a GPU" }

[env.when.newer.set]
NCCL_PROTO = { value = "^LL128", why = "wrong data" }

[env.when.newer]
nccl = ">=2.27"

[settings.slurm]
partition = "gpu"
time = "2:00:00"
nodes = "1-8"
"""
REFERENCE = """\
contact = "help@juniper.example"
reviewed = "2026-06-01"
stability = "reference"
[sources]
a = "owner/docs@1234567 page.md"
[partitions.gpu]
source = "a"
gpus_per_node = 4
[env.common]
NCCL_CROSS_NIC = { value = "1", source = "a" }
"""


@pytest.fixture
def checked(tmp_path):
    """Findings of a preset with that text, its places without the folder."""

    def check(text: str):
        path = tmp_path / "juniper.toml"
        path.write_text(text)
        site = load_site(str(path), environ={})
        return [
            (one.level, one.path, one.where.removeprefix(f"{tmp_path}/"), one.message)
            for one in validate(site, today=TODAY)
        ]

    return check


def test_a_good_preset_has_nothing_to_be_told(checked):
    assert checked(GOOD) == []
    assert checked(REFERENCE) == []


# What is changed in the good one, and then level, path, line and message of the only finding.
CHANGED = [
    ('contact = "help@juniper.example"', "", "warning contact juniper.toml", "there is no contact"),
    ("2026-06-01", "2026-11-22", "error reviewed :2", "and today is 2026-11-21; write a day that"),
    ("2026-06-01", "2025-11-20", "warning reviewed :2", "366 days ago; hold the values against"),
    ("2026-06-01", "2026-02-30", "error reviewed :2", "which no calendar has"),
    (
        "requeue = true",
        'requeue = true\nrequired = ["--mem=0"]',
        "error slurm.required :8",
        "--mem=0 is among slurm.forbidden too",
    ),
    (
        "requeue = true",
        'requeue = true\ngpu_request = "gres"',
        "error slurm.gpu_request :8",
        "slurm.forbidden has --gres; write gpus-per-node or gpus or gpus-per-task, or none",
    ),
    (
        "requeue = true",
        'requeue = true\ngres_name = "gpu:a100"',
        "warning slurm.gres_name :8",
        'counts only with gpu_request = "gres"',
    ),
    (
        "account_required = true",
        'account_required = false\naccount_env = ["ACCOUNT"]',
        "warning slurm.account_env :6",
        "account_required is false",
    ),
    (
        "requeue = true",
        "requeue = false",
        "error partitions.gpu.preemption.mode :20",
        "slurm.requeue is false, so SLURM cancels a preempted job instead",
    ),
    (
        "requeue = true",
        'extra = ["--no-requeue"]',
        "error partitions.gpu.preemption.mode :20",
        "every job gets --no-requeue",
    ),
    (
        'mode = "requeue"\ngrace_s = 120\nsignal = "SIGTERM"',
        'mode = "none"\ngrace_s = 120',
        "error partitions.gpu.preemption.grace_s :21",
        "mode is none, which has none",
    ),
    ("SIGTERM", "SIGTEMR", "error partitions.gpu.preemption.signal :22", "which is no signal"),
    ("cpus_per_node = 56", "cpus_per_node = 3", "error partitions.gpu.cpus_per_node :11", "for 4"),
    (
        "max_nodes = 100",
        "max_nodes = 100\nmin_nodes = 101",
        "error partitions.gpu.min_nodes :14",
        "so no job fits; did you swap the two",
    ),
    (
        "gpus_per_node = 4",
        'gpus_per_node = 0\ngpu = "A100"',
        "error partitions.gpu.gpu :11",
        "is A100 and gpus_per_node is 0",
    ),
    (
        'max_time = "12:00:00"',
        'max_time = "0:00:00"',
        "error partitions.gpu.max_time :12",
        "leaves no time to train",
    ),
    (
        '1-91 = "2:00:00"',
        '1-91 = "0:00:00"',
        "error partitions.gpu.walltime_bins.1-91 :16",
        "leaves no time to train; write the limit",
    ),
    ('["ib0"]', '["ib"]', "error network.socket_ifnames :26", "whole names belong here"),
    ('["ib0"]', '["=ib0"]', "error network.socket_ifnames :26", "whole names belong here"),
    ('["ib0"]', '["ib0", "ib0"]', "error network.socket_ifnames :26", "has ib0 more than once"),
    ('["ib0"]', '["interface_number"]', "error network.socket_ifnames :26", "has 16 characters"),
    (
        '["ib0"]',
        str([f"eth{n}" for n in range(17)]),
        "error network.socket_ifnames :26",
        "has 17 names and NCCL reads 16",
    ),
    (
        '["mlx5_0", "mlx5_1"]\nnics_per_node = 2',
        str([f"mlx5_{n}" for n in range(33)]),
        "error network.hcas :27",
        "has 33 names and NCCL reads 32; write 32 at most, or a beginning",
    ),
    ('"mlx5_1"]', '"eth0"]', "error network.hcas :27", "is a network interface, not an adapter"),
    (
        '["ib0"]\nhcas = ["mlx5_0", "mlx5_1"]',
        '["rdma0"]\nhcas = ["rdma0"]',
        "error network.hcas :27",
        "is in network.socket_ifnames too, and no adapter is an interface",
    ),
    ('kind = "ib"', 'kind = "tcp"', "warning network.hcas :27", "counts on ib and roce only"),
    ('"{host}i"', '"head"', "error network.rendezvous_host :29", "the same for every job"),
    ('"{host}i"', '"{host}-{job}"', "error network.rendezvous_host :29", "only {host} is filled"),
    (
        'NCCL_CROSS_NIC = "1"',
        'NCCL_CROSS_NIC = "one"',
        "error env.common.NCCL_CROSS_NIC :32",
        "reads 0 and drops 'one'",
    ),
    (
        'NCCL_CROSS_NIC = "1"',
        'NCCL_SOCKET_IFNAME = "ib0"',
        "error env.common.NCCL_SOCKET_IFNAME :32",
        "is made from network.socket_ifnames already",
    ),
    (
        'NCCL_CROSS_NIC = "1"',
        'NCCL_IB_HCA = "=mlx5_0"',
        "error env.common.NCCL_IB_HCA :32",
        "is made from network.hcas already",
    ),
    (
        '{ value = "PHB", why = "each adapter hangs at a GPU" }',
        '"PHB"',
        "debug env.common.NCCL_NET_GDR_LEVEL :33",
        "debugging variables",
    ),
    (
        "[env.when.newer.set]",
        '[modules]\nprovides_env = ["NCCL_CROSS_NIC"]\n[env.when.newer.set]',
        "warning env.common.NCCL_CROSS_NIC :32",
        "the module's value holds and this one is left out",
    ),
]


@pytest.mark.parametrize(("old", "new", "place", "told"), CHANGED)
def test_what_is_wrong_is_told_once_at_its_line(checked, old, new, place, told):
    assert GOOD.count(old) >= 1
    level, path, line = place.split()

    found = checked(GOOD.replace(old, new, 1))

    assert [one[:2] for one in found] == [(level, path)], found
    assert found[0][2].endswith(line)
    assert told in found[0][3]


def test_a_reference_preset_needs_a_contact_a_review_and_a_source_for_what_it_says(checked):
    found = checked(
        'stability = "reference"\n[partitions.gpu]\nmax_nodes = 4\n[env.common]\nA = "1"\n'
    )

    assert [(level, path) for level, path, _, _ in found] == [
        ("error", "contact"),
        ("error", "reviewed"),
        ("error", "sources"),
        ("error", "partitions.gpu.max_nodes"),
        ("error", "env.common.A"),
    ]
    assert found[3][2].endswith(":3")
    assert "has no source, and a reference preset needs one" in found[3][3]


def test_an_unverified_preset_is_a_warning(checked):
    assert [one[:2] for one in checked('stability = "unverified"')] == [("warning", "stability")]


SLINGSHOT = 'contact = "me"\n[network]\nkind = "slingshot"\n'


def test_what_is_right_for_several_nodes_can_be_wrong_for_one(checked):
    good = SLINGSHOT + '[env.multi_node]\nNCCL_NET = "OFI"\n'
    wrong = SLINGSHOT + '[env.common]\nNCCL_NET = "OFI"\n'

    assert checked(good) == []
    assert [one[:3] for one in checked(wrong)] == [
        ("error", "env.common.NCCL_NET", "juniper.toml:5")
    ]


def test_variables_of_two_groups_are_held_against_each_other(checked):
    text = SLINGSHOT + '[env.common]\nNCCL_MIN_CTAS = { value = "32", why = "x" }\n'
    more = '[env.multi_node]\nNCCL_MAX_CTAS = { value = "8", why = "x" }\n'

    assert checked(text) == []
    assert [one[:2] for one in checked(text + more)] == [("error", "env.common.NCCL_MIN_CTAS")]


def test_a_condition_replaces_values_and_is_judged_under_its_version(checked):
    text = 'contact = "me"\n[env.common]\nNCCL_MIN_CTAS = { value = "32", why = "x" }\n'
    when = '[env.when.old]\nnccl = ">=2.20"\n[env.when.old.set]\n'

    assert checked(text + when + 'NCCL_MIN_CTAS = { value = "8", why = "x" }\n') == []
    found = checked(text + when + 'NCCL_ALGO = { value = "AllReduce:Tree", why = "x" }\n')
    assert [one[:2] for one in found] == [("error", "env.when.old.set.NCCL_ALGO")]
    assert "NCCL 2.20 knows no functions here" in found[0][3]


def test_alt_read_asks_for_the_option_that_it_needs(checked):
    variable = '[env.common]\nFI_CXI_RDZV_PROTO = "alt_read"\n'
    option = '[slurm]\nrequired = ["--network=disable_rdzv_get"]\n'

    assert checked(SLINGSHOT + variable + option) == []
    assert [one[:2] for one in checked(SLINGSHOT + variable)] == [
        ("error", "env.common.FI_CXI_RDZV_PROTO")
    ]
    assert checked(SLINGSHOT + option) == []


def test_what_a_base_says_is_told_at_its_own_file(tmp_path):
    base, own = tmp_path / "fabric.toml", tmp_path / "juniper.toml"
    base.write_text('stability = "base"\n[env.common]\nNCCL_CROSS_NIC = "yes"\n')
    own.write_text('contact = "me"\nextends = "fabric"\n')

    (found,) = validate(load_site(str(own), environ={}), today=TODAY)

    assert (found.level, found.where, found.value) == ("error", f"{base}:3", "yes")
    assert re.match(rf"{re.escape(str(base))}:3: env.common.NCCL_CROSS_NIC: ", str(found))


@pytest.mark.two_users  # a lock holds where the file is another user's
def test_a_lock_of_what_has_no_value_is_a_warning(tmp_path):
    text = 'contact = "me"\n[env.common]\nA = "1"\n[lock]\nkeys = ["env.common", "network.kind"]\n'
    (tmp_path / "juniper.toml").write_text(text)

    (found,) = validate(load_site("juniper", environ={"HPCTRAIN_SITE_PATH": str(tmp_path)}))

    assert (found.level, found.path, found.where) == (
        "warning",
        "lock.keys",
        f"{tmp_path}/juniper.toml:5",
    )
    assert found.message.startswith("network.kind is locked and has no value here")
