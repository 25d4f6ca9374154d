"""[slurm], [partitions], [network] and the rest: facts that contradict each other or nature.

tests/unit/site/test_validate.py holds the promises.
"""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

from hpctrain.errors import UsageError
from hpctrain.nccl.lists import LONGEST_NETDEV, MOST_HCAS, MOST_NETDEVS
from hpctrain.nccl.rules import ERROR, Context, check_variable
from hpctrain.settings.check import time_s
from hpctrain.site.preset import PresetFinding, error, warning

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpctrain.site.preset import KeyPath, Site
    from hpctrain.site.schema import Partition

_LINK_OF = {"ib": "InfiniBand", "roce": "Ethernet"}
_GPU_FLAGS = {
    "gpus-per-node": "--gpus-per-node",
    "gres": "--gres",
    "gpus": "--gpus",
    "gpus-per-task": "--gpus-per-task",
}


def facts(site: Site) -> Iterator[PresetFinding]:
    """What is to be said of everything but the environment."""
    yield from _slurm(site)
    for name, partition in site.partitions.items():
        yield from _partition(site, name, partition)
        yield from _preemption(site, name, partition)
    yield from _network(site)
    yield from _rest(site)


def _option(text: str) -> str:
    """`--gres` of `--gres=gpu:4` and of `--gres gpu:4`."""
    return re.split(r"[= ]", text, maxsplit=1)[0]


def _slurm(site: Site) -> Iterator[PresetFinding]:
    facts_, forbidden = site.slurm, {_option(text) for text in site.slurm.forbidden}
    for key in ("required", "extra"):
        for option in getattr(facts_, key):
            if _option(option) in forbidden:
                yield error(
                    site,
                    ("slurm", key),
                    f"{option} is among slurm.forbidden too; take it away from one of the two",
                )
    flag = _GPU_FLAGS.get(facts_.gpu_request)
    if flag in forbidden:
        open_ = [name for name, other in _GPU_FLAGS.items() if other not in forbidden]
        yield error(
            site,
            ("slurm", "gpu_request"),
            f"is {facts_.gpu_request}, and slurm.forbidden has {flag}; write "
            f"{' or '.join(open_)}, or none where jobs get whole nodes",
        )
    if facts_.gpu_request != "gres" and ("slurm", "gres_name") in site.leaves:
        yield warning(
            site,
            ("slurm", "gres_name"),
            f'counts only with gpu_request = "gres", and that is {facts_.gpu_request}; take it '
            "away, or change that",
        )
    if facts_.account_required is False and facts_.account_env:
        yield warning(
            site,
            ("slurm", "account_env"),
            "names variables with an account, and account_required is false; take one away",
        )


def _positive(
    site: Site, path: KeyPath, number: float | None, what: str
) -> Iterator[PresetFinding]:
    if number is not None and number <= 0:
        yield error(site, path, f"is {number}, and {what}; write what there is, or leave it out")


def _partition(site: Site, name: str, partition: Partition) -> Iterator[PresetFinding]:
    at = ("partitions", name)
    for key in ("cpus_per_node", "mem_gib", "min_nodes", "max_nodes"):
        yield from _positive(site, (*at, key), getattr(partition, key), "no node does without")
    least, most = partition.min_nodes, partition.max_nodes
    if least and most and least > most:
        yield error(
            site,
            (*at, "min_nodes"),
            f"is {least} and max_nodes is {most}, so no job fits; did you swap the two?",
        )
    gpus, cpus = partition.gpus_per_node, partition.cpus_per_node
    if gpus and cpus and cpus < gpus:
        yield error(
            site,
            (*at, "cpus_per_node"),
            f"is {cpus} for {gpus} GPUs, and every GPU's rank needs a core; write the cores of a "
            "whole node, not of one GPU",
        )
    if partition.gpu and partition.gpus_per_node == 0:
        yield error(
            site, (*at, "gpu"), f"is {partition.gpu} and gpus_per_node is 0; change one of the two"
        )
    limit = seconds(partition.max_time)
    if partition.max_time and limit is None:
        yield error(
            site, (*at, "max_time"), f"is {partition.max_time}, which leaves no time to train"
        )
    yield from _bins(site, at, partition, limit)


