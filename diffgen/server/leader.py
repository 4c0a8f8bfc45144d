"""Rank 0's loop."""

from __future__ import annotations

import contextlib
import queue
import resource
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from diffgen.args import ModelArgs
from diffgen.loading.device import default_dtype
from diffgen.loading.memory import RequestMemory
from diffgen.request import Req
from diffgen.scheduler.plan import Plan, StageInfo
from diffgen.scheduler.scheduler import Answer, Scheduler
from diffgen.server.answer import make_result
from diffgen.server.outbox import Outbox
from diffgen.server.pipe import Journal, Pipe, Ready, Start, Stop, ToRank
from diffgen.server.warmup import place, warm_up
from diffgen.wire.messages import (
    ClientMessage,
    Closing,
    Failed,
    GetStatus,
    Hello,
    Result,
    ServerMessage,
    Submit,
)
from diffgen.wire.router import Router
from diffgen.worker.context import StageError
from diffgen.worker.faults import Faults
from diffgen.worker.worker import GPUWorker


def make_scheduler(start: Start, worker: GPUWorker, open_empty: Callable[[ModelArgs], Any]) -> Scheduler:
    """``open_empty`` gives the pipeline of this layout without weights."""
    args, device = start.args, worker.executor.device
    dtype = args.model.dtype or str(default_dtype(device)).removeprefix("torch.")
    model = msgspec.structs.replace(args.model, dtype=dtype)
    return Scheduler(
        worker.pipeline.spec,
        args.limits,
        args.run,
        uuid.uuid4().hex,
        deaths=start.deaths,
        stages=[StageInfo(s.name, s.prepares, s.stepped, s.encodes) for s in worker.pipeline.stages],
        restarts=start.restarts,
        memory=RequestMemory(device, args.run.num_gpus + start.place.others, lambda: open_empty(model)),
        failures=start.failures,
    )


_DESCRIPTORS = 2**16


class Leader:
    """Takes messages, plans, tells the other ranks, runs, answers. Made once the model is loaded, it draws the warm-up
    and then listens; ready to :meth:`run`."""

    def __init__(
        self,
        start: Start,
        worker: GPUWorker,
        scheduler: Scheduler,
        faults: Faults,
        pipe: Pipe[ToRank],
        inbox: queue.SimpleQueue[Any],
    ) -> None:
        self._worker, self._scheduler, self._faults = worker, scheduler, faults
        self._pipe, self._inbox = pipe, inbox
        self._looking = threading.Lock()  # around every use of the scheduler: the router's thread looks into it, too
        warm_up(start.args, worker, self._broadcast)
        _allow_connections()
        self._router = Router(start.socket, start.args.listen, inbox, self._at_once)
        self._outbox = Outbox(self._router, Path(start.run_folder) / "answers")
        pipe.send(Ready(worker.pipeline.spec.name, self._router.address))

    def run(self) -> None:
        """Until told to stop."""
        while self._take():
            if not self._scheduler.idle:
                self._tick()
        self._broadcast(self._scheduler.stop())
        self._router.close(Closing())

    def _broadcast(self, plan: Plan) -> None:
        self._worker.control.broadcast(msgspec.msgpack.encode(plan))

    def _take(self) -> bool:
        """Take what has come; waits while there is nothing else to do. False when told to stop."""
        until = self._outbox.tend()
        for item in _received(self._inbox, until if self._scheduler.idle else 0.0):
            if isinstance(item, Stop):
                return False
            client, message = item
            if not self._outbox.take(client, message):
                with self._looking:
                    answers = self._scheduler.handle(client, message)
                # A request that is refused was never in work: sent again, it is looked at anew.
                self._answer(answers, keep=not isinstance(message, Submit))
        with self._looking:
            late = self._scheduler.expire()
        self._answer(late)
        return True

    def _at_once(self, router: Router, message: ClientMessage) -> ServerMessage | None:
        """On the router's thread: what changes nothing does not wait for the end of a unit."""
        match message:
            case Hello():
                return self._scheduler.welcome
            case GetStatus():
                with self._looking:
                    status = self._scheduler.status()
                return msgspec.structs.replace(status, malformed=router.malformed, unread=self._inbox.qsize())
        return None

    def _tick(self) -> None:
        scheduler, worker = self._scheduler, self._worker
        with self._looking:
            plan = scheduler.plan()
        self._pipe.send(Journal(plan.ids))
        self._broadcast(plan)
        began = time.perf_counter()
        outcomes, finished = worker.tick(plan)
        with self._looking:
            place(scheduler, worker, plan, outcomes)
            answers = scheduler.commit(outcomes, time.perf_counter() - began)
        self._answer(answers)
        for preview, array in worker.previews:
            self._router.send(scheduler.job(preview.id).client, preview, array)
        # Results are copied from a device, which may hang.
        with worker.watched():
            for req in finished.values():
                self._send_result(req)

    def _send_result(self, req: Req) -> None:
        executor, job = self._worker.executor, self._scheduler.job(req.id)

        def make() -> tuple[Result, Any]:
            self._faults.at("send", prompts=[req.params.prompt])
            return make_result(req, job.timings, executor.device)

        made = executor.attempt("send", make)
        if isinstance(made, StageError):
            with self._looking:
                failed = self._scheduler.fail(req.id, made.error)
            self._answer([failed])
            return
        with self._looking:
            self._scheduler.release(req.id)  # which completes the timings
        self._outbox.send(job.client, *made)

    def _answer(self, answers: Iterable[Answer], keep: bool = True) -> None:
        for client, answer in answers:
            if isinstance(answer, Failed) and keep:
                self._outbox.send(client, answer)
            else:
                self._router.send(client, answer)


def _allow_connections() -> None:
    """As many as this process may have. Each is a descriptor, also of a stranger who never says the token, and without
    any left it cannot open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _received(inbox: queue.SimpleQueue[Any], wait: float | None) -> list[Any]:
    """Everything in the inbox; while it is empty, waits at most ``wait`` seconds, None being for ever."""
    items: list[Any] = []
    with contextlib.suppress(queue.Empty):
        if wait != 0:
            items.append(inbox.get(timeout=wait))
        while True:
            items.append(inbox.get_nowait())
    return items
