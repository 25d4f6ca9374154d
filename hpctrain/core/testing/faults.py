"""What can go wrong at a point, in words: `tear:shard.flush,rank=0,step=3,keep=0.5`.

Faults are separated by `;`. Each fires in the processes and at the times that its keys name; a line
on stderr says so before it does. HPCTRAIN_FAULTS arms a process from its start, `armed` arms this
one for a while. docs/development/testing-faults.md is the user's page,
tests/unit/testing/test_faults.py holds the promises.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain.core.base import clock
from hpctrain.core.base.env import HPCTRAIN_ATTEMPT, HPCTRAIN_FAULTS, HPCTRAIN_NODE_FAULTS
from hpctrain.core.testing import points
from hpctrain.core.testing.points import POINTS
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from hpctrain.core.testing.points import Reached

    Reader = Callable[[str], object]

log = logging.getLogger("hpctrain.testing")

HOLD_POLL_S = 0.02


@dataclass(frozen=True)
class Fault:
    """One item of the list; None means "any".

    Attributes:
        text: As it was written.
        action: One of ACTIONS.
        point: One of points.POINTS.
        rank: On this rank.
        step: While this step is saved or read.
        attempt: In the attempt of this number.
        hit: At this time that the point is reached, counted in each process from 1.
        once: A file that is made when the fault fires; while it is there, nothing fires.
        error: errno of `fail`.
        after: Bytes that `fail` lets through at this point before it fails: a disk fills up.
        seconds: Of `delay`.
        until: The file that ends a `hold`.
        keep: The share of the file that `tear` leaves.
        bit: Which bit `flip` turns, counted from the file's start and, past its end, round again.
        code: What `exit` leaves with.
    """

    text: str
    action: str
    point: str
    rank: int | None = None
    step: int | None = None
    attempt: int | None = None
    hit: int | None = None
    once: Path | None = None
    error: int = errno.EIO
    after: int | None = None
    seconds: float = 1.0
    until: Path | None = None
    keep: float = 0.5
    bit: int = 0
    code: int = 1


class Action(NamedTuple):
    """A word of the vocabulary.

    Attributes:
        do: Does it.
        keys: Its own keys, each with what reads the value.
        always: Without hit= it fires every time, else the first time only.
        required: The key without which it means nothing.
    """

    meaning: str
    do: Callable[[Fault, Reached], None]
    keys: Mapping[str, Reader]
    always: bool = False
    required: str | None = None


def parse(text: str, *, origin: str = "faults") -> list[Fault]:
    """Read a list of faults, separated by `;`; `origin` is where the text came from, for messages.

    Raises:
        UsageError: an action, point or key that there is not, or a value that it cannot take.
    """
    items = [item.strip() for item in text.split(";")]
    return [_read(item, f"{origin}: {item}") for item in items if item]


def arm(text: str, *, origin: str = "faults") -> None:
    """Arm this process and what it forks with these faults instead of those armed before.

    Raises:
        UsageError: see `parse`; what was armed before stays so.
    """
    points.handler = _Armed(parse(text, origin=origin))


@contextmanager
def armed(text: str) -> Iterator[None]:
    """Arm this process and whatever it starts, until the block ends; then all is as before.

    Raises:
        UsageError: see `parse`.
    """
    handler, variable = points.handler, os.environ.get(HPCTRAIN_FAULTS)
    arm(text)
    os.environ[HPCTRAIN_FAULTS] = text
    try:
        yield
    finally:
        points.handler = handler
        if variable is None:
            del os.environ[HPCTRAIN_FAULTS]
        else:
            os.environ[HPCTRAIN_FAULTS] = variable


@dataclass
class _Counted:
    """A fault, and how often its moment has come in this process."""

    fault: Fault
    hits: int = 0
    written: int = 0

    def is_due(self, reached: Reached) -> bool:
        """Count this time, and say whether it is one to fire at."""
        fault = self.fault
        if not _is_meant(fault, reached):
            return False
        self.hits += 1
        if fault.after is None:
            first = None if ACTIONS[fault.action].always else 1
            return (fault.hit or first) in {None, self.hits}
        if reached.bytes is None:
            raise _impossible(fault, "after= counts bytes, and this point does not say how many")
        # what is refused counts too: a full disk does not get room for a smaller write
        self.written += reached.bytes
        return self.written > fault.after


class _Armed:
    """The handler of `points`: fires what is due, in the order of the list."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._faults = list(faults)
        self.start_over()

    def start_over(self) -> None:
        self._counted = [_Counted(fault) for fault in self._faults]
        self._lock = threading.Lock()

    def __call__(self, reached: Reached) -> None:
        with self._lock:  # a shard may be written by several threads
            due = [one.fault for one in self._counted if one.is_due(reached)]
        for fault in due:
            if fault.until is not None and fault.until.exists():
                continue
            if fault.once is None or _is_first(fault.once):
                _say(fault, reached)
                ACTIONS[fault.action].do(fault, reached)


