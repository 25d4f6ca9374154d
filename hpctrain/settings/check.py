"""What values must be by themselves and together, before anything is written or submitted.

Pure. Types and choices are `merge.py`'s; what only the cluster knows (its partitions) is SLURM's;
what depends on the number of ranks is `plan/nodes.py`'s.
tests/unit/test_settings_check.py holds the promises.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpctrain.errors import UsageError
from hpctrain.settings.check_engine import check_engine
from hpctrain.settings.check_hooks import check_hooks
from hpctrain.settings.check_profile import check_profile
from hpctrain.settings.sbatch_options import names_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.settings.schema import Settings

_NODES = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
_TIME = re.compile(r"(?:([0-9]{1,9})-)?([0-9]{1,9})(?::([0-9]{1,9}))?(?::([0-9]{1,9}))?")
_MAX_LEAD_S = 65535  # sbatch's own limit for --signal

# Lowest value of each number; what 0 means stands in the schema.
_AT_LEAST: dict[str, float] = {
    "slurm.gpus_per_node": 0,
    "slurm.ranks_per_node": 0,
    "slurm.cpus_per_rank": 0,
    "slurm.signal_lead_s": 0,
    "run.stop_margin_s": 0,
    "run.restarts_in_job": 0,
    "run.log_every_s": 0,
    "preflight.timeout_s": 1.0,
    "preflight.bad_node_hours": 0.0,
    "preflight.bandwidth_hours": 0.0,
    "notify.timeout_s": 1.0,
    "profile.nsys_rank": -1,
    "budget.preemptions": 0,
    "budget.time_limits": 0,
    "budget.nodes": 0,
    "budget.crashes": 0,
    "budget.storage": 0,
    "budget.no_progress": 0,
    "checkpoint.interval_steps": 0,
    "checkpoint.interval_s": 0,
    "checkpoint.max_loss_s": 0,
    "checkpoint.timeout_s": 0,
    "checkpoint.patience_s": 0,
    "checkpoint.save_patience_s": 0,
    "checkpoint.write_mib": 1,
    "checkpoint.write_threads": 1,
    "checkpoint.keep_last": 2,
    "checkpoint.keep_every": 0,
    "checkpoint.keep_best": 0,
    "engine.pp_stages_per_rank": 1,
    "engine.clip_norm": 0,
    "train.steps": 1,
    "train.global_batch": 1,
    "train.micro_batch": 0,
    "train.seq_len": 1,
    "train.data_limit_mb": 0,
    "train.layers": 1,
    "train.dim": 1,
    "train.heads": 1,
    "train.lr": 0,
    "train.warmup": 0,
    "train.weight_decay": 0,
    "train.dropout": 0,
    "train.experts": 0,
    "train.experts_per_token": 1,
    "train.seed": 0,
    "train.val_every": 0,
    "train.val_batches": 0,
    "train.step_delay_s": 0,
}

# Of these, 0 itself would mean a save at every moment, or one that has failed when it begins.
_ABOVE_0 = ("checkpoint.max_loss_s", "checkpoint.timeout_s")

# Past these, one save takes the memory or the threads of a whole node; or the ranks that wait for
# one that waits for its file system end by their collective's time-out.
_AT_MOST: dict[str, float] = {
    "checkpoint.patience_s": 300,
    "checkpoint.write_mib": 1024,
    "checkpoint.write_threads": 64,
}

# Each ends up as one word of the batch script's header: a blank or a line break would end it early.
_WORDS = (
    "partition",
    "account",
    "qos",
    "constraint",
    "reservation",
    "exclude",
    "mem",
    "network",
)  # fmt: skip

# sbatch options that hpctrain sets itself, with the setting that is meant for them.
_OURS = {
    "--nodes": "slurm.nodes",
    "--ntasks": "slurm.ranks_per_node",
    "--ntasks-per-node": "slurm.ranks_per_node",
    "--time": "slurm.time",
    "--signal": "slurm.signal_lead_s",
    "--partition": "slurm.partition",
    "--account": "slurm.account",
    "--qos": "slurm.qos",
    "--job-name": "--name",
    "--requeue": "the [budget] settings",
    "--no-requeue": "the [budget] settings",
    "--output": "the run directory's jobs/",
    "--error": "the run directory's jobs/",
    "--open-mode": "nothing: it is always append",
    "--array": "one run per submit",
    "--wrap": "a script behind --",
}


def node_range(text: str, *, where: str = "slurm.nodes") -> tuple[int, int]:
    """Least and most nodes of "N" or "MIN-MAX".

    Raises:
        UsageError: another form, fewer than 1, or MAX below MIN.
    """
    match = _NODES.fullmatch(text.strip())
    if match is None:
        raise UsageError(f'{where}: "{text}" is not a number of nodes; it takes N or MIN-MAX')
    least = int(match[1])
    most = int(match[2] or least)
    if least < 1:
        raise UsageError(f"{where}: {text} nodes cannot train; it takes at least 1")
    if most < least:
        raise UsageError(
            f"{where}: {text} has its maximum below its minimum; did you mean {most}-{least}?"
        )
    return least, most


def time_s(text: str, *, where: str = "slurm.time") -> int:
    """Seconds of a time limit in any of SLURM's forms: [days-]hours:minutes:seconds, or minutes.

    SLURM reads "90" as minutes, "90:30" as minutes and seconds, "1-12" as days and hours.

    Raises:
        UsageError: another form, or no time at all.
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f'{where}: "{text}" is not a time limit; it takes '
            "[days-]hours:minutes:seconds, or minutes"
        )
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:  # noqa: PLR2004 - hours, minutes, seconds
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = 0, *(*parts, 0)[:2]
    total = int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
    if total < 1:
        raise UsageError(f"{where}: a time limit of {text} leaves no time to train; raise it")
    return total


