"""A job held against its site's limits: what it lacks is chosen, what cannot run is refused.

What is chosen is a layer of its own (`Chosen`), which a resume drops, to choose anew.
`choose_partition` goes by the limits in the preset; one that the preset does not have is unknown,
and refuses nothing: SLURM will. Pure, but for a few questions to SLURM that a caller may hand in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.cluster.scheduler.slurm.command import SHELL_DEFAULTS, kept_settings
from hpctrain.cluster.scheduler.slurm.script import check_options, is_exclusive, is_forbidden
from hpctrain.core.base.text import count, duration, hms
from hpctrain.core.settings.check import allocated, fit_lead, node_range, time_s
from hpctrain.core.settings.external import name_of
from hpctrain.core.settings.layers import DEFAULT, Chosen, Layer, did_you_mean, nearest
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from hpctrain.cluster.scheduler.base import Accounting, PartitionNodes
    from hpctrain.cluster.site.schema import Partition, Site
    from hpctrain.core.settings.schema import Settings

_GPU_OPTIONS = frozenset(
    {"--gres", "--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket"}
)
_CPU_OPTIONS = frozenset({"--mincpus", "--cpus-per-gpu", "--exclusive", "--cores-per-socket"})


def shell_layer(environ: Mapping[str, str], site: Site | None) -> Layer:
    """What the user's shell decides, as a layer above the site's and below hpctrain.toml.

    These are the SBATCH_* variables that the preset keeps, and the first of its `account_env`;
    without a preset account, partition and quality of service.
    """
    from_shell = kept_settings(environ, SHELL_DEFAULTS if site is None else site.slurm.sbatch_env)
    account_env = site.slurm.account_env if site is not None else ()
    by_env = next((name for name in account_env if environ.get(name)), None)
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
    accounting: Accounting | None,
) -> Chosen:
    """Hold the settings against the site, for a job of SLURM's; see `Cluster.check`.

    Returns:
        Partition, quality of service, CPUs and time limit if nobody has given them, and notes.

    Raises:
        UsageError: SLURM would refuse the job here, or no partition takes it.
    """
    if site.slurm.account_required and not settings.slurm.account:
        raise UsageError(_no_account(site))
    chosen = Chosen()
    for choose in (_choose_partition, _choose_gpus, _choose_time, _choose_qos, _choose_cpus):
        chosen += choose(*chosen.upon(settings, origins), site)
    settings, origins = chosen.upon(settings, origins)
    notes = _check_partitions(settings, origins, site)
    check_options(settings.slurm, site, origins)
    if accounting is not None:
        _refuse_unknown("account", settings.slurm.account, accounting.accounts, origins)
        _refuse_unknown("qos", settings.slurm.qos, accounting.qos, origins)
    notes += _setup_notes(settings, origins, site)
    partition = site.partitions.get(settings.slurm.partition)
    notes += _preemption_notes(settings, site, partition, is_script=is_script)
    return chosen + Chosen(notes=notes)


def _choose_partition(settings: Settings, _origins: Mapping[str, str], site: Site) -> Chosen:
    if settings.slurm.partition or not site.partitions:
        return Chosen()
    where = site.where("partitions")
    name, why = choose_partition(site.partitions, need_of(settings), where)
    return Chosen({"slurm.partition": (name, f"chosen from the limits of {where}")}, [why])


def _choose_gpus(settings: Settings, origins: Mapping[str, str], site: Site) -> Chosen:
    """All GPUs of nodes that the job has for itself anyway, where nobody has given a number."""
    name = settings.slurm.partition
    partition = site.partitions.get(name)
    default = origins.get("slurm.gpus_per_node", DEFAULT) == DEFAULT
    if partition is None or not partition.gpus_per_node or not partition.exclusive or not default:
        return Chosen()
    gpus = partition.gpus_per_node
    note = f"each node's {_gpus(gpus, partition.gpu)} are taken: a job in {name} has whole nodes"
    origin = f"chosen from {site.where('partitions', name, 'gpus_per_node')}"
    return Chosen({"slurm.gpus_per_node": (gpus, origin)}, [note])


def _gpus(number: int, kind: str) -> str:
    return count(number, f"{kind} GPU" if kind else "GPU")


def partition_notes(
    settings: Settings,
    origins: Mapping[str, str],
    site: Site | None,
    accounting: Accounting | None,
) -> list[str]:
    """What to know of a job that its partition cannot start, or whose GPUs would stand idle.

    By the preset; where that knows nothing of the partition, SLURM is asked, where one may. Of
    several partitions one that takes the job is enough.

    Raises:
        UsageError: the job asks for more nodes or CPUs than there are, so SLURM would keep it for
            ever.
    """
    slurm = settings.slurm
    names = [name for name in slurm.partition.split(",") if name]
    listed = [site.partitions[name] for name in names if name in site.partitions] if site else []
    if listed:
        gpus = max(partition.gpus_per_node or 0 for partition in listed)
        kinds = tuple({partition.gpu for partition in listed if partition.gpu})
        return _gpu_notes(settings, origins, site, gpus, kinds)
    if accounting is None or (there := accounting.partitions()) is None:
        return []
    own = {n: p for n, p in there.items() if (n in names if names else p.is_default)}
    if not own:
        return []  # hidden, or SLURM will refuse it
    notes = _endless(settings, origins, own)
    gpus = max(partition.gpus for partition in own.values())
    kinds = tuple({kind for partition in own.values() for kind in partition.gpu_types})
    return notes + _gpu_notes(settings, origins, site, gpus, kinds)


def _endless(
    settings: Settings, origins: Mapping[str, str], own: Mapping[str, PartitionNodes]
) -> list[str]:
    """Refuse what no partition of these has; a time limit above theirs some QOS may lift."""
    need, least = need_of(settings), node_range(allocated(settings).nodes)[0]
    for path, asked, most, what in (
        ("slurm.nodes", least, max(p.nodes for p in own.values()), "node"),
        ("slurm.cpus_per_rank", need.cpus_per_node, max(p.cpus for p in own.values()), "CPU"),
    ):
        if most and asked > most:
            of_node = "" if what == "node" else " of a node"
            wants = f"the job asks for {count(asked, what)}{of_node}"
            raise UsageError(
                f"{origins.get(path, DEFAULT)}: {wants}, and partition {' or '.join(own)} has "
                f"{most}: it would wait for ever; ask for less, or name another --partition"
            )
    limits = [p.max_time for p in own.values()]
    if all(limits) and all(need.walltime_s > time_s(limit) for limit in limits):
        allowed = f"partition {' or '.join(own)} allows {max(limits, key=time_s)} at most"
        lifts = "without a QOS that lifts this the job waits for ever"
        return [f"{allowed}, and --time is {settings.slurm.time}: {lifts}"]
    return []


def _gpu_notes(
    settings: Settings,
    origins: Mapping[str, str],
    site: Site | None,
    gpus: int,
    kinds: Sequence[str],
) -> list[str]:
    """What to know where nobody has said how many GPUs, and nodes have so many."""
    slurm = settings.slurm
    if not gpus or origins.get("slurm.gpus_per_node", DEFAULT) != DEFAULT:
        return []
    if any(name_of(option) in _GPU_OPTIONS for option in (*slurm.extra, *_required(site))):
        return []
    where = f"partition {slurm.partition}" if slurm.partition else "the default partition"
    text = _gpus(gpus, kinds[0] if len(kinds) == 1 else "")
    add = f"add --gpus-per-node {gpus}; 0 if you mean none"
    return [f"no GPUs are asked for, and nodes of {where} have {text}: {add}"]


def _choose_time(settings: Settings, origins: Mapping[str, str], site: Site) -> Chosen:
    """A time limit that nobody has given follows the partition's; SLURM would refuse the job."""
    partition = site.partitions.get(settings.slurm.partition)
    limit = time_limit(partition, need_of(settings)) if partition else None
    default = origins.get("slurm.time", DEFAULT) == DEFAULT
    if limit is None or not default or time_s(settings.slurm.time) <= limit[0]:
        return Chosen()
    time = hms(limit[0])
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

    Without an option of srun, newer SLURM gives the agent one CPU for all its ranks.
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
    """What the settings ask a partition for; where hpctrain chooses the nodes, the fewest."""
    slurm = allocated(settings)
    least, most = node_range(slurm.nodes)
    if settings.shape.choose in {"nodes", "both"}:
        most = least
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
    return [f"no CPUs are asked for: {given}; add --cpus-per-rank C, or --exclusive"]