def _start_over_in_child() -> None:
    """A rank that is forked counts for itself, and must not wait for a thread it does not have."""
    if isinstance(points.handler, _Armed):
        points.handler.start_over()


os.register_at_fork(after_in_child=_start_over_in_child)


def _is_meant(fault: Fault, reached: Reached) -> bool:
    return (
        fault.point == reached.point
        and fault.rank in {None, _rank(reached)}
        and fault.step in {None, reached.step}
        and (fault.attempt is None or fault.attempt == _attempt(reached))
    )


def _rank(reached: Reached) -> int:
    """Read at each point: ranks get their environment after the fork."""
    return int(os.environ.get("RANK", "0")) if reached.rank is None else reached.rank


def _attempt(reached: Reached) -> int | None:
    if reached.attempt is not None or HPCTRAIN_ATTEMPT not in os.environ:
        return reached.attempt
    return int(json.loads(os.environ[HPCTRAIN_ATTEMPT])["number"])


def _is_first(marker: Path) -> bool:
    """Make the marker; False where another process, or an earlier start, has made it."""
    try:
        os.close(os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    except FileExistsError:
        return False
    return True


def _say(fault: Fault, reached: Reached) -> None:
    """Nobody who reads the log of a run that was armed shall look for the fault elsewhere."""
    step = "" if reached.step is None else f", step {reached.step}"
    log.warning("fault: %s (rank %d%s)", fault.text, _rank(reached), step)


def _fail(fault: Fault, reached: Reached) -> None:
    where = None if reached.path is None else str(reached.path)
    raise OSError(fault.error, os.strerror(fault.error), where)


def _delay(fault: Fault, _: Reached) -> None:
    clock.sleep(fault.seconds)


def _hold(fault: Fault, reached: Reached) -> None:
    """Stop this thread until the file is there; the process's other threads continue.

    The arrival is appended to FILE.arrived as "rank pid", so that a test can wait for it.
    """
    assert fault.until is not None  # noqa: S101 - `_read` requires it
    arrival = f"{_rank(reached)} {os.getpid()}\n".encode()
    with fault.until.with_name(f"{fault.until.name}.arrived").open("ab", buffering=0) as file:
        file.write(arrival)
    while not fault.until.exists():
        time.sleep(HOLD_POLL_S)  # noqa: TID251 - a real file: a clock that jumps would spin


def _tear(fault: Fault, reached: Reached) -> None:
    path, size = _file(fault, reached)
    os.truncate(path, int(size * fault.keep))
    signal.raise_signal(signal.SIGKILL)


def _flip(fault: Fault, reached: Reached) -> None:
    path, size = _file(fault, reached)
    byte, bit = divmod(fault.bit % (size * 8), 8)
    with path.open("r+b", buffering=0) as file:
        (value,) = os.pread(file.fileno(), 1, byte)
        os.pwrite(file.fileno(), bytes([value ^ 1 << bit]), byte)


def _signal(number: signal.Signals) -> Callable[[Fault, Reached], None]:
    """To this thread, not to the process: no other thread may take it while this one continues."""
    return lambda _fault, _reached: signal.raise_signal(number)


def _exit(fault: Fault, _: Reached) -> None:
    os._exit(fault.code)  # sys.exit would end this thread only


def _file(fault: Fault, reached: Reached) -> tuple[Path, int]:
    """The file at this point, and its size."""
    path = None if reached.path is None else Path(reached.path)
    if path is None and reached.fd is not None:
        path = Path(f"/proc/self/fd/{reached.fd}")
    if path is None or not path.is_file() or not path.stat().st_size:
        raise _impossible(fault, f"there is no file with bytes at this point ({path})")
    return path, path.stat().st_size


def _impossible(fault: Fault, why: str) -> UsageError:
    return UsageError(f"fault {fault.text}: {why}; choose another point")


def _read(item: str, place: str) -> Fault:
    head, *pairs = (part.strip() for part in item.split(","))
    name, _, point = head.partition(":")
    action = ACTIONS[_known("action", name, ACTIONS, place)]
    _known("point", point, POINTS, place)
    values = _values(name, pairs, COMMON | dict(action.keys), place)
    if action.required is not None and action.required not in values:
        raise UsageError(f"{place}: {name} needs {action.required}=")
    if {"hit", "after"} <= values.keys():
        raise UsageError(f"{place}: hit= and after= both say when to fail; give one of them")
    return Fault(item, name, point, **values)


def _values(
    name: str, pairs: Iterable[str], readers: Mapping[str, Reader], place: str
) -> dict[str, Any]:
    """Read `key=value` pairs of an action."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        reader = readers[_known(f"key of {name}", key, readers, place)]
        if key in values:
            raise UsageError(f"{place}: {key}= is given twice")
        try:
            values[key] = reader(value)
        except ValueError as error:
            raise UsageError(f"{place}: {key}={value} is not {error}") from error
    return values


def _known(kind: str, name: str, choices: Iterable[str], place: str) -> str:
    names = list(choices)
    if name in names:
        return name
    from difflib import get_close_matches

    near = get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
    raise UsageError(f"{place}: {name!r} is no {kind}; {hint}")


def _reader(pattern: str, what: str, to: Callable[[str], object] = float) -> Reader:
    """Return what reads a text that fits the pattern; another one is not `what`."""

    def read(text: str) -> object:
        if not re.fullmatch(pattern, text):
            raise ValueError(what)
        return to(text)

    return read


_whole = _reader(r"[0-9]+", "a whole number from 0", int)
_from_one = _reader(r"0*[1-9][0-9]*", "a whole number from 1", int)
_number = _reader(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?", "a number")
_seconds = _reader(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", "a number of seconds")
_share = _reader(r"0+(\.[0-9]*)?|\.[0-9]+", "a fraction from 0 to below 1")


def _error(text: str) -> int:
    number = getattr(errno, text, None)
    if not isinstance(number, int):
        raise ValueError("the name of an error, such as EIO, ENOSPC or EDQUOT")  # noqa: TRY004 - its name
    return number


def _marker(text: str) -> Path:
    path = Path(text).absolute()
    if not text or path.is_dir() or not path.parent.is_dir():
        raise ValueError("a file in a folder that is there")
    return path


COMMON: dict[str, Reader] = {
    "rank": _whole,
    "step": _whole,
    "attempt": _whole,
    "hit": _from_one,
    "once": _marker,
}
"""Keys that every action takes."""

ACTIONS = {
    "fail": Action("raises OSError", _fail, {"error": _error, "after": _whole}, always=True),
    "delay": Action("waits", _delay, {"seconds": _seconds}, always=True),
    "hold": Action(
        "stops the thread until a file exists",
        _hold,
        {"until": _marker},
        always=True,
        required="until",
    ),
    "tear": Action("cuts the file and kills the process", _tear, {"keep": _share}),
    "flip": Action("turns one bit of the file and continues", _flip, {"bit": _whole}),
    "kill": Action("ends the process with SIGKILL", _signal(signal.SIGKILL), {}),
    "exit": Action(
        "ends the process with an exit code, nothing cleaned up", _exit, {"code": _whole}
    ),
    "stop": Action("halts the process with SIGSTOP, until SIGCONT", _signal(signal.SIGSTOP), {}),
}


# ---- a sick node: `no-interface:n2,name=eth0; skew:n3,seconds=5`
#
# HPCTRAIN_NODE_FAULTS makes a preflight see on one node what is not there, so that what it does
# about it can be tried on machines that are well. docs/preflight.md is the user's page.

NODE_ACTIONS: dict[str, tuple[str, Mapping[str, Reader]]] = {
    "no-interface": ("one network interface is not there", {"name": str}),
    "interface-down": ("one network interface is there and down", {"name": str}),
    "no-shared": ("the shared directory is not mounted", {}),
    "skew": ("the clock is ahead by so much", {"seconds": _number}),
    "version": ("another version of something", {"of": str, "is": str}),
    "slow": ("every collective takes so much longer", {"seconds": _number}),
    "gemm": ("a matrix product comes out different", {}),
    "gpus": ("so many GPUs are there", {"count": _whole}),
    "silent": ("the node never says a word", {}),
}
"""Word to what it does and the keys that it takes, all of which must be given."""


@dataclass(frozen=True)
class NodeFault:
    """One item of the list."""

    action: str
    node: str
    keys: dict[str, object] = field(default_factory=dict)


def parse_node_faults(text: str) -> list[NodeFault]:
    """Read a list of faults.

    Raises:
        UsageError: a word that there is not, or a key that is missing, not known or cannot be read.
    """
    items = [item.strip() for item in text.split(";")]
    return [_read_node_fault(item, f"{HPCTRAIN_NODE_FAULTS}: {item}") for item in items if item]


def of_node(text: str, node: str) -> dict[str, NodeFault]:
    """The faults of one node by their action.

    Raises:
        UsageError: see `parse`.
    """
    return {fault.action: fault for fault in parse_node_faults(text) if fault.node == node}


def _read_node_fault(item: str, where: str) -> NodeFault:
    head, *pairs = (part.strip() for part in item.split(","))
    action, sign, node = head.partition(":")
    takes = NODE_ACTIONS[_known("fault of a node", action, NODE_ACTIONS, where)][1]
    if not sign or not node:
        raise UsageError(f"{where}: the node is missing; write {action}:NODE")
    values = _values(action, pairs, takes, where)
    if missing := [name for name in takes if name not in values]:
        raise UsageError(f"{where}: {action} needs {missing[0]}=")
    return NodeFault(action, node, values)
