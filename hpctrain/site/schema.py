"""Every key that a site preset may have, with its meaning, unit and accepted values.

Adding a field to one of these classes is all it takes: reading, refusing of unknown keys, the JSON
Schema and the reference page are derived from them. A key that is missing is unknown, and unknown
is `None`, "" or empty: nothing is guessed. `keys_of` gives a class as data, `make` an instance from
plain values, and `checked` refuses a value that is not what its key takes, in a message without the
value's place.

Pure, standard library only. tests/unit/site/test_schema.py holds the promises.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import re
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA = 1
"""The number that a preset's `schema` has."""

NAME = r"[a-z][a-z0-9_-]{1,31}"
VARIABLE = r"[A-Z_][A-Z0-9_]*"
TIME = r"(\d+-)?\d{1,3}:[0-5]\d:[0-5]\d"
_VERSION = r"(>=|<=|==|!=|>|<) ?\d+(\.\d+)*"
VERSIONS = rf"{_VERSION}( ?, ?{_VERSION})*"
OPTION = r"--?[A-Za-z].*"
DATE = r"\d{4}-\d\d-\d\d"
ABSOLUTE = r"/.+"
BIN = r"[1-9]\d*-([1-9]\d*)?"
COUNT = r"[1-9]\d*"
CPU_LIST = r"\d+(-\d+)?(,\d+(-\d+)?)*"
SBATCH = r"SBATCH_[A-Z0-9_]+"
MEMLOCK = r"unlimited|\d+"
IN_WORDS = {
    NAME: "2 to 32 of a-z, 0-9, - and _, beginning with a letter",
    VARIABLE: "capital letters, digits and _, not beginning with a digit",
    TIME: "[days-]hours:minutes:seconds",
    VERSIONS: "conditions such as >=2.27 or >=2.21,<2.24",
    OPTION: "an option such as --gres=gpu:4",
    DATE: "a date such as 2026-01-31",
    ABSOLUTE: "an absolute path",
    BIN: "numbers of nodes such as 1-91, or 184- without an upper end",
    COUNT: "a number of nodes",
    CPU_LIST: "numbers of CPUs such as 0-7,64-71",
    SBATCH: "a variable of sbatch's such as SBATCH_ACCOUNT",
    MEMLOCK: "unlimited, or a number of KiB",
}
"""What each pattern asks for, for messages. Patterns hold for the whole text."""

PARTITIONS = "partitions"
SETTINGS = "settings"
SOURCES = "sources"

_T = TypeVar("_T")
_FORMS: dict[Any, str] = {
    str: "text",
    int: "integer",
    int | None: "integer",
    float: "number",
    float | None: "number",
    bool: "boolean",
    bool | None: "boolean",
    list[str]: "texts",
    dict[str, str]: "text table",
    dict[str, float]: "number table",
}
"""What a field's type asks of a value. Other types are classes of this module, or dicts of one."""
_KNOWN: dict[type, dict[str, Key]] = {}
TAKES = {
    "text": "text in quotes",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "texts": "a list of texts",
    "text table": "a table of NAME = text",
    "number table": "a table of NAME = number",
    "table": "a table",
    "tables": "tables under names of their own",
}
"""What each form of `Key` takes, for messages."""


def fact(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    pattern: str = "",
    keys: str = "",
    least: float | None = 0,
    regex: bool = False,
) -> Any:
    """A preset's key: its default, what it means, and what it takes where that is narrow.

    Args:
        default: Value of a preset that says nothing.
        doc: What it means, in which unit.
        choices: The texts that it takes, where they are few.
        pattern: Of a text, of each item of a list, or of each value of a table.
        keys: Pattern of a table's names.
        least: Smallest number; None for any.
        regex: Its texts are regular expressions, which must compile.
    """
    metadata = {
        "doc": doc,
        "choices": choices,
        "pattern": pattern,
        "keys": keys,
        "least": least,
        "regex": regex,
    }
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class About:
    """Keys outside any table: what the preset is, and who answers for it."""

    schema: int = fact(SCHEMA, "version of this format", least=1)
    name: str = fact("", "the site's name, as the file's", pattern=NAME)
    description: str = fact("", "one line for `hpctrain sites list`")
    contact: str = fact("", "who answers for the preset")
    url: str = fact("", "the cluster's own documentation")
    reviewed: str = fact("", "when its values were last held against the sources", pattern=DATE)
    stability: str = fact(
        "local",
        "reference: every value has a public source; unverified: refused until an admin edits it; "
        "local: written at the site; base: only for other presets to extend",
        choices=("reference", "unverified", "local", "base"),
    )
    extends: str = fact("", "name of the preset that this one is laid upon", pattern=NAME)
    sources: dict[str, str] = fact({}, "short name to where the value stands, for `source`")


