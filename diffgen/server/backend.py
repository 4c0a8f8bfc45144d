"""The controller's connection to one replica."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import zmq

from diffgen.wire import codec
from diffgen.wire.dealer import Dealer
from diffgen.wire.mailbox import Mailbox
from diffgen.wire.messages import Hello, ServerMessage, Welcome


class Backend:
    """A client of a replica that passes on what it says. One thread uses it.

    Attributes:
        up: the replica has welcomed it since the connection was made.
    """

    def __init__(self, address: str) -> None:
        self.up = False
        self._decoder = codec.server_message_decoder()
        self._dealer = Dealer(address, {zmq.LINGER: 0})

    @staticmethod
    def wait(mailbox: Mailbox[Any], backends: list[Backend], timeout_ms: int | None) -> set[Backend]:
        """Those that have something to :meth:`receive`, once there is any, the mailbox has something, or too late."""
        poller = zmq.Poller()
        poller.register(mailbox.fileno(), zmq.POLLIN)
        sources: dict[Any, Backend] = {}
        for backend in backends:
            sources |= {backend._dealer.socket: backend, backend._dealer.monitor: backend}
        for source in sources:
            poller.register(source, zmq.POLLIN)
        return {sources[source] for source, _ in poller.poll(timeout_ms) if source in sources}

    def send(self, message: msgspec.Struct) -> None:
        """Send, or do nothing where the replica is away."""
        if self.up:
            with contextlib.suppress(zmq.ZMQError):
                self._dealer.socket.send_multipart(codec.encode(message), zmq.NOBLOCK)

    def receive(self) -> list[tuple[ServerMessage | None, list[Any]]]:
        """What has come, each message with its frames; None says that the connection is lost."""
        found: list[tuple[ServerMessage | None, list[Any]]] = []
        with contextlib.suppress(zmq.Again):
            while True:
                event = self._dealer.event(zmq.NOBLOCK)
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._dealer.socket.send_multipart(codec.encode(Hello()), zmq.NOBLOCK)
                else:
                    self.up = False
                    found.append((None, []))
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._dealer.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                message = codec.decode(frames, self._decoder, max_body=codec.MAX_ANSWER)
                self.up = self.up or isinstance(message, Welcome)
                found.append((message, frames))
        return found

    def close(self) -> None:
        self._dealer.close()
