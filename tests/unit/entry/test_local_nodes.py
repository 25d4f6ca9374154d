"""A local job's nodes are forked where a fork is what a process of its own would be."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from hpctrain.core.base.env import HPCTRAIN_LOCAL_CONTEXT
from hpctrain.core.base.records import JobContext
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.entry import local_nodes
from hpctrain.ledger.run.layout import RunDir

CONTEXT = JobContext("local-1", 0, 0, ["local0", "local1"], "127.0.0.1", 20000, "tok")
LATE = (
    *("OMP_NUM_THREADS", "KMP_AFFINITY", "MKL_DYNAMIC", "CUDA_VISIBLE_DEVICES", "PYTHONPATH"),
    *("TORCH_SHOW_CPP_STACKTRACES", "LD_LIBRARY_PATH", "HPCTRAIN_FAULTS", "WHATEVER"),
)


@pytest.fixture(autouse=True)
def job(monkeypatch):
    """The controller's environment, put back afterwards."""
    for name in list(os.environ):
        if name in LATE or name.startswith(("HPCTRAIN_", "OMP_", "TORCH")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MKL_NUM_THREADS", "2")
    before = dict(os.environ)
    yield monkeypatch
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def run(tmp_path):
    root = tmp_path / "run"
    root.mkdir()
    return RunDir(root)


class Cluster:
    """A starter whose nodes and imports are written down, not done."""

    def __init__(self, run, patch):
        self.begun, self.imported, self.at_import = [], [], lambda: None
        patch.setattr("hpctrain.node.agent.preload.preload", self._preload)
        patch.setattr(local_nodes, "ForkedNode", lambda *_: self.begun.append("forked"))
        patch.setattr(subprocess, "Popen", lambda *given, **how: self.begun.append((given, how)))
        self.in_the_way = ""
        patch.setattr(local_nodes, "_in_the_way", lambda: self.in_the_way)
        self.starter = local_nodes.NodeStarter(run)

    def _preload(self, spec):
        self.imported.append(dict(os.environ))
        self.at_import()

    def start(self, python=sys.executable, context=CONTEXT, **env):
        """How both nodes of a start have begun; what a start sees of the environment stays so."""
        spec = Spec("r", "id", 0.0, "local", "local", Entry("script"), env=env, python=python)
        self.begun.clear()
        self.starter.prepare(spec, context)
        for rank in range(2):
            self.starter.start(replace(context, node_rank=rank))
        return ["forked" if node == "forked" else "own" for node in self.begun]


@pytest.fixture
def cluster(run, job):
    return Cluster(run, job)


FORKED, OWN = ["forked"] * 2, ["own"] * 2


def test_all_nodes_of_all_starts_are_forked_and_the_import_is_done_once(cluster):
    assert cluster.start() == FORKED
    assert cluster.start(context=replace(CONTEXT, restarts=1, end_time=1e9)) == FORKED
    assert len(cluster.imported) == 1


def test_the_import_sees_what_a_node_would_see_and_the_controller_keeps_its_own(cluster):
    before = dict(os.environ)

    cluster.start(OMP_NUM_THREADS="3")

    assert cluster.imported[0]["OMP_NUM_THREADS"] == "3"
    assert json.loads(cluster.imported[0][HPCTRAIN_LOCAL_CONTEXT])["job_id"] == "local-1"
    assert cluster.imported[0]["MKL_NUM_THREADS"] == "2"
    assert dict(os.environ) == before


@pytest.mark.parametrize("name", LATE)
def test_a_variable_that_came_after_the_import_needs_a_process_of_its_own(cluster, caplog, name):
    caplog.set_level(logging.INFO, "hpctrain.entry")
    assert cluster.start() == FORKED

    assert cluster.start(**{name: "4"}) == OWN

    assert f"with another environment: {name}" in caplog.text
    assert len(cluster.imported) == 1
    assert cluster.start() == FORKED  # as at the import again


def test_a_variable_of_the_controller_that_has_changed_or_gone_does_too(cluster, job):
    assert cluster.start() == FORKED
    job.setenv("MKL_NUM_THREADS", "3")
    assert cluster.start() == OWN
    job.delenv("MKL_NUM_THREADS")
    assert cluster.start() == OWN


def test_a_variable_that_an_import_has_set_would_be_lost(cluster, caplog):
    caplog.set_level(logging.INFO, "hpctrain.entry")
    cluster.at_import = lambda: os.environ.update(SET_BY_A_LIBRARY="1")

    assert cluster.start() == OWN

    assert "SET_BY_A_LIBRARY" in caplog.text
    assert "SET_BY_A_LIBRARY" not in os.environ


def test_another_python_starts_its_nodes_itself(cluster, run):
    assert cluster.start(python="/opt/other/bin/python") == OWN

    assert cluster.imported == []
    (command,), how = cluster.begun[1]
    assert command == [
        *("/opt/other/bin/python", "-P", "-u", "-m", "hpctrain.entry.local_node", str(run.root))
    ]
    assert json.loads(how["env"][HPCTRAIN_LOCAL_CONTEXT])["node_rank"] == 1
    assert how["start_new_session"]


def test_where_the_import_fails_a_node_says_so_itself_and_the_next_start_tries_again(
    cluster, caplog
):
    caplog.set_level(logging.INFO, "hpctrain.entry")

    def fail():
        raise ImportError("no torch here")

    cluster.at_import = fail
    before = dict(os.environ)
    assert cluster.start() == OWN
    assert "the imports have failed here: ImportError: no torch here" in caplog.text
    assert dict(os.environ) == before
    cluster.at_import = lambda: None
    assert cluster.start() == FORKED


@pytest.mark.parametrize("how", ["rewritten", "replaced", "removed"])
@pytest.mark.parametrize("when", ["before the first start", "between two starts"])
def test_a_file_that_has_changed_since_it_was_imported(cluster, tmp_path, job, how, when):
    file = tmp_path / "imported.py"
    file.write_text("OLD = 1\n")
    module = ModuleType("imported")
    module.__file__ = str(file)
    job.setitem(sys.modules, "imported", module)
    if when == "before the first start":
        cluster.starter._files.note()
    else:
        assert cluster.start() == FORKED

    if how == "rewritten":
        file.write_text("NEW = 10\n")
    elif how == "replaced":
        other = tmp_path / "other.py"
        other.write_text("OLD = 2\n")
        os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
        other.replace(file)
    else:
        file.unlink()

    assert cluster.start() == OWN


def test_what_is_in_the_way_of_a_fork(cluster):
    cluster.in_the_way = "the controller has 2 threads"

    assert cluster.start() == OWN


@pytest.mark.parametrize(
    ("threads", "cuda", "forks", "why"),
    [
        ([1, 1], False, 0, ""),
        ([2, 1], False, 1, ""),  # OpenBLAS ends its own before a fork
        ([2, 2], False, 1, "the controller has 2 threads"),
        ([1, 1], True, 0, "CUDA is initialised in the controller"),
    ],
)
def test_threads_that_outlive_a_fork_and_cuda_are_in_the_way(job, threads, cuda, forks, why):
    torch = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: cuda))
    job.setitem(sys.modules, "torch", torch)
    forked = []
    job.setattr(local_nodes, "_fork_in_vain", lambda: forked.append(1))
    job.setattr(local_nodes, "_threads", lambda: threads[len(forked)])

    assert local_nodes._in_the_way() == why
    assert len(forked) == forks


