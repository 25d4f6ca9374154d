"""Node processes for tests: several nodes of one machine, joined into a tree."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from hpctrain.node.control.collectives import parent_of
from hpctrain.node.control.node_process import NodeProcess
from hpctrain.node.control.node_server import TreePlace

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

ADDRESS = "127.0.0.1"
SECRET = "a secret of this test"  # noqa: S105 - of nobody


class ControlTree:
    """Some nodes with equally many ranks each. A context manager.

    Attributes:
        nodes: The nodes' processes.
        ranks_per_node: Of each.
    """

    def __init__(self, nodes: int, ranks_per_node: int) -> None:
        self.ranks_per_node = ranks_per_node
        self.nodes = [NodeProcess() for _ in range(nodes)]
        self._stack = ExitStack()
        for node in self.nodes:
            self._stack.callback(node.stop)

    def place(self, number: int) -> TreePlace:
        """Of a node."""
        return TreePlace(
            node=number,
            nodes=len(self.nodes),
            first_rank=number * self.ranks_per_node,
            ranks=self.ranks_per_node,
            ranks_in_all=len(self.nodes) * self.ranks_per_node,
            name=f"n{number}",
        )

    def begin(self, about: str = "round 0") -> Self:
        """A round of ranks on all of them."""
        ports: list[int] = []
        for number, node in enumerate(self.nodes):
            place = self.place(number)
            ports.append(node.begin(place, secret=SECRET, about=about, address=ADDRESS))
            parent = parent_of(number)
            if parent is not None:
                node.join(ADDRESS, ports[parent])
        return self

    def folder(self, rank: int) -> Path:
        """Of the node of a rank."""
        return self.nodes[rank // self.ranks_per_node].folder

    def __enter__(self) -> Self:
        return self.begin()

    def __exit__(self, *_: object) -> None:
        self._stack.close()