def _required(site: Site | None) -> tuple[str, ...]:
    return (*site.slurm.required, *site.slurm.extra) if site is not None else ()


def _setup_notes(settings: Settings, origins: Mapping[str, str], site: Site) -> list[str]:
    """The preset's setup lines are gone where the user has some; they may be needed here."""
    theirs = site.layer.values.get("slurm", {}).get("setup", [])
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
    there = f"there are {', '.join(sorted(known_names)) or 'none'}"
    hint = did_you_mean(value, known_names, there)
    raise UsageError(
        f"{origins.get(f'slurm.{key}', DEFAULT)}: slurm.{key} is {value}, which SLURM's accounting "
        f"does not know for you; {hint}"
    )


@dataclass(frozen=True)
class Need:
    """What a job asks for."""

    least: int
    """Fewest nodes."""
    most: int
    gpus_per_node: int
    walltime_s: int
    cpus_per_node: int = 0
    """Of all ranks of a node; 0 where it is not said."""

    @property
    def nodes(self) -> str:
        """The nodes as the user wrote them."""
        return str(self.most) if self.least == self.most else f"{self.least}-{self.most}"

    @property
    def text(self) -> str:
        """The whole in words: `2-4 nodes with 8 GPUs for 2 h`."""
        plural = "" if self.most == 1 else "s"
        gpus = f" with {self.gpus_per_node} GPUs" if self.gpus_per_node else ""
        return f"{self.nodes} node{plural}{gpus} for {duration(self.walltime_s)}"


