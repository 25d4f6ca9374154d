"""Draws the pictures of the documents from text that is checked in; `make pictures` calls it.

    python -m docs.generate_pictures                      # what has changed
    python -m docs.generate_pictures --from runs/demo-1   # from another run of `make demo`

Screens are drawn from docs/pictures/demo, a run of `make demo` with fixed times and names, and the
architecture from .importlinter and docs/pictures/architecture.toml. An SVG is a function of these
files alone. The report's PNG needs a browser, and pixels differ between machines: beside it stands
a digest of the page that it shows. tests/docs/test_pictures.py fails where a picture is stale.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docs.draw_architecture import flow_svg, layers_svg
from docs.draw_shapes import shapes_svg

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from hpctrain.ledger.run.events import Event
    from hpctrain.observe.status.status import RunStatus

HERE = Path(__file__).parent
PICTURES = HERE / "pictures"
FROZEN = PICTURES / "demo"
ROOT = "/home/me/runs/demo"
BEGAN = 1795251600.0
"""2026-11-21 09:00:00 UTC."""
EPOCH = range(1_700_000_000, 2_200_000_000)
"""Numbers that are times."""
RUNNING_AT_STEP = 192
"""The run is shown as it was then, in its second attempt."""
COLUMNS = 100
REPORT, REPORT_SIZE = "report.png", (1000, 1180)
DIGEST = "report.sha256"
KEPT = ("events.jsonl", "spec.json", "attempts/*/ranks.jsonl")


def main() -> None:
    """Write what has changed."""
    parser = argparse.ArgumentParser(description="Draw the pictures of the documents.")
    parser.add_argument("--from", dest="run", type=Path, help="a run of `make demo`")
    run: Path | None = parser.parse_args().run
    if run is not None:
        freeze(run, FROZEN)
    for name, text in svgs().items():
        if _text_of(PICTURES / name) != text:
            (PICTURES / name).write_text(text)
            print(f"wrote {PICTURES / name}")
    html = report_html()
    if _text_of(PICTURES / DIGEST) != digest(html):
        photograph(html, PICTURES / REPORT)
        (PICTURES / DIGEST).write_text(digest(html))
        print(f"wrote {PICTURES / REPORT}")


def svgs() -> dict[str, str]:
    """Each SVG's name and content."""
    return {
        "status.svg": _screen(_print_status),
        "attempts.svg": _screen(_print_attempts),
        "architecture.svg": flow_svg((PICTURES / "architecture.toml").read_text()),
        "layers.svg": layers_svg((HERE.parent / ".importlinter").read_text()),
        "shapes.svg": shapes_svg((PICTURES / "shapes.jsonl").read_text()),
    }


def report_html() -> str:
    """The report of the frozen run, as `hpctrain report` writes it."""
    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.observe.report.gather import gather
    from hpctrain.observe.report.page import page

    with _in_utc():
        return page(gather(RunDir(FROZEN), _done_status()))


def digest(html: str) -> str:
    """Of all that the page shows; not of plotly.js, nor of who made it."""
    shown = re.sub(r"<script>.{100000,}?</script>", "", html, flags=re.DOTALL)
    shown = re.sub(r'<meta name="generator"[^>]*>|Made by hpctrain \S+', "", shown)
    return hashlib.sha256(shown.encode()).hexdigest() + "\n"


def photograph(html: str, target: Path) -> None:
    """Load a page in Chromium and keep its upper part as a picture."""
    import base64

    from tests.support.browser import Browser

    width, height = REPORT_SIZE
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        page.write_text(html)
        with Browser(Path(folder) / "profile") as browser:
            browser.window(width, height)
            browser.open(page)
            clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
            shot = browser.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    target.write_bytes(base64.b64decode(shot["data"]))


# ---- the frozen run