def seconds(text: str) -> int | None:
    """A time limit in seconds; None where it is none, or leaves no time."""
    try:
        return time_s(text)
    except UsageError:
        return None


def _bin(text: str) -> tuple[int, float]:
    """Fewest and most nodes of a bin; without an upper end, any number."""
    least, _, most = text.partition("-")
    return int(least), int(most) if most else float("inf")


def _bins(
    site: Site, at: KeyPath, partition: Partition, limit: int | None
) -> Iterator[PresetFinding]:
    """Bins of walltime: in order, one beside the other, within the partition's own limits."""
    before: tuple[str, float] | None = None
    for text, time in partition.walltime_bins.items():
        here, (least, most) = (*at, "walltime_bins", text), _bin(text)
        yield from _order(site, here, before, partition.max_nodes)
        took = seconds(time)
        if took is None:
            yield error(site, here, f"is {time}, which leaves no time to train; write the limit")
        elif limit is not None and took > limit:
            yield error(
                site,
                here,
                f"is {time} and max_time is {partition.max_time}; the shorter one holds, so raise "
                "max_time or lower this",
            )
        before = (text, max(least, most))


def _order(
    site: Site, here: KeyPath, before: tuple[str, float] | None, max_nodes: int | None
) -> Iterator[PresetFinding]:
    """Whether a bin goes on where the one before ends."""
    text = here[-1]
    least, most = _bin(text)
    if most < least:
        yield error(site, here, f"{text} has its maximum below its minimum; swap the two")
    elif max_nodes and least > max_nodes:
        yield error(
            site, here, f"{text} is beyond max_nodes, which is {max_nodes}; take one of them away"
        )
    elif before and least <= before[1]:
        yield error(
            site,
            here,
            f"{text} begins within or before {before[0]}, so a job of {least} nodes has two "
            "limits; write the bins in order, one beside the other",
        )
    elif before and least > before[1] + 1:
        yield warning(
            site,
            here,
            f"no bin holds jobs of {before[1] + 1:.0f} to {least - 1} nodes; close the gap",
        )


def _preemption(site: Site, name: str, partition: Partition) -> Iterator[PresetFinding]:
    at, preemption = ("partitions", name, "preemption"), partition.preemption
    if preemption.mode == "none":
        for key in ("grace_s", "signal", "exempt_s"):
            if (*at, key) in site.leaves:
                yield error(
                    site,
                    (*at, key),
                    "says what a preemption does and mode is none, which has none; take one away",
                )
    if preemption.mode == "requeue":
        yield from _requeue(site, name)
    if preemption.signal:
        yield from _signal(site, at, preemption.signal, preemption.grace_s)


def _requeue(site: Site, name: str) -> Iterator[PresetFinding]:
    path = ("partitions", name, "preemption", "mode")
    if site.slurm.requeue is False:
        yield error(
            site,
            path,
            "is requeue and slurm.requeue is false, so SLURM cancels a preempted job instead; "
            'write mode = "cancel", or slurm.requeue = true',
        )
    options: Sequence[str] = [
        *site.slurm.required,
        *site.slurm.extra,
        *site.settings.get("slurm", {}).get("extra", []),
    ]
    if "--no-requeue" in options:
        yield error(
            site,
            path,
            "is requeue, and every job gets --no-requeue, which makes SLURM cancel it; take "
            "--no-requeue away: hpctrain sets what it needs",
        )


def _signal(site: Site, at: KeyPath, name: str, grace_s: int | None) -> Iterator[PresetFinding]:
    full = name if name.startswith("SIG") else f"SIG{name}"
    if full not in signal.Signals.__members__:
        yield error(site, (*at, "signal"), f"is {name}, which is no signal; write e.g. SIGTERM")
    elif full == "SIGKILL":
        yield error(
            site,
            (*at, "signal"),
            "is SIGKILL, which no program can hear: that is no notice; leave it out",
        )
    elif full != name:
        yield warning(site, (*at, "signal"), f"is {name}; write {full}, as the manual has it")
    if grace_s == 0 and site.slurm.kill_wait_s == 0:
        yield warning(
            site,
            (*at, "grace_s"),
            f"is 0 and so is slurm.kill_wait_s, so the kill comes together with {name} and no save "
            "fits between; leave signal out, or write how long the notice is",
        )


