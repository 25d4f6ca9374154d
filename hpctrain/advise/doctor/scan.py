"""Scan one log as a stream of blocks for what it says of faults, in bounded memory.

A block is searched for a few words at once; only lines with one of them, and those of a traceback
that has begun, are taken apart. A log may hold anything: nothing raises.
tests/unit/doctor/test_corpus.py, test_judge.py and test_losses.py hold the promises.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hpctrain.advise.doctor.faults import OF_WORDS, Certainty, LogFacts, Role, Sighting
from hpctrain.advise.doctor.lines import FORMS, LINES, LONGEST_LINE, clock, plain
from hpctrain.advise.doctor.signature import EXCEPTION, FATAL, packaged
from hpctrain.ledger.history.run_state import cause_in

if TYPE_CHECKING:
    from hpctrain.advise.doctor.signature import Signature, SignatureTable

SHOWN = 600
"""Characters of a line that are kept."""
KEPT_OF_KIND = 3
"""Sightings of one signature by one rank that are kept; all are counted."""
MOST_SIGHTINGS = 4000
"""Of one log: ranks times signatures that a job of thousands of ranks may show."""
MOST_STREAMS = 20_000
_AFTER: dict[str, int] = LINES["after"]

_TRACEBACK, _FRAME, _PASSED_ON = FORMS["traceback"], FORMS["frame"], FORMS["passed_on"]
_LIBRARY, _LAUNCHER, _LOADS, _NO_END = (
    re.compile("|".join(LINES["tracebacks"][name]))
    for name in ("libraries", "launchers", "loads", "no_end")
)
_WRAPPERS = re.compile(rf"(?:^|\.)(?:{'|'.join(LINES['tracebacks']['wrappers'])})$", re.IGNORECASE)
_NEWLINES, _DIGITS = bytes.maketrans(b"\r", b"\n"), b"0123456789"
_LOSS, _LOSS_NAME, _NOT_TRAINING = (
    re.compile(LINES["losses"][name].encode()) for name in ("value", "name", "not_training")
)
_REMEMBERED, _MOST_SERIES, _MOST_WORDS, _WORDS, _LEAST, _RISE, _STAYED = (
    LINES["losses"][name]
    for name in ("remembered", "most_series", "most_words", "words", "least", "rise", "stayed")
)


@dataclass
class _LogStream:
    """What one writer is in the middle of."""

    left: int = 0  # lines of its traceback that are still looked at
    place: str = ""  # the innermost line of the program itself so far
    innermost: str = ""  # the innermost line of all
    cut_at: str = ""  # the innermost line of an open traceback that is no launcher's
    is_ignored: bool = False  # Python ignores this traceback's error
    follows: bool = False  # what comes next follows from the exception before
    last: int | None = None  # where its last exception stands among the sightings
    failed: int | None = None  # the rank in a launcher's table of failures
    crashed: bool = False  # the next line of the program itself is where it crashed
    raises: bool = False  # the innermost line is one that raises
    loads: bool = False  # a function that reads a checkpoint is among the lines

    def begin(self, lines: int) -> None:
        """A traceback has begun, of which so many lines are looked at."""
        self.left, self.place, self.innermost, self.cut_at = lines, "", "", ""
        self.raises = self.loads = False


@dataclass
class LogScanner:
    """Reads one log, block by block."""

    source: str
    rank: int | None = None  # who writes it, where its name has that
    signatures: SignatureTable | None = None  # what to look for; None: those of the package
    attempt: int | None = field(default=None, kw_only=True)  # lines that name others are left out

    def __post_init__(self) -> None:
        self.facts = LogFacts(self.source)
        self._table = self.signatures or packaged()
        self._line = self._offset = self._attention = 0
        self._streams: dict[str, _LogStream] = {}
        self._kept: Counter[tuple[str, int | None]] = Counter()
        self._losses = LossWatch()

    def feed(self, block: bytes) -> None:
        """Read a block of whole lines, each ended by a newline but for the log's last.

        What a progress bar draws over itself are lines of their own, which are not counted. Lines
        that differ in digits alone are searched once.
        """
        self._losses.feed(block, self._offset, self._line)
        shapes = block.translate(_NEWLINES, _DIGITS).split(b"\n")
        wanted = _with_a_word(b"\n".join(set(shapes)), self._table.words)
        if wanted or self._attention:
            at, number = 0, self._line + 1
            for raw, shape in zip(block.translate(_NEWLINES).split(b"\n"), shapes, strict=True):
                if shape in wanted:
                    self._look(raw, number, self._offset + at)
                elif self._attention and at < len(block):
                    self._attention -= 1
                    self._look(raw, number, self._offset + at)
                at += len(raw) + 1
                number += block[at - 1 : at] == b"\n"
        self._line += block.count(b"\n")
        self._offset += len(block)
        self.facts.lines = self._line + (not block.endswith(b"\n") and bool(block))

    def finish(self) -> LogFacts:
        """Return all that was read, with the tracebacks whose ends are not in the log."""
        facts, text = self.facts, "a traceback without its end"
        at, sure = (facts.source, facts.lines, self._offset, self.rank), Certainty.POSSIBLE
        for stream in self._streams.values():
            if stream.left > 0 and stream.cut_at and not stream.is_ignored:
                cut = Sighting("traceback-cut", "code", Role.CAUSE, sure, text, *at)
                place = stream.place or stream.cut_at
                facts.sightings.append(replace(cut, place=place, is_handled=True))
        facts.progress = tuple(self._losses.offsets)
        facts.sightings += self._losses.sightings(facts.source)
        return facts

    def _look(self, raw: bytes, number: int, offset: int) -> None:
        """Take one line apart, and keep what it says of a fault."""
        text = raw[:LONGEST_LINE].decode("utf-8", "replace")
        of = FORMS["of_attempt"].match(text) if self.attempt is not None else None
        if of is not None and int(of["attempt"]) != self.attempt:
            return
        line = plain(text)
        if len(self._streams) > MOST_STREAMS:
            self._streams.clear()
        stream = self._streams.setdefault(line.stream, _LogStream())
        # A launcher's table of failures indents each line, and so a rank's traceback in it.
        words = line.text if stream.failed is None else line.text.removeprefix("  ")
        reading = self._read(words, stream)
        if reading is None:
            return
        if stream.is_ignored and reading.role is Role.CAUSE:
            stream.is_ignored = False
            return
        ranks = (line.rank, stream.failed, self.rank, reading.details.get("rank"))
        rank = next((int(rank) for rank in ranks if rank is not None), None)
        sighting = replace(
            reading,
            text=words.strip()[:SHOWN],
            source=self.facts.source,
            line=number,
            offset=offset,
            rank=rank,
            node=reading.details.get("node") or line.node,
            clock=clock(text),
            is_late=reading.is_late or stream.failed is not None,
            place=stream.place if reading.role is Role.CAUSE or reading.sign == FATAL else "",
            is_handled=stream.follows and reading.kind == "code",
        )
        facts, key = self.facts, (sighting.sign, rank)
        facts.counts[sighting.sign] += 1
        self._kept[key] += 1
        stream.last = None
        if self._kept[key] <= KEPT_OF_KIND and len(facts.sightings) < MOST_SIGHTINGS:
            stream.last = len(facts.sightings)
            facts.sightings.append(sighting)

    def _read(self, text: str, stream: _LogStream) -> Sighting | None:
        """What a line says: of a fault, or of what its stream is in the middle of."""
        if "NET/" in text and (match := FORMS["network"].search(text)) is not None:
            self.facts.networks.setdefault(match["network"], match["what"].strip())
        if any(one.fits(text) for one in self._table.harmless):
            return None
        begun = _TRACEBACK.search(text)
        if self._belongs(text, stream) and (begun is None or begun[0] == text.strip()):
            return None
        for signature in self._table.faults:
            if (match := signature.fits(text)) is not None:
                return self._signed(signature, match, stream)
        return self._exception(text, stream) if begun is None else _mentioned(text)

    def _signed(self, signature: Signature, match: re.Match[str], stream: _LogStream) -> Sighting:
        """What a signature knows of a line: a program may print any words and continue."""
        text, sure = match.string, Certainty(signature.certainty)
        inside = stream.left > 0 and FORMS["error_in_traceback"].match(text) is not None
        if sure is Certainty.CERTAIN and signature.says_so == "program":
            sure = sure if inside or EXCEPTION.match(text) else Certainty.LIKELY
        if inside:
            stream.left = 0
        if signature.name == FATAL and stream.left <= 0:
            # Its place stands behind this line; a traceback before it has it as well.
            stream.begin(self._watch("traceback"))
        return Sighting(
            signature.name,
            signature.fault,
            Role(signature.role),
            sure,
            is_late=signature.is_late,
            details={name: value for name, value in match.groupdict().items() if value},
            advice=signature.advice,
        )

    def _watch(self, what: str) -> int:
        """Have the lines looked at that come after it; return how many."""
        self._attention = max(self._attention, _AFTER[what])
        return _AFTER[what]

    def _belongs(self, text: str, stream: _LogStream) -> bool:
        """Return whether the line only belongs to a traceback, of which the place is kept."""
        if _TRACEBACK.search(text) is not None:
            stream.begin(self._watch("traceback"))
            return True
        if (between := FORMS["between"].match(text)) is not None:
            self._watch("traceback")
            stream.is_ignored = stream.is_ignored or between["ignored"] is not None
            stream.follows = stream.follows or between["chained"] is not None
            last = None if stream.last is None else self.facts.sightings[stream.last]
            if between["handled"] and last is not None and last.kind == "code":
                self._change(stream, is_handled=True)
            return True
        if (ends := FORMS["ends"].search(text)) is not None:
            self._watch(ends[0])
        if (table := FORMS["table_rank"].match(text)) is not None:
            stream.failed = int(table["rank"])
        elif text.startswith("==="):
            stream.failed = None
        frame = _FRAME.match(text)
        if stream.left <= 0:
            if frame is None or not frame["comma"]:  # without it it is faulthandler's
                return False
            stream.begin(self._watch("exception"))  # its beginning is not in the log
        stream.left -= 1
        if (frame := frame or FORMS["rich_frame"].match(text)) is not None:
            self._frame(frame, stream)
            return True
        stream.crashed = stream.crashed or FORMS["crashed"].match(text) is not None
        stream.raises = stream.raises or FORMS["raises"].match(text) is not None
        return text.startswith((" ", "\t", "~", "^"))

    def _frame(self, frame: re.Match[str], stream: _LogStream) -> None:
        """Keep what is reported of a traceback's places."""
        stream.innermost = f"{frame['file']}:{frame['line']} in {frame['function']}"
        stream.raises = False
        stream.loads = stream.loads or _LOADS.match(frame["function"]) is not None
        if _LAUNCHER.search(frame["file"]) is None:
            stream.cut_at = stream.innermost
        if _LIBRARY.search(frame["file"]) is None:
            stream.place = stream.innermost
            if stream.crashed and stream.last is not None:
                self._change(stream, place=stream.place)
                stream.crashed, stream.left = False, 0

    def _change(self, stream: _LogStream, **changes: Any) -> None:
        at = stream.last or 0
        self.facts.sightings[at] = replace(self.facts.sightings[at], **changes)

    def _exception(self, text: str, stream: _LogStream) -> Sighting | None:
        """An exception that no signature knows: the ledger's words for it, else the program's."""
        in_traceback = stream.left > 0
        pattern = FORMS["error_in_traceback"] if in_traceback else EXCEPTION
        match = pattern.match(text) or FORMS["uncaught"].search(text)
        if match is None:
            return None if in_traceback else _mentioned(text)
        name = match["name"]
        # What a library raises may be the machine's fault; what the program raises is its own word.
        is_own = in_traceback and stream.place != "" and stream.place == stream.innermost
        # A RuntimeError at a line that raises nothing came out of torch's own code below it.
        is_own = is_own and (stream.raises or name != "RuntimeError")
        stream.left = 0
        self._watch("exception")
        if _PASSED_ON.search(text):  # its own traceback follows, if the log has it
            return _mentioned(text)
        is_empty = name == "Exception" and not match["text"]  # torch's, round a spawned rank's own
        if _WRAPPERS.search(name) is not None or is_empty:
            return None
        sign, kind, sure = f"exception-{name}", "code", Certainty.LIKELY
        if (cause := cause_in(text)) is not None and cause in OF_WORDS:
            kind, role, sure = OF_WORDS[cause]
            return Sighting(f"ledger-{cause.value}", kind, role, sure, details={"exception": name})
        if in_traceback and stream.loads:
            sign, kind = "checkpoint-read", "checkpoint"
        elif is_own:
            sure = Certainty.CERTAIN
        return Sighting(sign, kind, Role.CAUSE, sure, details={"exception": name})


