"""Starts and ends the daemons of a test cluster; the replica server process holds them all."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import getpass
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tests.support import processes
from tests.support.patience import PATIENCE_S, until
from tests.support.slurm_config import (
    ACCOUNT,
    CLUSTER,
    Layout,
    Ports,
    Shape,
    gres_conf,
    slurm_conf,
    slurmdbd_conf,
    topology_conf,
)
from tests.support.slurm_subreaper import LOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
PREFIX = "hpct-"
BINARIES = (
    *("munged", "mariadbd", "mariadb-install-db", "slurmdbd", "slurmctld", "slurmd"),
    *("sbatch", "srun", "scancel", "scontrol", "squeue", "sinfo", "sacct", "sacctmgr"),
)
DATABASE_PLUGIN = "accounting_storage_mysql.so"
PLUGIN_FOLDERS = (
    "/usr/lib/*/slurm*",
    "/usr/lib/slurm*",
    "/usr/lib64/slurm",
    "/usr/local/lib/slurm",
)
MARK = "HPCTRAIN_CLUSTER"
"""In the environment of every daemon: the folder it belongs to."""
POLL_S = 0.02
TURNS = 3
"""Between the choice of a port and its daemon lie seconds, in which others may take it."""
TAKEN = "Address already in use"
SOCKET_PATH_MAX = 100
"""Linux takes 107 characters, and munge adds some for its lock."""
FOREIGN = (
    "SLURM_",
    "SLURMD_",
    "SBATCH_",
    "SRUN_",
    "SALLOC_",
    "SACCT_",
    "SQUEUE_",
    "SINFO_",
    "SCANCEL_",
)
"""What a shell may carry that would change what SLURM's commands do."""


def search_path() -> str:
    """PATH with the folders of the daemons at its end, which users often lack."""
    given = os.environ.get("PATH", os.defpath)
    return os.pathsep.join([given, "/usr/local/sbin", "/usr/sbin", "/sbin"])


def missing() -> list[str]:
    """What this machine lacks for a cluster; empty when one can be started, by any user."""
    absent = [name for name in BINARIES if shutil.which(name, path=search_path()) is None]
    folders = [folder for glob in PLUGIN_FOLDERS for folder in Path("/").glob(glob[1:])]
    if folders and not any((folder / DATABASE_PLUGIN).exists() for folder in folders):
        absent.append(DATABASE_PLUGIN)
    return absent


def wait_for(predicate: Callable[[], T], what: str | Callable[[], str]) -> T:
    """Poll until the predicate holds and return its value; rarer after a while: it asks SLURM.

    Raises:
        AssertionError: as of `until`; says `what` was waited for.
    """
    pauses = [POLL_S]

    def reached() -> T:
        if not (value := predicate()):
            time.sleep(pauses[-1])
            pauses.append(min(0.1, pauses[-1] * 1.5))
        return value

    return until(reached, what)


