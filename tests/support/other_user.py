"""What a user without rights tries against the ports of another's job.

    python -m tests.support.other_user OWNERS_UID JOB_ID        # until its stdin ends

Which ports the agents of a job may meet on everybody can work out. Each that the owner opens is
taken on as soon as it is there: half a line, garbage and silence, on connections of their own that
stay open; then, by what answers, joining the nodes' meeting, or the keys of the agents in torch's
store. A port on stdin gets the former three. What came of it goes to stdout, a JSON line each:
{"port": ..., "is": "meeting"}.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from hpctrain.core.base.process import PORTS, first_port

STARTS, TURNS = 4, 3
SILENT = 50
LOOK_S = 0.02
ANSWER_S = 0.3
GARBAGE = (os.urandom(4096), b"\xff" * 4096, b"GET / HTTP/1.0\r\n\r\n", b"\0" * 64, b"}{\n" * 99)
HALF = (b'{"rank": 1, "chall', b"\x00\x07\x00")
JOINS: tuple[dict[str, Any], ...] = (
    {"rank": 1, "challenge": "00" * 16, "proof": "00" * 32},
    {"rank": 1, "challenge": "00" * 16},
    {"rank": 1, "challenge": "00" * 16, "proof": None},
    {"rank": "1", "challenge": [], "proof": {}},
    {"rank": -1, "challenge": "", "proof": ""},
)
ENDINGS = tuple(
    {"ending": how, "restart": again, "why": "a stranger", "failure": None, "silent_nodes": []}
    for how, again in (("left", False), ("failed", False), ("failed", True), ("killed", False))
)
FAILURE = {"rank": 0, "node": "n1", "summary": "a stranger's", "kind": "error"}
ROUNDS = 2
AGAIN_S = 2.0


def listening(uid: int) -> set[int]:
    """Ports that a user listens on, as the kernel tells everybody."""
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path("/proc/net", table).read_text().splitlines()[1:]
    ]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and int(row[7]) == uid}


def ports_of(job_id: str) -> set[int]:
    """Where the agents of the first starts of a job meet, also if some of it is taken."""
    firsts = [first_port(job_id, start, turn) for start in range(STARTS) for turn in range(TURNS)]
    return {first + n for first in firsts for n in range(PORTS)}


class UnauthenticatedPeer:
    """One of them; what it opens stays open."""

    def __init__(self) -> None:
        self._open: list[socket.socket] = []
        self._stores: dict[int, Any] = {}
        self._forge_at: dict[int, float] = {}
        self._known: dict[int, str] = {}

    def look(self, ports: set[int]) -> None:
        """Take on those that are new, and stores again."""
        for port in set(self._known) - ports:
            self._forget(port)
        for port in sorted(ports):
            if port not in self._known:
                meeting = b"challenge" in self.disturb(port)
                self._known[port] = "meeting" if meeting else "store"
                if meeting:
                    _tell(self.meet(port))
            if self._known[port] == "store" and (done := self._try_to_forge(port)):
                _tell(done)

    def _try_to_forge(self, port: int) -> dict[str, Any] | None:
        try:
            return self.forge(port)
        except (RuntimeError, OSError) as error:  # torch's are RuntimeErrors
            self._forget(port)
            return {"port": port, "is": "store", "error": str(error)[:200]}

    def disturb(self, port: int) -> bytes:
        """Junk, half lines and silence; what the port says by itself to who connects."""
        heard = b""
        for junk in (*GARBAGE, *HALF, *[b""] * SILENT):
            with suppress(OSError):
                line = socket.create_connection(("127.0.0.1", port), timeout=1.0)
                self._open.append(line)
                line.sendall(junk)
        if self._open:
            self._open[-1].settimeout(ANSWER_S)
            with suppress(OSError):
                heard = self._open[-1].recv(4096)
        return heard

    def meet(self, port: int) -> dict[str, Any]:
        """Join the nodes of a preflight in the place of one of them."""
        answers = []
        for words in JOINS:
            with (
                suppress(OSError, ValueError),
                socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as line,
                line.makefile("rb") as reader,
            ):
                reader.readline()
                line.sendall(json.dumps(words).encode() + b"\n")
                answers.append(reader.readline().decode())
        return {"port": port, "is": "meeting", "answers": answers}

    def forge(self, port: int) -> dict[str, Any] | None:
        """Say in torch's store what the agents say there, again and again.

        None where they do not meet yet, and between two times.
        """
        if time.monotonic() < self._forge_at.get(port, 0.0):
            return None
        store = self._store(port)
        keys = [] if store is None else [one.removeprefix("/") for one in store.list_keys()]
        for key in keys:
            prefix, mark, _ = key.partition("attempt/")
            if mark:
                self._forge_at[port] = time.monotonic() + AGAIN_S
                return {"port": port, "is": "store", "set": _write(store, prefix, key)}
        return None

    def _store(self, port: int) -> Any:
        from torch.distributed import TCPStore

        if port not in self._stores:
            patience = timedelta(seconds=5)
            self._stores[port] = TCPStore(
                "127.0.0.1", port, is_master=False, timeout=patience, wait_for_workers=False
            )
        return self._stores[port]

    def _forget(self, port: int) -> None:
        self._known.pop(port, None)
        self._stores.pop(port, None)
        self._forge_at.pop(port, None)


def _write(store: Any, prefix: str, attempt: str) -> int:
    """Every key that an agent reads, with each ending, and with what was signed for another key."""
    signed = store.get(attempt).decode()
    names = [
        f"round/{number}/{name}"
        for number in range(ROUNDS)
        for name in ("news/0", "news/1", "report/0", "report/1", "present/0", "present/1")
    ]
    names += [f"attempt/{number}" for number in range(ROUNDS)]
    names += [f"round/0/goodbye/{node}" for node in (0, 1)]
    code = signed[:64]
    values = [json.dumps(one) for one in (*ENDINGS, [], [FAILURE], "here")]
    values += [signed, *(code + json.dumps(one) for one in ENDINGS), "\ud7ff", ""]
    for value in values:
        for name in names:
            store.set(prefix + name, value)
    for number in range(ROUNDS):
        store.add(f"{prefix}round/{number}/reports", 100)
    return len(names) * len(values)


def _tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    """Take on what appears until stdin ends."""
    uid, agents, other_user = int(sys.argv[1]), ports_of(sys.argv[2]), UnauthenticatedPeer()
    import torch.distributed  # noqa: F401 - takes seconds, in which ports come and go

    _tell({"is": "ready"})
    while True:
        if select.select([0], [], [], LOOK_S)[0]:
            given = os.read(0, 1 << 16)
            if not given:
                return
            for port in map(int, given.split()):
                other_user.disturb(port)
                _tell({"port": port, "is": "given"})
        other_user.look(listening(uid) & agents)


if __name__ == "__main__":
    main()