def test_a_thread_is_counted_and_a_fork_in_vain_leaves_no_process():
    before, gate = local_nodes._threads(), threading.Event()
    dead = _dead_children()  # of earlier tests of this process
    thread = threading.Thread(target=gate.wait)
    thread.start()
    counted = local_nodes._threads()
    local_nodes._fork_in_vain()
    gate.set()
    thread.join()

    assert counted == before + 1
    assert _dead_children() == dead


def _dead_children():
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
    return {pid for pid in children.split() if not Path(f"/proc/{pid}/exe").exists()}


COUNTS = """
import numpy
from hpctrain.entry import local_nodes
print(local_nodes._threads())
local_nodes._fork_in_vain()
print(local_nodes._threads())
"""


def test_openblas_ends_its_threads_before_a_fork():
    """It makes them when numpy is imported, as many as there are CPUs, where nobody forbids it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    command = [sys.executable, "-c", COUNTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    before, after = map(int, done.stdout.split())
    assert before == min(2, os.cpu_count())
    assert after == 1


@pytest.fixture
def forked(tmp_path, job, run):
    """Forks a node whose program is the given text, and gives what it leaves in `facts`."""
    facts = tmp_path / "facts"
    job.syspath_prepend(tmp_path)
    nodes = []

    def fork(text, rank=0):
        name = f"program_of_node_{len(nodes)}"
        head = f"import atexit, json, os, sys\natexit._clear()\nFACTS = {str(facts)!r}\n"
        (tmp_path / f"{name}.py").write_text(head + text)
        job.setattr(local_nodes, "PROGRAM", name)
        nodes.append(local_nodes.ForkedNode(run.root, replace(CONTEXT, node_rank=rank)))
        return nodes[-1]

    fork.facts = lambda node: (node.wait(), json.loads(facts.read_text()))[1]
    yield fork
    for node in nodes:
        if node.returncode is None:
            os.kill(node.pid, signal.SIGKILL)
            node.wait()


LOOKS = """
import random, signal
facts = {
    "ids": [os.getpid(), os.getpgrp(), os.getsid(0)],
    "argv": sys.argv[1:],
    "orig_argv": sys.orig_argv,
    "main": [sys.modules["__main__"].__spec__.name, __name__, sys.modules["__main__"].FACTS],
    "environment": dict(os.environ),
    "usr1": signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN,
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "draws": [random.random(), sys.modules["numpy.random"].random()],
    "name": open("/proc/self/comm").read().strip(),
}
with open(FACTS, "w") as file:
    json.dump(facts, file)
