"""Detect the site of this machine, and draft a preset from what its SLURM reports. Pure decisions.

`Surroundings` has what is looked at. Patterns match whole texts: names that begin alike (`nid...`)
sent other tools' users to the wrong cluster. A value that SLURM does not report, or reports
differently per node, is None or "", and the draft says how to find it.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.site.load import identities, load_site, require_usable
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from hpctrain.cluster.site.schema import Site


NO_SITE = "none"
"""`--site none`: no preset, and none is looked for."""
_NAME_TIMEOUT_S = 2.0
_FIRST_LINE_BYTES = 4096


class Signal(IntEnum):
    """What a site is known by; the higher is believed over the lower."""

    HOSTNAME = 1
    CLUSTER = 2
    FILE = 3
    VARIABLE = 4


@dataclass(frozen=True)
class Surroundings:
    """What can be looked at here. The callables are called where some site asks for it."""

    environ: Mapping[str, str]
    hostname: str
    fqdn: Callable[[], str]
    slurm_cluster: Callable[[], str | None]
    """SLURM's ClusterName; None where there is no SLURM, or no answer."""
    read_first_line: Callable[[str], str | None]
    """None where the file is not there or cannot be read."""


@dataclass(frozen=True)
class Match:
    """A site whose patterns fit."""

    name: str
    signal: Signal
    """The strongest of those that fit."""
    priority: int
    reasons: tuple[str, ...]
    """All that fit, the strongest first."""
    passed_over: str = ""
    """Why it cannot be chosen; "" where it can."""


@dataclass(frozen=True)
class Detected:
    """Every site that matches, and the one that counts."""

    matches: tuple[Match, ...]
    """The best first."""
    tied: tuple[Match, ...] = ()
    """Those between which nothing decides; then no site is chosen."""

    @property
    def chosen(self) -> Match | None:
        """The site, None where none matches or several do alike."""
        usable = [match for match in self.matches if not match.passed_over]
        return usable[0] if usable and not self.tied else None

    def require_one(self) -> Match | None:
        """The site; None where none matches.

        Raises:
            UsageError: several match alike.
        """
        if self.tied:
            listed = "; ".join(f"{match.name} because {match.reasons[0]}" for match in self.tied)
            raise UsageError(
                f"{len(self.tied)} sites match here: {listed}; name one with --site, or have an "
                "admin give one of them a higher detect.priority"
            )
        return self.chosen


def detect(sites: Iterable[Site], here: Surroundings) -> Detected | None:
    """Hold every site's [detect] against the surroundings; None where none matches.

    The highest priority wins, then the strongest signal: a variable, a marker file, SLURM's
    ClusterName, the host's name. Bases are never looked for. An unverified preset is shown and
    passed over, and so is one that only SLURM's ClusterName speaks for and that was not written at
    the site: many clusters are called `cluster`.
    """
    matches = [match for site in sites if (match := _match(site, here)) is not None]
    if not matches:
        return None
    matches.sort(key=lambda one: (not one.passed_over, one.priority, one.signal), reverse=True)
    best = matches[0]
    tied = [
        one
        for one in matches
        if not one.passed_over and (one.priority, one.signal) == (best.priority, best.signal)
    ]
    return Detected(tuple(matches), tuple(tied) if len(tied) > 1 else ())


def choose(
    name: str | None, environ: Mapping[str, str], surroundings: Surroundings
) -> tuple[Site | None, str]:
    """The site to use, and how it was chosen, in words for the user.

    "none" is no site at all, None looks for one. The surroundings are not touched where a site was
    named.

    Raises:
        NotFound: the named site is not there.
        UsageError: its preset is wrong, unverified or a base; or several sites match here.
    """
    if name == NO_SITE:
        return None, "no site, as asked for"
    if name:
        site = load_site(name, environ=environ)
        require_usable(site)
        return site, f"site {site.name}, as named"
    detected = detect(identities(environ), surroundings)
    match = detected.require_one() if detected else None
    if match is not None:
        site = load_site(match.name, environ=environ)
        return site, f"site {site.name}, because {match.reasons[0]} (--site none for no site)"
    passed = detected.matches[0] if detected else None
    if passed is not None:
        why = f"{passed.name} matches ({passed.reasons[0]}) but {passed.passed_over}"
        return None, f"no site: {why}"
    return None, "no site: none matches here"


def look_around(
    environ: Mapping[str, str], slurm_cluster: Callable[[], str | None]
) -> Surroundings:
    """This machine's surroundings; every answer is asked for once.

    SLURM is not asked for its ClusterName where an allocation has said it.
    """
    return Surroundings(
        environ=environ,
        hostname=socket.gethostname(),
        fqdn=cache(_fqdn),
        slurm_cluster=cache(lambda: environ.get("SLURM_CLUSTER_NAME") or slurm_cluster()),
        read_first_line=cache(_first_line),
    )


