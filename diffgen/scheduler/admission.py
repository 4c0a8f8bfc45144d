"""What is accepted, and which accepted requests the ranks begin to hold."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from diffgen.errors import DeadlineExceeded, InvalidRequest, OutOfMemory, QueueFull
from diffgen.params import Limits, SamplingParams
from diffgen.scheduler.cost import CostModel
from diffgen.scheduler.forecast import Forecast
from diffgen.scheduler.job import Job, Need
from diffgen.scheduler.plan import MAX_ADMITTED
from diffgen.scheduler.policy import Policy

# A request is refused for its time limit only where it is expected to take this much longer: estimates are rough.
DOUBT = 1.5
_BUSY_S = 5.0  # time to come back to a full queue, where nothing better is known


class Memory(Protocol):
    """What the scheduler asks about a rank's memory: see :class:`diffgen.loading.memory.RequestMemory`."""

    def available(self) -> int:
        """Bytes that requests may take, as of now."""
        ...

    def needs(self, params: SamplingParams, available: int) -> Need | None:
        """Of a request with resolved parameters; nothing where it is little beside what is available, None where it
        cannot be told."""
        ...


class Admission:
    """Rules for one of ``jobs`` to come in, and to begin."""

    def __init__(
        self,
        jobs: Collection[Job],
        limits: Limits,
        most_running: int,
        cost: CostModel,
        policy: Policy,
        forecast: Forecast,
        memory: Memory | None,
    ) -> None:
        self._jobs, self._limits, self._most_running = jobs, limits, most_running
        self._cost, self._policy, self._forecast, self._memory = cost, policy, forecast, memory
        self._capacity = math.inf  # bytes that all requests together may take

    def check_room(self, now: float) -> None:
        """Raises :class:`QueueFull` with a time to come back."""
        if len(self._jobs) < self._limits.queue:
            return
        soonest = self._forecast.soonest(now)
        wait = _BUSY_S if soonest is None else max(0.1, soonest)
        rule = f"this server's limit is {self._limits.queue}; try again in {wait:.1f} s"
        raise QueueFull(f"{len(self._jobs)} requests are waiting or running, and {rule}", retry_after=wait)

    def check_memory(self, job: Job) -> None:
        """Learn what ``job`` needs. Raises :class:`OutOfMemory` where it cannot fit even by itself."""
        if self._memory is None:
            return
        if not any(other.started is not None for other in self._jobs):
            self._capacity = self._memory.available()  # with requests in flight, a part of it is theirs
        need = self._memory.needs(job.resolved.params, int(self._capacity))
        if need is None:
            warnings = (*job.resolved.warnings, "what memory this request needs could not be estimated: see the log")
            job.resolved = msgspec.structs.replace(job.resolved, warnings=warnings)
            return
        job.need = need
        if sum(job.need) > self._capacity:
            numbers = f"the request needs about {_mib(sum(job.need))} MiB a rank, and {_mib(self._capacity)} are free"
            raise OutOfMemory(f"{numbers}; ask for a smaller size, fewer frames or outputs", code="insufficient_memory")

    def check_size(self, job: Job) -> None:
        """Learn what ``job`` takes in a plan. Raises :class:`InvalidRequest` where no plan could hold it."""
        job.size = job.admit.size
        if job.size > MAX_ADMITTED:
            rule = f"a plan for the ranks can admit at most {MAX_ADMITTED}; shorten its texts"
            raise InvalidRequest(f"the request has {job.size} bytes, and {rule}", code="request_too_large")

    def check_time(self, job: Job, eta: float | None) -> None:
        """Raises :class:`DeadlineExceeded` where its time limit cannot be kept, as far as times are known."""
        limit = job.resolved.params.time_limit
        if limit is None or eta is None or job.deadline is None:
            return
        left = job.deadline - job.arrived  # less than the limit where it was sent to an earlier life
        if left <= 0 or eta <= left * DOUBT:  # nothing left is not impossible, but over
            return
        own = self._cost.seconds_left(job)
        alone = own <= left * DOUBT
        rest = "" if left >= limit else f", of which {left:.1f} s are left"
        takes = f"the request takes about {own:.1f} s by itself and would end in {eta:.1f} s"
        what = f"time_limit is {limit:g} s{rest}; {takes}"
        remedy = "try again later or give it more time" if alone else "give it more time, or ask for less work"
        raise DeadlineExceeded(
            f"{what}; {remedy}",
            code="deadline_impossible",
            retryable=alone,
            param="time_limit",
            retry_after=eta - left if alone else None,
        )

    def begin(self, running: Sequence[Job], now: float) -> list[Job]:
        """The next requests for the ranks to hold: as many as may run, and fit into memory and into a plan together.

        Interactive requests take the turns of batch ones, so they do not wait for places that those hold, either.
        """
        most, all_held, interactive = self._most_running, len(running), sum(job.interactive for job in running)
        if interactive >= most:
            return []
        waiting = [job for job in self._jobs if job.started is None and (job.interactive or all_held < most)]
        begun: list[Job] = []
        for job in self._policy.order(waiting, now):
            if (interactive if job.interactive else all_held) >= most:
                continue
            together = [*running, *begun, job]
            if len(together) > 1 and self.free(together) < max(each.need.work for each in together):
                break  # none that is behind it passes it, or it might never fit
            if sum(each.size for each in (*begun, job)) > MAX_ADMITTED:
                break  # for the next plan
            begun.append(job)
            all_held, interactive = all_held + 1, interactive + job.interactive
        return begun

    def free(self, running: Sequence[Job]) -> float:
        """Bytes that are left to work with."""
        return self._capacity - sum(job.need.held for job in running)


def out_of_time(job: Job, most: int) -> DeadlineExceeded:
    """The error of a request whose time limit, or the server's of ``most`` seconds, has passed."""
    limit, place = job.resolved.params.time_limit, job.position
    what = f"this server's limit of {most} s for a request" if limit is None else f"its time_limit of {limit:g} s"
    where = "before it began" if place is None else f"in {place.name}, after {place.unit} of {place.units} units"
    return DeadlineExceeded(f"request {job.id} was ended {where}: {what} is over; ask for less or give it more")


def _mib(size: float) -> int:
    return round(size / 2**20)
