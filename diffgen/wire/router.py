"""Rank 0's socket, in a thread of its own, so that it answers while the main thread computes."""

from __future__ import annotations

import collections
import dataclasses
import errno
import logging
import os
import queue
import socket as socketlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from diffgen.args import ListenArgs
from diffgen.errors import ErrorInfo, ProtocolError, StartFailed
from diffgen.wire import codec
from diffgen.wire.mailbox import Mailbox
from diffgen.wire.messages import Bye, ClientMessage, Failed, Gone, Hello, Ping, RequestId, ServerMessage

logger = logging.getLogger(__name__)

USER = "diffgen"  # of ZMQ's PLAIN mechanism, whose password is the token

#: Answers what can be answered while a unit of work runs; None for a message that has to wait for its end.
AtOnce = Callable[["Router", ClientMessage], ServerMessage | None]

# What may wait for a client that reads slowly or not at all: bytes, of which one message alone may have more, and
# messages of less than _SMALL bytes, which are not worth counting the bytes of.
MOST_WAITING = 2**30
_MOST_MESSAGES = 2**16
_SMALL = 4096

# Between sockets, by ZMQ's own threads: a peer that computes or waits answers too.
HEARTBEAT_MS = 2000
SILENCE_MS = 30_000
_PING_S = 2
_PING = codec.encode(Ping())


class _Identified(msgspec.Struct, tag="Submit"):
    """What must be readable of a request to answer it."""

    id: RequestId


@dataclasses.dataclass
class _Client:
    """To one that is ``behind`` something was not sent, since too much waited."""

    socket: zmq.Socket[bytes]
    behind: bool = False
    # What ZMQ holds of messages that are not small, and their bytes. Small ones it counts itself.
    _unsent: collections.deque[tuple[zmq.MessageTracker, int]] = dataclasses.field(default_factory=collections.deque)
    _bytes: int = 0

    def add(self, tracker: zmq.MessageTracker, size: int) -> None:
        if not tracker.done:
            self._unsent.append((tracker, size))
            self._bytes += size

    def waiting(self) -> int:
        """Bytes that are not sent yet, without small messages."""
        while self._unsent and self._unsent[0][0].done:
            self._bytes -= self._unsent.popleft()[1]
        return self._bytes


class Router:
    """Receives client messages into ``inbox``; sends what :meth:`send` is given, to clients over TCP errors without
    what they tell of this machine. Malformed input is only counted.

    A client whose connection has ended is forgotten, and :class:`Gone` put into the inbox; it is known again by its
    next message. One that does not read gets no more once ``MOST_WAITING`` bytes wait for it, as if it were away; when
    it has read all, it is taken to say :class:`Hello`, and what follows makes up for what it has missed.

    Raises :class:`StartFailed` when an address cannot be bound.
    """

    def __init__(
        self,
        private: str,
        listen: ListenArgs,
        inbox: queue.SimpleQueue[Any] | Mailbox[Any],
        at_once: AtOnce = lambda router, message: None,
    ) -> None:
        """``at_once`` is asked about each message, on the router's thread."""
        self.inbox = inbox
        self._at_once = at_once
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
        self._owner: dict[bytes, _Client] = {}
        self._pinged = time.monotonic()
        self._decoder = msgspec.msgpack.Decoder(ClientMessage)
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)
        self._thread.start()

    def _bind(self, address: str, token: str | None = None) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 2000)
        socket.setsockopt(zmq.SNDHWM, _MOST_MESSAGES)
        socket.copy_threshold = _SMALL  # only of what it does not copy ZMQ tells when it is sent
        socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_BODY)
        # A client keeps its identity over a reconnect, and the new connection must get the replies.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # Sending to a client without a connection fails, which is how its end is seen.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        socket.setsockopt(zmq.TCP_MAXRT, SILENCE_MS)  # heartbeats wait behind a large message that nobody takes
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
                for client, known in list(self._owner.items()):
                    if self._deliver(known.socket, client, _PING) and known.behind and not known.waiting():
                        known.behind = False
                        logger.warning("client %s reads again", client.hex())
                        self._hear(known.socket, client, Hello())

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
                elif client not in self._owner or self._owner[client].socket is not socket:
                    self._owner[client] = _Client(socket)
                self._hear(socket, client, message)

    def _hear(self, socket: zmq.Socket[bytes], client: bytes, message: ClientMessage) -> None:
        answer = self._at_once(self, message)
        if answer is not None:
            self._deliver(socket, client, codec.encode(answer))
        if answer is None or isinstance(message, Hello):  # which also says that the client is there
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
            known = self._owner.get(client)
            if known is None:
                continue
            if isinstance(content, Failed):
                error = content.error.public() if known.socket is self._outside else content.error
                content = codec.encode(Failed(content.id, error))
            self._deliver(known.socket, client, content)
        return True

    def _deliver(self, socket: zmq.Socket[bytes], client: bytes, frames: list[bytes | memoryview]) -> bool:
        """Whether ZMQ has taken it: not for a client that has gone, or does not read what waits for it."""
        known = self._owner.get(client)
        size = sum(memoryview(frame).nbytes for frame in frames)
        waiting = 0 if known is None else known.waiting()
        if known is not None and size >= _SMALL and waiting and waiting + size > MOST_WAITING:
            self._fall_behind(client, known, waiting)
            return False
        try:
            tracker = socket.send_multipart([client, *frames], zmq.NOBLOCK, copy=False, track=True)
        except zmq.Again:
            if known is not None:
                self._fall_behind(client, known, waiting)
            return False
        except zmq.ZMQError:
            if self._owner.pop(client, None) is not None:
                self.inbox.put((client, Gone()))
            return False
        if known is not None and tracker is not None:
            known.add(tracker, size)
        return True

    def _fall_behind(self, client: bytes, known: _Client, waiting: int) -> None:
        if not known.behind:
            what = "client %s reads too slowly or not at all: %d MiB wait for it, and more is not sent"
            logger.warning(what, client.hex(), waiting // 2**20)
        known.behind = True


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
