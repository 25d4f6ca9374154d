"""Every key of a site preset with meaning, unit and values, and the preset as a typed object.

A field here is all it takes: reading, refusal of unknown keys, JSON Schema and reference page are
derived (`settings/fields.py`). A missing key is unknown (None, "" or empty); nothing is guessed. A
`PresetFinding` says how bad a value is and where it stands. Pure, standard library only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from hpctrain.core.settings.fields import (
    ABSOLUTE,
    BIN,
    COUNT,
    CPU_LIST,
    DATE,
    MEMLOCK,
    NAME,
    OPTION,
    SBATCH,
    TIME,
    VARIABLE,
    VERSIONS,
    Key,
    Table,
    field,
    keys_of,
    make,
    table,
    tables,
)
from hpctrain.core.settings.layers import Layer, did_you_mean, nearest, unknown_setting
from hpctrain.core.settings.schema import ContainerSettings, Settings
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.core.settings.spec import Spec


SCHEMA = 1
"""The number that a preset's `schema` has."""
PARTITIONS = "partitions"
SETTINGS = "settings"
SOURCES = "sources"
_ENV_GROUPS = "[env.common], [env.single_node] or [env.multi_node]"
_LAST = ("text", "integer", "number", "boolean", "texts")


class About(Table):
    """Keys outside any table: what the preset is, and who answers for it."""

    schema: int = field(SCHEMA, "version of this format", least=1)
    name: str = field("", "the site's name, as the file's", pattern=NAME)
    description: str = field("", "one line for `hpctrain sites list`")
    contact: str = field("", "who answers for the preset")
    url: str = field("", "the cluster's own documentation")
    reviewed: str = field("", "when its values were last held against the sources", pattern=DATE)
    stability: str = field(
        "local",
        "reference: every value has a public source; unverified: refused until an admin edits it; "
        "local: written at the site; base: only for other presets to extend",
        choices=("reference", "unverified", "local", "base"),
    )
    extends: str = field("", "name of the preset that this one is laid upon", pattern=NAME)
    sources: dict[str, str] = field({}, "short name to where the value stands, for `source`")


class Detect(Table):
    """[detect]: how the site is known. Every pattern must match the whole text."""

    env: dict[str, str] = field(
        {},
        "environment variable to a pattern of its value; one suffices",
        keys=VARIABLE,
        regex=True,
    )
    file: dict[str, str] = field(
        {}, "absolute path to a pattern of the file's first line", keys=ABSOLUTE, regex=True
    )
    slurm_cluster: list[str] = field(
        [],
        "patterns of SLURM's ClusterName, which is not unique in the world: for a preset that was "
        "not written at the site it counts only beside another signal",
        regex=True,
    )
    hostname: list[str] = field([], "patterns of the host's name, short or full", regex=True)
    priority: int = field(
        0, "of several sites that match, the highest wins if it is alone", least=None
    )


class SlurmFacts(Table):
    """[slurm]: what the scheduler here demands and refuses."""

    account_required: bool | None = field(None, "whether a job needs --account")
    account_env: list[str] = field(
        [], "variables that hold a user's account, first one set wins", pattern=VARIABLE
    )
    account_hint: str = field("", "the command that shows a user's accounts")
    qos_default: str = field("", "quality of service where none is asked for")
    constraint: str = field("", "node features that every job asks for")
    gpu_request: str = field(
        "gpus-per-node",
        "how GPUs are asked for",
        choices=("gpus-per-node", "gres", "gpus", "gpus-per-task", "none"),
    )
    gres_name: str = field("gpu", "name in --gres, with a type where the site wants one: gpu:a100")
    forbidden: list[str] = field(
        [], "options that sbatch refuses here, e.g. --gres", pattern=OPTION
    )
    required: list[str] = field(
        [], "options that every job must have, e.g. --network=disable_rdzv_get", pattern=OPTION
    )
    extra: list[str] = field([], "more sbatch options for every job", pattern=OPTION)
    export: str = field(
        "all",
        "how the submitting shell's environment reaches the job",
        choices=("all", "none", "unset"),
    )
    sbatch_env: list[str] = field(
        ["SBATCH_ACCOUNT"],
        "SBATCH_* variables of the user's shell that still count",
        pattern=SBATCH,
    )
    mpi: str = field("", "srun's --mpi")
    launcher: str = field(
        "srun", "what starts one task on each node", choices=("srun", "ibrun", "mpirun")
    )
    srun_args: list[str] = field([], "more srun options for every job", pattern=OPTION)
    requeue: bool | None = field(None, "whether a job may be requeued here (JobRequeue)")
    kill_wait_s: int | None = field(None, "seconds between SIGTERM and SIGKILL (KillWait)")
    send_user_signal: bool | None = field(
        None, "whether a preemption sends the --signal one too (preempt_send_user_signal)"
    )


