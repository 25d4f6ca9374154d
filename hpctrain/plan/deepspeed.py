"""Is a user's ds_config.json one that DeepSpeed reads and hpctrain can hold to? Asked at submit.

Pure. What is wrong is refused with the key and the setting that it meets; nothing in the file is
left out in silence. tests/unit/test_ds_config.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpctrain.data.batches import plan_micro_batches, shares
from hpctrain.errors import UsageError
from hpctrain.plan.ds_config import AUTO, SPREADS_PARAMETERS, adds_in_fp32, shown, stage_of
from hpctrain.plan.ds_keys import MUST_BE, NO_EFFECT, REFUSED, SECTIONS, TOP, ZERO
from hpctrain.settings.layers import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hpctrain.settings.schema import EngineSettings, TrainSettings

BATCH, MICRO, PASSES = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def check_user_config(
    user: Mapping[str, Any],
    engine: EngineSettings,
    *,
    train: TrainSettings | None,
    data_ranks: Sequence[int],
    where: str,
) -> list[str]:
    """Refuse what DeepSpeed would not read or would read otherwise than the run's settings.

    Args:
        user: The file, parsed.
        engine: The run's settings, with a zero kind.
        train: The recipe's settings; None where a program of the user's runs.
        data_ranks: The numbers of data-parallel ranks that the run may have, all of them or the
            least and the most.
        where: How messages name the file.

    Returns:
        What has no effect, for the user to read.

    Raises:
        UsageError: with the first thing that is wrong.
    """
    _known(user, where)
    refuse_unsupported(user, where)
    _agrees(user, engine, where)
    _offload(_section(user, ZERO), engine, where)
    _adds_up(user, engine, where)
    notes = [
        f"{where}: {key} has no effect; {instead}"
        for key, instead in NO_EFFECT.items()
        if _is_set(user.get(key, AUTO))
    ]
    return notes + _batch(user, train, data_ranks, where)


def _known(user: Mapping[str, Any], where: str) -> None:
    """Every key is one that DeepSpeed reads."""
    for path, value in _walk(user):
        section, _, key = path.rpartition(".")
        known = SECTIONS.get(section) if section else TOP
        if known is not None and key not in known:
            near = nearest(key, known)
            prefix = f"{section}." if section else ""
            hint = f"did you mean {prefix}{near[0]}?" if near else "take it out"
            raise UsageError(f"{where}: {path} is not a key that DeepSpeed knows; {hint}")
        if path in SECTIONS and not isinstance(value, dict) and value != AUTO:
            raise UsageError(f"{where}: {path} is {shown(value)}; it takes an object, {{...}}")


def refuse_unsupported(user: Mapping[str, Any], where: str) -> None:
    """Refuse what hpctrain's engine cannot train or save right with, whatever the run's settings.

    Args:
        user: The file, parsed.
        where: How messages name the file.

    Raises:
        UsageError: with the first such key.
    """
    for path, value in _walk(user):
        if path in REFUSED and _is_set(value):
            raise UsageError(f"{where}: hpctrain does not take {path}: {REFUSED[path]}")
        wanted, why = MUST_BE.get(path, (AUTO, ""))
        if path in MUST_BE and value not in (AUTO, wanted):
            raise UsageError(
                f"{where}: {path} is {shown(value)}; hpctrain needs {shown(wanted)}, since {why}: "
                "take the key out"
            )


def _agrees(user: Mapping[str, Any], engine: EngineSettings, where: str) -> None:
    """What both the file and [engine] say is the same."""
    for name in ("bf16", "fp16"):
        enabled = _section(user, name).get("enabled", AUTO)
        asked = engine.precision == name
        if enabled != AUTO and (bool(enabled) is not asked or not isinstance(enabled, bool)):
            raise UsageError(
                f"{where}: {name}.enabled is {shown(enabled)}, and engine.precision is "
                f'"{engine.precision}"; make them agree, or write "auto" in the file'
            )
    stage = _section(user, ZERO).get("stage", AUTO)
    _same(f"{ZERO}.stage", stage, stage_of(engine.kind), f'engine.kind is "{engine.kind}"', where)
    clip = user.get("gradient_clipping", AUTO)
    said = f"engine.clip_norm is {engine.clip_norm:g}"
    _same("gradient_clipping", clip, engine.clip_norm, said, where)


def _same(path: str, value: Any, wanted: float, said: str, where: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value != AUTO and (not number or value != wanted):
        raise UsageError(
            f"{where}: {path} is {shown(value)}, and {said}; "
            'make them agree, or write "auto" in the file'
        )


def _offload(zero: Mapping[str, Any], engine: EngineSettings, where: str) -> None:
    """Optimizer state lies where `engine.offload` says; parameters there, nearer, or not away."""
    away = engine.offload != "no"
    spread = stage_of(engine.kind) == SPREADS_PARAMETERS
    allowed = {
        "offload_optimizer": [AUTO, engine.offload if away else "none"],
        "offload_param": [AUTO, "none", *(["cpu"] if away and spread else [])],
    }
    for name, devices in allowed.items():
        block = _section(zero, name)
        device = block.get("device", "none") if block else AUTO
        if device not in devices:
            raise UsageError(
                f"{where}: {ZERO}.{name}.device is {shown(device)}, and engine.offload is "
                f'"{engine.offload}" with engine.kind "{engine.kind}"; make them agree'
            )
        path = block.get("nvme_path", AUTO)
        if path not in (AUTO, engine.nvme_path):
            raise UsageError(
                f"{where}: {ZERO}.{name}.nvme_path is {shown(path)}, and engine.nvme_path is "
                f'"{engine.nvme_path}"; make them agree, or write "auto" in the file'
            )
        for key in ("pipeline_read", "pipeline_write"):
            if engine.offload == "nvme" and block.get(key, AUTO) not in (AUTO, False):
                raise UsageError(
                    f"{where}: hpctrain does not take {ZERO}.{name}.{key} with engine.offload "
                    '"nvme": state that is on its way could not be saved; take the key out'
                )


def _adds_up(user: Mapping[str, Any], engine: EngineSettings, where: str) -> None:
    """Gradients are added in a type that DeepSpeed has an engine of ours for."""
    asked = _section(user, "data_types").get("grad_accum_dtype", AUTO)
    takes = [AUTO, engine.precision, *(["fp32"] if adds_in_fp32(engine) else [])]
    if asked not in takes:
        raise UsageError(
            f"{where}: data_types.grad_accum_dtype is {shown(asked)}, which hpctrain does not take "
            f'with engine.kind "{engine.kind}" and engine.precision "{engine.precision}": take the '
            "key out; zero2 and zero3 add gradients in fp32"
        )


def _batch(
    user: Mapping[str, Any], train: TrainSettings | None, data_ranks: Sequence[int], where: str
) -> list[str]:
    """The three batch sizes fit each other, the number of ranks, and the recipe's."""
    said = {key: user[key] for key in (BATCH, MICRO, PASSES) if user.get(key, AUTO) != AUTO}
    for key, value in said.items():
        if type(value) is not int or value < 1:
            raise UsageError(f"{where}: {key} is {shown(value)}; it takes a whole number from 1 on")
    if train is None:
        _product(said, data_ranks, where)
        told = ", ".join(said)
        return [f"{where}: {told}: no effect, the program cuts its batches itself"] if said else []
    if said.get(BATCH, train.global_batch) != train.global_batch:
        raise UsageError(
            f"{where}: {BATCH} is {said[BATCH]}, and train.global_batch is {train.global_batch}; "
            'make them agree, or write "auto" in the file'
        )
    _product({BATCH: train.global_batch, **said}, data_ranks, where)
    for ranks in data_ranks:
        _as_the_recipe_cuts(said, train, ranks, where)
    return []


