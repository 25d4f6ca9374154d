"""MODEL of `hpctrain plan`: a config.json, a folder with one, `module:callable`, or numbers.

A stranger's module runs in a child process with a time-out; this process never imports torch.
tests/unit/strategy/test_reading.py holds the refusals.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.advise.strategy.facts import of_config, of_description
from hpctrain.core.base.process import own_program
from hpctrain.errors import NotFound, UsageError

if TYPE_CHECKING:
    from hpctrain.advise.strategy.facts import ModelFacts

CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
MOST_BYTES = 4 << 20
"""A config.json that is larger is none."""


@dataclass(frozen=True)
class ModelSource:
    """A model as the child builds it: as the user wrote it, the child's question, its sizes."""

    where: str
    question: dict[str, Any]
    facts: ModelFacts


def read_model(text: str, timeout_s: float) -> ModelSource:
    """Return what MODEL means; a child that builds a model may take `timeout_s`.

    Raises:
        NotFound: there is no such file.
        UsageError: it says no model.
    """
    path = Path(text)
    if not path.exists() and CALLABLE.fullmatch(text):
        question = {"callable": text}
        said = ask({"model": question}, timeout_s)
        return ModelSource(text, question, of_description(said, text))
    file = path / "config.json" if path.is_dir() else path
    values = _config(file, text)
    return ModelSource(str(file), {"config": values}, of_config(values, str(file)))


def _config(file: Path, text: str) -> dict[str, Any]:
    if not file.is_file():
        hint = "no config.json lies there" if Path(text).is_dir() else "there is no such file"
        raise NotFound(f"{text}: {hint}; MODEL is a config.json, its folder, or module:callable")
    if file.stat().st_size > MOST_BYTES:
        raise UsageError(f"{file}: too large for a config.json ({file.stat().st_size:,} bytes)")
    try:
        values = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: not valid JSON: {str(error)[:120]}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{file}: must be one JSON object, as a Hugging Face config.json is")
    return values


def ask(question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """What a child with torch says of a model.

    Raises:
        UsageError: the model does not build or train, it took too long, or there is no torch.
    """
    named = question["model"].get("callable", "the config")
    with tempfile.TemporaryDirectory(prefix="hpctrain-plan-") as folder:
        answer = Path(folder, "answer.json")
        command = own_program("hpctrain.advise.strategy.measure_child", str(answer))
        try:
            done = subprocess.run(
                command, input=json.dumps(question), text=True, timeout=timeout_s,
                capture_output=True, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"{named}: not built within {timeout_s:g} s; give more with --build-timeout"
            ) from None
        if not answer.exists():
            last = (done.stderr.strip() or "it said nothing").splitlines()[-1][:300]
            raise UsageError(f"{named}: the process that builds it ended: {last}")
        said: dict[str, Any] = json.loads(answer.read_bytes())
    if "cannot" in said:
        raise UsageError(said["cannot"])
    return said
