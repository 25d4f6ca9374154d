"""However a batch script ends, somebody records why: a failed setup, an exit in it, a lost PATH."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support import patience
from tests.unit.scheduler.test_slurm_script import NOTE, Script

FAILING = ["module load cuda/12", "source /no/such/env.sh", "false", "VALUE=$(cat /no/such/file)"]


def after(script):
    """The words with which the script's last act was called; it must be one call."""
    calls = [line for line in script.calls.read_text().splitlines() if " after " in line]
    assert len(calls) == 1, calls
    return calls[0]


@pytest.fixture
def ran(tmp_path):
    """Run a script with these lines of setup, and return it with its exit code."""

    def run(*setup, srun=NOTE, **env):
        script = Script(tmp_path, srun, setup=list(setup))
        script.code = script.start(**env).wait()
        script.began = (tmp_path / "args").exists()
        return script

    return run


@pytest.mark.parametrize("line", FAILING)
def test_a_line_of_setup_that_fails_ends_the_start_and_is_named(ran, line):
    script = ran("export FIRST=1", line, "echo went on")

    assert not script.began
    assert "went on" not in script.out
    why = f"a line of slurm.setup ended with exit code [0-9]+: {re.escape(line)}"
    assert re.search(f"hpctrain: error: {why}", script.err)
    assert re.search(f"--rc 3 --term 0 --why {why}$", after(script))


@pytest.mark.parametrize(
    "line",
    [
        "false || true",
        "if false; then echo no; fi",
        "[ -d /no/such ] && cd /no/such; true",
        "[ -d /no/such ] && cd /no/such",
        "! true; true",
        "(false) || true",
        "VALUE=$(false; echo fine)",
        "inner() { false; return 0; }; inner",
        "set -E",
        "while false; do :; done",
        "unset -f nothing; echo $UNKNOWN",
    ],
)
def test_lines_that_do_not_fail_in_bashs_own_sense_go_on(ran, line):
    script = ran(line)

    assert script.began, script.err
    assert "--why" not in after(script)


def test_a_command_that_fails_inside_of_a_sourced_file_is_that_files_own_affair(ran, tmp_path):
    (tmp_path / "env.sh").write_text("false\nexport FROM_FILE=1\n")

    script = ran(f"source {tmp_path}/env.sh", 'echo "has $FROM_FILE"')

    assert script.began
    assert "has 1" in script.out


def test_setup_over_several_lines_is_checked_and_named_by_its_line(ran):
    script = ran("if true; then", "  module load cuda", "fi")

    assert not script.began
    assert "exit code 127: module load cuda" in after(script)


def test_with_setup_may_fail_it_is_said_and_the_run_starts(tmp_path):
    script = Script(tmp_path, NOTE, setup=["module load cuda", "echo on"], setup_may_fail=True)

    assert script.start().wait() == 0

    assert (tmp_path / "args").exists()
    assert "a line of slurm.setup ended with exit code 127: module load cuda" in script.err
    assert "on\n" in script.out


@pytest.mark.parametrize("code", [0, 1, 93])
def test_a_sourced_file_that_exits_is_recorded(ran, tmp_path, code):
    (tmp_path / "env.sh").write_text(f"exit {code}\n")

    script = ran(f"source {tmp_path}/env.sh")

    assert not script.began
    why = f"its setup ended the batch script, by exit {code}"
    assert after(script).endswith(f"--rc {code} --term 0 --why {why}")
    assert why in script.err


def test_errexit_in_setup_does_not_hide_which_line_failed(ran):
    script = ran("set -eu", "module load cuda")

    assert "exit code 127: module load cuda" in after(script)


def test_a_variable_that_is_unset_under_nounset_is_recorded(ran):
    script = ran("set -u", "echo $NOBODY_HAS_SET_THIS")

    assert not script.began
    assert "its setup ended the batch script, by exit" in after(script)


