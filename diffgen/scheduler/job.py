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
        served: when it last ran, in monotonic seconds; its arrival at first.
        done: units of all stages that it has run.
        alone: a unit that it shared has failed, so it runs by itself until that unit has passed.
        suspect: the server has died while it ran, so it always runs by itself.
    """

    id: str
    client: bytes
    resolved: Resolved
    arrived: float
    started: float | None = None
    position: Position | None = None
    served: float = 0.0
    done: int = 0
    alone: bool = False
    suspect: bool = False
    timings: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def outputs(self) -> int:
        return self.resolved.params.num_outputs_per_prompt or 1

    @property
    def work_left(self) -> float:
        """About how much is still to be computed, in pixels x steps; for comparing requests of one model."""
        params = self.resolved.params
        size = (params.width or 1) * (params.height or 1) * (params.num_frames or 1) * self.outputs
        return max(1, (params.num_inference_steps or 1) - self.done) * size

    def batch_key(self) -> Hashable:
        """Jobs with equal keys may share a unit; None shares with no other."""
        if self.position is None or self.position.key is None or self.alone or self.suspect:
            return None
        return (self.position.stage, self.position.key)
