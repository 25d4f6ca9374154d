"""What TensorBoard shows of a run besides its curves: settings, attempts, hyperparameters. Pure.

tests/unit/test_trackers.py holds the promises.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpctrain.run.events import Event
    from hpctrain.settings.schema import Settings
    from hpctrain.settings.spec import Spec

# May hold a password or a key: a command line of the user's, lines of shell.
_PRIVATE = ("notify.command", "notify.webhook_file", "slurm.setup")
_HPARAMS = ("engine", "train")


def public_settings(settings: Settings) -> dict[str, Any]:
    """Every setting as "section.key", without those that may hold a secret."""
    return {
        f"{section}.{key}": value
        for section, values in asdict(settings).items()
        for key, value in values.items()
        if f"{section}.{key}" not in _PRIVATE
    }


def hparams(spec: Spec, world_size: int) -> dict[str, bool | float | str]:
    """The settings that decide what is learned and how fast, for the HParams tab."""
    sections = _HPARAMS if spec.entry.kind == "recipe" else _HPARAMS[:1]
    chosen: dict[str, bool | float | str] = {
        path: value
        for path, value in public_settings(spec.settings).items()
        if path.partition(".")[0] in sections
    }
    return chosen | {"world_size": world_size}


def settings_page(spec: Spec) -> str:
    """The run's settings with the place that each came from, as markdown; changed ones first."""
    settings = public_settings(spec.settings)
    changed = [path for path in settings if spec.origins.get(path, "default") != "default"]
    program = "the shipped recipe" if spec.entry.kind == "recipe" else spec.entry.path
    lines = [f"**{spec.name}** (run id {spec.run_id}): {_cell(program)}", ""]
    lines += _table(
        ("setting", "value", "origin"),
        [(path, settings[path], spec.origins[path]) for path in changed],
    )
    rest = [(path, value) for path, value in settings.items() if path not in changed]
    lines += ["", "Defaults:", "", *_table(("setting", "value"), rest)]
    return "\n".join(lines)


def attempts_page(events: Iterable[Event]) -> str:
    """The run's attempts so far, as markdown, the newest last; times are UTC."""
    rows: dict[int, dict[str, Any]] = {}
    for event in events:
        if event.attempt is None:
            continue
        row = rows.setdefault(event.attempt, {})
        if event.kind == "attempt_started":
            row |= {"began": event.t, **event.data}
        elif event.kind == "restored":
            row["from"] = event.data.get("step")
        elif event.kind == "attempt_ended":
            row.setdefault("reason", event.data.get("reason"))
            row.setdefault("last", event.data.get("step"))
    cells = [
        (
            number,
            _when(row.get("began")),
            row.get("job_id"),
            len(row.get("nodes") or ()) or None,
            row.get("world_size"),
            row.get("from"),
            row.get("last"),
            row.get("reason") or "goes on",
        )
        for number, row in sorted(rows.items())
    ]
    header = ("attempt", "began", "job", "nodes", "ranks", "from step", "to step", "ended")
    return "\n".join(_table(header, cells))


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return [_line(header), _line(["---"] * len(header)), *map(_line, rows)]


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join("" if cell is None else _cell(cell) for cell in cells) + " |"


def _cell(value: object) -> str:
    """One cell: a bar or a line break in a value would end it early."""
    return " ".join(str(value).replace("|", "\\|").split())


def _when(t: float | None) -> str | None:
    return None if t is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(t))
