"""What the values of settings must be by themselves and together, before anything is written.

Types and choices are refused earlier, by `layers.py`; what only the cluster knows (its partitions)
is SLURM's; what depends on the number of ranks or on the model is `plan/mesh.py`'s; whether a
tracker can be imported is looked at where the run is submitted (`missing_tracker`).

Pure otherwise. The promises are held by tests/unit/settings/test_check.py,
test_profile_settings.py, tests/unit/runtime/test_trackers.py, tests/unit/agent/test_notify.py and
tests/unit/plan/test_mesh.py.

"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from hpctrain.core.base.records import INCIDENT
from hpctrain.core.base.text import hms
from hpctrain.core.settings import external
from hpctrain.core.settings.external import names_of
from hpctrain.core.settings.fields import fault, keys_of
from hpctrain.core.settings.layers import Chosen, did_you_mean, nearest
from hpctrain.core.settings.schema import OF_EVALUATION, sections, value_at
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.core.settings.schema import EngineSettings, Settings, SlurmSettings

BOUNDED = ("tp", "pp", "ep", "cp", "dp_replicate")
"""Axes of the mesh that a user may bound; data-parallel sharding takes the ranks that are left."""

MESH_EXAMPLE = "--mesh tp=4,pp=2"
NEWS = ("done", "failed", "stopped", "attempt", INCIDENT)
BUILT_IN = {"wandb": "hpctrain.train.runtime.trackers:start"}
"""Trackers that hpctrain knows by name: the package's name to our factory."""
_OWN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
MOST_STEPS = 100
"""A trace of one step is some MB; of many, on many ranks, it fills a quota."""
EXAMPLE = "--profile steps=100:103,ranks=0,7"
_STEPS = re.compile(r"([0-9]{1,15})(?::([0-9]{1,15}))?")
_RANKS = re.compile(r"[0-9]{1,9}(?:,[0-9]{1,9})*")
_SPAN = re.compile(r"(?:([0-9]{1,9})d)?(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9})s)?")
_TIME = re.compile(r"(?:([0-9]{1,9})-)?([0-9]{1,9})(?::([0-9]{1,9}))?(?::([0-9]{1,9}))?")
_MAX_LEAD_S = 65535  # sbatch's own limit for --signal


def number_range(text: str, what: str, where: str, digits: int) -> tuple[int, int]:
    """Fewest and most of "N" or "MIN-MAX"; `what` names them in messages.

    Raises:
        UsageError: another form, fewer than 1, or MAX below MIN.
    """
    number = rf"([0-9]{{1,{digits}}})"
    match = re.fullmatch(rf"{number}(?:-{number})?", text.strip())
    if match is None:
        raise UsageError(f'{where}: "{text}" is not a number of {what}; it takes N or MIN-MAX')
    least = int(match[1])
    most = int(match[2] or least)
    if least < 1:
        raise UsageError(f"{where}: {text} {what} cannot train; it takes at least 1")
    if most < least:
        raise UsageError(
            f"{where}: {text} has its maximum below its minimum; did you mean {most}-{least}?"
        )
    return least, most


def axis_range(text: str, *, where: str) -> tuple[int, int]:
    """The same of an axis of the mesh, in ranks."""
    return number_range(text, "ranks", where, digits=9)


def node_range(text: str, *, where: str = "slurm.nodes") -> tuple[int, int]:
    """The same of nodes."""
    return number_range(text, "nodes", where, digits=6)


def bounds(engine: EngineSettings, origins: Mapping[str, str] | None = None) -> dict[str, range]:
    """What each of `BOUNDED` may be.

    Raises:
        UsageError: one is no range, or it is used with an engine that has no such axis.
    """
    where = _Keys(engine, origins or {})
    ranges: dict[str, range] = {}
    for axis in BOUNDED:
        text: str = getattr(engine, axis)
        least, most = axis_range(text, where=where.of(axis))
        if least > 1 and engine.kind != "fsdp2":
            raise where.needs(axis, "kind", "fsdp2", f": choose --engine fsdp2, or engine.{axis} 1")
        ranges[axis] = range(least, most + 1)
    if ranges["ep"].start > 1 and ranges["tp"].start > 1:
        raise UsageError(
            f"{where.of('ep')} is {engine.ep} and engine.tp is {engine.tp}{where.origin('tp')}: "
            "experts cannot be spread and cut at once; set one of the two to 1"
        )
    for axis in ("tp", "pp", "ep"):
        if ranges["cp"].start > 1 and ranges[axis].start > 1:
            raise UsageError(
                f"{where.of('cp')} is {engine.cp} and engine.{axis} is {getattr(engine, axis)}"
                f"{where.origin(axis)}: sequences are shared out by plain sharding only; set one "
                "of the two to 1"
            )
    return ranges


