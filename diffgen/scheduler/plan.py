"""What rank 0 broadcasts each tick, and what it learns from it."""

from __future__ import annotations

from typing import Any

import msgspec

from diffgen.errors import ErrorInfo
from diffgen.params import SamplingParams

MAX_UNIT_REQS = 32  # requests in one unit: the vote has a slot for each
MAX_PLAN = 2**28  # bytes of a plan: ranks take it for nonsense if it is larger
MAX_ADMITTED = MAX_PLAN // 2  # of the requests that one plan admits; the rest holds half a million ids


class StageInfo(msgspec.Struct, frozen=True):
    """What the scheduler knows of a stage: see :class:`diffgen.worker.context.Stage`."""

    name: str
    prepares: bool = False
    stepped: bool = False
    encodes: bool = False


class Admit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request that the ranks begin to hold, with its parameters resolved."""

    id: str
    params: SamplingParams
    warnings: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes in a plan."""
        return len(msgspec.msgpack.encode(self))


class TextSlot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where ranks keep an encoded text: to be used, with ``hit``, in place of computing the unit; else to be filled."""

    slot: int
    hit: bool = False


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tick: forget ``drop``, take ``admit``, run the next unit of ``stage`` for ``ids``; or stop.

    ``text`` is of the unit's only request; the slots of ``evict`` are to be emptied before.
    """

    tick: int
    drop: tuple[str, ...] = ()
    admit: tuple[Admit, ...] = ()
    stage: int = 0
    ids: tuple[str, ...] = ()
    text: TextSlot | None = None
    evict: tuple[int, ...] = ()
    stop: bool = False


class Position(msgspec.Struct, frozen=True):
    """Where a request is: ``unit`` of ``units`` are done in stage number ``stage``; ``key`` is its batch key there."""

    stage: int
    name: str
    unit: int
    units: int
    key: Any
    prepares: bool = False  # the stage only makes the request ready for the work that it may share


class Outcome(msgspec.Struct, frozen=True):
    """What a tick did to one request: it moved, it finished (no position), or it failed.

    ``step`` of ``total`` units of ``stage`` are done now; ``kept`` are the bytes of an encoded text that
    the ranks now keep.
    """

    id: str
    stage: str
    step: int
    total: int
    position: Position | None = None
    error: ErrorInfo | None = None
    kept: int = 0

    @property
    def finished(self) -> bool:
        return self.position is None and self.error is None