"""


def test_a_forked_node_is_what_a_process_of_its_own_would_be(forked, run):
    import numpy.random  # noqa: F401

    node = forked(LOOKS, rank=1)
    group = os.getpgid(node.pid)
    facts = forked.facts(node)

    assert node.returncode == 0
    assert [group, *facts["ids"]] == [node.pid] * 4
    assert facts["argv"] == [str(run.root)]
    program = "program_of_node_0"
    assert facts["orig_argv"] == [sys.executable, "-P", "-u", "-m", program, str(run.root)]
    assert facts["main"] == [program, "__main__", str(run.root.parent / "facts")]
    context = json.loads(facts["environment"].pop(HPCTRAIN_LOCAL_CONTEXT))
    assert JobContext(**context) == replace(CONTEXT, node_rank=1)
    assert facts["environment"] == dict(os.environ)
    assert facts["usr1"]
    assert facts["blocked"] == sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    assert facts["name"] == "hpctrain local1"


def test_no_two_nodes_draw_the_same(forked):
    import numpy.random  # noqa: F401

    draws = [forked.facts(forked(LOOKS))["draws"] for _ in range(2)]

    assert draws[0][0] != draws[1][0]
    assert draws[0][1] != draws[1][1]


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ("", 0),
        ("sys.exit(None)", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('a reason')", 1),
        ("raise ValueError('a reason')", 1),
        ("os.kill(os.getpid(), 9)", -9),
    ],
)
def test_its_exit_code_is_that_of_its_program(forked, capfd, ends, code):
    node = forked(ends)

    assert node.wait() == node.wait() == code

    assert ("a reason" in capfd.readouterr().err) == ("a reason" in ends)


def test_its_threads_and_what_it_has_left_to_its_exit_are_awaited(forked):
    text = """
import threading
def write():
    with open(FACTS, "w") as file:
        json.dump(done, file)
done = []
atexit.register(write)
gate = threading.Event()
threading.Thread(target=lambda: (gate.wait(), done.append("thread"))).start()
threading.Timer(0.01, gate.set).start()
"""
    assert forked.facts(forked(text)) == ["thread"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR2])
def test_a_stop_signal_right_after_its_start_is_noted(forked, signum):
    node = forked(
        """
import time
from hpctrain.node.agent import signals
while not signals.arrivals():
    time.sleep(0.01)
with open(FACTS, "w") as file:
    json.dump([arrival.signum for arrival in signals.arrivals()], file)
"""
    )
    os.killpg(node.pid, signum)

    assert forked.facts(node) == [signum]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signum}


def test_a_stop_signal_before_the_node_can_note_it_waits(forked, job):
    real = os.setsid

    def setsid():
        real()
        os.kill(os.getpid(), signal.SIGTERM)

    job.setattr(os, "setsid", setsid)
    node = forked(
        """
from hpctrain.node.agent import signals
sys.exit(len(signals.arrivals()))
"""
    )
    assert node.wait() == 1
