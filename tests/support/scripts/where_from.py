"""Says from where a rank runs, waits for a file, and ends: `where_from.py FOLDER GO`."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch

import hpctrain

folder, go = map(Path, sys.argv[1:])
name = f"{os.environ['HPCTRAIN_STARTS']}-{os.environ['RANK']}.json"
facts = {
    "prefix": sys.prefix,
    "base_prefix": sys.base_prefix,
    "torch": torch.__file__,
    "hpctrain": hpctrain.__file__,
    "os": os.__file__,
    "python": shutil.which("python"),
    "path": sys.path,
}
(folder / f"{name}.new").write_text(json.dumps(facts))
(folder / f"{name}.new").rename(folder / name)
while not go.exists():
    time.sleep(0.05)
