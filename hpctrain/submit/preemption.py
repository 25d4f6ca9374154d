"""What preemption costs a run on this site, in words for the user. Pure.

The facts behind it are in docs/preemption.md. tests/unit/test_site_submit.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.base.text import duration
from hpctrain.submit.site_rules import is_preemptable

if TYPE_CHECKING:
    from hpctrain.settings.schema import Settings
    from hpctrain.site.preset import Site
    from hpctrain.site.schema import Partition

AGENT_S = 3
"""Of the time to the kill the agents keep so much for asking SLURM and for the requeue."""


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
