"""[env] and [network] held against the rules: every group, and every group with what joins it.

A variable may be right by itself and wrong beside one of another group, on one node only, or under
one version only. So each environment that a job can get is judged as a whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.nccl.rules import DEBUG, Context, check_environment
from hpctrain.site.findings import Finding, at, error, warning
from hpctrain.site.preset import dotted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.site.preset import Path, Site
    from hpctrain.site.schema import When

_FROM_NETWORK = {
    "NCCL_SOCKET_IFNAME": "socket_ifnames",
    "GLOO_SOCKET_IFNAME": "socket_ifnames",
    "NCCL_IB_HCA": "hcas",
}
"""Variables that hpctrain makes from a list of [network]."""

_AT_LEAST = re.compile(r">=?\s*(\d+(?:\.\d+)*)")


@dataclass
class _Product:
    """One environment that a job can get: each variable with where it stands."""

    multi_node: bool
    nccl: str = ""
    old_plugin: bool = False
    paths: dict[str, Path] = field(default_factory=dict)

    def values(self, site: Site) -> dict[str, str]:
        return {name: _value(site, path) for name, path in self.paths.items()}


def environment(site: Site) -> Iterator[Finding]:
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


def _value(site: Site, path: Path) -> str:
    if path[1] == "when":
        return site.env.when[path[2]].set[path[4]]
    group: dict[str, str] = getattr(site.env, path[1])
    return group[path[2]]


def _products(site: Site) -> Iterator[_Product]:
    """Each group of nodes, by itself and with each condition that can hold there."""
    for multi_node in (False, True):
        groups = ("common", "multi_node" if multi_node else "single_node")
        paths: dict[str, Path] = {}
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


def _without_modules(site: Site, paths: dict[str, Path]) -> dict[str, Path]:
    theirs = set(site.modules.provides_env)
    return {name: path for name, path in paths.items() if name not in theirs}


def _twice(site: Site) -> Iterator[Finding]:
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


def _module_words(site: Site) -> Iterator[Finding]:
    """Variables that the modules set themselves, and are left out here."""
    theirs = set(site.modules.provides_env)
    for path in (path for path in site.leaves if path[0] == "env" and path[-1] in theirs):
        yield warning(
            site,
            path,
            f"modules.provides_env has {path[-1]} too, so the module's value holds and this one "
            "is left out; take one of the two away",
        )


def _conditional(site: Site) -> Iterator[Finding]:
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


def _alone(site: Site) -> Iterator[Finding]:
    """Options of sbatch that make sense only together with a variable."""
    if not any("disable_rdzv_get" in option for option in site.slurm.required):
        return
    name = "FI_CXI_RDZV_PROTO"
    groups = (site.env.common, site.env.multi_node, *(one.set for one in site.env.when.values()))
    said = name in site.modules.provides_env or any(name in group for group in groups)
    if not said:
        yield warning(
            site,
            ("slurm", "required"),
            "--network=disable_rdzv_get turns the usual protocol off, and nothing here chooses the "
            'other: write FI_CXI_RDZV_PROTO = "alt_read" into env.common, or name it in '
            "modules.provides_env",
        )
