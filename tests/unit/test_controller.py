"""A controller of replicas without ranks: scripts answer at their sockets, or nobody does."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from processes import wait_until
from raw_client import Raw
from wire_server import PARAMS, Script, Server, draw, ignore

from diffgen.args import ListenArgs, RunArgs, ServerArgs
from diffgen.errors import DiffgenError, GenerationError, ServerClosed, WorkerDied
from diffgen.handle import GenerationHandle
from diffgen.params import ModelSpec, SamplingParams
from diffgen.server.controller import DataParallelController
from diffgen.wire.client import Connection
from diffgen.wire.messages import (
    Accepted,
    Cancel,
    Closing,
    Failed,
    GetStatus,
    Hello,
    Restarting,
    Status,
    Submit,
    Welcome,
)
from diffgen.wire.router import Router

STATUS = Status((), {"done": 1}, 1, 1.0, 0, 0, {}, {}, 0.1, {}, 0, {})
RUN = RunArgs(num_gpus=2, dp_size=2, dp_policy="round_robin", device="cpu")


def test_replicas_that_give_up_before_their_first_answer_end_it() -> None:
    """A client that is waiting for its welcome hears of it."""
    failures: queue.SimpleQueue[DiffgenError] = queue.SimpleQueue()
    controller = DataParallelController(ServerArgs(run=RUN), failures.put)
    controller._open()
    controller._thread.start()
    try:
        client = Connection(controller.socket)
        time.sleep(0.2)
        for supervisor in controller._supervisors:
            assert failures.empty()
            supervisor._on_failure(WorkerDied("given up"))
        assert failures.get(timeout=5).message == "given up"
        with pytest.raises(ServerClosed):
            client.wait_ready(5)
    finally:
        client.close()
        controller.stop()


def test_a_cancel_of_what_is_on_its_way_is_passed_on(model: ModelSpec) -> None:
    """The replica keeps the answer."""
    controller = DataParallelController(ServerArgs(run=RunArgs(device="cpu")))
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    replica = Router(controller._supervisors[0].socket, ListenArgs(), inbox)
    controller._open()
    controller._thread.start()
    try:
        with Raw(controller.socket) as client:
            ours, _ = inbox.get(timeout=5)
            replica.send(ours, Welcome("epoch", model))
            assert isinstance(client.hello(), Welcome)
            client.tell(Submit("a", SamplingParams(prompt="p")))
            assert inbox.get(timeout=5)[1].id == "a"
            replica.send(ours, Failed("a", GenerationError("by design").info()))
            assert isinstance(client.answer(), Failed)
            client.tell(Cancel("never heard of"))
            client.tell(Cancel("a"))
            assert inbox.get(timeout=5) == (ours, Cancel("a"))
    finally:
        controller.stop()
        replica.close(Closing())


class Replicas:
    """Two replicas, a controller before them, and a client of it."""

    def __init__(self, model: ModelSpec) -> None:
        self._model = model
        self.controller = DataParallelController(ServerArgs(run=RUN))
        self.servers = [self._serve(index, "first") for index in range(2)]
        self.controller._open()
        self.client = Connection(self.controller.socket)

    def _serve(self, index: int, epoch: str, script: Script = ignore) -> Server:
        return Server(self.controller._supervisors[index].socket, self._model, script, epoch)

    def run(self) -> None:
        """Let the controller go on by itself."""
        self.controller._thread.start()
        self.client.wait_ready(5)

    def kill(self, index: int, journal: tuple[str, ...] = ()) -> None:
        self.servers[index].close()
        self.controller._supervisors[index]._on_death(journal)

    def revive(self, index: int, script: Script) -> None:
        self.servers[index] = self._serve(index, "second", script)

    def close(self) -> None:
        self.client.close()
        self.controller.stop()
        if self.controller._thread.ident is None:
            self.controller._run()  # it closes the sockets
        for server in self.servers:
            server.close()


@pytest.fixture
def replicas(model: ModelSpec) -> Iterator[Replicas]:
    made = Replicas(model)
    yield made
    made.close()


def told(handle: GenerationHandle) -> list[type]:
    return [type(event) for event in handle.events() if isinstance(event, Accepted | Restarting)]


def accepted(replicas: Replicas) -> GenerationHandle:
    """A request that the next replica has taken and does not answer."""
    handle = replicas.client.submit(PARAMS)
    assert isinstance(next(handle.events()), Accepted)
    return handle


@pytest.mark.parametrize("suspect", [False, True], ids=["moves", "waits"])
def test_a_request_whose_replica_dies_is_told_and_runs_again(replicas: Replicas, suspect: bool) -> None:
    replicas.run()
    handle = accepted(replicas)
    replicas.servers[1].script = draw
    replicas.kill(0, (handle.id,) if suspect else ())
    if suspect:
        replicas.revive(0, draw)
    np.testing.assert_array_equal(handle.result(10).pixels, np.full((1, 1, 2, 2, 3), 3, np.uint8))
    assert told(handle) == [Accepted, Restarting, Accepted]
    assert (handle.id in replicas.servers[1].submits()) != suspect


def test_a_replica_that_is_back_before_its_death_is_heard_of_is_used(replicas: Replicas) -> None:
    """A late controller finds the death and the welcome of the next life together."""
    controller = replicas.controller
    wait_until(lambda: controller._turn() and len(controller._up()) == 2, 10, "both are up")
    replicas.servers[0].close()
    replicas.revive(0, draw)

    def hello() -> bool:
        controller._turn()
        time.sleep(0.5)  # it is on its way, and the answer
        return any(isinstance(message, Hello) for message in replicas.servers[0].seen)

    wait_until(hello, 10, "it is greeted")
    assert controller._up() == [1]
    controller._supervisors[0]._on_death(())
    controller._turn()
    assert controller._up() == [0, 1]


def test_a_status_waits_for_no_replica_that_has_died_since(replicas: Replicas) -> None:
    replicas.run()
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    ask = replicas.client.ask
    replicas.servers[0].status = STATUS
    asking = threading.Thread(target=lambda: found.put(ask(GetStatus(), 20)))
    asking.start()
    for server in replicas.servers:
        server.wait_for(GetStatus)
    replicas.kill(1)
    replicas.revive(1, draw)
    assert found.get(timeout=10).finished == {"done": 1}
    asking.join()
