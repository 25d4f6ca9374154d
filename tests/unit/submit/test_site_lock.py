"""Locked values change only with --allow-locked, and each such change is told."""

from __future__ import annotations

import pytest

from hpctrain.cluster.site.schema import About, Lock, PresetValue, Site
from hpctrain.cluster.site.sheet import check_locked
from hpctrain.errors import UsageError


def site(*locks, overridden=None, contact=""):
    leaves = {
        path: PresetValue("x", "system", "/etc/j.toml", n + 1)
        for n, path in enumerate(
            [("lock", "keys"), ("env", "multi_node", "NCCL_NET"), ("env", "when", "w", "set", "B")]
        )
    }
    about = About(name="juniper", contact=contact)
    return Site(about, lock=Lock(list(locks)), leaves=leaves, overridden=overridden or {})


@pytest.mark.parametrize(
    ("lock", "path"),
    [
        ("settings.slurm.partition", "settings.slurm.partition"),
        ("settings.slurm", "settings.slurm.partition"),
        ("env.multi_node.NCCL_NET", "env.NCCL_NET"),
        ("env.single_node.NCCL_NET", "env.NCCL_NET"),
        ("env.multi_node", "env.NCCL_NET"),
        ("env", "env.NCCL_NET"),
        ("env.when", "env.B"),
        ("network.socket_ifnames", "env.NCCL_SOCKET_IFNAME"),
        ("network.socket_ifnames", "env.GLOO_SOCKET_IFNAME"),
        ("network", "env.NCCL_IB_HCA"),
    ],
)
def test_a_change_of_a_locked_value_is_refused_or_told(lock, path):
    told = f"{path} is locked by site juniper (/etc/j.toml:1) and changed by flag --x"

    with pytest.raises(UsageError) as error:
        check_locked(site(lock), {path: "flag --x"}, allow=False)

    assert str(error.value) == f"{told}; leave it out, or say --allow-locked"
    assert check_locked(site(lock), {path: "flag --x"}, allow=True) == [f"{told} (--allow-locked)"]


@pytest.mark.parametrize(
    ("lock", "path"),
    [
        ("settings.slurm.partition", "settings.slurm.partitions"),
        ("settings.slurm.partition", "settings.slurm.qos"),
        ("env.multi_node.NCCL_NET", "env.NCCL_NET_PLUGIN"),
        ("env.multi_node.NCCL_NET", "env.NET"),
        ("env.common", "env.NCCL_NET"),
        ("env.multi_node", "env.NCCL_ALGO"),
        ("network.hcas", "env.NCCL_SOCKET_IFNAME"),
    ],
)
def test_what_is_not_locked_may_change(lock, path):
    assert check_locked(site(lock), {path: "flag --x"}, allow=False) == []


def test_changes_of_the_users_own_layers_count_and_all_are_told_with_whom_to_ask():
    locked = site(
        "slurm.mpi",
        "settings.slurm",
        overridden={("slurm", "mpi"): "user (/home/j.toml:2)"},
        contact="help@juniper",
    )

    with pytest.raises(UsageError) as error:
        check_locked(locked, {"settings.slurm.qos": "hpctrain.toml:3"}, allow=False)

    message = str(error.value)
    assert (
        "slurm.mpi is locked by site juniper (/etc/j.toml:1) and changed by user (/hom" in message
    )
    assert "settings.slurm.qos is locked by" in message
    assert message.endswith("leave it out, or ask help@juniper, or say --allow-locked")
    assert len(check_locked(locked, {"settings.slurm.qos": "x"}, allow=True)) == 2