class Preemption(Table):
    """[partitions.X.preemption]: what happens to a job whose nodes are wanted."""

    mode: str = field(
        "unknown", "what SLURM does", choices=("none", "requeue", "cancel", "suspend", "unknown")
    )
    grace_s: int | None = field(None, "seconds from the notice to the kill (GraceTime)")
    signal: str = field("", "first signal of the notice, e.g. SIGTERM; empty where there is none")
    exempt_s: int | None = field(None, "seconds for which a job cannot be preempted")


class Partition(Table):
    """[partitions.X]: limits of one partition. `X` is its SLURM name."""

    description: str = field("", "what it is for")
    gpus_per_node: int | None = field(None, "GPUs of a node")
    gpu: str = field("", "their model")
    cpus_per_node: int | None = field(
        None, "CPU cores that a job can use, not all of them", least=1
    )
    mem_gib: float | None = field(None, "memory of a node that a job can use, GiB", least=1)
    max_time: str = field("", "longest job, [days-]hours:minutes:seconds", pattern=TIME)
    min_nodes: int | None = field(None, "fewest nodes of a job", least=1)
    max_nodes: int | None = field(None, "most nodes of a job", least=1)
    walltime_bins: dict[str, str] = field(
        {},
        "nodes MIN-MAX (or MIN-) to the longest job of that size",
        pattern=TIME,
        keys=BIN,
    )
    qos: str = field("", "quality of service that jobs here need")
    exclusive: bool | None = field(None, "whether a job has its nodes for itself")
    auto: bool = field(True, "whether submit may choose it by itself")
    preemption: Preemption = table(Preemption)


class Network(Table):
    """[network]: between nodes."""

    kind: str = field(
        "", "fabric", choices=("", "ib", "slingshot", "efa", "roce", "gpudirect-tcp", "tcp")
    )
    socket_ifnames: list[str] = field(
        [], "exact names of the interfaces that sockets use, at most 16"
    )
    socket_mode: str = field(
        "exact",
        "exact: NCCL matches full names (=); as-is: plain names, for plugins that read the text",
        choices=("exact", "as-is"),
    )
    hcas: list[str] = field([], "InfiniBand or RoCE adapters that NCCL uses, at most 32")
    hca_mode: str = field(
        "exact", "whether `hcas` are whole names or beginnings", choices=("exact", "prefix")
    )
    rate_gbps: int | None = field(None, "of one adapter, Gb/s", least=1)
    nics_per_node: int | None = field(None, "adapters of a node", least=1)
    link_layer: str = field("", "of the adapters", choices=("", "InfiniBand", "Ethernet"))
    rendezvous_host: str = field(
        "", "name under which ranks reach the first node, e.g. {host}i; empty for its own"
    )
    resolve: str = field(
        "name", "what ranks are given: the name, or its address", choices=("name", "ipv4", "ipv6")
    )


class When(Table):
    """[env.when.X]: variables for some versions only; all conditions that are given must hold."""

    nccl: str = field(
        "", "NCCL's version, e.g. >=2.27; a comma means and: >=2.21,<2.24", pattern=VERSIONS
    )
    torch: str = field("", "torch's version, in the same form", pattern=VERSIONS)
    plugin: str = field(
        "",
        "version of the network plugin, from the loaded module's variable",
        pattern=VERSIONS,
    )
    gpu: str = field("", "pattern of the GPU's whole name", regex=True)
    nodes: str = field("", "single or multi", choices=("", "single", "multi"))
    set: dict[str, str] = field({}, "variables to set", keys=VARIABLE)
    unset: list[str] = field([], "variables to take away", pattern=VARIABLE)