def _match(site: Site, here: Surroundings) -> Match | None:
    if site.about.stability == "base":
        return None
    reasons = _reasons(site, here)
    if not reasons:
        return None
    passed_over = ""
    if site.about.stability == "unverified":
        passed_over = "its preset is unverified until an admin has completed it"
    elif {signal for signal, _ in reasons} == {Signal.CLUSTER} and site.about.stability != "local":
        passed_over = "SLURM's ClusterName alone does not tell one cluster from all others"
    why = tuple(reason for _, reason in reasons)
    return Match(site.name, reasons[0][0], site.detect.priority, why, passed_over)


def _reasons(site: Site, here: Surroundings) -> list[tuple[Signal, str]]:
    """Everything that fits, the strongest first."""
    reasons: list[tuple[Signal, str]] = []
    rules = site.detect
    for name, pattern in rules.env.items():
        value = here.environ.get(name)
        if value is not None and re.fullmatch(pattern, value):
            reasons.append((Signal.VARIABLE, f"the variable {name} is {value}"))
    for path, pattern in rules.file.items():
        line = here.read_first_line(path)
        if line is not None and re.fullmatch(pattern, line):
            reasons.append((Signal.FILE, f"the first line of {path} is {line}"))
    if rules.slurm_cluster:
        cluster = here.slurm_cluster()
        if cluster and _any(rules.slurm_cluster, cluster):
            reasons.append((Signal.CLUSTER, f"SLURM's ClusterName is {cluster}"))
    if rules.hostname:
        host = here.hostname
        if not _any(rules.hostname, host):
            host = here.fqdn()
        if _any(rules.hostname, host):
            reasons.append((Signal.HOSTNAME, f"the host is called {host}"))
    return reasons


def _any(patterns: Sequence[str], text: str) -> bool:
    return any(re.fullmatch(pattern, text) for pattern in patterns)


def _fqdn() -> str:
    """The host's full name, or the short one where the resolver is silent: it may hang for long."""
    names: list[str] = []
    asking = threading.Thread(target=lambda: names.append(socket.getfqdn()), daemon=True)
    asking.start()
    asking.join(_NAME_TIMEOUT_S)
    return names[0] if names else socket.gethostname()


