"""Options and arguments that several commands share, so that they are spelled and read alike.

Among them `--since`, how far back one looks, as people write it (`parse_since`), and what sbatch is
asked for (`job_options`), as sbatch spells it; `JobCommand` answers an option that only sbatch has
with the line to write.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from datetime import datetime, time, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hpctrain.cluster.scheduler.base import SCHEDULERS
from hpctrain.core.base import clock
from hpctrain.core.base.env import HPCTRAIN_RUNS
from hpctrain.core.settings.fields import keys_of
from hpctrain.core.settings.layers import nearest, setting_names
from hpctrain.core.settings.schema import EngineSettings, ShapeSettings
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.ledger.run.layout import RunDir, is_elsewhere, runs_root

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from click.shell_completion import CompletionItem

    from hpctrain.launch.prepare import SubmitRequest

    _Function = TypeVar("_Function", bound=Callable[..., Any])

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SPAN = re.compile(r"(?:\d+(?:\.\d+)?[smhdw])+")


def echo_table(rows: Sequence[Sequence[object]], **how: Any) -> None:
    """As `drawing.echo_table`; rich is imported where something is drawn."""
    from hpctrain.core import drawing

    drawing.echo_table(rows, **how)


def runs_option(function: _Function, *, of_group: bool = False) -> _Function:
    """`--runs DIR`: the folder of all runs, absolute; with `of_group` its group's by default."""
    return click.option(
        "--runs",
        default=None if of_group else "runs",
        envvar=None if of_group else HPCTRAIN_RUNS,
        show_default=not of_group,
        metavar="DIR",
        callback=lambda ctx, _, value: ctx.obj if value is None else runs_root(value),
        help=f"Folder of all runs (or {HPCTRAIN_RUNS}).",
    )(function)


own_runs_option = partial(runs_option, of_group=True)


def cluster_option(text: str) -> Callable[[_Function], _Function]:
    """`--cluster NAME`: one of the schedulers that there are."""
    return click.option("--cluster", type=click.Choice(list(SCHEDULERS)), help=text)


def json_option(function: _Function) -> _Function:
    """`--json`: one JSON value on stdout, for programs."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object, for programs."
    )(function)


def locked_option(function: _Function) -> _Function:
    """`--allow-locked`: what the site's admins have locked may be changed; it is recorded."""
    return click.option(
        "--allow-locked",
        is_flag=True,
        hidden=True,  # the message about a held lock names it
        help="Change what the site's admins have locked; it is recorded.",
    )(function)


def foreign_option(function: _Function) -> _Function:
    """`--foreign`: carry out what a run says that others own or can write."""
    return click.option(
        "--foreign",
        is_flag=True,
        help="Trust a run that others own or can write; RUN is its path then.",
    )(function)


def run_argument(function: _Function) -> _Function:
    """`[RUN]`: a name, a job id, a unique prefix, or `-` for the newest, which is the default."""
    return click.argument("run", default="-", metavar="[RUN]", shell_complete=complete_run)(
        function
    )


def yes_option(function: _Function) -> _Function:
    """`--yes`: take the newest run without asking, for scripts."""
    return click.option(
        "-y", "--yes", is_flag=True, help="Without RUN, use the newest and do not ask."
    )(function)


def newest_to_act_on(verb: str, runs: Path) -> RunDir:
    """The newest run, which a command that changes something would take.

    Raises:
        NotFound: there is no run.
        UsageError: no terminal is there to ask; with the words to type.
    """
    from hpctrain.ledger.run.find_run import LATEST, find_run

    run = find_run(LATEST, runs=runs)
    if not sys.stdin or not sys.stdin.isatty():
        raise UsageError(
            f"no run is named; the newest is {_with_state(run)}. Type `hpctrain {verb} "
            f"{run.typed}`, or add --yes to take the newest"
        )
    return run


def ask_to_act(verb: str, run: RunDir) -> None:
    """Ask on the terminal whether this run is meant.

    Raises:
        click.Abort: it is not.
    """
    click.confirm(f"{verb} {_with_state(run)}?", abort=True, err=True)


