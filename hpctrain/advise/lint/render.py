"""Findings as people read them, as JSON, and as notes of a submit.

The notes never refuse a submit.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain.core.base.files import NotText, read_source
from hpctrain.core.base.text import count
from hpctrain.launch.program import MOST_BYTES, PYTHON_KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpctrain.advise.lint.rule import LintFinding
    from hpctrain.core.settings.schema import Settings
    from hpctrain.core.settings.spec import Entry
    from hpctrain.launch.begins_anew import BeginsAnew

# Not rule.LEVELS: its module reads all rules, which a submit of the recipe would wait for.
_LEVELS = ("error", "warning", "info")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def finding_lines(finding: LintFinding, *, explained: bool) -> Iterator[tuple[str, str]]:
    """Yield (text, style) for each line that reports a finding.

    With `explained`, its rule's reason and remedy have been shown already.
    """
    rule = finding.rule
    place = f"{finding.path}:{finding.line}:{finding.column}" if finding.line else finding.path
    yield f"{place}  {rule.code} {rule.level}  {finding.message}", rule.level
    if finding.evidence:
        source = _CONTROL.sub(" ", finding.evidence)
        yield f"  {finding.line:>5} | {source}", ""
    if not explained:
        yield f"   why: {rule.why}", ""
        yield f"   fix: {rule.remedy}", ""


def summary(findings: Sequence[LintFinding], files: int, hidden: int) -> str:
    """How much was found: the last line."""
    numbers = {level: sum(one.rule.level == level for one in findings) for level in _LEVELS}
    parts = [
        count(number, level) for level, number in numbers.items() if number and level != "info"
    ]
    if numbers["info"]:
        parts.append(count(numbers["info"], "hint"))
    words = ", ".join(parts) or "nothing found"
    more = f"; {count(hidden, 'hint')} not shown (--level info)" if hidden else ""
    return f"{words} in {count(files, 'file')}{more}"


def findings_plain(findings: Sequence[LintFinding], files: int) -> dict[str, Any]:
    """All findings as one JSON value."""
    from hpctrain.advise.lint.rule import finding_plain

    return {
        "files": files,
        **{f"{level}s": sum(one.rule.level == level for one in findings) for level in _LEVELS},
        "findings": [finding_plain(one) for one in findings],
    }


MOST_SHOWN = 2
"""Errors that are shown in full."""


class LintedProgram(NamedTuple):
    """What lint says of the program that is to run."""

    name: str  # its file, as seen from where the command was called
    findings: list[LintFinding]
    anew: BeginsAnew | None = None  # where it saves, unless it resumes by itself
    unread: str = ""  # why it was passed over


def lint_program(
    entry: Entry, settings: Settings, cwd: Path, most_bytes: int | None = None
) -> LintedProgram:
    """Lint the Python file that the ranks run, of at most that length.

    Args:
        entry: What the ranks run, a file.
        settings: With the CPUs of a rank, and what is resumed from.
        cwd: Where the command was called.
        most_bytes: A longer file is passed over.
    """
    # Of these the shipped recipe and other programs need nothing.
    from hpctrain.advise.lint.check import RuleChoice, check_text
    from hpctrain.advise.lint.folder import LintFolder
    from hpctrain.launch.begins_anew import begins_anew

    path = Path(entry.path)
    name = os.path.relpath(path, cwd) if path.is_relative_to(cwd) else str(path)
    try:
        text = read_source(path)
    except NotText as error:
        return LintedProgram(name, [], unread=str(error))
    if most_bytes is not None and len(text) > most_bytes:
        return LintedProgram(name, [], unread=f"is long: hpctrain lint {shlex.quote(name)}")
    resumes = settings.run.resume_args or settings.checkpoint.sealed
    findings = check_text(
        text,
        name,
        RuleChoice(ignore=("HT608",)),  # the same of any command line; here this one is known
        cpus=settings.slurm.cpus_per_rank or None,
        folder=LintFolder(path.parent, is_whole=False),
    )
    return LintedProgram(name, findings, None if resumes else begins_anew(text, entry.args))


def lint_notes(entry: Entry, settings: Settings, cwd: Path) -> list[str]:
    """Return a few lines on what would hang or go wrong; none if `run.lint` is off."""
    if not settings.run.lint or entry.kind not in PYTHON_KINDS or not entry.path:
        return []
    linted = lint_program(entry, settings, cwd, MOST_BYTES)
    if linted.unread:
        return [f"lint has passed over {linted.name}: it {linted.unread}"]
    notes = _finding_lines(linted.findings, linted.name)
    return [*notes, linted.anew.note(linted.name)] if linted.anew else notes


def _finding_lines(findings: list[LintFinding], name: str) -> list[str]:
    """Return the first errors in full, and how many others there are."""
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
