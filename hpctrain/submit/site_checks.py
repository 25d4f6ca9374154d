"""What a site's preset says of a job: what it lacks is filled in, what cannot run is refused.

What is filled in is a layer of its own (`Chosen`), which a resume drops, to choose anew.
`changed` and `take_locks` list what the user changes of the preset and hold its locks against that.
Pure, but for a few questions to SLURM that a caller may hand in.
tests/unit/submit/test_site_submit.py and test_site_lock.py hold the promises.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpctrain.base.text import count
from hpctrain.errors import UsageError
from hpctrain.scheduler.slurm.environment import kept_settings
from hpctrain.scheduler.slurm.script import check_options, is_exclusive
from hpctrain.scheduler.slurm.site_options import is_forbidden
from hpctrain.settings.check import fit_lead, node_range, time_s
from hpctrain.settings.layers import DEFAULT, Chosen, Layer, nearest
from hpctrain.settings.sbatch_options import name_of
from hpctrain.settings.schema import value_at
from hpctrain.site.environment import Versions, derive, locked_names, paths_of
from hpctrain.site.preset import dotted
from hpctrain.site.sheet import check_locked
from hpctrain.submit.site_rules import Need, choose_partition, misfits, preemption_notes, time_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from hpctrain.settings.schema import Settings
    from hpctrain.site.preset import Site
    from hpctrain.submit.checks import Accounting

_CPU_OPTIONS = frozenset({"--mincpus", "--cpus-per-gpu", "--exclusive", "--cores-per-socket"})


def shell_layer(site: Site, environ: Mapping[str, str]) -> Layer:
    """What the user's shell decides, as a layer above the site's and below hpctrain.toml.

    These are the SBATCH_* variables that the preset keeps, and the first of its `account_env`.
    """
    from_shell = kept_settings(environ, site.slurm.sbatch_env)
    by_env = next((name for name in site.slurm.account_env if environ.get(name)), None)
    if by_env is not None:
        from_shell["slurm.account"] = by_env
    values = {path.partition(".")[2]: environ[name] for path, name in from_shell.items()}

    def where(_section: str, key: str) -> str:
        return f"{from_shell[f'slurm.{key}']} of your shell" if key else "your shell"

    return Layer("your shell", {"slurm": values} if values else {}, where)


def check_site(
    settings: Settings,
    origins: Mapping[str, str],
    site: Site,
    *,
    is_script: bool,
    accounting: Accounting | None = None,
) -> Chosen:
    """Hold the settings against the site, for a job of SLURM's.

    Args:
        settings: Checked by themselves already.
        origins: Setting to its place.
        site: The preset.
        is_script: The ranks run a script of the user's, not hpctrain's own loop.
        accounting: Whom to ask for accounts and qualities of service; None asks nobody.

    Returns:
        Partition, quality of service, CPUs and time limit where nobody has given them, and what
        the user should know.

    Raises:
        UsageError: SLURM would refuse the job here, or no partition takes it.
    """
    if site.slurm.account_required and not settings.slurm.account:
        raise UsageError(_no_account(site))
    chosen = Chosen()
    for choose in (_choose_partition, _choose_time, _choose_qos, _choose_cpus):
        chosen += choose(*chosen.upon(settings, origins), site)
    settings, origins = chosen.upon(settings, origins)
    notes = _check_partitions(settings, origins, site)
    check_options(settings.slurm, site, origins)
    if accounting is not None:
        _refuse_unknown("account", settings.slurm.account, accounting.accounts, origins)
        _refuse_unknown("qos", settings.slurm.qos, accounting.qos, origins)
    notes += _setup_notes(settings, origins, site)
    partition = site.partitions.get(settings.slurm.partition)
    notes += preemption_notes(settings, site, partition, is_script=is_script)
    return chosen + Chosen(notes=notes)


def _choose_partition(settings: Settings, _origins: Mapping[str, str], site: Site) -> Chosen:
    if settings.slurm.partition or not site.partitions:
        return Chosen()
    where = site.where("partitions")
    name, why = choose_partition(site.partitions, need_of(settings), where)
    return Chosen({"slurm.partition": (name, f"chosen from the limits of {where}")}, [why])


def _choose_time(settings: Settings, origins: Mapping[str, str], site: Site) -> Chosen:
    """A time limit that nobody has given follows the partition's; SLURM would refuse the job."""
    partition = site.partitions.get(settings.slurm.partition)
    limit = time_limit(partition, need_of(settings)) if partition else None
    default = origins.get("slurm.time", DEFAULT) == DEFAULT
    if limit is None or not default or time_s(settings.slurm.time) <= limit[0]:
        return Chosen()
    time = _as_time(limit[0])
    lowered = f"the time limit is {time}, not {settings.slurm.time}: {site.where()} allows no more"
    origin = f"default, lowered to the limit of {site.where('partitions')}"
    chosen = Chosen({"slurm.time": (time, origin)}, [lowered])
    return chosen + fit_lead(*chosen.upon(settings, origins))


