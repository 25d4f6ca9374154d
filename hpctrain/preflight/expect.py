"""What healthy nodes of this site have, and what travels from the login node to the nodes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hpctrain.preflight.slow_nodes import Limits

if TYPE_CHECKING:
    from hpctrain.site.preset import Site


@dataclass(frozen=True)
class Expected:
    """What the site says; None and empty mean that it says nothing.

    Attributes:
        socket_ifnames: Interfaces that must be there, up, with an address.
        hcas: Adapters that must be there and active.
        hca_prefix: Whether `hcas` are only the beginnings of names.
        rate_gbps: Slowest rate of an adapter.
        nics: Adapters of a node.
        link_layer: Of the adapters.
        gpus: GPUs of a node.
        driver_min: Oldest GPU driver.
        nvlinks: NVLink connections of a GPU.
        memlock: "unlimited" or the fewest KiB.
        shm_gib_min: Smallest /dev/shm.
        nccl_conf: Whether nodes have /etc/nccl.conf.
        env: The environment that ranks will have.
        baseline: Nodes to bus bandwidth, GB/s.
        tolerance: Share of it that is still healthy.
        size_mib: Size of the all-reduce; None for one that fits the device.
        local: Folders on the node's own disk.
    """

    socket_ifnames: list[str] = field(default_factory=list)
    hcas: list[str] = field(default_factory=list)
    hca_prefix: bool = False
    rate_gbps: float | None = None
    nics: int | None = None
    link_layer: str = ""
    gpus: int | None = None
    driver_min: str = ""
    nvlinks: int | None = None
    memlock: str = ""
    shm_gib_min: float | None = None
    nccl_conf: bool | None = None
    env: dict[str, str] = field(default_factory=dict)
    baseline: dict[str, float] = field(default_factory=dict)
    tolerance: float = 0.8
    size_mib: int | None = None
    local: list[str] = field(default_factory=list)

    def limits(self) -> Limits:
        """What counts as a slow collective."""
        baseline = {int(nodes): value for nodes, value in self.baseline.items()}
        return Limits(baseline, self.tolerance)

    def has_yardstick(self, nodes: int) -> bool:
        """Whether the baseline says what so many nodes together do; one node's number does not."""
        return self.limits().floor(nodes) is not None

    def plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


def expected_of(site: Site | None, *, gpus: int, env: dict[str, str]) -> Expected:
    """What a site expects of its nodes.

    Args:
        site: The preset; None where there is none.
        gpus: GPUs per node that the job asks for, 0 for none.
        env: The ranks' environment.
    """
    if site is None:
        return Expected(gpus=gpus or None, env=env)
    net, expect, base = site.network, site.expect, site.baseline
    return Expected(
        socket_ifnames=list(net.socket_ifnames),
        hcas=list(net.hcas),
        hca_prefix=net.hca_mode == "prefix",
        rate_gbps=net.rate_gbps,
        nics=net.nics_per_node,
        link_layer=net.link_layer,
        gpus=gpus or None,
        driver_min=expect.driver_min,
        nvlinks=expect.nvlinks,
        memlock=expect.memlock,
        shm_gib_min=expect.shm_gib_min,
        nccl_conf=expect.nccl_conf,
        env=env,
        baseline=dict(base.allreduce_busbw_gbs),
        tolerance=base.tolerance,
        size_mib=base.size_mib,
        local=[site.storage.local] if site.storage.local.startswith("/") else [],
    )


@dataclass(frozen=True)
class Order:
    """What the nodes are to do, as the login node or an agent has written it down.

    Attributes:
        expected: What the site says.
        nonce: Content of the file that the writer of this order left in the directory.
        bandwidth: Whether the collective is tried.
        ranks: Processes of a node in it.
        timeout_s: So long may one try of a group take.
        meet_s: So long may nodes take to come.
    """

    expected: Expected
    nonce: str = ""
    bandwidth: bool = True
    ranks: int = 1
    timeout_s: float = 120.0
    meet_s: float = 60.0

    def plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    def to_others(self) -> dict[str, Any]:
        """What the other nodes are told: without an environment, which they find by themselves."""
        return replace(self, expected=replace(self.expected, env={})).plain()

    @staticmethod
    def from_plain(raw: dict[str, Any]) -> Order:
        """Back from `plain`."""
        return Order(**{**raw, "expected": Expected(**raw["expected"])})
