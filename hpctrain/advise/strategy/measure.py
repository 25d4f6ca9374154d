"""Read a model for `hpctrain plan`; with --measure, a child with torch counts its peaks.

tests/unit/strategy/test_reading.py and tests/engines/test_strategy_measured.py hold it.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.advise.strategy.activations import FP32
from hpctrain.advise.strategy.choice import PlanRequest, Row, excess, gigabytes, on_host
from hpctrain.advise.strategy.facts import ModelFacts, of_config
from hpctrain.core.base.process import own_program
from hpctrain.errors import NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_BYTES = 4 << 20
"""A config.json that is larger is none."""


def read_model(text: str) -> tuple[ModelFacts, dict[str, Any]]:
    """Return a model's sizes, and the values of its config.json: MODEL is the file or its folder.

    Raises:
        NotFound: there is no such file.
        UsageError: it says no model.
    """
    path = Path(text)
    file = path / "config.json" if path.is_dir() else path
    values = _config(file, text)
    return of_config(values, str(file)), values


def _config(file: Path, text: str) -> dict[str, Any]:
    if not file.is_file():
        hint = "no config.json lies there" if Path(text).is_dir() else "there is no such file"
        raise NotFound(f"{text}: {hint}; MODEL is a config.json, or its folder")
    if file.stat().st_size > MOST_BYTES:
        raise UsageError(f"{file}: too large for a config.json ({file.stat().st_size:,} bytes)")
    try:
        values = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{file}: not valid JSON: {str(error)[:120]}; MODEL is a config.json, or its folder"
        ) from None
    if not isinstance(values, dict):
        raise UsageError(f"{file}: must be one JSON object, as a Hugging Face config.json is")
    return values


def ask(model: dict[str, Any], steps: list[dict[str, Any]], timeout_s: float) -> list[Any]:
    """Return what a child with torch measures of steps of the model of a config.json.

    Raises:
        UsageError: the model does not build or train, it took too long, or there is no torch.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-plan-") as folder:
        answer = Path(folder, "answer.json")
        command = own_program("hpctrain.advise.strategy.measure_child", str(answer))
        try:
            done = subprocess.run(
                command, input=json.dumps({"model": model, "steps": steps}), text=True,
                timeout=timeout_s, capture_output=True, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"the model was not built and measured within {timeout_s:g} s; give more with "
                "--build-timeout"
            ) from None
        if not answer.exists():
            last = (done.stderr.strip() or "it said nothing").splitlines()[-1][:300]
            raise UsageError(f"the process that builds the model ended: {last}")
        said: dict[str, Any] = json.loads(answer.read_bytes())
    if "cannot" in said:
        raise UsageError(said["cannot"])
    return list(said["steps"])


_OF_LAYOUT = ("kind", "copies", "recompute", "each_pass", "reshard", "offload", "lora")


def question_of(row: Row) -> dict[str, Any]:
    """The step of a row, as `measure_child.Step` takes it."""
    assert row.batch is not None  # noqa: S101 - rows without a batch are not measured
    layout = row.way.layout
    return {
        **{name: getattr(layout, name) for name in _OF_LAYOUT},
        "ranks": row.way.ranks,
        "micro": row.batch.micro,
        "seq": row.batch.seq,
        "passes": row.batch.passes,
        "selective": bool(layout.selective),
        "bf16": layout.low != FP32,
    }


def _is_measurable(row: Row) -> bool:
    """Whether one step tells it, without values."""
    layout = row.way.layout
    is_whole = layout.tp == layout.pp == layout.ep == 1
    is_ours = not row.way.elsewhere and not layout.kind.startswith("zero")
    return row.batch is not None and is_whole and is_ours


def measured(
    rows: Sequence[Row], asked: PlanRequest, model: dict[str, Any], timeout_s: float
) -> list[Row]:
    """The same rows with the exact peak of their tensors, where that can be had.

    `model` has the values of its config.json.

    Raises:
        UsageError: the model does not build, or takes too long.
    """
    chosen = [row for row in rows if _is_measurable(row)]
    said = ask(model, [question_of(row) for row in chosen], timeout_s)
    answers = {id(row): answer for row, answer in zip(chosen, said, strict=True)}
    return [_with(row, answers.get(id(row)), asked) for row in rows]


def _with(row: Row, answer: dict[str, Any] | None, asked: PlanRequest) -> Row:
    if answer is None:
        return row
    if "error" in answer:
        return replace(row, is_held=False, why=f"not measured: {answer['error']}")
    assert row.peak is not None  # noqa: S101 - what has a batch has one
    peak = int(answer["peak"])
    over, may_fit = excess(asked.gpu, peak, row.peak.allowance, 0.0)
    why = f"{gigabytes(over)} over {asked.gpu.shown}" if over > 0 else f"{gigabytes(-over)} free"
    if may_fit:
        why = f"may fit: {why} with allowances"
    is_held, of_host = on_host(row.host, asked.cluster.memory)
    return replace(
        row,
        measured=peak,
        is_held=over <= 0 and is_held,
        may_fit=may_fit and is_held,
        why=row.way.aside or f"{why}, measured{of_host}",
    )