def check_engine(settings: Settings, origins: Mapping[str, str]) -> None:
    """Refuse combinations that no world size can make work.

    Raises:
        UsageError: settings that do not go together.
    """
    engine, where = settings.engine, _Keys(settings.engine, origins)
    bounds(engine, origins)
    if engine.exact:
        _check_exact(engine, where)
    _check_precision(settings, where)
    _check_offload(engine, where)
    _check_reductions(engine, where)
    _check_schedule(engine, where)


def _check_exact(engine: EngineSettings, key: _Keys) -> None:
    if engine.kind not in {"ddp", "fsdp2"}:
        raise key.needs(
            "exact", "kind", "ddp or fsdp2", ", which adds gradients in an order of its own"
        )
    for axis in ("pp", "ep", "cp", "dp_replicate"):
        text: str = getattr(engine, axis)
        if text != "1" and axis_range(text, where=key.of(axis))[1] > 1:
            raise key.needs("exact", axis, "1", ": sums would be taken in another order")
    least, most = axis_range(engine.tp, where=key.of("tp"))
    if least != most:
        raise UsageError(
            f"{key.of('exact')} is true, which needs one number for engine.tp; it is {engine.tp}"
            f"{key.origin('tp')}: another number would give other bits"
        )
    if engine.compile == "inductor":
        timing = ", which chooses kernels by timing them"
        raise key.needs("exact", "compile", "no, eager or aot_eager", timing)


def _check_schedule(engine: EngineSettings, key: _Keys) -> None:
    """A backward pass in two halves would run the whole of a compiled block's, or recompute, twice.

    Measured: 104 to 176 forward passes of a block instead of 32.
    """
    if engine.pp_schedule != "zero_bubble" or axis_range(engine.pp, where=key.of("pp"))[1] == 1:
        return
    for name in ("activation_checkpointing", "compile"):
        if getattr(engine, name) != "no":
            twice = (
                ", whose work would be done again in each half of a backward pass; choose "
                "engine.pp_schedule interleaved"
            )
            raise key.needs("pp_schedule", name, "no", twice)


def _check_precision(settings: Settings, key: _Keys) -> None:
    """DeepSpeed 0.19.8 takes a real step when it begins: Adam's count is off by one ever after."""
    engine = settings.engine
    if engine.kind != "zero0" or engine.precision == "fp32":
        return
    if engine.precision == "auto" and settings.slurm.gpus_per_node == 0:
        return
    means = ", which means bf16 on a GPU" if engine.precision == "auto" else ""
    raise UsageError(
        f"{key.of('precision')} is {engine.precision}{means}, which trains wrong with engine.kind "
        f"zero0{key.origin('kind')} and without a word, a fault of DeepSpeed's; choose "
        "--engine zero1, or engine.precision fp32"
    )


def _check_offload(engine: EngineSettings, key: _Keys) -> None:
    if engine.offload == "cpu" and engine.kind in {"ddp", "zero0"}:
        raise UsageError(
            f"{key.of('offload')} is cpu, which fsdp2 and zero1 to zero3 can do; engine.kind is "
            f"{engine.kind}{key.origin('kind')}"
        )


def _check_reductions(engine: EngineSettings, key: _Keys) -> None:
    where = f"{key.of('reduce_each_pass')} is true, which"
    if engine.reduce_each_pass and engine.kind != "fsdp2":
        raise UsageError(
            f"{where} only fsdp2 can do; engine.kind is {engine.kind}{key.origin('kind')}"
        )
    if engine.reduce_each_pass and engine.exact:
        raise UsageError(f"{where} engine.exact cannot do{key.origin('exact')}: set one of them")


class _Keys:
    """How engine settings and their origins are shown."""

    def __init__(self, engine: EngineSettings, origins: Mapping[str, str]) -> None:
        self._engine, self._origins = engine, origins

    def needs(self, key: str, other: str, wanted: str, why: str = "") -> UsageError:
        is_, has = (str(getattr(self._engine, name)).lower() for name in (key, other))
        return UsageError(
            f"{self.of(key)} is {is_}, which needs engine.{other} {wanted}; it is {has}"
            f"{self.origin(other)}{why}"
        )

    def origin(self, key: str) -> str:
        return f" ({self._origin(key)})" if self._origins else ""

    def of(self, key: str) -> str:
        return f"{self._origin(key)}: engine.{key}" if self._origins else f"engine.{key}"

    def _origin(self, key: str) -> str:
        return self._origins.get(f"engine.{key}", "default")


