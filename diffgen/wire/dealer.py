"""A client's socket, and what becomes of its connection."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

import zmq
from zmq.utils.monitor import recv_monitor_message

from diffgen.wire.router import USER

HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED


class Dealer:
    """A DEALER socket that connects to ``address``, and again whenever it has lost its connection. It has an identity,
    by which the server knows it then. One thread uses it.

    ``options`` are ZMQ's. Raises :class:`zmq.ZMQError` for an address that is none.

    Attributes:
        socket: without limits on what waits in it.
        monitor: readable when there is an :meth:`event`.
    """

    def __init__(self, address: str, options: Mapping[zmq.SocketOption, int], token: str | None = None) -> None:
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        for option, value in {zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.RECONNECT_IVL: 50, **options}.items():
            self.socket.setsockopt(option, value)
        if token is not None:
            self.socket.plain_username = USER.encode()
            self.socket.plain_password = token.encode()
        # Before the connect, or the handshake may be over when the monitor comes.
        self.monitor = self.socket.get_monitor_socket(_EVENTS)
        try:
            self.socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    def event(self, flags: int = 0) -> int:
        """The next: a handshake that has succeeded or failed, or the end of a connection."""
        return int(recv_monitor_message(self.monitor, flags)["event"])

    def close(self) -> None:
        """What waits is sent for as long as the option LINGER says."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()
        self._context.term()