@dataclass(frozen=True)
class Detect:
    """[detect]: how the site is known. Every pattern must match the whole text."""

    env: dict[str, str] = fact(
        {},
        "environment variable to a pattern of its value; one suffices",
        keys=VARIABLE,
        regex=True,
    )
    file: dict[str, str] = fact(
        {}, "absolute path to a pattern of the file's first line", keys=ABSOLUTE, regex=True
    )
    slurm_cluster: list[str] = fact(
        [],
        "patterns of SLURM's ClusterName, which is not unique in the world: for a preset that was "
        "not written at the site it counts only beside another signal",
        regex=True,
    )
    hostname: list[str] = fact([], "patterns of the host's name, short or full", regex=True)
    priority: int = fact(
        0, "of several sites that match, the highest wins if it is alone", least=None
    )


@dataclass(frozen=True)
class SlurmFacts:
    """[slurm]: what the scheduler here demands and refuses."""

    account_required: bool | None = fact(None, "whether a job needs --account")
    account_env: list[str] = fact(
        [], "variables that hold a user's account, first one set wins", pattern=VARIABLE
    )
    account_hint: str = fact("", "the command that shows a user's accounts")
    qos_default: str = fact("", "quality of service where none is asked for")
    constraint: str = fact("", "node features that every job asks for")
    gpu_request: str = fact(
        "gpus-per-node",
        "how GPUs are asked for",
        choices=("gpus-per-node", "gres", "gpus", "gpus-per-task", "none"),
    )
    gres_name: str = fact("gpu", "name in --gres, with a type where the site wants one: gpu:a100")
    forbidden: list[str] = fact([], "options that sbatch refuses here, e.g. --gres", pattern=OPTION)
    required: list[str] = fact(
        [], "options that every job must have, e.g. --network=disable_rdzv_get", pattern=OPTION
    )
    extra: list[str] = fact([], "more sbatch options for every job", pattern=OPTION)
    export: str = fact(
        "all",
        "how the submitting shell's environment reaches the job",
        choices=("all", "none", "unset"),
    )
    sbatch_env: list[str] = fact(
        ["SBATCH_ACCOUNT"],
        "SBATCH_* variables of the user's shell that still count",
        pattern=SBATCH,
    )
    mpi: str = fact("", "srun's --mpi")
    launcher: str = fact(
        "srun", "what starts one task on each node", choices=("srun", "ibrun", "mpirun")
    )
    srun_args: list[str] = fact([], "more srun options for every job", pattern=OPTION)
    requeue: bool | None = fact(None, "whether a job may be requeued here (JobRequeue)")
    kill_wait_s: int | None = fact(None, "seconds between SIGTERM and SIGKILL (KillWait)")
    send_user_signal: bool | None = fact(
        None, "whether a preemption sends the --signal one too (preempt_send_user_signal)"
    )


@dataclass(frozen=True)
class Preemption:
    """[partitions.X.preemption]: what happens to a job whose nodes are wanted."""

    mode: str = fact(
        "unknown", "what SLURM does", choices=("none", "requeue", "cancel", "suspend", "unknown")
    )
    grace_s: int | None = fact(None, "seconds from the notice to the kill (GraceTime)")
    signal: str = fact("", "first signal of the notice, e.g. SIGTERM; empty where there is none")
    exempt_s: int | None = fact(None, "seconds for which a job cannot be preempted")


