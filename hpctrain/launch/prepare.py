"""From what was asked to a checked spec, and from the spec to a run directory.

`prepare` reads and decides, `create_run` writes. Nothing is left behind when a check fails. The job
is `launch.py`'s.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.cluster.scheduler.base import (
    SCHEDULERS,
    Accounting,
    Cluster,
    default_cluster,
    get_cluster,
)
from hpctrain.cluster.site.load import user_folder
from hpctrain.core.base import clock
from hpctrain.core.base.files import (
    absolute,
    can_be_replaced,
    make_run_folder,
    make_runs_folder,
    remove_runs_folder,
)
from hpctrain.core.settings.check import check
from hpctrain.core.settings.layers import (
    AUTO,
    ENV_SECTION,
    SettingsFile,
    flag_layer,
    from_flag,
    from_table,
    from_toml,
    read_toml,
    resolve,
)
from hpctrain.core.settings.spec import (
    Entry,
    SecretFinding,
    Spec,
    secret_warnings,
    secrets_in,
    secrets_of,
)
from hpctrain.errors import ChecksFailed, ClusterError, RunExists, UsageError
from hpctrain.launch.change import (
    SiteChoice,
    changed,
    changed_by_shell,
    dropped_locks,
    find_site,
    take_locks,
)
from hpctrain.launch.checks import (
    check_disk,
    check_hooks_here,
    check_sealed,
    check_versions,
    memory_notes,
    other_environment,
    plan_meshes,
    ranks_python,
    runs_inside,
    with_own_places,
)
from hpctrain.launch.launchers import disagreements
from hpctrain.launch.program import SHELLS, NamedProgram, read_program, refuse_absent
from hpctrain.ledger.run.layout import RunDir
from hpctrain.ledger.run.ownership import refuse_planted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpctrain.cluster.site.schema import Site
    from hpctrain.core.base.mesh import Mesh
    from hpctrain.core.settings.schema import RunSettings, Settings
    from hpctrain.launch.after import Awaited
    from hpctrain.launch.snapshot import Checkout

    LintProgram = Callable[[Entry, Settings, Path], list[str]]

CONFIG_NAME = "hpctrain.toml"
RECIPE_NAME = "lm"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_NAME_LENGTH = 100
_NAME_TRIES = 100


@dataclass(frozen=True)
class SubmitRequest:
    """What `hpctrain submit` was asked; None and empty stand for "not given"."""

    cwd: Path
    environ: Mapping[str, str]
    """The submitting shell's environment: read for PATH and HPCTRAIN_*, never stored."""
    runs: Path
    """Folder of all runs, relative to cwd."""
    command: Sequence[str] = ()
    """PROGRAM ARGS..., empty for the shipped recipe."""
    flags: Mapping[str, tuple[str, object]] = field(default_factory=dict)
    """Settings that were given by flags, as `change.flags_of` makes them."""
    site: str | None = None
    cluster: str | None = None
    name: str | None = None
    config: Path | None = None
    sets: Sequence[str] = ()
    env: Sequence[str] = ()
    begin: str = ""
    """RUN[@STEP]: the checkpoint of another run that this one begins with."""
    without: Sequence[str] = ()
    """What of it is left out."""
    after: Sequence[str] = ()
    """Runs that must be done before this one begins, as users name runs."""
    then: Sequence[str] = ()
    """Command lines to run when it is done, each after the one before it."""
    allow_locked: bool = False
    """The user may change what the site's admins have locked; it is recorded."""
    accounting: Accounting | None = None
    """Whom to ask for the user's accounts."""
    ask_accounting: bool = False
    """Where nobody is named, ask the scheduler's own; otherwise its refusal must do."""
    ask_partitions: bool = False
    """Ask it too what its partitions have; a dry run does without, to be quick."""
    imports_needed: bool = True
    """False where a program's imports are tried besides."""
    cluster_needed: bool = True
    """False for a dry run: a script can be shown where there is no scheduler."""
    lint: LintProgram | None = None
    """Gives lint's notes on the program; None where nobody reads them, or lint is run besides."""


@dataclass(frozen=True)
class Prepared:
    """A run that could be made."""

    spec: Spec
    runs: Path
    """Absolute."""
    auto_name: bool
    """The name was not chosen by the user, so another free one will do."""
    new_parent: Path | None
    """The topmost folder that making the run would add, above the run's own."""
    meshes: dict[int, Mesh]
    """At the fewest and at the most nodes."""
    notes: list[str] = field(default_factory=list)
    """What was adapted or has no effect, for the user to read."""
    secrets: list[SecretFinding] = field(default_factory=list)
    """What must not be shown."""
    awaited: list[Awaited] = field(default_factory=list)
    """Runs for whose jobs its own would wait."""
    following: list[Spec] = field(default_factory=list)
    """Runs that are to be made with it, one behind the other."""


