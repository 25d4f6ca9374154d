"""The search for the nodes that make a collective slow. Pure: groups go out, bandwidths come in.

    groups_to_try = search(nodes, limits)
    groups = next(groups_to_try)                       # disjoint: tried at the same time
    while True: groups = groups_to_try.send(results)   # until StopIteration: its SearchResult

A group is slow when one of its nodes is. All nodes together first; where they are slow, halves of
halves down to pairs (without a baseline pairs at once, since halves that hold a bad node each look
alike); then every suspect with a partner that is known to be good, and once more with another. A
slow result counts only when it comes twice, so that one moment's noise names nobody.
`SlowNodeSearch` is the first node's part: orders out, measurements in.
tests/unit/preflight/test_slow_nodes.py holds the promise: the bad ones are named, and no healthy
one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.preflight.facts import outliers
from hpctrain.cluster.preflight.report import FAIL, OK, UNKNOWN, WARN, Result, names

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

Group = tuple[str, ...]
Results = dict[Group, float | None]
"""Bus bandwidth in GB/s of each group that was asked for; None where it failed or hung."""
Tests = list[dict[str, Any]]
"""Groups to try at the same time: {"name", "nodes"} each; empty when all is known."""
PAIR = 2
SMALLEST_SPLIT = 4
"""A group of three cannot be halved into groups that have a network between them."""


@dataclass(frozen=True)
class Limits:
    """What counts as slow.

    Attributes:
        baseline: Number of nodes to the bus bandwidth of a healthy group, GB/s; may be empty.
        tolerance: Share of the baseline below which a group is slow.
        apart: Without a baseline, the share of the best pair below which a pair is slow. The best,
            not a median: a bad minority can spoil every pair but one, and noise makes nobody fast.
    """

    baseline: Mapping[int, float] = field(default_factory=dict)
    tolerance: float = 0.8
    apart: float = 0.5

    def floor(self, size: int) -> float | None:
        """Slowest healthy bandwidth of a group of this size; None without a baseline for it.

        Between two sizes that are known the lower one counts: nobody is named for a guess.
        """
        if size in self.baseline:
            return self.baseline[size] * self.tolerance
        sizes = [n for n in self.baseline if n > 1]
        below = [n for n in sizes if n < size]
        above = [n for n in sizes if n > size]
        near = [*([max(below)] if below else []), *([min(above)] if above else [])]
        if size < PAIR or not near:
            return None
        return min(self.baseline[n] for n in near) * self.tolerance


@dataclass(frozen=True)
class SearchResult:
    """Who it was.

    Attributes:
        bad: Slow with two different good partners, or alone.
        suspects: Slow, and no two good partners were there to prove it.
        whole: Bandwidth of all nodes together, GB/s; None where that failed.
        whole_slow: All together were slow, twice; with nobody bad the fault lies between them.
        compared: Whether there was anything to hold the measurements against.
    """

    bad: list[str]
    suspects: list[str]
    whole: float | None
    whole_slow: bool
    compared: bool


def search(nodes: Sequence[str], limits: Limits) -> Generator[list[Group], Results, SearchResult]:
    """Find the slow nodes; see the module's text for how it is driven.

    Names exactly the bad ones where they are fewer than half of the nodes, and three nodes or more.
    """
    return _SearchState(list(nodes), limits).run()


class SlowNodeSearch:
    """One search, a round at a time."""

    def __init__(self, nodes: Sequence[str], limits: Limits) -> None:
        self.rounds = 0
        self._nodes = list(nodes)
        self._search = search(nodes, limits)
        self._groups: list[Group] = []
        self._sums: dict[str, list[float | None]] = {}
        self._tries: list[Any] = []
        self._failures: list[Any] = []
        self._result: SearchResult | None = None

    def begin(self) -> Tests:
        """The first groups."""
        return self._tests(next(self._search))

    def go_on(self, by_node: Mapping[str, Any]) -> Tests:
        """The next groups.

        `by_node` has what each measured: {"ranks": [...]}, {"error": why}, or nothing.
        """
        for node, value in by_node.items():
            if "ranks" in value:
                self._sums[node] = [one["product"] for one in value["ranks"]]
        results = {group: self._of_group(group, by_node) for group in self._groups}
        try:
            return self._tests(self._search.send(results))
        except StopIteration as end:
            self._result = end.value
            return []

    def results(self) -> list[Result]:
        """What came of it."""
        if self._result is None:
            return []
        return [*check_bandwidth(self._nodes, self._result), *check_products(self._sums)]

    def measured(self) -> dict[str, Any]:
        """Numbers for the report: each try is [nodes, GB/s, seconds to join]."""
        whole = None if self._result is None else self._result.whole
        return {
            "busbw_gbs": whole,
            "rounds": self.rounds,
            "tries": self._tries,
            "failures": self._failures,
        }

    def _tests(self, groups: list[Group]) -> Tests:
        self._groups = groups
        self.rounds += 1
        return [
            {"name": f"{self.rounds}.{number}", "nodes": list(group)}
            for number, group in enumerate(groups)
        ]

    def _of_group(self, group: Group, by_node: Mapping[str, Any]) -> float | None:
        """The group's bandwidth is its slowest rank's; None where any of them failed."""
        values = [by_node.get(node, {}) for node in group]
        why = next((value["error"] for value in values if "error" in value), "")
        if why or not all("ranks" in value for value in values):
            self._failures.append([list(group), why or "silent"])
            return None
        ranks = [rank for value in values for rank in value["ranks"]]
        slowest = min(float(rank["busbw_gbs"]) for rank in ranks)
        joined = max(float(rank["init_s"]) for rank in ranks)
        self._tries.append([list(group), round(slowest, 4), joined])
        return slowest


class _SearchState:
    """What is known so far."""

    def __init__(self, nodes: list[str], limits: Limits) -> None:
        self._nodes = nodes
        self._limits = limits
        self._good: set[str] = set()
        self._strikes: dict[str, set[str]] = {}
        self._bad: list[str] = []
        self._best_pair = 0.0

    def run(self) -> Generator[list[Group], Results, SearchResult]:
        whole = tuple(self._nodes)
        value, slow = yield from self._whole(whole)
        baseline = self._limits.floor(len(whole)) is not None
        if len(whole) == 1:
            bad = list(whole) if slow else []
            return SearchResult(bad, [], value, slow, baseline or slow)
        if len(whole) == PAIR:
            return SearchResult([], list(whole) if slow else [], value, slow, baseline)
        if baseline and not slow:
            return SearchResult([], [], value, slow, compared=True)
        if baseline or value is None:
            yield from self._halves(whole)
        else:
            yield from self._probe_groups()
        yield from self._until_good()
        yield from self._confirm()
        return self._result(value, slow)

    def _result(self, value: float | None, slow: bool) -> SearchResult:
        bad = sorted(self._bad, key=self._nodes.index)
        if PAIR * len(bad) >= len(self._nodes):
            bad = []  # with most of them slow it is the yardstick that is wrong
        left = [n for n in self._nodes if n not in self._good and n not in bad]
        return SearchResult(bad, left, value, slow, compared=True)

    def _whole(self, whole: Group) -> Generator[list[Group], Results, tuple[float | None, bool]]:
        results = yield from self._try([whole])
        slow = self._slow(whole, results[whole])
        if slow:
            again = yield from self._try([whole])
            slow = self._slow(whole, again[whole])
            results = results if slow else again
        return results[whole], slow

    def _halves(self, whole: Group) -> Generator[list[Group], Results, None]:
        """Halve what is slow until only pairs and threes are left; the rest is good."""
        slow = [whole]
        while any(len(group) >= SMALLEST_SPLIT for group in slow):
            parts = [part for group in slow for part in _split(group)]
            slow = yield from self._slow_twice(parts)

    def _probe_groups(self) -> Generator[list[Group], Results, None]:
        """Without a baseline: everybody with somebody, and the best pair is the yardstick.

        Of an odd number one stays over, and a minority can spoil every pair. The one who stayed
        over is good then, and so is one of any pair: it meets both.
        """
        pairs = next(iter(_tournament(self._nodes)))
        rounds = [pairs]
        over = [n for n in self._nodes if not any(n in pair for pair in pairs)]
        rounds += [[(one, met)] for one in over for met in pairs[0]]
        measured: dict[Group, list[float | None]] = {}
        for groups in [*rounds, *rounds]:  # twice: noise may have hit the only good pair
            for group, value in (yield from self._try(groups)).items():
                measured.setdefault(group, []).append(value)
        for group, values in measured.items():
            if not all(self._slow(group, value) for value in values):
                self._good |= set(group)

    def _until_good(self) -> Generator[list[Group], Results, None]:
        """Everybody with somebody else each time, until two nodes are known to be good."""
        for pairs in _tournament(self._nodes):
            if len(self._good) >= PAIR:
                return
            yield from self._slow_twice(pairs)

    def _confirm(self) -> Generator[list[Group], Results, None]:
        """Each suspect with a good partner, and once more with a different one."""
        while True:
            pairs = self._next_pairs()
            if not pairs:
                return
            slow = yield from self._slow_twice(pairs)
            for suspect, partner in slow:
                self._strikes.setdefault(suspect, set()).add(partner)
                if len(self._strikes[suspect]) == PAIR:
                    self._bad.append(suspect)

    def _next_pairs(self) -> list[Group]:
        """As many suspects as there are good partners whom they have not met yet."""
        free = [n for n in self._nodes if n in self._good]
        pairs: list[Group] = []
        for suspect in self._nodes:
            if suspect in self._good or suspect in self._bad:
                continue
            met = self._strikes.get(suspect, set())
            partner = next((n for n in free if n not in met), None)
            if partner is not None:
                free.remove(partner)
                pairs.append((suspect, partner))
        return pairs

    def _slow_twice(self, groups: list[Group]) -> Generator[list[Group], Results, list[Group]]:
        """Those of the groups that are slow in two tries; the nodes of the others are good."""
        slow = groups
        for _ in range(2):
            results = yield from self._try(slow)
            slow = [group for group in slow if self._slow(group, results[group])]
            if not slow:
                break
        self._good |= {node for group in groups if group not in slow for node in group}
        return slow

    def _try(self, groups: list[Group]) -> Generator[list[Group], Results, Results]:
        results = yield groups
        pairs = [v for group, v in results.items() if len(group) == PAIR and v is not None]
        self._best_pair = max([self._best_pair, *pairs])
        return results

    def _slow(self, group: Group, value: float | None) -> bool:
        if value is None:
            return True
        floor = self._limits.floor(len(group))
        if floor is None and len(group) == PAIR and len(self._nodes) > PAIR:
            floor = self._limits.apart * self._best_pair
        return floor is not None and value < floor


def _split(group: Group) -> list[Group]:
    """Two halves, or the group itself where it is too small."""
    if len(group) < SMALLEST_SPLIT:
        return [group]
    middle = len(group) // 2
    return [group[:middle], group[middle:]]


def _tournament(nodes: Sequence[str]) -> Iterable[list[Group]]:
    """Rounds of disjoint pairs in which everybody meets everybody once."""
    circle: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


# What the search and the sums say.


def check_bandwidth(nodes: Sequence[str], verdict: SearchResult) -> list[Result]:
    """Who made the collective slow, or what it reached."""
    text = "failed or hung" if verdict.whole is None else f"{verdict.whole:.2f} GB/s"
    results = []
    if verdict.bad:
        why = "slow with two different partners that are fast with each other"
        if len(nodes) == 1:
            why = f"all-reduce {text}"
        hint = "a bad link, adapter or GPU: tell your admins"
        results.append(Result("bandwidth", FAIL, why, verdict.bad, hint))
    if verdict.suspects:
        who = names(verdict.suspects)
        message = f"all-reduce {text}; one of {who} is slow, and it cannot be said which"
        hint = "run it again with more nodes"
        results.append(Result("bandwidth", FAIL if verdict.whole_slow else WARN, message, [], hint))
    if results:
        return results
    if verdict.whole_slow:
        message = f"all-reduce {text} over all {len(nodes)} nodes, and no part of them is slow"
        status = FAIL if verdict.whole is None else WARN
        return [
            Result("bandwidth", status, message, [], "the network between them, or its routing")
        ]
    if not verdict.compared and len(nodes) > 1:
        message = f"all-reduce {text}, and there is no [baseline] to hold it against"
        return [Result("bandwidth", UNKNOWN, message)]
    return [Result("bandwidth", OK, f"all-reduce {text}")]


def check_products(sums: Mapping[str, Sequence[float | None]]) -> list[Result]:
    """The same matrix product everywhere: a GPU that computes wrongly says nothing of it."""
    broken = [node for node, values in sums.items() if None in values]
    hint = "take the node out of use: it corrupts training without a word"
    results = []
    if broken:
        results.append(Result("product", FAIL, "a matrix product is not finite", broken, hint))
    whole = {n: tuple(sorted(set(v), key=str)) for n, v in sums.items() if n not in broken}
    usual, odd = outliers(whole)
    if whole and usual is None:
        results.append(Result("product", FAIL, "a matrix product differs between nodes", [], hint))
    if odd:
        text = "a matrix product differs from the other nodes'"
        results.append(Result("product", FAIL, text, list(odd), hint))
    return results or ([Result("product", OK, "the same on all ranks")] if sums else [])
