"""`hpctrain report` and `tensorboard`: what runs did, as a page, as text, as curves."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import complete_run, json_option, runs_option
from hpctrain.core.base.process import own_program
from hpctrain.core.base.text import size
from hpctrain.core.terminal import echo_json, echo_note
from hpctrain.errors import UsageError
from hpctrain.ledger.run.find_run import find_run
from hpctrain.ledger.run.layout import RunDir
from hpctrain.ledger.run.ownership import refuse_foreign

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpctrain.observe.report.gather import ReportData


@click.command(
    name="report",
    epilog="""\b
Examples:
  hpctrain report lm-3                    writes runs/lm-3/report.html
  hpctrain report lm-3 -o /tmp/lm-3.html --open
  hpctrain report - --text                advice on the newest run, here
""",
)
@click.argument(
    "runs_named", nargs=-1, required=True, metavar="RUN...", shell_complete=complete_run
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Path of the page.  [default: report.html in the run's directory]",
)
@click.option("--text", "as_text", is_flag=True, help="Print the advice; write no page.")
@click.option("--open", "show", is_flag=True, help="Open the page in this machine's browser.")
@runs_option
@json_option
def command(
    *,
    runs_named: tuple[str, ...],
    output: str | None,
    as_text: bool,
    show: bool,
    runs: Path,
    as_json: bool,
) -> None:
    """Write a report of runs as one HTML page: charts, numbers, advice.

    RUN is a name, a job id, a unique beginning of a name, a path, or - for the newest.
    """
    from hpctrain.observe.report.gather import gather
    from hpctrain.observe.status.reader import StatusReader

    _check(len(runs_named), output, as_text=as_text, show=show)
    run_dirs = list(dict.fromkeys(find_run(name, runs=runs) for name in runs_named))
    for run in [] if output or as_text else run_dirs:
        refuse_foreign(run, hint="; name a file of your own for the page: -o FILE")
    reader = StatusReader(runs)
    gathered = [gather(run, reader.look(run)) for run in run_dirs]
    if as_text:
        pages: list[Path] = []
    else:
        pages = [_write(data, output) for data in gathered]
    if as_json:
        _print_json(gathered, pages)
    elif as_text:
        from hpctrain.observe.report import page

        width = shutil.get_terminal_size((80, 24)).columns
        click.echo("\n\n".join(page.as_text(data, width=width) for data in gathered))
    else:
        for path in pages:
            click.echo(f"wrote {path} ({size(path.stat().st_size)})")
    for path in pages if show else ():
        _open(path)


def _check(named: int, output: str | None, *, as_text: bool, show: bool) -> None:
    """Refuse flags that contradict each other."""
    if as_text and output is not None:
        raise UsageError(f"--text prints and writes no page: leave out -o {output}, or --text")
    if as_text and show:
        raise UsageError("--text writes no page that --open could show: leave one of them out")
    if output is not None and named > 1:
        raise UsageError(f"-o {output} is one page for {named} runs: leave -o out")


def _write(data: ReportData, output: str | None) -> Path:
    from hpctrain.observe.report.page import page

    target = Path(output) if output else RunDir(Path(data.status.root)).report
    return _put(target, page(data))


def _put(target: Path, text: str) -> Path:
    """Write a page, whole or not at all."""
    # A name that nobody can guess, and no link is followed: others may write into that folder.
    staged = target.with_name(f".{target.name}.{secrets.token_hex(8)}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(staged, flags, 0o666), "wb") as file:  # noqa: PTH123 - a descriptor
            file.write(text.encode(errors="replace"))
        staged.replace(target)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise UsageError(
            f"{target} cannot be written: {error.strerror}; -o FILE names another place"
        ) from None
    return target


def _print_json(gathered: Sequence[ReportData], pages: Sequence[Path]) -> None:
    """What `status --json` tells of each run, its advice, and where the pages are."""
    from hpctrain.observe.report.advice import advice
    from hpctrain.observe.status.text import as_json as status_json

    reports: list[dict[str, Any]] = []
    for data in gathered:
        more = {"advice": [asdict(one) for one in advice(data)], "problems": list(data.problems)}
        reports.append({**status_json(data.status), **more})
    echo_json({"pages": [str(page) for page in pages], "runs": reports})


def _open(page: Path) -> None:
    """Show a page in the browser of the user's screen, or say how to bring it there."""
    import webbrowser

    screen = sys.platform == "darwin" or any(
        os.environ.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")
    )
    if not (screen and webbrowser.open(page.absolute().as_uri())):
        host = os.uname().nodename
        echo_note(f"there is no browser here; from your machine: scp {host}:{page.absolute()} .")


PORT = 6006
PORTS_TRIED = 50
LOCAL = "localhost"
_HEAD_BYTES = 96
"""More than an event file has before its first scalar."""


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
def tensorboard(
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
        _print_address(facts, shown, as_json=as_json)
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
    files = list(run.tensorboard.glob("*tfevents*"))
    has_scalars = any(path.stat().st_size > _HEAD_BYTES for path in files if path.is_file())
    return _Shown(label, str(run.tensorboard), len(files), has_scalars)


def _free_port(host: str, wanted: int | None) -> int:
    """The port that was asked for, or the first free one from 6006 on."""
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


def _print_address(facts: dict[str, Any], shown: Sequence[_Shown], *, as_json: bool) -> None:
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
