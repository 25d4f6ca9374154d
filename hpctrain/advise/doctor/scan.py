"""One log as a stream of blocks: what it says of faults, in bounded memory however long it is.

A block is searched for a few words at once; only lines with one of them, and those of a traceback
that has begun, are taken apart. Whatever comes, nothing raises: a log may hold anything.
tests/unit/doctor/test_corpus.py and test_judge.py hold the promises.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpctrain.advise.doctor.faults import TABLE, Certainty, FaultKind
from hpctrain.advise.doctor.lines import TABLE_RANK, clock, plain
from hpctrain.advise.doctor.losses import LossWatch
from hpctrain.advise.doctor.sighting import LogFacts, Sighting
from hpctrain.advise.doctor.signature import EXCEPTION, FATAL, Role, Speaker, packaged
from hpctrain.ledger.history.causes import EndCause, cause_in

if TYPE_CHECKING:
    from hpctrain.advise.doctor.lines import PlainLine, Stamp
    from hpctrain.advise.doctor.signature import Signature, SignatureTable

LONGEST_LINE = 8192
"""Characters of a line that are looked at."""
SHOWN = 600
"""Characters of a line that are kept."""
KEPT_OF_KIND = 3
"""Sightings of one signature by one rank that are kept; all are counted."""
MOST_SIGHTINGS = 4000
"""Of one log: ranks times signatures that a job of thousands of ranks may show."""
MOST_STREAMS = 20_000
_ATTENTION = 400
"""Lines that are looked at after a traceback's first one."""
_AFTER_EXCEPTION = 12
"""Lines that are looked at after an exception's first one: its message may have several."""
_TABLE = 2000
"""Lines of a launcher's table of failures that are looked at."""
_TABLE_INDENT = "  "
"""Before each line of that table, and so before a rank's traceback in it."""
_AFTER_ERROR = 3
"""Lines that are looked at after "Last error:"."""

_END = re.compile(rb"[\r\n]")
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>\S+)')
_RICH_FRAME = re.compile(r"^(?P<file>/\S+\.py):(?P<line>\d+) in (?P<function>\S+)")
_CRASHED = re.compile(r"^Current thread 0x[0-9a-f]{1,16}\b.*\(most recent call first\):$")
"""faulthandler's, behind what it says of the crash; that thread's frames follow, newest first."""
_EXCEPTION = re.compile(r"^(?P<name>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:: (?P<text>.*)|:?)$")
_UNCAUGHT = re.compile(
    r"\b(?:Uncaught|Unhandled)(?: exception:?)? "
    r"(?P<name>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception))(?:: (?P<text>.*)|:?)$"
)
_RAISES = re.compile(r"^\s*(?:raise|assert)\b")
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|^<|/torch/|^torch/|\.pyx$|/bin/(?:torchrun|accelerate|"
    r"deepspeed)$|/(?:deepspeed|accelerate|lightning|pytorch_lightning|transformers)/"
)
_WRAPPERS = re.compile(
    r"(?:^|\.)(?:ChildFailedError|CalledProcessError|SystemExit|ProcessRaise"
    r"dException|RayTaskError\S*|ActorDiedError|RayActorError|WorkerCrashedError|"
    r"ProcessExitedException|ExceptionGroup|SignalException|StopIteration|UnexpectedStatusException)$",
    re.IGNORECASE,
)
_OF_CHILD = re.compile(r"\bnon-?zero (?:exit )?status\b|\bexit(?:ed with)? (?:code|status) [1-9]")
"""What a program says of another that it had started, whose own error stands elsewhere."""
_READ_THE_CHILD = ("read what the process that it started printed itself: its error stands there",)
_LOADS = re.compile(r"^_?load_(?:\w+_)?(?:state|checkpoint|state_dict|optimizer\w*)$")
"""Functions that read a checkpoint: what fails below them failed with it."""
_IN_WORKER = re.compile(r"Caught \w+ in DataLoader worker process")
_HANDLED = "During handling of the above exception"
_CHAINED = "was the direct cause of the following exception"
_IGNORED = re.compile(r"^Exception ignored in")
_OF_ATTEMPT = re.compile(
    r"20\d\d-\d\d-\d\d [\d:]{8} \S+ (?:\w+ )*?(?:\d+ )?attempt (?P<attempt>\d{1,9}) "
)
"""A line of hpctrain's own: see `base.log`."""
_NETWORK = re.compile(r"NCCL INFO NET/(?P<network>IB|Socket|OFI)\S* ?: Using (?P<what>.{1,120})")
_VERSION = re.compile(r"\bNCCL version (?P<version>\d+\.\d+(?:\.\d+)?(?:\+cuda[\d.]+)?)")
_NEWLINES = bytes.maketrans(b"\r", b"\n")
_DIGITS = b"0123456789"

