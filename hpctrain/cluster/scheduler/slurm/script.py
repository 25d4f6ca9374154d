"""Render a run's batch script: header, exports, and sbatch/body.sh word for word. Pure.

The #SBATCH lines have no task layout: `--ntasks-per-node` fixes the number of tasks at the first
start, so a `--nodes 2-4` job that lost a node would wait for ever (seen with 22.05). The srun line
has it. For `environment.stage`, `shell_variables` gives sbatch/stage.sh its variables; `outcome`
makes one event of the nodes' answers.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.scheduler.slurm.command import NoCluster, run, submitted_here
from hpctrain.core.base.env import HPCTRAIN_PYTHON, HPCTRAIN_RUN_DIR, HPCTRAIN_TOKEN
from hpctrain.core.base.files import data_dir
from hpctrain.core.base.text import count, fold_nodes
from hpctrain.core.settings.check import allocated, node_range, sbatch_time
from hpctrain.core.settings.external import name_of, names_of
from hpctrain.core.settings.schema import AUTO_STAGE_NODES, Settings, SlurmSettings
from hpctrain.errors import ClusterError, UsageError
from hpctrain.ledger.run.event_fields import is_job_id
from hpctrain.ledger.run.staging import Staging, is_staged, places_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from hpctrain.cluster.site.schema import Site
    from hpctrain.core.settings.spec import Spec
    from hpctrain.ledger.run.event_types import EnvironmentStaged
    from hpctrain.ledger.run.layout import RunDir


EXPORT_NONE = "#SBATCH --export=NONE"
EXPORT_UNSET = "# This site wants no --export."
_EXPORTS = {"none": [EXPORT_NONE], "unset": [EXPORT_UNSET]}
_SAFE = re.compile(r"[\w@%+=:,./-]+", re.ASCII)
_LAYOUT = re.compile(
    r"--(ntasks|tasks|ntasks-per-\w+|tasks-per-node|cpus-per-task|array)(=.*)?|-[nca]\d*(\s.*)?"
)
_ELSEWHERE = re.compile(r"--cl|-M")
"""--clusters and --cluster-constraint, however short."""
_ARRAY = re.compile(r"--ar|-a")
BODY = "body.sh"
_STARTERS = frozenset({"#SBATCH", "sbatch", "srun", "salloc"})

# The setting behind an option that hpctrain writes itself, so that a refusal can name it.
SUBMIT_TIMEOUT_S = 60.0
STAGE, STAGE_NODE = "stage.sh", "stage_node.sh"
_MARK = "hpctrain-stage"
_TO_NODE = "STAGE_NODE"
"""Ends the node's text in a batch script."""
_MOST_REASONS = 5
_SETTINGS = {
    "--mincpus": "slurm.cpus_per_rank",
    "--cpus-per-task": "slurm.cpus_per_rank",
    "--exclusive": "slurm.exclusive",
    "--signal": "slurm.signal_lead_s",
}


def render_script(spec: Spec, run: RunDir, token: str) -> str:
    """Return the batch script of one submission, to be saved as ``run.script(token)``.

    `run` is an absolute path that every node sees; `token` is unique for this submission.

    Raises:
        UsageError: a setting that a batch script cannot hold.
    """
    settings = allocated(spec.settings)
    from hpctrain.cluster.site.schema import (
        site_of,  # not for the batch script, which reads `body_path`
    )

    site = site_of(spec)
    exports = {
        HPCTRAIN_RUN_DIR: str(run.root),
        HPCTRAIN_TOKEN: token,
        HPCTRAIN_PYTHON: spec.python,
    }
    lines = [
        "#!/bin/bash",
        *_header_lines(settings, spec.name, run, token, site),
        *(["#SBATCH --no-kill"] if spec.settings.alive.is_on() else []),
        "",
        "# Written by hpctrain; it is what was submitted, so change settings and resume instead.",
        *(f"export {name}={shlex.quote(value)}" for name, value in exports.items()),
        f"hpctrain_srun_args=({shlex.join(_srun_options(settings, site))})",
        *_setup(module_lines(site), settings, site),
        *_container(spec, run, token, site),
        *script_lines(spec),
        "",
        body_path().read_text().rstrip("\n"),
    ]
    return "\n".join(lines) + "\n"


def body_path() -> Path:
    """Where the common part of all batch scripts lies, for `source` in a hand-written one."""
    return data_dir("sbatch") / BODY


