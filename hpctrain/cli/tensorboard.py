"""`hpctrain tensorboard`: TensorBoard over runs, and how to reach it from a laptop.

tests/unit/cli/test_tensorboard.py holds the promises.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import complete_run, json_option, runs_option
from hpctrain.core.base.process import own_program

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpctrain.ledger.run.layout import RunDir

PORT = 6006
PORTS_TRIED = 50
LOCAL = "localhost"
_HEADER = struct.Struct("<QI")  # of a record: length, checksum of the length
_FOOTER_BYTES = 4
_LONGEST_BYTES = 1 << 24
_RECORDS_READ = 50  # scalars begin after a few pages of text


@dataclass(frozen=True)
class _Shown:
    """One run as TensorBoard gets it."""

    name: str
    folder: str
    attempts: int
    """Event files: each attempt writes one."""
    has_scalars: bool


@click.command("tensorboard")
@click.argument("names", nargs=-1, metavar="[RUN]...", shell_complete=complete_run)
@runs_option
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help=f"Port to listen on. [default: {PORT}, or the next free one]",
)
@click.option(
    "--host",
    default=LOCAL,
    show_default=True,
    help="Address to listen on. TensorBoard has no password: on another address than "
    "localhost, everybody who reaches this machine sees your runs.",
)
@click.option("--dry-run", is_flag=True, help="Print the command only.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    names: Sequence[str],
    runs: Path,
    *,
    port: int | None,
    host: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Start TensorBoard for runs, with all attempts as one curve.

    \b
    hpctrain tensorboard                   the newest run
    hpctrain tensorboard gpt-a gpt-b       two runs side by side
    hpctrain tensorboard gpt-a --port 7007
    hpctrain tensorboard gpt-a --dry-run --json

    RUN is a name, a job id, a unique prefix, or - for the newest. It runs here, on the login node,
    until Ctrl-C; the printed ssh line, run on your own machine, brings it to your browser.
    """  # noqa: D301 - click wants the control character
    from hpctrain.ledger.run.find_run import find_run

    run_dirs = [find_run(name, runs=runs) for name in names or ("-",)]
    shown = [_look(run, label) for run, label in zip(run_dirs, _labels(run_dirs), strict=True)]
    port = _free_port(host, port)
    with _tree(shown) as folder:
        words = _words(folder, host, port)
        facts = {
            "url": f"http://{host}:{port}/",
            "host": host,
            "port": port,
            "ssh": _ssh(host, port),
            "command": words,
            "runs": [asdict(row) for row in shown],
        }
        _print(facts, shown, as_json=as_json)
        if not dry_run:
            ctx.exit(_serve(words))


def _labels(runs: Sequence[RunDir]) -> list[str]:
    """The runs' names; of two of one name, from different folders, the second gets a number."""
    labels: list[str] = []
    for run in runs:
        taken = sum(other.name == run.name for other in runs[: len(labels)])
        labels.append(f"{run.name} ({taken + 1})" if taken else run.name)
    return labels


def _look(run: RunDir, label: str) -> _Shown:
    try:
        files = [path for path in run.tensorboard.iterdir() if "tfevents" in path.name]
    except FileNotFoundError:
        files = []
    return _Shown(label, str(run.tensorboard), len(files), any(map(_has_scalars, files)))


def _has_scalars(path: Path) -> bool:
    """Whether one of the file's first records is of a scalar."""
    from tensorboard.compat.proto.event_pb2 import Event

    from hpctrain.core.base.files import open_plain

    try:
        with open_plain(path) as file:
            for _ in range(_RECORDS_READ):
                head = file.read(_HEADER.size)
                if len(head) < _HEADER.size:
                    return False
                size, _check = _HEADER.unpack(head)
                if size > _LONGEST_BYTES:
                    return False
                event = Event.FromString(file.read(size + _FOOTER_BYTES)[:size])
                if any(value.HasField("simple_value") for value in event.summary.value):
                    return True
    except Exception:  # noqa: BLE001 - torn, damaged or gone: TensorBoard shows what it can
        return False
    return True


def _free_port(host: str, wanted: int | None) -> int:
    """The port that was asked for, or the first free one from 6006 on."""
    from hpctrain.errors import UsageError

    tried = [wanted] if wanted else [*range(PORT, PORT + PORTS_TRIED), 0]
    for port in tried:
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(address)
                taken: int = trial.getsockname()[1]
                return taken
        except socket.gaierror as error:
            raise UsageError(f"--host {host}: {error.strerror}") from None
        except PermissionError:
            raise UsageError(f"--port {port} needs root; take one above 1023") from None
        except OSError as error:
            import errno

            if error.errno != errno.EADDRINUSE:
                raise UsageError(f"--host {host}: {error.strerror}") from None
    raise UsageError(f"--port {wanted} is taken on {host}; without --port a free one is found")


@contextlib.contextmanager
def _tree(shown: Sequence[_Shown]) -> Iterator[str]:
    """A folder with one entry for each run, named as TensorBoard shall name it."""
    with tempfile.TemporaryDirectory(prefix="hpctrain-tensorboard-") as folder:
        for shown_run in shown:
            (Path(folder) / shown_run.name).symlink_to(shown_run.folder)
        yield folder


def _words(folder: str, host: str, port: int) -> list[str]:
    where = ["--logdir", folder, "--host", host, "--port", str(port)]
    return own_program("tensorboard.main", *where)


def _ssh(host: str, port: int) -> str:
    """The line that brings the port to the user's own machine."""
    import getpass

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without this user
        user = "you"
    here = _own_name()
    return f"ssh -N -L {port}:{LOCAL if host == LOCAL else here}:{port} {user}@{here}"


def _own_name() -> str:
    """How the user's machine knows this one: its full name, else the address that ssh came to."""
    name = socket.getfqdn()
    connection = os.environ.get("SSH_CONNECTION", "").split()
    is_known = "." in name and not name.startswith(LOCAL)
    if is_known:
        return name
    return connection[2] if len(connection) > 2 else socket.gethostname()  # noqa: PLR2004


def _print(facts: dict[str, Any], shown: Sequence[_Shown], *, as_json: bool) -> None:
    from hpctrain.core.terminal import echo_json, echo_note

    if as_json:
        echo_json(facts)
        return
    runs = "1 run" if len(shown) == 1 else f"{len(shown)} runs"
    attempts = sum(run.attempts for run in shown)
    files = "1 attempt" if attempts == 1 else f"{attempts} attempts, no step twice"
    click.echo(f"TensorBoard on {socket.gethostname()}:{facts['port']} for {runs} ({files})")
    click.echo(f"From your own machine:  {facts['ssh']}")
    click.echo(f"then open http://{LOCAL}:{facts['port']}/   (Ctrl-C here ends it)")
    if facts["host"] == LOCAL:
        click.echo("It listens on localhost only, so that others on this machine's network do not")
        click.echo("see it; users who are logged in here can. --host ADDRESS changes that.")
    else:
        echo_note("TensorBoard asks for no password: who reaches this machine sees your runs")
    for run in shown:
        if not run.has_scalars:
            echo_note(f"{run.name} has no scalars yet; they appear by themselves once it has")


def _serve(words: Sequence[str]) -> int:
    """Run TensorBoard until it ends or is ended; its exit code, 0 where the user ended it."""
    for signum in (signal.SIGTERM, signal.SIGHUP):  # a closed ssh session leaves nothing behind
        signal.signal(signum, _interrupt)
    server = subprocess.Popen(words)
    try:
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        server.terminate()
        server.wait()


def _interrupt(_signum: int, _frame: object) -> None:
    raise KeyboardInterrupt
