"""A server of the wire protocol without ranks: what it answers is a script."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from diffgen.args import ListenArgs
from diffgen.errors import RequestCancelled
from diffgen.params import ModelSpec, SamplingParams
from diffgen.request import OutputBatch, TensorHeader
from diffgen.wire.messages import Accepted, Cancel, Failed, GetStatus, Hello, Progress, Result, Status, Submit, Welcome
from diffgen.wire.router import Router

#: Of a request whose picture is told from others by its seed.
PARAMS = SamplingParams(prompt="a", seed=3)
# Ignored by every client: closes a router without a farewell, as a death would.
SILENCE = Progress("nobody", "none", 1, 1)

Script = Callable[["Server", bytes, Submit], None]


def ignore(server: Server, client: bytes, message: Submit) -> None:
    server.router.send(client, Accepted(message.id, 0, message.params, ()))


def draw(server: Server, client: bytes, message: Submit) -> None:
    """Answer with a picture of one colour: the seed."""
    pixels = np.full((1, 1, 2, 2, 3), message.params.seed, np.uint8)
    server.router.send(client, Accepted(message.id, 0, message.params, ()))
    server.router.send(client, Progress(message.id, "denoise", 1, 1))
    server.router.send(client, Result(message.id, output(pixels, message.params)), pixels)


def output(pixels: Any, params: SamplingParams) -> OutputBatch:
    return OutputBatch(
        params=params,
        seeds=(3,),
        warnings=("w",),
        timings={"total": 0.5},
        peak_memory_mb=1.0,
        latent=False,
        tensor=TensorHeader(str(pixels.dtype), pixels.shape),
    )


class Server:
    """Rank 0's router and a loop of a few lines in place of its scheduler.

    Attributes:
        seen: what clients have said.
        script: answers a request.
        status: what it says when asked for one; None: nothing.
    """

    status: Status | None = None

    def __init__(self, address: str, model: ModelSpec, script: Script, epoch: str = "one") -> None:
        self.seen: list[Any] = []
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.router = Router(address, ListenArgs(), self._inbox)
        self._model, self.script, self._epoch = model, script, epoch
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def _loop(self) -> None:
        while (item := self._inbox.get()) is not None:
            client, message = item
            self.seen.append(message)
            if isinstance(message, Hello):
                self.router.send(client, Welcome(self._epoch, self._model))
            elif isinstance(message, Submit):
                self.script(self, client, message)
            elif isinstance(message, GetStatus) and self.status is not None:
                self.router.send(client, self.status)
            elif isinstance(message, Cancel):
                self.router.send(client, Failed(message.id, RequestCancelled("stopped").info()))

    def submits(self) -> list[str]:
        return [message.id for message in self.seen if isinstance(message, Submit)]

    def wait_for(self, kind: type) -> None:
        deadline = time.monotonic() + 5
        while not any(isinstance(message, kind) for message in self.seen):
            assert time.monotonic() < deadline, f"no {kind.__name__} came: {self.seen}"
            time.sleep(0.005)

    def close(self, farewell: msgspec.Struct = SILENCE) -> None:
        if self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join()
            self.router.close(farewell)
