"""The shape of a run's next job, chosen from what the scheduler, the site and ledgers say.

`choose_for` gathers, `shapes.choose` decides. Whatever cannot be answered leaves the plain shape,
with one line that says why; only a ceiling of the user's refuses the job.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from hpctrain.cluster.scheduler.base import Accounting, Cluster, StartEstimate, get_cluster
from hpctrain.cluster.site.schema import Site, site_of
from hpctrain.core.base import clock
from hpctrain.core.base.records import Next
from hpctrain.core.base.text import duration, hms
from hpctrain.core.settings.check import node_range, time_s
from hpctrain.core.settings.layers import AUTO, DEFAULT
from hpctrain.core.settings.schema import Settings, replaced
from hpctrain.core.settings.spec import Spec, load_spec
from hpctrain.errors import ClusterError, HpctrainError, UsageError
from hpctrain.launch.checks import plan_meshes
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.plan.mesh import cuts_batch
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import ShapeChosen
from hpctrain.ledger.run.find_run import indexed
from hpctrain.ledger.shapes.choose import (
    Prefer,
    RunFacts,
    ShapeChoice,
    ShapeForecast,
    choose_shape,
    run_facts,
    waits_of,
)
from hpctrain.ledger.shapes.queue import (
    MOST_RESTART_SHARE,
    UNLIMITED_S,
    JobShape,
    QueueView,
    WaitRecord,
    enumerate_shapes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpctrain.ledger.run.layout import RunDir

EARLIER_RUNS = 20
"""Ledgers of so many of the user's newest runs are read for step times and waits."""
ALIKE = 3
"""So many earlier runs of the same program are taken; older ones ran on older code."""
TEST_ONLY = "--test-only"
MOST_HOLES = 3
"""Candidates that are made to fit the queue as it is now."""


@dataclass(frozen=True)
class ShapedJob:
    """The shape of the next job.

    `choice` is None where it is the plain one; `partition` is "" for the default one.
    """

    shape: JobShape
    choice: ShapeChoice | None
    partition: str = ""
    estimate_s: float | None = None
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """What was chosen and why, in two lines; of the plain shape in one."""
        return list(self.choice.why) if self.choice else list(self.notes[-1:])

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        value = self.choice.as_json() if self.choice else {"candidates": [], "kept": False}
        chosen = {"nodes": self.shape.nodes, "limit_s": self.shape.limit_s}
        return value | {"chosen": chosen, "why": self.lines(), "notes": list(self.notes)}

    def event(self, by: str, *, failed: str = "") -> ShapeChosen:
        """For the ledger."""
        value = self.as_json()
        row = self.choice.row if self.choice else None
        return ShapeChosen(
            by=by,
            nodes=self.shape.nodes,
            limit_s=float(self.shape.limit_s),
            wait_s=row.start_s if row else None,
            estimate_s=self.estimate_s,
            partition=self.partition,
            kept=value["kept"],
            why=tuple(value["why"]),
            failed=failed,
            candidates=tuple(value["candidates"]),
        )


def settle_auto(
    settings: Settings,
    origins: Mapping[str, str],
    site: Site | None,
    accounting: Accounting | None,
) -> tuple[Settings, dict[str, str]]:
    """Turn `--time auto` and `--nodes auto` into [shape], so that [slurm] holds numbers.

    `accounting` is asked how many nodes there are; None asks nobody.

    Raises:
        UsageError: `--nodes auto` where nobody says how many there are.
    """
    origins, slurm = dict(origins), settings.slurm
    parts = set()
    if slurm.nodes == AUTO:
        origins["shape.choose"] = origins.get("slurm.nodes", DEFAULT)
        most = _most_nodes(slurm.partition, site, accounting)
        if not most:
            raise UsageError(
                f"{origins['shape.choose']}: nodes are auto, and neither the site's preset nor the "
                "scheduler says how many a job may have; give a range, as in --nodes 1-16"
            )
        settings = replaced(settings, {"slurm.nodes": f"1-{most}"})
        parts.add("nodes")
    if slurm.time == AUTO:
        origins["shape.choose"] = origins.get("slurm.time", DEFAULT)
        origins["slurm.time"] = DEFAULT
        settings = replaced(settings, {"slurm.time": Settings().slurm.time})
        least, most = node_range(settings.slurm.nodes, where=origins["shape.choose"])
        parts |= {"time", "nodes"} if least < most else {"time"}
    choose = "both" if len(parts) > 1 else next(iter(parts), "no")
    return replaced(settings, {"shape.choose": choose}), origins