def prepare(request: SubmitRequest) -> Prepared:
    """Merge the settings and check everything that can be checked. Writes nothing.

    Raises:
        UsageError: a flag, a setting or a file is wrong, or some number of nodes has no mesh.
        NotFound: there is no such script, site or settings file.
        ClusterError: a scheduler was asked for that is not here.
        RunExists: there is a run of that name.
        ChecksFailed: the run directory could not be written, or the container could not start.
    """
    configs = _read_configs(request)
    cluster = _choose_cluster(request, configs)
    site_choice = _find_site(request, configs, cluster)
    site = site_choice.site
    accounting = _accounting(request, cluster)
    shell = cluster.shell_layer(request.environ, site)
    lower = [site.layer if site else None, shell, *(one.layer for one in configs)]
    flags = flag_layer(request.flags, request.sets)
    given, origins = _settled(*resolve([*filter(None, lower), flags]), site, accounting)
    program = NamedProgram(Entry(kind="recipe", cwd=str(request.cwd)))
    if request.command:
        inside = runs_inside(given, cluster)
        program = read_program(request.command, request.cwd, request.environ, inside=inside)
    entry = program.entry
    is_recipe = entry.kind == "recipe"
    chosen = check(given, origins)
    notes = [*program.notes, *site_choice.notes, *chosen.notes]
    python = ranks_python(given, cluster, sys.executable)
    notes += check_hooks_here(given, origins, request.cwd, python=python)
    env, env_origins = _environment(request, configs, program.env)
    unlocked = [] if cluster.on_this_machine else dropped_locks(request.environ, site_choice)
    if unlocked:
        notes.append(
            f"locks that do not hold because another site was named: {', '.join(unlocked)}"
        )
    if site is not None:
        changes = changed(site, given, origins, env, env_origins) | changed_by_shell(
            site, request.environ, env
        )
        lock_notes, changed_paths = take_locks(site, changes, allow=request.allow_locked)
        notes += lock_notes
        unlocked += changed_paths
        now = chosen.upon(given, origins)
        here = cluster.check(*now, site, is_script=not is_recipe, accounting=accounting)
        notes += here.notes
        chosen += here
    settings, origins = chosen.upon(given, origins)
    secrets = secrets_of(settings, env, entry.args, env_origins=env_origins, origins=origins)
    notes += secret_warnings(secrets)
    runs = absolute(request.cwd, request.runs)
    if who := can_be_replaced(runs):
        notes.append(
            "your job ends where somebody has put another run in the place of yours, and "
            f"{runs} {who}"
        )
    if program.asked:
        notes += disagreements(program.asked, settings.slurm)
    notes += [
        *(request.lint(entry, settings, request.cwd) if request.lint is not None else ()),
        *_resume_note(settings.run, entry),
        *_without_effect(origins, cluster, entry),
        *cluster.notes(settings, origins, site, accounting),
        *check_versions(settings, cluster.setup_lines(site), python=python),
        *memory_notes(settings, cluster),
        *_python_notes(
            request,
            settings,
            env,
            entry,
            setup=cluster.setup_lines(site),
            is_own=python == sys.executable,
        ),
    ]
    settings, more = cluster.check_container(
        settings, origins, site, folder=request.cwd, environ=request.environ, accounting=accounting
    )
    settings, planned, plan_notes = plan_meshes(settings, origins, request.cwd, is_recipe=is_recipe)
    notes += more + plan_notes
    name, new_parent = _find_place(request, runs, entry)
    as_given = (entry, settings, env)
    entry, settings, env = with_own_places(*as_given, runs / name)
    spec = Spec(
        name=name,
        run_id=os.urandom(8).hex(),
        created=clock.now(),
        cluster=cluster.name,
        site=site.name if site else "",
        entry=entry,
        settings=settings,
        origins=origins,
        chosen=list(chosen.changes),
        env=env,
        env_origins=env_origins,
        dropped_env=cluster.dropped(request.environ, site),
        python=sys.executable,
        preset=site.as_plain() if site else None,
        unlocked=unlocked,
    )
    # Where the name stands in what was given, another one would not fit any more.
    auto = request.name is None and (entry, settings, env) == as_given
    return _with_others(
        Prepared(spec, runs, auto, new_parent, planned, notes, secrets), request, accounting
    )


