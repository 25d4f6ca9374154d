"""Rules HT701 to HT707, HT709 and HT710: DeepSpeed's configuration, which takes any key.

tests/unit/lint/test_deepspeed_rules.py holds the promises.
"""

from __future__ import annotations

import ast
import json
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from hpctrain.lint.catalogue import RULES
from hpctrain.lint.rule import LintFinding
from hpctrain.lint.saving import nearest_value
from hpctrain.lint.syntax import keyword
from hpctrain.settings.deepspeed_keys import (
    OTHERS_KEYS,
    REMOVED_KEYS,
    REMOVED_ZERO_KEYS,
    SECTIONS,
    TOP_KEYS,
    ZERO,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hpctrain.lint.reporting import ProgramFacts

_STAGES = range(4)
_LATER = "auto"
_NEAR = 0.8
_TELLING = frozenset({ZERO, "train_micro_batch_size_per_gpu", "train_batch_size"})
"""By one of these and another known key a file is known as DeepSpeed's."""
"""How alike a key must be to count as misspelled."""


class ConfigText:
    """A JSON file with the lines of its keys."""

    def __init__(self, text: str, path: str) -> None:
        self.text = text
        self.path = path
        self.lines = text.split("\n")

    def finding(self, code: str, key: str, message: str) -> LintFinding:
        """A finding at the first line with that key."""
        quoted = json.dumps(key)
        line = next((n for n, one in enumerate(self.lines, start=1) if quoted in one), 0)
        source = self.lines[line - 1] if line else ""
        column = source.find(quoted) + 1 if line else 0
        return LintFinding(RULES[code], self.path, line, column, line, message, source.strip())


class ConfigInProgram:
    """A dictionary that a program gives to `deepspeed.initialize`, with the places of its keys."""

    def __init__(self, facts: ProgramFacts, node: ast.Dict) -> None:
        self.facts = facts
        self.node = node
        self.places: dict[str, ast.expr] = {}
        self.values = self._taken(node)

    def _taken(self, node: ast.Dict) -> dict[str, Any]:
        """Its literal part; what is no literal counts as filled in later, like DeepSpeed's auto."""
        values: dict[str, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                continue
            self.places.setdefault(key.value, key)
            if isinstance(value, ast.Dict):
                values[key.value] = self._taken(value)
            else:
                values[key.value] = value.value if isinstance(value, ast.Constant) else _LATER
        return values

    def finding(self, code: str, key: str, message: str) -> LintFinding:
        """A finding at a key."""
        return self.facts.finding(code, self.places.get(key, self.node), message)


def check_initialize(facts: ProgramFacts) -> Iterator[LintFinding]:
    """The same rules on a dictionary literal that DeepSpeed is given, by itself or by its name."""
    for call in facts.syntax.calls_to("initialize", root="deepspeed"):
        config = keyword(call, "config") or keyword(call, "config_params")
        if isinstance(config, ast.Name):
            config = nearest_value(facts, config)
        if isinstance(config, ast.Dict):
            given = ConfigInProgram(facts, config)
            yield from check_config(given, given.values)


def is_deepspeed(value: object) -> bool:
    """Whether a JSON value is DeepSpeed's configuration, also one whose keys are misspelled."""
    if not isinstance(value, dict):
        return False
    known_keys = TOP_KEYS.intersection(value)
    near = {
        key for key in value if isinstance(key, str) and get_close_matches(key, _TELLING, 1, _NEAR)
    }
    return len(known_keys | near) > 1 and bool(near)


def check_deepspeed(text: str, path: str) -> Iterator[LintFinding]:
    """All findings in a configuration; none where it is no configuration of DeepSpeed.

    Raises:
        ValueError: it is no JSON.
    """
    value = parse_json(text)
    if is_deepspeed(value):
        yield from check_config(ConfigText(text, path), value)


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply to be read") from None


def check_config(
    config: ConfigText | ConfigInProgram, value: Mapping[str, Any]
) -> Iterator[LintFinding]:
    """HT701 to HT707, HT709 and HT710 on a configuration that was read."""
    for key in value:
        if key in TOP_KEYS or key in OTHERS_KEYS or key.startswith(("_", "//", "#")):
            continue
        if key in REMOVED_KEYS:
            yield config.finding("HT710", key, f'DeepSpeed 0.19 stops at "{key}"')
            continue
        alike = get_close_matches(key, TOP_KEYS, 1, _NEAR)
        if alike:
            yield config.finding(
                "HT701",
                key,
                f'unknown key "{key}", which DeepSpeed ignores; did you mean "{alike[0]}"?',
            )
        else:
            yield config.finding("HT702", key, f'unknown key "{key}", which DeepSpeed ignores')
    zero = value.get(ZERO)
    if isinstance(zero, dict):
        yield from _zero(config, zero)
    elif zero is not None and not isinstance(zero, bool):
        yield config.finding(
            "HT709", "zero_optimization", "zero_optimization is no table of settings"
        )
    if _is_on(value.get("fp16")) and (_is_on(value.get("bf16")) or _is_on(value.get("bfloat16"))):
        yield config.finding("HT704", "fp16", "fp16 and bf16 are both enabled")
    yield from _batch(config, value)


def _is_on(section: object) -> bool:
    return isinstance(section, dict) and section.get("enabled") is True


def _zero(config: ConfigText | ConfigInProgram, zero: Mapping[str, Any]) -> Iterator[LintFinding]:
    for key in zero:
        if key in SECTIONS[ZERO]:
            continue
        if key in REMOVED_ZERO_KEYS:
            yield config.finding("HT710", key, f'DeepSpeed 0.19 stops at "{key}"')
            continue
        alike = get_close_matches(key, SECTIONS[ZERO], 1, 0.6)
        meant = f'; did you mean "{alike[0]}"?' if alike else ""
        yield config.finding("HT703", key, f'unknown key "{key}" in zero_optimization{meant}')
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or not isinstance(stage, int | str):
        yield config.finding("HT709", "stage", f"stage is {json.dumps(stage)}, not 0, 1, 2 or 3")
        return
    if isinstance(stage, int) and stage not in _STAGES:
        yield config.finding("HT709", "stage", f"there is no stage {stage}: 0, 1, 2 or 3")
    if stage in (0, 1, 2) and _is_offload(zero.get("offload_param")):
        yield config.finding("HT706", "offload_param", f"offload_param at stage {stage}")
    if zero.get("elastic_checkpoint") is True:
        yield config.finding("HT707", "elastic_checkpoint", "elastic_checkpoint does not reshard")
    for key in ("offload_param", "offload_optimizer"):
        section = zero.get(key)
        if (
            isinstance(section, dict)
            and section.get("device") == "nvme"
            and not section.get("nvme_path")
        ):
            yield config.finding("HT709", key, f"{key} on nvme without nvme_path")


def _is_offload(section: object) -> bool:
    return isinstance(section, dict) and section.get("device") in ("cpu", "nvme")


def _batch(config: ConfigText | ConfigInProgram, value: Mapping[str, Any]) -> Iterator[LintFinding]:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    numbers: list[int] = []
    for key in keys:
        number = value.get(key)
        if isinstance(number, int) and not isinstance(number, bool):
            if number < 1:
                yield config.finding("HT709", key, f"{key} is {number}: at least 1")
                return
            numbers.append(number)
    if len(numbers) == len(keys):
        total, micro, accumulation = numbers
        if total % (micro * accumulation):
            message = f"train_batch_size {total} is no multiple of {micro} x {accumulation}"
            yield config.finding("HT705", keys[0], message)
    elif isinstance(value.get(keys[0]), int) and isinstance(value.get(keys[1]), int):
        total, micro = value[keys[0]], value[keys[1]]
        if total % micro:
            message = f"train_batch_size {total} is no multiple of {micro} a GPU"
            yield config.finding("HT705", keys[0], message)