def resettle_auto(
    spec: Spec, settings: Settings, origins: Mapping[str, str], accounting: Accounting | None
) -> tuple[Settings, dict[str, str]]:
    """The same for a resume: numbers that are given now end the choice of what they say."""
    if AUTO in {settings.slurm.time, settings.slurm.nodes}:
        return settle_auto(settings, origins, site_of(spec), accounting)
    choose, before = settings.shape.choose, spec.given()[0].slurm
    parts = {"nodes", "time"} if choose == "both" else {choose}
    least, most = node_range(settings.slurm.nodes)
    if least == most:
        parts.discard("nodes")
    if settings.slurm.time != before.time:
        parts.discard("time")
    choose = "both" if len(parts) > 1 else next(iter(parts), "no")
    return replaced(settings, {"shape.choose": choose}), dict(origins)


def _most_nodes(partition: str, site: Site | None, accounting: Accounting | None) -> int | None:
    """How many nodes a job in the partition may have; None where nobody says."""
    names = [name for name in partition.split(",") if name]
    if site is not None:
        listed = [site.partitions[name] for name in names if name in site.partitions]
        most = [p.max_nodes for p in listed or site.partitions.values() if p.max_nodes]
        if most:
            return max(most)
    there = accounting.partitions() if accounting is not None else None
    own = [p.nodes for n, p in (there or {}).items() if (n in names if names else p.is_default)]
    return max(own, default=None)


def in_shape(spec: Spec, shape: JobShape) -> Spec:
    """The spec of one job of this shape."""
    values = {"slurm.nodes": str(shape.nodes), "slurm.time": hms(shape.limit_s)}
    return replace(spec, settings=replaced(spec.settings, values))


def fitting(spec: Spec) -> list[int]:
    """Return the numbers of nodes of the range that the run can train on, ascending.

    The global batch stays the same on all of them; of a script of the user's own nobody knows it.
    """
    is_recipe = spec.entry.kind == "recipe"
    settings, meshes, _ = plan_meshes(spec.settings, spec.origins, None, is_recipe=is_recipe)
    sizes = [n for n, mesh in meshes.items() if not is_recipe or cuts_batch(settings, mesh)]
    if not sizes:
        raise UsageError(
            f"{spec.origins.get('slurm.nodes', DEFAULT)}: on no number of nodes in "
            f"{settings.slurm.nodes} can the ranks share train.global_batch "
            f"{settings.train.global_batch}; use fewer nodes, or raise --set train.global_batch"
        )
    return sorted(sizes)


def choose_for(
    spec: Spec,
    run: RunDir,
    *,
    history: RunHistory | None = None,
    ending_job: str = "",
) -> ShapedJob | None:
    """Choose the shape of the run's next job; None where that is not hpctrain's to choose.

    `run` need not be there yet; `history` is None for a new one. The nodes of `ending_job`, of
    which this is the next start, count as free.

    Raises:
        UsageError: no number of nodes fits, every shape is above `shape.max_node_hours`, or none
            can be written down.
    """
    settings, cluster, history = spec.settings, get_cluster(spec.cluster), history or RunHistory()
    choose = settings.shape.choose
    if choose == "no" or cluster.on_this_machine:
        return None
    sizes = _sizes(spec, history if ending_job else None)
    facts, records = _evidence(spec, history)
    view = cluster.queue_view(settings.slurm.partition)
    if view is not None and ending_job:
        view = view.without(ending_job)
    longest, had = _longest(spec, cluster, view), _had(history, sizes)
    shapes = enumerate_shapes(
        sizes,
        longest,
        fixed_s=None if choose in {"time", "both"} else time_s(settings.slurm.time),
        restart_s=facts.restart_s,
        whole_s=facts.whole_s,
        also=_also(had, view, settings, sizes, facts),
    )
    asked = _estimates(spec, run, view, shapes, facts.requeue_s if ending_job else 0.0)
    choice = choose_shape(
        shapes,
        facts,
        {shape: estimate.wait_s for shape, estimate in asked.items()},
        refused={shape: estimate.refused for shape, estimate in asked.items()},
        records=records,
        partition=settings.slurm.partition,
        longest_s=max((longest(size) or UNLIMITED_S for size in sizes), default=UNLIMITED_S),
        prefer=cast("Prefer", settings.shape.prefer),
        most_node_hours=settings.shape.max_node_hours or None,
        now_has=had,
    )
    plain = had or _plain(settings, sizes, longest, facts)
    notes, kept = _notes(settings, longest, sizes, view), had is not None
    return _shaped(settings, choice, asked, plain, notes, kept=kept)


