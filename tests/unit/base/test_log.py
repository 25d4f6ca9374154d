"""What processes log stands in one form on stderr, once, and never over a user's configuration."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys

import pytest

from hpctrain.core.base import log

PLACE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d node7 rank 12 attempt 3 "
ENVIRONMENT = {"HPCTRAIN_NODE": "node7", "HPCTRAIN_ATTEMPT": '{"number": 3, "token": "x"}'}
HEAD = "import logging, os\nfrom hpctrain.core.base.log import configure, hear_elastic\n"
OWN = "logging.basicConfig(format='mine %(levelname)s %(message)s')\n"
SAY = """
log = logging.getLogger("hpctrain.runtime")
log.info("a save was skipped")
log.warning("step %d is slow", 5)
log.error("it is over")
"""


def said(*parts, **environ):
    """What a program prints on stderr."""
    code = HEAD + "".join(parts)
    env = os.environ | ENVIRONMENT | environ
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


CONFIGURE = "configure('rank 12')\n"


def test_each_line_says_when_and_where_and_is_found_by_our_name():
    skipped, slow, over = said(CONFIGURE, SAY)

    assert re.fullmatch(f"{PLACE}hpctrain: a save was skipped", skipped)
    assert re.fullmatch(f"{PLACE}hpctrain: step 5 is slow", slow)
    assert re.fullmatch(f"{PLACE}hpctrain: error: it is over", over)


def test_where_there_is_no_attempt_and_no_agent_the_hosts_name_stands():
    (line, *_) = said("configure('batch')\n", SAY, HPCTRAIN_ATTEMPT="", HPCTRAIN_NODE="")

    assert f" {os.uname().nodename} batch hpctrain: a save" in line


@pytest.mark.parametrize("order", [(OWN, CONFIGURE), (CONFIGURE, OWN), (CONFIGURE, OWN, CONFIGURE)])
def test_an_application_that_configures_logging_gets_our_records_once_in_its_own_form(order):
    """Before our start, after it, or in a rank whose agent has configured it already."""
    lines = said(*order, SAY)

    assert [line for line in lines if "slow" in line] == ["mine WARNING step 5 is slow"]
    assert lines[-1] == "mine ERROR it is over"
    assert all(line.startswith("mine ") for line in lines)


@pytest.mark.parametrize("order", [(OWN, CONFIGURE), (CONFIGURE, OWN, CONFIGURE)])
def test_beside_an_applications_handlers_there_is_none_of_ours_and_its_level_counts(order):
    assert said(
        *order, "assert logging.getLogger('hpctrain').handlers == []\n", SAY
    ) == ["mine WARNING step 5 is slow", "mine ERROR it is over"]  # fmt: skip


def test_a_handler_of_the_applications_on_our_own_logger_counts_as_well():
    own = "logging.getLogger('hpctrain').addHandler(logging.StreamHandler())\n"

    assert said(own, CONFIGURE, SAY) == ["step 5 is slow", "it is over"]
    assert said(CONFIGURE, own, SAY) == ["a save was skipped", "step 5 is slow", "it is over"]


def test_configured_twice_each_record_is_one_line_of_the_last():
    assert len(said("configure('agent')\n", CONFIGURE, SAY)) == 3
    assert " rank 12 " in said("configure('agent')\n", CONFIGURE, SAY)[0]


@pytest.mark.parametrize(("level", "lines"), [("debug", 3), ("WARNING", 2), ("ERROR", 1)])
def test_the_level_is_the_users(level, lines):
    assert len(said(CONFIGURE, SAY, HPCTRAIN_LOG_LEVEL=level)) == lines


def test_a_level_that_is_none_is_told_with_those_that_are():
    told, *lines = said(CONFIGURE, SAY, HPCTRAIN_LOG_LEVEL="LOUD")

    assert told.endswith(
        "hpctrain: HPCTRAIN_LOG_LEVEL=LOUD is no level, which are DEBUG, INFO, WARNING, ERROR, "
        "CRITICAL; INFO is taken"
    )
    assert len(lines) == 3


def test_a_commands_user_gets_the_text_alone_also_from_training_in_its_process(capsys):
    with log.for_user():
        log.configure("rank 0")
        logging.getLogger("hpctrain.run").info("x")

    assert capsys.readouterr().err == "hpctrain: x\n"


def test_torchs_elastic_agent_is_heard_from_warning_on_in_our_form_and_once():
    """torch gives "torch" a handler of its own; what is below it must not be told twice."""
    elastic = """
torch = logging.getLogger("torch")
torch.addHandler(logging.StreamHandler())
torch.propagate = False
hear_elastic()
log = logging.getLogger("torch.distributed.elastic.rendezvous")
log.info("not heard")
try:
    raise OSError("no\\nstore")
except OSError:
    log.exception("it hangs")
"""
    heard = said(CONFIGURE, elastic)

    assert re.fullmatch(
        f"{PLACE}torch.distributed.elastic.rendezvous: it hangs: OSError: no", heard[0]
    )
    assert heard[1:] == ["store"]
    # A rank begins with its agent's: its program's own configuration counts there.
    again = "torch.handlers, torch.propagate = [], True\nlog.warning('again')\n"
    assert said(CONFIGURE, elastic, CONFIGURE, OWN, CONFIGURE, again)[-1] == "mine WARNING again"


def test_a_log_that_cannot_be_written_ends_nothing():
    code = "import sys\nsys.stderr = open('/dev/full', 'w')\n"

    assert said(CONFIGURE, code, SAY, "sys.stderr = None\n") == []


def test_a_fork_waits_until_no_thread_is_in_the_middle_of_a_line():
    code = """
import io, signal, sys, threading
inside, may_go_on = threading.Event(), threading.Event()
class Pipe(io.RawIOBase):
    def writable(self):
        return True
    def write(self, line):  # the stream's lock is held here
        inside.set()
        may_go_on.wait()
        return os.write(2, line)
sys.stderr = io.TextIOWrapper(io.BufferedWriter(Pipe()))
log = logging.getLogger("hpctrain.runtime")
thread = threading.Thread(target=log.info, args=("first",))
thread.start()
inside.wait()
os.register_at_fork(before=may_go_on.set)  # runs before those that were registered earlier
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    log.info("second")
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
thread.join()
"""
    first, second = said(CONFIGURE, code)

    assert re.fullmatch(f"{PLACE}hpctrain: first", first)
    assert re.fullmatch(f"{PLACE}hpctrain: second", second)


def test_a_process_that_was_forked_while_another_thread_logs_can_log():
    code = """
import threading
log = logging.getLogger("hpctrain.runtime")
over = threading.Event()
def chatter():
    while not over.is_set():
        log.info("x")
thread = threading.Thread(target=chatter)
thread.start()
for _ in range(50):
    pid = os.fork()
    if pid == 0:
        log.info("child")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
over.set()
thread.join()
"""
    lines = said("import warnings\nwarnings.simplefilter('ignore')\n", CONFIGURE, code)
    assert sum("child" in line for line in lines) == 50


def test_threads_do_not_mix_their_lines():
    code = """
import threading
log = logging.getLogger("hpctrain.runtime")
def say(word):
    for _ in range(200):
        log.info(word * 200)
threads = [threading.Thread(target=say, args=(word,)) for word in "ab"]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    lines = said(CONFIGURE, code)
    assert len(lines) == 400
    assert all(re.search(r"hpctrain: (a{200}|b{200})$", line) for line in lines)