def _choose_qos(settings: Settings, _origins: Mapping[str, str], site: Site) -> Chosen:
    name = settings.slurm.partition
    partition = site.partitions.get(name)
    if settings.slurm.qos:
        return Chosen()
    if partition is not None and partition.qos:
        origin = f"chosen from {site.where('partitions', name, 'qos')}"
        return Chosen({"slurm.qos": (partition.qos, origin)})
    origin = f"chosen from {site.where('slurm', 'qos_default')}"
    qos = site.slurm.qos_default
    return Chosen({"slurm.qos": (qos, origin)} if qos else {})


def _choose_cpus(settings: Settings, _origins: Mapping[str, str], site: Site) -> Chosen:
    """CPUs for each rank from those that a job can use: a node's share for its share of GPUs.

    Where srun is told nothing, newer SLURM gives the agent one CPU for all its ranks.
    """
    slurm = settings.slurm
    partition = site.partitions.get(slurm.partition)
    usable = partition.cpus_per_node if partition is not None else None
    if slurm.cpus_per_rank or partition is None or not usable or is_forbidden("--mincpus", site):
        return Chosen()
    gpus, all_gpus = slurm.gpus_per_node, partition.gpus_per_node or 0
    if is_exclusive(slurm, site) or partition.exclusive or (gpus and gpus == all_gpus):
        share = usable
    elif 0 < gpus < all_gpus:
        share = usable * gpus // all_gpus
    else:
        share = 0  # a part of a node, and nothing says which
    per_rank = share // slurm.ranks()
    origin = f"chosen from {site.where('partitions', slurm.partition, 'cpus_per_node')}"
    return Chosen({"slurm.cpus_per_rank": (per_rank, origin)} if per_rank else {})


def need_of(settings: Settings) -> Need:
    """What the settings ask a partition for."""
    slurm = settings.slurm
    least, most = node_range(slurm.nodes)
    cpus = slurm.cpus_per_rank * slurm.ranks()
    return Need(least, most, slurm.gpus_per_node, time_s(slurm.time), cpus)


def _no_account(site: Site) -> str:
    tried = ", ".join(site.slurm.account_env)
    none_of = f" and none of {tried} is set" if tried else ""
    hint = f" (`{site.slurm.account_hint}` shows yours)" if site.slurm.account_hint else ""
    return (
        f"{site.where('slurm', 'account_required')} says that a job needs an account{none_of}: "
        f"give one with --account{hint}"
    )


def _check_partitions(settings: Settings, origins: Mapping[str, str], site: Site) -> list[str]:
    """Refuse a job that none of the named partitions takes; of several some may."""
    names = [name for name in settings.slurm.partition.split(",") if name]
    setting = f"{origins.get('slurm.partition', DEFAULT)}: slurm.partition"
    notes, refused = [], []
    for name in names:
        partition = site.partitions.get(name)
        if partition is None:
            if site.partitions:
                near = nearest(name, site.partitions)
                hint = f"; did you mean {near[0]}?" if near else ""
                notes.append(f"{setting}: {site.where()} knows no limits of {name}{hint}")
            continue
        why = misfits(partition, need_of(settings))
        if why:
            where = site.where("partitions", name)
            refused.append(f"{name} takes {', '.join(why)} ({where})")
    if refused and len(refused) == len(names):
        raise UsageError(
            f"{setting} is {settings.slurm.partition}, which does not take "
            f"{need_of(settings).text}: {'; '.join(refused)}"
        )
    return notes + [f"{setting}: {why}" for why in refused]


def _as_time(seconds: int) -> str:
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


