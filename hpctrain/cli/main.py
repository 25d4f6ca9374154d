"""`hpctrain`: finds the command, runs it, and turns errors into one line and an exit code.

Commands live in modules of their own, imported only when they are called: the table below is all
that `--help` and completion of command names need. tests/unit/cli/test_main.py holds the promises.
"""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

import click

from hpctrain.core.base import VERSION
from hpctrain.core.terminal import border
from hpctrain.errors import HpctrainError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from click.shell_completion import CompletionItem

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Every day": {
        "submit": ("submit", "Start a run: check it, make its folder, submit its job."),
        "status": ("status", "Show where runs are: state, progress, attempts, checkpoints."),
        "logs": ("logs", "Print what a run's ranks printed, across requeues."),
        "cancel": ("cancel", "Stop a run for good; --save saves first."),
        "resume": ("resume", "Continue a run from its newest checkpoint, on any number of nodes."),
    },
    "Why": {
        "doctor": ("doctor", "Say why a run, or any job by its logs, died; what to do next."),
        "report": ("report", "Write a run as one page: time lost and where, curves, advice."),
        "events": ("logs:events", "Print the events of a run, from its ledger."),
        "stacks": ("stacks", "Show where in its program each rank is; names the stuck one."),
        "profile": ("profile", "Show what steps spend their time on."),
        "tensorboard": ("tensorboard", "Show curves in the browser, all attempts as one."),
    },
    "Before a run": {
        "check": ("check", "Check everything that can be known before a run."),
        "lint": ("lint", "Check a training program for distributed-training bugs."),
        "plan": ("plan", "Choose a strategy for a model on these GPUs, with its cost."),
        "preflight": ("preflight", "Test nodes before a run gets them; names the bad ones."),
        "queue": ("queue", "Show which shapes of a job would start now or soon."),
    },
    "Checkpoints": {
        "checkpoints": ("checkpoints", "List, verify, keep, prune, import and export checkpoints."),
        "evaluate": ("evaluate", "Submit the evaluations of checkpoints that are due."),
        "rm": ("cancel:remove", "Delete a run's folder with its checkpoints; asks first."),
    },
    "Clusters": {
        "init": ("init", "Write this project's hpctrain.toml, from a few questions."),
        "sites": ("sites", "Show the clusters that hpctrain has settings for."),
        "local": ("local", "Show the embedded cluster; rehearse a preemption on it."),
        "drill": ("drill", "Plant faults in a run and see whether it survives them."),
    },
    "Help": {
        "help": ("help", "Show a command's help, a page of the manual, or the exit codes."),
        "completion": ("help:completion", "Print what makes Tab complete names in your shell."),
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
}
"""Commands that there were, and what to type instead."""

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
            if instead := REMOVED.get(str(args[0])):
                raise click.UsageError(
                    f"There is no `{args[0]}` any more: {instead}.", ctx
                ) from None
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

    An error that the user can mend is one line on stderr; anything else is a bug, with a traceback.
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
        import json

        print(json.dumps({"error": message, "exit_code": code}))
    return code


def _about_file(error: OSError) -> str:
    """What a file system said, and of which file: a full disk, a stranger's directory, a quota."""
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
    context = getattr(error, "ctx", None)
    return f"{message} See `{context.command_path} --help`." if context else message


if __name__ == "__main__":
    sys.exit(main())
