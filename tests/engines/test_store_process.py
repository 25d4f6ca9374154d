"""The ranks' store: served by a process of its own, that ends with its maker and is not exposed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest

from hpctrain.errors import ClusterError
from hpctrain.node.agent.rendezvous import StoreProcess
from tests.support import patience
from tests.support.ports import free_port
from tests.support.processes import alive, descendants, kill_all, listening


@pytest.fixture
def store():
    """A process that serves stores."""
    with StoreProcess() as process:
        yield process


def _client(port):
    from torch.distributed import TCPStore

    return TCPStore("localhost", port, None, is_master=False, timeout=timedelta(seconds=20))


def _serve(address, port, folder):
    store = StoreProcess()
    store.serve(address, port)
    if os.fork() == 0:  # a rank has what its agent had open
        signal.pause()
    (folder / "new").write_text(json.dumps(store.pid))
    (folder / "new").rename(folder / "pid")
    signal.pause()


def _await(condition, what):
    patience.until(condition, what)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_a_store_at_the_loopback_is_for_this_machine_alone(store, address):
    port = free_port()
    store.serve(address, port)

    assert listening(store.pid) == {f"0100007F:{port:04X}"}
    assert f"0100007F:{port:04X}" not in listening(os.getpid())
    _client(port).set("key", "value")


def test_other_machines_reach_a_store_at_a_name(store):
    port = free_port()
    store.serve(socket.gethostname(), port)

    (found,) = listening(store.pid)
    assert found == f"{'0' * len(found.partition(':')[0])}:{port:04X}"
    _client(port).set("key", "value")
    assert _client(port).get("key") == b"value"


def test_the_last_rounds_store_is_served_beside_the_present_one_and_older_ones_are_not(store):
    ports = [free_port() for _ in range(3)]
    for port in ports:
        store.serve("127.0.0.1", port)

    assert {found.partition(":")[2] for found in listening(store.pid)} == {
        f"{port:04X}" for port in ports[1:]
    }


def test_a_port_that_is_taken_is_told_in_a_line_and_the_next_one_works(store):
    told = r"port \d+ of .*: .*in use.*; start the run again"
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(ClusterError, match=told),
    ):
        store.serve("127.0.0.1", other.getsockname()[1])

    store.serve("127.0.0.1", free_port())


def test_where_the_process_was_killed_another_one_serves_the_next_store(store):
    first, port = store.pid, free_port()
    store.serve("127.0.0.1", free_port())
    os.kill(first, signal.SIGKILL)

    store.serve("127.0.0.1", port)

    assert store.pid != first
    _client(port).set("key", "value")
    with pytest.raises(ChildProcessError):  # it was reaped
        os.waitpid(first, os.WNOHANG)


def test_one_that_is_killed_again_and_again_is_told_in_a_line(store, monkeypatch):
    fork = store._fork

    def fork_in_vain():
        fork()
        os.kill(store.pid, signal.SIGKILL)

    monkeypatch.setattr(store, "_fork", fork_in_vain)
    os.kill(store.pid, signal.SIGKILL)

    with pytest.raises(ClusterError, match="the process that serves the agents' stores: "):
        store.serve("127.0.0.1", free_port())


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT])
def test_signals_to_all_processes_of_a_node_leave_the_store_alone(store, signum):
    port = free_port()
    store.serve("127.0.0.1", port)

    os.kill(store.pid, signum)

    _client(port).set("key", "value")
    assert alive(store.pid)


def test_the_store_ends_with_a_killed_agent(tmp_path):
    maker = multiprocessing.get_context("fork").Process(
        target=_serve, args=("127.0.0.1", free_port(), tmp_path)
    )
    maker.start()
    _await((tmp_path / "pid").exists, "no store")
    pid = json.loads((tmp_path / "pid").read_text())
    below = descendants(maker.pid)
    assert pid in below

    os.kill(maker.pid, signal.SIGKILL)
    maker.join()

    try:
        _await(lambda: not alive(pid), f"store {pid} outlived its agent")
    finally:
        kill_all(below)


def test_stopping_waits_for_the_end():
    with StoreProcess() as store:
        pid = store.pid
    store.stop()

    assert not alive(pid)
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_agents_that_do_not_come_are_named(capsys):
    from hpctrain.node.agent.rendezvous import Rendezvous

    nodes = ["n0", "n1", "n2"]
    port = free_port()
    first = Rendezvous("127.0.0.1", port, 0, nodes, run_id="1.0", timeout_s=1)
    try:
        told = rf"the agents of n\[1-2\] did not come to 127.0.0.1:{port} within 1 s"
        with pytest.raises(ClusterError, match=told):
            first.next_rendezvous()
    finally:
        first.close()
    still = f"hpctrain: still waits at 127.0.0.1:{port} for the agents of n[1-2]"
    assert capsys.readouterr().err.splitlines().count(still) == 1, "told long before the end"


def test_a_store_that_cannot_be_reached_is_told_in_a_line():
    from hpctrain.node.agent.rendezvous import Rendezvous

    port = free_port()
    rendezvous = Rendezvous("127.0.0.1", port, 1, ["n0", "n1"], run_id="1", timeout_s=1)

    with pytest.raises(
        ClusterError, match=rf"^the agents cannot meet at 127\.0\.0\.1:{port}: "
    ) as e:
        rendezvous.next_rendezvous()

    assert "\n" not in str(e.value)


def test_what_torch_leaves_in_the_temporary_folder_for_a_rank_that_raised_is_removed(tmp_path):
    from hpctrain.node.agent.node import NodeAgent

    files = [tmp_path / name for name in ("raised.pickle", "ended.pickle")]
    files[0].touch()
    context = SimpleNamespace(_pc=SimpleNamespace(error_files=[str(path) for path in files]))

    NodeAgent._remove_error_files(SimpleNamespace(_pcontext=context))
    NodeAgent._remove_error_files(SimpleNamespace(_pcontext=None))

    assert list(tmp_path.iterdir()) == []
