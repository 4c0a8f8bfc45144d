"""Timesteps: a request's own copy of the noise scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from diffgen.request import Req, Update
from diffgen.worker.context import StageContext
from stages.base import PipelineStage


class MakesScheduler(Protocol):
    def make_scheduler(self, req: Req) -> Any:
        """A new diffusers scheduler for the request, before ``set_timesteps``."""
        ...

    def set_timesteps(self, scheduler: Any, req: Req) -> None:
        """Set it to the request's steps, with whatever else the family's schedule depends on."""
        ...


class TimestepStage(PipelineStage):
    """One unit: the scheduler the request asks for, set to its number of steps."""

    name: ClassVar[str] = "timesteps"
    prepares: ClassVar[bool] = True

    def __init__(self, family: MakesScheduler) -> None:
        self.family = family

    def run(self, reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
        updates = []
        for req in reqs:
            scheduler = self.family.make_scheduler(req)
            self.family.set_timesteps(scheduler, req)
            if hasattr(scheduler, "set_begin_index"):
                # Without it each step looks its index up by value, which waits for the device.
                scheduler.set_begin_index(0)
            updates.append(Update(scheduler=scheduler, timesteps=scheduler.timesteps))
        return updates