def parse_mesh(text: str) -> dict[str, str]:
    """Axis to its bounds, from "AXIS=N[,AXIS=N...]".

    Raises:
        UsageError: not of that form, no such axis, one that is named twice, or no number of ranks.
    """
    axes: dict[str, str] = {}
    for part in text.split(","):
        axis, equals, value = (piece.strip() for piece in part.partition("="))
        where = f"--mesh {text}"
        if axis in {"dp", "dp_shard"}:
            raise UsageError(
                f"{where}: data-parallel ranks take what the other axes leave; name only "
                f"{', '.join(BOUNDED)}"
            )
        if axis not in BOUNDED:
            hint = did_you_mean(axis, BOUNDED, f"there are {', '.join(BOUNDED)}")
            raise UsageError(f'{where}: "{axis}" is no axis; {hint}')
        if not equals:
            raise UsageError(f"{where}: not of the form AXIS=N[,AXIS=N...], e.g. {MESH_EXAMPLE}")
        if axis in axes:
            raise UsageError(f"{where}: {axis} is given twice; keep one")
        axis_range(value, where=f"{where}: {axis}")
        axes[axis] = value
    return axes


def engine_flags(
    engine: str | None, mesh: Mapping[str, str] | None
) -> dict[str, tuple[str, object]]:
    """Both flags as `layers.flag_layer` takes them."""
    flags: dict[str, tuple[str, object]] = {"engine.kind": ("--engine", engine)}
    flags |= {f"engine.{axis}": ("--mesh", value) for axis, value in (mesh or {}).items()}
    return flags


def check_hooks(settings: Settings, origins: Mapping[str, str]) -> None:
    """Refuse news and trackers that cannot be.

    Raises:
        UsageError: a value is of another form, or has nothing to act on.
    """
    _check_notify(settings, origins)
    for name in settings.track.loggers:
        if name not in BUILT_IN and _OWN.fullmatch(name) is None:
            hint = did_you_mean(name, BUILT_IN, "e.g. mypackage.mymodule:make")
            if nearest(name.lower(), ["tensorboard"]):
                hint = "TensorBoard's files are always written, it needs no entry"
            where = _named("track.loggers", origins)
            raise UsageError(f'{where} has "{name}"; it takes wandb or module:name; {hint}')


def _check_notify(settings: Settings, origins: Mapping[str, str]) -> None:
    notify = settings.notify
    for name in notify.on:
        if name not in NEWS:
            hint = did_you_mean(name, NEWS, f"it takes {', '.join(NEWS)}")
            raise UsageError(f'{_named("notify.on", origins)} has "{name}"; {hint}')
    try:
        shlex.split(notify.command)
    except ValueError as error:
        raise UsageError(
            f"{_named('notify.command', origins)} is {notify.command!r}, which is no command line: "
            f"{str(error).lower()}"
        ) from None
    if "://" in notify.webhook_file:
        raise UsageError(
            f"{_named('notify.webhook_file', origins)} is a URL, a secret that would stand "
            "in the run's directory; put it into a file that only you can read and name the file"
        )


def missing_tracker(loggers: Sequence[str]) -> str:
    """The first built-in tracker that this python cannot import, or "" for none."""
    from importlib.util import find_spec

    return next((name for name in loggers if name in BUILT_IN and find_spec(name) is None), "")


def _named(path: str, origins: Mapping[str, str]) -> str:
    return f"{origins.get(path, 'default')}: {path}"


def step_range(text: str, *, where: str = "profile.steps") -> tuple[int, int] | None:
    """First and last step of "FIRST:LAST" or of one step; None for an empty text.

    Raises:
        UsageError: another form, a step below 1, none at all, or too many.
    """
    if not text.strip():
        return None
    match = _STEPS.fullmatch(text.strip())
    if match is None:
        raise UsageError(f'{where} is "{text}"; it takes FIRST:LAST, e.g. 100:103')
    first, last = int(match[1]), int(match[2] or match[1])
    if first < 1:
        raise UsageError(f'{where} is "{text}"; the first step of a run is 1')
    if last < first:
        raise UsageError(f'{where} is "{text}"; the last step is before the first')
    if last - first + 1 > MOST_STEPS:
        raise UsageError(
            f'{where} is "{text}", {last - first + 1} steps; traces of more than {MOST_STEPS} fill '
            "a disk: take some in the middle of the run"
        )
    return first, last


