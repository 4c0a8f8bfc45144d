"""DataParallelController: several replicas of a model behind one address."""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from diffgen.args import ListenArgs, ServerArgs, check_args
from diffgen.distributed.dims import ranks_of_replica
from diffgen.errors import DiffgenError, InvalidRequest, RequestCancelled, ServerError, WorkerDied
from diffgen.params import ModelSpec
from diffgen.server.backend import Backend
from diffgen.server.dispatch import Dispatcher, Load, request_cost
from diffgen.server.outbox import Outbox
from diffgen.server.pipe import Place
from diffgen.server.replica import RankStatus
from diffgen.server.supervisor import Supervisor, make_run_folder
from diffgen.wire.mailbox import Mailbox
from diffgen.wire.messages import (
    Abort,
    Aborted,
    Accepted,
    Bye,
    Cancel,
    Closing,
    Failed,
    GetStatus,
    Gone,
    Hello,
    Preview,
    Progress,
    Received,
    Restarting,
    Result,
    ServerMessage,
    Status,
    Submit,
    Welcome,
)
from diffgen.wire.router import Router

logger = logging.getLogger(__name__)

_MOST_SERVED = 4096


@dataclasses.dataclass
class _Job:
    client: bytes
    submit: Submit
    arrived: float
    cost: float
    left: float  # of its cost
    replica: int | None = None  # None while none is up


@dataclasses.dataclass
class _Died:
    """A replica has died and is started again, or is gone for good for a reason; ``journal`` has its last tick."""

    replica: int
    journal: tuple[str, ...]
    reason: DiffgenError | None = None


@dataclasses.dataclass
class _Question:
    """For a status. ``waiting`` has the replicas that have not told theirs and have lived ever since."""

    client: bytes
    waiting: set[int]
    answers: list[Status] = dataclasses.field(default_factory=list)


