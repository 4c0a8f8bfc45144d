"""Whether requests should share a denoising step: found by trials."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

logger = logging.getLogger(__name__)

V = TypeVar("V")

#: Of so many numbers of pixels, the latest, is known what their units take: clients may ask for any.
PIXELS_KNOWN = 256
# A shared unit must take less than this of what its members take apart, or the first ones wait for nothing.
_WORTH = math.log(0.95)
_FIRST = 6  # trials of a size before there is a verdict; until then one unit in two is for a trial
_KEPT = 16  # trials that are remembered
_EVERY = 64  # units from one trial of a size to the next while the verdict is clear: times change
_EVERY_UNCLEAR = 8  # and while it is not
_NEAR = 4  # units by which both halves of a trial may be apart


class _Alone(NamedTuple):
    """A request's unit by itself: which unit it was, counted at its pixels, its rows, and what it took."""

    unit: int
    rows: int
    seconds: float


@dataclasses.dataclass
class _Size:
    """About so many rows in one forward. ``ratios``: log(seconds together / seconds apart) of each trial."""

    ratios: collections.deque[float] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=_KEPT))
    tried: int = 0  # in which unit the last time
    pays: bool = True
    clear: bool = False

    def learn(self, ratio: float, unit: int) -> None:
        """The verdict changes only by more than the standard error of the mean, so noise alone seldom turns it."""
        self.ratios.append(math.log(ratio))
        self.tried = unit
        if len(self.ratios) < _FIRST:
            return
        off = statistics.fmean(self.ratios) - _WORTH
        self.clear = abs(off) > statistics.stdev(self.ratios) / math.sqrt(len(self.ratios))
        if self.clear:
            self.pays = off < 0

    def is_due(self, unit: int) -> bool:
        every = _EVERY if self.clear else _EVERY_UNCLEAR
        return len(self.ratios) < _FIRST or unit - self.tried >= every


@dataclasses.dataclass
class _Pixels:
    units: int = 0
    alone: _Alone | None = None  # the latest, until a trial has used it
    sizes: dict[int, _Size] = dataclasses.field(default_factory=dict)  # by :func:`_size`

    @property
    def knows_alone(self) -> bool:
        return self.alone is not None and self.units - self.alone.unit < _NEAR


class Sharing:
    """What sharing units of one stage has saved or cost, by pixels and rows (1, 2 to 3, 4 to 7, 8 to 15, ...).

    A trial is a unit of one request by itself and, right before or after it, a shared one: only what is measured at
    about the same time is compared, since a machine that others use as well is at times several times slower. Of a size
    that has not been tried enough, shared units and single ones take turns; later it is tried once in a while,
    whatever its verdict. Where all of a group should not share, its first half is asked about, and so on.
    """

    def __init__(self, seconds: Callable[[int, int], float | None]) -> None:
        """``seconds(pixels, rows)`` is what a unit is expected to take."""
        self._seconds = seconds
        self._pixels: dict[int, _Pixels] = {}

    def share(self, pixels: int, rows: Sequence[int]) -> int:
        """How many of a group, with these rows each, should share its next unit: 1 is none."""
        known = self._pixels.get(pixels)
        if known is None:
            return len(rows)
        count = len(rows)
        while count > 1:
            size = known.sizes.get(_size(rows[:count]))
            if size is None:
                return count
            if size.is_due(known.units):
                return count if known.knows_alone else 1
            if size.pays:
                return count
            count //= 2
        return 1

    def learn(self, pixels: int, rows: Sequence[int], seconds: float) -> None:
        """A unit of requests with these rows each has taken so long. Not to be told of the first of its kind, in which
        libraries set themselves up."""
        known = latest(self._pixels, pixels, _Pixels)
        known.units += 1
        if len(rows) == 1:
            known.alone = _Alone(known.units, rows[0], seconds)
            return
        size = known.sizes.setdefault(_size(rows), _Size())
        if known.alone is not None and known.knows_alone:
            ratio = seconds / self._apart(pixels, rows, known.alone)
            known.alone = None
            size.learn(ratio, known.units)
            logger.debug(
                "%d requests of %d pixels take %.3f together of what they take apart: %s",
                len(rows), pixels, ratio, "they share" if size.pays else "they do not share",
            )  # fmt: skip

    def _apart(self, pixels: int, rows: Sequence[int], alone: _Alone) -> float:
        """Seconds of all by themselves, as things went when one ran alone."""
        expected = sum(self._seconds(pixels, each) or 0.0 for each in rows)
        return alone.seconds * expected / (self._seconds(pixels, alone.rows) or expected)


def latest(known: dict[int, V], pixels: int, make: Callable[[], V]) -> V:
    """The entry of ``pixels``, now the last, as of an LRU cache with :data:`PIXELS_KNOWN` entries."""
    entry = known[pixels] = known.pop(pixels, None) or make()
    if len(known) > PIXELS_KNOWN:
        del known[next(iter(known))]
    return entry


def _size(rows: Sequence[int]) -> int:
    return sum(rows).bit_length()
