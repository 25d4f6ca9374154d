"""Lines that a person can read: events, what a run survived, its evaluations. Pure.

Kinds that this version does not know, and fields that a kind had in no version we know, are shown
as they are: a newer hpctrain's ledger can be read with an older one.
"""

from __future__ import annotations

import time
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.text import (
    count,
    duration,
    fold_nodes,
    fold_ranks,
    pack,
    size,
    span,
    step_time,
)
from hpctrain.ledger.run import event_types as kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpctrain.ledger.history.evaluations import EvaluationView
    from hpctrain.ledger.history.incidents import Guarded, JobMembers, Survived
    from hpctrain.ledger.run.events import Event
    from hpctrain.observe.status.status import RunStatus

_LONGEST = 160
_UNKNOWN_LENGTH = 60
_ARROW = "\N{RIGHTWARDS ARROW}"
_GUARD_REASONS = {"nonfinite": "not finite", "spike": "a spike", "replicas": "copies differ"}
_AXES = ("pp", "dp_replicate", "dp_shard", "tp", "ep", "cp")


def line(event: Event) -> str:
    """Time (of this machine's zone), attempt, and what happened."""
    return _line(event.t, event.attempt, in_words(event))


def folded(first: Event, last: Event, marks: int) -> str:
    """Many step marks in a row as one line."""
    begin, end = first.fact, last.fact
    if not (isinstance(begin, kinds.StepsDone) and isinstance(end, kinds.StepsDone)):
        return line(last)  # a line that names its kind twice
    span = f" in {duration(last.t - first.t)}" if last.t - first.t >= 1 else ""
    words = f"steps {_step(begin.first)} to {_step(end.last)}{_loss(end)}, {marks} marks{span}"
    return _line(last.t, last.attempt, words)


def in_words(event: Event) -> str:
    """What happened, with its facts."""
    words = _WORDS.get(event.kind)
    said = " ".join((words(event.fact) if words else _plain(event)).split())
    return said if len(said) <= _LONGEST else f"{said[: _LONGEST - 3]}..."


def _line(t: float, attempt: int | None, words: str) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))
    return f"{when}  {'' if attempt is None else f'a{attempt}':<4} {words}"


def _plain(event: Event) -> str:
    """A kind without words of its own: its name and its fields."""
    fields = {**event.fact.fields_set(), **event.extra}.items()
    facts = [f"{name}={_short(value)}" for name, value in fields if value not in (None, "")]
    return " ".join([event.kind.replace("_", " "), *facts])


def _short(value: object) -> str:
    said = str(value)
    return said if len(said) <= _UNKNOWN_LENGTH else f"{said[: _UNKNOWN_LENGTH - 3]}..."


# ---- parts


def _step(step: int | None) -> str:
    return "?" if step is None else f"{step:,}"


def _loss(fact: kinds.StepsDone) -> str:
    return "" if fact.loss is None else f", loss {fact.loss:.4g}"


def _because(why: str) -> str:
    return f": {why}" if why else ""


def _guard_reason(why: str) -> str:
    return _because(_GUARD_REASONS.get(why, why))


def _quick_again(fact: kinds.StragglerGone) -> str:
    lost = f", after {duration(fact.lost_s)} lost" if fact.lost_s else ""
    who = f"{fold_ranks(fact.ranks)} as quick as the others" if fact.ranks else "steps as before"
    return f"{who} again{lost}"


def _if(value: object, words: str) -> str:
    return words if value else ""


def _seconds(seconds: float | None, words: str = "{}", least: float = 0.0) -> str:
    """Words with a time in them, where the event has that time."""
    if seconds is None or seconds < least:
        return ""
    return words.format(span(seconds))


def _bytes(nbytes: int | None) -> str:
    return "" if nbytes is None else size(nbytes)


def _listed(parts: list[str]) -> str:
    return ", ".join(filter(None, parts))


def _in_brackets(parts: list[str]) -> str:
    return f" ({_listed(parts)})" if any(parts) else ""


def _names(nodes: Sequence[str]) -> str:
    return fold_nodes(list(nodes))


# ---- what each kind says


def _submitted(fact: kinds.Submitted) -> str:
    facts = [
        f"job {fact.job_id}",
        f"{fact.nodes} node{_if(fact.nodes != '1', 's')}" if fact.nodes else "",
        f"from step {fact.from_step:,}" if fact.from_step is not None else "",
    ]
    code = f": {fact.changed}" if fact.changed else ""
    return f"submitted as {_listed(facts)}{_if(fact.by == 'resume', ' (resume)')}{code}"


