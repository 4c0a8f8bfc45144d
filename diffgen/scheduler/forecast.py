"""When each request will end, as things stand."""

from __future__ import annotations

from collections.abc import Collection

from diffgen.scheduler.cost import CostModel
from diffgen.scheduler.job import Job
from diffgen.scheduler.policy import Policy
from diffgen.wire.messages import RequestStatus

_FRESH_S = 0.5  # how long a forecast for all requests is good for


class Forecast:
    """Place in the order and end of every one of ``jobs``, looked at again when it is old."""

    def __init__(self, jobs: Collection[Job], cost: CostModel, policy: Policy) -> None:
        self._jobs = jobs  # a view of those in work
        self._cost, self._policy = cost, policy
        self._made = float("-inf")
        self._found: dict[str, tuple[int, float | None]] = {}

    def look(self, now: float) -> None:
        """Forecast anew."""
        order = self._policy.order(self._jobs, now)
        ends = self._cost.ends(order)
        self._found = {job.id: (ahead, now + ends[job.id] if ends else None) for ahead, job in enumerate(order)}
        self._made = now

    def of(self, job: Job, now: float) -> tuple[int, float | None]:
        """How many requests go before it; seconds until it ends, None while no times are known."""
        if job.id not in self._found or now - self._made > _FRESH_S:
            self.look(now)
        ahead, ends = self._found[job.id]
        return ahead, None if ends is None else max(0.0, ends - now)

    def soonest(self, now: float) -> float | None:
        """Seconds until the first of all ends; None where nobody knows."""
        self.look(now)
        ends = [ends - now for _, ends in self._found.values() if ends is not None]
        return min(ends) if ends else None

    def status(self, job: Job, now: float, began: float) -> RequestStatus:
        """As of ``now``, in a unit that ``began`` then and counts only once it has ended."""
        params, place = job.resolved.params, job.position
        ahead, eta = self.of(job, began)
        return RequestStatus(
            id=job.id,
            state="queued" if place is None else "running",
            seconds=now - job.arrived,
            width=params.width or 0,
            height=params.height or 0,
            num_frames=params.num_frames or 1,
            outputs=job.outputs,
            stage="" if place is None else place.name,
            step=0 if place is None else place.unit,
            total=0 if place is None else place.units,
            priority="interactive" if job.interactive else "batch",
            ahead=ahead,
            eta=None if eta is None else max(0.0, eta - (now - began)),
            time_left=None if job.deadline is None else job.deadline - now,
        )
