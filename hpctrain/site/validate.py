"""A preset held against what NCCL, SLURM and the preset itself say: what `sites validate` tells.

Types, choices and unknown keys are refused earlier, when the file is read. Pure: the day comes in
as an argument. tests/unit/test_site_validate.py holds the promises.
"""

from __future__ import annotations

from datetime import date, timedelta
from typing import TYPE_CHECKING

from hpctrain.errors import UsageError
from hpctrain.settings.check import node_range
from hpctrain.settings.layers import nearest, resolve
from hpctrain.site.findings import Finding, at, error, sorted_findings, warning
from hpctrain.site.preset import dotted
from hpctrain.site.validate_env import environment
from hpctrain.site.validate_facts import facts, seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.site.preset import Site

__all__ = ["Finding", "validate"]

REVIEW_DAYS = 365
_SOURCED = ("env", "partitions")


def validate(site: Site, *, today: date | None = None) -> list[Finding]:
    """Everything that is to be said of a preset, in the order of its lines; empty where it is good.

    Args:
        site: The preset, with whatever its layers and bases give.
        today: The day against which its review is held; this day by default.
    """
    today = today or date.today()  # noqa: DTZ011 - a review has a day, and no hour
    found = [
        *_about(site),
        *_reviewed(site, today),
        *_sources(site),
        *facts(site),
        *environment(site),
        *_settings(site),
        *_lock(site),
    ]
    return sorted_findings(site, found)


def _about(site: Site) -> Iterator[Finding]:
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


def _reviewed(site: Site, today: date) -> Iterator[Finding]:
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


def _sources(site: Site) -> Iterator[Finding]:
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


def _settings(site: Site) -> Iterator[Finding]:
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


def _fits(site: Site, name: str) -> Iterator[Finding]:
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


def _lock(site: Site) -> Iterator[Finding]:
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
