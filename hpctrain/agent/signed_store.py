"""What agents tell each other in torch's store, each value with a code of the run's secret.

The store asks nobody who he is, and every user of the cluster may reach its port. What agents
believe decides how a run ends, so they believe nothing that another has written. Counts cannot be
signed and are hints at most. tests/unit/test_signed_store.py holds the promises.
"""

from __future__ import annotations

import json
import time
from typing import Any

from hpctrain.base.secret import Forged, sign, verify

POLL_S = 0.1


class SignedStore:
    """One round's store."""

    def __init__(self, store: Any, secret: str) -> None:
        """Speak through that store.

        Args:
            store: torch's.
            secret: Of this start of the job.
        """
        self.of = store
        self._secret = secret
        self._told: set[str] = set()
        self._said: dict[str, Any] = {}

    def set(self, key: str, value: Any) -> None:
        """Say something that JSON holds, over what was said before."""
        self._said[key] = value
        self.of.set(key, sign(self._secret, key, json.dumps(value)))

    def say_again(self) -> None:
        """Say anew what somebody has written over or taken away since: others still wait for it."""
        for key, value in self._said.items():
            if self.get(key) is None:
                self.set(key, value)

    def get(self, key: str) -> Any:
        """What an agent has said; None where none has, whatever somebody else has written there."""
        if not self.of.check([key]):
            return None
        try:
            return json.loads(verify(self._secret, key, self.of.get(key)))
        except Forged:
            if key not in self._told:
                self._told.add(key)
                print(
                    f"hpctrain: another than this run's agents has written {key} into their store; "
                    "it is not believed",
                    flush=True,
                )
            return None

    def wait(self, key: str, timeout_s: float) -> Any:
        """What an agent says, once it has.

        Raises:
            TimeoutError: none did.
        """
        deadline = time.monotonic() + timeout_s
        while (value := self.get(key)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no agent said {key} in {timeout_s:g} s")
            time.sleep(POLL_S)
        return value

    def count(self, key: str, more: int = 0) -> int:
        """Add to a count that everybody can change."""
        return int(self.of.add(key, more))