def _settled(
    given: Settings, origins: dict[str, str], site: Site | None, accounting: Accounting | None
) -> tuple[Settings, dict[str, str]]:
    """With numbers in the place of `--time auto` and `--nodes auto`."""
    if AUTO not in {given.slurm.time, given.slurm.nodes}:
        return given, origins
    from hpctrain.launch.shape import settle_auto

    return settle_auto(given, origins, site, accounting)


def _accounting(request: SubmitRequest, cluster: Cluster) -> Accounting | None:
    """Whom to ask, as far as the request lets one ask."""
    asked = request.accounting or (cluster.accounting() if request.ask_accounting else None)
    if asked is None or request.ask_partitions:
        return asked
    return replace(asked, partitions=lambda: None)


def _with_others(
    prepared: Prepared, request: SubmitRequest, accounting: Accounting | None
) -> Prepared:
    """Put into the spec what runs beside, before and after the run."""
    spec, runs, notes = prepared.spec, prepared.runs, list(prepared.notes)
    awaited = _look_after(request, spec, runs, notes) if request.after else []
    check_sealed(spec.settings, spec.entry.cwd, runs / spec.name, spec.after)
    of_others: list[str] = []
    if spec.settings.evaluate.script:
        from hpctrain.launch.after import take_beside

        of_others += take_beside(spec, request.environ, accounting=accounting)
    following: list[Spec] = []
    if request.then:
        from hpctrain.launch.after import take_then

        following, more = take_then(
            spec, request.then, runs, request.environ, accounting=accounting
        )
        of_others += more
    # What holds for the run itself has been said of it: each is "SECTION: NOTE".
    notes += [note for note in dict.fromkeys(of_others) if note.partition(": ")[2] not in notes]
    theirs = dict.fromkeys(secret for other in following for secret in secrets_in(other))
    more_secrets = [secret for secret in theirs if secret not in prepared.secrets]
    return replace(
        prepared,
        notes=notes + secret_warnings(more_secrets),
        secrets=prepared.secrets + more_secrets,
        awaited=awaited,
        following=following,
    )


def _look_after(request: SubmitRequest, spec: Spec, runs: Path, notes: list[str]) -> list[Awaited]:
    """Put the predecessors into the spec; those that must be waited for."""
    from hpctrain.launch.after import check_after, find_predecessors, refuse_circle

    spec.after = find_predecessors(request.after, request.name, runs)
    refuse_circle(runs / spec.name, spec.after)
    try:
        return check_after(runs / spec.name, spec)
    except (UsageError, ClusterError) as error:
        if request.cluster_needed:
            raise
        notes.append(f"as things are, its job would be refused: {error}")
        return []


def create_run(spec: Spec, runs: Path, *, auto_name: bool = False) -> RunDir:
    """Make the run's directory with its spec.json; of two at once exactly one does.

    Where the name is taken by now, `auto_name` counts on and changes `spec.name`.

    Raises:
        RunExists: there is a run of that name.
        ChecksFailed: the directory cannot be written; nothing is left of it.
    """
    for _ in range(_NAME_TRIES):
        root = runs / spec.name
        try:
            make_runs_folder(runs)
            make_run_folder(root, group=spec.settings.run.group_writable)
            break
        except FileExistsError:
            if not auto_name or not root.exists():
                _refuse_existing(root)
                raise _cannot_write(root, "another file is in its place") from None
            spec.name = free_name(runs, spec.name.rpartition("-")[0])
        except OSError as error:
            raise _cannot_write(root, error.strerror) from None
    else:
        raise RunExists(f"{_NAME_TRIES} names were taken while trying; choose one with --name")
    run = RunDir(root)
    try:
        spec.dump(run.spec)
    except BaseException as error:
        discard_run(run)
        if isinstance(error, OSError):
            raise _cannot_write(root, error.strerror) from None
        raise
    return run


def make_run(prepared: Prepared, checkout: Checkout | None) -> RunDir:
    """Make the run's directory with its spec and the copy of its code, or nothing at all.

    Raises:
        RunExists: there is a run of that name.
        ChecksFailed: something cannot be written.
    """
    try:
        run = create_run(prepared.spec, prepared.runs, auto_name=prepared.auto_name)
    except BaseException:
        _remove_empty(prepared.runs, prepared.new_parent)
        raise
    try:
        if checkout is not None:
            from hpctrain.launch.snapshot import take_snapshot

            take_snapshot(run, prepared.spec, checkout)
            prepared.spec.dump(run.spec)
    except BaseException:
        discard_run(run, prepared.new_parent)
        raise
    return run


