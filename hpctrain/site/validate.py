"""A preset held against what NCCL, SLURM and the preset itself say: what `sites validate` prints.

Types, choices and unknown keys are refused earlier, when the file is read. `environment` judges
[env] and [network]: a variable may be right by itself and wrong beside one of another group, on one
node only, or under one version only, so each environment that a job can get is judged as a whole.

Pure: the day comes in as an argument. tests/unit/site/test_validate.py holds the promises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import TYPE_CHECKING

from hpctrain.errors import UsageError
from hpctrain.nccl.rules import DEBUG, Context, check_environment
from hpctrain.settings.check import node_range
from hpctrain.settings.layers import nearest, resolve
from hpctrain.site.preset import PresetFinding, at, dotted, error, sorted_findings, warning
from hpctrain.site.validate_facts import facts, seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.site.preset import KeyPath, Site
    from hpctrain.site.schema import When

_FROM_NETWORK = {
    "NCCL_SOCKET_IFNAME": "socket_ifnames",
    "GLOO_SOCKET_IFNAME": "socket_ifnames",
    "NCCL_IB_HCA": "hcas",
}
"""Variables that hpctrain makes from a list of [network]."""

_AT_LEAST = re.compile(r">=?\s*(\d+(?:\.\d+)*)")
REVIEW_DAYS = 365
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


def environment(site: Site) -> Iterator[PresetFinding]:
    """What the rules say of every environment that the preset can give."""
    yield from _twice(site)
    yield from _module_words(site)
    yield from _conditional(site)
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
                    yield at(site, problem.level, path, problem.message)
    yield from _alone(site)


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


def _twice(site: Site) -> Iterator[PresetFinding]:
    """Variables that [network] gives already: two answers, of which the reader sees one."""
    for path in (path for path in site.leaves if path[0] == "env" and path[-1] in _FROM_NETWORK):
        key = _FROM_NETWORK[path[-1]]
        if getattr(site.network, key):
            yield error(
                site,
                path,
                f"{path[-1]} is made from network.{key} already, which knows what NCCL and Gloo "
                "each want; leave it out, or take the list away",
            )


def _module_words(site: Site) -> Iterator[PresetFinding]:
    """Variables that the modules set themselves, and are left out here."""
    theirs = set(site.modules.provides_env)
    for path in (path for path in site.leaves if path[0] == "env" and path[-1] in theirs):
        yield warning(
            site,
            path,
            f"modules.provides_env has {path[-1]} too, so the module's value holds and this one "
            "is left out; take one of the two away",
        )


def _conditional(site: Site) -> Iterator[PresetFinding]:
    """[env.when.*] tables that do nothing, or the same for everybody."""
    for key, when in site.env.when.items():
        at_when = ("env", "when", key)
        for name in sorted(set(when.set) & set(when.unset)):
            yield error(
                site, (*at_when, "set", name), f"{name} is in the condition's unset too; keep one"
            )
        if not when.set and not when.unset:
            yield warning(
                site, at_when, f"{dotted(at_when)} sets nothing; give it `set` or take it away"
            )
        if not _conditions(when):
            yield warning(
                site,
                at_when,
                f"{dotted(at_when)} has no condition and always holds; move its variables to "
                "env.common, or give it nccl, torch, plugin, gpu or nodes",
            )


def _conditions(when: When) -> bool:
    return any((when.nccl, when.torch, when.plugin, when.gpu, when.nodes))


def _alone(site: Site) -> Iterator[PresetFinding]:
    """Options of sbatch that make sense only together with a variable."""
    if not any("disable_rdzv_get" in option for option in site.slurm.required):
        return
    name = "FI_CXI_RDZV_PROTO"
    groups = (
        site.env.common,
        site.env.multi_node,
        *(condition.set for condition in site.env.when.values()),
    )
    said = name in site.modules.provides_env or any(name in group for group in groups)
    if not said:
        yield warning(
            site,
            ("slurm", "required"),
            "--network=disable_rdzv_get turns the usual protocol off, and nothing here chooses the "
            'other: write FI_CXI_RDZV_PROTO = "alt_read" into env.common, or name it in '
            "modules.provides_env",
        )


def validate(site: Site, *, today: date | None = None) -> list[PresetFinding]:
    """Everything that is to be said of a preset, in the order of its lines; empty where it is good.

    Args:
        site: The preset, with whatever its layers and bases give.
        today: The day against which its review is held; this day by default.
    """
    today = today or date.today()  # noqa: DTZ011 - a review has a day, and no hour
    findings = [
        *_about(site),
        *_reviewed(site, today),
        *_sources(site),
        *facts(site),
        *environment(site),
        *_settings(site),
        *_lock(site),
    ]
    return sorted_findings(site, findings)


def _about(site: Site) -> Iterator[PresetFinding]:
    about = site.about
    if about.stability in {"reference", "local"} and not about.contact:
        tell = error if about.stability == "reference" else warning
        yield tell(
            site,
            ("contact",),
            "there is no contact, so nobody knows whom to ask; write who answers for the preset",
        )
    if about.stability == "unverified":
        yield warning(
            site,
            ("stability",),
            "stability is unverified, and `submit` refuses the site; hold its values against the "
            'cluster, then write stability = "local" in a file of your own',
        )


def _reviewed(site: Site, today: date) -> Iterator[PresetFinding]:
    """When somebody last held the values against their sources."""
    text, path = site.about.reviewed, ("reviewed",)
    if not text:
        if site.about.stability == "reference":
            yield error(
                site, path, "a reference preset tells when it was reviewed; write e.g. 2026-01-31"
            )
        return
    try:
        day = date.fromisoformat(text)
    except ValueError:
        yield error(site, path, f"reviewed is {text}, which no calendar has; write the day")
        return
    if day > today:
        yield error(
            site, path, f"reviewed is {text} and today is {today}; write a day that has been"
        )
    elif today - day > timedelta(days=REVIEW_DAYS):
        yield warning(
            site,
            path,
            f"reviewed is {text}, {(today - day).days} days ago; hold the values against their "
            "sources again, and write today's day",
        )


def _sources(site: Site) -> Iterator[PresetFinding]:
    """A reference preset has a source for every variable and every limit of a partition."""
    if site.about.stability != "reference":
        return
    if not site.about.sources:
        yield error(
            site,
            ("sources",),
            "a reference preset has [sources]; write where its values stand, e.g. "
            'a = "owner/docs@commit page.md"',
        )
    for path, leaf in site.leaves.items():
        if path[0] in _SOURCED and not leaf.source:
            yield error(
                site,
                path,
                f"{dotted(path)} has no source, and a reference preset needs one; write "
                'source = "..." into its table, or { value = ..., source = "..." }',
            )


def _settings(site: Site) -> Iterator[PresetFinding]:
    """The preset's defaults of hpctrain's own settings, and whether its partitions allow them."""
    settings, _ = resolve([site.layer])
    path = ("settings", "slurm", "partition")
    for name in filter(None, settings.slurm.partition.split(",")):
        if site.partitions and name not in site.partitions:
            near = nearest(name, site.partitions)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(site.partitions)}"
            yield error(site, path, f"[partitions] has no {name}; {hint}")
        elif name in site.partitions:
            yield from _fits(site, name)


def _fits(site: Site, name: str) -> Iterator[PresetFinding]:
    """Whether the defaults that the preset gives fit into the partition that it names."""
    limits, given = site.partitions[name], site.settings.get("slurm", {})
    path = ("settings", "slurm", "time")
    if "time" in given:
        wanted, most_s = seconds(given["time"]), seconds(limits.max_time)
        if wanted is None:
            yield error(
                site, path, f"is {given['time']}, which is no time limit; write e.g. 12:00:00"
            )
        elif most_s is not None and wanted > most_s:
            yield error(
                site,
                path,
                f"is {given['time']}, and {name} takes {limits.max_time} at most; write that",
            )
    path = ("settings", "slurm", "nodes")
    if "nodes" in given and limits.max_nodes:
        try:
            _, most = node_range(given["nodes"])
        except UsageError as wrong:
            yield error(site, path, str(wrong))
        else:
            if most > limits.max_nodes:
                yield error(
                    site,
                    path,
                    f"is {given['nodes']}, and {name} takes {limits.max_nodes} nodes at most; "
                    "write that",
                )


def _lock(site: Site) -> Iterator[PresetFinding]:
    """Locks of what the preset does not say: they hold a value that is not there."""
    for key in site.lock.keys:
        held = any(
            dotted(path) == key or dotted(path).startswith(f"{key}.") for path in site.leaves
        )
        if not held:
            yield at(
                site,
                "warning",
                ("lock", "keys"),
                f"{key} is locked and has no value here, so users cannot set it at all; give it "
                "one, or take the lock away",
            )
