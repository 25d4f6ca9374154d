"""The code that runs is the code that was submitted: a copy of the git-tracked files.

A run waits in the queue for hours and comes back for days, while its owner continues editing. The
copy has the working tree's content, uncommitted edits included, and nothing that git does not
track: no data, no checkpoints, no files with tokens.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.core.base.files import make_private_folder
from hpctrain.core.settings.spec import Entry, Snapshot, Spec
from hpctrain.errors import ChecksFailed, UsageError
from hpctrain.ledger.run.layout import RunDir

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_AUTO_BYTES = 64 * 1024 * 1024
_GIT_TIMEOUT_S = 60.0
_SHOWN = 3

# Set where hpctrain is called from a git hook: they would answer for another checkout.
_GIT_LEAKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")


@dataclass(frozen=True)
class Checkout:
    """A git checkout, as its working tree is now."""

    root: Path
    """Without symbolic links."""
    commit: str
    """"" before the first commit."""
    dirty: bool
    """Tracked files differ from the commit."""
    files: list[str]
    """Tracked files that are there, relative to the root; those of submodules too."""
    size_bytes: int
    untracked: list[str]
    """Python files that git neither tracks nor ignores."""


@dataclass(frozen=True)
class SnapshotPlan:
    """What will be copied, or why nothing is."""

    checkout: Checkout | None
    notes: list[str]


def plan_snapshot(entry: Entry, mode: str) -> SnapshotPlan:
    """Decide what to copy; reads, writes nothing.

    `mode` is "yes", "no", or "auto": yes where the script is tracked in a checkout up to 64 MB. The
    shipped recipe is installed code and needs no copy.

    Raises:
        UsageError: mode is "yes" and there is nothing that could be copied.
    """
    if mode == "no" or entry.kind == "recipe":
        if mode == "yes":
            raise UsageError(
                "--snapshot copies a script's git checkout, and the shipped recipe is no script; "
                "leave it out, or name a script behind --"
            )
        return SnapshotPlan(None, [])
    path = Path(entry.path)
    is_installed = "site-packages" in path.parts or not path.is_absolute()  # of an image
    checkout = None if is_installed else find_checkout(path.parent)
    if entry.kind == "program" and checkout is None and find_checkout(Path(entry.cwd)) is not None:
        return _refuse_or_note(mode, f"{Path(entry.path).name} is in no git checkout, and")
    if entry.kind == "program" and checkout is not None and not has_copy(entry.path, checkout):
        # A python of an environment inside the checkout: nobody is to add that to git.
        return _refuse_or_note(mode, f"git does not track {Path(entry.path).name}, and")
    why = _why_not(checkout, entry, mode)
    if why is None and checkout is not None:
        return SnapshotPlan(checkout, [*_untracked_note(checkout), *_live_note(entry)])
    if mode == "yes":
        raise UsageError(f"--snapshot: {why}")
    # Without any checkout there is nothing that one would miss.
    return SnapshotPlan(None, [f"no snapshot of the code: {why}"] if checkout else [])


def find_checkout(folder: Path) -> Checkout | None:
    """The git checkout that a folder lies in; None where there is none that git will speak of."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None:
        return None
    root = Path(os.path.realpath(top.rstrip("\n")))
    listed = _git(root, "ls-files", "-z", "--recurse-submodules")
    if listed is None:
        return None
    sizes = {name: _size(root / name) for name in dict.fromkeys(_split(listed))}
    commit = (_git(root, "rev-parse", "--verify", "--quiet", "HEAD") or "").strip()
    status = _git(root, "--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    others = _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", "*.py")
    return Checkout(
        root=root,
        commit=commit,
        dirty=status != "",
        files=[name for name, size in sizes.items() if size is not None],
        size_bytes=sum(size or 0 for size in sizes.values()),
        untracked=[name for name in _split(others or "") if not _is_of_a_run(root, name)],
    )


def _is_of_a_run(root: Path, name: str) -> bool:
    """Whether a file lies in a run's directory: nobody is to add our own copies to git."""
    return any(RunDir(root / folder).spec.is_file() for folder in Path(name).parents)


def take_snapshot(run: RunDir, spec: Spec, checkout: Checkout) -> None:
    """Copy the checkout into the run and let the spec point to the copy.

    The script's path moves into the copy, and so do entries of the interpreter's path that lie in
    the checkout (PYTHONPATH, editable installs); the working directory stays.

    Raises:
        ChecksFailed: the copy could not be written.
    """
    try:
        make_private_folder(run.snapshot)
        for name in checkout.files:
            _copy(checkout.root, name, run.snapshot)
    except OSError as error:
        raise ChecksFailed(
            f"the code cannot be copied to {run.snapshot}: {error.strerror} ({error.filename}); "
            "make room, or use --no-snapshot"
        ) from None
    _point_to_copy(spec.entry, run, checkout)
    for entry in spec.beside.values():
        if has_copy(entry.path, checkout):
            _point_to_copy(entry, run, checkout)
    spec.snapshot = Snapshot(
        commit=checkout.commit,
        dirty=checkout.dirty,
        files=len(checkout.files),
        size_bytes=checkout.size_bytes,
        root=str(checkout.root),
    )


