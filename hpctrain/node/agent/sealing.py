"""The agent of node 0 seals what the program saves, by the patterns of `checkpoint.sealed`.

What has not changed for `checkpoint.seal_settle_s`, is open for writing in no process of this node,
and is not cut by its own format's word, is sealed. After a kill nothing is sealed here. The thread
is gone before ranks are forked again. tests/unit/agent/test_sealing.py holds the promises.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.checkpoint.sealed import start
from hpctrain.checkpoint.sealed.seals import listing
from hpctrain.core.base import clock
from hpctrain.core.base.process import join_before_fork
from hpctrain.errors import CheckpointError, Fenced
from hpctrain.node.agent.rounds import RoundPart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Self

    from hpctrain.checkpoint.sealed.start import UnsealedSave
    from hpctrain.core.settings.schema import CheckpointSettings
    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.node.agent.rounds import RoundEnd

log = logging.getLogger("hpctrain.agent")

LOOK_S = 1.0
REST = 20.0
"""After a look the thread rests so many times as long as it took, at least."""
NEWEST = 3
"""So many sealed ones are looked at closely in each look; of the others the folder's time alone."""
JOIN_S = 5.0
"""A disk that does not answer must not keep the attempt's end from being decided."""
PROC = Path("/proc")
_WRITES = os.O_WRONLY | os.O_RDWR


class _Interrupted(Exception):
    """The ranks are gone: what is being read is not sealed by this thread any more."""


class SealWatch(RoundPart):
    """Seals beside the ranks of one attempt; a context manager around them.

    Attributes:
        returned: All ranks have returned.
        rest_s: Until the next look.
    """

    def __init__(
        self,
        run: RunDir,
        attempt: Attempt,
        settings: CheckpointSettings,
        cwd: str,
        *,
        is_stopping: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = clock.monotonic,
    ) -> None:
        """Look at nothing before it is entered; `cwd` is the program's.

        `is_stopping`: whether the scheduler wants the job's end, and time is short.
        """
        self.returned = False
        self.rest_s = LOOK_S
        self._run, self._attempt, self._settings = run, attempt, settings
        self._is_stopping, self._clock = is_stopping, clock
        roots = start.roots_of(run, cwd)
        self._unsealed = start.Unsealed(run, settings.sealed, roots)
        self._still: dict[Path, tuple[tuple[object, ...], float]] = {}
        self._sealed_at: dict[Path, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="seal", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        join_before_fork(self._thread, JOIN_S)
        if self._thread.is_alive():
            log.warning("a disk does not answer; what the program saved last is not registered")
            return
        if self.returned and error[0] is None:
            self._leave_word()
            if not self._is_stopping():
                self._guarded(self._seal_rest)
        list(self._unsealed.matches())
        for pattern in self._unsealed.idle:
            log.warning("checkpoint.sealed: %r matched nothing in this attempt", pattern.text)

    def verdict(self, end: RoundEnd) -> None:
        """Note whether the program is done with its files."""
        self.returned = end.ending == "left"

    def look(self) -> None:
        """Seal what has settled.

        Raises:
            CheckpointError: a disk refused, or a newer attempt has the run.
        """
        began = self._clock()
        try:
            due = self._settled()
        finally:  # reading a checkpoint does not count: the next ones would wait for minutes
            self.rest_s = max(LOOK_S, REST * (self._clock() - began))
        self._seal(due, settled=True)

    def _settled(self) -> list[UnsealedSave]:
        program = self._unsealed
        matches = list(program.matches())
        there = {match.path for match in matches}
        self._still = {path: seen for path, seen in self._still.items() if path in there}
        closely = set(sorted(self._sealed_at, key=self._sealed_at.__getitem__)[-NEWEST:])
        due: list[UnsealedSave] = []
        for match in matches:
            if match.path not in closely and self._is_as_sealed(match.path):
                continue
            save = program.unit(match)
            if save is None or not program.is_new(save):
                continue
            files, first_seen = self._still.get(match.path, ((), 0.0))
            if files != save.files:
                self._still[match.path] = save.files, self._clock()
            elif self._clock() - first_seen >= self._settings.seal_settle_s:
                due.append(save)
        return sorted(due, key=lambda save: save.mtime_ns)

    def _seal(self, due: Iterable[UnsealedSave], *, settled: bool) -> None:
        stored = None
        for save in due:
            path = save.match.path
            stored = listing(self._run) if stored is None else stored
            if not start.is_sealed(save, stored):
                if settled and is_open_for_writing(save):
                    continue
                if not self._try_to_seal(save):
                    continue
                stored = None
            self._sealed_at[path] = _top_ns(path)

    def _try_to_seal(self, save: UnsealedSave) -> bool:
        try:
            why = start.cut(save, self._on_bytes)
            if why is None:
                start.seal(self._run, self._attempt, save, self._settings, self._on_bytes)
                return True
        except Fenced:
            raise
        except CheckpointError as error:
            why = str(error)
        self._unsealed.refuse(save.match.path, why)
        self._still.pop(save.match.path, None)  # looked at again when it has settled again
        return False

    def _seal_rest(self) -> None:
        self._over.clear()
        self._seal(self._unsealed.due(), settled=False)

    def _is_as_sealed(self, path: Path) -> bool:
        return path in self._sealed_at and self._sealed_at[path] == _top_ns(path)

    def _on_bytes(self, _: int) -> None:
        if self._over.is_set():
            raise _Interrupted

    def _leave_word(self) -> None:
        """For the next start, which may seal what is left: a disk that refuses costs just that."""
        try:
            (self._run.attempt(self._attempt.number) / start.RETURNED).touch()
        except OSError as error:
            log.warning("no word for the next start: %s", error)

    def _watch(self) -> None:
        while not clock.wait(self._over, self.rest_s):
            if not self._guarded(self.look):
                return

    def _guarded(self, act: Callable[[], None]) -> bool:
        """Whether it may be done again: sealing must never end a run."""
        try:
            act()
        except _Interrupted:
            return False
        except Fenced as error:
            log.warning("%s", error)
            return False
        except Exception as error:  # noqa: BLE001 - whatever it is, the ranks train on
            log.warning(
                "checkpoints are not registered just now: %s: %s", type(error).__name__, error
            )
        return True


def is_open_for_writing(save: UnsealedSave) -> bool:
    """Whether a process of this user's on this node can still write into one of the files."""
    path = save.match.path.resolve()
    root = path.parent if save.is_file else path
    names = {str(root / file.name) for file in save.files}
    return any(_opens(folder, names) for folder in PROC.iterdir() if folder.name.isdigit())


def _opens(process: Path, names: set[str]) -> bool:
    try:
        if process.stat().st_uid != os.geteuid():
            return False
        for descriptor in (process / "fd").iterdir():
            if str(descriptor.readlink()) in names and _may_write(process, descriptor.name):
                return True
    except OSError:  # it has ended meanwhile, or is none that we may look into
        return False
    return False


def _may_write(process: Path, descriptor: str) -> bool:
    for line in (process / "fdinfo" / descriptor).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "flags":
            return bool(int(value, 8) & _WRITES)
    return True


def _top_ns(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0
