"""Events as lines that a person can read. Pure.

Kinds that this version does not know, and fields that a kind had in no version we know, are shown
as they are: a newer hpctrain's ledger can be read with an older one. tests/unit/cli/test_events.py
holds the promises.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hpctrain.base.text import count, duration, fold_nodes, size, step_time
from hpctrain.run.event_fields import as_number, text, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpctrain.run.events import Event

    Data = Mapping[str, Any]

_LONGEST = 160
_UNKNOWN_LENGTH = 60
_ARROW = "\N{RIGHTWARDS ARROW}"


def line(event: Event) -> str:
    """Time (of this machine's zone), attempt, and what happened."""
    return _line(event.t, event.attempt, in_words(event))


def folded(first: Event, last: Event, marks: int) -> str:
    """Many step marks in a row as one line."""
    begin, end = whole(first.data.get("first")), whole(last.data.get("last"))
    span = f" in {duration(last.t - first.t)}" if last.t - first.t >= 1 else ""
    words = f"steps {_step(begin)} to {_step(end)}{_loss(last.data)}, {marks} marks{span}"
    return _line(last.t, last.attempt, words)


def in_words(event: Event) -> str:
    """What happened, with its facts."""
    words = _WORDS.get(event.kind)
    said = " ".join((words(event.data) if words else _plain(event)).split())
    return said if len(said) <= _LONGEST else f"{said[: _LONGEST - 3]}..."


def _line(t: float, attempt: int | None, words: str) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))
    return f"{when}  {'' if attempt is None else f'a{attempt}':<4} {words}"


def _plain(event: Event) -> str:
    """A kind without words of its own: its name and its fields."""
    facts = [f"{name}={_short(value)}" for name, value in event.data.items() if value is not None]
    return " ".join([event.kind.replace("_", " "), *facts])


def _short(value: object) -> str:
    said = str(value)
    return said if len(said) <= _UNKNOWN_LENGTH else f"{said[: _UNKNOWN_LENGTH - 3]}..."


# ---- parts


def _step(value: object) -> str:
    step = whole(value)
    return "?" if step is None else f"{step:,}"


def _loss(data: Data) -> str:
    loss = as_number(data.get("loss"))
    return "" if loss is None else f", loss {loss:.4g}"


def _because(data: Data, name: str = "why") -> str:
    why = text(data.get(name))
    return f": {why}" if why else ""


def _if(value: object, words: str) -> str:
    return words if value else ""


def _seconds(data: Data, name: str, words: str, least: float = 0.0) -> str:
    """Words with a time in them, where the event has that time."""
    seconds = as_number(data.get(name))
    if seconds is None or seconds < least:
        return ""
    return words.format(step_time(seconds) if seconds < 60 else duration(seconds))  # noqa: PLR2004


def _bytes(data: Data, name: str = "bytes") -> str:
    nbytes = whole(data.get(name))
    return "" if nbytes is None else size(nbytes)


def _listed(parts: list[str]) -> str:
    return ", ".join(filter(None, parts))


def _in_brackets(parts: list[str]) -> str:
    return f" ({_listed(parts)})" if any(parts) else ""


def _names(value: object) -> str:
    return fold_nodes([str(one) for one in value]) if isinstance(value, (list, tuple)) else ""


# ---- what each kind says


def _submitted(data: Data) -> str:
    nodes = text(data.get("nodes"))
    step = whole(data.get("from_step"))
    facts = [
        f"job {text(data.get('job_id'))}",
        f"{nodes} node{_if(nodes != '1', 's')}" if nodes else "",
        f"from step {step:,}" if step is not None else "",
    ]
    return f"submitted as {_listed(facts)}{_if(data.get('by') == 'resume', ' (resume)')}"


def _started(data: Data) -> str:
    ranks, nodes = whole(data.get("world_size")), _names(data.get("nodes"))
    how = {"restart": "ranks started again", "batch": "started"}
    facts = [
        f"job {text(data.get('job_id'))}" if data.get("job_id") else "",
        count(ranks, "rank") if ranks else "",
        "no agent came" if data.get("by") == "batch" else "",
    ]
    on = f" on {nodes}" if nodes else ""
    return f"{how.get(text(data.get('by')), 'started')}{on}{_in_brackets(facts)}"


