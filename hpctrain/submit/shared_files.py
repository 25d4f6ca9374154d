"""Two runs never have one set of files as their checkpoints: who shares one is refused.

A sweep over one script in one folder is the usual way to it: each run would resume from the weights
that the other saved last. Compared are the patterns of `checkpoint.sealed`, by the places that they
stand for, with those of the user's other runs whose jobs may still write: in the same folder of
runs, and in others as far as the index of runs knows them.
tests/unit/submit/test_shared_files.py holds the promises.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base.env import HPCTRAIN_OUTPUT_DIR
from hpctrain.checkpoint.sealed.patterns import may_meet, parse, places
from hpctrain.errors import ClusterError, HpctrainError, UsageError
from hpctrain.history.run_history import RunHistory
from hpctrain.history.run_state import OVER
from hpctrain.run.layout import RunDir
from hpctrain.run.run_index import indexed
from hpctrain.scheduler.base import get_cluster
from hpctrain.settings.spec import load_spec
from hpctrain.submit.live_job import live_job

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpctrain.settings.schema import Settings
    from hpctrain.settings.spec import Spec


def refuse_shared(settings: Settings, cwd: str, run: Path, after: Sequence[str] = ()) -> None:
    """Refuse a run whose checkpoints would be another live run's too.

    Args:
        settings: The run's.
        cwd: The program's working directory, "" where it has none of its own.
        run: The run's directory; it need not exist.
        after: Directories of runs that are done before this one begins.

    Raises:
        UsageError: one does; with its name and how to separate them.
    """
    if not settings.checkpoint.sealed:
        return
    own = _places(settings.checkpoint.sealed, cwd, run)
    for other, spec in _others(run):
        if str(other.root) in after:
            continue
        for text, parts in own:
            theirs = _places(spec.settings.checkpoint.sealed, spec.entry.cwd, other.root)
            if any(may_meet(parts, there) for _, there in theirs) and _may_write(other, spec):
                name = Path(text).name
                raise UsageError(
                    f"checkpoint.sealed {text!r} takes in files that {other.name} saves too, and "
                    "each would resume from the other's weights: have each run save into a folder "
                    f"of its own, e.g. --set 'checkpoint.sealed={{output}}/{name}' with {{output}} "
                    f"in the program's arguments (or {HPCTRAIN_OUTPUT_DIR} in its code); wait for "
                    f"{other.name}; or `hpctrain cancel {other.name}`"
                )


def _places(patterns: list[str], cwd: str, run: Path) -> list[tuple[str, tuple[str, ...]]]:
    folders = [Path(cwd)] if cwd else []
    return [
        (pattern.text, parts)
        for pattern in parse(patterns)
        for parts in places(pattern, [*folders, RunDir(run).output])
    ]


def _others(run: Path) -> Iterator[tuple[RunDir, Spec]]:
    """Other runs that seal files. One that cannot be read is nobody's rival here."""
    try:
        folders = sorted(run.parent.iterdir())
    except OSError:  # none so far
        folders = []
    folders += [one.run.root for one in indexed() if not one.is_over]
    for folder in dict.fromkeys(folder for folder in folders if folder != run):
        other = RunDir(folder)
        if not other.spec.is_file():
            continue
        try:
            spec = load_spec(other.spec)
        except (OSError, HpctrainError):
            continue
        if spec.settings.checkpoint.sealed:
            yield other, spec


def _may_write(run: RunDir, spec: Spec) -> bool:
    """Whether a job of the run may still save. Asked only of a run that shares files."""
    if RunHistory.read(run, marks="few").state.phase in OVER:
        return False
    try:
        return live_job(run, get_cluster(spec.cluster)) is not None
    except ClusterError:  # nobody can say that it may not
        return True
