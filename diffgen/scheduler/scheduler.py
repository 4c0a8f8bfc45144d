"""The scheduler: everything rank 0 decides, as an object without sockets, processes or tensors."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping, Sequence

from diffgen.args import RunArgs
from diffgen.errors import (
    DiffgenError,
    ErrorInfo,
    InvalidRequest,
    RequestCancelled,
    WorkerDied,
    error_from,
)
from diffgen.params import Limits, ModelSpec, is_guided, resolve
from diffgen.scheduler.admission import Admission, Memory, out_of_time
from diffgen.scheduler.cost import CostModel
from diffgen.scheduler.forecast import Forecast
from diffgen.scheduler.job import Job
from diffgen.scheduler.plan import Outcome, Plan, Position, StageInfo
from diffgen.scheduler.policy import BatchLimits, Policy
from diffgen.scheduler.texts import TextCache
from diffgen.wire.messages import (
    Abort,
    Aborted,
    Accepted,
    Bye,
    Cancel,
    ClientMessage,
    Failed,
    Gone,
    Progress,
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
        stages: Sequence[StageInfo] = (),
        restarts: int = 0,
        memory: Memory | None = None,
        failures: Mapping[str, ErrorInfo] | None = None,
    ) -> None:
        self.model = model
        self.epoch = epoch
        self.welcome = Welcome(epoch, model)
        self._deaths = deaths or {}
        self._failures = failures or {}  # of requests of an earlier life
        self._limits = limits
        self._run = run
        self._cost = CostModel(stages)
        self._stages = stages
        self._texts = TextCache(run.text_cache_mb * 2**20)
        self._reused = False  # the last unit took a text from there
        self._clock = clock
        self._restarts = restarts
        self._jobs: dict[str, Job] = {}  # in order of arrival
        jobs = self._jobs.values()
        self._policy = Policy(self._cost, BatchLimits(run.max_batch_size, run.max_batch_pixels))
        self._forecast = Forecast(jobs, self._cost, self._policy)
        self._admission = Admission(jobs, limits, run.max_running, self._cost, self._policy, self._forecast, memory)
        self._away: dict[bytes, float] = {}  # clients without a connection, since when
        self._drop: list[str] = []  # ended here, still held by the ranks
        self._tick = 0
        self._finished: collections.Counter[str] = collections.Counter()
        self._refused: collections.Counter[str] = collections.Counter()
        self._units: collections.Counter[str] = collections.Counter()
        self._batches: collections.Counter[int] = collections.Counter()
        self._tick_seconds = 0.0
        self._began: float | None = None  # the unit that runs
        self._since = clock()

    @property
    def idle(self) -> bool:
        """Nothing to run and nothing to tell the ranks."""
        return not self._jobs and not self._drop

    def handle(self, client: bytes, message: ClientMessage | Gone) -> list[Answer]:
        """Take one message, not between :meth:`plan` and :meth:`commit`; returns what to send. Of one that says hello
        it learns that the client is there."""
        if isinstance(message, Gone):
            self._away[client] = self._clock()
            return []
        self._away.pop(client, None)
        match message:
            case Submit():
                return self._submit(client, message)
            case Cancel():
                job = self._jobs.get(message.id)
                return [] if job is None or job.client != client else [self._cancel(job, "cancelled by its client")]
            case Abort():
                found = self._jobs.get(message.id)
                reply = (client, Aborted(message.id, found is not None))
                return [reply] if found is None else [self._cancel(found, "aborted by another client"), reply]
            case Bye():
                self._leave(client, "its client has left")
        return []

    def status(self) -> Status:
        """What is in work, and what has been done; at any time."""
        now = self._clock()
        began = now if self._began is None else self._began
        self._forecast.look(began)
        running = sum(job.started is not None for job in self._jobs.values())
        return Status(
            requests=tuple(self._forecast.status(job, now, began) for job in self._jobs.values()),
            finished=dict(self._finished),
            ticks=self._tick,
            seconds=now - self._since,
            queued=len(self._jobs) - running,
            running=running,
            units=dict(self._units),
            batches=dict(self._batches),
            tick_seconds=self._tick_seconds,
            refused=dict(self._refused),
            restarts=self._restarts,
            text_cache={"hits": self._texts.hits, "misses": self._texts.misses, "bytes": self._texts.bytes},
        )

    def _submit(self, client: bytes, message: Submit) -> list[Answer]:
        held = self._jobs.get(message.id)
        if held is not None and held.client == client:
            return []  # sent again after a reconnect
        if held is not None:
            taken = InvalidRequest(f"request id {message.id!r} is another client's; use a UUID", param="id")
            return [self._refuse(client, message.id, taken)]
        now = self._clock()
        try:
            self._admission.check_room(now)
            if message.id in self._failures:
                raise error_from(self._failures[message.id])
            if self._deaths.get(message.id, 0) >= MAX_DEATHS:
                times = f"the server has died {self._deaths[message.id]} times while it ran this request"
                raise WorkerDied(f"{times}; it will not be tried again", retryable=False)
            resolved = resolve(message.params, self.model, self._limits)
            job = Job(
                message.id,
                client,
                resolved,
                arrived=now,
                branches=2 if is_guided(resolved.params, self.model) else 1,
                deadline=now - message.age + (resolved.params.time_limit or self._limits.time),
                served=now,
                suspect=message.id in self._deaths,
            )
            self._admission.check_memory(job)
            self._admission.check_size(job)
            self._jobs[job.id] = job
            self._forecast.look(now)
            ahead, eta = self._forecast.of(job, now)
            self._admission.check_time(job, eta)
        except DiffgenError as error:
            self._jobs.pop(message.id, None)
            return [self._refuse(client, message.id, error)]
        return [(client, Accepted(message.id, ahead, resolved.params, job.resolved.warnings, eta))]

    def _refuse(self, client: bytes, request_id: str, error: DiffgenError) -> Answer:
        self._refused[error.code] += 1
        return client, Failed(request_id, error.info())

    def expire(self) -> list[Answer]:
        """End the requests whose time is over, and those of clients that do not come back. To be called before each
        tick."""
        now = self._clock()
        grace = self._limits.grace
        for client in [client for client, since in self._away.items() if now - since >= grace]:
            del self._away[client]
            self._leave(client, f"its client has been gone for {grace} s")
        late = [job for job in self._jobs.values() if job.deadline is not None and now >= job.deadline]
        return [self._fail(job, out_of_time(job, self._limits.time)) for job in late]

    def _cancel(self, job: Job, reason: str) -> Answer:
        return self._fail(job, RequestCancelled(f"request {job.id} was stopped: {reason}"))

    def _leave(self, client: bytes, reason: str) -> None:
        for job in [job for job in self._jobs.values() if job.client == client]:
            self._cancel(job, reason)

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
        now = self._clock()
        admitted = self._admission.begin(running, now)
        for job in admitted:
            job.started = now
            job.timings["queue"] = now - job.arrived
        flying = [*running, *admitted]
        chosen = self._policy.choose(flying, now, self._admission.free(flying))
        stage = 0 if not chosen or chosen[0].position is None else chosen[0].position.stage
        self._began = now
        encodes = len(chosen) == 1 and stage < len(self._stages) and self._stages[stage].encodes
        text = self._texts.look_up(chosen[0].resolved.params) if encodes else None
        self._reused = text is not None and text.hit
        return Plan(
            tick=self._tick,
            drop=drop,
            text=text,
            evict=self._texts.evicted(),
            admit=tuple(job.admit for job in admitted),
            stage=stage,
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
        now = self._clock()
        self._began = None
        failed = any(outcome.error is not None for outcome in outcomes)
        self._tick_seconds += seconds
        if outcomes:
            jobs = [self._jobs[outcome.id] for outcome in outcomes]
            self._batches[len(jobs)] += 1
            self._policy.ran(jobs, now)
            self._texts.kept(outcomes[0].kept)
            if not failed and not self._reused:
                self._cost.learn_unit(outcomes[0].stage, jobs, seconds)
        for outcome in outcomes:
            job = self._jobs[outcome.id]
            job.timings[outcome.stage] = job.timings.get(outcome.stage, 0.0) + seconds
            if failed and len(outcomes) == 1:
                assert outcome.error is not None
                answers.append(self._fail(job, error_from(outcome.error)))
            elif failed:
                job.alone = True
            else:
                job.alone = False
                job.position = outcome.position
                job.done += 1
                job.served = now
                self._units[outcome.stage] += 1
                if outcome.step == outcome.total and not self._reused:
                    self._cost.learn_stage(outcome.stage, job, outcome.total, job.timings[outcome.stage])
                eta = 0.0 if outcome.finished else self._forecast.of(job, now)[1]
                answers.append((job.client, Progress(job.id, outcome.stage, outcome.step, outcome.total, eta)))
        return answers

    def job(self, request_id: str) -> Job:
        """That of a request in work."""
        return self._jobs[request_id]

    def release(self, request_id: str) -> Job:
        """Give up a finished request, whose result is about to be sent."""
        job = self._jobs.pop(request_id)
        self._finished["done"] += 1
        job.timings["total"] = self._clock() - job.arrived
        return job

    def fail(self, request_id: str, error: DiffgenError) -> Answer:
        """End a finished request whose result cannot be sent."""
        return self._fail(self._jobs[request_id], error)
