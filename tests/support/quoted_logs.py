"""Logs quoted from public issues, each with its address, the fault that it is, and who said so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "data" / "doctor"


@dataclass(frozen=True)
class QuotedLog:
    address: str
    fault: str
    said_by: str
    text: str


def quoted(name):
    """All logs of a file of quotes."""
    logs = []
    for part in (FOLDER / name).read_text().split("\n### http")[1:]:
        address, fault, said_by, text = part.split("\n", 3)
        logs.append(
            QuotedLog(
                f"http{address}",
                fault.removeprefix("### fault: "),
                said_by.removeprefix("### said by: "),
                text,
            )
        )
    return logs


def diagnose(text):
    """What the doctor says of one log."""
    from hpctrain.advise.doctor.judge import judge
    from hpctrain.advise.doctor.scan import LogScanner

    scanner = LogScanner("train.log")
    scanner.feed(text.encode())
    return judge([scanner.finish()])