def time_limit(partition: Partition, need: Need) -> tuple[int, str] | None:
    """Longest job in seconds, and what sets that limit; None where it is not known.

    Of a range of nodes every number must fit: SLURM decides when it starts the job.
    """
    limits = []
    if partition.max_time:
        limits.append((time_s(partition.max_time), "max_time"))
    for nodes, limit in partition.walltime_bins.items():
        low, dash, high = nodes.partition("-")
        top = int(high) if high else None if dash else int(low)
        if need.most >= int(low) and (top is None or need.least <= top):
            limits.append((time_s(limit), f"jobs of {nodes} nodes"))
    return min(limits, default=None)


def longest_s(settings: Settings, site: Site) -> int | None:
    """The longest job that the named partitions allow; 0 for none, None where nothing is known."""
    need = need_of(settings)
    names = [name for name in settings.slurm.partition.split(",") if name in site.partitions]
    limits: list[int | None] = []
    for partition in (site.partitions[name] for name in names):
        if misfits(partition, need, time=False):
            limits.append(0)
        else:
            limit = time_limit(partition, need)
            limits.append(limit[0] if limit else None)
    return None if None in limits or not limits else max(filter(None, limits), default=0)


def misfits(partition: Partition, need: Need, *, time: bool = True) -> list[str]:
    """Why the partition does not take the job, in words; empty where nothing speaks against it."""
    reasons = []
    if partition.max_nodes is not None and need.most > partition.max_nodes:
        reasons.append(f"at most {partition.max_nodes} nodes")
    if partition.min_nodes is not None and need.least < partition.min_nodes:
        reasons.append(f"at least {partition.min_nodes} nodes")
    if partition.gpus_per_node is not None and need.gpus_per_node > partition.gpus_per_node:
        reasons.append(f"{partition.gpus_per_node or 'no'} GPUs per node")
    if partition.cpus_per_node is not None and need.cpus_per_node > partition.cpus_per_node:
        reasons.append(f"{partition.cpus_per_node} usable CPUs per node")
    limit = time_limit(partition, need) if time else None
    if limit is not None and need.walltime_s > limit[0]:
        by = "" if limit[1] == "max_time" else f" ({limit[1]})"
        reasons.append(f"at most {duration(limit[0])}{by}")
    return reasons


