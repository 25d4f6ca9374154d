"""A program that knows nothing of hpctrain: every save goes over the same path, as nanoGPT's does.

Its first start is killed by the kernel in the middle of its third `torch.save`.
"""

import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch

STEPS = 5
path = Path("out/ckpt.pt")
path.parent.mkdir(exist_ok=True)
step, weights = 0, torch.zeros(100_000)
resume = os.environ.get("HPCTRAIN_RESUME")
if resume:
    state = torch.load(resume)
    step, weights = state["step"], state["weights"]
print(f"begins at step {step}, given {resume}", flush=True)
seals = Path(os.environ["HPCTRAIN_RUN_DIR"], "sealed")
is_killed = not Path("started").exists()
Path("started").touch()
while step < STEPS:
    step += 1
    weights += 1
    if is_killed and step == 3:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    torch.save({"step": step, "weights": weights}, path)
    # A user's step takes longer than checkpoint.seal_settle_s.
    while not (seals / f"seal-{step:06d}" / "SEAL.json").exists() and len(sys.argv) > 1:
        time.sleep(0.05)
print(f"done at step {step}", flush=True)