def test_setup_that_takes_commands_off_path_gets_them_back_at_its_end(tmp_path):
    script = Script(tmp_path, f'echo "$PATH" > path; {NOTE}', setup=["export PATH=/opt/mine/bin"])
    script.command("scontrol", "exit 0")

    assert script.start().wait() == 0

    path = (tmp_path / "path").read_text()
    assert path.startswith(f"/opt/mine/bin:{tmp_path}/bin:")
    assert "setup has taken commands off PATH" in script.err


def test_setup_that_takes_only_slurms_commands_off_path_gets_them_back(tmp_path):
    """As `module purge` does: the others are in another folder."""
    others = tmp_path / "others"
    others.mkdir()
    for name in ("mkdir", "rm", "sed"):
        (others / name).symlink_to(shutil.which(name))
    script = Script(tmp_path, f'echo "$PATH" > path; {NOTE}', setup=[f"export PATH={others}"])

    assert script.start().wait() == 0

    assert (tmp_path / "path").read_text().startswith(f"{others}:{tmp_path}/bin:")
    assert "setup has taken commands off PATH (srun)" in script.err


def test_a_line_that_fails_after_path_is_lost_is_named_and_slurm_can_be_asked(tmp_path):
    script = Script(tmp_path, NOTE, setup=["export PATH=/nowhere", "false"])
    script.command("python", 'printf "%s\\n" "$* PATH=$PATH" >> "$CALLS"')

    script.start().wait()

    assert "--why a line of slurm.setup ended with exit code 1: false PATH=" in after(script)
    assert f":{tmp_path}/bin:" in after(script).partition("PATH=")[2]


def test_traps_of_setup_stay_and_a_failed_line_is_recorded_all_the_same(ran):
    script = ran("trap 'echo cleaned' EXIT", "module load cuda")

    assert "exit code 127: module load cuda" in after(script)


def test_lines_of_a_hand_written_setup_are_checked_alike(tmp_path):
    script = Script(tmp_path, NOTE)
    text = script.path.read_text()
    setup = "hpctrain_setup() {\n  module load cuda\n  echo went on\n}\n"
    script.path.write_text(text.replace("hpctrain_srun_args=", setup + "hpctrain_srun_args=", 1))

    script.start().wait()

    assert not (tmp_path / "args").exists()
    assert "a line of hpctrain_setup ended with exit code 127: module load cuda" in after(script)


def top_level(text):
    """Numbers of the lines before which another command can stand at the script's top level."""
    lines = text.splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("trap hpctrain_at_exit EXIT"))
    for number in range(begin + 1, len(lines) + 1):
        head = "\n".join([*lines[:number], "exit 7"])
        rest = subprocess.run(
            ["bash", "-n"], input=head, capture_output=True, text=True, check=False
        )
        if rest.returncode == 0:
            yield number


WAYS = {
    "exit": ("exit 7", {7, 0}),
    "kill": ("kill -TERM $$", {143, 0}),
    "other signals": ("kill -USR1 $$; kill -USR2 $$; kill -HUP $$", {0}),
    "no PATH": ("unset PATH", {127, 0}),
    "closed output": ("exec >&- 2>&-", {0}),
    "full disk": ("exec >/dev/full 2>&1", {0}),
}
"""What is done at a line of the script, and the exit codes that its last act may hear of."""


@pytest.mark.parametrize("way", WAYS)
def test_whatever_ends_the_script_at_any_of_its_lines_it_has_one_last_act(tmp_path, way):
    """Its own commands may fail in ways that nobody has thought of."""
    whole = Script(tmp_path, NOTE, setup=["export FROM_SETUP=1"])
    text = whole.path.read_text()
    numbers = list(top_level(text))
    assert len(numbers) > 25
    act, codes = WAYS[way]

    heard = set()
    for number in numbers:
        lines = text.splitlines()
        whole.path.write_text("\n".join([*lines[:number], act, *lines[number:], ""]))
        whole.calls.unlink(missing_ok=True)
        whole.start().wait()

        (code,) = re.findall(r" after .*--rc (\d+) --term [01]", after(whole))
        heard.add(int(code))
    assert heard == codes


