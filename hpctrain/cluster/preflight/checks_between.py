"""Judge what only several nodes show: clocks, names, the shared directory, bandwidth. Pure.

Up to `ALL_UP_TO` nodes, each looks for the files of all others. Beyond that the looks would grow
with the square of the nodes at one file server: each looks for the first node and for those at
distances 1, 2, 4, ... to both sides. A node that stands apart is missed by all that look for it.
"""

from __future__ import annotations

from statistics import median_low
from typing import TYPE_CHECKING

from hpctrain.cluster.preflight.bounded import COHERENT, LOCAL, NONE
from hpctrain.cluster.preflight.facts import by_value
from hpctrain.cluster.preflight.report import FAIL, OK, SHOWN_NODES, UNKNOWN, WARN, Result, names

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from hpctrain.cluster.preflight.rendezvous import Skew

    Sights = Mapping[str, Collection[str]]


SKEW_S = 1.0
LOGIN = "@login"
"""The file that the login node left in the directory; no node has such a name."""


def check_present(nodes: Sequence[str], missing: Mapping[str, str]) -> list[Result]:
    """Every node answered."""
    results = [
        Result("reach", FAIL, why, silent, "its agent could not meet the others either")
        for why, silent in by_value(missing).items()
    ]
    return results or [Result("reach", OK, f"all {len(nodes)} nodes answer")]


def check_clocks(first: str, skews: Mapping[str, Skew]) -> list[Result]:
    """Clocks within a second of each other; the one that differs from the others is named."""
    if not skews:
        return []
    offsets = {first: 0.0} | {node: skew.offset_s for node, skew in skews.items()}
    usual = median_low(offsets.values())
    off = {node: offset - usual for node, offset in offsets.items()}
    bounds = {first: 0.0} | {node: skew.bound_s for node, skew in skews.items()}
    wrong = [node for node in off if abs(off[node]) - bounds[node] > SKEW_S]
    unsure = [n for n in off if n not in wrong and abs(off[n]) + bounds[n] > SKEW_S]
    hint = "the ledger's times and any expiry go wrong; have NTP or chrony looked at"
    results = []
    if len(wrong) * 2 >= len(offsets):  # of two that differ, nobody can say which one is right
        gap = max(offsets.values()) - min(offsets.values())
        results.append(Result("clock", FAIL, f"{gap:.1f} s apart", [], hint))
    else:
        results += [
            Result("clock", FAIL, f"{off[node]:+.1f} s from the others", [node], hint)
            for node in wrong
        ]
    if unsure:
        results.append(Result("clock", UNKNOWN, "too slow an answer to tell the time by", unsure))
    widest = max(abs(value) for value in off.values())
    return results or [Result("clock", OK, f"within {max(widest, 0.001):.3f} s")]


def check_names(unresolved: Mapping[str, Sequence[str]]) -> list[Result]:
    """Every node finds the others by name; of many, those that are its neighbours."""
    blind = {node: names(hosts) for node, hosts in unresolved.items() if hosts}
    hint = "some launchers and libraries go by name: add them to DNS or /etc/hosts"
    results = [
        Result("names", WARN, f"cannot resolve {hosts}", nodes, hint)
        for hosts, nodes in by_value(blind).items()
    ]
    if len(unresolved) <= ALL_UP_TO:
        return results or [Result("names", OK, "every node finds the others by name")]
    return results or [Result("names", OK, "every node finds the first and its neighbours by name")]


def check_shared(
    folder: str,
    errors: Mapping[str, str],
    unseen: Mapping[str, Sequence[str]],
    looked: Mapping[str, Sequence[str]],
) -> list[Result]:
    """Every node writes into the directory and sees what the others wrote.

    Args:
        folder: The directory.
        errors: Node to why it could not write, "" where it could.
        unseen: Node to the names whose files it does not see; `LOGIN` is the submitting host.
        looked: Node to the names that it has looked for; see `sight`.
    """
    hint = f"{folder} must be one directory, on every node: choose another with --runs"
    failed = {node: why for node, why in errors.items() if why}
    results = [
        Result("shared directory", FAIL, f"cannot write there: {why}", nodes, hint)
        for why, nodes in by_value(failed).items()
    ]
    lost = [node for node in unseen if LOGIN in unseen[node] and node not in failed]
    if lost:
        text = "does not see what the submitting host wrote there"
        results.append(Result("shared directory", FAIL, text, lost, hint))
    left_out = {*failed, *lost}
    heard = [node for node in unseen if node not in left_out]
    results += _one_sided(heard, looked, missed(heard, unseen), hint)
    seen = "every node sees all files"
    if len(unseen) > ALL_UP_TO:
        seen = "the first node sees all files, every other one the first's and its neighbours'"
    return results or [Result("shared directory", OK, f"{folder}: {seen}")]


