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

from hpctrain.base import VERSION
from hpctrain.errors import EXIT_CODES, HpctrainError
from hpctrain.terminal import border

if TYPE_CHECKING:
    from collections.abc import Sequence

    from click.shell_completion import CompletionItem

COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("hpctrain.cli.plan", "Which strategy fits these GPUs, and what it costs."),
    "check": ("hpctrain.cli.check", "Everything that can be known before a run, in one list."),
    "submit": ("hpctrain.cli.submit", "Start a run: check it, make its directory, submit its job."),
    "resume": (
        "hpctrain.cli.resume",
        "Go on from the newest valid checkpoint, on any number of nodes.",
    ),
    "status": ("hpctrain.cli.status", "Where a run is, what became of its attempts, what it lost."),
    "logs": ("hpctrain.cli.logs", "A run's output, across requeues."),
    "tensorboard": ("hpctrain.cli.tensorboard", "Curves in the browser, all attempts as one."),
    "events": ("hpctrain.cli.events", "What happened to a run, from its ledger."),
    "report": ("hpctrain.cli.report", "A run as one page: time lost and where, curves, advice."),
    "profile": ("hpctrain.cli.profile", "What steps spend their time on; takes a look with --now."),
    "stacks": ("hpctrain.cli.stacks", "Where each rank of a live run is, and who holds it up."),
    "doctor": ("hpctrain.cli.doctor", "Why a run, or any job by its logs, died; what to do next."),
    "cancel": ("hpctrain.cli.cancel", "Stop a run for good, with --save after saving."),
    "checkpoints": ("hpctrain.cli.checkpoints", "List and verify a run's checkpoints."),
    "evaluate": ("hpctrain.cli.evaluate", "Submit the evaluations of checkpoints that are due."),
    "train": ("hpctrain.cli.train", "Train the shipped recipe here, without a cluster."),
    "local": ("hpctrain.cli.local", "The embedded cluster: see it, rehearse a preemption."),
    "drill": ("hpctrain.cli.drill", "Plant faults in a run; was each promise kept?"),
    "sites": ("hpctrain.cli.sites", "Show the clusters that hpctrain has settings for."),
    "lint": ("hpctrain.cli.lint", "Find what hangs or goes wrong in a training program, unrun."),
    "preflight": ("hpctrain.cli.preflight", "Look at nodes before a run does; names the bad ones."),
}
"""Name to (module with an attribute `command`, one line of help), in the order of a run's life."""

HELP = """Keep a PyTorch training program training on a SLURM cluster until it is done.

\b
  hpctrain submit --nodes 4                  train the shipped recipe on 4 nodes
  hpctrain submit --nodes 2-4 -- train.py    an own script, on 2 to 4 nodes
  hpctrain status                            how the newest run is doing
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
        if cmd_name not in self.table:
            return None
        module, _ = self.table[cmd_name]
        try:
            command: click.Command = import_module(module).command
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
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.table.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Command names from the table, then the group's own options."""
        from click.shell_completion import CompletionItem

        names = [
            CompletionItem(name, help=text)
            for name, (_, text) in self.table.items()
            if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The exit codes, for scripts."""
        del ctx
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), text) for code, text in EXIT_CODES.items()])


@click.group(
    cls=LazyGroup,
    help=HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(VERSION, prog_name="hpctrain")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Let what the command's code logs reach its user, and leave the rest to the command."""
    from hpctrain.base.log import for_user

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
        return _fail(str(error), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        return error.exit_code
    except click.ClickException as error:
        return _fail(_one_line(error), error.exit_code)
    except OSError as error:
        return _fail(_about_file(error), 1)
    except (click.Abort, KeyboardInterrupt) as stop:
        return _interrupted(stop)
    return result if isinstance(result, int) else 0


def _interrupted(stop: BaseException) -> int:
    if not isinstance(stop.__cause__, EOFError):
        return EXIT_INTERRUPTED
    why = str(stop.__cause__) or "it ended without a word"  # click takes a broken pipe for Ctrl-C
    return _fail(f"a process that this command works with is gone: {why}", 1)


def _fail(message: str, code: int) -> int:
    print(f"hpctrain: error: {message}", file=sys.stderr)
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
