"""A folder as one node of a cluster sees it: through a client that caches, and with faults by rule.

    python -m tests.support.client_disk BEHIND MOUNT [--cache SECONDS] [--rules FILE]

mounts (FUSE) the folder BEHIND at MOUNT and returns once it is there. Several such mounts of one
folder are several nodes. What a client of NFS or Lustre does, this one does:

- attributes, names that are not there, and listings of folders are up to SECONDS old;
- one's own changes are seen at once, by oneself; closing a file hands it to the server, and opening
  one asks the server anew (close-to-open);
- an append goes to the true end of the file, and flock(2) holds between the nodes.

FILE has a JSON list of rules, read anew whenever it changes; `Rules` writes it. A rule has `op` (a
name of an operation below, "*" for each), `path` (a pattern, relative to the mount), `do`, and
perhaps `count` (only so many times), `after` (only from that time on) and `chance`. `do` is the
name of an errno, "delay 0.5", "lost" (flock says yes without a lock), "local" (flock holds on this
mount and on no other, as with Lustre's localflock) or "torn 0.5" (rename takes the target away
first, and waits so long before it puts the new one there).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

START_S = 60.0
_FIELDS = (
    *("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_ino"),
    *("st_atime_ns", "st_mtime_ns", "st_ctime_ns"),
)


@cache
def missing() -> list[str]:
    """What this machine lacks for such a mount; empty where it can be made."""
    here = {
        "/dev/fuse": Path("/dev/fuse").exists(),
        "fuse3": shutil.which("fusermount3") is not None,
        "mfusepy": importlib.util.find_spec("mfusepy") is not None,
        "root": os.geteuid() == 0,
    }
    return [name for name, there in here.items() if not there]


class Rules:
    """The faults of a mount, which may be changed while it is there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hits = path.with_name(path.name + ".hits")
        self.set()

    def set(self, *rules: dict[str, Any]) -> None:
        """Put these in place of all others; counts begin anew."""
        fresh = self.path.with_name(f"{self.path.name}.{time.monotonic_ns()}")
        fresh.write_text(json.dumps(rules))
        self._hits.unlink(missing_ok=True)
        fresh.replace(self.path)

    @contextlib.contextmanager
    def during(self, *rules: dict[str, Any]) -> Iterator[None]:
        """These, and none afterwards. `hits` still has what they did."""
        self.set(*rules)
        yield
        hits = self.hits()
        self.set()
        self._hits.write_text("".join(f"{line}\n" for line in hits))

    def hits(self) -> list[str]:
        """What faults were put in so far: "do op path", one for each."""
        with contextlib.suppress(FileNotFoundError):
            return self._hits.read_text().splitlines()
        return []


@contextlib.contextmanager
def mounted(behind: Path, at: Path, *, cache_s: float = 0.0) -> Iterator[Rules]:
    """The folder `behind`, seen at `at`, until the end of the block."""
    behind.mkdir(parents=True, exist_ok=True)
    at.mkdir(parents=True, exist_ok=True)
    rules = Rules(at.with_name(at.name + ".rules"))
    subprocess.run(command(behind, at, cache_s=cache_s, rules=rules.path), check=True)
    try:
        yield rules
    finally:
        rules.set()
        done = subprocess.run(
            ["fusermount3", "-u", at], capture_output=True, text=True, check=False
        )
        if done.returncode:  # something still has a file open there: take it away, and say so
            subprocess.run(["fusermount3", "-uz", at], check=False)
            raise AssertionError(f"{at} was still in use: {done.stderr.strip()}")


def command(
    behind: Path, at: Path, *, cache_s: float = 0.0, rules: Path | None = None
) -> list[str]:
    """What makes the mount; it returns once the mount is there."""
    words = [sys.executable, str(Path(__file__)), str(behind), str(at), "--cache", str(cache_s)]
    return [*words, "--rules", str(rules)] if rules else words