def rank_set(text: str, *, where: str = "profile.ranks") -> tuple[int, ...] | None:
    """The ranks of "R,R"; None for "all".

    Raises:
        UsageError: another form.
    """
    plain = text.replace(" ", "")
    if plain == "all":
        return None
    if not _RANKS.fullmatch(plain):
        raise UsageError(f'{where} is "{text}"; it takes ranks, e.g. 0,7, or all')
    return tuple(sorted({int(rank) for rank in plain.split(",")}))


def parse_profile(text: str) -> dict[str, object]:
    """Keys of [profile] with their values, from `steps=A:B,ranks=R,R,memory`.

    Raises:
        UsageError: a word that is none of these, or no steps.
    """
    where = f"--profile {text}"
    parts: dict[str, object] = {}
    for part in re.split(r"[,\s]+", text.strip()):
        key, equals, value = part.partition("=")
        if part.isdigit() and "ranks" in parts:  # the second rank of ranks=0,7
            parts["ranks"] = f"{parts['ranks']},{part}"
        elif key in {"steps", "ranks"} and equals:
            if key in parts:
                raise UsageError(f"{where}: {key} is given twice; keep one")
            parts[key] = value
        elif part == "memory":
            parts["memory"] = True
        else:
            raise UsageError(f'{where}: "{part}" is not understood; e.g. {EXAMPLE}')
    if not parts.get("steps"):
        raise UsageError(f"{where}: which steps? e.g. {EXAMPLE}")
    step_range(str(parts["steps"]), where=f"{where}: steps")
    rank_set(str(parts.get("ranks", "0")), where=f"{where}: ranks")
    return parts


def profile_flags(profile: Mapping[str, object] | None) -> dict[str, tuple[str, object]]:
    """`--profile` as `layers.flag_layer` takes it; nothing where it was not given."""
    return {f"profile.{key}": ("--profile", value) for key, value in (profile or {}).items()}


def check_profile(settings: Settings, origins: Mapping[str, str], most_ranks: int) -> list[str]:
    """Refuse what cannot be profiled; returns what will have no effect, or more than is meant.

    `most_ranks` is the world size at the most nodes; 0 where nobody knows.

    Raises:
        UsageError: steps or ranks of another form, or a rank that there will never be.
    """
    profile = settings.profile
    steps = step_range(profile.steps, where=_named("profile.steps", origins))
    ranks = rank_set(profile.ranks, where=_named("profile.ranks", origins))
    if most_ranks and ranks and ranks[-1] >= most_ranks:
        raise UsageError(
            f"{_named('profile.ranks', origins)} names rank {ranks[-1]}; there are "
            f"{most_ranks} at most: 0 to {most_ranks - 1}"
        )
    notes = []
    if steps is None:
        idle = [
            k for k in ("ranks", "memory") if origins.get(f"profile.{k}", "default") != "default"
        ]
        notes += [f"profile.{key} has no effect without profile.steps" for key in idle]
    if profile.memory and not settings.slurm.gpus_per_node:
        notes.append(
            "profile.memory records what holds a GPU's memory, and slurm.gpus_per_node is 0: "
            "there is nothing to record on a CPU"
        )
    return notes


def time_s(text: str, *, where: str = "slurm.time") -> int:
    """Seconds of a time limit: [days-]hours:minutes:seconds, minutes, or with units, 1d12h.

    SLURM reads "90" as minutes, "90:30" as minutes and seconds, "1-12" as days and hours.

    Raises:
        UsageError: another form, or no time at all.
    """
    plain = text.strip().lower()
    if plain and (span := _SPAN.fullmatch(plain)):
        days, hours, minutes, seconds = (int(part or 0) for part in span.groups())
    elif match := _TIME.fullmatch(plain):
        days, hours, minutes, seconds = _slurm_time(*match.groups())
    else:
        raise UsageError(
            f'{where}: "{text}" is not a time limit; it takes '
            "[days-]hours:minutes:seconds, minutes, or units as in 12h, 90m, 1d12h"
        )
    total = days * 86400 + hours * 3600 + minutes * 60 + seconds
    if total < 1:
        raise UsageError(f"{where}: a time limit of {text} leaves no time to train; raise it")
    return total


