"""Speed, model and goodput as labelled lines. Pure.

tests/unit/test_status_cli.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.base.text import amount, duration, pack, percent, step_time
from hpctrain.history.goodput import Spent

if TYPE_CHECKING:
    from hpctrain.history.goodput import Goodput
    from hpctrain.status.status import RunStatus

SMALL = 0.005
"""Classes with a smaller share are added up."""
_DAY_S = 86_400.0
_HOUR_S = 3600.0


def time_left(status: RunStatus) -> list[str]:
    """Time of a step, and how long it takes to the last one at this speed."""
    far, now = status.progress, status.speed
    each = 1 / now.steps_per_s if now is not None and now.steps_per_s else far.step_s
    if not each:
        return []
    if far.step is None or far.total is None or far.step >= far.total:
        return [f"{step_time(each)}/step"]
    return [f"{step_time(each)}/step, about {duration((far.total - far.step) * each)} left"]


def rate(status: RunStatus) -> str:
    """Tokens, else samples, else steps in a second."""
    now = status.speed
    if now is None:
        return "-"
    if now.tokens_per_s:
        return f"{amount(now.tokens_per_s)} tok/s"
    if now.samples_per_s:
        return f"{amount(now.samples_per_s)} samples/s"
    return f"{amount(now.steps_per_s)} steps/s" if now.steps_per_s else "-"


def speed_lines(status: RunStatus, width: int) -> list[str]:
    """How fast the newest attempt trains, or did last."""
    now = status.speed
    if now is None:
        return []
    items = [rate(status)]
    if now.step_p50_s is not None:
        p95 = "" if now.step_p95_s is None else f", p95 {step_time(now.step_p95_s)}"
        items.append(f"step p50 {step_time(now.step_p50_s)}{p95}")
    if now.mfu is not None:
        items.append(f"MFU {percent(now.mfu)}")
    if now.data_share is not None:
        items.append(f"data wait {percent(now.data_share)}")
    if now.slow_rank is not None:
        by = "" if now.slow_by is None else f" ({100 * now.slow_by:+.0f} %)"
        items.append(f"slowest rank {now.slow_rank}{by}")
    return pack(items, width, label="speed")


def model_lines(status: RunStatus, width: int) -> list[str]:
    """Is the model fine? Loss alone is in the header already."""
    now = status.speed
    if now is None or (now.grad_norm is None and not now.skipped):
        return []
    items = [] if now.loss is None else [f"loss {now.loss:.4g}"]
    if now.grad_norm is not None:
        items.append(f"gradient norm {now.grad_norm:.4g}")
    if now.skipped:
        steps = "1 update" if now.skipped == 1 else f"{now.skipped} updates"
        items.append(f"{steps} skipped in the last {duration(now.window_s)}")
    return pack(items, width, label="model")


def goodput_lines(status: RunStatus, width: int) -> list[str]:
    """What came of the allocation, the two rates and the classes that make it up."""
    spent = status.goodput
    if spent.allocated_s <= 0:
        return []
    items: list[str] = []
    useful, since = spent.useful_of_allocated, spent.useful_since_submit
    if useful is not None:
        today = status.day.useful_of_allocated if spent.submitted_s > _DAY_S else None
        lately = "" if today is None else f" (last 24 h {percent(today, 1)})"
        items.append(f"{percent(useful, 1)} of allocated{lately}")
    if not spent.tells_steps and any(one.ended is not None for one in status.attempts):
        items.append("useful share not known (no hpctrain.init() in the program)")
    if since is not None:
        items.append(f"{percent(since, 1)} since submit")
    items.append(f"{_node_hours(spent.allocated_s)} allocated")
    if spent.seconds[Spent.QUEUE] > 0:
        items.append(f"{duration(spent.seconds[Spent.QUEUE])} in the queue")
    return [*pack(items, width, label="goodput"), *_classes(spent, width)]


def _node_hours(node_seconds: float) -> str:
    hours = node_seconds / _HOUR_S
    if hours < 1:
        return f"{60 * hours:.1f} node-minutes"
    return f"{hours:,.0f} node-hours" if hours >= 100 else f"{hours:.1f} node-hours"  # noqa: PLR2004


def _classes(spent: Goodput, width: int) -> list[str]:
    """Shares of the allocated time, the largest first; they add up to 100.0 as they are shown."""
    shares = {kind.value.replace("_", "-"): s for kind, s in spent.node_seconds.items() if s > 0}
    large = {name: s for name, s in shares.items() if s >= SMALL * spent.allocated_s}
    rest = sum(shares.values()) - sum(large.values())
    ordered = sorted(large.items(), key=lambda item: -item[1])
    if rest > 0:
        ordered.append(("rest", rest))
    tenths = _tenths(ordered, spent)
    texts = [f"{name} {value / 10:.1f} %" for (name, _), value in zip(ordered, tenths, strict=True)]
    return pack(texts, width, label=" ")


def _tenths(ordered: list[tuple[str, float]], spent: Goodput) -> list[int]:
    """Tenths of a percent for each; steps get what the line above says of them."""
    names = [name for name, _ in ordered]
    if Spent.STEP.value not in names or len(names) == 1:
        return apportioned([value for _, value in ordered])
    steps = round(1000 * spent.node_seconds[Spent.STEP] / spent.allocated_s)
    place = names.index(Spent.STEP.value)
    others = [value for name, value in ordered if name != Spent.STEP.value]
    found = apportioned(others, 1000 - steps)
    return [*found[:place], steps, *found[place:]]


def apportioned(values: list[float], total: int = 1000) -> list[int]:
    """Whole numbers in the values' proportions that add up, rounded up where most is cut off."""
    whole = sum(values)
    if whole <= 0:
        return [0 for _ in values]
    exact = [total * value / whole for value in values]
    found = [int(one) for one in exact]
    by_rest = sorted(range(len(values)), key=lambda place: found[place] - exact[place])
    for place in by_rest[: total - sum(found)]:
        found[place] += 1
    return found