class _Faults:
    """The rules as the mount's process follows them."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._read_at = -1
        self._rules: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def __call__(self, op: str, path: str) -> str:
        """Fail or wait as a rule says; returns what is left to do differently."""
        if self._path is None:
            return ""
        with self._lock:
            do = self._due(op, path.lstrip("/"))
        if do.startswith("delay"):
            time.sleep(float(do.split()[1]))
            return ""
        if do in {"", "lost", "local"} or do.startswith("torn"):
            return do
        raise OSError(getattr(errno, do), os.strerror(getattr(errno, do)))

    def _due(self, op: str, path: str) -> str:
        changed = os.stat(self._path).st_mtime_ns
        if changed != self._read_at:
            self._rules, self._read_at = json.loads(self._path.read_text()), changed
        for rule in self._rules:
            if rule["op"] not in {op, "*"} or not fnmatchcase(path, rule["path"]):
                continue
            rule["seen"] = rule.get("seen", 0) + 1
            if rule["seen"] <= rule.get("after", 0) or rule.get("count", 1) <= 0:
                continue
            if random.random() >= rule.get("chance", 1.0):
                continue
            if "count" in rule:
                rule["count"] -= 1
            with open(f"{self._path}.hits", "a") as hits:
                hits.write(f"{rule['do']} {op} {path}\n")
            return str(rule["do"])
        return ""


class Client:
    """The operations; `mfusepy.FUSE` calls them by their names."""

    use_ns = True

    def __init__(self, behind: str, cache_s: float, faults: _Faults) -> None:
        self._behind = behind
        self._cache_s = cache_s
        self._faults = faults
        self._attributes: dict[str, tuple[float, dict[str, Any] | None]] = {}
        self._listings: dict[str, tuple[float, list[tuple[str, dict[str, int], int]]]] = {}
        self._locks: dict[int, int] = {}
        self._files: dict[int, int] = {}

    def _real(self, path: str) -> str:
        return self._behind + path

    def _known(self, path: str) -> dict[str, Any]:
        """Attributes as this client knows them."""
        found = self._attributes.get(path)
        if found is None or time.monotonic() - found[0] >= self._cache_s:
            try:
                found = (time.monotonic(), _plain(os.lstat(self._real(path))))
            except FileNotFoundError:
                found = (time.monotonic(), None)
            self._attributes[path] = found
        if found[1] is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return found[1]

    def _changed(self, *paths: str) -> None:
        """This client has changed what is there: it looks at it, and at its folder, anew."""
        for path in paths:
            below = path.rstrip("/") + "/"
            for known in [p for p in list(self._attributes) if p == path or p.startswith(below)]:
                self._attributes.pop(known, None)
            for known in [p for p in list(self._listings) if p == path or p.startswith(below)]:
                self._listings.pop(known, None)
            parent = os.path.dirname(path)
            self._listings.pop(parent, None)
            # A folder that has changed: what was known not to be there is asked for anew.
            self._attributes.pop(parent, None)
            for known, (_, found) in list(self._attributes.items()):
                if found is None and os.path.dirname(known) == parent:
                    self._attributes.pop(known, None)

    # ---- names

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        self._faults("getattr", path)
        return self._known(path)

    def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
        self._faults("readdir", path)
        found = self._listings.get(path)
        if found is None or time.monotonic() - found[0] >= self._cache_s:
            with os.scandir(self._real(path)) as entries:
                found = (time.monotonic(), [(e.name, {"st_ino": e.inode()}, 0) for e in entries])
            self._listings[path] = found
        return found[1]

    def mkdir(self, path: str, mode: int) -> int:
        return self._change("mkdir", path, lambda: os.mkdir(self._real(path), mode))

    def rmdir(self, path: str) -> int:
        return self._change("rmdir", path, lambda: os.rmdir(self._real(path)))

    def unlink(self, path: str) -> int:
        return self._change("unlink", path, lambda: os.unlink(self._real(path)))

    def symlink(self, target: str, source: str) -> int:
        return self._change("symlink", target, lambda: os.symlink(source, self._real(target)))

    def link(self, target: str, source: str) -> int:
        real = self._real(target)
        return self._change("link", target, lambda: os.link(self._real(source), real))

    def readlink(self, path: str) -> str:
        return os.readlink(self._real(path))

    def rename(self, old: str, new: str) -> int:
        torn = self._faults("rename", old).split()
        if torn and os.path.isfile(self._real(new)):
            os.unlink(self._real(new))
            time.sleep(float(torn[1]))
        os.rename(self._real(old), self._real(new))
        below = [(p, a) for p, a in list(self._attributes.items()) if p.startswith(old + "/")]
        self._changed(old, new)
        # As a kernel does: what was known of a folder goes with it to its new name.
        self._attributes.update({new + path[len(old) :]: found for path, found in below})
        return 0

    def _change(self, op: str, path: str, do: Callable[[], object]) -> int:
        self._faults(op, path)
        try:
            do()
        finally:
            self._changed(path)
        return 0

    # ---- attributes

    def chmod(self, path: str, mode: int) -> int:
        return self._change("chmod", path, lambda: os.chmod(self._real(path), mode))

    def chown(self, path: str, uid: int, gid: int) -> int:
        def own() -> None:
            os.chown(self._real(path), uid, gid, follow_symlinks=False)

        return self._change("chown", path, own)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        return self._change("utimens", path, lambda: os.utime(self._real(path), ns=times))

    def statfs(self, path: str) -> dict[str, int]:
        self._faults("statfs", path)
        found = os.statvfs(self._real(path))
        names = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_ffree", "f_files", "f_frsize")
        return {name: getattr(found, name) for name in (*names, "f_favail", "f_namemax")}

    # ---- content

    def create(self, path: str, mode: int, fi: Any) -> int:
        self._faults("create", path)
        try:
            fi.fh = os.open(self._real(path), fi.flags | os.O_CREAT, mode)
        finally:
            self._changed(path)
        return 0

    def open(self, path: str, fi: Any) -> int:
        self._faults("open", path)
        self._attributes.pop(path, None)  # close-to-open: whoever opens asks the server
        fi.fh = os.open(self._real(path), fi.flags & ~os.O_CREAT & ~os.O_EXCL)
        return 0

    def read(self, path: str, size: int, offset: int, fi: Any) -> bytes:
        self._faults("read", path)
        return os.pread(fi.fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fi: Any) -> int:
        self._faults("write", path)
        self._attributes.pop(path, None)
        return os.pwrite(fi.fh, data, offset)  # at the end, where the file is open for appends

    def truncate(self, path: str, length: int, fi: Any = None) -> int:
        return self._change("truncate", path, lambda: os.truncate(self._real(path), length))

    def flush(self, path: str, fi: Any) -> int:
        self._faults("flush", path)
        return 0

    def fsync(self, path: str, datasync: int, fi: Any) -> int:
        self._faults("fsync", path)
        os.fsync(fi.fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fi: Any) -> int:
        self._faults("fsyncdir", path)
        return 0

    def release(self, path: str, fi: Any) -> int:
        os.close(fi.fh)
        with contextlib.suppress(KeyError):
            os.close(self._locks.pop(fi.fh))
        return 0

    def flock(self, path: str, fi: Any, op: int) -> int:
        how = self._faults("flock", path)
        if how != "lost":
            fcntl.flock(self._own(fi.fh) if how == "local" else fi.fh, op)
        return 0

    def _own(self, handle: int) -> int:
        """What stands for an open file in this mount alone."""
        if handle not in self._locks:
            inode = os.fstat(handle).st_ino
            if inode not in self._files:
                self._files[inode] = os.memfd_create(f"lock-{inode}")
            self._locks[handle] = os.open(f"/proc/self/fd/{self._files[inode]}", os.O_RDWR)
        return self._locks[handle]


def _plain(found: os.stat_result) -> dict[str, Any]:
    plain = {name.removesuffix("_ns"): getattr(found, name) for name in _FIELDS}
    return plain | {"st_blocks": found.st_blocks, "st_blksize": found.st_blksize}


def _serve(behind: str, mount: str, cache_s: float, rules: Path | None) -> None:
    import mfusepy

    mfusepy.FUSE(
        Client(behind, cache_s, _Faults(rules)),
        mount,
        raw_fi=True,
        foreground=True,
        allow_other=True,
        default_permissions=True,
        use_ino=True,
        attr_timeout=0,  # the caches are ours: the kernel's know nothing of close-to-open
        entry_timeout=0,
        negative_timeout=0,
        fsname="hpctrain-test",
        subtype="client",
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="client_disk")
    parser.add_argument("behind", type=Path)
    parser.add_argument("mount", type=Path)
    parser.add_argument("--cache", type=float, default=0.0)
    parser.add_argument("--rules", type=Path)
    asked = parser.parse_args(argv)
    before = asked.mount.stat().st_dev
    child = os.fork()
    if child == 0:
        os.setsid()
        log = f"{asked.rules}.log" if asked.rules else os.devnull
        with open(os.devnull, "rb") as null, open(log, "ab") as said:
            for stream, file in enumerate([null, said, said]):
                os.dup2(file.fileno(), stream)
        os.umask(0)
        os.chdir("/")
        _serve(str(asked.behind.resolve()), str(asked.mount), asked.cache, asked.rules)
        os._exit(0)
    deadline = time.monotonic() + START_S
    while asked.mount.stat().st_dev == before:
        if os.waitpid(child, os.WNOHANG)[0] or time.monotonic() > deadline:
            print(f"{asked.mount} could not be mounted", file=sys.stderr)
            return 1
        time.sleep(0.02)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
