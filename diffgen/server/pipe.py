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


class Start(_Message):
    """First message to a rank: all that it needs. It travels here because a command line can be read by others."""

    args: ServerArgs
    rank: int
    run_folder: str
    socket: str


class Stop(_Message):
    """To rank 0: end the replica after the current unit."""


class Ready(_Message):
    """The model is loaded and every group has run a collective."""

    model: str


class Heartbeat(_Message):
    """Each second, from a thread, so that a long unit does not look like death."""

    tick: int
    units: dict[str, int]
    fingerprint: int
    unit_since: float | None


class RankError(_Message):
    """The rank ends because of this."""

    error: ErrorInfo


ToRank = Start | Stop
FromRank = Ready | Heartbeat | RankError

M = TypeVar("M", ToRank, FromRank)


class Pipe(Generic[M]):
    """Typed messages over a connection; ``M`` is what this end receives."""

    def __init__(self, connection: Connection, receives: type[M]) -> None:
        self.connection = connection
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(receives)
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
