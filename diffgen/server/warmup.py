"""Pictures drawn before a server is ready, so that no user's request pays for what happens only once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from diffgen.args import ServerArgs, warmup_shapes
from diffgen.errors import StartFailed
from diffgen.params import SamplingParams
from diffgen.scheduler.plan import Outcome, Plan
from diffgen.scheduler.scheduler import Scheduler
from diffgen.wire.messages import Failed, Submit
from diffgen.worker.worker import GPUWorker

logger = logging.getLogger(__name__)


def place(scheduler: Scheduler, worker: GPUWorker, plan: Plan, outcomes: list[Outcome]) -> None:
    """Tell where the requests stand that a tick has admitted and not run."""
    placed = {outcome.id for outcome in outcomes}
    for admit in plan.admit:
        if admit.id not in placed:
            scheduler.place(admit.id, worker.position(admit.id))


def warm_up(args: ServerArgs, worker: GPUWorker, broadcast: Callable[[Plan], None]) -> None:
    """Draw the sizes asked for, with a scheduler of its own, so that nothing of it is left.

    Raises :class:`StartFailed` where one cannot be drawn.
    """
    spec = worker.pipeline.spec
    for width, height, frames in warmup_shapes(args.run.warmup):
        began, name = time.perf_counter(), f"{width}x{height}" + (f"x{frames}" if frames else "")
        scheduler = Scheduler(spec, args.limits, args.run, "warm-up")
        params = SamplingParams(prompt="", width=width, height=height, num_frames=frames, seed=0)
        params = msgspec.structs.replace(params, num_inference_steps=max(2, spec.least_steps))
        answers = scheduler.handle(b"", Submit(f"warm-up {name}", params))
        while not scheduler.idle:
            plan = scheduler.plan()
            broadcast(plan)
            outcomes, finished = worker.tick(plan)
            place(scheduler, worker, plan, outcomes)
            answers += scheduler.commit(outcomes, 0.0)
            for request_id in finished:
                scheduler.release(request_id)
        for _, answer in answers:
            if isinstance(answer, Failed):
                remedy = "leave it out of warmup, or turn that off"
                raise StartFailed(f"cannot warm up with {name}: {answer.error.message}; {remedy}")
        logger.info("warm-up: %s in %.1f s", name, time.perf_counter() - began)
