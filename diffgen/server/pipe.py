"""The pipe between the supervisor and one rank."""

from __future__ import annotations

import contextlib
import threading
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

import msgspec

from diffgen.args import ServerArgs
from diffgen.errors import ErrorInfo

MAX_BYTES = 2**20


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Start(_Message, frozen=True):
    """First message to a rank: all that it needs. It travels here because a command line can be read by others.

    ``restarts`` counts the starts before this one; ``deaths``, by request id, the replicas that died while they ran it.
    Of requests that failed alone while other ranks waited for the failing one, ``failures`` has the errors.
    """

    args: ServerArgs
    rank: int
    run_folder: str
    restarts: int
    socket: str
    deaths: dict[str, int]
    failures: dict[str, ErrorInfo]


class Stop(_Message, frozen=True):
    """To rank 0: end the replica after the current unit."""


class Ready(_Message, frozen=True):
    """The model is loaded and every group has run a collective. ``address`` is where rank 0 listens for others."""

    model: str
    address: str | None = None


class Heartbeat(_Message, frozen=True):
    """Each second, from a thread, so that a long unit does not look like death."""

    tick: int
    units: dict[str, int]
    fingerprint: int
    unit_since: float | None


class Journal(_Message, frozen=True):
    """From rank 0, before each tick: whom it runs. If the replica dies, they are the suspects."""

    ids: tuple[str, ...]


class RankError(_Message, frozen=True):
    """The rank ends because of this."""

    error: ErrorInfo


ToRank = Start | Stop
FromRank = Ready | Heartbeat | Journal | RankError

M = TypeVar("M")

TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


class Pipe(Generic[M]):
    """Typed messages over a connection; ``M`` is what this end receives."""

    def __init__(self, connection: Connection, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self.connection = connection
        self._decoder = decoder
        self._sending = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        """Send, or do nothing if the other side has gone: :meth:`receive` tells of that."""
        with self._sending, contextlib.suppress(OSError):
            self.connection.send_bytes(msgspec.msgpack.encode(message))

    def receive(self) -> M:
        """The next message. Raises :class:`EOFError` when the other side has gone."""
        try:
            return self._decoder.decode(self.connection.recv_bytes(MAX_BYTES))
        except OSError:
            raise EOFError from None

    def close(self) -> None:
        self.connection.close()
