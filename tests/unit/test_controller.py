"""A controller of replicas that are not there: nobody answers at their sockets."""

from __future__ import annotations

import queue
import time
from typing import Any

import pytest
from raw_client import Raw

from diffgen.args import ListenArgs, RunArgs, ServerArgs
from diffgen.errors import DiffgenError, GenerationError, ServerClosed, WorkerDied
from diffgen.params import ModelSpec, SamplingParams
from diffgen.server.controller import DataParallelController
from diffgen.wire.client import Connection
from diffgen.wire.messages import Cancel, Closing, Failed, Submit, Welcome
from diffgen.wire.router import Router


def test_replicas_that_give_up_before_their_first_answer_end_it() -> None:
    """A client that is waiting for its welcome hears of it."""
    failures: queue.SimpleQueue[DiffgenError] = queue.SimpleQueue()
    controller = DataParallelController(ServerArgs(run=RunArgs(num_gpus=2, dp_size=2, device="cpu")), failures.put)
    controller._open()
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