def _with_state(run: RunDir) -> str:
    """A run's name with what its ledger says of its state, and for how long."""
    from hpctrain.core.base.text import duration
    from hpctrain.ledger.history.run_history import RunHistory

    state = RunHistory.read(run, marks="few").state
    since = f" for {duration(clock.now() - state.t)}" if state.t else ""
    asked = {"cancel": ", cancelled", "save": ", asked to save and stop"}.get(state.cancel, "")
    return f"{run.name} ({state.phase.value}{since}{asked})"


def set_option(text: str) -> Callable[[_Function], _Function]:
    """`--set SECTION.KEY=VALUE`, as often as one likes."""
    return click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="SECTION.KEY=VALUE",
        shell_complete=complete_setting,
        help=text,
    )


def site_option(function: _Function) -> _Function:
    """`--site S`: the cluster's preset."""
    return click.option(
        "--site",
        metavar="S",
        shell_complete=complete_site,
        help="The cluster's preset: a name of `hpctrain sites list`, a file, or none.",
    )(function)


def engine_options(function: _Function) -> _Function:
    """`--engine KIND` and `--mesh AXIS=N,...`: how the model is parallelised."""
    with_mesh = click.option(
        "--mesh",
        metavar="AXIS=N[,AXIS=N...]",
        callback=_mesh,
        help="Ranks along tp, pp, ep, dp_replicate: N or MIN-MAX; data-parallel ranks take the "
        "rest. E.g. tp=4,pp=1-2.",
    )(function)
    return click.option("--engine", type=_Engine(), help="How the model is spread over the ranks.")(
        with_mesh
    )


def config_option(function: _Function) -> _Function:
    """`--config FILE`: the settings file; `submit_request` takes it."""
    return click.option(
        "--config",
        metavar="FILE",
        help="Settings file.  [default: hpctrain.toml if there is one]",
    )(function)


def submission_options(function: _Function) -> _Function:
    """What describes a submission: the job, the site, the program and its settings."""
    for option in reversed(
        (
            job_options,
            engine_options,
            site_option,
            click.option(
                "--name", "-J", help="Run name; by default the script's name and a number."
            ),
            click.option("--container", metavar="IMAGE", help="Container image for the ranks."),
            config_option,
            set_option("Any setting, e.g. train.steps=500."),
            click.option(
                "--env",
                multiple=True,
                metavar="NAME=VALUE",
                help="Environment of the ranks; no secrets.",
            ),
            click.option(
                "--checkpoint",
                multiple=True,
                metavar="PATTERN",
                help="Where PROGRAM saves, e.g. 'out/*.pt' (checkpoint.sealed).",
            ),
            click.option(
                "--resume-args",
                metavar="ARGS",
                help="Arguments to add from the second start on, e.g. --init_from=resume.",
            ),
            click.option(
                "--resume-if", metavar="GLOB", help="Add them if files match instead: 'out/*.pt'."
            ),
            locked_option,
            runs_option,
            json_option,
            click.argument(
                "command", nargs=-1, type=click.UNPROCESSED, metavar="[-- PROGRAM ARGS...]"
            ),
        )
    ):
        function = option(function)
    return function


def submit_request(flags: dict[str, Any], *, time: str = "", **more: Any) -> SubmitRequest:
    """Return the request that a command's keywords describe.

    Args:
        flags: The keywords; those of settings are taken out.
        time: The time limit where none is given; the site's if "".
        **more: More fields of the request.
    """
    from hpctrain.launch.change import flags_of
    from hpctrain.launch.prepare import SubmitRequest

    of_run, config = job_flags(flags), flags.pop("config")
    if time:
        of_run = flags_of(time=time) | of_run
    return SubmitRequest(
        cwd=Path.cwd(),
        environ=os.environ,
        config=Path(config) if config else None,
        ask_accounting=True,
        flags=of_run,
        **flags,
        **more,
    )


class _Engine(click.Choice[str]):
    """The engines; `fsdp`, as people call it, is fsdp2."""

    def __init__(self) -> None:
        super().__init__(keys_of(EngineSettings)["kind"].choices)

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the engine's name."""
        return super().convert("fsdp2" if value == "fsdp" else value, param, ctx)


def profile_options(function: _Function) -> _Function:
    """`--profile steps=A:B,ranks=R,R`: a look at some steps of some ranks."""
    return click.option(
        "--profile",
        metavar="STEPS[,RANKS]",
        callback=_profile,
        help="Trace some steps, e.g. steps=100:103,ranks=0,7; default rank 0, ranks=all for "
        "all; ,memory also records GPU memory.",
    )(function)