def _shape_chosen(fact: kinds.ShapeChosen) -> str:
    nodes = "? nodes" if fact.nodes is None else count(fact.nodes, "node")
    limit = "" if fact.limit_s is None else f" x {duration(fact.limit_s)}"
    how = "keeps its shape" if fact.kept else f"shape chosen at {fact.by or '?'}"
    failed = f"; the job could not get it: {fact.failed}" if fact.failed else ""
    return f"{how}: {nodes}{limit} of {count(len(fact.candidates), 'candidate')}{failed}"


def _started(fact: kinds.AttemptStarted) -> str:
    how = {"restart": "ranks started again"}
    facts = [
        f"job {fact.job_id}" if fact.job_id else "",
        count(fact.world_size, "rank") if fact.world_size else "",
        f"spare: {_names(fact.spares)}" if fact.spares else "",
        "no agent came" if fact.by == "batch" else "",
    ]
    on = f" on {_names(fact.nodes)}" if fact.nodes else ""
    return f"{how.get(fact.by, 'started')}{on}{_in_brackets(facts)}"


def _phase(fact: kinds.PhaseReached) -> str:
    phrases = {
        "initialised": f"ranks are up{_if(fact.device, f' on {fact.device}')}",
        "first_step": "first step done",
    }
    return phrases.get(fact.name, f"phase {fact.name}")


def _mesh(fact: kinds.MeshBuilt) -> str:
    sizes = {axis: getattr(fact, axis) or 0 for axis in _AXES}
    axes = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
    return f"mesh: {fact.engine}{_if(axes, ', ')}{', '.join(axes)}"


def _environment(fact: kinds.EnvironmentSet) -> str:
    facts = [
        f"site {fact.site}" if fact.site else "",
        *(f"{name} {version}" for name, version in fact.versions.items() if version),
        f"{count(len(fact.overridden), 'variable')} overridden" if fact.overridden else "",
        *fact.notes,
    ]
    return f"environment: {_listed(facts)}"


def _restored(fact: kinds.CheckpointRestored) -> str:
    passed_over = f"{count(len(fact.skipped), 'checkpoint')} skipped" if fact.skipped else ""
    if fact.by == "program":
        return f"the program resumed from step {_step(fact.step)}"
    if not fact.checkpoint:
        return f"nothing to restore, begins at step 0{_in_brackets([passed_over])}"
    before, now = fact.from_world_size, fact.world_size
    facts = [
        f"from {fact.read_from}" if fact.read_from else "",
        f"{before}{_ARROW}{count(now, 'rank')}" if before and now else "",
        _seconds(fact.seconds),
        _bytes(fact.bytes_read),
        passed_over,
    ]
    return f"restored step {_step(fact.step)}{_in_brackets(facts)}"


def _steps(fact: kinds.StepsDone) -> str:
    first, last, each = fact.first, fact.last, ""
    if first is not None and last is not None and fact.seconds is not None and last >= first:
        each = f", {step_time(fact.seconds / (last - first + 1))}/step"
    which = f"step {_step(last)}" if first == last else f"steps {_step(first)} to {_step(last)}"
    return f"{which}{_loss(fact)}{each}{_if(fact.skipped, f', {fact.skipped} skipped')}"


def _interval(fact: kinds.IntervalSet) -> str:
    every = f"{fact.steps} steps" if fact.steps else duration(fact.seconds or 0)
    return f"saves every {every}{_because(fact.why)}"


def _memory(fact: kinds.MemoryCopiesSet) -> str:
    if not fact.steps:
        return f"no copies in memory{_because(fact.why)}"
    facts = [
        _bytes(fact.bytes),
        _seconds(fact.stall_s, "training waits {}", 0.001),
        _seconds(fact.covered_s, "complete after {}", 0.001),
        f"{fact.left_out} left out" if fact.left_out else "",
    ]
    return f"a copy in memory every {count(fact.steps, 'step')}{_in_brackets(facts)}"


def _saved(fact: kinds.CheckpointSaved) -> str:
    facts = [
        " in ".join(filter(None, [_bytes(fact.bytes), _seconds(fact.seconds)])),
        _seconds(fact.stall_s, "training waited {}", 0.001),
        fact.mode,
    ]
    return f"saved step {_step(fact.step)}{_in_brackets(facts)}"


