r"""The losses and loss scales that a log prints: where they cease to be numbers, rise, or overflow.

Pure, in bounded memory. A loss is what stands behind a word that ends with "loss"; those of
validation are left out. tests/unit/doctor/test_losses.py holds the promises.
"""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass

from hpctrain.advise.doctor.faults import Certainty, FaultKind
from hpctrain.advise.doctor.sighting import Sighting
from hpctrain.advise.doctor.signature import Role

_LOSS = re.compile(
    rb"oss['\"]?\]?\s{0,3}[:=]?\s{0,3}(?:tensor\()?(?P<value>[-+]?(?:[Nn]a[Nn]|[Ii]nf|\d+(?:\.\d*)?"
    rb"(?:[eE][-+]?\d+)?))(?![\w%]|/\d)"
)
_NAME = re.compile(rb"(?<![\w./-])[\w./-]*[lL]$")
_SCALE = re.compile(
    rb"(?:Attempted loss scale: (?P<tried>[\d.]+), reducing to (?P<to>[\d.e+-]+)"
    rb"|reducing loss scale to (?P<apex>[\d.e+-]+))"
)
_NOT_TRAINING = re.compile(rb"val|eval|test|aux|best|valid", re.IGNORECASE)
REMEMBERED = 64
MOST_SERIES = 16
LEAST = 20
"""Values before which nothing is said of a rise."""
RISE = 3.0
STAYED = 10
"""Values for which a rise must last."""
LOWEST_SCALE = 1.0
_WORDS = 16
"""Bytes before "oss" that tell which loss it is."""
_MOST_WORDS = 4096


@dataclass(slots=True)
class _Series:
    """One loss by its name.

    Attributes:
        name: As it is printed.
        values: How many were finite and usual so far.
        mean: Of those, with the newest counting most.
        limit: A value above it is a rise; infinite while too few are known.
        first_nan: Line and offset of the first that was none since the last number.
        nans: How many there were in a row.
        high_since: Line, offset, value and mean before the rise.
        high: For how many values it has lasted.
    """

    name: str
    values: int = 0
    mean: float = 0.0
    limit: float = math.inf
    first_nan: tuple[int, int] | None = None
    nans: int = 0
    high_since: tuple[int, int, float, float] | None = None
    high: int = 0

    def usual(self, value: float) -> None:
        """The next value, one as those before it."""
        if self.nans or self.high:
            self.first_nan, self.nans, self.high_since, self.high = None, 0, None, 0
        self.values += 1
        self.mean += (value - self.mean) * max(1 / self.values, 0.05)
        self.limit = RISE * self.mean if self.values >= LEAST and self.mean > 0 else math.inf

    def unusual(self, value: float, line: int, offset: int) -> None:
        """The next value, one that is no number or far higher."""
        if not math.isfinite(value):
            self.first_nan = self.first_nan or (line, offset)
            self.nans += 1
            return
        self.first_nan, self.nans = None, 0
        self.high_since = self.high_since or (line, offset, value, self.mean)
        self.high += 1


class LossWatch:
    """Follows the losses of one log.

    Attributes:
        offsets: Where the last losses were printed, oldest first.
    """

    def __init__(self) -> None:
        self.offsets: deque[int] = deque(maxlen=REMEMBERED)
        self._series: dict[bytes, _Series] = {}
        self._before: dict[bytes, _Series | None] = {}
        self._scale: tuple[int, int, float, str] | None = None
        self._overflows = 0

    def feed(self, block: bytes, offset: int, line: int) -> None:
        """Read a block of whole lines.

        Args:
            block: Its bytes.
            offset: Where it lies in the log.
            line: Lines before it.
        """
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
        if b"loss scale" in block:
            self._scales(block, offset, line)

    def _named(self, words: bytes) -> _Series | None:
        """The series of which these words tell; None where it is no training loss."""
        match = _NAME.search(words)
        series = None
        if match is not None and _NOT_TRAINING.search(match[0]) is None:
            name = match[0]
            series = self._series.get(name)
            if series is None and len(self._series) < MOST_SERIES:
                series = self._series[name] = _Series(name.decode("utf-8", "replace") + "oss")
        if len(self._before) > _MOST_WORDS:
            self._before.clear()
        self._before[words] = series
        return series

    def _scales(self, block: bytes, offset: int, line: int) -> None:
        number, counted = line + 1, 0
        for match in _SCALE.finditer(block):
            self._overflows += 1
            text = match["to"] or match["apex"]
            try:
                scale = float(text.rstrip(b".,"))
            except ValueError:
                continue
            number += block.count(b"\n", counted, match.start())
            counted = match.start()
            shown = match[0].decode("ascii", "replace")
            self._scale = (number, offset + match.start(), scale, shown)

    def sightings(self, source: str) -> list[Sighting]:
        """What the losses tell at the log's end."""
        out: list[Sighting] = []

        def tell(kind: FaultKind, sign: str, text: str, at: tuple[int, int], *, sure: bool) -> None:
            certainty = Certainty.LIKELY if sure else Certainty.POSSIBLE
            out.append(Sighting(sign, kind, Role.HINT, certainty, text, source, *at))

        for series in self._series.values():
            nan, rise = series.first_nan, series.high_since
            if nan is not None and (series.nans > 1 or series.values == 0):
                text = f"{series.name} is no number from here to the end ({series.nans} times)"
                tell(FaultKind.NAN, "loss-nan", text, nan, sure=series.nans > 1)
            elif rise is not None and series.high >= STAYED:
                before, after = f"{rise[3]:.3g}", f"{rise[2]:.3g}"
                text = f"{series.name} rose from about {before} to {after} and stayed high"
                tell(FaultKind.LOSS_SPIKE, "loss-spike", text, rise[:2], sure=True)
        if self._scale is not None and self._scale[2] <= LOWEST_SCALE:
            text = f"{self._scale[3]} ({self._overflows} overflows)"
            tell(FaultKind.FP16_OVERFLOW, "scale-fell", text, self._scale[:2], sure=True)
        return out
