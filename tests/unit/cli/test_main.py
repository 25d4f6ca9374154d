"""`hpctrain` finds its commands lazily and ends with one line and a documented exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import click
import pytest

from hpctrain import __version__, errors
from hpctrain.cli import main as cli_main
from hpctrain.core.drawing import echo_table


def run_main(*argv):
    return cli_main.main(argv)


@pytest.fixture
def command(monkeypatch):
    """Put a command of the test's own into the group."""

    def install(callback):
        monkeypatch.setattr(
            cli_main.LazyGroup, "get_command", lambda *_: click.Command("x", callback=callback)
        )

    return install


def test_help_lists_every_command_by_task_without_importing_one():
    code = (
        "import sys; from hpctrain.cli.main import main; main(['--help']); "
        "print(sorted(m for m in sys.modules if m.startswith('hpctrain')))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    for name in cli_main.COMMANDS:
        assert f"\n  {name} " in done.stdout
    titles = [line for line in done.stdout.splitlines() if line.endswith(":") and line[0] != " "]
    assert titles == [f"{title}:" for title in ("Options", *cli_main.GROUPS)]
    assert "`help exit-codes`" in done.stdout
    assert done.stdout.splitlines()[-1] == str(
        [
            "hpctrain",
            "hpctrain.cli",
            "hpctrain.cli.main",
            "hpctrain.core",
            "hpctrain.core.base",
            "hpctrain.core.terminal",
            "hpctrain.errors",
        ]
    )


def test_a_command_whose_module_is_missing_is_no_command(monkeypatch, capsys):
    monkeypatch.setitem(cli_main.COMMANDS, "later", ("hpctrain.cli.later", "Not there yet."))

    assert run_main("later") == 2
    assert "No such command 'later'" in capsys.readouterr().err


def test_a_command_that_lacks_a_library_says_so(monkeypatch, tmp_path):
    (tmp_path / "broken_command.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli_main.COMMANDS, "broken", ("broken_command", "Broken."))

    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        run_main("broken")


@pytest.mark.parametrize(
    "error",
    [
        errors.UsageError,
        errors.NotFound,
        errors.RunExists,
        errors.ClusterUnreachable,
        errors.RunLocked,
    ],
)
def test_an_error_of_the_users_is_one_line_and_its_exit_code(command, capsys, error):
    def fail():
        raise error("nodes is 0; it takes at least 1")

    command(fail)

    assert run_main("x") == error.exit_code
    assert capsys.readouterr().err == "hpctrain: error: nodes is 0; it takes at least 1\n"


def test_a_bug_shows_its_traceback(command):
    def fail():
        raise ZeroDivisionError

    command(fail)

    with pytest.raises(ZeroDivisionError):
        run_main("x")


def test_an_interrupt_ends_with_130(command, capsys):
    def fail():
        raise KeyboardInterrupt

    command(fail)

    assert run_main("x") == 130
    assert capsys.readouterr().err.strip() == ""


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (EOFError(), "it ended without a word"),
        (EOFError("the writer is gone"), "the writer is gone"),
    ],
)
def test_the_end_of_a_pipe_is_no_interrupt(command, capsys, error, why):
    def callback():
        raise error

    command(callback)

    assert run_main("x") == 1
    told = capsys.readouterr().err.strip()
    assert told == f"hpctrain: error: a process that this command works with is gone: {why}"


def test_an_exit_code_of_a_command_is_the_programs(command):
    command(lambda: 75)
    assert run_main("x") == 75

    command(lambda: None)
    assert run_main("x") == 0

    command(lambda: click.get_current_context().exit(93))
    assert run_main("x") == 93


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nope"], "No such command 'nope'. See `hpctrain --help`."),
        (["stack"], "No such command 'stack'. Did you mean 'stacks'? See `hpctrain --help`."),
        (
            ["train", "--name", "lm"],
            (
                "There is no `train` any more: `hpctrain submit --cluster local` trains the "
                "shipped recipe on this machine. See `hpctrain --help`."
            ),
        ),
        (
            ["sites", "test", "alps"],
            (
                "There is no `sites test` any more: `hpctrain check --site FILE` asks SLURM the "
                "same, beside its other checks. See `hpctrain sites --help`."
            ),
        ),
        (
            ["report", "lm", "--compare"],
            (
                "There is no `report --compare` any more: `hpctrain status A B` and `hpctrain "
                "tensorboard A B` show several runs. See `hpctrain report --help`."
            ),
        ),
        (["--nope"], "No such option '--nope'."),
        (["sites", "show"], "Missing argument 'NAME'. See `hpctrain sites show --help`."),
    ],
)
def test_wrong_usage_is_one_line_with_the_help_that_fits(capsys, argv, message):
    assert run_main(*argv) == 2

    err = capsys.readouterr().err
    assert err.startswith("hpctrain: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version_is_printed(capsys, flag):
    assert run_main(flag) == 0
    assert capsys.readouterr().out == f"hpctrain, version {__version__}\n"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *(("ls", "status"), ("list", "status"), ("ps", "status"), ("stop", "cancel")),
        *(("kill", "cancel"), ("delete", "rm"), ("log", "logs")),
    ],
)
def test_what_people_type_by_habit_is_the_command_that_is_meant(capsys, typed, meant):
    assert run_main(typed, "--help") == 0
    assert capsys.readouterr().out.startswith(f"Usage: hpctrain {typed} ")
    assert cli_main.ALIASES[typed] == meant


