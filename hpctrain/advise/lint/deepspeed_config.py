"""Rules HT701 to HT707, HT709 and HT710: DeepSpeed's configuration, which takes any key."""

from __future__ import annotations

import ast
import json
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from hpctrain.advise.lint.loading import nearest_value
from hpctrain.advise.lint.rule import RULES, LintFinding
from hpctrain.advise.lint.syntax import keyword
from hpctrain.core.settings.external import (
    OTHERS_KEYS,
    REMOVED_KEYS,
    REMOVED_ZERO_KEYS,
    SECTIONS,
    TOP_KEYS,
    ZERO,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from hpctrain.advise.lint.reporting import ProgramFacts

    _Found = tuple[str, str, str]
    """A rule's code, the key that it is about, and the message."""

_STAGES = range(4)
_LONG = 10
"""Letters of a key from which two edits count as a misspelling."""
_MOST_UNKNOWN = 3
"""Unknown keys of one file that are reported; more say that the file is another program's."""
_REMARKS = frozenset({"comment", "comments", "description", "name", "note", "notes"})
_CERTAIN = frozenset({ZERO, "train_micro_batch_size_per_gpu", "train_batch_size"})
"""By one of these and another known key a file is known as DeepSpeed's."""


def check_initialize(facts: ProgramFacts) -> Iterator[LintFinding]:
    """The same rules on a dictionary literal that DeepSpeed is given, by itself or by its name."""
    for call in facts.syntax.calls_to("initialize", root="deepspeed"):
        config = keyword(call, "config") or keyword(call, "config_params")
        if isinstance(config, ast.Name):
            config = nearest_value(facts, config)
        if isinstance(config, ast.Dict):
            yield from _check_literal(facts, config)


def _check_literal(facts: ProgramFacts, config: ast.Dict) -> Iterator[LintFinding]:
    """What is no literal counts as filled in later, like DeepSpeed's auto."""
    places: dict[str, ast.expr] = {}

    def taken(node: ast.Dict) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                continue
            places.setdefault(key.value, key)
            if isinstance(value, ast.Dict):
                values[key.value] = taken(value)
            else:
                values[key.value] = value.value if isinstance(value, ast.Constant) else "auto"
        return values

    for code, key, message in check_config(taken(config)):
        yield facts.finding(code, places.get(key, config), message)


def is_deepspeed(value: object, *, is_named: bool = False) -> bool:
    """Return whether a JSON value is DeepSpeed's configuration, also one with misspelled keys.

    Args:
        value: The value.
        is_named: Whether a program or launcher gives this file to DeepSpeed. If none does, every
            key must be DeepSpeed's or nearly so: other programs take some of its keys.
    """
    if not isinstance(value, dict):
        return False
    if is_named:
        return not TOP_KEYS.isdisjoint(value)
    if next(_unknown_keys(value), None) is not None:
        return False
    recognised = {key for key in value if key in TOP_KEYS or nearest_key(key, TOP_KEYS)}
    certain = {key for key in recognised if key in _CERTAIN or nearest_key(key, _CERTAIN)}
    return len(recognised) > 1 and bool(certain)


def nearest_key(key: str, recognised: Collection[str]) -> str:
    """Return the key that is meant by a misspelled one: one edit away, two where it is long."""
    most = 2 if len(key) >= _LONG else 1
    near = [one for one in recognised if _edits(key, one, most) <= most and one != key]
    return min(near, key=lambda one: (_edits(key, one, most), one), default="")


def _edits(first: str, second: str, most: int) -> int:
    """Return how many letters to put in, take out or change make one word the other."""
    if abs(len(first) - len(second)) > most:
        return most + 1
    row = list(range(len(second) + 1))
    for index, letter in enumerate(first, start=1):
        before, row[0] = row[0], index
        for place, other in enumerate(second, start=1):
            change = before + (letter != other)
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, change)
    return row[-1]