def check(settings: Settings, origins: dict[str, str]) -> list[str]:
    """Refuse settings that cannot work; returns what was adapted, for the user to read.

    A default `slurm.signal_lead_s` that does not fit a short time limit is lowered in place, in
    both arguments.

    Raises:
        UsageError: a value is out of its range, or two do not go together.
    """
    node_range(settings.slurm.nodes, where=_told("slurm.nodes", origins))
    _check_ranges(settings, origins)
    _check_header(settings, origins)
    _check_model(settings, origins)
    check_hooks(settings, origins)
    most_ranks = node_range(settings.slurm.nodes)[1] * settings.slurm.ranks()
    return [
        *check_engine(settings, origins),
        *check_profile(settings, origins, most_ranks),
        *_fit_lead(settings, origins),
    ]


def _told(path: str, origins: Mapping[str, str]) -> str:
    return f"{origins.get(path, 'default')}: {path}"


def _check_ranges(settings: Settings, origins: Mapping[str, str]) -> None:
    for path, least in _AT_LEAST.items():
        value = _value(settings, path)
        if value < least:
            raise UsageError(f"{_told(path, origins)} is {value}; it takes at least {least}")
        most = _AT_MOST.get(path)
        if most is not None and value > most:
            raise UsageError(f"{_told(path, origins)} is {value}; it takes at most {most}")
    for path in _ABOVE_0:
        value = _value(settings, path)
        if value <= 0:
            raise UsageError(f"{_told(path, origins)} is {value}; it takes more than 0 seconds")
    if settings.checkpoint.keep_best and not settings.checkpoint.best_metric:
        raise UsageError(
            f"{_told('checkpoint.best_metric', origins)} is empty and checkpoint.keep_best is "
            f"{settings.checkpoint.keep_best}; name a value that the program gives to run.log"
        )
    if settings.train.dropout >= 1:
        raise UsageError(
            f"{_told('train.dropout', origins)} is {settings.train.dropout}; it takes 0 to below 1"
        )


def _value(settings: Settings, path: str) -> float:
    section, _, key = path.partition(".")
    value: float = getattr(getattr(settings, section), key)
    return value


def _check_header(settings: Settings, origins: Mapping[str, str]) -> None:
    """Values that would break out of their line of the batch script, or fight with our own."""
    for key in _WORDS:
        value: str = getattr(settings.slurm, key)
        if any(c.isspace() or not c.isprintable() for c in value):
            raise UsageError(
                f"{_told(f'slurm.{key}', origins)} is {value!r}; it takes one word without blanks"
            )
    for key in ("extra", "srun_args"):
        told = _told(f"slurm.{key}", origins)
        for option in getattr(settings.slurm, key):
            if not option.startswith("-") or not option.isprintable():
                raise UsageError(f"{told} has {option!r}; each takes one option, e.g. --switches=1")
            try:
                names = names_of(option)
            except UsageError as error:
                raise UsageError(f"{told}: {error}") from None
            ours = [name for name in names if name in _OURS] if key == "extra" else []
            if ours:
                raise UsageError(f"{told} has {option}, which hpctrain sets; use {_OURS[ours[0]]}")


def _check_model(settings: Settings, origins: Mapping[str, str]) -> None:
    train = settings.train
    if train.dim % train.heads:
        raise UsageError(
            f"{_told('train.heads', origins)} is {train.heads}, which does not divide train.dim "
            f"{train.dim} ({origins.get('train.dim', 'default')}); change one of them"
        )
    if train.experts and train.experts_per_token > train.experts:
        raise UsageError(
            f"{_told('train.experts_per_token', origins)} is {train.experts_per_token}, more than "
            f"train.experts {train.experts} ({origins.get('train.experts', 'default')}); lower it"
        )


def _fit_lead(settings: Settings, origins: dict[str, str]) -> list[str]:
    """Keep the warning well inside the time limit: past half of it a job would mostly save."""
    told = _told("slurm.signal_lead_s", origins)
    limit = time_s(settings.slurm.time, where=_told("slurm.time", origins))
    lead = settings.slurm.signal_lead_s
    if lead > _MAX_LEAD_S:
        raise UsageError(f"{told} is {lead}; sbatch takes at most {_MAX_LEAD_S}")
    if lead * 2 <= limit:
        return []
    if origins.get("slurm.signal_lead_s", "default") != "default":
        raise UsageError(
            f"{told} is {lead}, more than half of the time limit of {limit} s "
            f"({_told('slurm.time', origins)}); raise --time or lower it to {max(1, limit // 3)}"
        )
    settings.slurm.signal_lead_s = max(1, limit // 3)
    origins["slurm.signal_lead_s"] = "default, lowered to fit slurm.time"
    note = (
        f"SLURM will warn {settings.slurm.signal_lead_s} s before the time limit of {limit} s "
        f"(slurm.signal_lead_s is {lead} by default, too long for it)"
    )
    return [note]
