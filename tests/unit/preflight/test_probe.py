"""A node is read as it is, whatever it is; what hangs or cannot be read is told, never guessed."""

from __future__ import annotations

import json
import os
import resource
import threading
import time
import tomllib
from pathlib import Path

import pytest

from hpctrain.cluster.preflight import bounded as exchanges
from hpctrain.cluster.preflight.bounded import Unanswered, bounded
from hpctrain.cluster.preflight.facts import (
    FactSources,
    Gpu,
    Interface,
    Port,
    draft,
    parse_nvlinks,
    probe,
    read_gpus,
    run_command,
)

NVIDIA = "0, NVIDIA H100 80GB HBM3, 550.54.15, 0\n1, NVIDIA H100 80GB HBM3, 550.54.15, [N/A]\n"
NVLINK = "GPU 0: NVIDIA H100 (UUID: x)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\nGPU 1: x\n"
IPV6 = f"fe80{'0' * 28} 02 40 20 80 hsn0\n20010db8{'0' * 23}1 02 40 00 80 hsn0\n"
VERSIONS = {"torch": "2.9.0+cu128", "nvidia-nccl-cu12": "2.27.3"}
PATIENCE_S = 20.0


@pytest.fixture
def root(tmp_path):
    """A node with two interfaces, one InfiniBand adapter and an nccl.conf."""
    files = {
        "sys/class/net/lo/flags": "0x9",
        "sys/class/net/lo/operstate": "unknown",
        "sys/class/net/hsn0/flags": "0x1003",
        "sys/class/net/hsn0/operstate": "up",
        "sys/class/net/eno1/flags": "0x1003",
        "sys/class/net/eno1/operstate": "down",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
        "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
        "sys/class/cxi/cxi0/x": "",
        "proc/net/if_inet6": IPV6,
        "etc/nccl.conf": "# ours\nNCCL_IB_HCA = mlx5_0 # the fast one\n",
        "dev/shm/x": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def no_tool(args, timeout_s):
    del timeout_s
    raise FileNotFoundError(args[0])


def sources(root, **changes):
    given = {
        "root": root,
        "command": no_tool,
        "ipv4": lambda name: "10.0.0.1" if name == "hsn0" else "",
        "version": lambda name: VERSIONS.get(name, ""),
        "limit": lambda which: (-1 if which == resource.RLIMIT_MEMLOCK else 99, 0),
        "environ": {"TMPDIR": str(root)},
        "host": lambda: "host",
        "resolves": lambda _: True,
    }
    return FactSources(**(given | changes))


def test_a_node_is_read(root):
    facts = probe("n1", sources(root))

    assert facts.interfaces == [
        Interface("eno1", up=False, addresses=[]),
        Interface("hsn0", up=True, addresses=["10.0.0.1", "2001:db8::1"]),
    ]
    assert facts.ports == [Port("mlx5_0", 1, "ACTIVE", 400.0, "InfiniBand")]
    assert (facts.cxi, facts.efa, facts.gpus) == (["cxi0"], [], [])
    assert (facts.memlock, facts.nofile) == ("unlimited", 99)
    assert facts.nccl_conf == {"NCCL_IB_HCA": "mlx5_0"}
    assert facts.versions["torch"] == "2.9.0+cu128"
    assert (facts.versions["nccl"], facts.versions["cuda"]) == ("2.27.3", "cu128")
    assert facts.unreadable == {}


def test_what_cannot_be_read_is_unknown_with_its_reason_and_the_rest_is_read(root):
    (root / "sys/class/infiniband/mlx5_0/ports/1/rate").unlink()

    facts = probe("n1", sources(root))

    assert facts.ports is None
    assert "rate" in facts.unreadable["ports"]
    assert facts.interfaces is not None


def test_a_driver_without_its_tool_is_unknown_not_no_gpus(root):
    (root / "dev/nvidiactl").write_text("")

    facts = probe("n1", sources(root))

    assert facts.gpus is None
    assert "/dev/nvidiactl is there and nvidia-smi is not" in facts.unreadable["gpus"]


def test_gpus_are_read_from_nvidia_smi(root):
    found = read_gpus(root, lambda args: NVLINK if "nvlink" in args else NVIDIA)

    assert found == [
        Gpu(0, "NVIDIA H100 80GB HBM3", "550.54.15", 0, 1),
        Gpu(1, "NVIDIA H100 80GB HBM3", "550.54.15", None, 0),
    ]
    assert parse_nvlinks("") == {}


def test_gpus_are_read_from_rocm_smi(root):
    def command(args):
        if args[0] == "nvidia-smi":
            raise FileNotFoundError
        card = {"Card series": "AMD Instinct MI250X"}
        return json.dumps({"card0": card, "card10": card, "system": {"Driver version": "6.7"}})

    assert [(g.index, g.driver) for g in read_gpus(root, command)] == [(0, "6.7"), (10, "6.7")]


def test_a_tool_that_hangs_is_given_up(root):
    def hangs(args, timeout_s):
        del args, timeout_s
        return bounded(lambda: time.sleep(PATIENCE_S), 0.05)

    facts = probe("n1", sources(root, command=hangs))

    assert facts.gpus is None
    assert "no answer in 0.05 s" in facts.unreadable["gpus"]


def test_a_command_that_fails_says_what_it_said():
    with pytest.raises(Unanswered, match="exit 3: no driver"):
        run_command(["sh", "-c", "echo no driver >&2; exit 3"], PATIENCE_S)
    assert run_command(["echo", "x"], PATIENCE_S) == "x\n"


def test_a_child_that_dies_or_raises_is_told():
    with pytest.raises(Unanswered, match="ValueError: no"):
        bounded(_raise, PATIENCE_S)
    with pytest.raises(Unanswered, match="the child died"):
        bounded(lambda: os._exit(1), PATIENCE_S)


def _raise():
    raise ValueError("no")


def test_the_draft_of_a_preset_has_what_was_found_and_says_what_was_not(root):
    text = draft(probe("n1", sources(root, limit=_no_limit)))
    found = tomllib.loads(text)

    assert found["network"] == {
        "kind": "slingshot", "socket_ifnames": ["hsn0"], "hcas": ["mlx5_0"], "rate_gbps": 400,
        "nics_per_node": 1, "link_layer": "InfiniBand",
    }  # fmt: skip
    assert found["expect"]["nccl_conf"] is True
    assert "memlock" not in found["expect"]
    assert "# unknown: memlock (OSError: no)" in text


def _no_limit(which):
    raise OSError("no")


# -- the shared directory


def test_nodes_see_each_others_files_and_locks(tmp_path):
    assert exchanges.leave_file(tmp_path, "n1", "a") == ""
    held = exchanges.HeldLock(tmp_path)
    try:
        assert held.held
        assert exchanges.try_lock(tmp_path) == "coherent"
    finally:
        held.release()
    assert exchanges.try_lock(tmp_path) == "local"
    assert exchanges.unseen_files(tmp_path, {"n1": "a"}) == []


def test_a_file_that_is_missing_or_has_other_content_is_not_seen(tmp_path):
    exchanges.leave_file(tmp_path, "n1", "old")

    assert exchanges.unseen_files(tmp_path, {"n1": "new", "n2": "x"}, wait_s=0.1) == ["n1", "n2"]


def test_a_node_that_is_not_to_list_the_folder_does_not(tmp_path, monkeypatch):
    exchanges.leave_file(tmp_path, "n1", "a")
    monkeypatch.setattr(os, "listdir", lambda _: [])

    assert exchanges.unseen_files(tmp_path, {"n1": "a"}, listed=False) == []
    assert exchanges.unseen_files(tmp_path, {"n1": "a"}, wait_s=0.0) == ["n1"]


def test_a_directory_that_is_not_there_or_hangs_is_told_and_waits_for_nobody(tmp_path, monkeypatch):
    gone = tmp_path / "gone"

    assert "No such file" in exchanges.leave_file(gone, "n1", "a")
    assert exchanges.unseen_files(gone, {"n1": "a"}, wait_s=0.0) == ["n1"]
    assert exchanges.try_lock(gone) == "unknown"
    monkeypatch.setattr(
        exchanges, "replace_text", lambda *_, **__: threading.Event().wait()
    )  # for ever
    assert exchanges.leave_file(Path("/"), "n1", "a", 0.05) == "no answer in 0.05 s"