def _slurm_time(days: str | None, *rest: str | None) -> tuple[int, int, int, int]:
    """Days, hours, minutes and seconds, by how many numbers there are, and whether days are."""
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:  # noqa: PLR2004 - hours, minutes, seconds
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = 0, *(*parts, 0)[:2]
    return int(days or 0), hours, minutes, seconds


def sbatch_time(text: str) -> str:
    """The time limit in a form that sbatch reads; as it stands where it has no units."""
    return hms(time_s(text)) if text.strip()[-1:].lower() in set("dhms") else text


def check(settings: Settings, origins: Mapping[str, str]) -> Chosen:
    """Refuse settings that cannot work; returns what is to be adapted, and what to know.

    Raises:
        UsageError: a value is out of its range, or two do not go together.
    """
    node_range(settings.slurm.nodes, where=_named("slurm.nodes", origins))
    _check_ranges(settings, origins)
    _check_header(settings, origins)
    _check_model(settings, origins)
    check_hooks(settings, origins)
    _check_resume_args(settings, origins)
    most_ranks = node_range(settings.slurm.nodes)[1] * settings.slurm.ranks()
    check_engine(settings, origins)
    notes = check_profile(settings, origins, most_ranks)
    notes += _idle_evaluate(settings, origins) + _check_environment(settings, origins)
    notes += _idle_alive(settings)
    return Chosen(notes=notes) + fit_lead(settings, origins)


def _check_best(settings: Settings, origins: Mapping[str, str]) -> None:
    """A metric that nobody will ever tell would keep none of the best."""
    keep, metric = settings.checkpoint.keep_best, settings.checkpoint.best_metric
    if keep and not metric:
        raise UsageError(
            f"{_named('checkpoint.best_metric', origins)} is empty and checkpoint.keep_best is "
            f"{keep}; name a value that the program gives to run.log"
        )
    if keep and metric.startswith(OF_EVALUATION) and not settings.evaluate.script:
        raise UsageError(
            f"{_named('checkpoint.best_metric', origins)} is {metric}, which an evaluation finds, "
            "and the run has none; set evaluate.script, or name a value that the program gives to "
            "run.log"
        )


def _check_environment(settings: Settings, origins: Mapping[str, str]) -> list[str]:
    """Of [environment], what has no effect; refuse a folder that is no absolute path."""
    environment = settings.environment
    if environment.stage_dir and environment.stage_dir[0] not in "/$":
        raise UsageError(
            f"{_named('environment.stage_dir', origins)} is {environment.stage_dir}, which is no "
            "absolute path: name a folder of each node, e.g. /tmp or $SLURM_TMPDIR"
        )
    if environment.stage != "no" and settings.container.image:
        return ["environment.stage has no effect with container.image, which is one file already"]
    return []


def _idle_alive(settings: Settings) -> list[str]:
    least, most = node_range(settings.slurm.nodes)
    if settings.alive.shrink == "no" or least != most:
        return []
    return [f"alive.shrink has no effect with slurm.nodes {settings.slurm.nodes}: give MIN-MAX"]


def split_spares(nodes: str | None) -> tuple[str | None, int | None]:
    """What `--nodes` said: nodes that train, and after a plus sign those that wait.

    Raises:
        UsageError: the second is no number.
    """
    if nodes is None or "+" not in nodes:
        return nodes, None
    training, _, spares = nodes.partition("+")
    if not re.fullmatch(r"[0-9]{1,4}", spares):
        raise UsageError(f'--nodes: "{nodes}" has no number of spare nodes after its +, as in 4+1')
    return training, int(spares)


def with_spares(settings: Settings) -> str:
    """The nodes as `--nodes` takes them."""
    spares = settings.alive.spares
    return f"{settings.slurm.nodes}+{spares}" if spares else settings.slurm.nodes


def allocated(settings: Settings) -> SlurmSettings:
    """What is asked of the scheduler, with the spare nodes."""
    slurm, alive = settings.slurm, settings.alive
    if not alive.is_on():
        return slurm
    least, most = (count + alive.spares for count in node_range(slurm.nodes))
    nodes = str(most) if least == most else f"{least}-{most}"
    return replace(slurm, nodes=nodes)


