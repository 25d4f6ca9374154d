"""Types, ranges and words of the fields of each kind of event, and readers of single values.

A ledger is written by other versions of hpctrain, on disks that tear lines, and may be edited by
anybody who can write it. `typed` is the one place where what was read becomes typed: what passes
has the type, the range and the words that every reader counts on. A field that has not is left out
as if it had not been told, and so is an event that says nothing without it. Kinds and fields that
this version does not know pass as they are. Nothing here raises because of a value.
tests/unit/run/test_event_fields.py and test_untrusted_ledgers.py hold the promises.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, TypeVar

from hpctrain.base.records import EndReason, Next, StopCause

if TYPE_CHECKING:
    from collections.abc import Callable
    from enum import StrEnum

    Check = Callable[[object], Any]

T = TypeVar("T", bound="StrEnum")
_JOB_ID = re.compile(r"\d+(_\d+)?|local-\d+|pid-\d+", re.ASCII)
"""SLURM's (an array's task too), the embedded cluster's, and a process in a terminal."""
LAST_T = 250_000_000_000.0
"""A little before the year 9900: what comes later no calendar can show."""
MOST = 2**53
"""Larger whole numbers are not exact in every reader of JSON."""
MOST_S = 1e12
MOST_NUMBER = 1e300
MOST_ATTEMPTS = 10_000_000
DEEPEST = 20
"""Lists in lists: a fact of ours has three, and to print a thousand takes the stack."""
_IDENTIFIER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+\[\]-]{0,299}")
_BRACKETS = 60
_NUMBERS = frozenset({int, float})
_WORDS_FOR_NO_NUMBER = frozenset({"nan", "inf", "-inf"})


# Values of events as they come.


def whole(value: object) -> int | None:
    """A whole number, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_number(value: object) -> float | None:
    """A number, also one that JSON has no word for ("nan"), else None."""
    try:
        return float(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        return None


def finite(value: object) -> float | None:
    """A number that a screen can show and JSON can hold, else None."""
    found = as_number(value)
    return found if found is not None and math.isfinite(found) else None


def listed(value: object) -> list[Any]:
    """A list; an empty one for everything else."""
    return value if isinstance(value, list) else []


def text(value: object) -> str:
    """Text; nothing for None."""
    return "" if value is None else str(value)


def is_job_id(value: str) -> bool:
    """Whether a scheduler may be asked about it: an option or a path in its place is a trap."""
    return _JOB_ID.fullmatch(value) is not None


def member(kind: type[T], value: object) -> T | None:
    """The member of that value; None for one that this version does not know."""
    return next((one for one in kind if one.value == value), None)


# Checks: each gives the value that passes, else None (but for words that have a default).


def moment(value: object) -> float | None:
    """Seconds since the epoch that a clock can show, else None."""
    return _between(0, value, LAST_T)


def attempt_number(value: object) -> int | None:
    """The number of an attempt, else None."""
    found = count(value)
    return found if found is not None and found <= MOST_ATTEMPTS else None


def count(value: object) -> int | None:
    """A whole number from 0 on, else None."""
    return value if type(value) is int and 0 <= value <= MOST else None


def seconds(value: object) -> float | None:
    """A duration, else None."""
    return _between(0, value, MOST_S)


def number(value: object) -> float | str | None:
    """A number, or the word for one that JSON has none for: "nan", "inf", "-inf"; else None."""
    if isinstance(value, str):
        return value if value in _WORDS_FOR_NO_NUMBER else None
    return _between(-MOST_NUMBER, value, MOST_NUMBER)


def _between(low: float, value: object, high: float) -> float | None:
    """The number as it is; None for one that is out of range, for NaN, and for what is none."""
    # A boolean is an int to isinstance. Every comparison with NaN is false.
    return value if type(value) in _NUMBERS and low <= value <= high else None  # type: ignore[operator, return-value]


def words(value: object) -> str | None:
    """Text; a number as text; else None."""
    if isinstance(value, str):
        return value
    return None if _between(-MOST, value, MOST) is None else str(value)


def identifier(value: object) -> str | None:
    """The name of a job or a submission: never an option of a command, never a path; else None."""
    found = words(value)
    return found if found is not None and _IDENTIFIER.fullmatch(found) else None


def path(value: object) -> str | None:
    """Text that a file system can be asked about, else None."""
    return value if isinstance(value, str) and "\0" not in value else None


def flag(value: object) -> bool | None:
    """True or false, else None."""
    return value if isinstance(value, bool) else None


def list_of(check: Check) -> Check:
    """A list of what passes the check; the rest of it is left out."""

    def checked(value: object) -> list[Any] | None:
        if not isinstance(value, list):
            return None
        return [found for one in value if (found := check(one)) is not None]

    return checked


def mapping(value: object) -> dict[str, Any] | None:
    """Plain values by name, else None."""
    if not isinstance(value, dict):
        return None
    return {name: _plain(one) for name, one in value.items()}


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, bool) else words(value)


def _skipped(value: object) -> dict[str, Any] | None:
    """A checkpoint that was not taken."""
    if not isinstance(value, dict):
        return None
    checks: dict[str, Check] = {"step": count, "name": words, "reason": words}
    return {name: found for name, check in checks.items() if (found := check(value.get(name)))}


def _nodes(value: object) -> Any:
    """Names of nodes, or how many were asked for."""
    return list_of(words)(value) if isinstance(value, list) else words(value)


def _reason(value: object) -> str:
    return (member(EndReason, value) or EndReason.UNKNOWN).value


def _next(value: object) -> str:
    """What follows; the batch side is asked where a newer version's word is not known here."""
    return (member(Next, value) or Next.ASK_BATCH).value


