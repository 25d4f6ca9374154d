"""Findings as people read them, as JSON, and as notes of a submit.

The notes never refuse a submit.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.files import NotText, read_source
from hpctrain.core.base.text import count
from hpctrain.launch.program import MOST_BYTES, PYTHON_KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpctrain.advise.lint.rule import LintFinding
    from hpctrain.core.settings.schema import Settings
    from hpctrain.core.settings.spec import Entry

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
BEGINS_ANEW = "HT608"
"""Lint's rule on programs that begin anew; here the command line is known, so it is asked too."""


def lint_notes(entry: Entry, settings: Settings, cwd: Path) -> list[str]:
    """Return a few lines on what would hang or go wrong; none if `run.lint` is off.

    Args:
        entry: What the ranks run; read if it is a Python file.
        settings: With `run.lint`, and the CPUs of a rank.
        cwd: Where `submit` was called: paths are shown as seen from there.
    """
    if not settings.run.lint or entry.kind not in PYTHON_KINDS or not entry.path:
        return []
    # Of these the shipped recipe and other programs need nothing.
    from hpctrain.advise.lint.check import RuleChoice, check_text
    from hpctrain.advise.lint.folder import LintFolder
    from hpctrain.launch.begins_anew import begins_anew

    path = Path(entry.path)
    name = os.path.relpath(path, cwd) if path.is_relative_to(cwd) else str(path)
    try:
        text = read_source(path)
    except NotText as error:
        return [f"lint has passed over {name}: it {error}"]
    if len(text) > MOST_BYTES:
        return [f"lint has passed over {name}, which is long: hpctrain lint {shlex.quote(name)}"]
    without = RuleChoice(ignore=(BEGINS_ANEW,))
    folder = LintFolder(path.parent, is_whole=False)
    cpus = settings.slurm.cpus_per_rank or None
    notes = _finding_lines(check_text(text, name, without, cpus=cpus, folder=folder), name)
    if not settings.run.resume_args and not settings.checkpoint.sealed:
        anew = begins_anew(text, entry.args)
        notes += [anew.note(name)] if anew else []
    return notes


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
