"""`hpctrain`: finds the command, runs it, turns errors into a line and an exit code; `help`.

Commands live in modules of their own, imported only when they are called: the table below is all
that `--help` and completion of command names need. The manual's pages are those of docs/, which the
wheel carries.
"""

from __future__ import annotations

import json
import os
import re
import sys
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

import click

from hpctrain.core.base import VERSION
from hpctrain.core.terminal import border
from hpctrain.errors import EXIT_CODES, HpctrainError, NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from click.shell_completion import CompletionItem

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Every day": {
        "submit": ("submit", "Start a run: check it, make its folder, submit its job."),
        "status": ("runs:status", "Show where runs are: state, progress, attempts, checkpoints."),
        "logs": ("logs", "Print what a run's ranks printed, across requeues."),
        "cancel": ("runs", "Stop a run for good; --save saves first."),
        "resume": (
            "submit:resume",
            "Continue a run from its newest checkpoint, on any number of nodes.",
        ),
    },
    "Why": {
        "doctor": ("doctor", "Say why a run, or any job by its logs, died; what to do next."),
        "report": ("report", "Write a run as one page: time lost and where, curves, advice."),
        "events": ("logs:events", "Print the events of a run, from its ledger."),
        "stacks": (
            "profile:stacks_command",
            "Show where in its program each rank is; names the stuck one.",
        ),
        "profile": ("profile", "Show what steps spend their time on."),
        "tensorboard": ("report:tensorboard", "Show curves in the browser, all attempts as one."),
    },
    "Before a run": {
        "check": ("check", "Check everything that can be known before a run."),
        "lint": ("lint", "Check a training program for distributed-training bugs."),
        "plan": ("plan", "Choose a strategy for a model on these GPUs, with its cost."),
        "preflight": ("check:preflight", "Test nodes before a run gets them; names the bad ones."),
    },
    "Checkpoints": {
        "checkpoints": ("checkpoints", "List, verify, keep, prune, import and export checkpoints."),
        "evaluate": ("checkpoints:evaluate", "Submit the evaluations of checkpoints that are due."),
        "rm": ("runs:remove", "Delete a run's folder with its checkpoints; asks first."),
    },
    "Clusters": {
        "init": ("plan:init", "Write this project's hpctrain.toml, from a few questions."),
        "sites": ("sites", "Show the clusters that hpctrain has settings for."),
        "local": (
            "clusters:local_command",
            "Show the embedded cluster; rehearse a preemption on it.",
        ),
        "drill": ("drill", "Plant faults in a run and see whether it survives them."),
    },
    "Help": {
        "help": (
            "main:help_command",
            "Show a command's help, a page of the manual, or the exit codes.",
        ),
        "completion": ("main:completion", "Print what makes Tab complete names in your shell."),
    },
}
"""What one wants to do, to command, to (module of `cli` and its attribute, one line of help)."""
COMMANDS: dict[str, tuple[str, str]] = {
    name: (f"hpctrain.cli.{place}", text)
    for group in GROUPS.values()
    for name, (place, text) in group.items()
}
"""Every command to its module (with its attribute, if that is not `command`) and line of help."""
ALIASES = {
    **dict.fromkeys(("ls", "list", "ps", "runs", "show"), "status"),
    **dict.fromkeys(("stop", "kill"), "cancel"),
    **dict.fromkeys(("delete", "remove"), "rm"),
    "log": "logs",
    "start": "submit",
    "why": "doctor",
}
"""What people type by habit, to the command that is meant; no help lists them."""
REMOVED = {
    "train": "`hpctrain submit --cluster local` trains the shipped recipe on this machine",
    "queue": "`hpctrain submit --time auto --dry-run` shows which shape of a job would start when",
    "sites test": "`hpctrain check --site FILE` asks SLURM the same, beside its other checks",
    "report --compare": "`hpctrain status A B` and `hpctrain tensorboard A B` show several runs",
}
"""Commands and options that a release had, and what to type instead."""

HELP = """Keep a PyTorch training program training on a SLURM cluster until it is done.

\b
  hpctrain submit --nodes 2-4 -- train.py    your script, on 2 to 4 nodes
  hpctrain status                            your runs; `status -` the newest one
  hpctrain help TOPIC                        a page of the manual; `help exit-codes`
"""
EXIT_INTERRUPTED = 130