def choose_again(
    run: RunDir, spec: Spec, job_id: str, restarts: int, give: Callable[[JobShape], None]
) -> None:
    """Choose anew for a job that was requeued, give it the shape, and record the choice.

    Unless the start number `restarts`, which ends, is to be followed, nothing is done. `give`
    changes the requeued job; its nodes count spares.
    """
    history = RunHistory.read(run, marks="few")
    newest = history.newest
    if newest is None or newest.next not in {Next.REQUEUE, Next.LEAVE}:
        return
    if (newest.ran_in, newest.restarts) != (job_id, restarts):
        return
    shaped = choose_for(spec, run, history=history, ending_job=job_id)
    if shaped is None:
        return
    failed = "" if shaped.choice else shaped.notes[-1]
    if shaped.choice and not shaped.choice.kept:
        asked = replace(shaped.shape, nodes=shaped.shape.nodes + spec.settings.alive.spares)
        try:
            give(asked)
        except ClusterError as error:
            failed = str(error)
    ledger.record(run, shaped.event("requeue", failed=failed))


def _shaped(
    settings: Settings,
    choice: ShapeChoice,
    estimates: Mapping[JobShape, StartEstimate],
    plain: JobShape,
    notes: list[str],
    *,
    kept: bool,
) -> ShapedJob:
    """The chosen shape, or the plain one with a line that says why."""
    partition = settings.slurm.partition
    if choice.row is not None:
        shape = choice.row.shape
        return ShapedJob(shape, choice, partition, estimates[shape].wait_s, tuple(notes))
    if choice.rows and all(row.too_expensive for row in choice.rows):
        raise UsageError(f"shape.max_node_hours: {choice.why[0]}; allow more, or fewer steps")
    unknown = [estimate.unknown for estimate in estimates.values() if estimate.unknown]
    why = unknown[0] if unknown else choice.why[0]
    how = "keeps its shape" if kept else "is submitted with the plain shape"
    line = f"the job {how}, {plain.text}: {why}"
    return ShapedJob(plain, None, partition, None, (*notes, line))


def _evidence(spec: Spec, history: RunHistory) -> tuple[RunFacts, list[WaitRecord]]:
    """What this run's ledger says, and those of the user's newest runs here."""
    alike: list[tuple[str, RunHistory]] = []
    records: list[WaitRecord] = []
    for entry in indexed()[:EARLIER_RUNS]:
        try:
            other = load_spec(entry.run.spec)
            if other.run_id == spec.run_id or other.cluster != spec.cluster:
                continue
            earlier = RunHistory.read(entry.run, marks="few")
        except (HpctrainError, OSError):  # another version's, or gone since: it says nothing
            continue
        if other.site == spec.site:
            records += waits_of(earlier)
        if len(alike) < ALIKE and _is_alike(spec, other):
            alike.append((f"run {entry.run.name}", earlier))
    steps = spec.settings.train.steps if spec.entry.kind == "recipe" else None
    facts = run_facts(history, now=clock.now(), total_steps=steps, earlier=alike)
    return facts, [*records, *waits_of(history)]


def _is_alike(spec: Spec, other: Spec) -> bool:
    """Whether both take equally long for a step on equally many nodes."""

    def program(of: Spec) -> tuple[object, ...]:
        settings = of.settings
        train = replace(settings.train, steps=0, seed=0)
        # A copy of the code lies in its run's own directory.
        name = of.entry.path.rpartition("/")[2]
        ranks = (settings.slurm.ranks(), settings.slurm.gpus_per_node, settings.slurm.gpu_type)
        return (of.entry.kind, name, of.entry.module, of.entry.args, train, settings.engine, ranks)

    return program(spec) == program(other)


def _longest(spec: Spec, cluster: Cluster, view: QueueView | None) -> Callable[[int], int | None]:
    """The longest limit at a number of nodes, by the preset and by the scheduler."""
    site, seen = site_of(spec), view.max_time_s if view is not None else None

    def longest(nodes: int) -> int | None:
        at_size = replaced(spec.settings, {"slurm.nodes": str(nodes)})
        allowed = None if site is None else cluster.longest_s(at_size, site)
        limits = [limit for limit in (allowed, seen) if limit is not None]
        return min(limits, default=None)

    return longest


def _notes(
    settings: Settings,
    longest: Callable[[int], int | None],
    sizes: list[int],
    view: QueueView | None,
) -> list[str]:
    if settings.shape.choose == "nodes" or longest(sizes[0]) is not None:
        return []
    where = settings.slurm.partition or "the default partition"
    limit = "has no time limit" if view is not None else "has a time limit that is not known"
    tried = f"limits up to {duration(UNLIMITED_S)} are candidates"
    return [f"{where} {limit}: {tried}; --time gives another"]


