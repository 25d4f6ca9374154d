"""`hpctrain.cluster.preflight.node` with longer time-outs: a thousand nodes share few CPUs.

python -m tests.support.patient_preflight FOLDER RANK
"""

from __future__ import annotations

import sys
from dataclasses import replace

from hpctrain.cluster.preflight import bounded, checks, node, rendezvous

PATIENCE_S = 900.0


def main(argv: list[str]) -> int:
    """As a node's own."""
    node.FACTS_S = node.LOOK_S = node.NAMES_S = PATIENCE_S
    rendezvous.ANSWER_S = rendezvous.HELLO_S = rendezvous.SEND_S = PATIENCE_S
    bounded.SEE_S = PATIENCE_S
    of_plain = checks.Order.from_plain
    node.Order = SimpleOrder(lambda raw: replace(of_plain(raw), meet_s=PATIENCE_S))  # type: ignore[assignment,misc]
    return node.main(argv)


class SimpleOrder:
    """Reads an order with more time in it."""

    def __init__(self, from_plain) -> None:  # type: ignore[no-untyped-def]
        self.from_plain = from_plain


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
