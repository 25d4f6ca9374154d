"""`hpctrain lint`: what would hang, go wrong or waste time in a training program."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import click

from hpctrain.advise.lint.check import RuleChoice, check_text, files_to_check, unreadable
from hpctrain.advise.lint.render import finding_lines, findings_plain, summary
from hpctrain.advise.lint.rule import LEVELS, RULES, LintFinding
from hpctrain.cli.options import json_option
from hpctrain.core.base.files import MOST_SOURCE_BYTES, NotText, decoded, read_source
from hpctrain.core.terminal import echo_json, echo_warning
from hpctrain.errors import ChecksFailed, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from click.shell_completion import CompletionItem

    from hpctrain.advise.lint.folder import LintFolder

    _Text = tuple[str, str | NotText, LintFolder | None]
    """A file's name, its text or why it has none, and the folder of its imports."""

EXAMPLES = """\b
Examples:
  hpctrain lint train.py
  hpctrain lint .                                every program and configuration below
  hpctrain lint src --select HT1 --level info    one family of rules, with its hints
  hpctrain lint . --json >lint.json
  hpctrain lint --explain HT101
"""
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
@click.option("--level", type=click.Choice(LEVELS), help="Lowest level to report.  [warning]")
@click.option("--strict", is_flag=True, help="Treat warnings as failures.")
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
    stdin: bool,
    stdin_filename: str | None,
    cpus: int | None,
    strict: bool,
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
    if bool(paths) == stdin:
        raise click.UsageError("name a PATH, or give a program at --stdin.")
    if stdin_filename and not stdin:
        raise click.UsageError("--stdin-filename is for --stdin; add it.")
    texts = iter([_from_stdin(stdin_filename or _STDIN)]) if stdin else _from_files(paths)
    choice = RuleChoice(select, ignore)
    findings: list[LintFinding] = []
    files = 0
    for files, (name, text, folder) in enumerate(texts, start=1):  # noqa: B007 - their number
        if isinstance(text, NotText):
            findings.append(unreadable(name, str(text)))
        else:
            findings += check_text(text, name, choice, cpus=cpus, folder=folder)
    _show(findings, files, level or ("info" if select else "warning"), as_json=as_json)
    fatal = ("error", "warning") if strict else ("error",)
    failing = [one for one in findings if one.rule.level in fatal]
    if failing:
        raise ChecksFailed(summary(failing, len({one.path for one in failing}), 0))


def _explain(code: str) -> None:
    rule = RULES.get(code)
    if rule is None:
        raise NotFound(f"there is no rule {code}; `hpctrain help check.md` lists them")
    click.echo(f"{rule.code} {rule.level}: {rule.name}\n\n{rule.why}\n{rule.remedy}")
    click.echo("More: hpctrain help check.md")


def _from_files(paths: Sequence[str]) -> Iterator[_Text]:
    """Read each file.

    Raises:
        NotFound: there is none.
    """
    has_files = False
    for path, folder in files_to_check(paths, echo_warning):
        has_files = True
        try:
            yield str(path), read_source(path), folder
        except NotText as error:
            yield str(path), error, folder
    if not has_files:
        raise NotFound(f"no program and no configuration in {', '.join(paths)}")


def _from_stdin(name: str) -> _Text:
    try:
        return name, decoded(sys.stdin.buffer.read(MOST_SOURCE_BYTES + 1)), None
    except NotText as error:
        return name, error, None


def _show(findings: Sequence[LintFinding], files: int, level: str, *, as_json: bool) -> None:
    """Print what was found, from a level on."""
    levels = LEVELS[: LEVELS.index(level) + 1]
    shown = [one for one in findings if one.rule.level in levels]
    if as_json:
        echo_json(findings_plain(shown, files))
        return
    explained: set[str] = set()
    for finding in shown:
        for text, style in finding_lines(finding, explained=finding.rule.code in explained):
            plain = re.sub(r"[\x00-\x1f\x7f-\x9f]", "?", text)  # paths may hold anything
            click.secho(plain, fg=_COLORS.get(style))
        explained.add(finding.rule.code)
    hidden = sum(one.rule.level == "info" for one in findings) if "info" not in levels else 0
    click.echo(summary(shown, files, hidden))