@dataclass(frozen=True)
class Partition:
    """[partitions.X]: limits of one partition. `X` is its SLURM name."""

    description: str = fact("", "what it is for")
    gpus_per_node: int | None = fact(None, "GPUs of a node")
    gpu: str = fact("", "their model")
    cpus_per_node: int | None = fact(None, "CPU cores that a job can use, not those there are")
    mem_gib: float | None = fact(None, "memory of a node that a job can use, GiB")
    max_time: str = fact("", "longest job, [days-]hours:minutes:seconds", pattern=TIME)
    min_nodes: int | None = fact(None, "fewest nodes of a job")
    max_nodes: int | None = fact(None, "most nodes of a job")
    walltime_bins: dict[str, str] = fact(
        {},
        "nodes MIN-MAX (or MIN-) to the longest job of that size",
        pattern=TIME,
        keys=BIN,
    )
    qos: str = fact("", "quality of service that jobs here need")
    exclusive: bool | None = fact(None, "whether a job has its nodes for itself")
    auto: bool = fact(True, "whether submit may choose it by itself")
    preemption: Preemption = field(default_factory=Preemption)


@dataclass(frozen=True)
class Network:
    """[network]: between nodes."""

    kind: str = fact(
        "", "fabric", choices=("", "ib", "slingshot", "efa", "roce", "gpudirect-tcp", "tcp")
    )
    socket_ifnames: list[str] = fact(
        [], "exact names of the interfaces that sockets use, at most 16"
    )
    socket_mode: str = fact(
        "exact",
        "whether NCCL is told to match them whole (=), or as they stand, for plugins that look at "
        "the text",
        choices=("exact", "as-is"),
    )
    hcas: list[str] = fact([], "InfiniBand or RoCE adapters that NCCL uses, at most 32")
    hca_mode: str = fact(
        "exact", "whether `hcas` are whole names or beginnings", choices=("exact", "prefix")
    )
    rate_gbps: int | None = fact(None, "of one adapter, Gb/s")
    nics_per_node: int | None = fact(None, "adapters of a node")
    link_layer: str = fact("", "of the adapters", choices=("", "InfiniBand", "Ethernet"))
    rendezvous_host: str = fact(
        "", "name under which ranks reach the first node, e.g. {host}i; empty for its own"
    )
    resolve: str = fact(
        "name", "what ranks are given: the name, or its address", choices=("name", "ipv4", "ipv6")
    )


@dataclass(frozen=True)
class When:
    """[env.when.X]: variables for some versions only; all conditions that are given must hold."""

    nccl: str = fact(
        "", "NCCL's version, e.g. >=2.27; a comma means and: >=2.21,<2.24", pattern=VERSIONS
    )
    torch: str = fact("", "torch's version, in the same form", pattern=VERSIONS)
    plugin: str = fact(
        "",
        "version of the network plugin that the loaded module tells in its variable",
        pattern=VERSIONS,
    )
    gpu: str = fact("", "pattern of the GPU's whole name", regex=True)
    nodes: str = fact("", "single or multi", choices=("", "single", "multi"))
    set: dict[str, str] = fact({}, "variables to set", keys=VARIABLE)
    unset: list[str] = fact([], "variables to take away", pattern=VARIABLE)


@dataclass(frozen=True)
class EnvGroups:
    """[env]: environment of the ranks. Interfaces and adapters come from [network] instead."""

    common: dict[str, str] = fact({}, "for any number of nodes", keys=VARIABLE)
    single_node: dict[str, str] = fact({}, "for jobs of one node", keys=VARIABLE)
    multi_node: dict[str, str] = fact({}, "for jobs of several nodes", keys=VARIABLE)
    unset: list[str] = fact(
        [], "variables to take away from what the user's shell hands on", pattern=VARIABLE
    )
    when: dict[str, When] = field(default_factory=dict)


@dataclass(frozen=True)
class Modules:
    """[modules]: what is loaded on the first node before srun; all nodes get its environment."""

    init: str = fact("", "file to source first, where the shell has no `module`")
    purge: bool = fact(False, "`module purge` first")
    use: list[str] = fact([], "`module use` of these")
    load: list[str] = fact([], "`module load` of these")
    provides_env: list[str] = fact(
        [],
        "variables that the modules set themselves, not to be set again",
        pattern=VARIABLE,
    )