def choose_partition(
    partitions: Mapping[str, Partition], need: Need, where: str
) -> tuple[str, str]:
    """Return the partition for a job whose user named none, and why in a line.

    One that is not known to preempt comes before one that does; then the one whose nodes have the
    fewest GPUs to spare; then the preset's own order. Those with `auto = false` are left out.

    Raises:
        UsageError: none fits, with what each would take.
    """
    offered = {name: partition for name, partition in partitions.items() if partition.auto}
    reasons = {name: misfits(partition, need) for name, partition in offered.items()}
    fitting = [name for name, why in reasons.items() if not why]
    if not fitting:
        each = "; ".join(f"{name}: {', '.join(why)}" for name, why in reasons.items())
        raise UsageError(
            f"no partition of {where} takes {need.text} ({each}); ask for less, "
            "or name one with --partition"
        )
    best = min(fitting, key=lambda name: _rank(offered[name], need))
    others = [name for name in fitting if name != best]
    why = f"partition {best} is taken, as {where} says it takes {need.text}"
    if others:
        why += f" (so would {', '.join(others)}: --partition)"
    return best, why


def is_preemptable(partition: Partition) -> bool:
    """Whether the preset says that jobs there are preempted."""
    return partition.preemption.mode in {"requeue", "cancel", "suspend"}


def _rank(partition: Partition, need: Need) -> tuple[bool, int]:
    spare = (partition.gpus_per_node or 0) - need.gpus_per_node
    return is_preemptable(partition), max(spare, 0)


def _preemption_notes(
    settings: Settings, site: Site, partition: Partition | None, *, is_script: bool
) -> list[str]:
    """Return what the user should know before a job may be preempted; empty if nothing is lost."""
    notes = []
    if site.slurm.requeue is False:
        notes.append(
            f"jobs are not requeued here ({site.where('slurm', 'requeue')}): after a preemption "
            "or a time limit the run waits for `hpctrain resume`"
        )
    if partition is None or not is_preemptable(partition):
        return notes
    name, facts = settings.slurm.partition, partition.preemption
    where = site.where("partitions", name, "preemption")
    window, lead = notice(settings, site), settings.slurm.signal_lead_s
    if window is None:
        notes.append(
            f"partition {name} preempts jobs ({where}), with how much grace the preset does not "
            "say: where a save does not fit into it, the steps since the last checkpoint are lost"
        )
    elif window[0] < lead:
        notes.append(
            f"partition {name} kills {window[0]} s after the notice of a preemption ({where}), "
            f"sooner than slurm.signal_lead_s ({lead} s) says: where a step and a save take "
            "longer, the steps since the last checkpoint are lost"
        )
    if facts.mode == "cancel" and site.slurm.requeue is not False:
        notes.append(
            f"partition {name} cancels what it preempts ({where}): the run comes back only where "
            "its agents can requeue the job before it is killed; else by `hpctrain resume`"
        )
    if facts.mode == "suspend":
        notes.append(
            f"partition {name} suspends what it preempts ({where}): ranks stand still, and "
            "time-outs of collectives may end them when they go on"
        )
    if is_script and site.slurm.send_user_signal is False and facts.grace_s:
        notes.append(
            f"SLURM sends SIGTERM and no SIGUSR2 at a preemption here "
            f"({site.where('slurm', 'send_user_signal')}): a script of your own that does not "
            "handle SIGTERM loses all steps since its last checkpoint"
        )
    return notes


def notice(settings: Settings, site: Site | None) -> tuple[int, str] | None:
    """Seconds from the notice of a preemption to the kill, and where that stands.

    None where jobs are not preempted, or the preset does not say how long it is.
    """
    name = settings.slurm.partition
    partition = site.partitions.get(name) if site is not None else None
    if site is None or partition is None or not is_preemptable(partition):
        return None
    grace_s = partition.preemption.grace_s
    window = site.slurm.kill_wait_s if grace_s == 0 else grace_s
    return None if window is None else (window, site.where("partitions", name, "preemption"))
