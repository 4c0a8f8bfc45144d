"""Which requests the next tick serves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from diffgen.scheduler.cost import CostModel
from diffgen.scheduler.job import Job
from diffgen.scheduler.plan import MAX_UNIT_REQS

# Seconds without a unit that halve what a request seems to have left: a long one waits behind short ones, but not for
# ever: a thousand times longer, it gets a unit after ten of these.
PATIENCE_S = 5.0
# Of the class batch, some request gets a unit at least this often, however many interactive ones there are.
BATCH_TURN_S = 10.0


@dataclasses.dataclass(frozen=True)
class BatchLimits:
    """The most that shares a forward: outputs, and their pixels of all frames."""

    outputs: int
    pixels: int


class Policy:
    """The order of requests, and who shares a unit. It knows what units take, and when a batch request last ran."""

    def __init__(self, cost: CostModel, limits: BatchLimits) -> None:
        self._cost, self._limits = cost, limits
        self._batch_served = -math.inf

    def ran(self, jobs: Iterable[Job], now: float) -> None:
        """To be told of each unit."""
        if not all(job.interactive for job in jobs):
            self._batch_served = now

    def order(self, jobs: Iterable[Job], now: float) -> list[Job]:
        """``jobs`` as they are served: interactive ones first, and in each class the one that seems shortest.

        Shortest remaining work first has the least mean waiting time, and lets a picture pass a clip at the next unit.
        A request that has waited seems shorter, as does one that only just keeps its deadline. Before all of its class
        goes one whose shared unit has failed, alone, so that the others share the units after it again.
        """
        seconds_left = self._cost.seconds_left if self._cost.known else None

        def seems(job: Job) -> tuple[float, float]:
            if job.alone:
                return -1.0, job.arrived
            work = job.pixel_steps_left if seconds_left is None else seconds_left(job)
            aged = work * 0.5 ** ((now - job.served) / PATIENCE_S)
            spare = job.deadline - now - work if seconds_left is not None and job.deadline is not None else -1.0
            return min(aged, spare) if spare >= 0 else aged, job.arrived

        jobs = sorted(jobs, key=seems)
        interactive = [job for job in jobs if job.interactive]
        batch = [job for job in jobs if not job.interactive]
        if not batch or not interactive:
            return jobs
        last = max(self._batch_served, min(job.arrived for job in batch))
        return [*batch, *interactive] if now - last >= BATCH_TURN_S else [*interactive, *batch]

    def choose(self, jobs: Iterable[Job], now: float, work: float = math.inf) -> list[Job]:
        """The jobs of the next unit: the first in order, and those that should share its forward.

        One that should, but only has to be prepared for that, is prepared before.
        """
        queue = self.order(jobs, now)
        if not queue or queue[0].batch_key() is None:
            return queue[:1]
        group = self._could_share(queue, work)
        assert group[0].position is not None
        group = group[: self._cost.share(group[0].position.name, group)]
        unready = [job for job in group if job.position is None or job.position.prepares]
        return unready[:1] or group

    def _could_share(self, queue: list[Job], work: float) -> list[Job]:
        """The first in the queue and all that may share its unit, now or once they are prepared: within the limits and
        ``work`` bytes of memory, which the first alone may exceed."""
        first = queue[0]
        group, outputs, pixels = [first], first.outputs, first.pixels * first.outputs
        work -= first.need.work
        for job in queue[1:]:
            if len(group) == MAX_UNIT_REQS:
                break
            outputs_with, pixels_with = outputs + job.outputs, pixels + job.pixels * job.outputs
            fits = outputs_with <= self._limits.outputs and pixels_with <= self._limits.pixels and job.need.work <= work
            unready = job.position is None or job.position.prepares
            if not fits or job.shape_key() != first.shape_key():
                continue
            if unready or job.batch_key() == first.batch_key():
                group.append(job)
                outputs, pixels, work = outputs_with, pixels_with, work - job.need.work
        return group
