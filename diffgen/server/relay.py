"""What passes between clients and replicas."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from diffgen.args import ServerArgs
from diffgen.errors import DiffgenError, InvalidRequest, RequestCancelled, WorkerDied
from diffgen.params import ModelSpec
from diffgen.server.backend import Backend
from diffgen.server.dispatch import Dispatcher, Load, request_cost
from diffgen.server.outbox import Outbox
from diffgen.server.questions import Questions, merged
from diffgen.wire.messages import (
    Abort,
    Aborted,
    Accepted,
    Bye,
    Cancel,
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

_MOST_SERVED = 4096
_AWAY_S = 1.0  # how often clients without a connection are looked at


@dataclasses.dataclass
class _Job:
    client: bytes
    submit: Submit
    arrived: float
    cost: float
    left: float  # of its cost
    replica: int | None = None  # None while none is up
    waits: bool = False  # for the next life of its replica, which may have died of it


class Relay:
    """Knows whose request each replica has, and passes on what clients and replicas say. One thread uses it.

    Attributes:
        backends: the replicas that are not gone for good.
    """

    def __init__(
        self, args: ServerArgs, router: Router, backends: dict[int, Backend], restarts: Callable[[], int]
    ) -> None:
        """``restarts`` tells how often replicas have been started again, for the status."""
        self.backends = backends
        self._router = router
        self._restarts = restarts
        self._grace = args.limits.grace
        self._dispatcher = Dispatcher(args.run.dp_policy)
        self._outbox = Outbox(router)  # answers that no replica has
        self._questions = Questions()
        self._jobs: dict[str, _Job] = {}
        # By request id, clients and replicas of the latest answers, which the replicas keep for a while.
        self._served: dict[str, dict[bytes, int]] = {}
        self._away: dict[bytes, float] = {}  # clients whose connection has ended, since when
        self._spec: ModelSpec | None = None  # unknown until a replica has answered
        self._heard: set[int] = set()  # replicas that have welcomed us, or died, at least once
        self._epoch = uuid.uuid4().hex

    @property
    def ready(self) -> bool:
        """Whether all replicas have been heard of. Before, all that clients have would go to the first to answer."""
        return self._spec is not None and self._heard >= self.backends.keys()

    def up(self) -> list[int]:
        return sorted(index for index, backend in self.backends.items() if backend.up)

    def tend(self) -> float | None:
        """Do what is due without a message; the seconds until there is more, or None."""
        for client, parts in self._questions.answered():
            self._router.send(client, merged(parts, self._restarts(), self._router.malformed))
        latest = time.monotonic() - self._grace
        for client in [each for each, since in self._away.items() if since < latest]:
            self._leave(client)
        until = self._outbox.tend()
        return _AWAY_S if self._away else until

    def from_client(self, client: bytes, message: Any) -> None:
        self._away.pop(client, None)
        if self._outbox.take(client, message) and not isinstance(message, Received):
            return
        match message:
            case Gone():
                self._away[client] = time.monotonic()
            case Received():
                self._confirm(client, message.id)
            case Hello():
                assert self._spec is not None
                self._router.send(client, Welcome(self._epoch, self._spec))
            case Submit():
                self._submit(client, message)
            case Cancel():
                job = self._jobs.get(message.id)
                keeper = self._keeper(client, message.id)
                if job is not None and job.client == client:
                    self._cancel(message.id, "cancelled by its client")
                elif keeper is not None:
                    self.backends[keeper].send(message)
            case Bye():
                self._leave(client)
                for request_id in [name for name, keepers in self._served.items() if client in keepers]:
                    self._confirm(client, request_id)
            case Abort():
                found = message.id in self._jobs
                if found:
                    self._cancel(message.id, "aborted by another client")
                self._router.send(client, Aborted(message.id, found))
            case GetStatus():
                self._questions.ask(client, self.up())
                for backend in self.backends.values():
                    backend.send(message)

    def from_replica(self, index: int, message: ServerMessage | None, frames: Sequence[Any]) -> None:
        match message:
            case Welcome():
                self._spec = message.model
                self._heard.add(index)
                for job in list(self._jobs.values()):
                    if job.replica == index:
                        self._hand_over(job)
                    elif job.replica is None:
                        self._dispatch(job)
            case Status():
                self._questions.tell(index, message)
            case Accepted() | Progress() | Preview() | Result() | Failed():
                self._pass_on(index, message, frames)
            case None:  # it has lost its connection
                self._questions.give_up(index)

    def on_death(self, index: int, suspects: Collection[str], reason: DiffgenError | None) -> None:
        """A replica has died and is started again, or is gone for good for a reason. ``suspects`` are the requests that
        may be why. When it was the last, those that wait are left to :meth:`fail_all`."""
        self._heard.add(index)
        self.backends[index].up = False  # it may not have heard yet
        self._questions.give_up(index)
        if reason is not None:
            self.backends.pop(index).close()
            if not self.backends:
                return
        for request_id, job in [(name, job) for name, job in self._jobs.items() if job.replica == index]:
            if request_id in suspects and reason is not None:
                gone = f"its replica has given up while it may have been the cause: {reason}"
                self._fail(request_id, WorkerDied(gone, retryable=False))
                continue
            self._router.send(job.client, Restarting(request_id))
            job.left = job.cost
            if request_id in suspects:
                job.waits = True
            else:
                self._dispatch(job)

    def fail_all(self, error: DiffgenError) -> None:
        for request_id in list(self._jobs):
            self._fail(request_id, error)

    def _submit(self, client: bytes, message: Submit) -> None:
        held = self._jobs.get(message.id)
        if held is not None and held.client != client:
            taken = InvalidRequest(f"request id {message.id!r} is another client's; use a UUID", param="id")
            self._router.send(client, Failed(message.id, taken.info()))
        elif held is None:
            assert self._spec is not None
            cost = request_cost(message.params, self._spec.defaults)
            arrived = time.monotonic() - message.age
            self._jobs[message.id] = job = _Job(client, message, arrived, cost, cost)
            job.replica = self._keeper(client, message.id)
            self._forget(client, message.id)
            if job.replica is None:
                self._dispatch(job)
            else:
                self._hand_over(job)  # it has the answer, which was lost on its way

    def _keeper(self, client: bytes, request_id: str) -> int | None:
        """The replica that keeps the answer to this client's request."""
        replica = self._served.get(request_id, {}).get(client)
        return replica if replica in self.backends else None

    def _forget(self, client: bytes, request_id: str) -> None:
        keepers = self._served.get(request_id, {})
        keepers.pop(client, None)
        if not keepers:
            self._served.pop(request_id, None)

    def _confirm(self, client: bytes, request_id: str) -> None:
        keeper = self._keeper(client, request_id)
        if keeper is not None:
            self.backends[keeper].send(Received(request_id))
            self._forget(client, request_id)

    def _dispatch(self, job: _Job) -> None:
        up = self.up()
        job.replica = None
        if up:
            # All clients are one to a replica. An answer that it keeps under this id is to another request, and given
            # up where there is no replica without one.
            keepers = self._served.get(job.submit.id, {})
            free = [index for index in up if index not in keepers.values()]
            job.replica = self._dispatcher.choose(job.submit.params, free or up, self._loads())
            for client in [client for client, replica in keepers.items() if replica == job.replica]:
                self._forget(client, job.submit.id)
            self.backends[job.replica].send(Received(job.submit.id))
            self._hand_over(job)

    def _hand_over(self, job: _Job) -> None:
        assert job.replica is not None
        job.waits = False
        age = time.monotonic() - job.arrived
        self.backends[job.replica].send(msgspec.structs.replace(job.submit, age=age))

    def _loads(self) -> dict[int, Load]:
        loads = {index: Load() for index in self.backends}
        for job in self._jobs.values():
            if job.replica is not None:
                loads[job.replica].requests += 1
                loads[job.replica].cost += job.left
        return loads

    def _pass_on(
        self, index: int, message: Accepted | Progress | Preview | Result | Failed, frames: Sequence[Any]
    ) -> None:
        job = self._jobs.get(message.id)
        final = isinstance(message, Result | Failed)
        if job is None or job.replica != index:  # it has been moved, or has ended here
            if final and index not in self._served.get(message.id, {}).values():
                self.backends[index].send(Received(message.id))
            return
        if job.waits and not final:
            return  # of the life that has ended, on its way when its client was told so
        if isinstance(message, Progress) and message.stage == "denoise":
            job.left = job.cost * (1 - message.step / message.total)
        if final:
            del self._jobs[message.id]
            self._served.setdefault(message.id, {})[job.client] = index
            while len(self._served) > _MOST_SERVED:
                del self._served[next(iter(self._served))]
        if isinstance(message, Failed):
            self._router.send(job.client, message)  # told by where the client is
        else:
            self._router.forward(job.client, frames)

    def _leave(self, client: bytes) -> None:
        self._away.pop(client, None)
        for request_id in [name for name, job in self._jobs.items() if job.client == client]:
            self._withdraw(request_id)
            del self._jobs[request_id]

    def _cancel(self, request_id: str, reason: str) -> None:
        """Answer at once; what its replica says of it later is passed over."""
        self._withdraw(request_id)
        self._fail(request_id, RequestCancelled(f"request {request_id} was stopped: {reason}"))

    def _withdraw(self, request_id: str) -> None:
        replica = self._jobs[request_id].replica
        if replica is not None:
            self.backends[replica].send(Cancel(request_id))

    def _fail(self, request_id: str, error: DiffgenError) -> None:
        self._outbox.send(self._jobs.pop(request_id).client, Failed(request_id, error.info()))
