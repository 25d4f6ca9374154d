"""A fault at the so-manieth system call of a process: it dies there, or the call fails.

Python's own ways to the kernel are wrapped (os.*, io.open and its reads and writes, flock), all
calls are counted, and one of them goes wrong. Only for a forked child: nothing is put back.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DEAD, BROKEN = 9, 99
"""Exit codes: died at the fault; an error that the product does not know of."""
WRITES = ("write", "pwrite", "pwritev", "writev")
CHANGES = (*WRITES, "fsync", "mkdir", "rename", "replace", "unlink", "rmdir", "close")
"""What changes something on disk, or says whether it did."""
NEED_ROOM = (*WRITES, "create", "fsync", "mkdir", "rename", "replace")
"""What a full disk refuses."""
WRAPPED = (
    *CHANGES, "open", "read", "pread", "preadv", "readv", "remove", "scandir", "listdir", "stat",
    "lstat", "fstat", "ftruncate", "truncate", "link", "symlink", "chmod", "utime", "statvfs",
)  # fmt: skip
KINDS: dict[str, tuple[str, ...]] = {
    "dies before it": (),
    "dies half way": WRITES,
    "EIO": (),
    "EIO although it was done": CHANGES,
    "ENOSPC from there on": NEED_ROOM,
    "takes only half": WRITES,
}
"""What can happen, and at which calls; at all where none are named."""


class Fault(NamedTuple):
    """What happens at which call, counted from 0."""

    kind: str
    at: int


@dataclass
class Calls:
    """Counts the calls of this process and lets one go wrong."""

    fault: Fault | None = None
    names: list[str] = field(default_factory=list)

    def install(self) -> None:
        """From here on every call counts."""
        for name in WRAPPED:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        fcntl.flock = self._wrapped("flock", fcntl.flock)
        io.open = self._opening(_raw_of(self))

    def reach(
        self, name: str, act: Callable[[], Any], half: Callable[[], Any] | None = None
    ) -> Any:
        """One call: `act` makes it, `half` makes a part of it."""
        number = len(self.names)
        self.names.append(name)
        if self.fault is None:
            return act()
        kind, at = self.fault
        if kind == "ENOSPC from there on" and number >= at and name in NEED_ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if number != at:
            return act()
        if kind == "takes only half" and half is not None:
            return half()
        if kind == "dies half way" and half is not None:
            half()
        if kind.startswith("dies"):
            os._exit(DEAD)
        if kind == "EIO although it was done":
            act()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _wrapped(self, name: str, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            half = None
            if name in WRITES:
                half = lambda: real(args[0], _half(args[1]), *args[2:])  # noqa: E731
            kind = "create" if name == "open" and args[1] & os.O_CREAT else name
            return self.reach(kind, lambda: real(*args, **options), half)

        return call

    def _opening(self, raw: Any) -> Any:
        def opened(file: Any, mode: str = "r", buffering: int = -1, *text: Any) -> Any:
            plain = mode.replace("b", "").replace("t", "")
            name = "open" if plain == "r" else "create"
            stream: Any = self.reach(name, lambda: raw(file, plain))
            if buffering == 0:
                return stream
            stream = io.BufferedReader(stream) if plain == "r" else io.BufferedWriter(stream)
            return stream if "b" in mode else io.TextIOWrapper(stream, *text)

        return opened


def _raw_of(calls: Calls) -> type[io.FileIO]:
    class Raw(io.FileIO):
        def write(self, data: Any) -> Any:
            real = super().write
            return calls.reach("write", lambda: real(data), lambda: real(_half(data)))

        def readinto(self, buffer: Any) -> Any:
            return calls.reach("read", lambda: io.FileIO.readinto(self, buffer))

        def readall(self) -> Any:
            return calls.reach("read", lambda: io.FileIO.readall(self))

        def close(self) -> None:
            if not self.closed:
                calls.reach("close", lambda: io.FileIO.close(self))

    return Raw


def _half(data: Any) -> Any:
    """The first half of what was to be written, buffers or one buffer."""
    if isinstance(data, (list, tuple)):
        whole = b"".join(data)
        return [whole[: len(whole) // 2]]
    return bytes(data)[: len(data) // 2]


def in_child(act: Callable[[], int], fault: Fault | None, out: Path) -> int:
    """Run in a forked child with a fault; its exit code.

    Args:
        act: Returns the exit code.
        fault: None to count only.
        out: A file for the names of the calls, or for what went wrong.
    """
    pid = os.fork()
    if pid == 0:
        calls = Calls(fault)
        code, said = BROKEN, ""
        write, real_open, close = os.write, os.open, os.close
        try:
            calls.install()
            code = act()
            said = "\n".join(calls.names)
        except BaseException:  # noqa: BLE001 - the test shows it, whatever it is
            said = traceback.format_exc()
        finally:
            handle = real_open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            write(handle, said.encode())
            close(handle)
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