_OF_WORDS: dict[EndCause, tuple[FaultKind, Role, Certainty]] = {
    EndCause(cause): (FaultKind(kind), Role[role.upper()], Certainty(certainty))
    for cause, (kind, role, certainty) in TABLE["of_words"].items()
}


@dataclass
class _Writer:
    """What one writer is in the middle of.

    Attributes:
        left: Lines of its traceback that are still looked at.
        place: The innermost line of the program itself so far.
        innermost: The innermost line of all.
        is_ignored: Python ignores what this traceback tells.
        follows: What comes next follows from the exception before.
        last: Where its last exception stands among the sightings.
        failed: The rank of which a launcher's table of failures tells.
        crashed: The next line of the program itself is where it crashed.
        raises: The innermost line is one that raises.
        loads: A function that reads a checkpoint is among the lines.
    """

    left: int = 0
    place: str = ""
    innermost: str = ""
    is_ignored: bool = False
    follows: bool = False
    last: int | None = None
    failed: int | None = None
    crashed: bool = False
    raises: bool = False
    loads: bool = False


class LogScanner:
    """Reads one log, block by block.

    Args:
        source: The log's name.
        rank: Who writes it, where its name tells.
        signatures: What to look for; those of the package by default.
        attempt: Lines that name another attempt of a run are left out; None leaves out none.
    """

    def __init__(
        self,
        source: str,
        rank: int | None = None,
        signatures: SignatureTable | None = None,
        *,
        attempt: int | None = None,
    ) -> None:
        self._attempt = attempt
        self.facts = LogFacts(source)
        self._rank = rank
        self._table = signatures or packaged()
        self._line = 0
        self._offset = 0
        self._attention = 0
        self._streams: dict[str, _Writer] = {}
        self._kept: Counter[tuple[str, int | None]] = Counter()
        self._losses = LossWatch()

    def feed(self, block: bytes) -> None:
        """Read a block of whole lines, each ended by a newline but for the log's last."""
        self._losses.feed(block, self._offset, self._line)
        starts = _candidates(block, self._table.words)
        at, number, counted, end = 0, self._line, 0, len(block)
        for start in [*starts, end]:
            while self._attention > 0 and at < start:
                stop = _line_end(block, at)
                number += block.count(b"\n", counted, at)
                counted = at
                self._attention -= 1
                self._look(block[at:stop], number + 1, self._offset + at)
                at = stop + 1
            if start < at or start >= end:
                continue
            number += block.count(b"\n", counted, start)
            stop, counted = _line_end(block, start), start
            self._look(block[start:stop], number + 1, self._offset + start)
            at = stop + 1
        self._line += block.count(b"\n")
        self._offset += len(block)
        self.facts.lines = self._line + (not block.endswith(b"\n") and bool(block))

    def finish(self) -> LogFacts:
        """All that was read."""
        facts = self.facts
        facts.progress = tuple(self._losses.offsets)
        facts.sightings += self._losses.sightings(facts.source)
        return facts

    def _look(self, raw: bytes, number: int, offset: int) -> None:
        """Take one line apart."""
        text = raw[:LONGEST_LINE].decode("utf-8", "replace")
        of = _OF_ATTEMPT.match(text) if self._attempt is not None else None
        if of is not None and int(of["attempt"]) != self._attempt:
            return
        self._look_at(plain(text), clock(text), number, offset)

    def _look_at(self, line: PlainLine, when: Stamp | None, number: int, offset: int) -> None:
        rank = line.rank if line.rank is not None else self._rank
        if line.rank is not None and len(self.facts.ranks) < MOST_STREAMS:
            self.facts.ranks.add(line.rank)
        if len(self._streams) > MOST_STREAMS:
            self._streams.clear()
        stream = self._streams.setdefault(line.stream, _Writer())
        if stream.failed is not None:
            line = line._replace(text=line.text.removeprefix(_TABLE_INDENT))
        reading = self._read(line, stream)
        if line.rank is None:
            rank = stream.failed if stream.failed is not None else rank
        if reading is None:
            return
        named = reading.details.get("rank")
        sighting = replace(
            reading,
            text=line.text.strip()[:SHOWN],
            source=self.facts.source,
            line=number,
            offset=offset,
            rank=int(named) if rank is None and named else rank,
            node=reading.details.get("node") or line.node,
            clock=when,
            is_late=reading.is_late or stream.failed is not None,
            place=stream.place if _has_place(reading.sign, reading.role) else "",
            is_handled=stream.is_ignored or (stream.follows and reading.kind is FaultKind.CODE),
        )
        self._keep(sighting, stream)

    def _keep(self, sighting: Sighting, stream: _Writer) -> None:
        facts, key = self.facts, (sighting.sign, sighting.rank)
        facts.counts[sighting.sign] += 1
        self._kept[key] += 1
        stream.last = None
        if self._kept[key] <= KEPT_OF_KIND and len(facts.sightings) < MOST_SIGHTINGS:
            stream.last = len(facts.sightings)
            facts.sightings.append(sighting)

    def _read(self, line: PlainLine, stream: _Writer) -> Sighting | None:
        """What a line says: of a fault, or of what its stream is in the middle of."""
        text = line.text
        self._environment(text)
        if any(one.fits(text) for one in self._table.harmless):
            return None
        begun = _TRACEBACK.search(text)
        if self._inside(text, stream) and (begun is None or begun[0] == text.strip()):
            return None
        return self._signed(text, stream) or (
            self._exception(text, stream) if begun is None else None
        )

    def _signed(self, text: str, stream: _Writer) -> Sighting | None:
        """What a signature knows of a line."""
        for each in self._table.faults:
            if each.fault is not None and (match := each.fits(text)) is not None:
                details = {name: value for name, value in match.groupdict().items() if value}
                sure = _sure(each, text, inside=stream.left > 0)
                self._close(stream, text)
                if each.name == FATAL:
                    self._await_frames(stream)
                sighting = _seen(
                    each.name, each.fault, each.role, sure, details, advice=each.advice
                )
                return replace(sighting, is_late=each.is_late)
        return None

    def _await_frames(self, stream: _Writer) -> None:
        """Where the crash is told behind this line; a traceback before it tells of it as well."""
        if stream.left <= 0:
            stream.left, stream.place = _ATTENTION, ""
            self._attention = max(self._attention, _ATTENTION)

    def _environment(self, text: str) -> None:
        """Which network and which NCCL a line tells of."""
        if "NET/" in text and (match := _NETWORK.search(text)) is not None:
            self.facts.networks.setdefault(match["network"], match["what"].strip())
        if "NCCL version" in text and (match := _VERSION.search(text)) is not None:
            self.facts.versions.add(match["version"])

    def _inside(self, text: str, stream: _Writer) -> bool:
        """Whether the line only belongs to a traceback, of which the place is kept."""
        if _TRACEBACK.search(text) is not None:
            stream.left, stream.place, stream.innermost = _ATTENTION, "", ""
            stream.raises = stream.loads = False
            self._attention = max(self._attention, _ATTENTION)
            return True
        if _IGNORED.match(text) is not None:
            stream.is_ignored = True
            self._attention = max(self._attention, _AFTER_ERROR)
            return True
        if text.startswith(_HANDLED) or _CHAINED in text:
            self._chain(stream, handled=text.startswith(_HANDLED))
            return True
        if text.endswith(("Last error:", "ChildFailedError:")):
            self._attention = max(self._attention, _AFTER_ERROR if "Last" in text else _TABLE)
        if (table := TABLE_RANK.match(text)) is not None:
            stream.failed = int(table["rank"])
        elif text.startswith("==="):
            stream.failed = None
        if stream.left <= 0:
            return False
        stream.left -= 1
        stream.crashed = stream.crashed or _CRASHED.match(text) is not None
        return self._frame(text, stream) or text.startswith((" ", "\t", "~", "^"))

    def _frame(self, text: str, stream: _Writer) -> bool:
        """Whether the line is one of a traceback's places; what is told of them is kept."""
        frame = _FRAME.match(text) or _RICH_FRAME.match(text)
        if frame is None:
            stream.raises = stream.raises or _RAISES.match(text) is not None
            return False
        place = f"{frame['file']}:{frame['line']} in {frame['function']}"
        stream.innermost, stream.raises = place, False
        stream.loads = stream.loads or _LOADS.match(frame["function"]) is not None
        if _LIBRARY.search(frame["file"]) is None:
            stream.place = place
            self._say_where(stream)
        return True

    def _say_where(self, stream: _Writer) -> None:
        """Give the crash that was told just now its place."""
        if stream.crashed and stream.last is not None:
            self.facts.sightings[stream.last] = replace(
                self.facts.sightings[stream.last], place=stream.place
            )
            stream.crashed, stream.left = False, 0

    def _chain(self, stream: _Writer, *, handled: bool) -> None:
        """An exception came of the one before: in its handling, or because of it."""
        self._attention = max(self._attention, _ATTENTION)
        if not handled:
            stream.follows = True
        elif stream.last is not None:
            before = self.facts.sightings[stream.last]
            if before.kind is FaultKind.CODE:
                self.facts.sightings[stream.last] = replace(before, is_handled=True)

    def _close(self, stream: _Writer, text: str) -> None:
        """A traceback ends with its exception."""
        if stream.left > 0 and _EXCEPTION.match(text) is not None:
            stream.left = 0

    def _exception(self, text: str, stream: _Writer) -> Sighting | None:
        """An exception that no signature knows: the ledger's words for it, else the program's."""
        in_traceback = stream.left > 0
        pattern = _EXCEPTION if in_traceback else EXCEPTION
        match = pattern.match(text) or _UNCAUGHT.search(text)
        if match is None or (in_traceback and not match["name"].lstrip("_")[:1].isalpha()):
            return None
        name = match["name"]
        # What a library raises may be the machine's fault; what the program raises is its own word.
        is_own = in_traceback and stream.place != "" and stream.place == stream.innermost
        # A RuntimeError at a line that raises nothing came out of torch's own code below it.
        is_own = is_own and (stream.raises or name != "RuntimeError")
        stream.left = 0
        self._attention = max(self._attention, _AFTER_EXCEPTION)
        is_empty = name == "Exception" and not match["text"]  # torch's, round a spawned rank's own
        if _WRAPPERS.search(name) or _IN_WORKER.search(text) or is_empty:
            return None
        details = {"exception": name}
        cause = cause_in(text)
        if cause is not None and cause in _OF_WORDS:
            kind, role, certainty = _OF_WORDS[cause]
            return _seen(f"ledger-{cause.value}", kind, role, certainty, details)
        if in_traceback and stream.loads:
            kind, sure = FaultKind.CHECKPOINT, Certainty.LIKELY
            return _seen("checkpoint-read", kind, Role.CAUSE, sure, details)
        sure = Certainty.CERTAIN if is_own else Certainty.LIKELY
        advice: tuple[str, ...] = ()
        if _OF_CHILD.search(text):
            sure, advice = Certainty.POSSIBLE, _READ_THE_CHILD
        return _seen(f"exception-{name}", FaultKind.CODE, Role.CAUSE, sure, details, advice=advice)