def _idle_evaluate(settings: Settings, origins: Mapping[str, str]) -> list[str]:
    evaluate = settings.evaluate
    if evaluate.script:
        never = not evaluate.every and not evaluate.last
        return ["evaluate.every is 0 and evaluate.last is false: nothing is due"] if never else []
    given = (path for path, origin in origins.items() if origin != "default")
    return [
        f"{path} has no effect without evaluate.script"
        for path in given
        if path.startswith("evaluate.") and path != "evaluate.script"
    ]


def _check_ranges(settings: Settings, origins: Mapping[str, str]) -> None:
    for section, cls in sections().items():
        for name, key in keys_of(cls).items():
            path = f"{section}.{name}"
            if wrong := fault(key, value_at(settings, path), _named(path, origins)):
                raise UsageError(wrong)
    _check_best(settings, origins)
    if settings.train.dropout >= 1:
        raise UsageError(
            f"{_named('train.dropout', origins)} is {settings.train.dropout}; it takes 0 to below 1"
        )


def _check_header(settings: Settings, origins: Mapping[str, str]) -> None:
    """Options that would break out of their line of the batch script, or fight with our own."""
    if (kind := settings.slurm.gpu_type) and not settings.slurm.gpus_per_node:
        raise UsageError(
            f"{_named('slurm.gpu_type', origins)} is {kind}, and no GPUs are asked for; say how "
            f"many each node has: --gpus-per-node {kind}:4"
        )
    for key in ("extra", "srun_args"):
        where = _named(f"slurm.{key}", origins)
        for option in getattr(settings.slurm, key):
            if not option.startswith("-") or not option.isprintable():
                raise UsageError(
                    f"{where} has {option!r}; each takes one option, e.g. --switches=1"
                )
            try:
                names = names_of(option)
            except UsageError as error:
                raise UsageError(f"{where}: {error}") from None
            refused = external.REFUSED if key == "extra" else external.SRUN_REFUSED
            for name in (name.removeprefix("--") for name in names):
                if key == "extra" and name in external.OURS:
                    use = external.OURS[name]
                    raise UsageError(f"{where} has {option}, which hpctrain sets; use {use}")
                if name in refused:
                    raise UsageError(f"{where} has {option}: {refused[name]}")


def _check_resume_args(settings: Settings, origins: Mapping[str, str]) -> None:
    where = _named("run.resume_args", origins)
    try:
        words = shlex.split(settings.run.resume_args)
    except ValueError as error:
        raise UsageError(f"{where} cannot be taken apart into words: {error}") from None
    if settings.run.resume_if and not words:
        raise UsageError(
            f"{_named('run.resume_if', origins)} is of no use without run.resume_args, which are "
            "added where it matches"
        )


def _check_model(settings: Settings, origins: Mapping[str, str]) -> None:
    train = settings.train
    if train.dim % train.heads:
        raise UsageError(
            f"{_named('train.heads', origins)} is {train.heads}, which does not divide train.dim "
            f"{train.dim} ({origins.get('train.dim', 'default')}); change one of them"
        )
    if train.experts and train.experts_per_token > train.experts:
        raise UsageError(
            f"{_named('train.experts_per_token', origins)} is {train.experts_per_token}, more than "
            f"train.experts {train.experts} ({origins.get('train.experts', 'default')}); lower it"
        )


def fit_lead(settings: Settings, origins: Mapping[str, str]) -> Chosen:
    """Keep the warning well inside the time limit: past half of it a job would mostly save.

    A default `slurm.signal_lead_s` that does not fit a short time limit is lowered.

    Raises:
        UsageError: one that the user gave does not fit.
    """
    where = _named("slurm.signal_lead_s", origins)
    limit = time_s(settings.slurm.time, where=_named("slurm.time", origins))
    lead = settings.slurm.signal_lead_s
    if lead > _MAX_LEAD_S:
        raise UsageError(f"{where} is {lead}; sbatch takes at most {_MAX_LEAD_S}")
    if lead * 2 <= limit:
        return Chosen()
    if origins.get("slurm.signal_lead_s", "default") != "default":
        raise UsageError(
            f"{where} is {lead}, more than half of the time limit of {limit} s "
            f"({_named('slurm.time', origins)}); raise --time or lower it to {max(1, limit // 3)}"
        )
    lowered = max(1, limit // 3)
    note = (
        f"SLURM will warn {lowered} s before the time limit of {limit} s "
        f"(slurm.signal_lead_s is {lead} by default, too long for it)"
    )
    origin = "default, lowered to fit slurm.time"
    return Chosen({"slurm.signal_lead_s": (lowered, origin)}, [note])
