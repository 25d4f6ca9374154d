from __future__ import annotations

import ast
import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hpctrain.core.testing import faults, points
from hpctrain.errors import UsageError
from tests.support.gates import Gate

TOP = Path(__file__).parents[3]
PACKAGE = TOP / "hpctrain"
BYTES = bytes(range(256)) * 4
HALF = len(BYTES) // 2
SAVE = """
import sys
from pathlib import Path
from hpctrain.core.testing import points

path, content = Path(sys.argv[1]), bytes(range(256)) * 4
for step in (1, 2, 3):
    shard = path.with_name(f"{path.name}-{step}")
    points.reach("shard.open", path=shard, step=step)
    with shard.open("xb", buffering=0) as file:
        for part in (content[:512], content[512:]):
            points.reach("shard.write", path=shard, step=step, bytes=len(part))
            file.write(part)
        points.reach("shard.flush", path=shard, fd=file.fileno(), step=step)
"""
"""Three steps of a rank: two writes and a flush each."""


def start(shard, armed, *, rank=0, attempt=1, code=SAVE):
    """A process that is armed by its environment."""
    env = os.environ | {
        "HPCTRAIN_FAULTS": armed,
        "HPCTRAIN_ATTEMPT": f'{{"number": {attempt}}}',
        "RANK": str(rank),
        "PYTHONPATH": str(TOP),
    }
    command = [sys.executable, "-c", code, str(shard)]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


def ended(process):
    """Its exit code and what it said."""
    _, said = process.communicate()
    return process.returncode, said


def sizes(shard):
    """Of the steps' files."""
    found = {path.name[-1]: path.stat().st_size for path in shard.parent.glob(f"{shard.name}-*")}
    return [found.get(step) for step in "123"]


@pytest.fixture
def shard(tmp_path):
    return tmp_path / "shard"


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path / "gate")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(BYTES)
    return path


