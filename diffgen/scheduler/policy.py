"""Which requests the next tick serves."""

from __future__ import annotations

from collections.abc import Iterable

from diffgen.scheduler.job import Job
from diffgen.scheduler.plan import MAX_UNIT_REQS

# Seconds without a unit that halve what a request seems to have left: a long one waits behind short ones, but not for
# ever: a thousand times longer, it gets a unit after ten of these.
PATIENCE_S = 5.0


def choose(jobs: Iterable[Job], max_outputs: int, now: float) -> list[Job]:
    """The jobs of the next unit: the one with the least work left, and those that can share its forward.

    Shortest remaining work first has the least mean waiting time, and lets a picture pass a clip at the next unit.
    Before all go those that only have to be prepared: they can then share the others' steps. A batch holds at most
    ``max_outputs`` images or clips, unless its first request alone has more.
    """

    def order(job: Job) -> tuple[bool, float, float]:
        prepared = job.position is not None and not job.position.prepares
        return prepared, job.work_left * 0.5 ** ((now - job.served) / PATIENCE_S), job.arrived

    waiting = sorted(jobs, key=order)
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