def discard_run(run: RunDir, new_parent: Path | None = None) -> None:
    """Take back a run that was never submitted, and the empty folders that were made for it.

    `new_parent` is the topmost folder above it that was made for it; it stays if it has other runs.
    """
    shutil.rmtree(run.root)
    _remove_empty(run.root.parent, new_parent)


def _remove_empty(folder: Path, new_parent: Path | None) -> None:
    """Remove the folder and those above it up to the topmost new one, as far as they are empty."""
    if new_parent is None:
        return
    for place in (folder, *folder.parents):
        with contextlib.suppress(OSError):  # never made, or somebody else has put a run there
            remove_runs_folder(place)
        if place == new_parent:
            return


def free_name(runs: Path, stem: str) -> str:
    """The stem with the next number that no run of that stem has had."""
    numbered = re.compile(re.escape(stem) + r"-(\d+)")
    try:
        names = [path.name for path in runs.iterdir()]
    except FileNotFoundError:
        names = []
    taken = [int(match[1]) for match in map(numbered.fullmatch, names) if match]
    return f"{stem}-{max(taken, default=0) + 1}"


def _read_configs(request: SubmitRequest) -> list[SettingsFile]:
    """The settings files that count, the lowest first: the user's own, and the project's."""
    folder = user_folder(request.environ)
    unnamed = [] if folder is None else [folder / CONFIG_NAME]
    unnamed += [] if request.config else [request.cwd / CONFIG_NAME]
    files = []
    for path in unnamed:
        if path.exists():
            shown = CONFIG_NAME if path.parent == request.cwd else str(path)
            refuse_planted(path, flag=f"--config {shown}")
            files.append(read_toml(path, shown=shown))
    if request.config:
        files.append(read_toml(request.cwd / request.config, shown=str(request.config)))
    return [from_toml(file, name=file.shown, top=("cluster", "site")) for file in files]


def _naming(configs: Sequence[SettingsFile], key: str) -> SettingsFile | None:
    """The uppermost file that has such a key outside of its tables."""
    return next((config for config in reversed(configs) if config.top.get(key)), None)


def _choose_cluster(request: SubmitRequest, configs: Sequence[SettingsFile]) -> Cluster:
    config = _naming(configs, "cluster")
    given = config.top["cluster"] if config else None
    name = request.cluster or given or default_cluster(request.environ)
    where = config.layer.where("cluster", "") if config and not request.cluster else "--cluster"
    if name not in SCHEDULERS:
        takes = " or ".join(SCHEDULERS)
        raise UsageError(f'{where}: there is no cluster "{name}"; it takes {takes}')
    cluster = get_cluster(name)
    if request.cluster_needed and (why := cluster.missing(request.environ)):
        raise ClusterError(f"{where}: {name} was asked for and {why}, or use --cluster local")
    return cluster


def _find_site(
    request: SubmitRequest, configs: Sequence[SettingsFile], cluster: Cluster
) -> SiteChoice:
    project = (request.cwd / request.config).parent if request.config else request.cwd
    config = _naming(configs, "site")
    return find_site(request.site, request.environ, config, project, cluster.site)


def _without_effect(origins: Mapping[str, str], cluster: Cluster, entry: Entry) -> list[str]:
    """Flags that will change nothing, so that none is ignored in silence."""
    notes: list[str] = []
    for path, origin in origins.items():
        section, _, key = path.partition(".")
        if not origin.startswith("flag "):
            continue
        if section == "slurm" and key in cluster.without_effect:
            notes.append(f"{origin[5:]} has no effect with --cluster {cluster.name}")
        if entry.kind != "recipe" and section == "train":
            script = Path(entry.path).name
            notes.append(f"{origin[5:]} is the shipped recipe's; {script} has its own settings")
    return notes


def _python_notes(
    request: SubmitRequest,
    settings: Settings,
    env: Mapping[str, str],
    entry: Entry,
    *,
    setup: Sequence[str],
    is_own: bool,
) -> list[str]:
    """What to know of the Python that runs the ranks, where it is the one that runs this."""
    if not is_own:
        return []
    notes = other_environment(request.environ, entry)
    if not request.imports_needed:
        return notes
    places = env.get("PYTHONPATH", "").split(os.pathsep)
    more = [str(request.cwd / place) for place in places if place]
    return notes + refuse_absent(entry, more, brought=bool(settings.slurm.setup or setup))