def _phase(data: Data) -> str:
    name, device = text(data.get("name")), text(data.get("device"))
    known = {
        "initialised": f"ranks are up{_if(device, f' on {device}')}",
        "first_step": "first step done",
    }
    return known.get(name, f"phase {name}")


def _mesh(data: Data) -> str:
    axes = [
        f"{axis}={data[axis]}"
        for axis in ("pp", "dp_replicate", "dp_shard", "tp", "ep")
        if (whole(data.get(axis)) or 0) > 1
    ]
    return f"mesh: {text(data.get('engine'))}{_if(axes, ', ')}{', '.join(axes)}"


def _environment(data: Data) -> str:
    versions, notes = data.get("versions"), data.get("notes")
    given = versions.items() if isinstance(versions, dict) else ()
    said = notes if isinstance(notes, list) else ()
    own = data.get("overridden")
    facts = [
        f"site {text(data.get('site'))}" if data.get("site") else "",
        *(f"{name} {version}" for name, version in given if version),
        f"{count(len(own), 'variable')} overridden" if isinstance(own, list) and own else "",
        *map(text, said),
    ]
    return f"environment: {_listed(facts)}"


def _restored(data: Data) -> str:
    skipped = data.get("skipped")
    passed_over = count(len(skipped), "checkpoint") if isinstance(skipped, list) and skipped else ""
    if not data.get("checkpoint"):
        return (
            f"nothing to restore, begins at step 0{_if(passed_over, f' ({passed_over} skipped)')}"
        )
    before, now = whole(data.get("from_world_size")), whole(data.get("world_size"))
    facts = [
        f"{before}{_ARROW}{count(now, 'rank')}" if before and now else "",
        _seconds(data, "seconds", "{}"),
        _bytes(data, "bytes_read"),
        f"{passed_over} skipped" if passed_over else "",
    ]
    return f"restored step {_step(data.get('step'))}{_in_brackets(facts)}"


def _steps(data: Data) -> str:
    first, last = whole(data.get("first")), whole(data.get("last"))
    seconds, each = as_number(data.get("seconds")), ""
    if first is not None and last is not None and seconds is not None and last >= first:
        each = f", {step_time(seconds / (last - first + 1))}/step"
    which = f"step {_step(last)}" if first == last else f"steps {_step(first)} to {_step(last)}"
    skipped = whole(data.get("skipped"))
    return f"{which}{_loss(data)}{each}{_if(skipped, f', {skipped} skipped')}"


def _interval(data: Data) -> str:
    steps, seconds = whole(data.get("steps")), as_number(data.get("seconds"))
    every = f"{steps} steps" if steps else duration(seconds or 0)
    return f"saves every {every}{_because(data)}"


def _saved(data: Data) -> str:
    mode = text(data.get("mode"))
    facts = [
        " in ".join(filter(None, [_bytes(data), _seconds(data, "seconds", "{}")])),
        _seconds(data, "stall_s", "training waited {}", 0.001),
        mode,
    ]
    return f"saved step {_step(data.get('step'))}{_in_brackets(facts)}"


def _missed(what: str) -> Callable[[Data], str]:
    return lambda data: f"{what} at step {_step(data.get('step'))}{_because(data)}"


_CAUSES = {
    "sigterm": "SIGTERM",
    "sigusr2": "the warning before the time limit or a preemption",
    "clock": "the clock: the job's time is nearly over",
    "user": "hpctrain cancel --save",
    "sigint": "Ctrl-C",
}


def _stop_requested(data: Data) -> str:
    cause = text(data.get("cause"))
    return f"asked to stop by {_CAUSES.get(cause, cause or 'something')}"


def _failure(data: Data) -> str:
    rank, node = whole(data.get("rank")), text(data.get("node"))
    who = f"rank {rank}" if rank is not None else "something"
    return f"{who} failed{_if(node, f' on {node}')}{_because(data, 'summary')}"


