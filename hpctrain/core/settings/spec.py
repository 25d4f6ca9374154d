"""spec.json: a run's resolved settings, each with its origin; submit writes it, all others read.

tests/unit/submit/test_prepare.py holds the promises.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.files import read_plain, write_private
from hpctrain.core.settings.fields import make
from hpctrain.core.settings.layers import DEFAULT
from hpctrain.core.settings.schema import REMOVED, Settings, replaced, sections, value_at
from hpctrain.errors import NotFound, UsageError

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 3
"""Lower numbers are hpctrain 0.1.0's."""


@dataclass
class Entry:
    """What the ranks run."""

    kind: str
    """"recipe", "script" (a file of Python), "module" (as `python -m` runs it) or "program"."""
    path: str = ""
    """Absolute path of the file as submitted (inside the snapshot where there is one)."""
    module: str = ""
    """Its name, of a module."""
    local_rank: str = ""
    """Option with which each rank gets its number on the node, in front of `args`."""
    args: list[str] = field(default_factory=list)
    cwd: str = ""
    """The ranks' working directory: where `submit` was called, so that relative paths hold."""
    python_path: list[str] = field(default_factory=list)
    """Put in front of PYTHONPATH: the snapshot's counterparts of the checkout's entries; for a
    module the working directory, or its counterpart."""


@dataclass
class Snapshot:
    """The code that runs is the code that was submitted."""

    commit: str
    dirty: bool
    files: int
    size_bytes: int
    root: str = ""
    """The checkout that was copied."""


@dataclass
class Evaluates:
    """Which checkpoint a run evaluates."""

    run: str
    """Absolute path of the run that has it."""
    step: int
    checkpoint: str
    """Its folder."""


@dataclass
class Spec:
    """One run, fully resolved."""

    name: str
    run_id: str
    """Random; stable over requeues and resumes (trackers use it)."""
    created: float
    cluster: str
    """"slurm" or "local"."""
    site: str
    entry: Entry
    settings: Settings = field(default_factory=Settings)
    origins: dict[str, str] = field(default_factory=dict)
    """Setting to origin: "default", "flag --nodes", "hpctrain.toml:3", "site x (.../x.toml:7)"."""
    chosen: list[str] = field(default_factory=list)
    """Settings that nobody has given, for which submit chose a value; its layer lies on top."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment of the ranks that hpctrain.toml and flags set; the preset's is derived for each
    attempt. No secrets: see `submit`."""
    env_origins: dict[str, str] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    dropped_env: list[str] = field(default_factory=list)
    """SBATCH_*/SLURM_* variables of the submitting shell that were not passed on."""
    python: str = ""
    """The interpreter that the job uses."""
    preset: dict[str, Any] | None = None
    """The site's preset as it was at submit (`Site.as_plain`), which holds in jobs and at a resume
    whatever the files say by then; None without a site."""
    unlocked: list[str] = field(default_factory=list)
    """Locked keys of the preset that the user changed with --allow-locked."""
    beside: dict[str, Entry] = field(default_factory=dict)
    """Programs of jobs beside this run, by the section that names them: "evaluate"."""
    evaluates: Evaluates | None = None
    """Of a run that evaluates a checkpoint of another."""
    after: list[str] = field(default_factory=list)
    """Absolute paths of the runs that must be done before this one starts."""
    foreign: bool = False
    """Whether the user has asked for this run although others own its code (--foreign)."""
    format: int = FORMAT

    def command(self) -> list[str]:
        """What each rank runs, as one would type it."""
        entry = self.entry
        what = {
            "recipe": [self.python, "-m", "hpctrain.recipes.lm.train"],
            "module": [self.python, "-m", entry.module],
            "program": [entry.path],
        }
        local_rank = [f"{entry.local_rank}=$LOCAL_RANK"] if entry.local_rank else []
        return [*what.get(entry.kind, [self.python, entry.path]), *local_rank, *entry.args]

    def given(self) -> tuple[Settings, dict[str, str]]:
        """Settings and origins without the layer of what was chosen: defaults are below it."""
        below = {path: value_at(Settings(), path) for path in self.chosen}
        return replaced(self.settings, below), self.origins | dict.fromkeys(self.chosen, DEFAULT)

    def dump(self, path: Path) -> None:
        """Write spec.json, whole or not at all; nobody else can write it, nor read it."""
        write_private(path, json.dumps(asdict(self), indent=1) + "\n")


def load_spec(path: Path) -> Spec:
    """Read spec.json.

    Raises:
        NotFound: there is none, or it has the format of another version.
        UsageError: it is no spec: torn, or written by something else.
    """
    try:
        text = read_plain(path)
    except FileNotFoundError:
        raise NotFound(f"{path} is not there: {path.parent} is not a run's directory") from None
    return parse_spec(text, path)


def _known(section: str, given: dict[str, Any]) -> dict[str, Any]:
    keys = given.get(section, {}).items()
    return {key: value for key, value in keys if f"{section}.{key}" not in REMOVED}


def parse_spec(text: str | bytes, path: Path) -> Spec:
    """What spec.json says, which was read elsewhere.

    Args:
        text: All of it.
        path: Where it lies, for messages.

    Raises:
        NotFound: it has the format of another version.
        UsageError: it is no spec: torn, or written by something else.
    """
    try:
        raw: dict[str, Any] = json.loads(text)
        if raw["format"] > FORMAT:
            raise NotFound(
                f"{path} has format {raw['format']}, this hpctrain reads up to {FORMAT}; "
                "use a newer hpctrain"
            )
        if raw["format"] < FORMAT:
            raise NotFound(
                f"{path} has format {raw['format']}, this hpctrain reads format {FORMAT} alone; "
                "hpctrain 0.1.0 shows and resumes this run"
            )
        raw["entry"] = Entry(**raw["entry"])
        raw["snapshot"] = Snapshot(**raw["snapshot"]) if raw["snapshot"] else None
        raw["beside"] = {at: Entry(**entry) for at, entry in raw.get("beside", {}).items()}
        raw["evaluates"] = Evaluates(**raw["evaluates"]) if raw.get("evaluates") else None
        given = raw["settings"]
        raw["settings"] = make(Settings, {name: _known(name, given) for name in sections()})
        raw["origins"] = {at: why for at, why in raw["origins"].items() if at not in REMOVED}
        return Spec(**raw)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} cannot be read: it is not the spec of a run ({why})") from None
