"""The process that tells news: ``-m hpctrain.node.agent.notify_child RUN ATTEMPT [INCIDENT NODE]``.

It ends within `notify.timeout_s` for each way of telling, whatever the command or the server does,
and writes into the ledger how that went. The webhook's URL is a secret: it appears in no message.
tests/unit/agent/test_notify.py holds the promises.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING

from hpctrain.core.base import locks
from hpctrain.core.base.env import HPCTRAIN_NOTIFY
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import Notified
from hpctrain.ledger.run.layout import RunDir
from hpctrain.ledger.run.ownership import job_spec
from hpctrain.node.agent import signals
from hpctrain.node.agent.notify import incident_of, notification_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.core.settings.schema import NotifySettings
    from hpctrain.core.settings.spec import Spec
    from hpctrain.node.agent.notify import Notification

TAIL = 500
"""Characters that are kept of what a failed command said."""


def main(argv: list[str]) -> int:
    """Send the notification, unless nobody wants it or it was sent."""
    signals.ignore_all()  # the requeue that is the news sends SIGTERM to every process of the job
    run, attempt = RunDir(Path(argv[0])), int(argv[1])
    spec = job_spec(run)
    settings = spec.settings.notify
    if argv[2:]:  # who asks tells each of them once
        news = incident_of(run, RunHistory.read(run), attempt, *argv[2:])
        if news is not None:
            _notify(news, run, spec)
        return 0
    with _alone(run, attempt, settings.timeout_s):
        history = RunHistory.read(run)
        news = notification_of(run, history, attempt)
        was_notified = attempt in history.notified
        if news is None or was_notified or not {news.what, "attempt"} & set(settings.on):
            return 0
        _notify(news, run, spec)
    return 0


def _notify(news: Notification, run: RunDir, spec: Spec) -> None:
    folder = Path(spec.entry.cwd) if Path(spec.entry.cwd).is_dir() else run.root
    problems = deliver(news, spec.settings.notify, folder)
    notified = Notified(what=news.what, ok=not problems, why="; ".join(problems))
    ledger.append(run, notified, attempt=news.attempt)


def deliver(news: Notification, settings: NotifySettings, folder: Path) -> list[str]:
    """Tell it in every way that is set; what went wrong, in plain words."""
    problems = []
    if settings.command:
        problems.append(run_command(news, settings.command, folder, settings.timeout_s))
    if settings.webhook_file:
        problems.append(post(news, folder / Path(settings.webhook_file).expanduser(), settings))
    return [problem for problem in problems if problem]


def run_command(news: Notification, command: str, folder: Path, timeout_s: float) -> str:
    """Run the command with the news on its standard input; what went wrong, or ""."""
    facts = asdict(news)
    named = {f"{HPCTRAIN_NOTIFY}{name.upper()}": _plain(value) for name, value in facts.items()}
    words = shlex.split(command)
    with os.fdopen(os.memfd_create("hpctrain-news"), "w+b") as news_file:
        news_file.write(json.dumps(facts).encode())
        news_file.seek(0)
        try:
            child = subprocess.Popen(
                words,
                cwd=folder,
                env={**os.environ, **named},
                stdin=news_file,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            return f"{words[0]}: {error.strerror}"
    tail = _Tail(child.stderr)
    try:
        code = child.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"{words[0]}: killed after {timeout_s:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it left behind goes with it
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        said = tail.text()
    return "" if code == 0 else f"{words[0]}: exit code {code}{': ' if said else ''}{said}"


def post(news: Notification, path: Path, settings: NotifySettings) -> str:
    """Post the news to the URL that the file holds; what went wrong, or ""."""
    try:
        url = path.read_text(errors="replace").strip()
    except OSError as error:
        return f"webhook_file {path}: {error.strerror}"
    if not url.startswith(("http://", "https://")):
        return f"webhook_file {path}: it holds no http or https URL"
    if url.startswith("http://") and not settings.plain_http:
        return f"webhook_file {path}: an http:// URL, and notify.plain_http is false"
    result = ["webhook: no answer in time"]

    def send() -> None:
        result[0] = _send(url, json.dumps(asdict(news)).encode(), settings.timeout_s)

    # In a thread: neither a name server nor a server that sends a byte a second can be timed out.
    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(settings.timeout_s)
    return result[0]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is followed by a GET without the news, e.g. to a proxy's login page."""

    def redirect_request(self, *_: object, **__: object) -> None:
        """Make the redirect an error."""


_OPENER = urllib.request.build_opener(_NoRedirect)


def _send(url: str, content: bytes, timeout_s: float) -> str:
    headers = {"Content-Type": "application/json", "User-Agent": "hpctrain"}
    request = urllib.request.Request(url, content, headers)  # noqa: S310 - http or https
    try:
        with _OPENER.open(request, timeout=timeout_s):
            return ""
    except urllib.error.HTTPError as error:
        error.close()
        return f"webhook: the server answered {error.code}"
    except urllib.error.URLError as error:
        reason = error.reason.strerror if isinstance(error.reason, OSError) else None
        return f"webhook: {reason or type(error.reason).__name__}"
    except Exception as error:  # noqa: BLE001 - its text may hold the URL, so only its kind is logged
        return f"webhook: {type(error).__name__}"


class _Tail:
    """The end of what a stream says, however much that is."""

    def __init__(self, stream: IO[bytes] | None) -> None:
        self._stream = stream
        self._end = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        if self._stream is not None:
            with self._stream as stream:
                while chunk := os.read(stream.fileno(), 65536):
                    self._end = (self._end + chunk)[-4 * TAIL :]

    def text(self) -> str:
        """Its last characters on one line, once it has ended."""
        self._thread.join(1.0)
        return " ".join(self._end.decode(errors="replace").split())[-TAIL:]


@contextlib.contextmanager
def _alone(run: RunDir, attempt: int, wait_s: float) -> Iterator[None]:
    """Wait for another that tells the same news, so that nobody hears it twice."""
    folder = run.attempt(attempt)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # kept, or no locks there: tell it all the same
            stack.enter_context(locks.held(folder / "notify.lock", wait_s, insist=False))
        yield


def _plain(value: object) -> str:
    """A value of the environment: a zero byte in it would keep the command from starting."""
    return "" if value is None else str(value).replace("\0", "")


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # a thread that hangs in a name server does not keep us