_FOLLOWS = {
    "requeue": "asks to be requeued",
    "leave": "the scheduler requeues it",
    "restart": "restarts in this allocation",
    "stop": "nothing follows",
    "ask_batch": "the batch script decides",
}


def _ended(data: Data) -> str:
    step, following = whole(data.get("step")), text(data.get("next"))
    facts = [
        text(data.get("reason")) or "unknown",
        f"at step {step:,}" if step is not None else "",
        _FOLLOWS.get(following, following),
    ]
    detail = text(data.get("detail"))
    why = f" ({detail})" if detail not in {"", facts[0]} else ""
    return f"ended: {_listed(facts)}{why}"


def _requeued(data: Data) -> str:
    by = {"agent": "the agent", "batch": "the batch script", "scheduler": "the scheduler"}
    who = by.get(text(data.get("by")), text(data.get("by")))
    return f"requeued{_if(who, f' by {who}')}"


def _cancel(data: Data) -> str:
    return f"cancel asked for, {'to save first' if data.get('save') else 'at once'}"


def _run_stopped(data: Data) -> str:
    code = whole(data.get("exit_code"))
    return f"stopped for good{_if(code is not None, f' (exit {code})')}{_because(data, 'detail')}"


def _preflight(data: Data) -> str:
    bad = data.get("bad")
    if isinstance(bad, dict) and bad:
        return "preflight: " + "; ".join(f"{node}: {why}" for node, why in bad.items())
    return f"preflight{_because(data, 'no_answer') or ': nodes are fit'}"


def _profiled(what: str) -> Callable[[Data], str]:
    def words(data: Data) -> str:
        ranks = data.get("ranks")
        whose = f" of ranks {', '.join(map(str, ranks))}" if isinstance(ranks, list) else ""
        span = f"steps {_step(data.get('first'))} to {_step(data.get('last'))}"
        folder = text(data.get("folder"))
        return f"{what} {span}{whose}{_if(folder, f' in {folder}')}"

    return words


def _notified(data: Data) -> str:
    failed = f" failed{_because(data)}" if not data.get("ok") else ""
    return f"notification of {text(data.get('what')).replace('_', ' ')}{failed or ' sent'}"


_WORDS: dict[str, Callable[[Data], str]] = {
    "submit_intent": lambda data: f"about to submit {text(data.get('token'))}",
    "submitted": _submitted,
    "submit_adopted": lambda data: f"found as job {text(data.get('job_id'))}, submitted before",
    "submit_failed": lambda data: f"not accepted{_because(data)}",
    "attempt_started": _started,
    "phase": _phase,
    "mesh": _mesh,
    "environment": _environment,
    "restored": _restored,
    "steps": _steps,
    "interval": _interval,
    "saved": _saved,
    "save_mode": lambda data: f"saves are {text(data.get('mode'))}{_because(data)}",
    "save_failed": _missed("save failed"),
    "save_skipped": _missed("save left out"),
    "verified": lambda data: f"every byte of {text(data.get('name'))} was read, and is right",
    "prune_failed": _missed("old checkpoints not deleted"),
    "checkpoint_set_aside": lambda data: (
        f"checkpoint {text(data.get('name'))} set aside{_because(data, 'reason')}"
    ),
    "stop_requested": _stop_requested,
    "stopped": lambda data: f"left at step {_step(data.get('step'))}",
    "done": lambda data: f"done at step {_step(data.get('step'))}",
    "failure": _failure,
    "attempt_ended": _ended,
    "requeued": _requeued,
    "requeue_failed": lambda data: f"could not be requeued{_because(data)}",
    "excluded": lambda data: f"goes on without {_names(data.get('nodes'))}",
    "exclude_failed": lambda data: f"nodes could not be excluded{_because(data)}",
    "fenced": lambda _data: "gave way: a newer attempt has the run",
    "orphan_left": lambda data: f"a job that is not the run's own left{_because(data)}",
    "cancel_requested": _cancel,
    "run_stopped": _run_stopped,
    "preflight": _preflight,
    "profile_requested": _profiled("asked to profile"),
    "profiled": _profiled("profiled"),
    "notified": _notified,
}
