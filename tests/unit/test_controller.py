"""A controller of replicas that are not there: nobody answers at their sockets."""

from __future__ import annotations

import queue
import time

import pytest

from diffgen.args import RunArgs, ServerArgs
from diffgen.errors import DiffgenError, ServerClosed, WorkerDied
from diffgen.server.controller import DataParallelController
from diffgen.wire.client import Connection


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
