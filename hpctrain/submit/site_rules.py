"""The choice of a site and of a partition for a job, and what preemption costs there.

`find_site` goes through --site, HPCTRAIN_SITE, hpctrain.toml and what is detected here.
`choose_partition` goes by the limits in the preset; one that the preset does not have is unknown,
and refuses nothing: SLURM will. `preemption_notes` puts what preemption costs into words for the
user; the facts behind it are in docs/preemption.md. tests/unit/submit/test_site_submit.py holds the
promises.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.base.env import HPCTRAIN_SITE
from hpctrain.base.text import duration
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.settings.check import time_s
from hpctrain.site.detect import choose as choose_here
from hpctrain.site.detect import look_around
from hpctrain.site.load import site_files
from hpctrain.site.paths import SYSTEM

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hpctrain.settings.layers import SettingsFile
    from hpctrain.settings.schema import Settings
    from hpctrain.site.preset import Site
    from hpctrain.site.schema import Partition

LOCAL_SITE = "local"
AGENT_S = 3
"""Of the time to the kill the agents keep so much for asking SLURM and for the requeue."""


@dataclass(frozen=True)
class SiteChoice:
    """A site, or none."""

    site: Site | None
    notes: list[str] = field(default_factory=list)
    """How it was chosen, where this command line does not say it itself."""
    named: bool = False
    """Whether the user has named it, or that it shall be none."""


def find_site(
    given: str | None,
    environ: Mapping[str, str],
    config: SettingsFile | None,
    project: Path,
    cluster: str,
) -> SiteChoice:
    """The site of a new run.

    Args:
        given: What stood behind --site.
        environ: The submitting shell's.
        config: The settings file.
        project: Its folder.
        cluster: "slurm" or "local".

    Raises:
        NotFound: there is no site of that name.
        UsageError: its preset is wrong or not for use as it is, or several sites match here.
    """
    name, by = _named(given, environ, config)
    named = name is not None
    if name is None and cluster == "local":
        name = LOCAL_SITE
    here = look_around(environ, lambda: _cluster_name(environ))
    site, how = choose_here(name, environ, here, project=project)
    if name is None:
        # Most clusters have no preset: that nothing matched is no news.
        return SiteChoice(site, [how] if site is not None or "matches (" in how else [])
    return SiteChoice(site, [f"site {name}, as {by} says"] if by else [], named)


def dropped_locks(environ: Mapping[str, str], chosen: SiteChoice) -> list[str]:
    """Locks of the site that this is, which do not hold because another one was named.

    Empty where no admin's file locks anything: nothing is asked then.
    """
    if not chosen.named or not _anybody_locks(environ):
        return []
    try:
        here, _ = choose_here(None, environ, look_around(environ, lambda: _cluster_name(environ)))
    except HpctrainError:  # several match, or one is wrong: nobody can say which it would be
        return []
    if here is None:
        return []
    held = set(chosen.site.lock.keys) if chosen.site is not None else set()
    return [f"{here.about.name}: {key}" for key in here.lock.keys if key not in held]


def _anybody_locks(environ: Mapping[str, str]) -> bool:
    for files in site_files(environ).values():
        for layer, path in files:
            with contextlib.suppress(OSError):
                if layer == SYSTEM and b"lock" in path.read_bytes():
                    return True
    return False


def _cluster_name(environ: Mapping[str, str]) -> str | None:
    """SLURM's ClusterName; None where the user's shell has no scontrol, or no answer came."""
    if shutil.which("scontrol", path=environ.get("PATH", "")) is None:
        return None
    from hpctrain.scheduler.slurm.facts import cluster_name

    return cluster_name()


def _named(
    given: str | None, environ: Mapping[str, str], config: SettingsFile | None
) -> tuple[str | None, str]:
    """The site that was named, and by what; "" where it was the command line itself."""
    if given:
        return given, ""
    if by_shell := environ.get(HPCTRAIN_SITE):
        return by_shell, HPCTRAIN_SITE
    if config is not None and (given := config.top.get("site")):
        return given, config.layer.where("site", "")
    return None, ""


@dataclass(frozen=True)
class Need:
    """What a job asks for."""

    least: int
    """Fewest nodes."""
    most: int
    gpus_per_node: int
    walltime_s: int
    cpus_per_node: int = 0
    """Of all ranks of a node; 0 where it is not said."""

    @property
    def nodes(self) -> str:
        """The nodes as the user wrote them."""
        return str(self.most) if self.least == self.most else f"{self.least}-{self.most}"

    @property
    def text(self) -> str:
        """The whole in words: `2-4 nodes with 8 GPUs for 2 h`."""
        plural = "" if self.most == 1 else "s"
        gpus = f" with {self.gpus_per_node} GPUs" if self.gpus_per_node else ""
        return f"{self.nodes} node{plural}{gpus} for {duration(self.walltime_s)}"


def time_limit(partition: Partition, need: Need) -> tuple[int, str] | None:
    """Longest job in seconds, and what sets that limit; None where it is not known.

    Of a range of nodes every number must fit: SLURM decides when it starts the job.
    """
    limits = []
    if partition.max_time:
        limits.append((time_s(partition.max_time), "max_time"))
    for nodes, limit in partition.walltime_bins.items():
        low, dash, high = nodes.partition("-")
        top = int(high) if high else None if dash else int(low)
        if need.most >= int(low) and (top is None or need.least <= top):
            limits.append((time_s(limit), f"jobs of {nodes} nodes"))
    return min(limits, default=None)


def misfits(partition: Partition, need: Need, *, time: bool = True) -> list[str]:
    """Why the partition does not take the job, in words; empty where nothing speaks against it."""
    reasons = []
    if partition.max_nodes is not None and need.most > partition.max_nodes:
        reasons.append(f"at most {partition.max_nodes} nodes")
    if partition.min_nodes is not None and need.least < partition.min_nodes:
        reasons.append(f"at least {partition.min_nodes} nodes")
    if partition.gpus_per_node is not None and need.gpus_per_node > partition.gpus_per_node:
        reasons.append(f"{partition.gpus_per_node or 'no'} GPUs per node")
    if partition.cpus_per_node is not None and need.cpus_per_node > partition.cpus_per_node:
        reasons.append(f"{partition.cpus_per_node} usable CPUs per node")
    limit = time_limit(partition, need) if time else None
    if limit is not None and need.walltime_s > limit[0]:
        by = "" if limit[1] == "max_time" else f" ({limit[1]})"
        reasons.append(f"at most {duration(limit[0])}{by}")
    return reasons


def choose_partition(
    partitions: Mapping[str, Partition], need: Need, where: str
) -> tuple[str, str]:
    """The partition that a job goes to where the user named none, and why in a line.

    One that is not known to preempt comes before one that does; then the one whose nodes have the
    fewest GPUs to spare; then the preset's own order. Those with `auto = false` are left out.

    Args:
        partitions: The site's, in the order of its preset.
        need: What the job asks for.
        where: The preset, for messages.

    Raises:
        UsageError: none fits, with what each would take.
    """
    offered = {name: partition for name, partition in partitions.items() if partition.auto}
    reasons = {name: misfits(partition, need) for name, partition in offered.items()}
    fitting = [name for name, why in reasons.items() if not why]
    if not fitting:
        each = "; ".join(f"{name}: {', '.join(why)}" for name, why in reasons.items())
        raise UsageError(
            f"no partition of {where} takes {need.text} ({each}); ask for less, "
            "or name one with --partition"
        )
    best = min(fitting, key=lambda name: _rank(offered[name], need))
    others = [name for name in fitting if name != best]
    why = f"partition {best} is taken, as {where} says it takes {need.text}"
    if others:
        why += f" (so would {', '.join(others)}: --partition)"
    return best, why


def is_preemptable(partition: Partition) -> bool:
    """Whether the preset says that jobs there are preempted."""
    return partition.preemption.mode in {"requeue", "cancel", "suspend"}


def _rank(partition: Partition, need: Need) -> tuple[bool, int]:
    spare = (partition.gpus_per_node or 0) - need.gpus_per_node
    return is_preemptable(partition), max(spare, 0)


def preemption_notes(
    settings: Settings, site: Site, partition: Partition | None, *, is_script: bool
) -> list[str]:
    """What the user should know before a job may be preempted; empty where nothing is lost.

    Args:
        settings: With the partition that was chosen.
        site: The preset.
        partition: That partition's facts; None where the preset has none.
        is_script: The ranks run a script of the user's, which hears signals for itself.
    """
    notes = []
    if site.slurm.requeue is False:
        notes.append(
            f"jobs are not requeued here ({site.where('slurm', 'requeue')}): after a preemption "
            "or a time limit the run waits for `hpctrain resume`"
        )
    if partition is None or not is_preemptable(partition):
        return notes
    name, facts = settings.slurm.partition, partition.preemption
    where = site.where("partitions", name, "preemption")
    short = _short_notice(settings, site, partition, where)
    notes += [short] if short else []
    if facts.mode == "cancel" and site.slurm.requeue is not False:
        notes.append(
            f"partition {name} cancels what it preempts ({where}): the run comes back only where "
            "its agents can requeue the job before it is killed; else by `hpctrain resume`"
        )
    if facts.mode == "suspend":
        notes.append(
            f"partition {name} suspends what it preempts ({where}): ranks stand still, and "
            "time-outs of collectives may end them when they go on"
        )
    if is_script and site.slurm.send_user_signal is False and facts.grace_s:
        notes.append(
            f"SLURM sends SIGTERM and no SIGUSR2 at a preemption here "
            f"({site.where('slurm', 'send_user_signal')}): a script of your own that does not "
            "handle SIGTERM loses all steps since its last checkpoint"
        )
    return notes


def _short_notice(settings: Settings, site: Site, partition: Partition, where: str) -> str:
    """What is lost where the time from the notice to the kill may be too short; "" elsewhere."""
    name, facts = settings.slurm.partition, partition.preemption
    lead, cost = settings.slurm.signal_lead_s, _cost(settings)
    if facts.grace_s is None:
        return (
            f"partition {name} preempts jobs ({where}), with how much grace the preset does not "
            f"say: where a save does not fit into it, a preemption costs {cost}"
        )
    window = facts.grace_s or site.slurm.kill_wait_s
    if window is None:
        return (
            f"partition {name} preempts jobs without GraceTime ({where}): a preemption costs {cost}"
        )
    named = "GraceTime" if facts.grace_s else "no GraceTime, only KillWait"
    kills = f"partition {name} kills {window} s after the notice of a preemption ({named}, {where})"
    if window <= AGENT_S:
        return f"{kills}, which leaves no time to save: it costs {cost}"
    if lead > window:
        return (
            f"{kills}, sooner than slurm.signal_lead_s ({lead} s) says: where a step and a save "
            f"take longer, it costs {cost}"
        )
    return ""


def _cost(settings: Settings) -> str:
    """The most that a kill without a save takes away."""
    checkpoint = settings.checkpoint
    if checkpoint.interval_steps:
        return f"up to {checkpoint.interval_steps} steps, those since the last checkpoint"
    seconds = checkpoint.interval_s or checkpoint.max_loss_s
    key = "interval_s" if checkpoint.interval_s else "max_loss_s"
    return (
        f"what was trained since the last checkpoint, up to {duration(seconds)} (checkpoint.{key})"
    )