def _sealed(fact: kinds.CheckpointSealed) -> str:
    facts = [
        " in ".join(filter(None, [_bytes(fact.bytes), _seconds(fact.seconds)])),
        f"by the {fact.by}" if fact.by else "",
        "with a copy" if fact.is_copy else "",
    ]
    step = "" if fact.step is None else f"step {fact.step:,}: "
    return f"registered {step}{fact.path}{_in_brackets(facts)}"


def _resumed(fact: kinds.ResumeChosen) -> str:
    facts = [
        _seconds(fact.seconds),
        _bytes(fact.bytes_read),
        "put back from the run's copy" if fact.put_back else "",
        f"{count(len(fact.skipped), 'checkpoint')} skipped" if fact.skipped else "",
    ]
    if not fact.path:
        return f"no registered checkpoint to resume from{_in_brackets(facts[3:])}"
    step = "" if fact.step is None else f"step {fact.step:,}: "
    return f"the program may resume from {step}{fact.path}{_in_brackets(facts)}"


def _missed(what: str) -> Callable[[Any], str]:
    return lambda fact: f"{what} at step {_step(fact.step)}{_because(fact.why)}"


_CAUSES = {
    "sigterm": "SIGTERM",
    "sigusr2": "the warning before the time limit or a preemption",
    "clock": "the clock: the job's time is nearly over",
    "user": "hpctrain cancel --save",
    "sigint": "Ctrl-C",
}


def _evaluated(fact: kinds.Evaluated) -> str:
    if not fact.metrics:
        return f"step {_step(fact.step)} was not evaluated{_because(fact.why)}"
    why = _if(fact.why, f" ({fact.why})")
    return f"step {_step(fact.step)} evaluated: {metrics_in_words(fact.metrics)}{why}"


def _stop_requested(fact: kinds.StopRequested) -> str:
    return f"stop requested by {_CAUSES.get(fact.cause or '', 'something')}"


def _not_finite(fact: kinds.StepNotFinite) -> str:
    if fact.in_weights:
        return f"step {_step(fact.step)} is not finite: the weights are not, at {fact.parameter}"
    samples = ", ".join(map(str, fact.samples[:4])) + _if(fact.samples[4:], ", ...")
    whose = [
        f"rank {fact.rank}{_if(fact.node, f' on {fact.node}')}" if fact.rank is not None else "",
        fact.parameter,
        _if(samples, f"samples {samples}"),
    ]
    again = {True: "finite when computed again", False: "the same when computed again"}
    follows = [again.get(fact.transient, ""), _if(fact.left_out, "update left out")]  # type: ignore[arg-type]
    named = _listed(whose) or "nobody knows whose it is"
    return f"step {_step(fact.step)} is not finite: {named}{_in_brackets(follows)}"


def _spiked(fact: kinds.StepSpiked) -> str:
    value = "" if fact.value is None else f" {fact.value:.4g}"
    usual = "" if fact.usual is None else f", {fact.usual:.4g} is usual"
    what = {"loss": "the loss", "grad_norm": "the gradient norm"}.get(fact.what, fact.what)
    left_out = _if(fact.left_out, "; update left out")
    return f"step {_step(fact.step)} jumps: {what} is{value}{usual}{left_out}"


def _batch_skipped(fact: kinds.BatchSkipped) -> str:
    which = ""
    if fact.first is not None and fact.last is not None:
        which = f" of samples {fact.first:,} to {fact.last - 1:,}"
    return f"step {_step(fact.step)}: the update{which} is left out{_guard_reason(fact.why)}"


def _rewound(fact: kinds.TrainingRewound) -> str:
    left_out = ""
    if fact.first is not None and fact.last is not None:
        left_out = f"; samples {fact.first:,} to {fact.last - 1:,} are left out from now on"
    goes = "training goes back" if fact.to is None else f"training goes back to step {fact.to:,}"
    return f"step {_step(fact.step)}: {goes} or before{_guard_reason(fact.why)}{left_out}"


def _replicas_differ(fact: kinds.ReplicasDiffer) -> str:
    who = f"{fold_ranks(fact.ranks)}{_if(fact.nodes, f' on {_names(fact.nodes)}')}"
    what = f"the weights of {who} are not those of the others"
    if not fact.certain:
        what = f"the weights of {who} differ, and nobody knows whose are right"
    clean = "" if fact.clean is None else f"; right at step {fact.clean:,}"
    return f"step {_step(fact.step)}: {what}{clean}"


