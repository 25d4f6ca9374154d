"""The environment that a site's preset gives to the ranks. Pure.

From one list of interfaces come NCCL's and Gloo's variables, which read the same list differently;
groups for one node and for several, and conditions on versions, are resolved here for one attempt.
What the user sets wins over all of it, and is shown.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hpctrain.cluster.site.schema import KeyPath, Site, When, site_of
from hpctrain.cluster.site.sheet import DERIVED, locked_changes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from hpctrain.core.settings.spec import Spec

FLIGHT_RECORDER = "hpctrain's flight recorder"
"""Origin of the variables that keep NCCL's last operations for the moment of a hang."""

SHOWN_PREFIXES = ("NCCL_", "RCCL_", "FI_", "GLOO_", "TORCH_", "OFI_", "UCX_", "MPICH_", "HSA_")
"""Values of these may be written down. Any other variable may hold a token: its name only."""

_CONDITION = re.compile(r"(>=|<=|==|!=|>|<)\s*(\d+(?:\.\d+)*)")
_NUMBERS = re.compile(r"v?(\d+(?:\.\d+)*)")
_COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_RECORD = "2000"
_NEW_NAMES_SINCE = ">=2.9"
# torch >= 2.9 warns in every rank where an old name is set, even beside its new one.
_RENAMED = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
_TWINS = _RENAMED | {old: new for new, old in _RENAMED.items()}

# What is made of a table of the preset that is not [env].


@dataclass(frozen=True)
class Versions:
    """What conditions of a preset are held against; "" where it is not known."""

    nccl: str = ""
    torch: str = ""
    plugin: str = ""
    gpu: str = ""
    """The GPU's name."""


@dataclass(frozen=True)
class Value:
    """One variable's value."""

    value: str
    origin: str
    """`site juniper (/etc/hpctrain/sites/juniper.toml:7)`, or who else set it."""


@dataclass(frozen=True)
class Environment:
    """The environment of one attempt's ranks."""

    values: dict[str, Value] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    """Taken away from what the job's own environment hands on, before `values` are set."""
    notes: list[str] = field(default_factory=list)


def derive(site: Site | None, *, nodes: int, versions: Versions, run_dir: str) -> Environment:
    """What the preset means for a job of so many nodes, with these versions.

    The flight recorder's dumps go into `run_dir`, which the nodes share; "" leaves them where torch
    puts them. A cluster without a preset gets the flight recorder alone.
    """
    notes: list[str] = []
    values: dict[str, Value] = {}
    unset: list[str] = []
    if site is not None:
        values |= _from_network(site)
        for group in ("common", "multi_node" if nodes > 1 else "single_node"):
            for name, value in getattr(site.env, group).items():
                values[name] = Value(value, site.where("env", group, name))
        unset += site.env.unset
        for key, when in site.env.when.items():
            if not _applies(when, site.where("env", "when", key), nodes, versions, notes):
                continue
            for name in when.unset:
                values.pop(name, None)
                unset.append(name)
            for name, value in when.set.items():
                values[name] = Value(value, site.where("env", "when", key, "set", name))
        theirs = {*site.modules.provides_env}
        values = {name: value for name, value in values.items() if name not in theirs}
    said = {*values, *unset, *(site.modules.provides_env if site else ())}
    for name, value in _flight_recorder(versions.torch, run_dir).items():
        if name not in said and _TWINS.get(name) not in said:
            values[name] = value
    return Environment(values, list(dict.fromkeys(unset)), notes)


def overridden(
    environment: Environment,
    given: Mapping[str, str],
    by: str,
    *,
    locked: Collection[str] = (),
) -> Environment:
    """The environment with what the user set winning, and a note for each value that differs.

    Variables of `given` that the environment does not have are left out: it may be a whole shell's.
    `by` names the user in notes and origins; `locked` ones keep the preset's value.
    """
    values, notes = dict(environment.values), list(environment.notes)
    taken = [name for name in environment.unset if name in given]
    notes += [f"{name} of {by} is taken away, as the site's `unset` says" for name in taken]
    for name, before in environment.values.items():
        if name in given and name not in environment.unset and given[name] != before.value:
            keeps = name in locked
            notes.append(_differs(name, before, given[name], by, keeps=keeps))
            if not keeps:
                values[name] = Value(given[name], by)
    for name in given:
        _drop_twin(values, name, notes)
    return replace(environment, values=values, notes=notes)


def with_settings(
    environment: Environment, env: Mapping[str, str], origins: Mapping[str, str]
) -> Environment:
    """The environment with the variables of hpctrain.toml and `--env`, all of them."""
    values, notes = dict(environment.values), list(environment.notes)
    for name, value in env.items():
        by = origins.get(name, "the run's settings")
        before = values.get(name)
        if before is not None and before.value != value:
            notes.append(_differs(name, before, value, by, keeps=False))
        values[name] = Value(value, by)
        _drop_twin(values, name, notes)
    unset = [name for name in environment.unset if name not in env]
    return Environment(values, unset, notes)


def expected_environment(spec: Spec) -> Environment:
    """What the preset and the run's settings give at the most nodes that the run may get.

    Versions are the nodes' to tell, so conditions on them do not hold here; the job's own
    environment, which wins over all of it, is not there yet either.
    """
    from hpctrain.core.settings.check import node_range

    _, most = node_range(spec.settings.slurm.nodes)
    derived = derive(site_of(spec), nodes=most, versions=Versions(), run_dir="")
    values = {n: v for n, v in derived.values.items() if v.origin != FLIGHT_RECORDER}
    given = Environment(values, derived.unset, derived.notes)
    return with_settings(given, spec.env, spec.env_origins)