def _first_line(path: str) -> str | None:
    try:
        with Path(path).open("rb") as file:
            return file.readline(_FIRST_LINE_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return None


@dataclass(frozen=True)
class PartitionFacts:
    """One partition."""

    name: str
    is_default: bool = False
    is_up: bool = True
    max_time: str = ""
    """SLURM's form, "" where there is no limit."""
    min_nodes: int = 0
    max_nodes: int | None = None
    nodes: int = 0
    """How many there are."""
    cpus_per_node: int | None = None
    """As SLURM counts them, less what it keeps for itself; the fewest of all nodes."""
    mem_mib: int | None = None
    gpus_per_node: int | None = None
    """None where nodes differ."""
    gpu: str = ""
    """Their type, where all have one."""
    differing: str = ""
    """What differs between its nodes, in words."""
    preempt_mode: str = ""
    """SLURM's word; "" where nothing can preempt a job here."""
    preempted_by: tuple[str, ...] = ()
    grace_s: int = 0
    qos: str = ""
    exclusive: bool = False


@dataclass(frozen=True)
class ClusterFacts:
    """The whole cluster."""

    name: str
    version: str = ""
    partitions: tuple[PartitionFacts, ...] = ()
    preempt_type: str = ""
    """preempt/none, preempt/partition_prio, preempt/qos."""
    job_requeue: bool | None = None
    kill_wait_s: int | None = None
    send_user_signal: bool | None = None
    requeue_wait_s: int | None = None
    """For which a requeued job waits."""
    select_type: str = ""
    has_gpus: bool = False


SOURCE = "slurm"
_MODES = {"REQUEUE": "requeue", "CANCEL": "cancel", "SUSPEND": "suspend", "GANG": "suspend"}
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def site_name(cluster: str) -> str:
    """SLURM's name of a cluster as the name of a preset."""
    name = re.sub(r"[^a-z0-9_-]+", "-", cluster.lower()).strip("-_")[:32]
    return name if re.fullmatch(r"[a-z][a-z0-9_-]+", name) else f"site-{name}".rstrip("-")


def draft(facts: ClusterFacts, *, name: str, today: str) -> str:
    """The text of a preset that says what SLURM says, each value with its source."""
    reported_by = f"scontrol of {facts.name}, SLURM {facts.version}, {today}"
    lines = [
        f"# A draft from SLURM {facts.version} itself, made by `hpctrain sites init --from-slurm`.",
        "# What SLURM does not tell is left out: unknown stays unknown. To do:",
        "#   contact       who answers for this file",
        "#   [network]     `hpctrain sites probe --toml`, run on a compute node, prints a draft",
        "#   then          `hpctrain sites validate FILE` and `hpctrain check --site FILE`",
        "",
        "schema = 1",
        f"name = {_text(name)}",
        f"description = {_text(_described(facts))}",
        'contact = ""',
        f"reviewed = {_text(today)}",
        'stability = "local"',
        "",
        "[sources]",
        f"{SOURCE} = {_text(reported_by)}",
        "",
        "[detect]",
        f"slurm_cluster = [{_text(re.escape(facts.name))}]",
        "",
        *_slurm(facts),
    ]
    for partition in facts.partitions:
        lines += _partition(partition, facts)
    return "\n".join(lines).rstrip("\n") + "\n"


def _described(facts: ClusterFacts) -> str:
    kinds = sorted({one.gpu for one in facts.partitions if one.gpu})
    with_gpus = f" ({', '.join(kinds)})" if kinds else ""
    count = len(facts.partitions)
    return f"{facts.name}: {count} partition{'' if count == 1 else 's'}{with_gpus}"


def _slurm(facts: ClusterFacts) -> list[str]:
    lines = ["[slurm]", f'source = "{SOURCE}"']
    if facts.has_gpus and facts.select_type not in {"", "select/cons_tres"}:
        lines.append(f'gpu_request = "gres" # {facts.select_type} knows no other way')
    if facts.job_requeue:
        lines.append("requeue = true")
    elif facts.job_requeue is False:
        lines.append("# JobRequeue=0: only jobs that ask for it are requeued, as hpctrain's do")
    if facts.kill_wait_s is not None:
        lines.append(f"kill_wait_s = {facts.kill_wait_s}")
    if facts.send_user_signal is not None:
        lines.append(f"send_user_signal = {_value(facts.send_user_signal)}")
    if facts.requeue_wait_s is not None:
        lines.append(
            f"# A requeued job waits {facts.requeue_wait_s} s (cred_expire): hpctrain help sites.md"
        )
    return [*lines, "# account_required = true # if jobs without an account are refused", ""]


def _partition(partition: PartitionFacts, facts: ClusterFacts) -> list[str]:
    head = (
        f"partitions.{partition.name if _BARE.fullmatch(partition.name) else _text(partition.name)}"
    )
    default = ", SLURM's default" if partition.is_default else ""
    lines = [
        f"[{head}]",
        f'source = "{SOURCE}"',
        f"description = {_text(f'{partition.nodes} nodes{default}')}",
    ]
    if partition.differing:
        lines.append(f"# nodes differ: {partition.differing}")
    values: dict[str, Any] = {
        "gpus_per_node": partition.gpus_per_node or None,
        "gpu": partition.gpu or None,
        "cpus_per_node": partition.cpus_per_node,
        "mem_gib": round(partition.mem_mib / 1024, 1) if partition.mem_mib else None,
        "max_time": partition.max_time or None,
        "min_nodes": partition.min_nodes if partition.min_nodes > 1 else None,
        "max_nodes": (partition.nodes if partition.max_nodes is None else partition.max_nodes)
        or None,
        "exclusive": partition.exclusive or None,
    }
    lines += [f"{key} = {_value(value)}" for key, value in values.items() if value is not None]
    if partition.qos:
        lines.append(f"# its jobs are held to quality of service {partition.qos} besides their own")
    victims = [other.name for other in facts.partitions if partition.name in other.preempted_by]
    if not partition.is_up:
        lines.append("auto = false # it is not up")
    elif victims:
        lines.append(f"auto = false # preempts {', '.join(victims)}: to be asked for by name")
    return [*lines, "", f"[{head}.preemption]", *_preemption(partition, facts), ""]


def _preemption(partition: PartitionFacts, facts: ClusterFacts) -> list[str]:
    if facts.preempt_type == "preempt/qos":
        return ['mode = "unknown" # it depends on the quality of service']
    if not partition.preempt_mode:
        return ['mode = "none"']
    mode = _text(_MODES.get(partition.preempt_mode, "unknown"))
    lines = [
        f"mode = {mode} # by {', '.join(partition.preempted_by)}",
        f"grace_s = {partition.grace_s}",
    ]
    if partition.grace_s and facts.send_user_signal:
        lines.append('signal = "SIGUSR2" # the one that the job asked for with --signal')
    elif partition.grace_s or facts.kill_wait_s:
        lines.append('signal = "SIGTERM"')
    return lines


def _text(value: str) -> str:
    """As TOML's basic string, which JSON's is too."""
    return json.dumps(value, ensure_ascii=False)


def _value(value: str | float | bool) -> str:
    """As TOML has it; JSON has texts, numbers and truth in the same form."""
    return _text(value) if isinstance(value, str) else json.dumps(value)
