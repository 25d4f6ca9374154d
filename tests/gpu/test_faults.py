"""The doctor on faults that a real GPU makes, and what a killed process leaves on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpctrain.advise.doctor.files import inputs, scan
from hpctrain.advise.doctor.judge import judge
from hpctrain.ledger.history.run_state import EndCause, cause_in
from hpctrain.node.agent.ending import ASSERTED
from tests.support import patience
from tests.support.ports import free_port

SCRIPT = Path(__file__).parent / "scripts" / "faults.py"
FAULTS = {
    "out_of_memory": ("gpu_oom", EndCause.GPU_OOM),
    "asserted": ("gpu_assert", EndCause.GPU_ERROR),
    "illegal_access": ("gpu_error", EndCause.GPU_ERROR),
    "hidden": ("gpu_setup", None),
    "old_driver": ("gpu_setup", None),
    "two_ranks_on_one": (None, EndCause.NCCL_ERROR),
}
"""What the doctor calls it, and what an attempt's end; None where that is not looked at."""
ANYWHERE = {"hidden", "old_driver"}
"""Such a fault needs no GPU."""
MIB = 1 << 20


@pytest.fixture(scope="module")
def logs(is_cuda, tmp_path_factory):
    """What each program printed; all of them at once, since each imports torch first."""
    folder = tmp_path_factory.mktemp("faults")
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    programs = []
    for kind in FAULTS if is_cuda else ANYWHERE:
        for rank in range(1 + (kind == "two_ranks_on_one")):
            environ = {**os.environ, **meet, "RANK": str(rank)}
            if kind == "hidden":
                environ["CUDA_VISIBLE_DEVICES"] = ""
            with (folder / f"{kind}-{rank}.log").open("w") as out:
                words = [sys.executable, str(SCRIPT), kind]
                programs.append(subprocess.Popen(words, env=environ, stdout=out, stderr=out))
    codes = [program.wait() for program in programs]
    assert all(code != 0 for code in codes), codes
    return {path.name.removesuffix("-0.log"): path for path in folder.glob("*-0.log")}


@pytest.mark.parametrize("kind", FAULTS)
def test_the_doctor_names_a_real_fault(logs, kind, note):
    assert f"def {kind}(" in SCRIPT.read_text()
    is_real = note.on_gpu(f"a real fault: {kind}")
    if not is_real and kind not in ANYWHERE:
        return
    text = logs[kind].read_text()
    facts, _ = scan(inputs([str(logs[kind])]), lambda _: None)
    diagnosis = judge(facts)
    fault, cause = FAULTS[kind]
    assert fault in {None, diagnosis.kind}, f"{diagnosis.headline}\n{text[-1500:]}"
    if is_real:
        last = [line for line in text.splitlines() if "Error" in line][-1]
        assert cause in {None, cause_in(last)}, last
        assert (ASSERTED in text) == (kind == "asserted")


def test_a_killed_process_leaves_the_gpu_free(note):
    assert "def killed(" in SCRIPT.read_text()
    if note.on_gpu("memory of a killed process is given back"):
        before = torch.cuda.mem_get_info()[0]
        words = [sys.executable, str(SCRIPT), "killed"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout.strip()) == (-signal.SIGKILL, "1.0"), done.stderr
        patience.until(lambda: torch.cuda.mem_get_info()[0] > before - 64 * MIB)