def _srun_options(settings: SlurmSettings, site: Site | None) -> list[str]:
    """What the run adds to the srun line: CPUs of a node's ranks, the site's, the user's own."""
    cpus = settings.cpus_per_rank * settings.ranks()
    options = [f"--cpus-per-task={cpus}"] if cpus else []
    if site is not None:
        options += ["--export=ALL"] if site.slurm.export == "none" else []
        options += [f"--mpi={site.slurm.mpi}"] if site.slurm.mpi else []
        options += site.slurm.srun_args
    return [*options, *settings.srun_args]


def _header_lines(
    settings: SlurmSettings, name: str, run: RunDir, token: str, site: Site | None = None
) -> list[str]:
    """All #SBATCH lines, in a fixed order."""
    check_options(settings, site, {})
    options = [
        ("job-name", name),
        *_asked_options(settings, site),
        ("open-mode", "append"),
        ("output", pattern(str(run.jobs / f"{token}.out"))),
    ]
    flags = [*_requeue(site), *(["--exclusive"] if is_exclusive(settings, site) else [])]
    written = [*(f"--{option}={value}" for option, value in options if value), *flags]
    theirs = [_site_option(o, settings, site) for o in _more_options(settings, site, written)]
    more = [*theirs, *settings.extra]
    return [
        *(f"#SBATCH --{option}={quote(value)}" for option, value in options if value),
        *(f"#SBATCH {flag}" for flag in flags),
        *(_EXPORTS.get(site.slurm.export, []) if site else []),
        *(f"#SBATCH {quote(option)}" for option in more),
    ]


def _asked_options(settings: SlurmSettings, site: Site | None) -> list[tuple[str, str]]:
    """The options that the settings ask for, with their values; "" for what is not asked for."""
    cpus = settings.cpus_per_rank * settings.ranks()
    return [
        ("nodes", settings.nodes),
        *_gpu_options(settings, site),
        ("mincpus", str(cpus) if cpus else ""),
        ("mem", settings.mem),
        ("time", sbatch_time(settings.time)),
        ("partition", settings.partition),
        ("account", settings.account),
        ("qos", settings.qos),
        ("constraint", constraint(settings, site)),
        ("reservation", settings.reservation),
        ("exclude", settings.exclude),
        ("network", network(settings, site)),
        ("signal", f"USR2@{settings.signal_lead_s}" if settings.signal_lead_s else ""),
    ]


def check_options(settings: SlurmSettings, site: Site | None, origins: Mapping[str, str]) -> None:
    """Refuse what the site does not let through, before a job is made; nothing without a preset.

    Raises:
        UsageError: a forbidden option, one that contradicts a required one, or another launcher.
    """
    if site is None:
        return
    _refuse_launcher(site)
    asked = [f"--{option}={value}" for option, value in _asked_options(settings, site) if value]
    asked += ["--exclusive"] if is_exclusive(settings, site) else []
    theirs = [(option, setting_of(option)) for option in asked] + asked_by_user(settings)
    _refuse_forbidden(theirs, site, origins)
    _more_options(settings, site, asked)


def is_exclusive(settings: SlurmSettings, site: Site | None = None) -> bool:
    """Whether whole nodes are asked for; by default where no GPUs are and the site lets one ask."""
    if settings.exclusive == "auto":
        return settings.gpus_per_node == 0 and not is_forbidden("--exclusive", site)
    return settings.exclusive == "yes"


def export_arguments(script: str) -> list[str]:
    """What sbatch's command line has to say of --export for a script of ours.

    It says ALL, so that no SBATCH_EXPORT or site default decides; not where the site's preset does.
    """
    header = script.partition("\n\n")[0].splitlines()
    return [] if EXPORT_NONE in header or EXPORT_UNSET in header else ["--export=ALL"]


def dependency(after: Sequence[str]) -> str:
    """The jobs that must have ended well, as --dependency takes them; "" for none.

    Raises:
        ClusterError: the ledger of a run names no job's id.
    """
    for job_id in after:
        if not is_job_id(job_id):
            raise ClusterError(f"the job is to wait for the job {job_id!r}, which is no job's id")
    return ":".join(["afterok", *after]) if after else ""


def _requeue(site: Site | None) -> list[str]:
    """Said in any case, since JobRequeue differs between sites."""
    flag = "--no-requeue" if site and site.slurm.requeue is False else "--requeue"
    return [] if is_forbidden(flag, site) else [flag]