def paths_of(site: Site, name: str) -> list[KeyPath]:
    """Every place of the preset that has a say in a variable: what a user who sets it overrides."""
    groups = ("common", "single_node", "multi_node")
    paths: list[KeyPath] = [("env", g, name) for g in groups if name in getattr(site.env, g)]
    for key, when in site.env.when.items():
        paths += [("env", "when", key, "set", name)] if name in when.set else []
    made_of = DERIVED.get(name)
    if made_of is not None and getattr(site.network, made_of[-1]):
        paths.append(made_of)
    return paths


def locked_names(site: Site, unlocked: Collection[str] = ()) -> set[str]:
    """Variables of the preset that [lock] keeps from the user.

    `unlocked` are paths that the user was allowed to change (--allow-locked): "env.NCCL_NET".
    """
    names = {*DERIVED, *site.env.common, *site.env.single_node, *site.env.multi_node}
    names |= {name for when in site.env.when.values() for name in when.set}
    changes = {f"env.{name}": name for name in names}
    alone = replace(site, overridden={})
    return {n for path, n in locked_changes(alone, changes).items() if path not in unlocked}


def is_shown(name: str) -> bool:
    """Whether a variable's value may stand in the ledger and in files."""
    return name.startswith(SHOWN_PREFIXES)


def _from_network(site: Site) -> dict[str, Value]:
    """NCCL reads `=a,b` as exact names; Gloo knows exact names only, and no `=`."""
    network = site.network
    values: dict[str, Value] = {}
    if network.socket_ifnames:
        names = ",".join(network.socket_ifnames)
        where = site.where("network", "socket_ifnames")
        whole = "=" if network.socket_mode == "exact" else ""
        values["NCCL_SOCKET_IFNAME"] = Value(whole + names, where)
        values["GLOO_SOCKET_IFNAME"] = Value(names, where)
    if network.hcas:
        exact = "=" if network.hca_mode == "exact" else ""
        value = exact + ",".join(network.hcas)
        values["NCCL_IB_HCA"] = Value(value, site.where("network", "hcas"))
    return values


def _applies(when: When, where: str, nodes: int, versions: Versions, notes: list[str]) -> bool:
    """Whether all conditions of an [env.when.X] hold; one that is not known does not."""
    if when.nodes and when.nodes != ("multi" if nodes > 1 else "single"):
        return False
    return all(list(_conditions(when, where, versions, notes)))


def _conditions(when: When, where: str, versions: Versions, notes: list[str]) -> Iterator[bool]:
    for what, wanted in (("nccl", when.nccl), ("torch", when.torch), ("plugin", when.plugin)):
        if not wanted:
            continue
        version = getattr(versions, what)
        try:
            yield bool(version) and holds(wanted, version)
            is_known = bool(version)
        except ValueError:
            is_known = False
            yield False
        if not is_known:
            shown = f'"{version}"' if version else "not known"
            notes.append(f"{where} does not apply: {what} {wanted} is wanted, it is {shown}")
    if when.gpu:
        yield re.fullmatch(when.gpu, versions.gpu) is not None
        if not versions.gpu:
            notes.append(f"{where} does not apply: GPU {when.gpu} is wanted, it is not known")


def _flight_recorder(torch: str, run_dir: str) -> dict[str, Value]:
    """On by default: without it a hang leaves nothing that tells which rank was missing."""
    both = {"TORCH_FR_BUFFER_SIZE": _RECORD}
    if run_dir:
        # torch appends the rank. Its own default is in /tmp, which is lost with the node.
        both["TORCH_FR_DUMP_TEMP_FILE"] = f"{run_dir.rstrip('/')}/nccl-trace-rank-"
    if not _has_new_names(torch):
        both |= {_RENAMED[name]: value for name, value in both.items()}
    values = both | {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        # torch's elastic agent would set 1 in each rank, which aborts NCCL before the dump.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    }
    return {name: Value(value, FLIGHT_RECORDER) for name, value in values.items()}


def _has_new_names(torch: str) -> bool:
    try:
        return holds(_NEW_NAMES_SINCE, torch)
    except ValueError:  # not known: the old names cost a warning at most, none a lost dump
        return False


def _drop_twin(values: dict[str, Value], name: str, notes: list[str]) -> None:
    """Leave out the other name of a variable that the user has set: in torch it could win."""
    twin = _TWINS.get(name, "")
    if twin in values and values[twin].origin == FLIGHT_RECORDER:
        del values[twin]
        notes.append(f"{twin} is not set, since {name} is")


def _differs(name: str, before: Value, now: str, by: str, *, keeps: bool) -> str:
    """A note on a value that two have set; no values of variables that may hold a secret."""
    if keeps:
        kept = f" {before.value}" if is_shown(name) else ""
        return f"{name} stays{kept}: {before.origin} locks it, so {by} does not change it"
    if not is_shown(name):
        return f"{name} is set by {by}, not by {before.origin}"
    return f"{name} is {now} by {by}, not {before.value} ({before.origin})"


def holds(condition: str, version: str) -> bool:
    """Whether a version meets a condition as `fields.VERSIONS` has it, such as >=2.21,<2.24.

    2.9 and 2.9.0 are the same, and `+cu128` does not count.

    Raises:
        ValueError: the version does not begin with a number.
    """
    match = _NUMBERS.match(version.strip())
    if match is None:
        raise ValueError(f'"{version}" does not begin like a version')
    own = _key(match[1])
    return all(_COMPARE[sign](own, _key(bound)) for sign, bound in _CONDITION.findall(condition))


def _key(digits: str) -> tuple[int, ...]:
    """The numbers without the zeros at the end, so that 2.9 equals 2.9.0."""
    numbers = [int(part) for part in digits.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