def _cause(value: object) -> str | None:
    found = member(StopCause, value)
    return None if found is None else found.value


_FIELDS: dict[str, Check] = {
    **dict.fromkeys(("step", "first", "last", "sample_first", "sample_last", "from_step"), count),
    **dict.fromkeys(("total_steps", "world_size", "from_world_size", "ranks_per_node"), count),
    **dict.fromkeys(("restarts", "exit_code", "rank", "slow_rank", "bytes", "bytes_read"), count),
    **dict.fromkeys(("seconds", "stall_s", "waited_s", "data_s", "save_s", "cost_s"), seconds),
    **dict.fromkeys(("mtbf_s", "p50_s", "p95_s", "slow_by"), seconds),
    **dict.fromkeys(("loss", "grad_norm", "tokens", "flops"), number),
    **dict.fromkeys(("heard", "ended_at", "job_started", "batch_started"), moment),
    **dict.fromkeys(("agent_started", "imported"), moment),
    **dict.fromkeys(("token", "job_id"), identifier),
    **dict.fromkeys(
        ("why", "by", "detail", "name", "device", "engine", "mode", "checkpoint"), words
    ),
    **dict.fromkeys(("summary", "traceback", "node", "kind_of", "what", "site"), words),
    **dict.fromkeys(("script", "run_dir", "folder", "source"), path),
    **dict.fromkeys(("no_answer", "collective", "cluster", "slurm_cluster", "reason"), words),
    **dict.fromkeys(("pp", "dp_replicate", "dp_shard", "tp", "ep", "steps"), count),
    **dict.fromkeys(("save", "ok", "at_save"), flag),
    **dict.fromkeys(("others", "ranks"), list_of(count)),
    **dict.fromkeys(("unset", "notes", "cpus"), list_of(words)),
    **dict.fromkeys(("bad", "facts", "versions"), mapping),
    "nodes": _nodes,
    "skipped": count,
}
"""By name: a field means the same in every kind, but for those below."""
_OF_KIND: dict[str, dict[str, Check]] = {
    "attempt_ended": {"reason": _reason, "next": _next},
    "run_stopped": {"reason": _reason},
    "stop_requested": {"cause": _cause},
    "restored": {"skipped": list_of(_skipped)},
    "attempt_started": {"nodes": list_of(words)},
    "excluded": {"nodes": list_of(words)},
    "environment": {"nodes": count, "overridden": list_of(mapping)},
}
_KINDS = (
    "submit_intent", "submitted", "submit_adopted", "submit_failed", "cancel_requested",
    "attempt_started", "phase", "mesh", "interval", "save_mode", "restored", "steps",
    "saved", "save_failed", "save_skipped", "verified", "checkpoint_set_aside",
    "stop_requested", "stopped", "done", "profile_requested", "profiled", "failure",
    "attempt_ended", "requeued", "requeue_failed", "excluded", "exclude_failed",
    "run_stopped", "fenced", "orphan_left", "preflight", "environment", "notified",
    "prune_failed", "imported",
)  # fmt: skip
_CHECKS = {kind: _FIELDS | _OF_KIND.get(kind, {}) for kind in _KINDS}
_NEEDED: dict[str, tuple[str, ...]] = {
    "submit_intent": ("token",),
    "submitted": ("token", "job_id"),
    "submit_adopted": ("token", "job_id"),
    "saved": ("step",),
    "excluded": ("nodes",),
}
"""Without these a fact says nothing."""
_ALWAYS = {"attempt_ended": {"reason": EndReason.UNKNOWN.value, "next": Next.ASK_BATCH.value}}
"""What stands where nothing was told."""


def typed(kind: str, raw: dict[str, Any]) -> dict[str, Any] | None:
    """The fields of a fact as every reader may count on them; None for one that says nothing.

    Args:
        kind: What happened.
        raw: Its fields as they were read; used up.
    """
    checks = _CHECKS.get(kind)
    if checks is None:
        return raw
    for name in list(raw):
        check = checks.get(name)
        if check is None or raw[name] is None:
            continue
        checked = check(raw[name])
        if checked is None:
            del raw[name]
        else:
            raw[name] = checked
    if any(raw.get(name) is None for name in _NEEDED.get(kind, ())):
        return None
    for name, value in _ALWAYS.get(kind, {}).items():
        if raw.get(name) is None:
            raw[name] = value
    return raw


def whole_text(line: bytes, fact: dict[str, Any]) -> dict[str, Any] | None:
    """The fact without what no screen and no file can hold; None for lists in lists in lists.

    Args:
        line: The line that it was read from: hardly one needs a closer look.
        fact: What was read.
    """
    if line.count(b"[") + line.count(b"{") > _BRACKETS and _depth(fact) > DEEPEST:
        return None
    lone = b"\\ud" in line or b"\\uD" in line
    return _mended(fact) if lone else fact


def _depth(value: object) -> int:
    """How deep lists and mappings lie in each other, without going deeper than asked."""
    depth, level = 0, [value]
    while level and depth <= DEEPEST:
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        depth, level = depth + 1, inner
    return depth


def _mended(value: Any) -> Any:
    """Without halves of characters (lone surrogates), which cannot be written or printed."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [_mended(one) for one in value]
    if isinstance(value, dict):
        return {_mended(name): _mended(one) for name, one in value.items()}
    return value