def _product(said: Mapping[str, int], data_ranks: Sequence[int], where: str) -> None:
    if len(said) < 3:  # noqa: PLR2004 - DeepSpeed fills in what is missing of the three
        return
    for ranks in data_ranks:
        if said[BATCH] != said[MICRO] * said[PASSES] * ranks:
            raise UsageError(
                f"{where}: {BATCH} {said[BATCH]} is not {MICRO} {said[MICRO]} x {PASSES} "
                f"{said[PASSES]} x {ranks} data-parallel ranks; leave {PASSES} out, "
                "hpctrain finds it at each start"
            )


def _as_the_recipe_cuts(
    said: Mapping[str, int], train: TrainSettings, ranks: int, where: str
) -> None:
    """The recipe's passes are what the file says."""
    plan = plan_micro_batches(train.global_batch, ranks, train.micro_batch)
    largest = min(train.micro_batch or train.global_batch, shares(train.global_batch, ranks)[0])
    for key, cut in ((MICRO, largest), (PASSES, plan.micro_batches)):
        if said.get(key, cut) != cut:
            raise UsageError(
                f"{where}: {key} is {said[key]}, and train.micro_batch {train.micro_batch} makes "
                f"it {cut} on {ranks} data-parallel ranks; set train.micro_batch, "
                'or write "auto" in the file'
            )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _is_set(value: Any) -> bool:
    """Whether a key asks for something: not left open, and not switched off."""
    if isinstance(value, dict):
        return value.get("enabled", True) is not False
    return value not in (AUTO, False, None)


def _walk(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every key, with its path `section.key`, from the top down."""
    for key, value in config.items():
        path = f"{above}{key}"
        yield path, value
        if isinstance(value, dict):
            yield from _walk(value, f"{path}.")