def _point_to_copy(entry: Entry, run: RunDir, checkout: Checkout) -> None:
    script = _inside(Path(entry.path), checkout.root)
    if script is not None:
        entry.path = str(run.snapshot / script)
    copies = remap_path([*entry.python_path, *import_path()], checkout.root, run.snapshot)
    outside = [
        folder
        for folder in entry.python_path
        if not remap_path([folder], checkout.root, run.snapshot)
    ]
    entry.python_path = [*copies, *outside]


def has_copy(path: str, checkout: Checkout | None) -> bool:
    """Whether a file is among those that are copied."""
    relative = None if checkout is None else _inside(Path(path), checkout.root)
    return checkout is not None and relative is not None and str(relative) in checkout.files


def import_path() -> list[str]:
    """The interpreter's path without the entry that stands for the program itself."""
    return list(sys.path if sys.flags.safe_path else sys.path[1:])


def remap_path(entries: Sequence[str], root: Path, copy: Path) -> list[str]:
    """The copy's counterparts of those entries that lie in the checkout.

    Entries that were not copied (a virtual environment inside the checkout) have none and stay
    where they are.
    """
    inside = (_inside(Path(entry), root) for entry in entries if entry)
    paths = (str(copy / relative) for relative in inside if relative is not None)
    return [path for path in dict.fromkeys(paths) if Path(path).is_dir()]


def _why_not(checkout: Checkout | None, entry: Entry, mode: str) -> str | None:
    script = Path(entry.path)
    if checkout is None:
        return f"{script.parent} is not inside a git checkout that git can read; use --no-snapshot"
    relative = _inside(script, checkout.root)
    if relative is None or str(relative) not in checkout.files:
        return f"git does not track {script.name}, so later edits reach the run; `git add` it"
    if mode == "auto" and checkout.size_bytes > MAX_AUTO_BYTES:
        return (
            f"the tracked files of {checkout.root} are {checkout.size_bytes / 2**20:.0f} MB, over "
            f"{MAX_AUTO_BYTES // 2**20}; later edits reach the run unless you say --snapshot"
        )
    return None


def _untracked_note(checkout: Checkout) -> list[str]:
    if not checkout.untracked:
        return []
    names = ", ".join(checkout.untracked[:_SHOWN])
    more = len(checkout.untracked) - _SHOWN
    names += f" and {more} more" if more > 0 else ""
    return [
        f"not in the snapshot, since git does not track them: {names}; `git add` what you import"
    ]


def _refuse_or_note(mode: str, why: str) -> SnapshotPlan:
    if mode == "yes":
        raise UsageError(f"--snapshot: {why} what it runs cannot be known; use --no-snapshot")
    return SnapshotPlan(None, [f"no snapshot of the code: {why} later edits of what it runs count"])


def _live_note(entry: Entry) -> list[str]:
    """A program that is copied runs other files by their paths, of which we know nothing."""
    if entry.kind != "program":
        return []
    name = Path(entry.path).name
    return [f"{name} is copied; what it runs by a path relative to {entry.cwd} is not the copy"]


def _inside(path: Path, root: Path) -> Path | None:
    """The path relative to the root, with every symbolic link but the last name's resolved."""
    real = Path(os.path.realpath(path.parent)) / path.name
    return real.relative_to(root) if real.is_relative_to(root) else None


def _size(path: Path) -> int | None:
    """Size of a tracked file; None where it was deleted, or is a submodule that was not fetched."""
    try:
        return None if path.is_dir() and not path.is_symlink() else path.lstat().st_size
    except FileNotFoundError:
        return None


def _copy(root: Path, name: str, to: Path) -> None:
    source, target = root / name, to / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if not source.is_symlink():
        shutil.copy2(source, target)
        return
    # A link keeps its meaning: what pointed into the checkout points into the copy.
    link = source.readlink()
    meant = _inside(source.parent / link, root)
    if meant is None:
        link = Path(os.path.realpath(source.parent / link))
    elif link.is_absolute():
        link = to / meant
    target.symlink_to(link)


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, or None where it is missing, refuses, or does not answer."""
    env = {name: value for name, value in os.environ.items() if name not in _GIT_LEAKS}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            check=False,
            env=env,
            stdin=subprocess.DEVNULL,
            timeout=_GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.fsdecode(done.stdout) if done.returncode == 0 else None


def _split(text: str) -> list[str]:
    return [name for name in text.split("\0") if name]
