"""TensorBoard's files of a run: one curve over all attempts, its settings, its attempts.

Rank 0 only. Every attempt writes one file into one folder. A file begins by saying from which step
on it counts; without that TensorBoard shows redone steps twice.

The format is protobuf events in checksummed records. torch's SummaryWriter names its files by the
node's clock, and TensorBoard reads files in the order of their names: a node whose clock is behind
would be read before the attempt that it follows. It also takes seconds to import. So the file is
ours: named by the attempt, one record for all scalars of a step.
tests/unit/runtime/test_event_file.py reads it with TensorBoard's own readers;
tests/unit/runtime/test_trackers.py holds the promises of the pages.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpctrain.core.base import clock
from hpctrain.core.settings.spec import load_spec
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.results import record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from hpctrain.core.settings.schema import Settings
    from hpctrain.core.settings.spec import Spec
    from hpctrain.ledger.run.layout import RunDir

# May hold a password or a key: a command line of the user's, lines of shell.
_PRIVATE = ("notify.command", "notify.webhook_file", "slurm.setup")
_HPARAMS = ("engine", "train")
_OF_ATTEMPTS = (b'"attempt_', b'"restored"')


class TensorBoardTracker:
    """Implements `trackers.Tracker` for TensorBoard.

    Raises:
        OSError: from any method, where the folder cannot be written.
    """

    def __init__(self, run: RunDir, *, attempt: int, resumed_step: int, world_size: int) -> None:
        """Begin the attempt's file.

        The restored checkpoint has `resumed_step` updates; what earlier attempts reported of later
        steps is not shown any more.
        """
        self._file = EventFile(
            run.tensorboard / file_name(attempt),
            purge_step=resumed_step + 1 if resumed_step else 0,
        )
        if run.spec.exists():
            spec = load_spec(run.spec)
            self._file.text(resumed_step, "hpctrain/core/settings", settings_page(spec))
            self._write_hparams(spec, world_size)
        self._file.text(resumed_step, "hpctrain/attempts", attempts_page(_attempts(run)))
        self._file.flush()

    def log(self, step: int, values: Mapping[str, float], t: float) -> None:
        """Keep scalars of a step until the next flush."""
        self._file.scalars(step, t, values)

    def flush(self) -> None:
        """Hand everything to the kernel: the process may be killed next."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()

    def _write_hparams(self, spec: Spec, world_size: int) -> None:
        """Write one session for the whole run; TensorBoard shows what its first attempt wrote.

        torch's add_hparams would begin another "run" beside it, one for each attempt.
        """
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        data = HParamsPluginData()
        session = data.session_start_info
        session.group_name = spec.run_id
        session.start_time_secs = spec.created
        for name, value in hparams(spec, world_size).items():
            if isinstance(value, bool):
                session.hparams[name].bool_value = value
            elif isinstance(value, str):
                session.hparams[name].string_value = value
            else:
                session.hparams[name].number_value = value
        self._file.plugin_data(
            0, "_hparams_/session_start_info", "hparams", data.SerializeToString()
        )


