"""Which requests the next tick serves."""

from __future__ import annotations

from collections.abc import Iterable

from diffgen.scheduler.job import Job
from diffgen.scheduler.plan import MAX_UNIT_REQS


def choose(jobs: Iterable[Job], max_outputs: int) -> list[Job]:
    """The jobs of the next unit: whoever has waited longest, and those that can share its forward.

    Taking turns by unit keeps a short request from waiting behind a long one. A batch holds at most ``max_outputs``
    images or clips, unless its first request alone has more.
    """
    waiting = sorted(jobs, key=lambda job: (job.last_tick, job.arrived))
    if not waiting:
        return []
    first, key = waiting[0], waiting[0].batch_key()
    chosen, outputs = [first], first.outputs
    for job in waiting[1:] if key is not None else []:
        if len(chosen) == MAX_UNIT_REQS:
            break
        if job.batch_key() == key and outputs + job.outputs <= max_outputs:
            chosen.append(job)
            outputs += job.outputs
    return chosen
