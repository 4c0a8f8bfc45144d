"""What ended requests, kept until their clients have it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from diffgen.wire.messages import Bye, ClientMessage, Failed, Gone, Received, Result, Submit
from diffgen.wire.router import Router

KEEP_S = 300.0
KEEP_BYTES = 256 * 2**20
_MESSAGE_BYTES = 2048  # about what one takes without its tensor


@dataclasses.dataclass(frozen=True)
class _Kept:
    client: bytes
    message: Result | Failed
    tensor: Any  # numpy array
    until: float

    @property
    def size(self) -> int:
        return _MESSAGE_BYTES + (0 if self.tensor is None else self.tensor.nbytes)


class Outbox:
    """An answer is lost when its connection breaks while it is on its way. So the last one of each request is kept
    until its client says that it has it, for at most ``KEEP_S`` seconds and, all together, ``KEEP_BYTES``, the oldest
    going first; asked for again in that time, it is sent again.
    """

    def __init__(self, router: Router, clock: Callable[[], float] = time.monotonic) -> None:
        self._router, self._clock = router, clock
        self._kept: dict[str, _Kept] = {}  # oldest first
        self._bytes = 0

    def send(self, client: bytes, message: Result | Failed, tensor: Any = None) -> None:
        self._drop(message.id)
        self._kept[message.id] = kept = _Kept(client, message, tensor, self._clock() + KEEP_S)
        self._bytes += kept.size
        while self._bytes > KEEP_BYTES:
            self._drop(next(iter(self._kept)))
        self._router.send(client, message, tensor)

    def take(self, client: bytes, message: ClientMessage | Gone) -> bool:
        """Whether the message was about a kept answer, and is done with."""
        match message:
            case Received():
                if self._is(message.id, client):
                    self._drop(message.id)
                return True
            case Submit() if self._is(message.id, client):
                kept = self._kept[message.id]
                self._router.send(client, kept.message, kept.tensor)
                return True
            case Bye():
                for request_id in [each for each in self._kept if self._is(each, client)]:
                    self._drop(request_id)
        return False

    def expire(self) -> float | None:
        """Drop what is too old; the seconds until there is more to drop, or None."""
        now = self._clock()
        while self._kept:
            request_id, oldest = next(iter(self._kept.items()))
            if oldest.until > now:
                return oldest.until - now
            self._drop(request_id)
        return None

    def _is(self, request_id: str, client: bytes) -> bool:
        return request_id in self._kept and self._kept[request_id].client == client

    def _drop(self, request_id: str) -> None:
        kept = self._kept.pop(request_id, None)
        self._bytes -= 0 if kept is None else kept.size