@dataclass(frozen=True)
class Cpus:
    """[cpus]: of a node. Without a map ranks are bound as the machine itself tells."""

    of_gpu: list[str] = fact(
        [], "CPUs near each GPU, in the order of the GPUs, e.g. 49-55", pattern=CPU_LIST
    )


@dataclass(frozen=True)
class Storage:
    """[storage]: where files belong. Texts may have $VARIABLES of the user's shell."""

    scratch: str = fact("", "large and shared")
    checkpoint: str = fact("", "where runs belong; `--runs` where none is given")
    local: str = fact("", "on the node itself, fast")
    fs: str = fact(
        "", "file system of `checkpoint`", choices=("", "lustre", "gpfs", "nfs", "beegfs", "vast")
    )
    flock: str = fact(
        "unknown", "what flock(2) holds there", choices=("coherent", "local", "none", "unknown")
    )
    purge_days: int | None = fact(None, "files untouched for so long are deleted")
    quota_cmd: str = fact("", "the command that shows a user's quota")


@dataclass(frozen=True)
class Container:
    """[container]: how containers run here."""

    runtime: str = fact(
        "",
        "which",
        choices=("", "apptainer", "enroot-pyxis", "shifter", "podman", "cscs-ce", "none"),
    )
    binds: list[str] = fact([], "paths of the host that a container needs")
    env_pass: list[str] = fact(
        [], "variables that must be named to reach the inside", pattern=VARIABLE
    )


@dataclass(frozen=True)
class Baseline:
    """[baseline]: what a healthy network does, for preflight."""

    allreduce_busbw_gbs: dict[str, float] = fact(
        {}, "nodes to bus bandwidth of an all-reduce, GB/s (10^9 bytes)", keys=COUNT
    )
    size_mib: int | None = fact(None, "size of that all-reduce, MiB")
    tolerance: float = fact(0.8, "a node group below this share of it is slow")


@dataclass(frozen=True)
class Expect:
    """[expect]: what a healthy node has, for preflight."""

    driver_min: str = fact("", "oldest GPU driver")
    nvlinks: int | None = fact(None, "NVLink connections of a GPU")
    memlock: str = fact("", "`ulimit -l`: unlimited, or the fewest KiB", pattern=MEMLOCK)
    shm_gib_min: float | None = fact(None, "fewest GiB of /dev/shm")
    nccl_conf: bool | None = fact(None, "whether nodes have /etc/nccl.conf")


@dataclass(frozen=True)
class Lock:
    """[lock]: what users cannot override without --allow-locked. The admins' layers only."""

    keys: list[str] = fact(
        [], "paths such as env.multi_node.NCCL_NET, settings.slurm.partition, or a whole table"
    )


TABLES: dict[str, type] = {
    "detect": Detect,
    "slurm": SlurmFacts,
    "network": Network,
    "env": EnvGroups,
    "modules": Modules,
    "cpus": Cpus,
    "storage": Storage,
    "container": Container,
    "baseline": Baseline,
    "expect": Expect,
    "lock": Lock,
}
"""Every table that stands once. Besides there are [partitions.X] and [settings.<section>]."""


@dataclass(frozen=True)
class Key:
    """One key of a table, as reading, the JSON Schema and the reference page see it."""

    name: str
    form: str
    """A value of _FORMS; "table" for a table of its own, "tables" for named ones of one class."""
    inner: type | None
    """The class behind "table" and "tables"."""
    doc: str
    default: Any
    choices: tuple[str, ...] = ()
    pattern: str = ""
    keys: str = ""
    least: float | None = None
    regex: bool = False


def keys_of(cls: type[Any]) -> dict[str, Key]:
    """The keys of one of the schema's classes, by name, in their order."""
    if cls not in _KNOWN:
        hints = get_type_hints(cls)
        _KNOWN[cls] = {
            attribute.name: _key(attribute, hints[attribute.name]) for attribute in fields(cls)
        }
    return _KNOWN[cls]