class EventFile:
    """One attempt's event file.

    Nothing is kept in a buffer that a forked child could write a second time: records are collected
    in a list and handed to the kernel by `flush`.

    Raises:
        OSError: from any method, where the file cannot be written.
    """

    def __init__(self, path: Path, *, purge_step: int) -> None:
        """Begin the file and make its folder.

        Steps of earlier files from `purge_step` on no longer count.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._new_event: Any = Event
        self._records: list[bytes] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        self._add(Event(wall_time=clock.now(), file_version="brain.Event:2"))
        start = SessionLog(status=SessionLog.START)
        self._add(Event(wall_time=clock.now(), step=purge_step, session_log=start))

    def scalars(self, step: int, t: float, values: Mapping[str, float]) -> None:
        """Write scalars of one step (may be NaN) as one record; `t` is seconds since the epoch."""
        event = self._new_event(wall_time=t, step=step)
        for name, value in values.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._add(event)

    def text(self, step: int, tag: str, markdown: str) -> None:
        """A page of TensorBoard's Text tab; the newest of a tag is shown first."""
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        tensor = TensorProto(dtype=DT_STRING, string_val=[markdown.encode()])
        tensor.tensor_shape.dim.add(size=1)
        event = self._new_event(wall_time=clock.now(), step=step)
        value = event.summary.value.add(tag=f"{tag}/text_summary", tensor=tensor)
        value.metadata.plugin_data.plugin_name = "text"
        value.metadata.plugin_data.content = b""
        self._add(event)

    def plugin_data(self, step: int, tag: str, plugin: str, content: bytes) -> None:
        """What a plugin reads from a tag's metadata, with an empty tensor as its value."""
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_FLOAT

        tensor = TensorProto(dtype=DT_FLOAT)
        tensor.tensor_shape.dim.add(size=0)
        event = self._new_event(wall_time=clock.now(), step=step)
        value = event.summary.value.add(tag=tag, tensor=tensor)
        value.metadata.plugin_data.plugin_name = plugin
        value.metadata.plugin_data.content = content
        self._add(event)

    def flush(self) -> None:
        """Hand everything to the kernel: it outlives this process, though not its node."""
        if self._records:
            text = b"".join(self._records)
            self._records.clear()
            while text:
                text = text[os.write(self._descriptor, text) :]

    def close(self) -> None:
        """Flush, and close the file, which sends it to the server where it lies on NFS."""
        self.flush()
        os.close(self._descriptor)

    def _add(self, event: Any) -> None:
        self._records.append(record(event.SerializeToString()))


def file_name(attempt: int) -> str:
    """A name that sorts after those of earlier attempts, and after all that begin with a time."""
    return f"events.out.tfevents.attempt-{attempt:010d}"


def public_settings(settings: Settings) -> dict[str, Any]:
    """Every setting as "section.key", without those that may hold a secret."""
    return {
        f"{section}.{key}": value
        for section, values in asdict(settings).items()
        for key, value in values.items()
        if f"{section}.{key}" not in _PRIVATE
    }


def hparams(spec: Spec, world_size: int) -> dict[str, bool | float | str]:
    """The settings that decide what is learned and how fast, for the HParams tab."""
    sections = _HPARAMS if spec.entry.kind == "recipe" else _HPARAMS[:1]
    chosen: dict[str, bool | float | str] = {
        path: value
        for path, value in public_settings(spec.settings).items()
        if path.partition(".")[0] in sections
    }
    return chosen | {"world_size": world_size}


def settings_page(spec: Spec) -> str:
    """The run's settings with the place that each came from, as markdown; changed ones first."""
    settings = public_settings(spec.settings)
    changed = [path for path in settings if spec.origins.get(path, "default") != "default"]
    program = "the shipped recipe" if spec.entry.kind == "recipe" else spec.entry.path
    lines = [f"**{spec.name}** (run id {spec.run_id}): {_cell(program)}", ""]
    lines += _table(
        ("setting", "value", "origin"),
        [(path, settings[path], spec.origins[path]) for path in changed],
    )
    rest = [(path, value) for path, value in settings.items() if path not in changed]
    lines += ["", "Defaults:", "", *_table(("setting", "value"), rest)]
    return "\n".join(lines)


def attempts_page(history: RunHistory) -> str:
    """The run's attempts so far, as markdown, the newest last; times are UTC."""
    cells = [
        (
            attempt.number,
            _when(attempt.started),
            attempt.job_id,
            len(attempt.nodes) or None,
            None if attempt.started is None else attempt.world_size,
            attempt.restored_step,
            attempt.end_step,
            attempt.reason or "goes on",
        )
        for attempt in sorted(history.attempts, key=lambda attempt: attempt.number)
    ]
    header = ("attempt", "began", "job", "nodes", "ranks", "from step", "to step", "ended")
    return "\n".join(_table(header, cells))


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return [_line(header), _line(["---"] * len(header)), *map(_line, rows)]


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join("" if cell is None else _cell(cell) for cell in cells) + " |"


def _cell(value: object) -> str:
    """One cell: a bar or a line break in a value would end it early."""
    return " ".join(str(value).replace("|", "\\|").split())


def _when(t: float | None) -> str | None:
    return None if t is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(t))


def _attempts(run: RunDir) -> RunHistory:
    """What tells of attempts; the many step marks of a long run are not parsed."""
    return RunHistory.of(ledger.read_marked(run, *_OF_ATTEMPTS))
