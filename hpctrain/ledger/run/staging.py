"""A run's staging.json: which packed environment its nodes are to start from, or why none.

Submit writes it, before each job, and the batch script reads it. The archive itself lies beside
the runs, and is shared by them. tests/unit/submit/test_environment_archive.py holds the promises.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from hpctrain.core.base.files import read_plain, write_private
from hpctrain.core.settings.check import node_range

if TYPE_CHECKING:
    from hpctrain.core.settings.schema import Settings
    from hpctrain.ledger.run.layout import RunDir


def is_staged(settings: Settings) -> bool:
    """Whether a run's jobs are to be staged; an image is one file already."""
    if settings.container.image:
        return False
    return settings.environment.is_staged(node_range(settings.slurm.nodes)[1])


_PLACES = ("$SLURM_TMPDIR", "", "$TMPDIR", "/tmp")  # noqa: S108 - the folder in it is made safely
"""Of a node; the second is the site's."""


def places_of(settings: Settings, local: str) -> list[str]:
    """Where a node may have room for an environment, the best first; `local` is the site's."""
    own = settings.environment.stage_dir
    return [own] if own else [place or local for place in _PLACES if place or local]


@dataclass(frozen=True)
class EnvironmentArchive:
    """A Python environment in one file.

    Attributes:
        key: Digest of what is in it: names, sizes and times of its files.
        unpacked_bytes: What it takes on a disk.
        files: Ordinary files in it, without bytecode.
        compress: "none" or "zstd".
        prefix: Where the environment lies that was packed.
        python: Its interpreter, relative to that.
    """

    key: str
    path: str
    sha256: str
    size_bytes: int
    unpacked_bytes: int
    files: int
    compress: str
    prefix: str
    python: str


@dataclass(frozen=True)
class Staging:
    """What the nodes of a run's next job are to do.

    Attributes:
        archive: None where there is none; `why` says then why.
        places: Folders of a node, with $VARIABLES as they are there; the first that will do.
        timeout_s: After so long a node goes without.
    """

    archive: EnvironmentArchive | None = None
    why: str = ""
    places: list[str] = field(default_factory=list)
    timeout_s: float = 600.0

    def write(self, run: RunDir) -> None:
        """Put it where the job looks for it.

        Raises:
            OSError: it could not be written.
        """
        write_private(run.staging, json.dumps(asdict(self), indent=1) + "\n")


def read_staging(run: RunDir) -> Staging | None:
    """What was written for the run's job; None where nothing is to be staged.

    Raises:
        ValueError: it is not what this version writes.
        OSError: it cannot be read.
    """
    try:
        raw = json.loads(read_plain(run.staging))
    except FileNotFoundError:
        return None
    if not isinstance(raw, dict) or raw.keys() != Staging.__dataclass_fields__.keys():
        raise ValueError("it is of another version of hpctrain")
    archive = None if raw["archive"] is None else _archive(raw["archive"])
    return Staging(**raw | {"archive": archive})


def archive_from(text: str | bytes) -> EnvironmentArchive:
    """An archive's own facts.

    Raises:
        ValueError: it is not what this version writes.
    """
    return _archive(json.loads(text))


def _archive(raw: object) -> EnvironmentArchive:
    if not isinstance(raw, dict) or raw.keys() != EnvironmentArchive.__dataclass_fields__.keys():
        raise ValueError("not the facts of a packed environment")
    return EnvironmentArchive(**raw)