def _mentioned(text: str) -> Sighting | None:
    """Return an exception that a line reports behind other words, as loggers and notebooks do."""
    if _NO_END.search(text) is not None:
        return None
    names = (match["name"] for match in FORMS["reported"].finditer(text))
    name = next((name for name in names if _WRAPPERS.search(name) is None), None)
    if (passed_on := _PASSED_ON.search(text)) is not None:
        name = passed_on["name"]
    if name is None:
        return None
    sure, details = Certainty.POSSIBLE, {"exception": name}
    return Sighting("exception-reported", "code", Role.HINT, sure, details=details)


def _with_a_word(lines: bytes, words: dict[bytes, list[bytes]]) -> set[bytes]:
    """The lines that hold one of the words."""
    hits: set[bytes] = set()
    # The different words of a block are a small part of it: most of ours are soon found missing.
    vocabulary = b" ".join(set(lines.split()))
    for word, parts in words.items():
        if not all(part in vocabulary for part in parts):
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


@dataclass(slots=True)
class _Series:
    """One loss by its name, as it is printed."""

    name: str
    values: int = 0  # how many were finite and usual so far
    mean: float = 0.0  # of those, with the newest counting most
    limit: float = math.inf  # a value above it is a rise; infinite while too few are known
    is_nan: bool = False  # the odd values in a row, at the end, are no numbers; else they are high
    odd: int = 0  # how many they are
    first: tuple[int, int] = (0, 0)  # line and offset of their first
    risen: float = 0.0  # their first value

    def usual(self, value: float) -> None:
        """Count the next value, one as those before it."""
        self.odd = 0
        self.values += 1
        self.mean += (value - self.mean) * max(1 / self.values, 0.05)
        self.limit = _RISE * self.mean if self.values >= _LEAST and self.mean > 0 else math.inf

    def unusual(self, value: float, line: int, offset: int) -> None:
        """Count the next value, one that is no number or far higher."""
        is_nan = not math.isfinite(value)
        if not self.odd or is_nan is not self.is_nan:
            self.is_nan, self.odd, self.first, self.risen = is_nan, 0, (line, offset), value
        self.odd += 1