def test_no_habit_hides_a_command():
    assert not set(cli_main.ALIASES) & set(cli_main.COMMANDS)
    assert set(cli_main.ALIASES.values()) <= set(cli_main.COMMANDS)


def test_no_color_is_respected(command, capsys, monkeypatch):
    command(lambda: click.echo(click.get_current_context().color))
    monkeypatch.setenv("NO_COLOR", "1")

    run_main("x")

    assert capsys.readouterr().out == "False\n"


def test_command_names_complete_from_the_table():
    env = {
        **os.environ,
        "_HPCTRAIN_COMPLETE": "bash_complete",
        "COMP_WORDS": "hpctrain s",
        "COMP_CWORD": "1",
    }
    code = "import sys; from hpctrain.cli.main import main; sys.exit(main([]))"

    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )

    names = [line.partition(",")[2] for line in done.stdout.splitlines()]
    assert names == [name for name in cli_main.COMMANDS if name.startswith("s")]


def test_a_table_lines_its_columns_up(capsys):
    rows = [("lm-1", 7, None), ("a-long-name", 1234, "x")]

    echo_table(rows, header=("RUN", "STEP", "WHY"), right=(1,), indent=1)
    echo_table([])

    lines = [" RUN          STEP  WHY", " lm-1            7  -", " a-long-name  1234  x"]
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize("words", [["submit", "--cluster=local"], ["check"]])
def test_a_folder_that_is_gone_is_said_to_be(tmp_path, words):
    """Each command that looks around itself ended with "No such file or directory", of nothing."""
    gone = tmp_path / "gone"
    program = (
        "import os, sys; os.makedirs(sys.argv[1]); os.chdir(sys.argv[1]); os.rmdir(sys.argv[1])\n"
        "from hpctrain.cli.main import main; sys.exit(main(sys.argv[2:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, gone, *words], capture_output=True, text=True, check=False
    )

    assert "the folder in which you typed this is gone: go into another one" in done.stderr
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["submit", "resume", "check"])
def test_the_way_round_a_lock_is_told_by_the_lock_alone(capsys, name):
    assert run_main(name, "--help") == 0
    assert "--allow-locked" not in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--json"], ["-x", "--json"]])
def test_an_error_is_json_too_for_who_asked_for_json(capsys, words):
    code = run_main("status", "none", *words)
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["exit_code"] == code != 0
    assert err == f"hpctrain: error: {told['error']}\n"


def test_what_is_json_already_gets_no_second_value_and_others_get_none(command, capsys):
    def fails():
        click.echo("{}")
        raise errors.ChecksFailed("it fails")

    command(fails)
    assert run_main("x") == 3
    assert capsys.readouterr().out == "{}\n"
    assert run_main("x", "--json") == 2  # the command of the test has no such option
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2
    assert run_main("x", "--", "--json") == 2
    assert capsys.readouterr().out == ""


def test_json_that_was_printed_is_all_that_is_printed(monkeypatch, capsys):
    def fails(as_json):
        click.echo(json.dumps(as_json))
        raise errors.ChecksFailed("it fails")

    made = click.Command(
        "x", callback=fails, params=[click.Option(["--json", "as_json"], is_flag=True)]
    )
    monkeypatch.setattr(cli_main.LazyGroup, "get_command", lambda *_: made)
    assert run_main("x", "--json") == 3
    assert capsys.readouterr().out == "true\n"


def test_the_options_of_submit_are_in_groups_and_none_is_left_out(capsys):
    from hpctrain.cli.submit import command as submit

    assert run_main("submit", "--help") == 0
    out = capsys.readouterr().out
    titles = ["Job", "Program", "Restart", "Parallel", "Other runs", "Look", "Other"]
    assert [line[:-1] for line in out.splitlines() if line[:-1] in titles] == titles
    assert out.index("Job:") < out.index("  -N, --nodes ") < out.index("Program:")
    for option in submit.params:
        if isinstance(option, click.Option) and not option.hidden:
            assert f"{option.opts[0]}" in out