class DataParallelController:
    """Starts ``dp_size`` replicas, each with a supervisor, and shares out requests by ``dp_policy``.

    It speaks the clients' protocol on both sides: to clients as a server, to each replica as a client. When a replica
    dies, its requests go to the others, but for those of its last tick, which may be why it died: they wait for its
    next life and run there alone. Control operations are all or nothing: if one replica cannot start, none is left;
    a status is that of all.
    """

    def __init__(self, args: ServerArgs, on_failure: Callable[[DiffgenError], None] = lambda error: None) -> None:
        check_args(args)
        self.args = args
        self.failure: DiffgenError | None = None
        self._on_failure = on_failure
        self._folder = make_run_folder()
        self.socket = f"ipc://{self._folder}/s"
        self._inbox: Mailbox[Any] = Mailbox()
        self._supervisors = [self._supervise(index) for index in range(args.run.dp_size)]
        self._backends: dict[int, Backend] = {}
        self._dispatcher = Dispatcher(args.run.dp_policy)
        self._jobs: dict[str, _Job] = {}
        self._served: dict[str, int] = {}  # replicas of the latest answers, which keep them for a while
        self._away: dict[bytes, float] = {}  # clients whose connection has ended, since when
        self._questions: collections.deque[_Question] = collections.deque()
        self._router: Router | None = None
        self._outbox: Outbox | None = None  # answers that no replica has
        self._spec: ModelSpec | None = None  # unknown until a replica has answered
        self._heard: set[int] = set()  # replicas that have welcomed us, or died, at least once
        # What clients said before all were heard of: the first would send all that they have to the first to answer.
        self._early: collections.deque[tuple[bytes, Any]] = collections.deque()
        self._epoch = uuid.uuid4().hex
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="diffgen-controller", daemon=True)

    def _supervise(self, index: int) -> Supervisor:
        run = self.args.run
        ranks = ranks_of_replica(run)
        threads = run.threads
        if threads is None and "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, (os.cpu_count() or 1) // run.num_gpus)
        alone = msgspec.structs.replace(run, num_gpus=ranks, dp_size=1, threads=threads)
        args = msgspec.structs.replace(self.args, run=alone, listen=ListenArgs())
        return Supervisor(
            args,
            lambda error: self._inbox.put(_Died(index, (), error)),
            on_death=lambda journal: self._inbox.put(_Died(index, journal)),
            place=Place(index * ranks, run.num_gpus - ranks),
        )

    @property
    def address(self) -> str | None:
        """Where the controller listens for others; None unless that was asked for."""
        return None if self._router is None or self.args.listen.address is None else self._router.address

    @property
    def restarts(self) -> int:
        return sum(supervisor.restarts for supervisor in self._supervisors)

    def replicas(self) -> list[list[RankStatus]]:
        """Status of every rank by replica, numbered on; none of a replica that is gone for good."""
        size = ranks_of_replica(self.args.run)
        return [
            [dataclasses.replace(rank, rank=index * size + rank.rank) for rank in supervisor.ranks()]
            for index, supervisor in enumerate(self._supervisors)
        ]

    def start(self) -> None:
        """Start all replicas at a time. Raises the first error; no process is left then."""
        errors: list[BaseException] = []

        def begin(supervisor: Supervisor) -> None:
            try:
                supervisor.start()
            except BaseException as error:
                # The border of the thread: the caller raises it.
                errors.append(error)

        threads = [threading.Thread(target=begin, args=(each,), daemon=True) for each in self._supervisors]
        try:
            for thread in threads:
                thread.start()
            while not errors and any(thread.is_alive() for thread in threads):
                time.sleep(0.05)
            if errors:
                raise errors[0]
            self._open()
            self._thread.start()
        except BaseException:
            self.stop()
            raise

    def _open(self) -> None:
        """Let clients in; the replicas are there, or it is known why not."""
        self._backends = {index: Backend(each.socket) for index, each in enumerate(self._supervisors)}
        self._router = Router(self.socket, self.args.listen, self._inbox)
        self._outbox = Outbox(self._router)

    def stop(self) -> None:
        """Tell clients, end all replicas, remove the folder. Repeatable."""
        if self._stopped:
            return
        self._stopped = True
        if self._thread.ident is not None:
            self._inbox.put(None)
            self._thread.join()
        stops = [threading.Thread(target=supervisor.stop) for supervisor in self._supervisors]
        for thread in stops:
            thread.start()
        for thread in stops:
            thread.join()
        self._inbox.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        try:
            while not self._stopped and self._turn():
                pass
        except BaseException as error:
            # The border of the thread: without it, those who wait would wait for ever.
            logger.exception("the controller failed")
            self._give_up(ServerError(f"the controller failed: {type(error).__name__}: {error}"))
        assert self._router is not None
        self._router.close(Closing())
        for backend in self._backends.values():
            backend.close()

    def _turn(self) -> bool:
        """Take what has come; False when told to stop."""
        assert self._outbox is not None
        until = self._outbox.tend()
        wait = 1000 if self._away else None if until is None else int(1000 * until) + 1
        ready = Backend.wait(self._inbox, list(self._backends.values()), wait)
        # Deaths before what replicas say: the next life's welcome may have come already.
        for item in self._inbox.take():
            if item is None or self.failure is not None:
                return False
            if isinstance(item, _Died):
                self._heard.add(item.replica)
                self._on_death(item)
            else:
                self._early.append(item)
        for index, backend in list(self._backends.items()):
            if backend in ready:
                for message, frames in backend.receive():
                    self._from_replica(index, message, frames)
        while self._early and self._spec is not None and self._heard >= self._backends.keys():
            self._from_client(*self._early.popleft())
        latest = time.monotonic() - self.args.limits.grace
        for client in [each for each, since in self._away.items() if since < latest]:
            self._leave(client)
        return self.failure is None

    def _send(self, client: bytes, message: ServerMessage) -> None:
        assert self._router is not None
        self._router.send(client, message)

    def _leave(self, client: bytes) -> None:
        self._away.pop(client, None)
        for request_id in [name for name, job in self._jobs.items() if job.client == client]:
            self._withdraw(request_id)
            del self._jobs[request_id]

    def _from_client(self, client: bytes, message: Any) -> None:
        assert self._outbox is not None
        self._away.pop(client, None)
        if self._outbox.take(client, message) and not isinstance(message, Received):
            return
        match message:
            case Gone():
                self._away[client] = time.monotonic()
            case Received():
                replica = self._served.pop(message.id, None)
                if replica in self._backends:
                    self._backends[replica].send(message)
            case Hello():
                assert self._spec is not None
                self._send(client, Welcome(self._epoch, self._spec))
            case Submit():
                self._submit(client, message)
            case Cancel():
                job = self._jobs.get(message.id)
                replica = self._served.get(message.id)
                if job is not None and job.client == client:
                    self._cancel(message.id, "cancelled by its client")
                elif replica in self._backends:
                    self._backends[replica].send(message)  # it keeps the result
            case Bye():
                self._leave(client)
            case Abort():
                found = message.id in self._jobs
                if found:
                    self._cancel(message.id, "aborted by another client")
                self._send(client, Aborted(message.id, found))
            case GetStatus():
                self._questions.append(_Question(client, set(self._up())))
                for backend in self._backends.values():
                    backend.send(message)
                self._answer_questions()

    def _submit(self, client: bytes, message: Submit) -> None:
        held = self._jobs.get(message.id)
        if held is not None and held.client != client:
            taken = InvalidRequest(f"request id {message.id!r} is another client's; use a UUID", param="id")
            self._send(client, Failed(message.id, taken.info()))
        elif held is None:
            assert self._spec is not None
            cost = request_cost(message.params, self._spec.defaults)
            arrived = time.monotonic() - message.age
            self._jobs[message.id] = job = _Job(client, message, arrived, cost, cost)
            job.replica = self._served.pop(message.id, None)
            if job.replica in self._backends:
                self._resend(job)  # it has the result, which was lost on its way
            else:
                self._dispatch(job)

    def _dispatch(self, job: _Job) -> None:
        up = self._up()
        job.replica, job.left = None, job.cost
        if up:
            job.replica = self._dispatcher.choose(job.submit.params, up, self._loads())
            self._resend(job)

    def _up(self) -> list[int]:
        return sorted(index for index, backend in self._backends.items() if backend.up)

    def _resend(self, job: _Job) -> None:
        assert job.replica is not None
        age = time.monotonic() - job.arrived
        self._backends[job.replica].send(msgspec.structs.replace(job.submit, age=age))

    def _loads(self) -> dict[int, Load]:
        loads = {index: Load() for index in self._backends}
        for job in self._jobs.values():
            if job.replica is not None:
                loads[job.replica].requests += 1
                loads[job.replica].cost += job.left
        return loads

    def _cancel(self, request_id: str, reason: str) -> None:
        """Answer at once; what its replica says of it later is passed over."""
        self._withdraw(request_id)
        self._fail(request_id, RequestCancelled(f"request {request_id} was stopped: {reason}"))

    def _withdraw(self, request_id: str) -> None:
        replica = self._jobs[request_id].replica
        if replica is not None:
            self._backends[replica].send(Cancel(request_id))

    def _fail(self, request_id: str, error: DiffgenError) -> None:
        assert self._outbox is not None
        self._outbox.send(self._jobs.pop(request_id).client, Failed(request_id, error.info()))

    def _from_replica(self, index: int, message: ServerMessage | None, frames: Sequence[Any]) -> None:
        match message:
            case Welcome():
                self._spec = message.model
                self._heard.add(index)
                for job in list(self._jobs.values()):
                    if job.replica == index:
                        self._resend(job)
                    elif job.replica is None:
                        self._dispatch(job)
            case Status():
                question = next((each for each in self._questions if index in each.waiting), None)
                if question is not None:
                    question.waiting.remove(index)
                    question.answers.append(message)
                self._answer_questions()
            case Accepted() | Progress() | Preview() | Result() | Failed():
                self._pass_on(index, message, frames)
            case None:  # it has lost its connection
                self._give_up_answers(index)

    def _pass_on(
        self, index: int, message: Accepted | Progress | Preview | Result | Failed, frames: Sequence[Any]
    ) -> None:
        job = self._jobs.get(message.id)
        if job is None or job.replica != index:  # it has been moved, or has ended here
            if isinstance(message, Result | Failed) and self._served.get(message.id) != index:
                self._backends[index].send(Received(message.id))
            return
        if isinstance(message, Progress) and message.stage == "denoise":
            job.left = job.cost * (1 - message.step / message.total)
        if isinstance(message, Result | Failed):
            del self._jobs[message.id]
            self._served[message.id] = index
            while len(self._served) > _MOST_SERVED:
                del self._served[next(iter(self._served))]
        assert self._router is not None
        self._router.forward(job.client, frames)

    def _give_up_answers(self, index: int) -> None:
        """Of a replica that has gone; its next life knows nothing of what was asked."""
        for question in self._questions:
            question.waiting.discard(index)
        self._answer_questions()

    def _answer_questions(self) -> None:
        """Those for which nothing is awaited any more, oldest first."""
        while self._questions and not self._questions[0].waiting:
            question = self._questions.popleft()
            assert self._router is not None
            self._send(question.client, merged(question.answers, self.restarts, self._router.malformed))

    def _on_death(self, death: _Died) -> None:
        self._backends[death.replica].up = False  # it may not have heard yet
        self._give_up_answers(death.replica)
        if death.reason is not None:
            self._backends.pop(death.replica).close()
            if not self._backends:
                self._give_up(death.reason)
                return
        for request_id, job in list(self._jobs.items()):
            if job.replica != death.replica:
                continue
            if death.reason is not None and request_id in self._supervisors[death.replica].suspects:
                gone = f"its replica has given up while it may have been the cause: {death.reason}"
                self._fail(request_id, WorkerDied(gone, retryable=False))
                continue
            self._send(job.client, Restarting(request_id))
            if request_id not in death.journal:
                self._dispatch(job)

    def _give_up(self, error: DiffgenError) -> None:
        self.failure = error
        for request_id in list(self._jobs):
            self._fail(request_id, error)
        self._on_failure(error)


def merged(parts: Sequence[Status], restarts: int, malformed: int = 0) -> Status:
    """One status of several replicas: sums, and requests by age; ``malformed`` are the controller's own."""

    def total(name: str) -> dict[Any, int]:
        counts: collections.Counter[Any] = collections.Counter()
        for part in parts:
            counts.update(getattr(part, name))
        return dict(counts)

    requests = sorted((each for part in parts for each in part.requests), key=lambda each: -each.seconds)
    return Status(
        requests=tuple(requests),
        finished=total("finished"),
        ticks=sum(part.ticks for part in parts),
        seconds=max((part.seconds for part in parts), default=0.0),
        queued=sum(part.queued for part in parts),
        running=sum(part.running for part in parts),
        units=total("units"),
        batches=total("batches"),
        tick_seconds=sum(part.tick_seconds for part in parts),
        refused=total("refused"),
        restarts=restarts,
        text_cache=total("text_cache"),
        malformed=malformed + sum(part.malformed for part in parts),
    )
