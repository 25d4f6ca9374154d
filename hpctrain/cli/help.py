"""`hpctrain help` and `hpctrain completion`: the manual's pages, exit codes, and Tab in a shell.

The pages are those of docs/, which the wheel carries. tests/unit/cli/test_help.py holds the
promises.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from hpctrain.core.base.files import data_dir
from hpctrain.errors import EXIT_CODES, NotFound

if TYPE_CHECKING:
    from pathlib import Path

EXIT_CODES_TOPIC = "exit-codes"
PROGRAM = "hpctrain"
_PAGES = {
    **dict.fromkeys(["drill", "lint"], "check"),
    **dict.fromkeys(["events", "logs", "profile", "report", "status", "tensorboard"], "watching"),
    **dict.fromkeys(["cancel", "resume", "stacks"], "staying-alive"),
    **dict.fromkeys(["evaluate", "queue"], "how-do-i"),
    "init": "getting-started",
}
"""Commands whose page has another name."""
_COMPLETE = f"_{PROGRAM}_COMPLETE".upper()  # as click names it
_SOURCES = {
    "bash": 'eval "$(hpctrain completion bash)"      # in ~/.bashrc',
    "zsh": 'eval "$(hpctrain completion zsh)"       # in ~/.zshrc, behind compinit',
    "fish": "hpctrain completion fish | source       # in ~/.config/fish/config.fish",
}


@click.command(
    name="help",
    epilog="""\b
Examples:
  hpctrain help submit          the same as hpctrain submit --help
  hpctrain help exit-codes      what each exit code means
  hpctrain help topics          the pages of the manual
  hpctrain help checkpoints.md  a page that has the name of a command
""",
)
@click.argument("words", nargs=-1, metavar="[COMMAND|TOPIC]...")
@click.pass_context
def command(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Show a command's help, a page of the manual, or the exit codes."""
    top = ctx.find_root()
    if not words:
        click.echo(top.get_help())
        return
    if words == (EXIT_CODES_TOPIC,):
        click.echo("\n".join(f"{code:>4}  {text}" for code, text in EXIT_CODES.items()))
        return
    if words == ("topics",):
        click.echo("\n".join(f"{name:20} {_title(page)}" for name, page in pages().items()))
        return
    shown = _help_of(top, words)
    name = " ".join(words).lower().removesuffix(".md").removeprefix("docs/")
    page = pages().get(_PAGES.get(name, name))
    if shown is not None:
        click.echo(shown)
        if page is not None:
            click.echo(f"\nMore: hpctrain help {page.name}")
    elif page is not None:
        click.echo_via_pager(page.read_text(encoding="utf-8"))
    else:
        raise NotFound(_unknown(" ".join(words)))


def pages() -> dict[str, Path]:
    """Every page of the manual by its name."""
    return {path.stem: path for path in sorted(data_dir("docs").glob("*.md"))}


def _title(page: Path) -> str:
    heading = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return heading[1] if heading else ""


def _help_of(top: click.Context, words: tuple[str, ...]) -> str | None:
    """The help of a command, or of a command of a group; None where there is none."""
    ctx, command = top, top.command
    for word in words:
        below = command.get_command(ctx, word) if isinstance(command, click.Group) else None
        if below is None:
            return None
        ctx, command = click.Context(below, info_name=below.name or word, parent=ctx), below
    return command.get_help(ctx)


def _unknown(text: str) -> str:
    from hpctrain.cli.main import COMMANDS
    from hpctrain.core.settings.layers import nearest

    near = nearest(text, [*COMMANDS, *pages()])
    hint = f"did you mean {near[0]}? " if near else ""
    return (
        f"no command and no page is called {text!r}; {hint}`hpctrain help topics` lists the pages"
    )


@click.command(
    name="completion",
    epilog="\b\nHow to use it:\n" + "\n".join(f"  {line}" for line in _SOURCES.values()),
)
@click.argument("shell", type=click.Choice(list(_SOURCES)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script for Tab completion of commands, options, runs, settings and partitions.

    Changes no file.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:  # pragma: no cover - click has these three
        raise NotFound(f"no completion for {shell}")
    click.echo(kind(ctx.find_root().command, {}, PROGRAM, _COMPLETE).source())