def _network(site: Site) -> Iterator[PresetFinding]:
    net = site.network
    interfaces, adapters = ("network", "socket_ifnames"), ("network", "hcas")
    yield from _names(site, interfaces, net.socket_ifnames, MOST_NETDEVS)
    for name in net.socket_ifnames:
        if len(name) > LONGEST_NETDEV:
            yield error(
                site,
                interfaces,
                f'"{name}" has {len(name)} characters and no interface has more than '
                f"{LONGEST_NETDEV}; write a name that `ip -br link` shows",
            )
        for problem in check_variable("GLOO_SOCKET_IFNAME", name, Context(multi_node=False)):
            if problem.level == ERROR and len(name) <= LONGEST_NETDEV:
                yield error(
                    site, interfaces, f'"{name}": whole names belong here; {problem.message}'
                )
    yield from _names(site, adapters, net.hcas, MOST_HCAS)
    for name in net.hcas:
        value = name if net.hca_mode == "prefix" else f"={name}"
        for problem in check_variable("NCCL_IB_HCA", value, Context(kind=net.kind)):
            if problem.level == ERROR:
                yield error(site, adapters, f'"{name}": {problem.message}')
        if name in net.socket_ifnames:
            yield error(
                site,
                adapters,
                f'"{name}" is in network.socket_ifnames too, and no adapter is an interface; '
                "write names of /sys/class/infiniband",
            )
    if net.hcas and net.kind not in {"", *_LINK_OF}:
        yield warning(
            site,
            adapters,
            f"counts on ib and roce only, and network.kind is {net.kind}; leave it out",
        )
    yield from _places(site)


def _names(site: Site, path: KeyPath, names: Sequence[str], most: int) -> Iterator[PresetFinding]:
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        yield error(site, path, f"has {', '.join(doubles)} more than once; write each once")
    if len(names) > most:
        yield error(
            site,
            path,
            f"has {len(names)} names and NCCL reads {most}; write {most} at most"
            + (', or a beginning with hca_mode = "prefix"' if path[-1] == "hcas" else ""),
        )


def _places(site: Site) -> Iterator[PresetFinding]:
    """Links, and the name under which ranks meet."""
    net = site.network
    link = _LINK_OF.get(net.kind)
    if link and net.link_layer and net.link_layer != link:
        yield error(
            site,
            ("network", "link_layer"),
            f"is {net.link_layer} and network.kind is {net.kind}, which has {link}; write "
            f'kind = "{"roce" if net.kind == "ib" else "ib"}", or correct the link layer',
        )
    for key in ("rate_gbps", "nics_per_node"):
        yield from _positive(site, ("network", key), getattr(net, key), "a fabric has some")
    if net.hcas and net.hca_mode == "exact" and net.nics_per_node:
        yield from _count(site, net.nics_per_node)
    template = net.rendezvous_host
    if template and re.sub(r"\{host\}", "", template, count=1) == template:
        yield error(
            site,
            ("network", "rendezvous_host"),
            f'is "{template}", the same for every job; write {{host}} where the first node\'s name '
            "belongs, e.g. {host}i",
        )
    elif set(template.replace("{host}", "", 1)) & set("{}$ "):
        yield error(
            site,
            ("network", "rendezvous_host"),
            f'is "{template}", and only {{host}} is filled in; write e.g. {{host}}i',
        )


def _count(site: Site, nics: int) -> Iterator[PresetFinding]:
    if len(site.network.hcas) > nics:
        yield warning(
            site,
            ("network", "hcas"),
            f"names {len(site.network.hcas)} adapters and network.nics_per_node is {nics}; "
            "adapters for storage do not belong here",
        )


def _rest(site: Site) -> Iterator[PresetFinding]:
    if not 0 < site.baseline.tolerance <= 1:
        yield error(
            site,
            ("baseline", "tolerance"),
            f"is {site.baseline.tolerance}, and it is a share of the baseline; write e.g. 0.8",
        )
    for nodes, rate in site.baseline.allreduce_busbw_gbs.items():
        path = ("baseline", "allreduce_busbw_gbs", nodes)
        yield from _positive(site, path, rate, "a bandwidth is more than nothing")
    yield from _positive(
        site, ("storage", "purge_days"), site.storage.purge_days, "0 would delete files at once"
    )
