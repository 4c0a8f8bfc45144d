"""The pipes between the supervisor and each rank, and between it and the launcher of the ranks."""

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


class Place(_Message, frozen=True):
    """Where a replica is among those of its machine: the number of its first rank, and the ranks of the others."""

    first: int = 0
    others: int = 0


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
    place: Place = Place()


class Stop(_Message, frozen=True):
    """To rank 0: end the replica after the current unit."""


class Ready(_Message, frozen=True):
    """The model is loaded and every group has run a collective. ``address`` is where rank 0 listens for others."""

    model: str
    address: str | None = None


class Heartbeat(_Message, frozen=True):
    """Each second, from a thread, so that a long unit does not look like death. ``unit_since`` is of the system's
    monotonic clock."""

    tick: int
    units: dict[str, int]
    fingerprint: int
    unit_since: float | None
    voted: bool


class Journal(_Message, frozen=True):
    """From rank 0, before each tick: whom it runs. If the replica dies, they are the suspects."""

    ids: tuple[str, ...]


class RankError(_Message, frozen=True):
    """The rank ends because of this."""

    error: ErrorInfo


class Prepare(_Message, frozen=True):
    """First message to the launcher. ``folder`` is to be removed when the supervisor has gone."""

    args: ServerArgs
    folder: str


class Fork(_Message, frozen=True):
    """To the launcher: make a rank, with the descriptor that follows as the end of its pipe."""


class Forked(_Message, frozen=True):
    """From the launcher, one for each :class:`Fork` in its order."""

    pid: int


class Exited(_Message, frozen=True):
    """From the launcher; ``code`` is negative for a signal."""

    pid: int
    code: int


ToRank = Start | Stop
ToLauncher = Prepare | Fork
FromLauncher = Forked | Exited
FromRank = Ready | Heartbeat | Journal | RankError

M = TypeVar("M")

TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
TO_LAUNCHER: msgspec.msgpack.Decoder[ToLauncher] = msgspec.msgpack.Decoder(ToLauncher)
FROM_LAUNCHER: msgspec.msgpack.Decoder[FromLauncher] = msgspec.msgpack.Decoder(FromLauncher)
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