def in_child(work):
    """Run `work` in a forked process that gets ten seconds; returns how it ended."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        code = 99
        try:
            work()
            code = 0
        finally:  # nothing of pytest may run on in the child
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# --- nothing armed ---------------------------------------------------------------------------


def test_without_the_variable_the_vocabulary_is_not_even_imported():
    code = (
        "import sys; from hpctrain.core.testing import points;"
        "points.reach('shard.write'); sys.exit('hpctrain.core.testing.faults' in sys.modules)"
    )
    env = {name: value for name, value in os.environ.items() if name != "HPCTRAIN_FAULTS"}

    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env | {"PYTHONPATH": str(TOP)}, check=False)

    assert done.returncode == 0


def test_a_point_that_no_fault_names_is_passed(file):
    with faults.armed("kill:shard.flush; fail:shard.open"):
        points.reach("shard.write", path=file)

    assert file.read_bytes() == BYTES


def test_all_is_as_before_when_the_block_ends():
    with faults.armed("fail:shard.open,error=EIO"):
        with faults.armed("fail:shard.open,error=EDQUOT"), pytest.raises(OSError) as inner:  # noqa: PT011
            points.reach("shard.open")
        with pytest.raises(OSError) as outer:  # noqa: PT011 - the errno is asked below
            points.reach("shard.open")
    points.reach("shard.open")

    assert (inner.value.errno, outer.value.errno) == (errno.EDQUOT, errno.EIO)
    assert "HPCTRAIN_FAULTS" not in os.environ


# --- the actions -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["EIO", "ENOSPC", "EDQUOT", "ESTALE", "EROFS"])
def test_fail_raises_the_error_that_is_named_for_the_file(file, name):
    with faults.armed(f"fail:shard.open,error={name}"), pytest.raises(OSError) as caught:  # noqa: PT011
        points.reach("shard.open", path=file)

    assert caught.value.errno == getattr(errno, name)
    assert caught.value.filename == str(file)
    assert os.strerror(caught.value.errno) in str(caught.value)


def test_fail_is_an_io_error_and_comes_every_time():
    with faults.armed("fail:shard.open"):
        for _ in range(3):
            with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno is asked below
                points.reach("shard.open")
            assert caught.value.errno == errno.EIO


def test_a_disk_takes_the_bytes_that_fit_and_stays_full(shard):
    process = start(shard, f"fail:shard.write,error=ENOSPC,after={len(BYTES) + HALF}")

    code, said = ended(process)

    assert (code, sizes(shard)) == (1, [len(BYTES), HALF, None])
    assert f"[Errno {errno.ENOSPC}]" in said.splitlines()[-1]
    with faults.armed("fail:shard.write,error=ENOSPC,after=100"):
        points.reach("shard.write", bytes=60)
        for size in (50, 1):  # the second would fit, had the first left its room
            with pytest.raises(OSError, match="No space left"):
                points.reach("shard.write", bytes=size)


def test_bytes_that_nobody_counts_are_refused():
    with faults.armed("fail:shard.open,after=1"), pytest.raises(UsageError, match="how many"):
        points.reach("shard.open")


def test_delay_takes_its_time_at_each_hit():
    with faults.armed("delay:publish.rename,seconds=0.05"):
        before = time.monotonic()
        points.reach("publish.rename")
        points.reach("publish.rename")

    assert time.monotonic() - before >= 0.1


def test_hold_stops_the_thread_that_comes_until_the_file_is_there(gate, caplog):
    passed = []
    armed = f"hold:shard.open,{gate.until}"
    with faults.armed(armed), gate:
        threads = [
            threading.Thread(target=lambda n=n: (points.reach("shard.open"), passed.append(n)))
            for n in range(2)
        ]
        for thread in threads:
            thread.start()
        assert gate.wait(arrivals=2) == [(0, os.getpid())] * 2
        points.reach("shard.done")  # this thread goes on, and so does every other point
        assert passed == []
        gate.open()
        for thread in threads:
            thread.join()
        points.reach("shard.open")

    assert sorted(passed) == [0, 1]
    assert gate.arrivals() == [(0, os.getpid())] * 2  # who comes to an open gate is not held
    assert caplog.messages == [f"fault: {armed} (rank 0)"] * 2


def test_a_held_process_is_killed_at_its_point(shard, gate):
    with gate:
        process = start(shard, f"hold:shard.write,step=2,hit=2,{gate.until}", rank=3)
        [(rank, pid)] = gate.wait()
        held = sizes(shard)
        process.kill()
        code, said = ended(process)

    assert (rank, pid) == (3, process.pid)
    assert (code, held, sizes(shard)) == (-signal.SIGKILL, [len(BYTES), HALF, None], held)
    assert "fault: hold:shard.write" in said


def test_a_held_process_runs_its_signal_handlers_and_goes_on(shard, gate):
    code = (
        "import signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('told', file=sys.stderr, flush=True))\n"
    )
    with gate:
        process = start(
            shard, f"hold:shard.flush,step=1,{gate.until}", code="import sys\n" + code + SAVE
        )
        gate.wait()
        process.terminate()
        lines = [process.stderr.readline() for _ in range(2)]
        gate.open()
        left, _ = ended(process)

    assert lines[1] == "told\n"
    assert (left, sizes(shard)) == (0, [len(BYTES)] * 3)


def test_hold_with_once_holds_the_first_alone(tmp_path, gate):
    with gate, faults.armed(f"hold:shard.open,{gate.until},once={tmp_path / 'held'}"):
        thread = threading.Thread(target=points.reach, args=("shard.open",))
        thread.start()
        gate.wait()
        points.reach("shard.open")
        assert thread.is_alive()
        gate.open()
        thread.join()


@pytest.mark.parametrize(("keep", "left"), [("0", 0), ("0.25", 256), ("", HALF), (".999", 1022)])
def test_tear_cuts_the_file_and_kills_its_writer(shard, keep, left):
    armed = f"tear:shard.flush,step=2,keep={keep}" if keep else "tear:shard.flush,step=2"

    code, said = ended(start(shard, armed))

    assert code == -signal.SIGKILL
    assert sizes(shard) == [len(BYTES), left, None]
    assert (shard.parent / "shard-2").read_bytes() == BYTES[:left]
    assert said == f"fault: {armed} (rank 0, step 2)\n"


@pytest.mark.parametrize("bit", [0, 7, 12, 8 * len(BYTES) - 1])
def test_flip_turns_that_bit_alone_and_goes_on(file, bit):
    with faults.armed(f"flip:shard.flush,bit={bit}"):
        points.reach("shard.flush", path=file)
        points.reach("shard.flush", path=file)  # a second turn would undo the first

    differ = int.from_bytes(BYTES, "little") ^ int.from_bytes(file.read_bytes(), "little")
    assert differ == 1 << bit


def test_flip_goes_round_at_the_end_of_the_file(file):
    with faults.armed(f"flip:shard.flush,bit={8 * len(BYTES) + 3}"):
        points.reach("shard.flush", path=file)

    assert file.read_bytes() == bytes([BYTES[0] ^ 8]) + BYTES[1:]


def test_flip_reaches_a_file_that_is_known_by_its_descriptor_only(file):
    with file.open("ab") as opened, faults.armed("flip:shard.flush,bit=9"):
        points.reach("shard.flush", fd=opened.fileno())

    assert file.read_bytes() == bytes([BYTES[0], BYTES[1] ^ 2]) + BYTES[2:]


@pytest.mark.parametrize("action", ["tear", "flip"])
def test_a_file_that_is_not_there_is_refused_instead_of_passed(tmp_path, action):
    empty = tmp_path / "empty"
    empty.touch()

    for path in (tmp_path, tmp_path / "absent", empty, None):
        with faults.armed(f"{action}:stage.made"), pytest.raises(UsageError, match="no file"):
            points.reach("stage.made", path=path)


def test_kill_is_sigkill_at_the_time_that_is_named(shard):
    code, _ = ended(start(shard, "kill:shard.write,hit=4"))

    assert (code, sizes(shard)) == (-signal.SIGKILL, [len(BYTES), HALF, None])


def test_exit_leaves_at_once_also_from_a_thread():
    def work():
        thread = threading.Thread(target=points.reach, args=("shard.open",))
        thread.start()
        thread.join()

    with faults.armed("exit:shard.open,code=7"):
        assert in_child(work) == 7
    with faults.armed("exit:shard.open"):
        assert in_child(work) == 1


def test_stop_halts_until_sigcont(shard):
    process = start(shard, "stop:shard.flush,step=2")

    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), status
    assert sizes(shard) == [len(BYTES), len(BYTES), None]
    os.kill(process.pid, signal.SIGCONT)

    assert ended(process)[0] == 0
    assert sizes(shard) == [len(BYTES)] * 3


# --- to whom, and when -----------------------------------------------------------------------


def test_only_the_rank_that_is_named_is_hit(tmp_path):
    armed = "kill:shard.flush,rank=1"
    processes = [start(tmp_path / f"shard{rank}", armed, rank=rank) for rank in range(3)]

    assert [ended(process)[0] for process in processes] == [0, -signal.SIGKILL, 0]


def test_a_rank_that_is_passed_counts_more_than_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "0")

    with faults.armed("fail:shard.open,rank=1"):
        points.reach("shard.open")
        with pytest.raises(OSError, match="error"):
            points.reach("shard.open", rank=1)
        monkeypatch.setenv("RANK", "1")  # after arming: ranks get theirs after the fork
        points.reach("shard.open", rank=0)
        with pytest.raises(OSError, match="error"):
            points.reach("shard.open")


def test_without_an_environment_this_is_rank_0(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)

    with faults.armed("fail:shard.open,rank=0"), pytest.raises(OSError, match="error"):
        points.reach("shard.open")


def test_only_the_attempt_that_is_named_is_hit(shard, tmp_path):
    armed = "exit:shard.open,attempt=2,code=5"

    codes = [ended(start(tmp_path / f"shard{n}", armed, attempt=n))[0] for n in (1, 2, 3)]

    assert codes == [0, 5, 0]


def test_an_attempt_that_is_passed_counts_more_than_the_environment(monkeypatch):
    monkeypatch.setenv("HPCTRAIN_ATTEMPT", '{"number": 1}')

    with faults.armed("fail:shard.open,attempt=2;fail:shard.flush,attempt=1"):
        points.reach("shard.open")
        with pytest.raises(OSError, match="error"):
            points.reach("shard.open", attempt=2)
        points.reach("shard.flush", attempt=2)
        monkeypatch.delenv("HPCTRAIN_ATTEMPT")
        points.reach("shard.flush")


def test_only_the_step_that_is_named_is_hit_and_hits_are_counted_in_it(shard):
    code, _ = ended(start(shard, "kill:shard.write,step=2,hit=2"))

    assert (code, sizes(shard)) == (-signal.SIGKILL, [len(BYTES), HALF, None])


def test_once_fires_once_over_processes_and_restarts(tmp_path):
    armed = f"exit:shard.open,code=5,once={tmp_path / 'fired'}"

    together = [start(tmp_path / f"a{n}", armed, rank=n) for n in range(4)]
    codes = [ended(process)[0] for process in together]
    again = ended(start(tmp_path / "b", armed))

    assert sorted(codes) == [0, 0, 0, 5]
    assert again == (0, "")


def test_every_fault_of_the_list_fires_in_its_order(file):
    with (
        faults.armed("flip:shard.flush,bit=0; ;fail:shard.flush,error=EDQUOT;kill:shard.flush"),
        pytest.raises(OSError, match="quota"),
    ):
        points.reach("shard.flush", path=file)

    assert file.read_bytes() == bytes([BYTES[0] ^ 1]) + BYTES[1:]


def test_a_forked_process_counts_for_itself():
    def once():
        points.reach("shard.open")

    def twice():
        once()
        once()

    with faults.armed("kill:shard.open,hit=2"):
        once()
        assert in_child(once) == 0
        assert in_child(twice) == -signal.SIGKILL


def test_a_process_forked_while_a_thread_counts_does_not_hang():
    with faults.armed("delay:shard.open,seconds=0"), points.handler._lock:
        assert in_child(lambda: points.reach("shard.open")) == 0


def test_threads_are_counted_one_by_one(monkeypatch):
    fired, held = [], set()
    is_meant = faults._is_meant

    def watched(fault, reached):
        held.add(points.handler._lock.locked())
        return is_meant(fault, reached)

    def work():
        for _ in range(500):
            try:
                points.reach("shard.write", bytes=1)
            except OSError as error:
                fired.append(error)

    monkeypatch.setattr(faults, "_is_meant", watched)
    with faults.armed("fail:shard.write,after=1900"):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert (len(fired), held) == (100, {True})


def test_what_is_started_meanwhile_is_armed_too(shard):
    with faults.armed("exit:shard.open,code=5"):
        process = start(shard, os.environ["HPCTRAIN_FAULTS"])

    assert ended(process)[0] == 5


# --- what is misspelt ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("failx:shard.write", "'failx' is no action; did you mean fail?"),
        ("xyz:shard.write", "'xyz' is no action; there are fail, delay,"),
        ("fail:shard.wrote", "'shard.wrote' is no point; did you mean shard.write?"),
        ("fail", "'' is no point; there are step.begin,"),
        ("kill:shard.write,rnak=1", "'rnak' is no key of kill; did you mean rank?"),
        ("kill:shard.write,keep=0.5", "'keep' is no key of kill; there are rank, step,"),
        ("tear:shard.write,after=5", "'after' is no key of tear;"),
        ("kill:shard.write,rank=one", "rank=one is not a whole number from 0"),
        ("kill:shard.write,rank=-1", "rank=-1 is not a whole number from 0"),
        ("kill:shard.write,rank", "rank= is not a whole number from 0"),
        ("kill:shard.write,hit=0", "hit=0 is not a whole number from 1"),
        ("kill:shard.write,rank=0,rank=1", "rank= is given twice"),
        ("tear:shard.flush,keep=1", "keep=1 is not a fraction from 0 to below 1"),
        ("tear:shard.flush,keep=1.5", "keep=1.5 is not a fraction from 0 to below 1"),
        ("delay:shard.flush,seconds=nan", "seconds=nan is not a number of seconds"),
        ("delay:shard.flush,seconds=", "seconds= is not a number of seconds"),
        ("hold:shard.write", "hold:shard.write: hold needs until="),
        ("hold:shard.write,until=/no/such/f", "is not a file in a folder that is there"),
        ("delay:shard.write,until=f", "'until' is no key of delay;"),
        ("fail:shard.write,error=EFULL", "error=EFULL is not the name of an error"),
        ("fail:shard.write,error=__name__", "error=__name__ is not the name of an error"),
        ("fail:shard.write,error=errorcode", "error=errorcode is not the name of an error"),
        ("fail:shard.write,hit=2,after=5", "hit= and after= both say when"),
        ("kill:shard.write,once=/no/such/folder/f", "is not a file in a folder that is there"),
        ("kill:shard.write,once=/", "is not a file in a folder that is there"),
        ("kill:shard.write,once=", "is not a file in a folder that is there"),
        ("kill:shard.done;fail:shard.opn", "faults: fail:shard.opn: 'shard.opn' is no point"),
    ],
)
def test_what_is_misspelt_is_refused_with_the_nearest_known(text, said):
    before = points.handler

    with pytest.raises(UsageError) as caught, faults.armed(text):
        points.reach("stage.made")

    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert points.handler is before


def test_a_process_with_a_misspelt_fault_does_not_start(shard):
    code, said = ended(start(shard, "kill:shard.flsh"))

    assert code == 1
    assert said.splitlines()[-1] == (
        "hpctrain.errors.UsageError: HPCTRAIN_FAULTS: kill:shard.flsh: "
        "'shard.flsh' is no point; did you mean shard.flush?"
    )
    assert sizes(shard) == [None] * 3


@pytest.mark.parametrize("first", ["hpctrain.core.testing.faults", "hpctrain.core.testing.points"])
def test_the_environment_arms_whatever_is_imported_first(shard, first):
    code = f"import {first}; from hpctrain.core.testing import points; points.reach('shard.open')"

    assert ended(start(shard, "exit:shard.open,code=5", code=code))[0] == 5


# --- the table, the code and the page --------------------------------------------------------


def _calls():
    """Every `points.reach(...)` of the product: where, and its first argument."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name == "testing":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="points"), attr="reach")):
                    first = node.args[0] if node.args else None
                    name = first.value if isinstance(first, ast.Constant) else None
                    yield f"{path.relative_to(TOP)}:{node.lineno}", name


