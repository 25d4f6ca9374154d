"""Modules imported by the Python that will run the program, in a process of its own.

An import can take a minute, end its interpreter, or print whatever it likes: none of that may
happen to the command line. tests/unit/check/test_import_probe.py holds the promises.
"""

from __future__ import annotations

import json
import signal
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hpctrain.submit.program import WantedImport

PATIENCE_S = 180.0
"""torch with all that a large program has beside it, from a file system that is asked first."""
_PROBE = """
import importlib, json, os, sys
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
order = json.loads(sys.stdin.read())
sys.path[0:1] = order["folders"]
def tell(number, why):
    print(json.dumps([number, why]), file=out, flush=True)
for number, (module, names) in enumerate(order["wanted"]):
    tell(number, None)
    why = ""
    try:
        found = importlib.import_module(module)
        for name in names:
            if not hasattr(found, name):
                try:
                    importlib.import_module(module + "." + name)
                except ModuleNotFoundError as error:
                    if error.name != module + "." + name:
                        raise
                    why = "has no " + name
                    version = getattr(sys.modules.get(module.partition(".")[0]), "__version__", "")
                    why += " (version %s)" % version if version else ""
                    break
    except BaseException as error:
        text = " ".join(str(error).split()) or type(error).__name__
        why = text if isinstance(error, ImportError) else type(error).__name__ + ": " + text
    tell(number, why)
"""


@dataclass(frozen=True)
class ProbeAnswer:
    """What became of the imports.

    Attributes:
        failed: Each import that does not work, with why.
        tried: How many were tried to their end.
        trouble: Why there is no answer for the others; "" where there is one for all.
    """

    failed: list[tuple[WantedImport, str]]
    tried: int
    trouble: str = ""


def try_imports(
    python: str,
    wanted: Sequence[WantedImport],
    *,
    cwd: Path,
    folders: Sequence[str],
    environ: Mapping[str, str],
    patience_s: float = PATIENCE_S,
) -> ProbeAnswer:
    """Import modules, one after the other.

    Args:
        python: The interpreter.
        wanted: What to import; one of each module and names is enough.
        cwd: Where the program will run.
        folders: In front of what the interpreter searches.
        environ: Of the program.
        patience_s: For all of them.
    """
    order = {"folders": list(folders), "wanted": [(one.module, one.names) for one in wanted]}
    trouble, output = "", ""
    try:
        done = subprocess.run(
            [python, "-c", _PROBE],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=patience_s,
            cwd=cwd,
            env=dict(environ),
            check=False,
        )
        output, code = done.stdout, done.returncode
        last = next(iter(reversed(done.stderr.split("\n")[:-1])), "")
        trouble = _ended(code, last) if code else ""
    except subprocess.TimeoutExpired as error:
        raw = error.stdout or b""
        output = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
        trouble = f"it had not ended after {patience_s:g} s"
    except OSError as error:
        return ProbeAnswer([], 0, f"{python} cannot be started: {error.strerror}")
    return _answer(wanted, output, trouble)


def _answer(wanted: Sequence[WantedImport], output: str, trouble: str) -> ProbeAnswer:
    answers: dict[int, str | None] = {}
    for line in output.splitlines():
        try:
            number, why = json.loads(line)
        except ValueError:  # a line that was cut off by the interpreter's end
            continue
        answers[number] = why
    failed = [(wanted[number], why) for number, why in answers.items() if why]
    tried = sum(why is not None for why in answers.values())
    current = next((number for number, why in answers.items() if why is None), None)
    if trouble and current is not None:
        if trouble.startswith("it ended"):
            why = trouble.replace("it ended", "its import ends the interpreter", 1)
            return ProbeAnswer([*failed, (wanted[current], why)], tried)
        trouble = f"import {wanted[current].module}: {trouble}"
    return ProbeAnswer(failed, tried, trouble)


def _ended(code: int, last: str) -> str:
    """How an interpreter has ended, in words."""
    if code < 0:
        return f"it ended by {signal.Signals(-code).name}"
    return f"it ended with exit code {code}" + (f": {last.strip()}" if last.strip() else "")
