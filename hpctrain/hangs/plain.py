"""Evidence and stands as plain data, small enough for a thousand nodes to tell at once. Pure.

tests/unit/hangs/test_plain.py holds the promises.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from hpctrain.hangs.evidence import Collective, Frame, Front, RankEvidence, Recorded
from hpctrain.hangs.standing import Stand

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MOST_CALLS = 24
"""Of a group, the newest: ranks that call different ones do so where they stand."""
MOST_FRAMES = 24


def plain_of(evidence: RankEvidence) -> dict[str, Any]:
    """What JSON holds of it; of long lists the end that counts."""
    recorded = evidence.recorded
    calls: defaultdict[str, list[Collective]] = defaultdict(list)
    for call in recorded.collectives if recorded is not None else ():
        calls[call.group].append(call)
    frames = evidence.frames
    kept = [call for group in calls.values() for call in group[-MOST_CALLS:]]
    return {
        "rank": evidence.rank,
        "node": evidence.node,
        "process": evidence.process,
        "fronts": None if recorded is None else {name: [*f] for name, f in recorded.fronts.items()},
        "calls": [[*call] for call in kept],
        "groups": {name: _short(members) for name, members in evidence.groups.items()},
        "frames": None if frames is None else [[*frame] for frame in frames[:MOST_FRAMES]],
        "step": evidence.step,
        "phase": evidence.phase,
        "has_returned": evidence.has_returned,
    }


def evidence_of(plain: Mapping[str, Any]) -> RankEvidence:
    """What `plain_of` gave, after JSON."""
    recorded = None
    if plain["fronts"] is not None:
        fronts = {name: Front(*front) for name, front in plain["fronts"].items()}
        recorded = Recorded(fronts, tuple(_call(call) for call in plain["calls"]))
    frames = plain["frames"]
    return RankEvidence(
        plain["rank"],
        plain["node"],
        plain["process"],
        recorded=recorded,
        groups={name: _members(short) for name, short in plain["groups"].items()},
        frames=None if frames is None else tuple(Frame(*frame) for frame in frames),
        step=plain["step"],
        phase=plain["phase"],
        has_returned=plain["has_returned"],
    )


def plain_stand(stand: Stand) -> list[Any]:
    """What JSON holds of it."""
    return [*stand[:4], stand.limit_s if math.isfinite(stand.limit_s) else None]


def stand_of(plain: Sequence[Any]) -> Stand:
    """What `plain_stand` gave, after JSON."""
    rank, step, phase, stood_s, limit_s = plain
    return Stand(rank, step, phase, stood_s, math.inf if limit_s is None else limit_s)


def _call(plain: Sequence[Any]) -> Collective:
    group, number, name, sizes, dtypes, started_ns = plain
    return Collective(group, number, name, tuple(map(tuple, sizes)), tuple(dtypes), started_ns)


def _short(members: Sequence[int]) -> dict[str, list[int]]:
    """Members of a group: as a range, where each is as far from the next."""
    listed = list(members)
    step = listed[1] - listed[0] if len(listed) > 1 else 1
    if step > 0 and listed and listed == list(range(listed[0], listed[-1] + 1, step)):
        return {"range": [listed[0], listed[-1] + 1, step]}
    return {"list": listed}


def _members(short: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    return tuple(range(*short["range"])) if "range" in short else tuple(short["list"])
