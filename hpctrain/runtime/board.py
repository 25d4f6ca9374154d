"""TensorBoard's files: one curve over all attempts, the settings, the attempts. Rank 0 only.

Every attempt writes one file (`event_file.py`) into one folder. A file begins by saying from which
step on it counts; without that TensorBoard shows redone steps twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.run import events as ledger
from hpctrain.runtime.board_pages import attempts_page, hparams, settings_page
from hpctrain.runtime.tensorboard import EventFile, file_name
from hpctrain.settings.spec import load_spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.run.layout import RunDir
    from hpctrain.settings.spec import Spec

_OF_ATTEMPTS = (b'"attempt_', b'"restored"')


class Board:
    """Implements `trackers.Tracker` for TensorBoard.

    Raises:
        OSError: from any method, where the folder cannot be written.
    """

    def __init__(self, run: RunDir, *, attempt: int, resumed_step: int, world_size: int) -> None:
        """Begin the attempt's file.

        Args:
            run: The run.
            attempt: This attempt.
            resumed_step: Updates that the restored checkpoint has; what earlier attempts told of
                later steps is not shown any more.
            world_size: Ranks.
        """
        self._file = EventFile(
            run.tensorboard / file_name(attempt),
            purge_step=resumed_step + 1 if resumed_step else 0,
        )
        if run.spec.exists():
            spec = load_spec(run.spec)
            self._file.text(resumed_step, "hpctrain/settings", settings_page(spec))
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
        """As one session for the whole run; TensorBoard shows what its first attempt wrote.

        torch's add_hparams would begin another "run" beside it, one for each attempt.
        """
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        told = HParamsPluginData()
        session = told.session_start_info
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
            0, "_hparams_/session_start_info", "hparams", told.SerializeToString()
        )


def _attempts(run: RunDir) -> list[ledger.Event]:
    """The events that tell of attempts; the many step marks of a long run are not parsed."""
    return ledger.read_marked(run, *_OF_ATTEMPTS)