def tail(path: Path, lines: int = 15) -> str:
    """Last lines of a log, "(no such file)" where there is none."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return "(no such file)"


def _listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


class PortTakenError(RuntimeError):
    """A daemon ended, since somebody else listens on its port by now."""


class Daemons:
    """munged, mariadbd, slurmdbd, slurmctld and the slurmd's of one cluster."""

    def __init__(self, folder: Path | None = None, shape: Shape | None = None) -> None:
        self.shape = shape or Shape()
        self._asked_for = folder
        self._replica_server: subprocess.Popen[str] | None = None
        self._pids: dict[str, int] = {}
        self._ports: Ports | None = None
        self._at: Layout | None = None

    @property
    def at(self) -> Layout:
        """Where the cluster's files lie."""
        if self._at is None:
            raise RuntimeError("the cluster has not been started")
        return self._at

    def environment(self) -> dict[str, str]:
        """Ours without any SLURM setting of the shell's, and SLURM_CONF of this cluster."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
        return kept | {"PATH": search_path(), "SLURM_CONF": str(self.at.slurm_conf)}

    def start(self) -> None:
        """Start everything and return once the four nodes have registered.

        Raises:
            RuntimeError: something is missing on this machine, or a daemon ended.
        """
        if lacking := missing():
            raise RuntimeError(f"no SLURM cluster here, missing: {', '.join(lacking)}")
        sweep_stale()
        for _ in range(TURNS - 1):
            with contextlib.suppress(PortTakenError):
                return self._start_once()
        return self._start_once()

    def _start_once(self) -> None:
        self._make_folder()
        try:
            self._boot()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every process of the cluster, jobs included, and remove the folder."""
        if self._replica_server is None:
            return
        replica_server, self._replica_server = self._replica_server, None
        self._pids.clear()
        replica_server.communicate()  # the end of its stdin is its order to sweep
        if replica_server.returncode:  # it was killed itself, and could not sweep
            clear_away(self.at.folder)

    def descendants(self) -> list[int]:
        """Every live process of the cluster: daemons, slurmstepds and jobs."""
        return processes.descendants(self._replica_server.pid) if self._replica_server else []

    def alive(self, name: str) -> bool:
        """True while that daemon runs."""
        return name in self._pids and processes.alive(self._pids[name])

    def pid(self, name: str) -> int:
        """Of that daemon."""
        return self._pids[name]

    def kill(self, name: str) -> None:
        """SIGKILL that daemon, if it runs, and wait until it is gone."""
        if self.alive(name):
            processes.kill_all([self._pids[name]])
            wait_for(lambda: not self.alive(name), f"the end of {name}")

    def end(self, name: str) -> None:
        """Ask that daemon to end, and wait until it has: slurmctld writes its state before."""
        processes.kill_all([self._pids[name]], signal.SIGTERM)
        wait_for(lambda: not self.alive(name), f"the end of {name}")

    def start_slurmctld(self) -> None:
        """Start slurmctld on the state it left, and wait until it answers."""
        self._spawn("slurmctld", "slurmctld", "-D")
        self._wait_slurmctld()

    def _wait_slurmctld(self) -> None:
        self._ready("slurmctld", lambda: _listening(self._taken_ports().slurmctld))

    def start_munged(self) -> None:
        """Start munged again, and wait until it takes requests."""
        self._start_munged()
        self._ready("munged", self._munge_answers)

    def _munge_answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(self.at.munge_socket))
            return True
        return False

    def start_slurmd(self, node: str, *, mount: Sequence[str] = ()) -> None:
        """Start one node's slurmd; it registers by itself.

        With `mount`, a command that mounts something, the node has mounts of its own.
        """
        slurmd = ["slurmd", "-D", "-N", node]
        if mount:
            script = f"{shlex.join(mount)} && exec {shlex.join(slurmd)}"
            slurmd = ["unshare", "--mount", "--propagation=private", "sh", "-c", script]
        self._spawn(node, *slurmd, conf=self.at.slurm_conf_of(self.shape.group(node)))

    def configure(self, *, user_signal: bool) -> None:
        """Write slurm.conf; daemons read it as they start."""
        text = slurm_conf(
            self.at,
            self._taken_ports(),
            self.shape,
            user=getpass.getuser(),
            user_signal=user_signal,
        )
        for group in self.shape.groups:
            socket_path = str(self.at.munge_socket_of(group))
            path = self.at.slurm_conf_of(group)
            fresh = path.with_suffix(".fresh")
            fresh.write_text(text.replace(str(self.at.munge_socket), socket_path))
            fresh.replace(path)  # commands may be reading the old one
        if self.shape.switches:
            self.at.topology_conf.write_text(topology_conf(self.shape))
        if self.shape.gpus:
            self.at.gres_conf.write_text(gres_conf(self.shape))

    def _taken_ports(self) -> Ports:
        if self._ports is None:
            self._ports = Ports.pick(len(self.shape.nodes))
        return self._ports

    def _make_folder(self) -> None:
        if self._asked_for is None:
            # not below TMPDIR: a socket's path has room for 107 characters
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
        else:
            folder = self._asked_for.absolute()
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise RuntimeError(f"{folder} is not empty: name one for the cluster alone")
        self._at = Layout(folder)
        if len(str(self.at.munge_socket)) > SOCKET_PATH_MAX:
            raise RuntimeError(f"{folder} is too long a path for a socket: choose a shorter one")
        self._ports = None
        self.at.create(self.shape.nodes)

    def _boot(self) -> None:
        at, user = self.at, getpass.getuser()
        at.munge_key.write_bytes(os.urandom(128))
        at.munge_key.chmod(0o600)
        dbd = at.folder / "slurmdbd.conf"
        dbd.touch(mode=0o600)  # slurmdbd refuses one that others can read
        dbd.write_text(slurmdbd_conf(at, self._taken_ports(), user=user))
        self.configure(user_signal=False)
        self._start_replica_server()
        for group in self.shape.groups:
            self._start_munged(group)
        self._start_database(user)
        self._spawn("slurmdbd", "slurmdbd", "-D")
        self._ready("slurmdbd", lambda: _listening(self._taken_ports().slurmdbd))
        self._sacctmgr("add", "cluster", CLUSTER)  # slurmctld ends with "no TRES" otherwise
        self._spawn("slurmctld", "slurmctld", "-D")
        self._sacctmgr("add", "account", ACCOUNT, f"cluster={CLUSTER}")  # while it starts
        self._sacctmgr("add", "user", user, f"account={ACCOUNT}", f"cluster={CLUSTER}")
        self._wait_slurmctld()
        nodes = self.shape.nodes
        for node in nodes:
            self.start_slurmd(node)
        wait_for(self._all_idle, "all nodes to be idle")

    def _all_idle(self) -> bool:
        """Whether they are.

        Raises:
            RuntimeError: a slurmd has ended instead.
        """
        states = self.node_states()
        for node in self.shape.nodes:
            if states.get(node) != "idle" and not self.alive(node):
                raise self._ended(node)
        return set(states.values()) == {"idle"} and len(states) == len(self.shape.nodes)

    def node_states(self) -> dict[str, str]:
        """State of each node as sinfo tells it; a trailing * means that it does not answer."""
        argv = ["sinfo", "-h", "-N", "-p", "work", "-o", "%N %T"]
        done = self._ask(argv)
        words = (line.partition(" ") for line in done.stdout.splitlines())
        return {name: state.strip() for name, _, state in words}

    def _start_replica_server(self) -> None:
        self._replica_server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.slurm_subreaper", self.at.folder],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for pytest, which then tells the replica server
        )

    def _start_munged(self, group: int = 0) -> None:
        at, name = self.at, f"munged.{group}" if group else "munged"
        self._spawn(
            *(name, "munged", "--foreground", "--force"),
            *(f"--key-file={at.munge_key}", f"--socket={at.munge_socket_of(group)}"),
            *(f"--pid-file={at.folder}/run/{name}.pid", f"--log-file={at.log(name)}"),
            f"--seed-file={at.folder}/munge/seed.{group}",
        )

    def _start_database(self, user: str) -> None:
        at = self.at
        own = ("--no-defaults", f"--user={user}", f"--datadir={at.database}")
        install = ["mariadb-install-db", *own, "--skip-test-db"]
        install.append("--auth-root-authentication-method=normal")
        # Two that run at once take each other's temporary tables out of a common folder.
        env = self._daemon_environment() | {"TMPDIR": str(at.folder / "run")}
        with at.out("mariadb-install-db").open("wb") as log:
            subprocess.run(install, env=env, stdout=log, stderr=log, check=True)
        self._spawn(
            *("mariadbd", "mariadbd", *own, f"--socket={at.database_socket}"),
            *("--skip-networking", "--skip-grant-tables"),  # its socket's folder is ours alone
            *("--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=64M"),
            *(f"--pid-file={at.folder}/run/mariadbd.pid", f"--tmpdir={at.folder}/run"),
        )
        self._ready("mariadbd", at.database_socket.exists)

    def _daemon_environment(self, conf: Path | None = None) -> dict[str, str]:
        return {
            "PATH": search_path(),
            "HOME": str(self.at.work),
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(conf or self.at.slurm_conf),
            "MYSQL_UNIX_PORT": str(self.at.database_socket),
            MARK: str(self.at.folder),
        }

    def _spawn(self, name: str, *argv: str, conf: Path | None = None) -> None:
        if (
            self._replica_server is None
            or self._replica_server.stdin is None
            or self._replica_server.stdout is None
        ):
            raise RuntimeError("the cluster has not been started")
        request = {
            "argv": argv,
            "env": self._daemon_environment(conf),
            "log": str(self.at.out(name)),
        }
        self._replica_server.stdin.write(json.dumps(request) + "\n")
        self._replica_server.stdin.flush()
        answer = self._replica_server.stdout.readline()
        if not answer.strip():
            raise RuntimeError(f"the replica server of {self.at.folder} has ended")
        self._pids[name] = int(answer)

    def _ready(self, name: str, predicate: Callable[[], bool]) -> None:
        """Wait for a daemon, and tell at once when it has ended instead."""

        def settled() -> bool:
            return predicate() or not self.alive(name)

        wait_for(settled, lambda: f"{name}:\n{self._said(name)}")
        if not self.alive(name):
            raise self._ended(name)

    def _ended(self, name: str) -> RuntimeError:
        said = self._said(name)
        kind = PortTakenError if TAKEN in said else RuntimeError
        return kind(f"{name} ended while starting:\n{said}")

    def _said(self, name: str) -> str:
        return f"{tail(self.at.out(name))}\n{tail(self.at.log(name))}"

    def _ask(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command of SLURM's to its end."""
        return subprocess.run(
            command,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def _sacctmgr(self, *argv: str) -> None:
        command = ["sacctmgr", "--immediate", *argv]
        done = self._ask(command)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")


def sweep_stale() -> None:
    """Clear away clusters whose replica server was killed; those that live hold their lock."""
    for lock in Path("/tmp").glob(f"{PREFIX}*/{LOCK}"):  # noqa: S108  where start() puts them
        with contextlib.suppress(FileNotFoundError, PermissionError), lock.open() as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # alive
            clear_away(lock.parent)


def clear_away(folder: Path) -> None:
    """Kill what a dead replica server left and remove its folder."""
    wait_for(functools.partial(_nothing_left, folder), f"the end of the processes of {folder}")
    shutil.rmtree(folder, ignore_errors=True)


def _nothing_left(folder: Path) -> bool:
    left = _left_of(folder)
    processes.kill_all(left)
    return not left


def _left_of(folder: Path) -> list[int]:
    return [pid for pid in processes.all_pids() if _belongs(pid, folder)]


def _belongs(pid: int, folder: Path) -> bool:
    """Whether a process is of that dead cluster; a user's shell with its SLURM_CONF is not."""
    environment = processes.environment(pid)
    if environment.get(MARK) == str(folder):
        return True  # a daemon
    if environment.get("SLURM_CONF") == f"{folder}/slurm.conf":
        return "SLURMD_NODENAME" in environment  # of a job
    if not processes.executable(pid).startswith("slurmstepd"):  # these hide their environment
        return False
    return any(path.startswith(f"{folder}/") for path in processes.open_files(pid))


if __name__ == "__main__":
    lacking = missing()
    print(", ".join(lacking))
    sys.exit(bool(lacking))