def quote(value: str) -> str:
    """The value as one word of a #SBATCH line.

    sbatch has a parser of its own: a backslash escapes even inside single quotes, and an escaped
    space still ends the word. So a shell's quoting is read differently; this form is read right.

    Raises:
        UsageError: the value has a line break, which would end the header's line.
    """
    if "\n" in value or "\r" in value:
        raise UsageError(f"{value!r} has a line break: a batch script's header cannot hold it")
    if _SAFE.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def pattern(path: str) -> str:
    """The path for --output, where SLURM would read `%j` in a directory's name as the job's id.

    Raises:
        UsageError: the path has a backslash, by which SLURM turns patterns off and which it drops.
    """
    if "\\" in path:
        raise UsageError(
            f"{path!r} has a backslash, which SLURM's file names cannot hold: choose another place"
        )
    return path.replace("%", "%%")


def _site_option(option: str, settings: SlurmSettings, site: Site | None) -> str:
    """One of the site's options; a task layout only where the number of nodes is fixed anyway."""
    if site is not None and (_ELSEWHERE.match(option) or _ARRAY.match(option)):
        raise UsageError(
            f"{site.where('slurm')} wants {option}: a run is one job, of the cluster on which it "
            "is submitted"
        )
    least, most = node_range(settings.nodes)
    if site is not None and _LAYOUT.fullmatch(option) and least != most:
        raise UsageError(
            f"slurm.nodes is {settings.nodes}, and {site.where('slurm')} wants {option}, with "
            "which the job could not come back on fewer nodes: give one number of nodes"
        )
    return option


def _setup(modules: Sequence[str], settings: SlurmSettings, site: Site | None) -> list[str]:
    """The site's and the user's shell lines, as a function: the body calls it once it has traps."""
    if not modules and not settings.setup:
        return []
    lines = []
    if modules and site is not None:
        where = shlex.quote(f"[modules], {site.where('modules')}")
        lines += [f"hpctrain_lines_of={where}", *modules]
    if settings.setup:
        lines += ["hpctrain_lines_of=slurm.setup", *settings.setup]
    # Then a status that is not 0 is a `return` of one of the lines.
    may_fail = ["hpctrain_setup_may_fail=1"] if settings.setup_may_fail else []
    return [*may_fail, "hpctrain_setup() {", *lines, ":", "}"]


def _container(spec: Spec, run: RunDir, token: str, site: Site | None) -> list[str]:
    if not spec.settings.container.image:
        return []
    from hpctrain.cluster.scheduler.slurm.container import container_lines  # which few runs need

    return container_lines(spec, run, token, site)


# ---- what a site demands and refuses


def _gpu_options(settings: SlurmSettings, site: Site | None) -> list[tuple[str, str]]:
    """How the GPUs of a job are asked for here."""
    count = settings.gpus_per_node
    if not count:
        return []
    style = site.slurm.gpu_request if site else "gpus-per-node"
    if site is None or style == "gpus-per-node":
        return [("gpus-per-node", settings.gpus_text())]
    if style == "none":
        return []
    if style == "gres":
        name, _, kind = site.slurm.gres_name.partition(":")
        return [("gres", f"{name}:{settings.gpus_text(kind)}")]
    least, most = node_range(settings.nodes)
    if least != most:
        raise UsageError(
            f"slurm.nodes is {settings.nodes}, and {site.where('slurm', 'gpu_request')} asks for "
            f"GPUs by --{style}, which fixes their number for the whole job: give one number of "
            "nodes"
        )
    if style == "gpus":
        return [("gpus", replace(settings, gpus_per_node=count * most).gpus_text())]
    # It means nothing without a number of tasks: one on each node, as in the srun line.
    return [("ntasks-per-node", "1"), ("gpus-per-task", settings.gpus_text())]


def constraint(settings: SlurmSettings, site: Site | None) -> str:
    """The user's node features and the site's, both of them."""
    theirs, own = site.slurm.constraint if site else "", settings.constraint
    if not theirs or not own or theirs == own or theirs in own.split("&"):
        return own or theirs
    return f"{theirs}&({own})" if "|" in own else f"{theirs}&{own}"


def network(settings: SlurmSettings, site: Site | None) -> str:
    """The user's --network with what the site requires of it."""
    parts = [part for part in settings.network.split(",") if part]
    for option in _required(site):
        if name_of(option) == "--network":
            parts += [p for p in option.partition("=")[2].split(",") if p and p not in parts]
    return ",".join(parts)


