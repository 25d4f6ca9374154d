"""`hpctrain lint`: what would hang, go wrong or waste time in a training program."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import click

from hpctrain.advise.lint.check import (
    RuleChoice,
    check_text,
    fixed_text,
    unreadable,
)
from hpctrain.advise.lint.files import files_to_check
from hpctrain.advise.lint.render import finding_lines, findings_plain, summary
from hpctrain.advise.lint.rule import RULES, LintFinding
from hpctrain.cli.options import json_option
from hpctrain.core.base.files import (
    MOST_SOURCE_BYTES,
    NotText,
    decoded,
    read_source,
)
from hpctrain.core.terminal import echo_json, echo_warning
from hpctrain.errors import ChecksFailed, NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from click.shell_completion import CompletionItem

    from hpctrain.advise.lint.folder import LintFolder

EXAMPLES = """\b
Examples:
  hpctrain lint train.py
  hpctrain lint .                                every program and configuration below
  hpctrain lint src --select HT1 --level info    one family of rules, with its hints
  hpctrain lint train.py --fix --diff            what --fix would change
  hpctrain lint . --json >lint.json
  hpctrain lint --explain HT101
"""
_LEVELS = ("error", "warning", "info")
_COLORS = {"error": "red", "warning": "yellow", "info": "cyan"}
_STDIN = "<stdin>"


def _complete_code(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Codes of rules that begin so."""
    from click.shell_completion import CompletionItem

    return [
        CompletionItem(code, help=rule.name)
        for code, rule in RULES.items()
        if code.startswith(incomplete.upper())
    ]


def _codes(_ctx: click.Context, _param: click.Parameter, values: Sequence[str]) -> tuple[str, ...]:
    """Beginnings of codes, from several options with commas, refused where no rule has them."""
    given = [part.strip() for value in values for part in value.split(",") if part.strip()]
    for code in given:
        if not any(rule.startswith(code) for rule in RULES):
            raise click.BadParameter(f"no rule's code begins with {code}")
    return tuple(given)


@click.command(name="lint", epilog=EXAMPLES)
@click.option(
    "--select",
    multiple=True,
    metavar="CODES",
    callback=_codes,
    shell_complete=_complete_code,
    help="Only these rules, hints too: HT101,HT3 (all of HT3xx).",
)
@click.option(
    "--ignore",
    multiple=True,
    metavar="CODES",
    callback=_codes,
    shell_complete=_complete_code,
    help="Ignore these rules.",
)
@click.option("--level", type=click.Choice(_LEVELS), help="Lowest level to report.  [warning]")
@click.option("--strict", is_flag=True, help="Treat warnings as failures.")
@click.option("--fix", is_flag=True, help="Apply safe changes.")
@click.option("--diff", is_flag=True, help="Show the changes of --fix without applying them.")
@click.option("--cpus", type=click.IntRange(min=1), help="CPUs of each rank, for HT308.")
@click.option("--stdin", is_flag=True, help="Check standard input, for editors.")
@click.option("--stdin-filename", metavar="NAME", help="File name of the standard input.")
@click.option("--explain", metavar="CODE", shell_complete=_complete_code, help="Explain a rule.")
@json_option
@click.argument("paths", nargs=-1, metavar="[PATH]...", type=click.Path())
def command(
    *,
    paths: tuple[str, ...],
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    level: str | None,
    as_json: bool,
    explain: str | None,
    **flags: Any,
) -> None:
    """Check training scripts for distributed-training bugs.

    PATH is a Python program, a DeepSpeed configuration (.json), an hpctrain.toml, or a folder
    of them. Programs are never run; torch is not needed.

    \b
    error    some ranks would hang, or compute something else
    warning  likely wrong, or expensive
    info     worth knowing; shown with --level info or --select

    `# hpctrain: ignore HT101` in a program hides a finding on its line.
    Exit code 3 for an error; with --strict, for a warning.
    """  # noqa: D301 - click wants the control character
    if explain is not None:
        _explain(explain)
        return
    if bool(paths) == flags["stdin"]:
        raise click.UsageError("name a PATH, or give a program at --stdin.")
    if flags["stdin_filename"] and not flags["stdin"]:
        raise click.UsageError("--stdin-filename is for --stdin; add it.")
    run = _Lint(RuleChoice(select, ignore), flags["cpus"], fix=flags["fix"], diff=flags["diff"])
    if flags["stdin"]:
        run.take_stdin(flags["stdin_filename"] or _STDIN)
    else:
        run.take_files(paths)
    if run.printed:
        return
    run.show(level or ("info" if select else "warning"), as_json=as_json)
    run.conclude(strict=flags["strict"])


