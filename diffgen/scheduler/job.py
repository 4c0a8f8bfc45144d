"""Rank 0's view of a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import NamedTuple

from diffgen.params import BATCH_FIELDS, Resolved
from diffgen.scheduler.plan import Admit, Position


class Need(NamedTuple):
    """Bytes of memory on a rank: what a request holds while it is in flight, and what one unit of it works with."""

    held: int
    work: int


NOTHING = Need(0, 0)


class Kind(NamedTuple):
    """What the time of a unit of a request by itself depends on, as far as its parameters tell."""

    pixels: int  # of one output, all frames
    outputs: int
    branches: int


@dataclasses.dataclass(slots=True)
class Job:
    """One accepted request. ``position`` is None until the ranks hold it.

    Attributes:
        client: identity of the connection to answer.
        branches: guidance branches: what the denoiser computes for each output.
        arrived, started, deadline: monotonic seconds.
        served: when it last ran, in monotonic seconds; its arrival at first.
        done: units of all stages that it has run.
        alone: a unit that it shared has failed, so it runs by itself until that unit has passed.
        suspect: the server has died while it ran, so it always runs by itself.
        kind: of equal kinds, units take equally long.
        rows: what it adds to a forward of the denoiser.
        size: bytes that it takes in the plan which admits it.
    """

    id: str
    client: bytes
    resolved: Resolved
    arrived: float
    branches: int = 1
    deadline: float | None = None
    need: Need = NOTHING
    size: int = 0
    started: float | None = None
    position: Position | None = None
    served: float = 0.0
    done: int = 0
    alone: bool = False
    suspect: bool = False
    timings: dict[str, float] = dataclasses.field(default_factory=dict)
    # Looked at for each request in each tick.
    interactive: bool = dataclasses.field(init=False)
    kind: Kind = dataclasses.field(init=False)
    rows: int = dataclasses.field(init=False)
    steps: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        params = self.resolved.params
        self.interactive = params.priority != "batch"
        pixels = (params.width or 1) * (params.height or 1) * (params.num_frames or 1)
        outputs = params.num_outputs_per_prompt or 1
        self.kind, self.rows = Kind(pixels, outputs, self.branches), outputs * self.branches
        self.steps = params.num_inference_steps or 1

    @property
    def outputs(self) -> int:
        return self.kind.outputs

    @property
    def admit(self) -> Admit:
        """It, for the ranks to hold."""
        return Admit(self.id, self.resolved.params, self.resolved.warnings)

    @property
    def pixels(self) -> int:
        """Of one output, all frames."""
        return self.kind.pixels

    @property
    def pixel_steps_left(self) -> float:
        """About how much is still to be computed, for comparing requests while no times are known."""
        return max(1, self.steps - self.done) * self.pixels * self.outputs

    def batch_key(self) -> Hashable:
        """Jobs with equal keys may share a unit; None shares with no other."""
        if self.position is None or self.position.key is None or self.alone or self.suspect:
            return None
        return (self.position.stage, self.position.key)

    def shape_key(self) -> Hashable:
        """Equal for jobs that will have equal batch keys, as far as the parameters tell; None shares with no other."""
        if self.alone or self.suspect:
            return None
        return tuple(getattr(self.resolved.params, name) for name in BATCH_FIELDS)
