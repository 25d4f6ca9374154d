"""Every command that a screen or a message recommends is typed in, there and then, and works."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.local_runs import await_end, events, hpctrain
from tests.support.patience import until

if TYPE_CHECKING:
    from pathlib import Path

PROGRAMS = {
    "wrong": "#!/bin/sh\nexit 3\n",
    "done": "#!/bin/sh\necho hi\n",
    "killed": "#!/bin/sh\nkill -9 $$\n",
    "cancelled": "#!/bin/sh\necho begun\nexec sleep 1000\n",
}
STANDS_FOR = {"PROGRAM ARGS": "./done.sh"}
"""What a user puts in the place of a word in capitals."""
LISTED = re.compile(r"^ {2}(hpctrain .+)$", re.MULTILINE)
INLINE = re.compile(r"`(hpctrain [^`]+)`|: (hpctrain [a-z]+ [^;,]+)$", re.MULTILINE)


def recommended(text: str) -> list[str]:
    """The commands that a text names for the reader to type."""
    inline = [one or other for one, other in INLINE.findall(text)]
    found = dict.fromkeys(line.strip() for line in [*LISTED.findall(text), *inline])
    return [" ".join(line.split("   ")[0].split()) for line in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Runs that have ended in four ways."""
    place = tmp_path_factory.mktemp("advice")
    for name, text in PROGRAMS.items():
        (place / f"{name}.sh").write_text(text)
        (place / f"{name}.sh").chmod(0o755)
        hpctrain(place, "submit", "--cluster", "local", "--name", name, "--", f"./{name}.sh")
    for name in ("wrong", "done"):
        await_end(place / "runs" / name)
    until(lambda: events(place / "runs" / "killed", "run_stopped"), lambda: "killed")
    until(lambda: events(place / "runs" / "cancelled", "attempt_started"), lambda: "cancelled")
    hpctrain(place, "cancel", "cancelled")
    await_end(place / "runs" / "cancelled")
    return place


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_recommended_works_where_it_is_recommended(folder, name):
    screens = [hpctrain(folder, command, name) for command in ("status", "doctor")]
    screens.append(hpctrain(folder, "resume", name, "--dry-run", or_says=f"{name} is done"))

    commands = dict.fromkeys(line for screen in screens for line in recommended(screen))
    assert len(commands) >= (1 if name == "done" else 3)
    starts = f"hpctrain resume {name}"  # last: it changes what the others are said of
    for command in [*(line for line in commands if line != starts), *({starts} & {*commands})]:
        hpctrain(folder, *shlex.split(command)[1:])
    if starts in commands:
        hpctrain(folder, "cancel", name)


def test_the_answer_to_a_resume_of_a_done_run_works(folder):
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", "resume", "done"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    (command,) = recommended(done.stderr)
    for words, typed in STANDS_FOR.items():
        command = command.replace(words, typed)

    hpctrain(folder, *shlex.split(command)[1:])

    assert await_end(folder / "runs" / "done", attempts=2)["reason"] == "completed"