class LazyGroup(click.Group):
    """A group that imports a command's module only to run that command."""

    table: ClassVar[dict[str, tuple[str, str]]] = COMMANDS

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command, in the table's order."""
        del ctx
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or None where this version has none of that name."""
        del ctx
        name = ALIASES.get(cmd_name, cmd_name)
        if name not in self.table:
            return None
        module, _, attribute = self.table[name][0].partition(":")
        try:
            command: click.Command = getattr(import_module(module), attribute or "command")
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            return None
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it, with the table's names for who mistypes one: click's own are none."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            alike = get_close_matches(str(args[0]), self.table, n=1)
            if alike and self.get_command(ctx, args[0]) is None:
                raise click.UsageError(f"{error.message} Did you mean '{alike[0]}'?", ctx) from None
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table as it stands: importing every command just to list it would take its time."""
        del ctx
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<11}", text) for name, (_, text) in group.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Command names from the table, then the group's own options."""
        from click.shell_completion import CompletionItem

        names = [
            CompletionItem(name, help=text)
            for name, (_, text) in self.table.items()
            if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)


@click.group(
    cls=LazyGroup,
    help=HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(VERSION, "-V", "--version", prog_name="hpctrain")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Let what the command's code logs reach its user, and leave the rest to the command."""
    from hpctrain.core.base.log import for_user

    ctx.with_resource(for_user())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    An error that the user can fix is one line on stderr; anything else is a bug, with a traceback.
    """
    try:
        with border():
            return _run(argv)
    finally:
        _drop_what_nobody_reads()


def _drop_what_nobody_reads() -> None:
    """Write the rest to nowhere where the reader has gone: at its end Python would complain."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _run(argv: Sequence[str] | None) -> int:
    color = False if os.environ.get("NO_COLOR") else None
    try:
        result = cli.main(
            args=None if argv is None else list(argv),
            prog_name="hpctrain",
            standalone_mode=False,
            color=color,
        )
    except HpctrainError as error:
        return _fail(str(error), error.exit_code, argv)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        return error.exit_code
    except click.ClickException as error:
        return _fail(_one_line(error), error.exit_code, argv)
    except OSError as error:
        return _fail(_about_file(error), 1, argv)
    except (click.Abort, KeyboardInterrupt) as stop:
        return _interrupted(stop)
    return result if isinstance(result, int) else 0


def _interrupted(stop: BaseException) -> int:
    if not isinstance(stop.__cause__, EOFError):
        return EXIT_INTERRUPTED
    why = str(stop.__cause__) or "it ended without a word"  # click takes a broken pipe for Ctrl-C
    return _fail(f"a process that this command works with is gone: {why}", 1)


def _fail(message: str, code: int, argv: Sequence[str] | None = ()) -> int:
    """Say what is wrong; as JSON too, where a program asked for that and has got nothing yet."""
    print(f"hpctrain: error: {message}", file=sys.stderr)
    words = sys.argv[1:] if argv is None else list(argv)
    own = words[: words.index("--")] if "--" in words else words
    if "--json" in own and not getattr(sys.stdout, "has_written", True):
        print(json.dumps({"error": message, "exit_code": code}))
    return code


def _about_file(error: OSError) -> str:
    """A file system's error with its file: a full disk, another user's directory, a quota."""
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    why = error.strerror or str(error) or type(error).__name__
    if not names and _is_folder_gone():
        return "the folder in which you typed this is gone: go into another one and try again"
    return f"{' -> '.join(names)}: {why}" if names else why


def _is_folder_gone() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - asked whether it is there
    except FileNotFoundError:
        return True
    return False


def _one_line(error: click.ClickException) -> str:
    """Message of click's, with the help that fits it."""
    message = " ".join(error.format_message().split())
    if not (context := getattr(error, "ctx", None)):
        return message
    command = re.match(r"No such command '([^']+)'", message)
    word = command[1] if command else getattr(error, "option_name", "")
    name = " ".join([*context.command_path.split()[1:], word])
    if name in REMOVED:
        message = f"There is no `{name}` any more: {REMOVED[name]}."
    return f"{message} See `{context.command_path} --help`."


EXIT_CODES_TOPIC = "exit-codes"
PROGRAM = "hpctrain"
_PAGES = {
    **dict.fromkeys(["drill", "lint"], "check"),
    **dict.fromkeys(["events", "logs", "profile", "report", "status", "tensorboard"], "watching"),
    **dict.fromkeys(["cancel", "resume", "stacks"], "staying-alive"),
    "evaluate": "how-do-i",
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
def help_command(ctx: click.Context, words: tuple[str, ...]) -> None:
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
        raise NotFound(_unknown_topic(" ".join(words)))


def pages() -> dict[str, Path]:
    """Every page of the manual by its name."""
    from hpctrain.core.base.files import data_dir

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


def _unknown_topic(text: str) -> str:
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
    """Print the script for Tab completion of commands, options, runs and settings.

    Changes no file.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:  # pragma: no cover - click has these three
        raise NotFound(f"no completion for {shell}")
    click.echo(kind(ctx.find_root().command, {}, PROGRAM, _COMPLETE).source())


if __name__ == "__main__":
    sys.exit(main())
