"""Rank 0's socket, in a thread of its own, so that it answers while the main thread computes."""

from __future__ import annotations

import errno
import os
import queue
import socket as socketlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from diffgen.args import ListenArgs
from diffgen.errors import ErrorInfo, ProtocolError, StartFailed
from diffgen.wire import codec
from diffgen.wire.mailbox import Mailbox
from diffgen.wire.messages import Bye, ClientMessage, Failed, Gone, Ping, RequestId

USER = "diffgen"  # of ZMQ's PLAIN mechanism, whose password is the token

Incoming = tuple[bytes, ClientMessage | Gone]

# Between sockets, by ZMQ's own threads: a peer that computes or waits answers too.
HEARTBEAT_MS = 2000
SILENCE_MS = 30_000
_PING_S = 2
_PING = codec.encode(Ping())


class _Identified(msgspec.Struct, tag="Submit"):
    """What must be readable of a request to answer it."""

    id: RequestId


class Router:
    """Receives client messages into ``inbox``; sends what :meth:`send` is given, to clients over TCP errors without
    what they tell of this machine. Malformed input is only counted.

    A client whose connection has ended is forgotten, and :class:`Gone` put into the inbox; it is known again by its
    next message.

    Raises :class:`StartFailed` when an address cannot be bound.
    """

    def __init__(self, private: str, listen: ListenArgs, inbox: queue.SimpleQueue[Any] | Mailbox[Any]) -> None:
        self.inbox = inbox
        self.malformed = 0
        self._outgoing: Mailbox[tuple[bytes, list[bytes | memoryview] | Failed] | None] = Mailbox()
        self._context = zmq.Context()
        self._sockets = [self._bind(private)]
        self._authenticator: ThreadAuthenticator | None = None
        if listen.address is not None:
            self._sockets.append(self._bind(listen.address, listen.token))
        over_tcp = listen.address is not None and listen.address.startswith("tcp:")
        self._outside = self._sockets[-1] if over_tcp else None
        last = self._sockets[-1].getsockopt(zmq.LAST_ENDPOINT)
        self.address = last.rstrip(b"\0").decode() if isinstance(last, bytes) else str(last)
        self._owner: dict[bytes, zmq.Socket[bytes]] = {}
        self._pinged = time.monotonic()
        self._decoder = msgspec.msgpack.Decoder(ClientMessage)
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)
        self._thread.start()

    def _bind(self, address: str, token: str | None = None) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 2000)
        # No limit on what waits for a slow reader: a dropped result would be a request never answered.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_BODY)
        # A client keeps its identity over a reconnect, and the new connection must get the replies.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # Sending to a client without a connection fails, which is how its end is seen.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        if token is not None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_plain(domain="*", passwords={USER: token})
            socket.plain_server = True
        _refuse_live_ipc(address)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE:
                taken = f"cannot listen at {address}: it is in use; choose another port"
                raise StartFailed(taken, code="address_in_use") from None
            raise StartFailed(f"cannot listen at {address}: {error}; use tcp://IP:PORT or ipc://PATH") from None
        return socket

    def send(self, client: bytes, message: msgspec.Struct, tensor: Any = None) -> None:
        # How an error is told depends on the client's socket, which the thread knows.
        self._outgoing.put((client, message if isinstance(message, Failed) else codec.encode(message, tensor)))

    def forward(self, client: bytes, frames: Sequence[Any]) -> None:
        """Send a message that is encoded already, as another server has sent it."""
        self._outgoing.put((client, [frame.buffer for frame in frames]))

    def close(self, farewell: msgspec.Struct) -> None:
        """Send what is waiting and ``farewell`` to every client, then close the sockets."""
        for client in list(self._owner):
            self.send(client, farewell)
        self._outgoing.put(None)
        self._thread.join()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._outgoing.fileno(), zmq.POLLIN)
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)
        while True:
            for source, _ in poller.poll(1000 * _PING_S if self._owner else None):
                if isinstance(source, zmq.Socket):
                    self._receive(source)
                elif not self._send_waiting():
                    for socket in self._sockets:
                        socket.close()
                    self._outgoing.close()
                    return
            if time.monotonic() - self._pinged > _PING_S:
                self._pinged = time.monotonic()
                for client, socket in list(self._owner.items()):
                    self._deliver(socket, client, _PING)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        # Some at a time, so that a flood from outside cannot hold back the replies.
        for _ in range(100):
            try:
                client, *frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) > codec.MAX_CLIENT_FRAMES:
                    raise ProtocolError(f"{len(frames)} frames are too many")
                message = codec.decode(frames, self._decoder)
            except codec.VersionMismatch as error:
                self._deliver(socket, client, codec.version_refusal(error))
            except ProtocolError as error:
                self.malformed += 1
                self._refuse_request(socket, client, frames, error)
            else:
                if isinstance(message, Bye):
                    self._owner.pop(client, None)
                else:
                    self._owner[client] = socket
                self.inbox.put((client, message))

    def _refuse_request(
        self, socket: zmq.Socket[bytes], client: bytes, frames: list[bytes], error: ProtocolError
    ) -> None:
        """Answer a request that cannot be read but whose id can, as of a client that knows other fields."""
        try:
            body = msgspec.msgpack.decode(frames[1], type=_Identified)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError):
            return
        refusal = Failed(body.id, ErrorInfo("InvalidRequest", "invalid_request", error.message))
        self._deliver(socket, client, codec.encode(refusal))

    def _send_waiting(self) -> bool:
        for item in self._outgoing.take():
            if item is None:
                return False
            client, content = item
            socket = self._owner.get(client)
            if socket is None:
                continue
            if isinstance(content, Failed):
                error = content.error.public() if socket is self._outside else content.error
                content = codec.encode(Failed(content.id, error))
            self._deliver(socket, client, content)
        return True

    def _deliver(self, socket: zmq.Socket[bytes], client: bytes, frames: list[bytes | memoryview]) -> None:
        try:
            socket.send_multipart([client, *frames], copy=False)
        except zmq.ZMQError:
            if self._owner.pop(client, None) is not None:
                self.inbox.put((client, Gone()))


def _refuse_live_ipc(address: str) -> None:
    """ZMQ takes over the path of an ipc address, also from a server that still listens there."""
    path = address.removeprefix("ipc://")
    if path == address or not os.path.exists(path):
        return
    with socketlib.socket(socketlib.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return
    raise StartFailed(f"cannot listen at {address}: another server does; choose another path", code="address_in_use")
