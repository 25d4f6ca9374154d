"""How what hpctrain adds grows with ranks: one law for each measure."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

RANKS_PER_NODE = 8
FAN_OUT = 32
MONTH_S = 30 * 86400.0
STEP_MARK_BYTES = 300
"""A step mark of the ledger, as a line."""


@dataclass(frozen=True)
class Constants:
    """What one thing takes; names end with their unit, operations are counted."""

    look_s: float
    status_base_s: float
    status_mb_s: float
    start_rank_operations: float
    start_node_operations: float
    start_operations: float
    save_rank_operations: float
    save_operations: float
    resume_rank_operations: float
    resume_operations: float
    import_node_operations: float
    import_rank_operations: float
    control_hop_s: float
    message_s: float
    look_cpu: float
    child_cpu: float
    gather_s: float
    value_s: float
    table_s: float
    table_rank_s: float
    publish_s: float
    publish_rank_s: float
    choose_s: float
    choose_rank_s: float
    choose_torn_s: float
    choose_torn_rank_s: float
    read_s: float
    read_rank_s: float
    meet_s: float
    meet_agent_s: float
    ranks_agent_s: float
    ask_cpu_s: float
    begin_node_s: float
    network_s: float
    name_s: float
    shared_look_s: float
    shared_operations_per_s: float


def constants() -> Constants:
    """As they stand in constants.toml."""
    told = tomllib.loads(Path(__file__).with_name("constants.toml").read_text())
    values = {**told["measured"], **told["thought"]}
    return Constants(**{field.name: float(values[field.name]) for field in fields(Constants)})


def nodes(ranks: int) -> int:
    """Of so many ranks."""
    return -(-ranks // RANKS_PER_NODE)


def depth(nodes: int, fan_out: int = FAN_OUT) -> int:
    """Levels below the root of a tree of nodes in which each has so many children at most."""
    levels, here, width = 0, 1, 1
    while here < nodes:
        width *= fan_out
        here += width
        levels += 1
    return levels


def start_operations(ranks: int, given: Constants) -> float:
    """On the run's directory: a + b x ranks + c x nodes."""
    by_nodes = given.start_node_operations * nodes(ranks)
    return given.start_operations + given.start_rank_operations * ranks + by_nodes


def import_operations(ranks: int, given: Constants) -> float:
    """On the environment, where it lies on the shared file system: c x nodes + b x ranks."""
    by_nodes = given.import_node_operations * nodes(ranks)
    return by_nodes + given.import_rank_operations * ranks


def save_operations(ranks: int, given: Constants) -> float:
    """On the run's directory: a + b x ranks, two listings, and two looks at a sample of files."""
    by_ranks = given.save_rank_operations * ranks
    return given.save_operations + by_ranks + 2 * (listing(ranks) + sample(ranks))


def listing(files: int) -> float:
    """Calls for the names in a folder: 32 KiB of them at a time."""
    return files / 500


def sample(files: int) -> int:
    """Files whose sizes are looked at where a server must not be asked for each."""
    from hpctrain.checkpoint.store.find import SAMPLE

    return min(files, SAMPLE)


def resume_operations(ranks: int, given: Constants) -> float:
    """On the run's directory: a + b x ranks; in b rank 0's look at each file."""
    return given.resume_operations + given.resume_rank_operations * ranks


def looks_of_commit_s(ranks: int, given: Constants, *, shared: bool) -> float:
    """Before the rename rank 0 lists the folder and looks at a sample of the files."""
    look = given.shared_look_s if shared else given.look_s
    return (listing(ranks) + sample(ranks)) * look


def looks_of_choice_s(ranks: int, given: Constants, *, shared: bool) -> float:
    """Before a restore rank 0 looks at each file, many at once: ranks x look / lookers.

    A shared server answers so many in a second and no more.
    """
    if not shared:
        return ranks * given.look_s
    from hpctrain.checkpoint.store.find import LOOKERS

    each = max(given.shared_look_s / LOOKERS, 1 / given.shared_operations_per_s)
    return ranks * each


def status_s(ranks: int, given: Constants, *, shared: bool, days: float = 30.0) -> float:
    """Of a run so old: base + MB x parse + a listing and a sample of the newest checkpoint."""
    megabytes = ledger_bytes(days) / 1e6
    looks = looks_of_commit_s(ranks, given, shared=shared)
    return given.status_base_s + megabytes * given.status_mb_s + looks


def ledger_bytes(days: float) -> float:
    """Step marks: one a minute from the third hour on, whatever the number of ranks."""
    return days * 1440 * STEP_MARK_BYTES


def samples_bytes(ranks: int, days: float = 30.0) -> float:
    """`ranks.jsonl`: a line of all ranks, as often as the code's own budget allows."""
    from hpctrain.train.runtime.telemetry import LINE_BYTES, RANK_BYTES, sample_every_s

    size, age, total = LINE_BYTES + RANK_BYTES * ranks, 60.0, 0.0
    while age < days * 86400:
        age += sample_every_s(age, 5.0, ranks)
        total += size
    return total
