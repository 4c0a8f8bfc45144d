"""Rank 0's view of a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from diffgen.params import Resolved
from diffgen.scheduler.plan import Position


@dataclasses.dataclass(slots=True)
class Job:
    """One accepted request. ``position`` is None until the ranks hold it.

    Attributes:
        client: identity of the connection to answer.
        arrived, started: monotonic seconds.
        last_tick: the tick that ran it last, for taking turns.
        alone: a unit that it shared has failed, so it runs by itself until that unit has passed.
        suspect: the server has died while it ran, so it always runs by itself.
    """

    id: str
    client: bytes
    resolved: Resolved
    arrived: float
    started: float | None = None
    position: Position | None = None
    last_tick: int = 0
    alone: bool = False
    suspect: bool = False
    timings: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def outputs(self) -> int:
        return self.resolved.params.num_outputs_per_prompt or 1

    def batch_key(self) -> Hashable:
        """Jobs with equal keys may share a unit; None shares with no other."""
        if self.position is None or self.position.key is None or self.alone or self.suspect:
            return None
        return (self.position.stage, self.position.key)