def _unknown_keys(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield keys that are not DeepSpeed's, nor nearly, nor those of remarks and other programs."""
    every = TOP_KEYS | OTHERS_KEYS | REMOVED_KEYS | _REMARKS
    for key in value:
        is_remark = key.startswith(("_", "//", "#"))
        if key not in every and not is_remark and not nearest_key(key, TOP_KEYS):
            yield key


def check_deepspeed(text: str, path: str, *, is_named: bool = False) -> Iterator[LintFinding]:
    """Yield all findings in a configuration; none if it is not DeepSpeed's (`is_deepspeed`).

    Raises:
        ValueError: it is no JSON.
    """
    value = parse_json(text)
    lines = text.split("\n")
    for code, key, message in check_config(value) if is_deepspeed(value, is_named=is_named) else ():
        quoted = json.dumps(key)
        line = next((number for number, one in enumerate(lines, start=1) if quoted in one), 0)
        source = lines[line - 1] if line else ""
        column = source.find(quoted) + 1 if line else 0
        yield LintFinding(RULES[code], path, line, column, line, message, source.strip())


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply to be read") from None


def check_config(value: Mapping[str, Any]) -> Iterator[_Found]:
    """HT701 to HT707, HT709 and HT710 on a configuration that was read."""
    yield from _top(value)
    zero = value.get(ZERO)
    if isinstance(zero, dict):
        is_tuned = "autotuning" in value and isinstance(zero.get("stage"), list)
        # a list names the stages that the autotuner tries
        yield from _zero(zero | {"stage": 0} if is_tuned else zero)
    elif zero is not None and not isinstance(zero, bool):
        yield "HT709", "zero_optimization", "zero_optimization is no table of settings"
    if _is_on(value.get("fp16")) and (_is_on(value.get("bf16")) or _is_on(value.get("bfloat16"))):
        yield "HT704", "fp16", "fp16 and bf16 are both enabled"
    yield from _batch(value)


def _top(value: Mapping[str, Any]) -> Iterator[_Found]:
    """Keys at the top; of a file with many unknown ones most are some other program's."""
    unknown = list(_unknown_keys(value))
    reported = 0
    for key in value:
        if key in REMOVED_KEYS:
            yield "HT710", key, f'DeepSpeed 0.19 stops at "{key}"'
        elif key in unknown and len(unknown) <= _MOST_UNKNOWN:
            yield "HT702", key, f'unknown key "{key}", which DeepSpeed ignores'
        elif key not in TOP_KEYS | OTHERS_KEYS | _REMARKS and not key.startswith("_"):
            meant = nearest_key(key, TOP_KEYS)
            reported += bool(meant)
            if meant and reported <= _MOST_UNKNOWN:
                text = f'unknown key "{key}", which DeepSpeed ignores; did you mean "{meant}"?'
                yield "HT701", key, text


def _is_on(section: object) -> bool:
    return isinstance(section, dict) and section.get("enabled") is True


def _zero(zero: Mapping[str, Any]) -> Iterator[_Found]:
    for key in zero:
        if key in SECTIONS[ZERO]:
            continue
        if key in REMOVED_ZERO_KEYS:
            yield "HT710", key, f'DeepSpeed 0.19 stops at "{key}"'
            continue
        alike = get_close_matches(key, SECTIONS[ZERO], 1, 0.6)
        meant = f'; did you mean "{alike[0]}"?' if alike else ""
        yield "HT703", key, f'unknown key "{key}" in zero_optimization{meant}'
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or not isinstance(stage, int | str):
        yield "HT709", "stage", f"stage is {json.dumps(stage)}, not 0, 1, 2 or 3"
        return
    if isinstance(stage, int) and stage not in _STAGES:
        yield "HT709", "stage", f"there is no stage {stage}: 0, 1, 2 or 3"
    if stage in (0, 1, 2) and _is_offload(zero.get("offload_param")):
        yield "HT706", "offload_param", f"offload_param at stage {stage}"
    if zero.get("elastic_checkpoint") is True:
        yield "HT707", "elastic_checkpoint", "elastic_checkpoint does not reshard"
    for key in ("offload_param", "offload_optimizer"):
        section = zero.get(key)
        if (
            isinstance(section, dict)
            and section.get("device") == "nvme"
            and not section.get("nvme_path")
        ):
            yield "HT709", key, f"{key} on nvme without nvme_path"


def _is_offload(section: object) -> bool:
    return isinstance(section, dict) and section.get("device") in ("cpu", "nvme")


def _batch(value: Mapping[str, Any]) -> Iterator[_Found]:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    numbers = {key: value[key] for key in keys if type(value.get(key)) is int}
    small = next((key for key, number in numbers.items() if number < 1), "")
    if small:
        yield "HT709", small, f"{small} is {numbers[small]}: at least 1"
        return
    total, micro, accumulation = map(numbers.get, keys)
    if total and micro and total % (micro * (accumulation or 1)):
        shape = f"{micro} x {accumulation}" if accumulation else f"{micro} a GPU"
        yield "HT705", keys[0], f"train_batch_size {total} is no multiple of {shape}"