def _failure(fact: kinds.RankFailed) -> str:
    who = f"rank {fact.rank}" if fact.rank is not None else "something"
    return f"{who} failed{_if(fact.node, f' on {fact.node}')}{_because(fact.summary)}"


_FOLLOWS = {
    "requeue": "asks to be requeued",
    "leave": "the scheduler requeues it",
    "restart": "restarts in this allocation",
    "stop": "nothing follows",
    "ask_batch": "the batch script decides",
}


def _ended(fact: kinds.AttemptEnded) -> str:
    facts = [
        fact.reason,
        f"at step {fact.step:,}" if fact.step is not None else "",
        _FOLLOWS[fact.next],
    ]
    why = f" ({fact.detail})" if fact.detail not in {"", fact.reason} else ""
    return f"ended: {_listed(facts)}{why}"


def _requeued(fact: kinds.Requeued) -> str:
    by = {"agent": "the agent", "batch": "the batch script", "scheduler": "the scheduler"}
    who = by.get(fact.by, fact.by)
    return f"requeued{_if(who, f' by {who}')}"


def _run_stopped(fact: kinds.RunStopped) -> str:
    code = fact.exit_code
    return f"stopped for good{_if(code is not None, f' (exit {code})')}{_because(fact.detail)}"


def _paused(fact: kinds.RestartPaused) -> str:
    return f"starts again in {duration(fact.seconds or 0.0)}"


def _lost(fact: kinds.NodeLost) -> str:
    what = f"{'spare ' if fact.was_spare else ''}node {fact.node} was lost{_because(fact.why)}"
    if fact.was_first:
        return f"{what}; it led the others"
    return (
        f"{what}; {f'continues with {_names(fact.members)}' if fact.members else 'no other can do'}"
    )


def _awaited(fact: kinds.RanksAwaited) -> str:
    left = f"{fold_ranks(fact.left)} did not" if fact.left else "their processes do not end"
    quiet = f"nothing printed or done for {duration(fact.quiet_s or 0.0)}"
    ended = "; ended" if fact.ended else ""
    return f"{count(fact.returned or 0, 'rank')} returned and {left}: {quiet}{ended}"


def _preflight(fact: kinds.NodesChecked) -> str:
    if fact.bad:
        return "preflight: " + "; ".join(f"{node}: {why}" for node, why in fact.bad.items())
    return f"preflight{_because(fact.no_answer) or ': nodes are fit'}"


def staged(fact: kinds.EnvironmentStaged) -> str:
    """What became of `environment.stage`, for the job's log too."""
    by = " by sbcast" if fact.way == "sbcast" else ""
    parts = [
        f"staged{by} on {count(fact.staged, 'node')}" if fact.staged else "",
        f"reused on {count(fact.reused, 'node')}" if fact.reused else "",
        f"not staged on {count(fact.not_staged, 'node')}" if fact.not_staged else "",
    ]
    took = _seconds(fact.seconds, " in {}", least=1) if fact.staged else ""
    return f"environment {_listed(parts)}{took}{_because(fact.why)}"


def _profiled(what: str, fact: kinds.ProfileRequested | kinds.ProfileWritten, folder: str) -> str:
    whose = f" of ranks {', '.join(map(str, fact.ranks))}" if fact.ranks is not None else ""
    span = f"steps {_step(fact.first)} to {_step(fact.last)}"
    return f"{what} {span}{whose}{_if(folder, f' in {folder}')}"


def _notified(fact: kinds.Notified) -> str:
    failed = f" failed{_because(fact.why)}" if not fact.ok else ""
    return f"notification of {fact.what.replace('_', ' ')}{failed or ' sent'}"


