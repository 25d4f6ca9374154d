"""Labelled lines of a run's status: what it survived, what guards it, and its evaluations.

Nothing is shown where nothing happened. tests/unit/status/test_mishap_lines.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.core.base.text import count, fold_nodes, fold_ranks, pack, size, span

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from hpctrain.ledger.history.evaluations import EvaluationView
    from hpctrain.ledger.history.incidents import Guarded, JobMembers, Survived
    from hpctrain.ledger.run import event_types as facts
    from hpctrain.observe.status.status import RunStatus


REASONS = {"nonfinite": "not finite", "spike": "a spike", "replicas": "copies differ"}
"""Why a guard did something, in words."""
LOST_SHOWN = 4
BUDDIES_SHOWN = 8


def incident_lines(seen: Survived) -> list[tuple[str, str]]:
    """Labels of at most eleven characters, each with its words."""
    rows = [
        ("round", _members(seen.members)),
        ("out of step", "" if seen.out_of_step is None else _out_of_step(seen.out_of_step)),
        ("memory", "" if seen.memory is None else _memory(seen.memory)),
        ("buddies", _buddies(seen.members) if seen.memory and seen.memory.steps else ""),
        ("guards", _guards(seen.guarded)),
        ("copies", "" if seen.guarded.differing is None else _differing(seen.guarded.differing)),
    ]
    return [(label, words) for label, words in rows if words]


def guards_in_words(seen: Guarded) -> str:
    """How often guards saw and did something; "" where they did not."""
    parts = [
        f"{count(seen.left_out, 'update')} left out" if seen.left_out else "",
        f"{count(seen.rewinds, 'rewind')}" if seen.rewinds else "",
        f"{count(seen.not_finite, 'step')} not finite" if seen.not_finite else "",
        f"{count(seen.spikes, 'spike')}" if seen.spikes else "",
    ]
    return ", ".join(filter(None, parts))


def _guards(seen: Guarded) -> str:
    words = guards_in_words(seen)
    skipped, rewound = seen.newest_left_out, seen.newest_rewind
    if skipped is not None:
        words += f"; left out last: step {_step(skipped.step)}{_because(skipped.why)}"
    if rewound is not None:
        to = "" if rewound.to is None else f" to step {rewound.to:,} or before"
        words += f"; went back last: at step {_step(rewound.step)}{to}{_because(rewound.why)}"
    return words


def _who(fact: facts.ReplicasDiffer) -> str:
    nodes = f" on {fold_nodes(list(fact.nodes))}" if fact.nodes else ""
    return f"{fold_ranks(fact.ranks) if fact.ranks else 'some ranks'}{nodes}"


def _differing(fact: facts.ReplicasDiffer) -> str:
    what = "had other weights than the others"
    if not fact.certain:
        what = "had different weights, and nobody knows whose were right"
    right = "not known when they were right" if fact.clean is None else f"right at {fact.clean:,}"
    return f"{_who(fact)} {what} at step {_step(fact.step)} ({right})"


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


def _out_of_step(fact: facts.RanksOutOfStep) -> str:
    who = fold_ranks(fact.ranks) if fact.ranks else "some ranks"
    return f"{fact.summary or f'{who} call other collectives'}{'; ended' if fact.ended else ''}"


def _memory(fact: facts.MemoryCopiesSet) -> str:
    if not fact.steps:
        return f"no copies are made{f': {fact.why}' if fact.why else ''}"
    parts = [
        f"{size(fact.bytes)} on the first node" if fact.bytes else "",
        _seconds("training waits {}", fact.stall_s),
        _seconds("whole after {}", fact.covered_s),
        f"{fact.left_out} left out" if fact.left_out else "",
        "the newest whole one is known to the nodes alone",
    ]
    return f"a copy every {count(fact.steps, 'step')} ({', '.join(filter(None, parts))})"


def _buddies(seen: JobMembers) -> str:
    """Which node has whose copies, and how many a switch takes with their states."""
    pairs = list(zip(seen.training, seen.buddies, strict=False))
    if not pairs:
        return ""
    shown = [f"{node} on {buddy}" for node, buddy in pairs[:BUDDIES_SHOWN]]
    if len(pairs) > BUDDIES_SHOWN:
        shown.append(f"{len(pairs) - BUDDIES_SHOWN} more (--json has all)")
    return f"copies of {', '.join(shown)}; {_switches(seen, pairs)}"


def _switches(seen: JobMembers, pairs: Sequence[tuple[str, str]]) -> str:
    on = dict(zip(seen.training, seen.switches, strict=False))
    both = [(on.get(node), on.get(buddy)) for node, buddy in pairs]
    unknown = sum(not all(pair) for pair in both)
    if unknown == len(both):
        return "switches are not known"
    apart = sum(all(pair) and len(set(pair)) > 1 for pair in both)
    if apart == len(both):
        return "all on another switch"
    more = f", {unknown} not known" if unknown else ""
    return f"{apart} of {len(both)} on another switch{more}"


def _seconds(words: str, seconds: float | None) -> str:
    return "" if seconds is None else words.format(span(seconds))


def _step(step: int | None) -> str:
    return "?" if step is None else f"{step:,}"


def _because(why: str) -> str:
    return f": {REASONS.get(why, why)}" if why else ""


LAST = 3
STEPS_SHOWN = 6
FAILED_SHOWN = 2


def evaluation_lines(status: RunStatus, width: int) -> list[tuple[str, RenderableType]]:
    """Labelled lines; nothing for a run without evaluations."""
    rows = status.evaluations
    done = [row for row in rows if row.state == "evaluated"]
    best = next((row for row in done if row.is_best), None)
    shown = done[:LAST]
    if best is not None and best not in shown:
        shown = [*shown, best]
    lines: list[tuple[str, RenderableType]] = [
        ("evaluated" if not at else "", pack(_measured(row), width)) for at, row in enumerate(shown)
    ]
    if len(done) > len(shown):
        lines.append(("", f"... {len(done) - len(shown)} more (--json shows all)"))
    if under_way := _under_way(rows):
        lines.append(("evaluating", pack(under_way, width, gap="; ")))
    failed = [row for row in rows if row.state == "failed"]
    for row in failed[:FAILED_SHOWN]:
        logs = f" (hpctrain logs {status.label} --evaluation {row.step}{status.flags})"
        why = f"step {row.step:,}{logs if row.run else ''}: {row.why or 'nobody knows why'}"
        from rich.text import Text  # only where it is drawn: a report does without rich

        lines.append(("eval failed", Text(why, "red")))
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
    return [f"{state} {_listed(of)}" for state, of in steps.items()]


def _listed(steps: Sequence[int]) -> str:
    shown = ", ".join(f"{step:,}" for step in steps[:STEPS_SHOWN])
    if len(steps) == 1:
        return f"step {shown}"
    more = f" and {count(len(steps) - STEPS_SHOWN, 'other')}" if len(steps) > STEPS_SHOWN else ""
    return f"steps {shown}{more}"
