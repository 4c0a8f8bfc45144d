"""The controller's connection to one replica."""

from __future__ import annotations

import contextlib
import uuid
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from diffgen.wire import codec
from diffgen.wire.mailbox import Mailbox
from diffgen.wire.messages import Hello, ServerMessage, Welcome

_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Backend:
    """A client of a replica that passes on what it says. One thread uses it.

    Attributes:
        up: the replica has welcomed it since the connection was made.
    """

    def __init__(self, address: str) -> None:
        self.up = False
        self._decoder = codec.server_message_decoder()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        # Before the connect, or the handshake may be over when the monitor comes.
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._socket.connect(address)

    @staticmethod
    def wait(mailbox: Mailbox[Any], backends: list[Backend], timeout_ms: int | None) -> set[Backend]:
        """Those that have something to :meth:`receive`, once there is any, the mailbox has something, or too late."""
        poller = zmq.Poller()
        poller.register(mailbox.fileno(), zmq.POLLIN)
        sources: dict[Any, Backend] = {}
        for backend in backends:
            sources |= {backend._socket: backend, backend._monitor: backend}
        for source in sources:
            poller.register(source, zmq.POLLIN)
        return {sources[source] for source, _ in poller.poll(timeout_ms) if source in sources}

    def send(self, message: msgspec.Struct) -> None:
        """Send, or do nothing where the replica is away."""
        if self.up:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send_multipart(codec.encode(message), zmq.NOBLOCK)

    def receive(self) -> list[tuple[ServerMessage | None, list[Any]]]:
        """What has come, each message with its frames; None says that the connection is lost."""
        found: list[tuple[ServerMessage | None, list[Any]]] = []
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._socket.send_multipart(codec.encode(Hello()), zmq.NOBLOCK)
                else:
                    self.up = False
                    found.append((None, []))
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                message = codec.decode(frames, self._decoder, max_body=codec.MAX_BODY)
                self.up = self.up or isinstance(message, Welcome)
                found.append((message, frames))
        return found

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._context.term()