def cpu_notes(
    settings: Settings, site: Site | None, accounting: Accounting | None = None
) -> list[str]:
    """What to know where a job with GPUs asks for no CPUs: SLURM then gives what it gives.

    That is one core of a node for all of its ranks, their data loaders and the writers, unless the
    partition has DefCpuPerGPU, which SLURM is asked for where that would matter.
    """
    slurm = settings.slurm
    if slurm.cpus_per_rank or not slurm.gpus_per_node or is_exclusive(slurm, site):
        return []
    if any(name_of(option) in _CPU_OPTIONS for option in (*slurm.extra, *_required(site))):
        return []
    partition = site.partitions.get(slurm.partition) if site is not None else None
    if partition is not None and partition.exclusive:
        return []
    ranks = count(slurm.ranks(), "rank")
    default = accounting.cpus_per_gpu(slurm.partition) if accounting is not None else None
    if default and default * slurm.gpus_per_node >= slurm.ranks():
        return []
    given = f"without DefCpuPerGPU SLURM gives one core of a node for its {ranks}"
    if default:
        cpus = count(default * slurm.gpus_per_node, "CPU")
        given = f"with DefCpuPerGPU={default} SLURM gives {cpus} of a node for its {ranks}"
    return [f"no CPUs are asked for: {given}; set slurm.cpus_per_rank, or slurm.exclusive = yes"]


def _required(site: Site | None) -> tuple[str, ...]:
    return (*site.slurm.required, *site.slurm.extra) if site is not None else ()


def _setup_notes(settings: Settings, origins: Mapping[str, str], site: Site) -> list[str]:
    """The preset's setup lines are gone where the user has some; they may be needed here."""
    theirs = site.layer.values.get("slurm", {}).get("setup", [])
    if not theirs or list(settings.slurm.setup) == list(theirs):
        return []
    lost = [line for line in theirs if line not in settings.slurm.setup]
    if not lost:
        return []
    return [
        (
            f"{origins.get('slurm.setup', DEFAULT)}: slurm.setup replaces that of "
            f"{site.where('settings', 'slurm', 'setup')}, and lacks of it: {'; '.join(lost)}"
        )
    ]


def _refuse_unknown(
    key: str,
    value: str,
    ask: Callable[[], Collection[str] | None],
    origins: Mapping[str, str],
) -> None:
    """Refuse an account or quality of service that accounting does not give the user."""
    known_names = ask() if value else None
    if known_names is None or value in known_names:
        return
    near = nearest(value, known_names)
    hint = (
        f"did you mean {near[0]}?"
        if near
        else f"there are {', '.join(sorted(known_names)) or 'none'}"
    )
    raise UsageError(
        f"{origins.get(f'slurm.{key}', DEFAULT)}: slurm.{key} is {value}, which SLURM's accounting "
        f"does not know for you; {hint}"
    )


def changed(
    site: Site,
    settings: Settings,
    origins: Mapping[str, str],
    env: Mapping[str, str],
    env_origins: Mapping[str, str],
) -> dict[str, str]:
    """Settings and variables of the ranks to which the user gives another value, with the places.

    Args:
        site: The preset.
        settings: As they were given.
        origins: Setting to its place.
        env: What hpctrain.toml and flags set for the ranks.
        env_origins: Variable to its place.
    """
    changes: dict[str, str] = {}
    for path, origin in origins.items():
        section, _, key = path.partition(".")
        theirs = site.settings.get(section, {}).get(key)
        now = value_at(settings, path)
        by_user = not origin.startswith((DEFAULT, f"site {site.name}"))
        if by_user and now != theirs:
            changes[f"settings.{path}"] = origin
    for name, value in env.items():
        if _differs(site, name, value):
            changes[f"env.{name}"] = env_origins[name]
    return changes


def changed_by_shell(
    site: Site, environ: Mapping[str, str], env: Mapping[str, str]
) -> dict[str, str]:
    """Locked variables of the preset that the submitting shell has, and would hand to the job."""
    if site.slurm.export == "none" or not site.lock.keys:
        return {}
    return {
        f"env.{name}": f"{name} of your shell"
        for name in locked_names(site)
        if name in environ
        and name not in env
        and name not in site.env.unset
        and paths_of(site, name)
        and _differs(site, name, environ[name])
    }


def take_locks(
    site: Site, changes: Mapping[str, str], *, allow: bool
) -> tuple[list[str], list[str]]:
    """Lines for the user, and the locked paths that are changed; both empty where none is.

    Raises:
        UsageError: one is changed and `allow` is False.
    """
    notes = check_locked(site, changes, allow=allow)
    alone = replace(site, overridden={})
    of_files = {dotted(path): place for path, place in site.overridden.items()}
    every = of_files | dict(changes)
    paths = [path for path in every if check_locked(alone, {path: every[path]}, allow=True)]
    return notes, paths


def _differs(site: Site, name: str, value: str) -> bool:
    """Whether a variable's value is another than the preset's, for one node or for several."""
    for nodes in (1, 2):
        theirs = derive(site, nodes=nodes, versions=Versions(), run_dir="").values.get(name)
        if theirs is not None and theirs.value != value:
            return True
    return not paths_of(site, name) or any(name in when.set for when in site.env.when.values())