def test_every_point_that_is_called_is_in_the_table():
    calls = dict(_calls())

    assert calls
    assert not {where: name for where, name in calls.items() if name not in points.POINTS}


def test_every_point_of_the_table_is_called():
    assert set(points.POINTS) - {name for _, name in _calls()} == set()


def test_the_page_has_the_actions_and_points_of_the_code():
    page = (TOP / "docs" / "development" / "testing-faults.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|(?: ([^|]*) \|)?", page, re.MULTILINE)
    meanings = {name: meaning for name, meaning, _ in rows}
    keys = {name: re.findall(r"`(\w+)=`", words) for name, _, words in rows if words}

    actions = {name: action.meaning for name, action in faults.ACTIONS.items()}
    assert meanings == actions | points.POINTS
    assert keys == {name: list(one.keys) for name, one in faults.ACTIONS.items() if one.keys}
    assert re.findall(r"^\| `(\w+)=` ", page, re.MULTILINE) == list(faults.COMMON)


def test_every_example_of_the_page_can_be_armed(monkeypatch, tmp_path):
    page = (TOP / "docs" / "development" / "testing-faults.md").read_text()
    examples = re.findall(r"HPCTRAIN_FAULTS='([^']*)'|armed\(\"([^\"]*)\"\)", page)
    (tmp_path / "me").mkdir()

    assert len(examples) > 4
    for shell, python in examples:
        assert faults.parse((shell or python).replace("/scratch", str(tmp_path)))