def _resume_note(run: RunSettings, entry: Entry) -> list[str]:
    if not run.resume_args:
        return []
    if entry.kind == "recipe":
        return ["run.resume_args are for a program behind --; the shipped recipe resumes by itself"]
    when = f"where {run.resume_if} matches" if run.resume_if else "from the second start on"
    sealed = ", or where it has a registered checkpoint"
    if "{checkpoint}" in run.resume_args or "{step}" in run.resume_args:
        when, sealed = "where it has a registered checkpoint", ""
    return [f"added to the program's arguments {when}{sealed}: {run.resume_args}"]


def _environment(
    request: SubmitRequest,
    configs: Sequence[SettingsFile],
    launcher: Mapping[str, tuple[str, str]],
) -> tuple[dict[str, str], dict[str, str]]:
    """What the user sets for the ranks, and where: settings files < launcher's < flags.

    The site's part is derived for each attempt (`site/environment.py`), below all of this.
    """
    env: dict[str, str] = {}
    origins: dict[str, str] = {}
    for layer, table in ((config.layer, config.env) for config in configs):
        places = {name: layer.where(ENV_SECTION, name) for name in table}
        env |= from_table(table, places.__getitem__)
        origins |= places
    for name, (value, said) in launcher.items():
        env[name] = value
        origins[name] = said
    for text in request.env:
        name, value = from_flag(text)
        env[name] = value
        origins[name] = "flag --env"
    return env, origins


def _find_place(request: SubmitRequest, runs: Path, entry: Entry) -> tuple[str, Path | None]:
    """The run's name, and the topmost folder above it that is missing."""
    new_parent = _check_writable(runs)
    stem = RECIPE_NAME if entry.kind == "recipe" else _legal(_stem(entry))
    name = _check_name(request.name) if request.name is not None else free_name(runs, stem)
    _refuse_existing(runs / name)
    check_disk(new_parent.parent if new_parent is not None else runs)
    return name, new_parent


def _check_name(name: str) -> str:
    if _NAME.fullmatch(name) is None or len(name) > _NAME_LENGTH:
        raise UsageError(
            f"--name {name!r} cannot name a run; it takes letters, digits, . _ and - "
            f"({_NAME_LENGTH} at most), not beginning with . or -; e.g. --name {_legal(name)}"
        )
    if name.isdigit():
        raise UsageError(f"--name {name} could be taken for a job id; add a letter")
    return name


def _stem(entry: Entry) -> str:
    """What a run is named after: the script, the module, or what a shell is asked to run."""
    if entry.module:
        return entry.module.removesuffix(".__main__").rpartition(".")[2]
    named = [word for word in entry.args if not word.startswith("-")]
    shell = entry.kind == "program" and Path(entry.path).name in SHELLS and named
    return Path(named[0] if shell else entry.path).stem


def _legal(stem: str) -> str:
    """A script's stem as the beginning of a run's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem)[: _NAME_LENGTH - 10].strip("-.") or "run"


def _refuse_existing(root: Path) -> None:
    if not root.is_dir():
        return
    if (run := RunDir(root)).spec.exists():
        raise RunExists(
            f"{root} exists: `hpctrain status {run.typed}` shows it, `hpctrain resume {run.typed}` "
            "continues it once its job has ended; or choose another --name"
        )
    raise RunExists(
        f"{root} exists and has no spec.json: another submit is at it, or was interrupted; "
        "delete it or choose another --name"
    )


def _check_writable(runs: Path) -> Path | None:
    """Refuse a folder that could not be made or written; the topmost part of it that is missing."""
    place, missing = runs, None
    while not os.path.exists(place):  # noqa: PTH110 - Path's raises below a folder we may not read
        place, missing = place.parent, place
    if not place.is_dir():
        raise _cannot_write(runs, f"{place} is not a folder")
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        raise _cannot_write(runs, f"{place} is on a file system that is mounted read-only")
    if not os.access(place, os.W_OK | os.X_OK):
        raise _cannot_write(runs, f"no permission to write in {place}")
    return missing


def _cannot_write(path: Path, why: str | None) -> ChecksFailed:
    return ChecksFailed(f"{path} cannot be written: {why}; choose another folder with --runs")
