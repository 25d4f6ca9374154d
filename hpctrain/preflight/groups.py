"""Who differs from the others? Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    V = TypeVar("V", bound=Hashable)


def by_value(values: Mapping[str, V]) -> dict[V, list[str]]:
    """Each value to the nodes that have it, the most frequent first."""
    found: dict[V, list[str]] = {}
    for node, value in values.items():
        found.setdefault(value, []).append(node)
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))


def odd_ones(values: Mapping[str, V]) -> tuple[V | None, dict[str, V]]:
    """What more than half of the nodes have, and the nodes that have something else.

    Returns:
        The value and the others; (None, {}) where no value has the majority: of two nodes that
        differ, nobody can say which one is wrong.
    """
    groups = by_value(values)
    if not groups:
        return None, {}
    usual, nodes = next(iter(groups.items()))
    if len(nodes) * 2 <= len(values):
        return None, {}
    return usual, {node: value for node, value in values.items() if value != usual}