class EnvGroups(Table):
    """[env]: environment of the ranks. Interfaces and adapters come from [network] instead."""

    common: dict[str, str] = field({}, "for any number of nodes", keys=VARIABLE)
    single_node: dict[str, str] = field({}, "for jobs of one node", keys=VARIABLE)
    multi_node: dict[str, str] = field({}, "for jobs of several nodes", keys=VARIABLE)
    unset: list[str] = field(
        [], "variables to take away from what the user's shell hands on", pattern=VARIABLE
    )
    when: dict[str, When] = tables(When)


class Modules(Table):
    """[modules]: what is loaded on the first node before srun; all nodes get its environment."""

    init: str = field("", "file to source first, where the shell has no `module`")
    purge: bool = field(False, "`module purge` first")
    use: list[str] = field([], "`module use` of these")
    load: list[str] = field([], "`module load` of these")
    provides_env: list[str] = field(
        [],
        "variables that the modules set themselves, not to be set again",
        pattern=VARIABLE,
    )


class Cpus(Table):
    """[cpus]: of a node. Without a map hpctrain uses Linux's own data."""

    of_gpu: list[str] = field(
        [], "CPUs near each GPU, in the order of the GPUs, e.g. 49-55", pattern=CPU_LIST
    )


class Storage(Table):
    """[storage]: where files belong. Texts may have $VARIABLES of the user's shell."""

    scratch: str = field("", "large and shared")
    checkpoint: str = field("", "where runs belong; `--runs` where none is given")
    local: str = field("", "on the node itself, fast")
    fs: str = field(
        "", "file system of `checkpoint`", choices=("", "lustre", "gpfs", "nfs", "beegfs", "vast")
    )
    flock: str = field(
        "unknown", "what flock(2) holds there", choices=("coherent", "local", "none", "unknown")
    )
    purge_days: int | None = field(
        None, "days without access after which files are deleted", least=1
    )
    quota_cmd: str = field("", "the command that shows a user's quota")


class Container(Table):
    """[container]: how containers run here."""

    runtime: str = field(
        "",
        "which",
        choices=(*keys_of(ContainerSettings)["runtime"].choices, "none"),
    )
    binds: list[str] = field([], "paths of the host that a container needs")
    env_pass: list[str] = field(
        [], "variables that must be named to reach the inside", pattern=VARIABLE
    )


class Baseline(Table):
    """[baseline]: what a healthy network does, for preflight."""

    allreduce_busbw_gbs: dict[str, float] = field(
        {}, "nodes to bus bandwidth of an all-reduce, GB/s (10^9 bytes)", keys=COUNT
    )
    size_mib: int | None = field(None, "size of that all-reduce, MiB")
    tolerance: float = field(0.8, "a node group below this share of it is slow", most=1)


class Expect(Table):
    """[expect]: what a healthy node has, for preflight."""

    driver_min: str = field("", "oldest GPU driver")
    nvlinks: int | None = field(None, "NVLink connections of a GPU")
    memlock: str = field("", "`ulimit -l`: unlimited, or the fewest KiB", pattern=MEMLOCK)
    shm_gib_min: float | None = field(None, "fewest GiB of /dev/shm")
    nccl_conf: bool | None = field(None, "whether nodes have /etc/nccl.conf")


class DoctorFacts(Table):
    """[doctor]: what `hpctrain doctor` knows of this site's logs."""

    signatures: list[str] = field(
        [], "files or folders of the site's own signatures of logs; may have $VARIABLES"
    )


class Lock(Table):
    """[lock]: what users cannot override without --allow-locked. The admins' layers only."""

    keys: list[str] = field(
        [], "paths such as env.multi_node.NCCL_NET, settings.slurm.partition, or a whole table"
    )


class Preset(Table):
    """A whole preset, typed."""

    about: About = table(About)
    detect: Detect = table(Detect)
    slurm: SlurmFacts = table(SlurmFacts)
    partitions: dict[str, Partition] = tables(Partition)
    network: Network = table(Network)
    env: EnvGroups = table(EnvGroups)
    modules: Modules = table(Modules)
    cpus: Cpus = table(Cpus)
    storage: Storage = table(Storage)
    container: Container = table(Container)
    baseline: Baseline = table(Baseline)
    expect: Expect = table(Expect)
    doctor: DoctorFacts = table(DoctorFacts)
    lock: Lock = table(Lock)


