"""Hand-over of work to a thread that sleeps in a ZMQ poll."""

from __future__ import annotations

import collections
import contextlib
import socket
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue whose reader waits on :meth:`fileno`; any thread may :meth:`put`."""

    def __init__(self) -> None:
        self._items: collections.deque[T] = collections.deque()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def put(self, item: T) -> None:
        self._items.append(item)
        # A full pipe means that the reader has been woken already; a closed one, that nobody reads any more.
        with contextlib.suppress(BlockingIOError, OSError):
            self._writer.send(b"\0")

    def take(self) -> list[T]:
        """Everything put so far, oldest first."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass
        taken = []
        while self._items:
            taken.append(self._items.popleft())
        return taken

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