def _more_options(settings: SlurmSettings, site: Site | None, header: Iterable[str]) -> list[str]:
    """Return the site's options that `header` lacks; the user's win over the site's extras."""
    if site is None:
        return []
    given = [*header, *settings.extra]
    written = {name: option for option in given for name in names_of(option)}
    options: list[str] = []
    for option in _required(site):
        name = name_of(option)
        if name == "--network":
            continue  # joined with the user's, above
        if name not in written:
            options.append(option)
        elif written[name] != option:
            raise UsageError(
                f"{written[name]} does not go with {site.where('slurm', 'required')}, which "
                f"requires {option}: leave it out"
            )
    names = {*written, *map(name_of, options)}
    return options + [option for option in site.slurm.extra if name_of(option) not in names]


def _refuse_launcher(site: Site) -> None:
    """Refuse a site whose launcher cannot start agents: one on each node, signalled by SLURM."""
    launcher = site.slurm.launcher
    if launcher != "srun":
        raise UsageError(
            f"{site.where('slurm', 'launcher')}: the launcher is {launcher}, and hpctrain starts "
            "its agents by srun, one on each node; where "
            "`srun --ntasks-per-node=1 hostname` works in a job, say so in a site file of your "
            'own: slurm.launcher = "srun"'
        )


def _refuse_forbidden(
    options: Iterable[tuple[str, str]], site: Site | None, origins: Mapping[str, str]
) -> None:
    """Refuse options that sbatch rejects here, before it does."""
    refused = site.slurm.forbidden if site else ()
    forbidden = {name for option in refused for name in names_of(option)}
    for option, path in options:
        if site is not None and forbidden.intersection(names_of(option)):
            origin = origins.get(path, "default")
            raise UsageError(
                f"{origin}: {path} asks for {option}, which "
                f"{site.where('slurm', 'forbidden')} says is refused here: leave it out"
            )


def is_forbidden(option: str, site: Site | None) -> bool:
    """Whether sbatch rejects an option here."""
    return site is not None and name_of(option) in {name_of(one) for one in site.slurm.forbidden}


def asked_by_user(settings: SlurmSettings) -> list[tuple[str, str]]:
    """Options among the settings' own texts: extras, srun's, and those in setup lines."""
    options = [(option, "slurm.extra") for option in settings.extra]
    options += [(option, "slurm.srun_args") for option in settings.srun_args]
    return options + [(word, "slurm.setup") for line in settings.setup for word in _options(line)]


def setting_of(option: str) -> str:
    """The setting by which a user can change an option that hpctrain writes."""
    name = name_of(option)
    if name in {"--gres", "--gpus", "--gpus-per-node", "--gpus-per-task", "--ntasks-per-node"}:
        return "slurm.gpus_per_node"
    return _SETTINGS.get(name, f"slurm.{name[2:].replace('-', '_')}")


def module_lines(site: Site | None) -> list[str]:
    """Shell lines that load the site's modules."""
    if site is None:
        return []
    modules = site.modules
    lines = [f"source {shlex.quote(modules.init)}"] if modules.init else []
    lines += ["module purge"] if modules.purge else []
    lines += [f"module use {shlex.quote(path)}" for path in modules.use]
    return lines + [f"module load {shlex.quote(name)}" for name in modules.load]


def _required(site: Site | None) -> Sequence[str]:
    return site.slurm.required if site else ()


def _options(line: str) -> list[str]:
    """Options of a setup line that speaks to SLURM; nothing of other lines, whose flags differ."""
    try:
        words = shlex.split(line, comments=False)
    except ValueError:  # an open quote: bash will say so
        words = line.split()
    if not words or words[0] not in _STARTERS:
        return []
    return [word for word in words[1:] if word.startswith("-") and word.strip("-")]


def notes_of(settings: Settings, site: Site | None) -> list[str]:
    """What `environment.stage` will do, for the user to read."""
    if not is_staged(settings):
        least = f"fewer than {AUTO_STAGE_NODES} nodes"
        return [] if settings.container.image else [f"environment.stage auto: not with {least}"]
    places = ", ".join(places_of(settings, site.storage.local if site else ""))
    return [f"environment.stage: nodes start from a copy of their Python, in the first of {places}"]