_TABLES = {name: key for name, key in keys_of(Preset).items() if name != "about"}
_SETTINGS = Key("defaults of hpctrain's own settings", SETTINGS, "table", inner=Settings)
KEYS: dict[str, Key] = {**keys_of(About), **_TABLES, SETTINGS: _SETTINGS}
"""Everything that a preset's file may begin with: keys outside any table, and tables."""
TABLES: dict[str, type] = {
    name: key.inner for name, key in _TABLES.items() if key.inner and name != PARTITIONS
}
"""Every table that stands once. Besides there are [partitions.X] and [settings.<section>]."""


def key_at(path: Sequence[str]) -> Key | None:
    """The key, or the table, at a path that a preset can have; None where it cannot."""
    key = KEYS.get(path[0])
    for name in path[1:]:
        if key is None or key.form in _LAST:
            return None
        if key.form == "tables" or key.inner is None:  # the names below it are the site's own
            key = replace(key, form="table" if key.inner else key.form.removesuffix(" table"))
        else:
            key = keys_of(key.inner).get(name)
    return key


def unknown(path: Sequence[str], keys: Mapping[str, Key]) -> str:
    """What to say of a key that its table does not have."""
    table, name = ".".join(path[:-1]), path[-1]
    if path[0] == SETTINGS and table != SETTINGS:
        return unknown_setting(name, path[1])
    if table == SETTINGS:
        hint = did_you_mean(name, keys, f"there are {', '.join(keys)}")
        return f"{'.'.join(path)} is no section of hpctrain's settings; {hint}"
    return f"{'.'.join(path)} is not a key of a site preset; {_hint(table, name, keys)}"


def _hint(table: str, name: str, keys: Mapping[str, Key]) -> str:
    if table == "env" and name.isupper():
        return f"put it under {_ENV_GROUPS}"
    top = table.partition(".")[0]
    if key_at((SETTINGS, top, name) if top else (SETTINGS, name)):
        return f"as a default of hpctrain's settings it belongs under [{SETTINGS}.{top or name}]"
    if near := nearest(name, keys):
        return f"did you mean {'.'.join(filter(None, [table, *near]))}?"
    if elsewhere := [path for path in _paths() if path.endswith(f".{name}")]:
        return f"did you mean {' or '.join(elsewhere)}?"
    return f"{f'[{table}] has' if table else 'there are'} {', '.join(keys)}"


def wrong_lock(text: str) -> str | None:
    """What is wrong with a path in [lock]; None where it names something that a preset can have."""
    path = text.split(".")
    if all(path) and path[0] not in keys_of(About) and key_at(path):
        return None
    hint = did_you_mean(text, _paths(), "it takes paths such as env.common.NCCL_NET")
    return f"lock.keys has {text}, which no preset can have; {hint}"


@cache
def _paths() -> list[str]:
    """Every path that has no free name in it, and one for each table that has: `partitions.X`."""
    return [path for name in (*_TABLES, SETTINGS) for path in _below(KEYS[name], name)]


def _below(key: Key, at: str) -> list[str]:
    if key.inner is None:
        return [at]
    free = "" if key.form == "table" else ".X"
    return [
        path
        for name, inner in keys_of(key.inner).items()
        for path in _below(inner, f"{at}{free}.{name}")
    ]


FORMAT = 1
"""Of what `as_plain` gives."""

PACKAGED, SYSTEM, USER = "packaged", "system", "user"
GIVEN = "file"
"""The layer of a site that was named by its file."""
ADMINS = (PACKAGED, SYSTEM, GIVEN)
"""Layers whose [lock] counts where the file is root's. One given by its path may be a draft."""

YOUNGER = frozenset({"doctor"})
"""Tables that the presets in older runs lack."""

KeyPath = tuple[str, ...]
"""A value's place in a preset: ("env", "multi_node", "NCCL_NET"), ("description",)."""


def dotted(path: KeyPath) -> str:
    """The path as messages and [lock] have it: env.multi_node.NCCL_NET."""
    return ".".join(path)


