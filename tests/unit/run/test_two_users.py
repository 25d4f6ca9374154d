"""The users of tests/support/users.py are what they say: other tests stand on it."""

from __future__ import annotations

import os
import sys

import pytest

from tests.support.users import COLLEAGUE, OWNER, STRANGER, run_as, start_as

pytestmark = pytest.mark.two_users


@pytest.mark.parametrize("user", [OWNER, STRANGER, COLLEAGUE])
def test_a_user_runs_this_python_and_this_checkout_without_roots_rights(user):
    code = "import os, hpctrain; print(os.getresuid(), os.getresgid(), os.getgroups())"

    done = run_as(user, [sys.executable, "-c", code])

    assert done.stdout.split("\n")[0] == f"{(user.uid,) * 3} {(user.gid,) * 3} []"


def test_another_user_reads_what_is_open_and_writes_nothing(common_path):
    mine = common_path / "mine"
    mine.mkdir()
    os.chown(mine, OWNER.uid, OWNER.gid)
    run_as(
        OWNER, ["sh", "-c", "umask 027; echo all >open; chmod 644 open; echo us >ours"], cwd=mine
    )

    assert run_as(STRANGER, ["cat", "open"], cwd=mine).stdout == "all\n"
    assert run_as(STRANGER, ["cat", "ours"], cwd=mine, check=False).returncode != 0
    assert run_as(COLLEAGUE, ["cat", "ours"], cwd=mine).stdout == "us\n"
    assert run_as(STRANGER, ["touch", "theirs"], cwd=mine, check=False).returncode != 0


def test_a_started_command_is_the_process_itself(common_path):
    """No shell or helper stands between: ending it ends the command."""
    with start_as(STRANGER, ["sh", "-c", "echo $$; exec sleep 60"], cwd=common_path) as sleeper:
        assert int(sleeper.stdout.readline()) == sleeper.pid
        sleeper.kill()