def _profile(
    _ctx: click.Context, _param: click.Parameter, value: str | None
) -> dict[str, object] | None:
    from hpctrain.core.settings.check import parse_profile

    return None if value is None else parse_profile(value)


def _mesh(_ctx: click.Context, _param: click.Parameter, value: str | None) -> dict[str, str] | None:
    from hpctrain.core.settings.check import parse_mesh

    return None if value is None else parse_mesh(value)


def since_option(function: _Function) -> _Function:
    """`--since WHEN`: seconds since the epoch, or None."""
    return click.option(
        "--since",
        metavar="WHEN",
        callback=lambda _ctx, _param, value: None if value is None else parse_since(value),
        help="Only newer lines: 10m, 2h, 1d12h, or a time such as 2026-01-31T04:15 or 04:15.",
    )(function)


def parse_since(text: str, now: float | None = None) -> float:
    """The moment that is meant, seconds since the epoch; without a zone, of this machine's.

    Raises:
        UsageError: neither a span of time nor a time.
    """
    moment = clock.now() if now is None else now
    if _SPAN.fullmatch(text):
        parts = re.findall(r"(?<![\d.])([\d.]+)([smhdw])", text)
        return moment - sum(float(number) * _UNITS[unit] for number, unit in parts)
    try:
        if re.fullmatch(r"\d{1,2}:\d\d(:\d\d)?", text):
            of_day = time.fromisoformat(text if text[2] == ":" else f"0{text}")
            then = datetime.combine(datetime.fromtimestamp(moment), of_day)  # noqa: DTZ006 - ours
            if then.timestamp() > moment:  # 23:50, asked after midnight
                then -= timedelta(days=1)  # by the calendar: such a day may have 23 hours or 25
            return then.timestamp()
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise UsageError(
            f"--since {text!r} is neither a span like 10m, 2h, 1d nor a time like 2026-01-31T04:15"
        ) from None


