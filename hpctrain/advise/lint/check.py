"""Which files are checked, and from the text of a file to its findings.

Whatever the text is, this returns: what cannot be read is a finding (HT001). The program's author
may live with findings: `# hpctrain: ignore HT101` hides that rule on its line, or on the next one
where it stands alone. HT002 reports a comment that hides nothing.
"""

from __future__ import annotations

import io
import os
import re
import tokenize
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from hpctrain.advise.lint.arguments import check_arguments
from hpctrain.advise.lint.deepspeed_config import (
    check_deepspeed,
    check_initialize,
    is_deepspeed,
    parse_json,
)
from hpctrain.advise.lint.divergence import check_divergence
from hpctrain.advise.lint.folder import LintFolder, walk_files
from hpctrain.advise.lint.loading import check_loading, check_saving
from hpctrain.advise.lint.patterns import check_patterns
from hpctrain.advise.lint.precision import check_precision
from hpctrain.advise.lint.reporting import ProgramFacts
from hpctrain.advise.lint.rule import RULES, LintFinding
from hpctrain.advise.lint.syntax import NotPython, ProgramSyntax
from hpctrain.core.base.files import read_source
from hpctrain.errors import HpctrainError, NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_CHECKS = (
    check_divergence,
    check_arguments,
    check_patterns,
    check_precision,
    check_loading,
    check_saving,
    check_initialize,
)
SETTINGS_NAME = "hpctrain.toml"
_TOO_DEEP = "hpctrain did not finish its checks: they need more depth than Python gives them"


@dataclass(frozen=True)
class RuleChoice:
    """Which rules count, by the beginnings of their codes."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def takes(self, code: str) -> bool:
        """Whether findings of this rule are shown."""
        return (not self.select or code.startswith(self.select)) and not (
            bool(self.ignore) and code.startswith(self.ignore)
        )


EVERY_RULE = RuleChoice()


def check_text(
    text: str,
    path: str,
    choice: RuleChoice = EVERY_RULE,
    *,
    cpus: int | None = None,
    folder: LintFolder | None = None,
) -> list[LintFinding]:
    """Return all findings in a file's text, in its order.

    `path` also says what kind of file it is. `cpus` are those of each rank, if known. Imports are
    followed into the files of `folder`.
    """
    name = PurePath(path).name
    if name.endswith(".json"):
        is_named = folder is not None and folder.names(path)
        try:
            findings = list(check_deepspeed(text, path, is_named=is_named))
        except ValueError as error:
            findings = [unreadable(path, f"no JSON: {error}", getattr(error, "lineno", 0))]
    elif name.endswith(".toml"):
        findings = _check_settings(text, path)
    else:
        findings = _check_program(text, path, choice, cpus, folder)
    kept = dict.fromkeys(one for one in findings if choice.takes(one.rule.code))
    return sorted(kept, key=lambda one: one.place)


def _check_program(
    text: str, path: str, choice: RuleChoice, cpus: int | None, folder: LintFolder | None
) -> list[LintFinding]:
    try:
        facts = ProgramFacts(ProgramSyntax(text, path), cpus, folder)
    except NotPython as error:
        code = "HT003" if error.is_newer else "HT001"
        return [replace(unreadable(path, str(error), error.line), rule=RULES[code])]
    findings: set[LintFinding] = set()
    for check in _CHECKS:
        try:
            findings.update(one for one in check(facts) if choice.takes(one.rule.code))
        except RecursionError:
            findings.add(LintFinding(RULES["HT003"], path, 0, 0, 0, _TOO_DEEP))
    if folder is not None:
        folder.learn(facts.syntax)
    in_order = sorted(findings, key=lambda one: one.place)
    return list(_without_ignored(text, path, in_order, every_rule=choice == EVERY_RULE))


def unreadable(path: str, why: str, line: int = 0) -> LintFinding:
    """A file of which nothing was checked."""
    return LintFinding(RULES["HT001"], path, line, 1 if line else 0, line, why)


def _check_settings(text: str, path: str) -> list[LintFinding]:
    """HT708: what `hpctrain submit` itself would say of its settings file."""
    from hpctrain.core.settings.check import check
    from hpctrain.core.settings.layers import from_table, from_toml, resolve, toml_of

    try:
        file = from_toml(toml_of(text, Path(path), path), name=path, top=("cluster", "site"))
        from_table(file.env, lambda key: file.layer.where("env", key))
        check(*resolve([file.layer]))
    except ValueError as error:
        return [unreadable(path, f"no TOML: {error}")]
    except HpctrainError as error:
        where = re.match(re.escape(path) + r":(\d+): ", str(error))
        line = int(where[1]) if where else 0
        lines = text.splitlines()
        evidence = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        message = str(error)[where.end() :] if where else str(error)
        return [LintFinding(RULES["HT708"], path, line, int(line > 0), line, message, evidence)]
    return []


_COMMENT = re.compile(r"#\s*hpctrain:\s*ignore\b[:\s]*(?P<codes>[^#]*)")
_CODE = re.compile(r"HT\d{3}")
_MARK = "hpctrain:"
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.NEWLINE)


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
            elif token.type not in _NO_CODE:
                comments += [IgnoreComment(own, line, codes) for own, codes in alone]
                alone = []
    except (tokenize.TokenError, SyntaxError):  # read as far as it can be
        return comments
    return comments


def _without_ignored(
    text: str, path: str, findings: Iterable[LintFinding], *, every_rule: bool
) -> Iterator[LintFinding]:
    """Yield the findings that no comment hides, and the comments that hide none."""
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
    lines = text.splitlines()
    for comment in comments if every_rule else ():
        idle = [code for code in comment.codes if (comment, code) not in used]
        if idle or not comment.codes:
            message = (
                f"{', '.join(idle)} is not found there" if idle else "name the codes to ignore"
            )
            line = lines[comment.line - 1] if comment.line <= len(lines) else ""
            place = (comment.line, line.find("#") + 1, comment.line)
            yield LintFinding(RULES["HT002"], path, *place, message, line.strip())


def files_to_check(
    paths: Sequence[str], say: Callable[[str], None]
) -> Iterator[tuple[Path, LintFolder]]:
    """Yield each file that was named, and of each folder its programs and configurations, once.

    Each comes with the folder whose files are looked at for its imports. `say` is called with each
    folder that cannot be looked into.

    Raises:
        NotFound: there is no such file or folder.
    """
    seen: set[Path] = set()
    beside: dict[Path, LintFolder] = {}
    for name in paths:
        path = Path(name)
        if path.is_dir():
            folder = LintFolder(path)
            candidates = [one for one in walk_files(path, say) if _is_checked(one, folder)]
        elif os.path.lexists(path):
            folder = beside.setdefault(path.parent, LintFolder(path.parent, is_whole=False))
            candidates = [path]
        else:
            raise NotFound(f"{name} is not there; check the path")
        for candidate in candidates:
            if candidate not in seen:
                seen.add(candidate)
                yield candidate, folder


def _is_checked(path: Path, folder: LintFolder) -> bool:
    """Whether a file of a folder is a program or a configuration that lint knows.

    A JSON file that cannot be read is nobody's.
    """
    if path.suffix != ".json":
        return path.suffix == ".py" or path.name == SETTINGS_NAME
    try:
        value = parse_json(read_source(path))
    except ValueError:  # NotText among them
        return False
    return is_deepspeed(value) or (is_deepspeed(value, is_named=True) and folder.names(path))