def script_lines(spec: Spec) -> list[str]:
    """What a batch script has of stage.sh and stage_node.sh; nothing where nothing is staged."""
    if not is_staged(spec.settings):
        return []
    folder = data_dir("sbatch")
    return [
        f"IFS= read -r -d '' hpctrain_stage_node <<'{_TO_NODE}'",
        (folder / STAGE_NODE).read_text().rstrip("\n"),
        _TO_NODE,
        "",
        (folder / STAGE).read_text().rstrip("\n"),
    ]


def shell_variables(staging: Staging) -> list[str]:
    """Assignments for the batch script, one a line."""
    archive = staging.archive
    values = {
        "wanted": "1",
        "why": staging.why,
        "timeout": f"{staging.timeout_s:.0f}",
        "archive": archive.path if archive else "",
        "key": archive.key if archive else "",
        "sha256": archive.sha256 if archive else "",
        "bytes": str(archive.size_bytes if archive else 0),
        "unpacked": str(archive.unpacked_bytes if archive else 0),
        "files": str(archive.files if archive else 0),
        "compress": archive.compress if archive else "",
        "prefix": archive.prefix if archive else "",
        "python": archive.python if archive else "",
    }
    places = " ".join(map(shlex.quote, staging.places))
    lines = [f"hpctrain_stage_{name}={shlex.quote(value)}" for name, value in values.items()]
    return [*lines, f"hpctrain_stage_places=({places})"]


def outcome(
    lines: Iterable[str],
    nodes: Sequence[str],
    job: tuple[str, int],
    *,
    way: str,
    seconds: float,
    why: str,
) -> EnvironmentStaged:
    """Return one event of what all nodes have said.

    `lines` are `hpctrain-stage NODE WORD ...` of stage_node.sh. `job` is its id and restarts; `way`
    is "sbcast" or "read". `seconds` is for all of it; `why` says why no node was asked, or "".
    """
    from hpctrain.ledger.run.event_types import EnvironmentStaged

    outcomes: dict[str, tuple[str, str]] = {}
    for line in lines:
        mark, _, rest = line.strip().partition(" ")
        node, _, said = rest.partition(" ")
        if mark == _MARK and node:
            word, _, detail = said.partition(" ")
            outcomes[node] = (word, detail)
    silent = {node: ("no", why or "no answer") for node in nodes if node not in outcomes}
    outcomes |= silent
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for node, (word, detail) in outcomes.items():
        if word not in {"staged", "reused"}:
            reasons[detail or word].append(node)
    roots = sorted({detail for word, detail in outcomes.values() if word in {"staged", "reused"}})
    facts: dict[str, Any] = {
        "staged": sum(word == "staged" for word, _ in outcomes.values()),
        "reused": sum(word == "reused" for word, _ in outcomes.values()),
        "not_staged": sum(map(len, reasons.values())),
        "folder": roots[0] if roots else "",
        "way": way if any(word == "staged" for word, _ in outcomes.values()) else "",
        "why": _reasons(reasons),
        "job_id": job[0],
        "restarts": job[1],
    }
    return EnvironmentStaged(seconds=seconds, **facts)


def _reasons(reasons: dict[str, list[str]]) -> str:
    """Why nodes go without, the most frequent first."""
    ordered = sorted(reasons.items(), key=lambda item: -len(item[1]))
    words = [f"{fold_nodes(nodes)}: {why}" for why, nodes in ordered[:_MOST_REASONS]]
    left = len(ordered) - _MOST_REASONS
    return "; ".join([*words, *([f"{count(left, 'more reason')}"] if left > 0 else [])])


def sbatch(script: Path, after: Sequence[str] = (), *, timeout_s: float = SUBMIT_TIMEOUT_S) -> str:
    """Submit a script that is already written, and return the job's id.

    Args:
        script: Its name is how a job is found again after a submission that gave no answer.
        after: Jobs that must have ended well before.
        timeout_s: After this long sbatch is killed, and the job may or may not be in the queue.

    Raises:
        ClusterError: refused; nothing was started.
        ClusterUnreachable: no answer in time; the job may or may not have been accepted.
    """
    waits = [f"--dependency={dependency(after)}", "--kill-on-invalid-dep=no"] if after else []
    arguments = [*export_arguments(script.read_text(errors="replace")), *waits]
    command = ["sbatch", "--parsable", *arguments, str(script)]
    try:
        answer = run(command, timeout_s=timeout_s, query=False)
    except NoCluster as error:  # it was sent to nobody
        raise ClusterError(str(error)) from None
    return submitted_here(answer)
