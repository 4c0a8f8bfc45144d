"""Which encoded texts the ranks keep, so that a text asked for again need not be encoded again."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from diffgen.params import SamplingParams
from diffgen.scheduler.plan import TextSlot

# All else may change what the text encoders are given or how their output is arranged.
_NO_MATTER = {
    *("seed", "num_outputs_per_prompt", "num_inference_steps", "seconds", "fps", "scheduler", "flow_shift"),
    *("preview_every", "priority", "time_limit", "output_type"),
}


class TextCache:
    """Rank 0's decisions about encoded texts, which every rank follows: what is kept, used again and given up.

    Of equal texts (and whatever else the encoding may depend on) all but the first are hits. Those not used for longest
    go first when there are more than ``limit`` bytes on a rank.
    """

    def __init__(self, limit: int) -> None:
        self.hits = self.misses = self.bytes = 0
        self._limit = limit
        self._kept: dict[Hashable, tuple[int, int]] = {}  # key -> (slot, bytes), least recently used first
        self._waiting: tuple[Hashable, TextSlot] | None = None
        self._evict: list[int] = []
        self._slots = 0

    def look_up(self, params: SamplingParams) -> TextSlot | None:
        """What the ranks are to do in the unit that encodes the text; None: neither use nor keep one."""
        if not self._limit:
            return None
        key = _key(params)
        if key in self._kept:
            self.hits += 1
            self._kept[key] = kept = self._kept.pop(key)
            return TextSlot(kept[0], hit=True)
        self.misses += 1
        self._slots += 1
        slot = TextSlot(self._slots)
        self._waiting = key, slot
        return slot

    def kept(self, size: int) -> None:
        """The ranks have kept what :meth:`look_up` last gave a slot, in ``size`` bytes; 0: it could not be made."""
        waiting, self._waiting = self._waiting, None
        if waiting is None or not size:
            return
        key, slot = waiting
        self._kept[key] = slot.slot, size
        self.bytes += size
        while self.bytes > self._limit:
            oldest = next(iter(self._kept))
            number, freed = self._kept.pop(oldest)
            self._evict.append(number)
            self.bytes -= freed

    def evicted(self) -> tuple[int, ...]:
        """Slots for the ranks to give up, told once."""
        evict, self._evict = tuple(self._evict), []
        return evict


def _key(params: SamplingParams) -> Hashable:
    return tuple(value for name, value in msgspec.structs.asdict(params).items() if name not in _NO_MATTER)