def _key(attribute: Field[Any], hint: Any) -> Key:
    """A field of a class as a key; `hint` is its type."""
    name, form = attribute.name, _FORMS.get(hint)
    if form is not None:
        has_default = attribute.default is not MISSING
        default = attribute.default if has_default else _made(attribute)
        return Key(name, form, None, default=default, **attribute.metadata)
    if get_origin(hint) is dict:
        _, inner = get_args(hint)
        return Key(name, "tables", inner, doc=title_of(inner), default=None)
    return Key(name, "table", hint, doc=title_of(hint), default=None)


def _made(attribute: Field[Any]) -> Any:
    assert attribute.default_factory is not MISSING  # noqa: S101 - `fact` gives one or the other
    return attribute.default_factory()


def title_of(cls: type[Any]) -> str:
    """What a table is, from its class's first line: the words behind "[name]: "."""
    return (cls.__doc__ or "").splitlines()[0].partition(": ")[2]


def make(cls: type[_T], values: Mapping[str, Any]) -> _T:
    """An instance of one of the schema's classes from plain values, nested tables included."""
    keys = keys_of(cls)
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        inner, form = keys[name].inner, keys[name].form
        if inner is None:
            arguments[name] = value
        elif form == "table":
            arguments[name] = make(inner, value)
        else:
            arguments[name] = {
                inner_name: make(inner, table) for inner_name, table in value.items()
            }
    return cls(**arguments)


def checked(key: Key, value: Any, told: str) -> Any:
    """The value as its key takes it; of a table with free names, one of its values.

    TOML's unquoted dates and times of day pass as text: `reviewed = 2026-01-31`.

    Args:
        key: The key.
        value: As the file has it.
        told: How messages name it.

    Raises:
        ValueError: it is of another type or form.
    """
    form = key.form.removesuffix(" table")
    converted = _converted(value, form)
    if converted is None:
        raise ValueError(f"{told} is {shown(value)}; it takes {TAKES[form]}")
    if form == "text":
        if converted:
            _check_text(key, converted, f"{told} is {shown(converted)}")
        elif key.choices and "" not in key.choices:
            raise ValueError(f'{told} is ""; it takes one of {", ".join(key.choices)}')
    elif form == "texts":
        for text in converted:
            _check_text(key, text, f"{told} has {shown(text)}")
    elif form != "boolean" and key.least is not None and converted < key.least:
        raise ValueError(f"{told} is {shown(value)}; it takes at least {key.least:g}")
    return converted


def _converted(value: Any, form: str) -> Any:
    """The value as that form, or None where it is of another."""
    if form == "texts":
        texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return list(value) if texts else None
    if isinstance(value, bool) or form == "boolean":
        return value if isinstance(value, bool) and form == "boolean" else None
    if form == "integer":
        return value if isinstance(value, int) else None
    if form == "number":
        finite = isinstance(value, int | float) and math.isfinite(value)
        return float(value) if finite else None
    if isinstance(value, dt.date | dt.time) and not isinstance(value, dt.datetime):
        return value.isoformat()
    return value if isinstance(value, str) else None


def _check_text(key: Key, text: str, told: str) -> None:
    if not text:
        raise ValueError(f"{told}; leave empty texts out")
    if not text.isprintable():
        raise ValueError(f"{told}; it takes one line without control characters")
    if key.choices and text not in key.choices:
        raise ValueError(f"{told}; it takes one of {', '.join(filter(None, key.choices))}")
    if key.pattern and not re.fullmatch(key.pattern, text):
        raise ValueError(f"{told}; it takes {in_words(key.pattern)}")
    if key.regex:
        try:
            re.compile(text)
        except re.error as error:
            raise ValueError(f"{told}, which is no regular expression: {error}") from None


def in_words(pattern: str) -> str:
    """What a pattern of the schema's asks for."""
    return IN_WORDS.get(pattern, f"what matches {pattern}")


def shown(value: Any) -> str:
    """A value as its owner wrote it, near enough for a message."""
    return json.dumps(value, ensure_ascii=False, default=str)