_WORDS: dict[str, Callable[[Any], str]] = {
    "submit_intent": lambda fact: f"about to submit {fact.token}",
    "submitted": _submitted,
    "submit_adopted": lambda fact: f"found as job {fact.job_id}, submitted before",
    "submit_failed": lambda fact: f"not accepted{_because(fact.why)}",
    "attempt_started": _started,
    "phase": _phase,
    "mesh": _mesh,
    "environment": _environment,
    "restored": _restored,
    "steps": _steps,
    "interval": _interval,
    "memory_copies": _memory,
    "saved": _saved,
    "sealed": _sealed,
    "resume_chosen": _resumed,
    "save_mode": lambda fact: f"saves are {fact.mode}{_because(fact.why)}",
    "save_failed": _missed("save failed"),
    "save_skipped": _missed("save left out"),
    "verified": lambda fact: f"every byte of {fact.name} was read, and is right",
    "evaluation_asked": lambda fact: f"asked to evaluate step {_step(fact.step)}",
    "evaluated": _evaluated,
    "prune_failed": _missed("old checkpoints not deleted"),
    "checkpoint_set_aside": lambda fact: (
        f"checkpoint {fact.name} quarantined{_because(fact.reason)}"
    ),
    "stop_requested": _stop_requested,
    "nonfinite": _not_finite,
    "spike": _spiked,
    "batch_skipped": _batch_skipped,
    "replicas_differ": _replicas_differ,
    "rewound": _rewound,
    "stopped": lambda fact: f"stopped at step {_step(fact.step)}",
    "done": lambda fact: "done" if fact.step is None else f"done at step {_step(fact.step)}",
    "failure": _failure,
    "attempt_ended": _ended,
    "requeued": _requeued,
    "requeue_failed": lambda fact: f"could not be requeued{_because(fact.why)}",
    "excluded": lambda fact: f"continues without {_names(fact.nodes)}",
    "exclude_failed": lambda fact: f"nodes could not be excluded{_because(fact.why)}",
    "fenced": lambda _fact: "gave way: a newer attempt has the run",
    "orphan_left": lambda fact: f"a job that is not the run's own left{_because(fact.why)}",
    "followed": lambda fact: f"{PurePath(fact.run).name} is to run after it",
    "held_back": lambda fact: f"did not begin{_because(fact.why)}",
    "cancel_requested": lambda fact: (
        f"cancel requested, {'to save first' if fact.save else 'at once'}"
    ),
    "run_stopped": _run_stopped,
    "environment_staged": staged,
    "preflight": _preflight,
    "ranks_awaited": _awaited,
    "hang_suspected": lambda fact: f"may hang{_because(fact.summary)}",
    "hang_cleared": lambda fact: (
        f"moves again, after {duration(fact.seconds or 0.0)} without progress"
    ),
    "hang": lambda fact: f"hangs{'; ended' if fact.ended else ''}{_because(fact.summary)}",
    "desync": lambda fact: f"out of step{'; ended' if fact.ended else ''}{_because(fact.summary)}",
    "straggler": lambda fact: f"slow{_because(fact.summary)}",
    "straggler_gone": _quick_again,
    "restart_paused": _paused,
    "node_lost": _lost,
    "profile_requested": lambda fact: _profiled("asked to profile", fact, ""),
    "profiled": lambda fact: _profiled("profiled", fact, fact.folder),
    "notified": _notified,
}


LOST_SHOWN = 4
PEERS_SHOWN = 8


def incident_lines(seen: Survived) -> list[tuple[str, str]]:
    """Labels of at most eleven characters, each with its words: those of its newest event."""
    apart, memory, differing = seen.out_of_step, seen.memory, seen.guarded.differing
    rows = [
        ("round", _members(seen.members)),
        ("out of step", f"{apart.summary}{_if(apart.ended, '; ended')}" if apart else ""),
        ("memory", _memory(memory) if memory else ""),
        ("peers", _peers(seen.members) if memory and memory.steps else ""),
        ("guards", _guards(seen.guarded)),
        ("copies", _replicas_differ(differing) if differing else ""),
    ]
    return [(label, words) for label, words in rows if words]


def _guards(seen: Guarded) -> str:
    """How often guards saw and did something, and what they did last."""
    parts = [
        f"{count(seen.left_out, 'update')} left out" if seen.left_out else "",
        f"{count(seen.rewinds, 'rewind')}" if seen.rewinds else "",
        f"{count(seen.not_finite, 'step')} not finite" if seen.not_finite else "",
        f"{count(seen.spikes, 'spike')}" if seen.spikes else "",
    ]
    skipped, rewound = seen.newest_left_out, seen.newest_rewind
    last = [_batch_skipped(skipped)] if skipped else []
    return "; ".join(
        filter(None, [_listed(parts), *last, *([_rewound(rewound)] if rewound else [])])
    )