def freeze(run: Path, to: Path) -> None:
    """Take over what pictures are drawn from, with fixed times and names."""
    spec = json.loads((run / "spec.json").read_text())
    first = json.loads((run / "events.jsonl").read_text().split("\n", 1)[0])
    names = {
        f"{run.name}-": "demo-",
        str(run.resolve()): ROOT,
        str(run.absolute()): ROOT,
        spec["entry"]["cwd"]: "/home/me/hpctrain",
        run.name: "demo",
    }
    for path in [path for pattern in KEPT for path in sorted(run.glob(pattern))]:
        target = to / path.relative_to(run)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jsonl":
            lines = [
                _fixed(json.loads(line), names, first["t"])
                for line in path.read_text().splitlines()
            ]
            target.write_text("".join(json.dumps(line) + "\n" for line in lines))
        else:
            content = _fixed(json.loads(path.read_text()), names, first["t"])
            target.write_text(json.dumps(content, indent=1) + "\n")


def _fixed(value: Any, names: dict[str, str], began: float) -> Any:
    """A JSON value with other times and names."""
    if isinstance(value, dict):
        return {key: _fixed(part, names, began) for key, part in value.items()}
    if isinstance(value, list):
        return [_fixed(part, names, began) for part in value]
    if isinstance(value, float) and int(value) in EPOCH:
        return round(value - began + BEGAN, 3)
    if isinstance(value, str):
        for old, new in sorted(names.items(), key=lambda item: -len(item[0])):
            value = value.replace(old, new)
    return value


def _events() -> list[Event]:
    from hpctrain.ledger.run import events
    from hpctrain.ledger.run.layout import RunDir

    return events.read(RunDir(FROZEN))


def _running_status() -> RunStatus:
    """As it was while the second attempt ran."""
    from hpctrain.core.base.records import JobInfo, JobState
    from hpctrain.ledger.run.event_types import AttemptStarted

    events = _events()
    last = next(n for n, e in enumerate(events) if getattr(e.fact, "last", None) == RUNNING_AT_STEP)
    started = [e.fact for e in events[:last] if isinstance(e.fact, AttemptStarted)][-1]
    nodes = ",".join(started.nodes or ())
    job = JobInfo(started.job_id or "", JobState.RUNNING, alive=True, nodes=nodes)
    return _status_of(events[: last + 1], job)


def _done_status() -> RunStatus:
    return _status_of(_events(), None)


def _status_of(events: list[Event], job: Any) -> RunStatus:
    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.run.event_types import CheckpointSaved
    from hpctrain.observe.status.status import Answer, Checkpoint, status_of

    t, saved = [(e.t, e.fact) for e in events if isinstance(e.fact, CheckpointSaved)][-1]
    checkpoint = Checkpoint(saved.checkpoint or "", saved.step or 0, t, saved.bytes or 0)
    return status_of(
        RunHistory.of(events),
        Answer(job),
        name="demo",
        root=ROOT,
        cluster="local",
        checkpoint=checkpoint,
        label="demo",
        now=events[-1].t + 0.5,
    )


# ---- screens


def _screen(print_to: Callable[[Console], None]) -> str:
    """What a command prints on a terminal, as a picture; nothing of this machine is in it."""
    from rich.console import Console

    console = Console(
        record=True,
        width=COLUMNS,
        file=StringIO(),
        force_terminal=True,
        no_color=False,
        color_system="standard",
        legacy_windows=False,
        _environ={},
    )
    with _in_utc():
        print_to(console)
    svg = console.export_svg(title="$ hpctrain status demo", unique_id="hpctrain")
    # A picture that asks the network for its letters is none.
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def _print_status(console: Console) -> None:
    from hpctrain.observe.status.screen import StatusScreen

    console.print(StatusScreen(_running_status()), crop=False)


def _print_attempts(console: Console) -> None:
    from hpctrain.observe.status.tables import attempts_table

    console.print(*attempts_table(_done_status(), COLUMNS), sep="\n")


@contextlib.contextmanager
def _in_utc() -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    try:
        yield
    finally:
        os.environ.pop("TZ")
        if before is not None:
            os.environ["TZ"] = before
        time.tzset()


def _text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    main()