def complete_run(
    ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Runs whose names begin so: of the folder of runs, and of the user's index."""
    import glob

    from click.shell_completion import CompletionItem

    from hpctrain.ledger.run.find_run import indexed

    if "/" in incomplete or incomplete.startswith("."):
        return [CompletionItem(incomplete, type="dir")]
    runs = runs_root(ctx.params.get("runs"))
    folders = runs.glob(f"{glob.escape(incomplete)}*")
    here = sorted(path.name for path in folders if _has_run(RunDir(path)))
    if is_elsewhere(runs):
        return [CompletionItem(name) for name in here]
    names = [*here, *(one.run.name for one in indexed() if one.run.name.startswith(incomplete))]
    return [CompletionItem(name) for name in dict.fromkeys(names)]


def _has_run(run: RunDir) -> bool:
    return os.access(run.spec, os.R_OK) or os.access(run.events, os.R_OK)


def complete_setting(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Settings that begin so, as `--set` takes them."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(f"{n}=") for n in setting_names() if n.startswith(incomplete)]


def complete_site(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Sites whose names begin so; files where it looks like a path."""
    from click.shell_completion import CompletionItem

    from hpctrain.cluster.site.load import site_names

    path = [CompletionItem(incomplete, type="file")]
    if "/" in incomplete or incomplete.startswith("."):
        return path
    try:
        names = site_names()
    except HpctrainError:  # a completion has nowhere to say what is wrong
        return path
    return [CompletionItem(name) for name in names if name.startswith(incomplete)] or path


# ---- what sbatch is asked for

Flags = dict[str, tuple[str, object]]
"""Setting to (the flag's name, its value); a value of None was not given. See `flag_layer`."""
_GPUS = re.compile(r"(?:gpu:)?(?:([A-Za-z][\w.-]*):)?([0-9]{1,4})")
_PROGRAMS_OWN = "a script's own options go behind --, e.g. `-- train.py --lr 3e-4`."


MIN_BEGINNING = 4
"""Of an option's name as one types it: "--ra" may mean anything."""


class _Gpus(click.ParamType[Any]):
    """`N` or `TYPE:N`, also behind `gpu:` as in --gres."""

    name = "gpus"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str | None, int]:
        """Return the type, None where it is not said, and the number."""
        if isinstance(value, tuple):
            return value
        match = _GPUS.fullmatch(value)
        if match is None:
            self.fail(f"{value!r} is not N or TYPE:N, e.g. 4 or a100:4.", param, ctx)
        return match[1], int(match[2])


def job_options(function: _Function) -> _Function:
    """Nodes, GPUs, ranks, time limit, partition and what else sbatch is asked for.

    `job_flags` takes their values out of a command's keywords.
    """
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


_OPTIONS = (
    click.option(
        "--nodes",
        "-N",
        metavar="N|MIN-MAX|auto[+S]",
        help="Nodes; a range takes what there is; S more wait as spares; auto: hpctrain chooses.",
    ),
    click.option(
        "--gpus-per-node", type=_Gpus(), metavar="[TYPE:]G", help="GPUs per node: 4, or a100:4."
    ),
    click.option("--gres", metavar="LIST", help="GPUs in sbatch's spelling: gpu:a100:4."),
    click.option(
        "--ranks-per-node", type=int, metavar="R", help="Ranks per node; one per GPU by default."
    ),
    click.option("--cpus-per-rank", "-c", type=int, metavar="C", help="CPU cores for each rank."),
    click.option("--mem", metavar="SIZE", help="Memory per node, e.g. 64G; 0 for all of it."),
    click.option(
        "--time",
        "-t",
        metavar="LIMIT|auto",
        help="Time limit of one job: 12:00:00, 12h, 90m, 2d; auto: hpctrain chooses it, and the "
        "nodes of a range, so that the run is done soon.",
    ),
    click.option(
        "--prefer",
        type=click.Choice(keys_of(ShapeSettings)["prefer"].choices),
        help="With auto, choose the earliest finish (time), the fewest node-hours (cost), or "
        "the earliest finish at few node-hours (balanced).",
    ),
    click.option(
        "--max-node-hours", type=float, metavar="H", help="What the whole run may take, for auto."
    ),
    click.option("--partition", "-p", help="Partition(s)."),
    click.option("--account", "-A", help="Account to charge."),
    click.option("--qos", "-q", help="Quality of service."),
    click.option("--constraint", "-C", metavar="FEATURES", help="Features of the nodes."),
    click.option("--reservation", help="A reservation to use."),
    click.option("--exclude", "-x", metavar="NODES", help="Nodes to avoid."),
    click.option("--nodelist", "-w", metavar="NODES", help="Nodes that the job must include."),
    click.option("--exclusive", is_flag=True, default=None, help="Whole nodes."),
    click.option("--mail-type", metavar="EVENTS", help="When SLURM sends mail, e.g. END,FAIL."),
    click.option("--mail-user", metavar="ADDRESS", help="To whom."),
    click.option(
        "--sbatch",
        multiple=True,
        metavar="OPTION",
        help="Any other sbatch option, e.g. --sbatch=--switches=1; repeatable.",
    ),
)
_GROUPS = {
    "Job": (
        *("nodes", "gpus_per_node", "ranks_per_node", "time", "partition", "account", "qos"),
        *("prefer", "max_node_hours"),
        *("name", "cpus_per_rank", "mem", "gres", "constraint", "reservation", "exclude"),
        *("nodelist", "exclusive", "mail_type", "mail_user", "sbatch"),
    ),
    "Program": ("env", "container", "snapshot", "new_code", "config", "sets", "site", "cluster"),
    "Restart": ("checkpoint", "resume_args", "resume_if", "begin", "without", "from_step"),
    "Parallel": ("engine", "mesh"),
    "Other runs": ("after", "then"),
    "Look": ("dry_run", "whole", "no_submit", "profile"),
}
"""Names of options by what they are about; `--help` shows them so."""
_OTHER_FLAGS = (*("nodes", "container", "engine", "mesh", "profile", "checkpoint", "snapshot"),)
_AS_TYPED = ("nodelist", "mail_type", "mail_user")
"""Options that go to sbatch as they are."""


def job_flags(values: dict[str, Any]) -> Flags:
    """Take the options that are settings out of a command's keywords, as flags of settings.

    Raises:
        click.UsageError: GPUs are asked for twice, or a `--sbatch` is no option.
        UsageError: of `--nodes`, the number of spares is none.
    """
    from hpctrain.launch.change import FLAGS, flags_of

    kind, count = values.pop("gpus_per_node") or (None, None)
    exclusive = "yes" if values.pop("exclusive") else None
    named = {name: values.pop(name) for name in (*FLAGS, *_OTHER_FLAGS) if name in values}
    flags = flags_of(gpus_per_node=count, **named)
    flags |= {
        "slurm.gpu_type": ("--gpus-per-node", kind),
        "slurm.exclusive": ("--exclusive", exclusive),
    }
    more = [f"--{k.replace('_', '-')}={v}" for k in _AS_TYPED if (v := values.pop(k)) is not None]
    gres = _take_gres(flags, values.pop("gres"))
    more += [f"--gres={gres}"] if gres else []
    for option in values.pop("sbatch"):
        if not option.startswith("-"):
            raise click.UsageError(
                f"--sbatch {option}: not an option of sbatch's; write e.g. --sbatch=--switches=1."
            )
        more.append(option)
    flags["slurm.extra"] = ("--sbatch", more or None)
    return flags


def _take_gres(flags: Flags, gres: str | None) -> str:
    """Take the GPUs out of a `--gres`; what else it asks for."""
    rest = []
    for part in (gres or "").split(","):
        if part != "gpu" and not part.startswith("gpu:"):
            rest.append(part)
            continue
        if "slurm.gpus_per_node" in flags:
            raise click.UsageError(f"--gres {gres} and --gpus-per-node both ask for GPUs; keep one")
        kind, count = _Gpus().convert("1" if part == "gpu" else part, None, None)
        flags["slurm.gpus_per_node"] = ("--gres", count)
        flags["slurm.gpu_type"] = ("--gres", kind)
    return ",".join(filter(None, rest))


class JobCommand(click.Command):
    """Says of an unknown option whether it is sbatch's or the program's, and what to type."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, with a hint where an unknown option was probably meant for somebody else."""
        typed = list(args)  # click takes them out of its list
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            why = _of_sbatch(error.option_name, typed) or self._nearest(error.option_name)
            raise click.UsageError(why, ctx) from None
        for option in self.params:  # click takes the `--` of `-p -- train.py` for a partition
            if ctx.params.get(option.name or "") == "--":
                raise click.BadOptionUsage(option.opts[-1], f"{option.opts[-1]} lacks its value.")
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options in groups, in the order in which people need them."""
        left = {option.name: option for option in self.get_params(ctx)}
        for title, names in _GROUPS.items():
            of_group = [left.pop(name) for name in names if name in left]
            self._write_options(title, of_group, ctx, formatter)
        self._write_options("Other", list(left.values()), ctx, formatter)

    @staticmethod
    def _write_options(
        title: str,
        options: list[click.Parameter],
        ctx: click.Context,
        formatter: click.HelpFormatter,
    ) -> None:
        records = [record for one in options if (record := one.get_help_record(ctx)) is not None]
        if records:
            with formatter.section(title):
                formatter.write_dl(records)

    def _nearest(self, name: str) -> str:
        """An option of ours that is meant, if one looks like it; and where the program's go."""
        own = [text for option in self.params for text in option.opts if text.startswith("--")]
        near = [text for text in own if text.startswith(name) and len(name) > MIN_BEGINNING]
        near = near or nearest(name, own, cutoff=0.8)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return f"no such option {name}{hint}; {_PROGRAMS_OWN}"


def _of_sbatch(name: str, args: list[str]) -> str:
    """What to type in the place of an option that hpctrain lacks and sbatch has; "" for others."""
    from hpctrain.core.settings.external import INSTEAD, OURS, PASSED, REFUSED, name_of

    try:
        option = name_of(name)[2:]
    except UsageError:  # short for several
        return ""
    at = next((n for n, word in enumerate(args) if word.startswith(name)), 0)
    value = args[at][len(name) :].removeprefix("=")
    following = args[at + 1] if at + 1 < len(args) else "-"
    if not value and not following.startswith("-"):
        value = following
    if option in INSTEAD:
        return f"{name}: {INSTEAD[option]}."
    if option in OURS:
        return f"{name}: sbatch's --{option} is hpctrain's to set; use {OURS[option]}."
    if option in REFUSED:
        return f"{name}: {REFUSED[option]}."
    if option in PASSED:
        text = f"--{option}={value}" if value else f"--{option}"
        return f"{name} is an option of sbatch's; pass it on with `--sbatch={shlex.quote(text)}`."
    return ""
