"""Another user of the machine reaches the agents' store, and decides nothing about the run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hpctrain.core.base.process import own_program
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.layout import RunDir
from tests.support import patience
from tests.support.users import OWNER, STRANGER, run_as

SCRIPT = """
import os, pathlib, time
here = pathlib.Path(__file__).parent
(here / "port.new").write_text(os.environ["MASTER_PORT"])
(here / "port.new").rename(here / "port")
while not (here / "go").exists():
    time.sleep(0.1)
"""
STRANGERS = """
import json, sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), None, False, wait_for_workers=False)
keys = [key.removeprefix("/") for key in store.list_keys()]
(attempt,) = [key for key in keys if key.endswith("attempt/0")]
ending = {"ending": "left", "restart": False, "why": "", "failure": None, "silent_nodes": []}
for key in ("news/0", "news/1", "report/0"):
    store.set(attempt.removesuffix("attempt/0") + "round/0/" + key, json.dumps(ending))
print(attempt)
"""


def wait(what, reached, output):
    patience.until(reached, lambda: f"{what} did not come: {output.read_text()}")


def listening_at(port):
    """Addresses of this machine at which a port is served, as the kernel writes them."""
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path("/proc/net", table).read_text().splitlines()[1:]
    ]
    local = [fields[1].split(":") for fields in lines if fields[3] == "0A"]
    return {address for address, number in local if int(number, 16) == port}


@pytest.mark.two_users
def test_another_user_cannot_end_a_run(common_path):
    work = common_path / "work"
    work.mkdir()
    os.chown(work, OWNER.uid, OWNER.gid)
    (work / "train.py").write_text(SCRIPT)
    run = RunDir(work / "runs" / "r")
    env = {"HPCTRAIN_RUNS": str(work / "runs"), "HPCTRAIN_LOCAL_DIR": str(work / "local")}
    words = ["--cluster", "local", "--nodes", "1", "--name", "r", "train.py"]
    run_as(OWNER, own_program("hpctrain", "submit", *words), cwd=work, **env)
    (output,) = run.jobs.glob("*.out")
    wait("the rank", (work / "port").exists, output)
    port = int((work / "port").read_text())
    assert listening_at(port) == {"0100007F"}, "a run of this machine is served to it alone"

    done = run_as(STRANGER, [sys.executable, "-c", STRANGERS, str(port)])

    assert "attempt/0" in done.stdout
    wait("the refusal", lambda: "written round/0/news/0" in output.read_text(), output)
    assert [e for e in ledger.read(run) if e.kind in {"done", "attempt_ended"}] == []
    (work / "go").touch()
    wait("the end", lambda: any(e.kind == "done" for e in ledger.read(run)), output)