@pytest.mark.parametrize("closes", ["exec >&-", "exec 2>&-", "exec >/dev/full 2>&1", "cd /"])
def test_setup_that_closes_or_fills_the_scripts_output_changes_nothing(ran, closes):
    script = ran(closes)

    assert "--rc 0" in after(script)


@pytest.mark.parametrize(
    "line", ["trap - EXIT TERM", "trap EXIT", "trap 'echo cleaned' EXIT", "trap 'exit 9' 0 SIGTERM"]
)
def test_traps_of_setup_take_nothing_from_the_scripts_own(ran, line):
    """As tools do that clean up behind themselves."""
    script = ran(line, "exit 4")

    assert after(script).endswith(
        "--rc 4 --term 0 --why its setup ended the batch script, by exit 4"
    )
    assert ("cleaned" in script.out) == ("cleaned" in line)


@pytest.mark.parametrize(
    "line", ["trap - TERM", "trap TERM", "trap '' TERM", "trap 'echo mine; exit 9' TERM"]
)
def test_a_trap_of_setup_for_term_does_not_end_the_script(tmp_path, line):
    srun = "touch started; while [ ! -e go ]; do sleep 0.02; done; exit 7"
    script = Script(tmp_path, srun, setup=[line]).start()
    script.wait_for("started")
    script.process.send_signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    script.wait()

    assert after(script).endswith("--rc 7 --term 1")
    assert ("mine" in script.out) == ("mine" in line)


@pytest.mark.strace
def test_a_term_in_the_moment_of_sruns_end_does_not_take_its_exit_code(tmp_path):
    """strace holds the script between the kernel's word of a child's end and bash's note of it."""
    script = Script(tmp_path, "touch started; while [ ! -e go ]; do sleep 0.02; done; exit 7")
    script.start().wait_for("started")
    pid = str(script.process.pid)
    holds = ["strace", "-q", "-o", "/dev/null", "-e", "inject=wait4:delay_exit=500000", "-p", pid]
    with subprocess.Popen(holds) as strace:
        at = Path("/proc", pid)
        try:
            patience.until(lambda: "TracerPid:\t0" not in (at / "status").read_text(), "strace")
            (tmp_path / "go").touch()
            patience.until(lambda: not (at / "task" / pid / "children").read_text(), "srun's end")
            script.process.send_signal(signal.SIGTERM)
            script.wait()
        finally:
            strace.kill()

    assert after(script).endswith("--rc 7 --term 1")


def test_traps_in_a_subshell_of_setup_are_its_own(ran):
    script = ran("(trap 'echo left' EXIT; trap -p EXIT)", "trap 'echo usr1' USR1", "trap -p USR1")

    assert "left\n" in script.out
    assert "echo usr1" in script.out  # not HUP: a shell below nohup cannot trap it
    assert "--rc 0" in after(script)


def test_a_setup_that_returns_with_a_failure_ends_the_start(ran):
    script = ran("[ -e /no/such/file ] || return 3", "export FIRST=1")

    assert not script.began
    assert after(script).endswith("--rc 3 --term 0 --why slurm.setup returned 3 before its end")


def test_one_that_returns_with_success_has_had_enough(ran):
    assert ran("return 0", "false").began


def test_variables_of_hpctrain_cannot_be_lost_in_setup(ran):
    """As by a loop over all names that begin with HPC, or a module that unloads them."""
    script = ran("unset ${!HPC*}")

    assert not script.began
    assert "exit code 1: unset ${!HPC*}" in after(script)


@pytest.mark.parametrize("posix", [{"POSIXLY_CORRECT": "1"}, {}])
def test_bash_in_posix_mode_reports_the_exit_code_of_srun(ran, posix):
    """There a second `wait` for a process that has ended is an error."""
    script = ran(*([] if posix else ["set -o posix"]), srun=f"{NOTE}exit 5", **posix)

    assert after(script).endswith("--rc 5 --term 0")
