"""Two more users of this machine: what one may do to another's run. Needs root.

    @pytest.mark.two_users
    def test_...(common_path):            # a folder that every user can reach; tmp_path is shut
        run_as(OWNER, [sys.executable, "-m", "hpctrain", ...], cwd=...)
        start_as(STRANGER, ["flock", "-x", str(lock), "sleep", "60"])

The commands run with the user's and the group's own id and no other group, in a mount namespace of
their own in which Python and this checkout can be reached, also where they lie in root's home. The
users need no entry in /etc/passwd.
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from tests.support.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

CHECKOUT = Path(__file__).parents[2]
TOOLS = ("unshare", "setpriv")


@dataclass(frozen=True)
class User:
    """An account that has nothing but its numbers."""

    uid: int
    gid: int

    @classmethod
    def named(cls, name: str) -> Self:
        """An account of this machine: SLURM starts no job of one that it cannot look up."""
        found = pwd.getpwnam(name)
        return cls(found.pw_uid, found.pw_gid)


OWNER = User(64001, 64001)
STRANGER = User(64002, 64002)
COLLEAGUE = User(64003, OWNER.gid)
"""In the owner's group."""


@cache
def missing() -> list[str]:
    """What this process lacks to become others; empty where it can."""
    if os.geteuid() != 0:
        return ["root"]
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return absent
    done = run_as(STRANGER, ["true"], check=False)
    return [] if done.returncode == 0 else [f"the right to mount ({done.stderr.strip()})"]


def run_as(
    user: User, command: Sequence[str], *, cwd: Path | None = None, check: bool = True, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command as that user and wait for it; its output is kept, as text.

    Args:
        user: Who runs it.
        command: The program and its arguments.
        cwd: Where; "/" if not given.
        check: Whether an exit code other than 0 is an error of the test.
        env: Variables beside those of this process. HOME is "/" if it is not among them.
    """
    done = subprocess.run(
        [*_as_user(user, cwd), *command],
        env=_environment(env),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0 or not check, f"exit {done.returncode}: {done.stdout}{done.stderr}"
    return done


def start_as(
    user: User, command: Sequence[str], *, cwd: Path | None = None, **env: str
) -> subprocess.Popen[str]:
    """Start a command as that user; its output and input are pipes. `with` it, and end it."""
    return subprocess.Popen(
        [*_as_user(user, cwd), *command],
        env=_environment(env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _environment(more: dict[str, str]) -> dict[str, str]:
    path = f"{CHECKOUT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    here = {name: value for name, value in os.environ.items() if name != "XDG_STATE_HOME"}
    return here | {"HOME": "/", "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | more


def _as_user(user: User, cwd: Path | None) -> list[str]:
    """The words before a command that make it that user's."""
    become = ["setpriv", f"--reuid={user.uid}", f"--regid={user.gid}", "--clear-groups"]
    script = [*_open_script(), f"cd {quote(str(cwd or '/'))}", f'exec {" ".join(become)} -- "$@"']
    return ["unshare", "--mount", "sh", "-ec", "\n".join(script), "sh"]


def open_command() -> list[str]:
    """A command that lets all users reach Python and this checkout, for a mount namespace's own."""
    return ["sh", "-ec", "\n".join([*_open_script(), ":"])]


def _open_script() -> list[str]:
    """Shell lines: an open folder in front of each shut one, with nothing but what is needed."""
    kept = 'hold=$(mktemp -d); mount -t tmpfs none "$hold"'
    needed = {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), CHECKOUT}
    keep, show, covered = [], [], set()
    for number, path in enumerate(sorted(needed)):
        shut = [part for part in [path, *path.parents] if not part.stat().st_mode & stat.S_IXOTH]
        if not shut:
            continue
        keep.append(f'mkdir "$hold/{number}"; mount --rbind {quote(str(path))} "$hold/{number}"')
        if shut[-1] not in covered:
            show.append(f"mount -t tmpfs -o mode=755 none {quote(str(shut[-1]))}")
            covered.add(shut[-1])
        there = quote(str(path))
        show.append(f'mkdir -p {there}; mount --rbind "$hold/{number}" {there}')
    return [kept, *keep, *show, 'umount -l "$hold"; rmdir "$hold"'] if keep else []