def _members(seen: JobMembers) -> str:
    """Nothing of a job whose nodes were all there, and had none to wait."""
    if not seen.waiting and not seen.lost:
        return ""
    parts = [f"{fold_nodes(list(seen.training)) or 'nobody'} in training"]
    if seen.waiting:
        parts.append(f"{fold_nodes(list(seen.waiting))} waiting as spare")
    for fact in seen.lost[-LOST_SHOWN:]:
        kind = "spare " if fact.was_spare else ""
        parts.append(f"{kind}{fact.node} lost{f' ({fact.why})' if fact.why else ''}")
    if len(seen.lost) > LOST_SHOWN:
        parts.append(f"{len(seen.lost) - LOST_SHOWN} more lost before")
    if seen.rounds > 1:
        parts.append(f"round {seen.rounds} of this job")
    return "; ".join(parts)


def _peers(seen: JobMembers) -> str:
    """Which node has whose copies, and how many a switch takes with their states."""
    pairs = list(zip(seen.training, seen.peers, strict=False))
    if not pairs:
        return ""
    shown = [f"{node} on {peer}" for node, peer in pairs[:PEERS_SHOWN]]
    if len(pairs) > PEERS_SHOWN:
        shown.append(f"{len(pairs) - PEERS_SHOWN} more (--json has all)")
    return f"copies of {', '.join(shown)}; {_switches(seen, pairs)}"


def _switches(seen: JobMembers, pairs: Sequence[tuple[str, str]]) -> str:
    on = dict(zip(seen.training, seen.switches, strict=False))
    both = [(on.get(node), on.get(peer)) for node, peer in pairs]
    unknown = sum(not all(pair) for pair in both)
    if unknown == len(both):
        return "switches are not known"
    apart = sum(all(pair) and len(set(pair)) > 1 for pair in both)
    if apart == len(both):
        return "all on another switch"
    more = f", {unknown} not known" if unknown else ""
    return f"{apart} of {len(both)} on another switch{more}"


LAST = 3
STEPS_SHOWN = 6
FAILED_SHOWN = 2
EVALUATION_FAILED = "eval failed"


def evaluation_lines(status: RunStatus, width: int) -> list[tuple[str, str]]:
    """Labelled lines; nothing for a run without evaluations."""
    rows = status.evaluations
    done = [row for row in rows if row.state == "evaluated"]
    best = next((row for row in done if row.is_best), None)
    shown = done[:LAST]
    if best is not None and best not in shown:
        shown = [*shown, best]
    lines = [
        ("evaluated" if not at else "", pack(_measured(row), width)) for at, row in enumerate(shown)
    ]
    if len(done) > len(shown):
        lines.append(("", f"... {len(done) - len(shown)} more (--json shows all)"))
    if under_way := _under_way(rows):
        lines.append(("evaluating", pack(under_way, width, gap="; ")))
    failed = [row for row in rows if row.state == "failed"]
    for row in failed[:FAILED_SHOWN]:
        logs = f" (hpctrain logs {status.label} --evaluation {row.step})"
        why = f"step {row.step:,}{logs if row.run else ''}: {row.why or 'nobody knows why'}"
        lines.append((EVALUATION_FAILED, why))
    if len(failed) > FAILED_SHOWN:
        lines.append(("", f"... {len(failed) - FAILED_SHOWN} more (--json shows all)"))
    return lines


def metrics_in_words(metrics: Mapping[str, float]) -> str:
    """Names and numbers, as they stand beside a step."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _measured(row: EvaluationView) -> list[str]:
    best = " (best)" if row.is_best else ""
    return [f"step {row.step:,}{best}", *(f"{n} {value:.4g}" for n, value in row.metrics.items())]


def _under_way(rows: Sequence[EvaluationView]) -> list[str]:
    """The states of what is not decided, each with its steps, oldest first."""
    steps: dict[str, list[int]] = {}
    for row in reversed(rows):
        if row.state not in {"evaluated", "failed"}:
            steps.setdefault(row.state, []).append(row.step)
    return [f"{state} {_steps_listed(of)}" for state, of in steps.items()]


def _steps_listed(steps: Sequence[int]) -> str:
    shown = ", ".join(f"{step:,}" for step in steps[:STEPS_SHOWN])
    if len(steps) == 1:
        return f"step {shown}"
    more = f" and {count(len(steps) - STEPS_SHOWN, 'other')}" if len(steps) > STEPS_SHOWN else ""
    return f"steps {shown}{more}"