def apart(
    folder: str,
    errors: Mapping[str, str],
    unseen: Mapping[str, Sequence[str]],
    looked: Mapping[str, Sequence[str]],
) -> str:
    """Why these nodes cannot train together, whichever are left behind; "" where they can.

    Half of them or more do not see, or are not seen in, what was renamed into place: no checkpoint
    of such nodes is ever complete. Who cannot write is not counted, since a full disk is repaired;
    nor who does not see its own file, since that is a server which does not answer.
    """
    heard = [node for node in unseen if not errors.get(node) and node not in unseen[node]]
    blind = missed(heard, unseen)
    results = _one_sided(heard, looked, blind, "")
    involved = {*blind, *(other for others in blind.values() for other in others)}
    if not results or results[0].nodes or 2 * len(involved) < len(heard):
        return ""
    return (
        f"{folder} is not one directory for all nodes ({results[0].message}): have it mounted so "
        "that a node sees what another one has renamed, or choose another disk with --runs"
    )


def _one_sided(
    heard: Sequence[str],
    looked: Mapping[str, Sequence[str]],
    blind: Mapping[str, Sequence[str]],
    hint: str,
) -> list[Result]:
    """Nodes that miss most of the others, and nodes that most others miss."""
    bad = standing_apart(heard, looked, blind)
    if bad and len(bad) * 2 < len(heard):
        text = "its files are not seen elsewhere, or others' not there"
        return [Result("shared directory", FAIL, text, bad, hint)]
    lines = [f"{node} does not see {names(others)}" for node, others in blind.items()]
    summary = "; ".join(lines[:SHOWN_NODES])
    if len(lines) > SHOWN_NODES:
        summary += f"; and {len(lines) - SHOWN_NODES} more"
    return [Result("shared directory", FAIL, summary, [], hint)] if summary else []


def check_locks(kinds: Mapping[str, str], *, held: bool) -> list[Result]:
    """What flock(2) is worth. Checkpoints are right without it: see `retention.bar`."""
    if not kinds:
        return []
    if not held:
        return [Result("locks", UNKNOWN, "the first node could not take a lock")]
    by_kind = by_value(kinds)
    if list(by_kind) == [COHERENT]:
        return [Result("locks", OK, "coherent: a lock of one node holds on the others")]
    notes = {
        LOCAL: "local: a lock of one node does not hold here",
        NONE: "none: the file system has no locks",
    }
    return [
        Result(
            "locks",
            WARN if kind in notes else UNKNOWN,
            notes.get(kind, "no answer"),
            nodes,
            "Lustre: mount with -o flock; of two submits of one run at once both may be accepted, "
            "and the later one has it; on NFS a fact of the ledger may be lost",
        )
        for kind, nodes in by_kind.items()
        if kind != COHERENT
    ]


ALL_UP_TO = 32


def neighbours(rank: int, size: int) -> list[int]:
    """Other ranks at distances of powers of two, and the first; all where nodes are few."""
    if size <= ALL_UP_TO:
        return [other for other in range(size) if other != rank]
    distances = [1 << power for power in range((size - 1).bit_length())]
    ranks = {(rank + sign * one) % size for one in distances for sign in (1, -1)} | {0}
    return sorted(ranks - {rank})


def looked_for(rank: int, size: int) -> list[int]:
    """The ranks whose files a node looks for: its neighbours; the first node looks for all."""
    return list(range(1, size)) if rank == 0 else neighbours(rank, size)


def missed(heard: Sequence[str], unseen: Sights) -> dict[str, tuple[str, ...]]:
    """Node to those of the others that it has not seen; without the nodes that saw all."""
    judged = set(heard)
    lost = {node: tuple(name for name in unseen[node] if name in judged) for node in heard}
    return {node: others for node, others in lost.items() if others}


def standing_apart(heard: Sequence[str], looked: Sights, blind: Sights) -> list[str]:
    """The nodes that miss, or are missed by, most of those who see each other; in order.

    None where no set of nodes that see each other, however many others lie between, is more than
    half of all: then nobody can say who is right.
    """
    judged = set(heard)
    lines = {node: [n for n in looked[node] if n in judged and n != node] for node in heard}
    most = _largest(lines, {node: set(others) for node, others in blind.items()})
    if 2 * len(most) <= len(heard):
        return []
    lookers = dict.fromkeys(heard, 0)
    missers = dict.fromkeys(heard, 0)
    for node in most:
        for name in lines[node]:
            lookers[name] += 1
        for name in blind.get(node, ()):
            missers[name] += 1
    apart = []
    for node in heard:
        mates = sum(name in most for name in lines[node])
        lost = sum(name in most for name in blind.get(node, ()))
        if 2 * lost > mates or 2 * missers[node] > lookers[node]:
            apart.append(node)
    return apart


def _largest(lines: Sights, blind: Mapping[str, set[str]]) -> set[str]:
    """The largest set of nodes between which there are ways of mutual sight."""
    left, largest = set(lines), set[str]()
    for start in lines:
        if start not in left:
            continue
        left.discard(start)
        group, todo = {start}, [start]
        while todo:
            node = todo.pop()
            for other in lines[node]:
                sees = other not in blind.get(node, ()) and node not in blind.get(other, ())
                if sees and other in left:
                    left.discard(other)
                    group.add(other)
                    todo.append(other)
        largest = max(largest, group, key=len)
    return largest
