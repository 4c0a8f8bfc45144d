"""The scheduler: everything rank 0 decides, as an object without sockets, processes or tensors."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping

from diffgen.args import RunArgs
from diffgen.errors import DiffgenError, InvalidRequest, QueueFull, RequestCancelled, WorkerDied, error_from
from diffgen.params import Limits, ModelSpec, resolve
from diffgen.scheduler.job import Job
from diffgen.scheduler.plan import Admit, Outcome, Plan, Position
from diffgen.scheduler.policy import choose
from diffgen.wire.messages import (
    Abort,
    Aborted,
    Accepted,
    Bye,
    Cancel,
    ClientMessage,
    Failed,
    GetStatus,
    Hello,
    Progress,
    RequestStatus,
    ServerMessage,
    Status,
    Submit,
    Welcome,
)

MAX_DEATHS = 2  # of the server, while it ran a request, until the request is refused

Answer = tuple[bytes, ServerMessage]


class Scheduler:
    """Takes client messages, plans ticks and turns their outcomes into answers.

    Every accepted request ends in exactly one answer: the result, which the caller sends for each finished outcome, or
    a :class:`Failed` from here.
    """

    def __init__(
        self,
        model: ModelSpec,
        limits: Limits,
        run: RunArgs,
        epoch: str,
        clock: Callable[[], float] = time.monotonic,
        deaths: Mapping[str, int] | None = None,
    ) -> None:
        self.model = model
        self.epoch = epoch
        self._deaths = deaths or {}
        self._limits = limits
        self._run = run
        self._clock = clock
        self._jobs: dict[str, Job] = {}  # in order of arrival
        self._drop: list[str] = []  # ended here, still held by the ranks
        self._tick = 0
        self._finished: collections.Counter[str] = collections.Counter()
        self._since = clock()

    @property
    def idle(self) -> bool:
        """Nothing to run and nothing to tell the ranks."""
        return not self._jobs and not self._drop

    def handle(self, client: bytes, message: ClientMessage) -> list[Answer]:
        """Take one message; returns what to send at once."""
        match message:
            case Hello():
                return [(client, Welcome(self.epoch, self.model))]
            case Submit():
                return self._submit(client, message)
            case Cancel():
                job = self._jobs.get(message.id)
                return [] if job is None or job.client != client else [self._cancel(job, "cancelled by its client")]
            case GetStatus():
                return [(client, self.status())]
            case Abort():
                found = self._jobs.get(message.id)
                reply = (client, Aborted(message.id, found is not None))
                return [reply] if found is None else [self._cancel(found, "aborted by another client"), reply]
            case Bye():
                for job in [job for job in self._jobs.values() if job.client == client]:
                    self._cancel(job, "its client has left")
                return []

    def status(self) -> Status:
        """What is in work, and what has been done."""
        now = self._clock()
        finished = dict(self._finished)
        return Status(tuple(_status(job, now) for job in self._jobs.values()), finished, self._tick, now - self._since)

    def _submit(self, client: bytes, message: Submit) -> list[Answer]:
        held = self._jobs.get(message.id)
        if held is not None and held.client == client:
            return []  # sent again after a reconnect
        if held is not None:
            taken = InvalidRequest(f"request id {message.id!r} is another client's; use a UUID", param="id")
            return [(client, Failed(message.id, taken.info()))]
        try:
            if len(self._jobs) >= self._limits.queue:
                rule = f"this server's limit is {self._limits.queue}; try again later"
                raise QueueFull(f"{len(self._jobs)} requests are waiting or running, and {rule}")
            if self._deaths.get(message.id, 0) >= MAX_DEATHS:
                times = f"the server has died {self._deaths[message.id]} times while it ran this request"
                raise WorkerDied(f"{times}; it will not be tried again", retryable=False)
            resolved = resolve(message.params, self.model, self._limits)
        except DiffgenError as error:
            return [(client, Failed(message.id, error.info()))]
        ahead = len(self._jobs)
        suspect = message.id in self._deaths
        now = self._clock()
        self._jobs[message.id] = Job(message.id, client, resolved, now, served=now, suspect=suspect)
        return [(client, Accepted(message.id, ahead, resolved.params, resolved.warnings))]

    def _cancel(self, job: Job, reason: str) -> Answer:
        return self._fail(job, RequestCancelled(f"request {job.id} was stopped: {reason}"))

    def _fail(self, job: Job, error: DiffgenError) -> Answer:
        del self._jobs[job.id]
        self._finished[error.code] += 1
        if job.started is not None:
            self._drop.append(job.id)
        return job.client, Failed(job.id, error.info())

    def plan(self) -> Plan:
        """The next tick. Waiting requests are admitted first, as many as may run at a time."""
        self._tick += 1
        drop, self._drop = tuple(self._drop), []
        running = [job for job in self._jobs.values() if job.started is not None]
        waiting = [job for job in self._jobs.values() if job.started is None]
        admitted = waiting[: max(0, self._run.max_running - len(running))]
        for job in admitted:
            job.started = self._clock()
            job.timings["queue"] = job.started - job.arrived
        chosen = choose([*running, *admitted], self._run.max_batch_size, self._clock())
        return Plan(
            tick=self._tick,
            drop=drop,
            admit=tuple(Admit(job.id, job.resolved.params, job.resolved.warnings) for job in admitted),
            stage=0 if not chosen or chosen[0].position is None else chosen[0].position.stage,
            ids=tuple(job.id for job in chosen),
        )

    def stop(self) -> Plan:
        """The last plan: every rank ends."""
        self._tick += 1
        return Plan(tick=self._tick, stop=True)

    def place(self, request_id: str, position: Position) -> None:
        """Where an admitted request begins, as the ranks say."""
        if request_id in self._jobs:
            self._jobs[request_id].position = position

    def commit(self, outcomes: list[Outcome], seconds: float) -> list[Answer]:
        """Take a tick's outcomes and its duration. Finished requests stay until :meth:`release`."""
        answers: list[Answer] = []
        for outcome in outcomes:
            job = self._jobs[outcome.id]
            job.timings[outcome.stage] = job.timings.get(outcome.stage, 0.0) + seconds
            failed = outcome.error is not None or any(other.error is not None for other in outcomes)
            if failed and len(outcomes) == 1:
                assert outcome.error is not None
                answers.append(self._fail(job, error_from(outcome.error)))
            elif failed:
                job.alone = True
            else:
                job.alone = False
                job.position = outcome.position
                job.done += 1
                job.served = self._clock()
                answers.append((job.client, Progress(job.id, outcome.stage, outcome.step, outcome.total)))
        return answers

    def client_of(self, request_id: str) -> bytes:
        """Whom to send what a request in work has made."""
        return self._jobs[request_id].client

    def release(self, request_id: str) -> Job:
        """Give up a finished request, whose result is about to be sent."""
        job = self._jobs.pop(request_id)
        self._finished["done"] += 1
        job.timings["total"] = self._clock() - job.arrived
        return job

    def fail_all(self, error: DiffgenError) -> list[Answer]:
        """End every request with ``error``."""
        return [self._fail(job, error) for job in list(self._jobs.values())]


def _status(job: Job, now: float) -> RequestStatus:
    params, place = job.resolved.params, job.position
    shape = (params.width or 0, params.height or 0, params.num_frames or 1, job.outputs)
    if place is None:
        return RequestStatus(job.id, "queued", now - job.arrived, *shape)
    return RequestStatus(job.id, "running", now - job.arrived, *shape, place.name, place.unit, place.units)