def _sizes(spec: Spec, requeued: RunHistory | None) -> list[int]:
    """The numbers of nodes to choose from; of a requeued job one, where its GPUs fix that."""
    sizes, site = fitting(spec), site_of(spec)
    had = _had(requeued, sizes) if requeued else None
    fixed = site is not None and site.slurm.gpu_request in {"gpus", "gpus-per-task"}
    return [had.nodes] if had and fixed and spec.settings.slurm.gpus_per_node else sizes


def _had(history: RunHistory, sizes: list[int]) -> JobShape | None:
    """The shape of the run's last job, if the run can still have it."""
    given = [fact for _, fact in history.shapes if not fact.failed]
    if not given or not given[-1].limit_s or given[-1].nodes not in sizes:
        return None
    return JobShape(given[-1].nodes, round(given[-1].limit_s))


def _also(
    had: JobShape | None,
    view: QueueView | None,
    settings: Settings,
    sizes: list[int],
    facts: RunFacts,
) -> list[JobShape]:
    """The run's last shape, and those that fill the holes of the queue."""
    shapes = [had] if had else []
    if view is not None and settings.shape.choose != "nodes":
        least_s = facts.restart_s / MOST_RESTART_SHARE
        holes = view.hole_shapes(sizes, spares=settings.alive.spares)
        shapes += [shape for shape in holes if shape.limit_s >= least_s][:MOST_HOLES]
    return shapes


def _plain(
    settings: Settings,
    sizes: list[int],
    longest: Callable[[int], int | None],
    facts: RunFacts,
) -> JobShape:
    """What is submitted where nothing can be compared: few nodes, and one long job."""
    nodes = sizes[0]
    if settings.shape.choose == "nodes":
        return JobShape(nodes, time_s(settings.slurm.time))
    most = longest(nodes)
    limits = enumerate_shapes([nodes], lambda _nodes: most, whole_s=facts.whole_s)
    return limits[-1] if limits else JobShape(nodes, time_s(settings.slurm.time))


def _estimates(
    spec: Spec, run: RunDir, view: QueueView | None, shapes: list[JobShape], delay_s: float
) -> dict[JobShape, StartEstimate]:
    """When each would start: the earlier of what SLURM says and what the queue shows."""
    site, cluster = site_of(spec), get_cluster(spec.cluster)
    if site is not None and TEST_ONLY in site.slurm.forbidden:
        why = f"{site.where('slurm', 'forbidden')} forbids sbatch {TEST_ONLY}"
        estimates = {shape: StartEstimate(unknown=why) for shape in shapes}
    else:
        scripts = {s: cluster.render(in_shape(spec, s), run, f"{spec.name}-shape") for s in shapes}
        estimates = cluster.start_estimates(scripts)
    if view is None:
        return estimates
    spares = spec.settings.alive.spares
    for shape, estimate in estimates.items():
        asked = replace(shape, nodes=shape.nodes + spares)
        start = view.start_of(asked, earliest=view.now + delay_s)
        if start is not None and not estimate.refused:
            waits = [start - view.now, math.inf if estimate.wait_s is None else estimate.wait_s]
            estimates[shape] = StartEstimate(wait_s=min(waits))
    return estimates


HEADER = ("", "nodes", "limit", "starts in", "done in", "10 %", "90 %", "jobs", "node-h", "")


def table(choice: ShapeChoice) -> tuple[list[str], list[list[str]]]:
    """Header and rows, one for each candidate; the chosen one is marked.

    Columns of which nothing is known are left out.
    """
    rows = [_cells(row, chosen=row is choice.row) for row in choice.rows]
    used = [at for at in range(len(HEADER)) if {row[at] for row in rows} - {"-", ""}]
    return [HEADER[at] for at in used], [[row[at] for at in used] for row in rows]


def _cells(row: ShapeForecast, *, chosen: bool) -> tuple[str, ...]:
    times = (row.start_s, row.mean_s, row.low_s, row.high_s)
    start, done, low, high = ("-" if one is None else duration(one) for one in times)
    jobs, hours = ("-" if n is None else f"{n:.1f}" for n in (row.jobs, row.node_hours))
    shape = (str(row.shape.nodes), duration(row.shape.limit_s))
    return (">" if chosen else "", *shape, start, done, low, high, jobs, hours, row.refused)