@dataclass(frozen=True)
class PresetValue:
    """One value that stands in a file."""

    value: Any
    layer: str
    """packaged, system, user; "file" where the site was named by its file."""
    file: str
    line: int
    """Counted from 1; 0 where it is not known."""
    source: str = ""
    """A name of [sources], "" for none."""
    why: str = ""

    @property
    def place(self) -> str:
        """`/etc/hpctrain/sites/juniper.toml:7`."""
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class SiteFile:
    """A file that a site was read from."""

    layer: str
    path: str
    name: str
    """Of the preset in it: the site's own, or that of a base."""


class Site(Preset):
    """A cluster's settings, merged from every file that has a say."""

    settings: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Defaults of hpctrain's own settings, section to keys, each of its setting's type."""
    leaves: dict[KeyPath, PresetValue] = dataclasses.field(default_factory=dict)
    """Every value that some file has, with its place; the winning file's where several have it."""
    overridden: dict[KeyPath, str] = dataclasses.field(default_factory=dict)
    """Locked values that a layer of the user's has changed, with the place of the change."""
    files: tuple[SiteFile, ...] = ()
    """What was read, lowest first."""

    @property
    def name(self) -> str:
        """The site's name."""
        return self.about.name

    def where(self, *path: str) -> str:
        """`site juniper (/etc/hpctrain/sites/juniper.toml:7)`.

        A table has the place of its first value; what stands in no file has the site's name only.
        """
        leaf = self.leaves.get(path)
        if leaf is None:
            below = (other for at, other in self.leaves.items() if at[: len(path)] == path)
            leaf = next(below, None) if path else None
        return f"site {self.name} ({leaf.place})" if leaf else f"site {self.name}"

    @property
    def layer(self) -> Layer:
        """The preset's [settings.*] as a layer of settings."""

        def where(section: str, key: str) -> str:
            return self.where(SETTINGS, section, *([key] if key else []))

        return Layer(f"site {self.name}", self.settings, where)

    def as_plain(self) -> dict[str, Any]:
        """The whole preset as JSON values, for spec.json."""
        plain = asdict(replace(self, leaves={}, overridden={})) | {"format": FORMAT}
        plain["leaves"] = [
            {"path": list(path)} | asdict(leaf) for path, leaf in self.leaves.items()
        ]
        plain["overridden"] = [[list(path), place] for path, place in self.overridden.items()]
        plain["files"] = list(plain["files"])
        return plain

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> Site:
        """The preset that `as_plain` gave.

        Raises:
            UsageError: another version of hpctrain wrote it, with keys that this one does not know.
        """
        if plain.get("format") != FORMAT:
            raise UsageError(
                f"the preset in the run's spec.json has format {plain.get('format')}, this "
                f"hpctrain reads {FORMAT}; use the version that wrote it"
            )
        absent = YOUNGER - plain.keys()
        try:
            return replace(
                make(Site, {name: plain[name] for name in keys_of(Preset) if name not in absent}),
                settings=plain[SETTINGS],
                leaves={
                    tuple(leaf.pop("path")): PresetValue(**leaf)
                    for leaf in map(dict, plain["leaves"])
                },
                overridden={tuple(path): place for path, place in plain["overridden"]},
                files=tuple(SiteFile(**file) for file in plain["files"]),
            )
        except (KeyError, TypeError) as error:
            raise UsageError(
                f"the preset in the run's spec.json is of another version of hpctrain ({error}); "
                "submit the run anew, or use the version that wrote it"
            ) from None


@dataclass(frozen=True)
class PresetFinding:
    """One thing that is to be said of a preset."""

    level: str
    """error, warning, or debug: a value that should not stay without a reason."""
    path: str
    """Of the value: env.multi_node.NCCL_NET."""
    value: Any
    """None where it is missing."""
    where: str
    """`/etc/hpctrain/sites/juniper.toml:7`; without a value its table's line, or the file."""
    message: str
    """What is wrong and what to write, on one line; the path is not always repeated in it."""

    def __str__(self) -> str:
        return f"{self.where}: {self.path}: {self.message}"


def site_of(spec: Spec) -> Site | None:
    """The preset that the run was submitted with.

    Raises:
        UsageError: another version of hpctrain wrote it.
    """
    return None if spec.preset is None else Site.from_plain(spec.preset)
