"""What a program's author has decided to live with: comments in it, and a file of known findings.

`# hpctrain: ignore HT101` hides that rule on its line, or on the next one where it stands alone. A
comment that hides nothing is told (HT002). tests/unit/lint/test_ignores.py holds the promises.
"""

from __future__ import annotations

import io
import json
import re
import tokenize
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.advise.lint.catalogue import RULES
from hpctrain.advise.lint.rule import LintFinding
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_COMMENT = re.compile(r"#\s*hpctrain:\s*ignore\b[:\s]*(?P<codes>[^#]*)")
_CODE = re.compile(r"HT\d{3}")
_MARK = "hpctrain:"
VERSION = 1


@dataclass(frozen=True)
class IgnoreComment:
    """A comment, the line that it speaks of, and the codes that it hides."""

    line: int
    target: int
    codes: tuple[str, ...]


def ignore_comments(text: str) -> list[IgnoreComment]:
    """All such comments of a program; of a text that has no tokens, none."""
    if _MARK not in text:
        return []
    comments: list[IgnoreComment] = []
    alone: list[tuple[int, tuple[str, ...]]] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            line = token.start[0]
            if token.type == tokenize.COMMENT and (match := _COMMENT.match(token.string)):
                codes = tuple(_CODE.findall(match["codes"]))
                if token.line[: token.start[1]].strip():
                    comments.append(IgnoreComment(line, line, codes))
                else:
                    alone.append((line, codes))
            elif (
                token.type
                not in (
                    tokenize.COMMENT,
                    tokenize.NL,
                    tokenize.INDENT,
                    tokenize.DEDENT,
                )
                and token.type != tokenize.NEWLINE
            ):
                comments += [IgnoreComment(own, line, codes) for own, codes in alone]
                alone = []
    except (tokenize.TokenError, SyntaxError):  # read as far as it can be
        return comments
    return comments


def without_ignored(
    text: str, path: str, findings: Iterable[LintFinding], *, every_rule: bool
) -> Iterator[LintFinding]:
    """Yield the findings that no comment hides, and the comments that hide none.

    Unless `every_rule` has looked, a comment for another rule would seem idle.
    """
    comments = ignore_comments(text)
    if not comments:
        yield from findings
        return
    used: set[tuple[IgnoreComment, str]] = set()
    for finding in findings:
        hiding = [
            one
            for one in comments
            if finding.line <= one.target <= max(finding.line, finding.end_line)
            and finding.rule.code in one.codes
        ]
        used.update((one, finding.rule.code) for one in hiding)
        if not hiding:
            yield finding
    for comment in comments if every_rule else ():
        idle = [code for code in comment.codes if (comment, code) not in used]
        if idle or not comment.codes:
            yield _idle(text, path, comment, idle)


def _idle(text: str, path: str, comment: IgnoreComment, codes: list[str]) -> LintFinding:
    message = f"{', '.join(codes)} is not found there" if codes else "name the codes to ignore"
    line = text.splitlines()[comment.line - 1] if comment.line <= len(text.splitlines()) else ""
    column = line.find("#") + 1
    return LintFinding(
        RULES["HT002"], path, comment.line, column, comment.line, message, line.strip()
    )


def baseline_text(findings: Iterable[LintFinding]) -> str:
    """A file of known findings: by rule and source line, since line numbers move."""
    counts = Counter((one.path, one.rule.code, one.evidence) for one in findings)
    rows = [
        {"path": path, "code": code, "evidence": evidence, "count": count}
        for (path, code, evidence), count in sorted(counts.items())
    ]
    return json.dumps({"version": VERSION, "findings": rows}, indent=1) + "\n"


def read_baseline(text: str, name: str) -> Counter[tuple[str, str, str]]:
    """How often each known finding is known.

    Raises:
        UsageError: it is no such file.
    """
    try:
        value = json.loads(text)
        if value["version"] != VERSION:
            raise UsageError(f"{name} is a baseline of version {value['version']}; write it anew")
        return Counter(
            {
                (str(row["path"]), str(row["code"]), str(row["evidence"])): int(row["count"])
                for row in value["findings"]
            }
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(
            f"{name} is no baseline of hpctrain lint; make one by --write-baseline"
        ) from None


def beyond_baseline(
    findings: Iterable[LintFinding], baseline: Counter[tuple[str, str, str]]
) -> list[LintFinding]:
    """What the baseline does not know; of five alike, of which it knows three, the last two."""
    left = Counter(baseline)
    fresh: list[LintFinding] = []
    for finding in findings:
        key = (finding.path, finding.rule.code, finding.evidence)
        if left[key] > 0:
            left[key] -= 1
        else:
            fresh.append(finding)
    return fresh