def _seen(
    sign: str,
    kind: FaultKind,
    role: Role,
    certainty: Certainty,
    details: dict[str, str],
    *,
    advice: tuple[str, ...] = (),
) -> Sighting:
    """What a line says of a fault, before it is known which line it is."""
    return Sighting(sign, kind, role, certainty, "", "", details=details, advice=advice)


def _has_place(sign: str, role: Role) -> bool:
    return sign == FATAL or sign.startswith("exception") or role is Role.CAUSE


def _sure(signature: Signature, text: str, *, inside: bool) -> Certainty:
    """How sure a signature's fault is in this line: a program may print any words and go on."""
    if signature.certainty is not Certainty.CERTAIN or signature.says_so is Speaker.SYSTEM:
        return signature.certainty
    begins = EXCEPTION.match(text) or (inside and _EXCEPTION.match(text))
    return Certainty.CERTAIN if begins else Certainty.LIKELY


def _candidates(block: bytes, words: tuple[bytes, ...]) -> list[int]:
    """Where lines begin that hold one of the words, in order.

    What a progress bar draws over itself are lines of their own. Lines that differ in digits alone
    are searched once: most lines of a long log are the same but for their numbers.
    """
    shapes = block.translate(_NEWLINES, _DIGITS).split(b"\n")
    wanted = _with_a_word(b"\n".join(set(shapes)), words)
    if not wanted:
        return []
    ends = [match.start() for match in _END.finditer(block)]
    return [
        start
        for start, shape in zip([0, *(end + 1 for end in ends)], shapes, strict=True)
        if shape in wanted
    ]


def _with_a_word(lines: bytes, words: tuple[bytes, ...]) -> set[bytes]:
    """The lines that hold one of the words."""
    hits: set[bytes] = set()
    # The different words of a block are a small part of it: most of ours are soon found missing.
    vocabulary = b" ".join(set(lines.split()))
    for word in words:
        if max(word.split(), key=len) not in vocabulary:
            continue
        at, end = lines.find(word), 0
        while at >= 0:
            # From the last line's end on: all may be one line.
            start = max(end, lines.rfind(b"\n", end, at) + 1)
            stop = lines.find(b"\n", at)
            end = len(lines) if stop < 0 else stop
            hits.add(lines[start:end])
            at = lines.find(word, end)
    return hits


def _line_end(block: bytes, at: int) -> int:
    end = _END.search(block, at)
    return len(block) if end is None else end.start()
