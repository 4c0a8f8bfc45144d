"""A controller of replicas without ranks: scripts answer at their sockets, or nobody does."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from processes import wait_until
from raw_client import Raw
from wire_server import PARAMS, Script, Server, draw, ignore, output

from diffgen.api import DiffGenerator
from diffgen.args import ListenArgs, RunArgs, ServerArgs
from diffgen.errors import DiffgenError, GenerationError, ServerClosed, WorkerDied
from diffgen.handle import GenerationHandle
from diffgen.params import ModelSpec, SamplingParams
from diffgen.result import GenerationResult
from diffgen.server.controller import DataParallelController
from diffgen.server.outbox import Outbox
from diffgen.wire.client import Connection
from diffgen.wire.messages import (
    Abort,
    Aborted,
    Accepted,
    Bye,
    Cancel,
    Closing,
    Failed,
    GetStatus,
    Hello,
    Progress,
    Received,
    Restarting,
    Result,
    Status,
    Submit,
    Welcome,
)
from diffgen.wire.router import Router

STATUS = Status((), {"done": 1}, 1, 1.0, 0, 0, {}, {}, 0.1, {}, 0, {})
TOKEN = "s3cret"
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


class Lone:
    """A controller of one replica, which does what the test says."""

    def __init__(self, model: ModelSpec) -> None:
        listen = ListenArgs(address="tcp://127.0.0.1:*", token=TOKEN)
        self.controller = DataParallelController(ServerArgs(run=RunArgs(device="cpu"), listen=listen))
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._router = Router(self.controller._supervisors[0].socket, ListenArgs(), self._inbox)
        self._outbox = Outbox(self._router)
        self.controller._open()
        self.controller._thread.start()
        self._ours, _ = self._inbox.get(timeout=5)
        self._router.send(self._ours, Welcome("epoch", model))

    def hears(self) -> Any:
        client, message = self._inbox.get(timeout=5)
        assert client == self._ours
        return message

    def hears_new(self) -> Submit:
        """Do as rank 0, until a request comes that is new to it."""
        while self._outbox.take(self._ours, message := self.hears()):
            pass
        assert isinstance(message, Submit)
        return message

    def draw(self) -> None:
        """Draw the next new request: all of the colour of its seed."""
        message = self.hears_new()
        pixels = np.full((1, 1, 2, 2, 3), message.params.seed, np.uint8)
        self._outbox.send(self._ours, Result(message.id, output(pixels, message.params)), pixels)

    def fail(self, reason: str) -> None:
        """Let the next new request fail."""
        self._outbox.send(self._ours, Failed(self.hears_new().id, GenerationError(reason).info()))

    def close(self) -> None:
        self.controller.stop()
        self._router.close(Closing())


@pytest.fixture
def lone(model: ModelSpec) -> Iterator[Lone]:
    made = Lone(model)
    yield made
    made.close()


def colour(client: Raw) -> int:
    assert isinstance(client.answer(), Result)
    return client.tensors[0][0]


def test_what_a_client_says_of_its_kept_answers_is_passed_on(lone: Lone) -> None:
    """And nothing that another says of them."""
    with Raw(lone.controller.socket) as owner, Raw(lone.controller.socket) as other:
        assert isinstance(owner.hello(), Welcome)
        for name in "ab":
            owner.tell(Submit(name, PARAMS))
            lone.draw()
            assert colour(owner) == 3
        for message in (Bye(), Received("a"), Cancel("a")):
            other.tell(message)
        assert isinstance(other.hello(), Welcome)
        for message in (Cancel("never heard of"), Cancel("a"), Received("a"), Cancel("a"), Bye()):
            owner.tell(message)
        assert [lone.hears() for _ in range(3)] == [Cancel("a"), Received("a"), Received("b")]


def test_a_kept_answer_is_given_to_no_other_client(lone: Lone) -> None:
    """What another asks for under its id is a new request, as a single server has it."""
    with Raw(lone.controller.socket) as owner, Raw(lone.controller.socket) as other:
        for client, seed in ((owner, 3), (other, 4), (owner, 5)):
            assert isinstance(client.hello(), Welcome)
            client.tell(Submit("a", SamplingParams(prompt="p", seed=seed)))
            lone.draw()
            assert colour(client) == seed
        owner.tell(Submit("a", PARAMS))
        owner.tell(Submit("b", PARAMS))
        lone.draw()
        assert (colour(owner), colour(owner)) == (5, 3), "its own, once more"


def test_what_a_replica_says_of_its_machine_stays_on_it(lone: Lone) -> None:
    assert lone.controller.address is not None
    with Raw(lone.controller.socket) as near, Raw(lone.controller.address, TOKEN) as far:
        for name, client, told in (("a", near, "no /srv/a/b"), ("b", far, "no (path)")):
            assert isinstance(client.hello(), Welcome)
            client.tell(Submit(name, PARAMS))
            lone.fail("no /srv/a/b")
            assert client.answer().error.message == told


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


def up(controller: DataParallelController) -> list[int]:
    assert controller._relay is not None
    return controller._relay.up()


def told(handle: GenerationHandle) -> list[type]:
    return [type(event) for event in handle.events() if isinstance(event, Accepted | Restarting)]


def accepted(replicas: Replicas) -> GenerationHandle:
    """A request that the next replica has taken and does not answer."""
    handle = replicas.client.submit(PARAMS)
    assert isinstance(next(handle.events()), Accepted)
    return handle


def test_an_answer_kept_for_a_client_outlives_anothers_under_its_id(replicas: Replicas) -> None:
    """It is on another replica then: each knows the controller alone."""
    replicas.run()
    for server in replicas.servers:
        server.script = draw
    with Raw(replicas.controller.socket) as first, Raw(replicas.controller.socket) as second:
        for client, name, seed in ((first, "a", 3), (first, "b", 4), (second, "a", 5), (first, "a", 3)):
            client.tell(Submit(name, SamplingParams(prompt="p", seed=seed)))
            while not isinstance(client.answer(), Result):
                pass
            assert client.tensors[0][0] == seed
    assert [server.submits() for server in replicas.servers] == [["a", "a"], ["b", "a"]]
    said = [message for message in replicas.servers[0].seen if isinstance(message, Received | Submit)]
    assert [type(message) for message in said] == [Received, Submit, Submit], "nothing came between them"


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
    wait_until(lambda: controller._turn() and len(up(controller)) == 2, 10, "both are up")
    replicas.servers[0].close()
    replicas.revive(0, draw)

    def hello() -> bool:
        controller._turn()
        time.sleep(0.5)  # it is on its way, and the answer
        return any(isinstance(message, Hello) for message in replicas.servers[0].seen)

    wait_until(hello, 10, "it is greeted")
    assert up(controller) == [1]
    controller._supervisors[0]._on_death(())
    wait_until(lambda: controller._turn() and up(controller) == [0, 1], 10, "it is used")


def test_what_a_dead_replica_has_said_does_not_follow_restarting(replicas: Replicas) -> None:
    """A late controller finds the death before it."""

    def begin(server: Server, client: bytes, message: Submit) -> None:
        ignore(server, client, message)
        server.router.send(client, Progress(message.id, "denoise", 1, 2))

    controller, server = replicas.controller, replicas.servers[0]
    relay = controller._relay
    assert relay is not None
    server.script = begin
    handle = replicas.client.submit(PARAMS)
    wait_until(lambda: controller._turn() and handle.id in relay._jobs, 10, "it is sent")
    server.wait_for(Submit)
    replicas.kill(0, (handle.id,))
    time.sleep(0.5)  # what it has said is on its way
    replicas.revive(0, draw)
    replicas.run()
    handle.result(10)
    assert [type(event) for event in handle.events()] == [Restarting, Accepted, Progress, GenerationResult]


def test_a_status_waits_for_no_replica_that_has_died_since(replicas: Replicas) -> None:
    replicas.run()
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    ask = replicas.client.ask
    replicas.servers[0].status = STATUS
    asking = threading.Thread(target=lambda: found.put(ask(GetStatus(), 20)))
    asking.start()
    for server in replicas.servers:
        server.wait_for(GetStatus)
    assert ask(Abort("unknown"), 20) == Aborted("unknown", False), "which waits for none, and is not taken for it"
    replicas.kill(1)
    replicas.revive(1, draw)
    assert found.get(timeout=10).finished == {"done": 1}
    asking.join()


def test_a_forks_copy_of_a_generator_closes_nothing(replicas: Replicas) -> None:
    replicas.run()
    generator = DiffGenerator(replicas.client, replicas.client.wait_ready(5), replicas.controller)
    child = os.fork()
    if child == 0:
        try:
            generator.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    late = Connection(replicas.controller.socket)
    late.wait_ready(5)
    late.close()
    generator.close()
