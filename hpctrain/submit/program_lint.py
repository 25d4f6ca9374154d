"""What is seen in the source of the program that is submitted: notes, never a refusal.

What `hpctrain lint` says of it, and whether it saves checkpoints and does not go on from them.

tests/unit/submit/test_program_lint.py holds the promises.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.lint.rule import LintFinding
    from hpctrain.settings.schema import Settings
    from hpctrain.settings.spec import Entry

MOST_BYTES = 256 << 10
"""Of a program that is looked at: about 6,000 lines, which take a third of a second at most."""
MOST_SHOWN = 2
"""Errors that are shown whole."""
_PYTHON = frozenset({"script", "module"})


def lint_notes(entry: Entry, settings: Settings, cwd: Path) -> list[str]:
    """A few lines on what would hang or go wrong; none where nothing does, or nobody wants any.

    Args:
        entry: What the ranks run; looked at where it is a file of Python.
        settings: With `run.lint`, and the CPUs of a rank.
        cwd: Where `submit` was called: paths are shown as seen from there.
    """
    if not settings.run.lint or entry.kind not in _PYTHON or not entry.path:
        return []
    from hpctrain.lint.check import check_text
    from hpctrain.lint.files import NotText, read_source

    path = Path(entry.path)
    name = os.path.relpath(path, cwd) if path.is_relative_to(cwd) else str(path)
    try:
        text = read_source(path)
    except NotText as error:
        return [f"lint has passed over {name}: it {error}"]
    if len(text) > MOST_BYTES:
        return [f"lint has passed over {name}, which is long: hpctrain lint {shlex.quote(name)}"]
    notes = _told(check_text(text, name, cpus=settings.slurm.cpus_per_rank or None), name)
    if not settings.run.resume_args and not settings.checkpoint.sealed:
        from hpctrain.submit.begins_anew import begins_anew

        anew = begins_anew(text, entry.args)
        notes += [anew.note(name)] if anew else []
    return notes


def hears_requests(entry: Entry) -> bool:
    """Whether the program is known to use hpctrain, so that `hpctrain cancel --save` reaches it."""
    if entry.kind not in _PYTHON or not entry.path:
        return entry.kind == "recipe"
    from hpctrain.lint.files import NotText, read_source

    try:
        return "hpctrain" in read_source(Path(entry.path))
    except NotText:
        return False


def _told(findings: list[LintFinding], name: str) -> list[str]:
    """The first errors whole, the others as numbers."""
    from hpctrain.base.text import count

    errors = [one for one in findings if one.rule.level == "error"]
    warnings = sum(one.rule.level == "warning" for one in findings)
    if not errors and not warnings:
        return []
    notes = [
        f"lint: {name}:{one.line} {one.rule.code} {one.message}" for one in errors[:MOST_SHOWN]
    ]
    more = len(errors) - len(notes)
    parts = [count(more, "more error")] if more else []
    parts += [count(warnings, "warning")] if warnings else []
    said = f"{' and '.join(parts)} in {name}: " if parts else ""
    return [*notes, f"lint: {said}hpctrain lint {shlex.quote(name)} tells why and what instead"]