def _explain(code: str) -> None:
    rule = RULES.get(code)
    if rule is None:
        raise NotFound(f"there is no rule {code}; `hpctrain help check.md` lists them")
    click.echo(f"{rule.code} {rule.level}: {rule.name}\n\n{rule.why}\n{rule.remedy}")
    if rule.mends:
        click.echo("--fix changes it where that is certain.")
    click.echo("More: hpctrain help check.md")


class _Lint:
    """What one call looks at, changes and tells."""

    def __init__(self, choice: RuleChoice, cpus: int | None, *, fix: bool, diff: bool) -> None:
        self.choice = choice
        self.cpus = cpus
        self.fix = fix
        self.diff = diff
        self.findings: list[LintFinding] = []
        self.files = 0
        self.folder: LintFolder | None = None
        """That of the file at hand."""
        self.printed = False
        """Whether stdout has a program's text, or its difference, and nothing else may follow."""

    def take_files(self, paths: Sequence[str]) -> None:
        """Check each file, and fix it where asked."""
        for path, folder in files_to_check(paths, echo_warning):
            self.files += 1
            self.folder = folder
            try:
                text = read_source(path)
            except NotText as error:
                self.findings.append(unreadable(str(path), str(error)))
                continue
            self._take(text, str(path), path)
        self.printed = self.diff
        if not self.files:
            raise NotFound(f"no program and no configuration in {', '.join(paths)}")

    def take_stdin(self, name: str) -> None:
        """Check what comes in; with --fix print it as it should be."""
        self.files = 1
        try:
            text = decoded(sys.stdin.buffer.read(MOST_SOURCE_BYTES + 1))
        except NotText as error:
            self.findings.append(unreadable(name, str(error)))
            return
        if self.fix and not self.diff:
            sys.stdout.write(fixed_text(text, name, self.choice))
            self.printed = True
            return
        self._take(text, name, None)
        self.printed = self.diff

    def _take(self, text: str, name: str, path: Path | None) -> None:
        from hpctrain.advise.lint.syntax import as_diff, write_source

        findings = check_text(text, name, self.choice, cpus=self.cpus, folder=self.folder)
        if (self.fix or self.diff) and any(one.edits for one in findings):
            after = fixed_text(text, name, self.choice)
            if self.diff:
                click.echo(as_diff(text, after, name), nl=False)
            elif path is not None and after != text:
                try:
                    write_source(path, after)
                    findings = check_text(
                        after, name, self.choice, cpus=self.cpus, folder=self.folder
                    )
                except NotText as error:
                    self.findings.append(unreadable(name, str(error)))
        self.findings += findings

    def show(self, level: str, *, as_json: bool) -> None:
        """Print what was found, from a level on."""
        shown_levels = _LEVELS[: _LEVELS.index(level) + 1]
        shown = [one for one in self.findings if one.rule.level in shown_levels]
        if as_json:
            echo_json(findings_plain(shown, self.files))
            return
        self._print(shown)
        hidden = sum(one.rule.level == "info" for one in self.findings if one not in shown)
        click.echo(summary(shown, self.files, hidden))

    def _print(self, shown: Sequence[LintFinding]) -> None:
        explained: set[str] = set()
        for finding in shown:
            for text, style in finding_lines(finding, explained=finding.rule.code in explained):
                click.secho(_plain(text), fg=_COLORS.get(style))
            explained.add(finding.rule.code)

    def conclude(self, *, strict: bool) -> None:
        """Fail where there is an error.

        Raises:
            ChecksFailed: there is one; with `strict`, a warning.
        """
        failing = [
            one
            for one in self.findings
            if one.rule.level == "error" or (strict and one.rule.level == "warning")
        ]
        if failing:
            files = len({one.path for one in failing})
            raise ChecksFailed(summary(failing, files, 0))


def _plain(text: str) -> str:
    """A line without what a terminal obeys: paths and sources may hold anything."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", "?", text)
