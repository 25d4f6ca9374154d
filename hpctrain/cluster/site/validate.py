"""A preset held against what NCCL, SLURM and the preset itself say: what `sites validate` prints.

Types, choices and unknown keys are refused earlier, when the file is read. `environment` judges
[env] and [network]: a variable may be right by itself and wrong beside one of another group, on one
node only, or under one version only, so each environment that a job can get is judged as a whole.
`facts` is for [slurm], [partitions] and the rest: facts that contradict each other or nature.

Pure: the day comes in as an argument.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.cluster.nccl.lists import LONGEST_NETDEV, MOST_HCAS, MOST_NETDEVS
from hpctrain.cluster.nccl.rules import DEBUG, ERROR, Context, check_environment, check_variable
from hpctrain.cluster.site.schema import KeyPath, Partition, PresetFinding, Site, dotted
from hpctrain.cluster.site.sheet import DERIVED
from hpctrain.core.base import clock
from hpctrain.core.settings.check import time_s
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_GPU_FLAGS = {
    "gpus-per-node": "--gpus-per-node",
    "gres": "--gres",
    "gpus": "--gpus",
    "gpus-per-task": "--gpus-per-task",
}


class Said(NamedTuple):
    """What is to be said of the value at a path."""

    level: str
    path: KeyPath
    message: str


def error(path: KeyPath, message: str) -> Said:
    """Something that is wrong."""
    return Said("error", path, message)


def warning(path: KeyPath, message: str) -> Said:
    """Something that may well be wrong."""
    return Said("warning", path, message)


def facts(site: Site) -> Iterator[Said]:
    """What is to be said of everything but the environment."""
    yield from _slurm(site)
    for name, partition in site.partitions.items():
        yield from _partition(name, partition)
        yield from _preemption(site, name, partition)
    yield from _network(site)


def _option(text: str) -> str:
    """`--gres` of `--gres=gpu:4` and of `--gres gpu:4`."""
    return re.split(r"[= ]", text, maxsplit=1)[0]


def _slurm(site: Site) -> Iterator[Said]:
    facts_, forbidden = site.slurm, {_option(text) for text in site.slurm.forbidden}
    for key in ("required", "extra"):
        for option in getattr(facts_, key):
            if _option(option) in forbidden:
                yield error(
                    ("slurm", key),
                    f"{option} is among slurm.forbidden too; take it away from one of the two",
                )
    flag = _GPU_FLAGS.get(facts_.gpu_request)
    if flag in forbidden:
        open_ = [name for name, other in _GPU_FLAGS.items() if other not in forbidden]
        yield error(
            ("slurm", "gpu_request"),
            f"is {facts_.gpu_request}, and slurm.forbidden has {flag}; write "
            f"{' or '.join(open_)}, or none where jobs get whole nodes",
        )
    if facts_.gpu_request != "gres" and ("slurm", "gres_name") in site.leaves:
        yield warning(
            ("slurm", "gres_name"),
            f'counts only with gpu_request = "gres", and that is {facts_.gpu_request}; take it '
            "away, or change that",
        )
    if facts_.account_required is False and facts_.account_env:
        yield warning(
            ("slurm", "account_env"),
            "names variables with an account, and account_required is false; take one away",
        )


def _partition(name: str, partition: Partition) -> Iterator[Said]:
    at = ("partitions", name)
    least, most = partition.min_nodes, partition.max_nodes
    if least and most and least > most:
        yield error(
            (*at, "min_nodes"),
            f"is {least} and max_nodes is {most}, so no job fits; did you swap the two?",
        )
    gpus, cpus = partition.gpus_per_node, partition.cpus_per_node
    if gpus and cpus and cpus < gpus:
        yield error(
            (*at, "cpus_per_node"),
            f"is {cpus} for {gpus} GPUs, and every GPU's rank needs a core; write the cores of a "
            "whole node, not of one GPU",
        )
    if partition.gpu and partition.gpus_per_node == 0:
        yield error(
            (*at, "gpu"), f"is {partition.gpu} and gpus_per_node is 0; change one of the two"
        )
    limits: dict[KeyPath, str] = {(*at, "max_time"): partition.max_time}
    limits |= {(*at, "walltime_bins", nodes): t for nodes, t in partition.walltime_bins.items()}
    for path, time in limits.items():
        if time and seconds(time) is None:
            yield error(path, f"is {time}, which leaves no time to train; write the limit")


def seconds(text: str) -> int | None:
    """A time limit in seconds; None where it is none, or leaves no time."""
    try:
        return time_s(text)
    except UsageError:
        return None


def _preemption(site: Site, name: str, partition: Partition) -> Iterator[Said]:
    at, preemption = ("partitions", name, "preemption"), partition.preemption
    if preemption.mode == "none":
        for key in ("grace_s", "signal", "exempt_s"):
            if (*at, key) in site.leaves:
                yield error(
                    (*at, key),
                    "says what a preemption does and mode is none, which has none; take one away",
                )
    if preemption.mode == "requeue":
        yield from _requeue(site, name)
    if preemption.signal and preemption.signal not in signal.Signals.__members__:
        yield error(
            (*at, "signal"), f"is {preemption.signal}, which is no signal; write e.g. SIGTERM"
        )


def _requeue(site: Site, name: str) -> Iterator[Said]:
    path = ("partitions", name, "preemption", "mode")
    if site.slurm.requeue is False:
        yield error(
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
            path,
            "is requeue, and every job gets --no-requeue, which makes SLURM cancel it; take "
            "--no-requeue away: hpctrain sets what it needs",
        )


def _network(site: Site) -> Iterator[Said]:
    net = site.network
    interfaces, adapters = ("network", "socket_ifnames"), ("network", "hcas")
    yield from _names(interfaces, net.socket_ifnames, MOST_NETDEVS)
    for name in net.socket_ifnames:
        if len(name) > LONGEST_NETDEV:
            yield error(
                interfaces,
                f'"{name}" has {len(name)} characters and no interface has more than '
                f"{LONGEST_NETDEV}; write a name that `ip -br link` shows",
            )
        for problem in check_variable("GLOO_SOCKET_IFNAME", name, Context(multi_node=False)):
            if problem.level == ERROR and len(name) <= LONGEST_NETDEV:
                yield error(interfaces, f'"{name}": whole names belong here; {problem.message}')
    yield from _names(adapters, net.hcas, MOST_HCAS)
    for name in net.hcas:
        value = name if net.hca_mode == "prefix" else f"={name}"
        for problem in check_variable("NCCL_IB_HCA", value, Context(kind=net.kind)):
            if problem.level == ERROR:
                yield error(adapters, f'"{name}": {problem.message}')
        if name in net.socket_ifnames:
            yield error(
                adapters,
                f'"{name}" is in network.socket_ifnames too, and no adapter is an interface; '
                "write names of /sys/class/infiniband",
            )
    if net.hcas and net.kind not in {"", "ib", "roce"}:
        yield warning(
            adapters, f"counts on ib and roce only, and network.kind is {net.kind}; leave it out"
        )
    yield from _rendezvous(net.rendezvous_host)


def _names(path: KeyPath, names: Sequence[str], most: int) -> Iterator[Said]:
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        yield error(path, f"has {', '.join(doubles)} more than once; write each once")
    if len(names) > most:
        yield error(
            path,
            f"has {len(names)} names and NCCL reads {most}; write {most} at most"
            + (', or a beginning with hca_mode = "prefix"' if path[-1] == "hcas" else ""),
        )


def _rendezvous(template: str) -> Iterator[Said]:
    """The name under which ranks meet."""
    if template and re.sub(r"\{host\}", "", template, count=1) == template:
        yield error(
            ("network", "rendezvous_host"),
            f'is "{template}", the same for every job; write {{host}} where the first node\'s name '
            "belongs, e.g. {host}i",
        )
    elif set(template.replace("{host}", "", 1)) & set("{}$ "):
        yield error(
            ("network", "rendezvous_host"),
            f'is "{template}", and only {{host}} is filled in; write e.g. {{host}}i',
        )


_AT_LEAST = re.compile(r">=?\s*(\d+(?:\.\d+)*)")
REVIEW_DAYS = 365
_LEVELS = ("error", "warning", "debug")
_SOURCED = ("env", "partitions")


@dataclass
class _Product:
    """One environment that a job can get: each variable with where it stands."""

    multi_node: bool
    nccl: str = ""
    old_plugin: bool = False
    paths: dict[str, KeyPath] = field(default_factory=dict)

    def values(self, site: Site) -> dict[str, str]:
        return {name: _value(site, path) for name, path in self.paths.items()}


def environment(site: Site) -> Iterator[Said]:
    """What the rules say of every environment that the preset can give."""
    yield from _twice(site)
    yield from _module_words(site)
    for product in _products(site):
        context = Context(
            kind=site.network.kind,
            required=[*site.slurm.required, *site.slurm.extra],
            nccl=product.nccl,
            old_plugin=product.old_plugin,
            multi_node=product.multi_node,
        )
        for name, problems in check_environment(product.values(site), context).items():
            path = product.paths[name]
            leaf = site.leaves.get(path)
            for problem in problems:
                if problem.level != DEBUG or not (leaf and leaf.why):
                    yield Said(problem.level, path, problem.message)


def _value(site: Site, path: KeyPath) -> str:
    if path[1] == "when":
        return site.env.when[path[2]].set[path[4]]
    group: dict[str, str] = getattr(site.env, path[1])
    return group[path[2]]


def _products(site: Site) -> Iterator[_Product]:
    """Each group of nodes, by itself and with each condition that can hold there."""
    for multi_node in (False, True):
        groups = ("common", "multi_node" if multi_node else "single_node")
        paths: dict[str, KeyPath] = {}
        for group in groups:
            paths |= {name: ("env", group, name) for name in getattr(site.env, group)}
        yield _Product(multi_node, paths=_without_modules(site, paths))
        for key, when in site.env.when.items():
            if when.nodes == ("single" if multi_node else "multi"):
                continue
            held = {name: path for name, path in paths.items() if name not in when.unset}
            held |= {name: ("env", "when", key, "set", name) for name in when.set}
            nccl = _AT_LEAST.search(when.nccl)
            yield _Product(
                multi_node,
                nccl=nccl[1] if nccl else "",
                old_plugin="<" in when.plugin,
                paths=_without_modules(site, held),
            )


def _without_modules(site: Site, paths: dict[str, KeyPath]) -> dict[str, KeyPath]:
    theirs = set(site.modules.provides_env)
    return {name: path for name, path in paths.items() if name not in theirs}


def _twice(site: Site) -> Iterator[Said]:
    """Variables that [network] gives already: two answers, of which the reader sees one."""
    for path in (path for path in site.leaves if path[0] == "env" and path[-1] in DERIVED):
        key = DERIVED[path[-1]][-1]
        if getattr(site.network, key):
            yield error(
                path,
                f"{path[-1]} is made from network.{key} already, which knows what NCCL and Gloo "
                "each want; leave it out, or take the list away",
            )


def _module_words(site: Site) -> Iterator[Said]:
    """Variables that the modules set themselves, and are left out here."""
    theirs = set(site.modules.provides_env)
    for path in (path for path in site.leaves if path[0] == "env" and path[-1] in theirs):
        yield warning(
            path,
            f"modules.provides_env has {path[-1]} too, so the module's value holds and this one "
            "is left out; take one of the two away",
        )


def validate(site: Site, *, today: date | None = None) -> list[PresetFinding]:
    """All that is to be said of a preset, in the order of its lines; empty where it is good."""
    today = today or date.fromtimestamp(clock.now())  # noqa: DTZ012 - a review has a day, and no hour
    said = [
        *_about(site),
        *_reviewed(site, today),
        *_sources(site),
        *facts(site),
        *environment(site),
        *_lock(site),
    ]
    files = {site_file.path: number for number, site_file in enumerate(site.files)}

    def order(finding: PresetFinding) -> tuple[int, str, int, int]:
        """Files and lines, errors first on a line."""
        file, _, line = finding.where.rpartition(":")
        number = int(line) if file and line.isdigit() else 0
        name = file if number else finding.where
        return files.get(name, -1), name, number, _LEVELS.index(finding.level)

    return sorted((_finding(site, one) for one in dict.fromkeys(said)), key=order)


def _finding(site: Site, said: Said) -> PresetFinding:
    """With the value, and its place, else that of the first one in its table, else the file."""
    path = said.path
    held = site.leaves.get(path)
    value = ", ".join(held.value) if held and isinstance(held.value, list) else held and held.value
    heads = (path[:length] for length in range(len(path), 0, -1))
    places = (
        leaf.place for head in heads for at, leaf in site.leaves.items() if at[: len(head)] == head
    )
    file = site.files[-1].path if site.files else f"site {site.name}"
    return PresetFinding(said.level, dotted(path), value, next(places, file), said.message)


def _about(site: Site) -> Iterator[Said]:
    about = site.about
    if about.stability in {"reference", "local"} and not about.contact:
        tell = error if about.stability == "reference" else warning
        yield tell(
            ("contact",),
            "there is no contact, so nobody knows whom to ask; write who answers for the preset",
        )
    if about.stability == "unverified":
        yield warning(
            ("stability",),
            "stability is unverified, and `submit` refuses the site; hold its values against the "
            'cluster, then write stability = "local" in a file of your own',
        )


def _reviewed(site: Site, today: date) -> Iterator[Said]:
    """When somebody last held the values against their sources."""
    text, path = site.about.reviewed, ("reviewed",)
    if not text:
        if site.about.stability == "reference":
            yield error(
                path, "a reference preset tells when it was reviewed; write e.g. 2026-01-31"
            )
        return
    try:
        day = date.fromisoformat(text)
    except ValueError:
        yield error(path, f"reviewed is {text}, which no calendar has; write the day")
        return
    if day > today:
        yield error(path, f"reviewed is {text} and today is {today}; write a day that has been")
    elif today - day > timedelta(days=REVIEW_DAYS):
        yield warning(
            path,
            f"reviewed is {text}, {(today - day).days} days ago; hold the values against their "
            "sources again, and write today's day",
        )


def _sources(site: Site) -> Iterator[Said]:
    """A reference preset has a source for every variable and every limit of a partition."""
    if site.about.stability != "reference":
        return
    if not site.about.sources:
        yield error(
            ("sources",),
            "a reference preset has [sources]; write where its values stand, e.g. "
            'a = "owner/docs@commit page.md"',
        )
    for path, leaf in site.leaves.items():
        if path[0] in _SOURCED and not leaf.source:
            yield error(
                path,
                f"{dotted(path)} has no source, and a reference preset needs one; write "
                'source = "..." into its table, or { value = ..., source = "..." }',
            )


def _lock(site: Site) -> Iterator[Said]:
    """Locks of what the preset does not say: they hold a value that is not there."""
    for key in site.lock.keys:
        held = any(
            dotted(path) == key or dotted(path).startswith(f"{key}.") for path in site.leaves
        )
        if not held:
            yield warning(
                ("lock", "keys"),
                f"{key} is locked and has no value here, so users cannot set it at all; give it "
                "one, or take the lock away",
            )
