"""`hpctrain plan --measure`: exact peaks in place of the formulas, from a child with torch.

tests/engines/test_strategy_measured.py holds it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpctrain.advise.strategy.activations import FP32
from hpctrain.advise.strategy.memory import CONTEXT_BYTES, FRAGMENTED
from hpctrain.advise.strategy.reading import ask
from hpctrain.advise.strategy.rows import gigabytes, on_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.advise.strategy.rows import PlanRequest, Row


def question_of(row: Row) -> dict[str, Any]:
    """The step of a row, as `measure_child.Step` takes it."""
    assert row.batch is not None  # noqa: S101 - rows without a batch are not measured
    layout = row.way.layout
    return {
        "kind": layout.kind,
        "ranks": row.way.ranks,
        "copies": layout.copies,
        "micro": row.batch.micro,
        "seq": row.batch.seq,
        "passes": row.batch.passes,
        "recompute": layout.recompute,
        "selective": bool(layout.selective),
        "each_pass": layout.each_pass,
        "reshard": layout.reshard,
        "bf16": layout.low != FP32,
        "offload": layout.offload,
        "lora": layout.lora,
    }


def is_measurable(row: Row) -> bool:
    """Whether one step tells it, without values.

    Tensor parallel layers, experts on several ranks and DeepSpeed look at some, no 4-bit weights
    are trained here, and a pipeline has as many steps as stages.
    """
    layout = row.way.layout
    is_whole = layout.tp == layout.pp == layout.ep == 1 and not layout.quantised
    is_ours = row.way.is_trained and not layout.kind.startswith("zero")
    return row.batch is not None and is_whole and is_ours


def measured(
    rows: Sequence[Row], asked: PlanRequest, model: dict[str, Any], timeout_s: float
) -> list[Row]:
    """The same rows with the exact peak of their tensors, where that can be had.

    Raises:
        UsageError: the model does not build, or takes too long.
    """
    chosen = [row for row in rows if is_measurable(row)]
    said = ask({"model": model, "steps": [question_of(row) for row in chosen]}, timeout_s)
    answers = {id(row): answer for row, answer in zip(chosen, said["steps"], strict=True)}
    return [_with(row, answers.get(id(row)), asked) for row in rows]


def _with(row: Row, answer: dict[str, Any] | None, asked: PlanRequest) -> Row:
    if answer is None:
        return row
    if "error" in answer:
        return replace(row, fits=False, why=f"not measured: {answer['error']}")
    peak, memory = int(answer["peak"]), asked.gpu.memory
    over = round(peak * (1 + FRAGMENTED)) + CONTEXT_BYTES - memory
    why = f"{gigabytes(over)} over {asked.gpu.shown}" if over > 0 else f"{gigabytes(-over)} free"
    aside = row.way.aside
    is_held, of_host = on_host(row.host, asked.cluster.memory)
    return replace(
        row,
        measured=peak,
        fits=over <= 0 and is_held and not aside,
        is_held=over <= 0 and is_held,
        why=aside or f"{why}, measured{of_host}",
    )