class LossWatch:
    """Follows the losses of one log: what lines.toml says that a loss is."""

    def __init__(self) -> None:
        self.offsets: deque[int] = deque(maxlen=_REMEMBERED)  # of the last ones, oldest first
        self._series: dict[bytes, _Series] = {}
        self._before: dict[bytes, _Series | None] = {}

    def feed(self, block: bytes, offset: int, line: int) -> None:
        """Read a block of whole lines that lies at an offset of the log, behind so many lines."""
        before, number, counted = self._before, line + 1, 0
        for match in _LOSS.finditer(block):
            start = match.start()
            words = block[max(0, start - _WORDS) : start]
            try:
                series = before[words]
            except KeyError:
                series = self._named(words)
            if series is None:
                continue
            self.offsets.append(offset + start)
            value = float(match[1])
            if value <= series.limit and value != math.inf:
                series.usual(value)
            else:
                number += block.count(b"\n", counted, start)
                counted = start
                series.unusual(value, number, offset + start)

    def _named(self, words: bytes) -> _Series | None:
        """Return the series of which these words tell; None where it is no training loss."""
        match = _LOSS_NAME.search(words)
        series = None if match is None else self._series.get(match[0])
        is_new = match is not None and series is None and len(self._series) < _MOST_SERIES
        if match is not None and is_new and _NOT_TRAINING.search(match[0]) is None:
            series = self._series[match[0]] = _Series(match[0].decode("utf-8", "replace") + "oss")
        if len(self._before) > _MOST_WORDS:
            self._before.clear()
        self._before[words] = series
        return series

    def sightings(self, source: str) -> list[Sighting]:
        """Return what the losses tell at the log's end."""
        out = []
        for loss in self._series.values():
            if loss.is_nan and loss.odd > bool(loss.values):
                sign, kind = "loss-nan", "nan"
                sure = Certainty.LIKELY if loss.odd > 1 else Certainty.POSSIBLE
                text = f"{loss.name} is no number from here to the end ({loss.odd} times)"
            elif not loss.is_nan and loss.odd >= _STAYED:
                sign, kind, sure = "loss-spike", "loss_spike", Certainty.LIKELY
                rise = f"from about {loss.mean:.3g} to {loss.risen:.3g}"
                text = f"{loss.name} rose {rise} and stayed high"
            else:
                continue
            out.append(Sighting(sign, kind, Role.HINT, sure, text, source, *loss.first))
        return out
