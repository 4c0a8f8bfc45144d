"""Requests of the model that HTTP requests wait for: cancelled when nobody does, shared by Idempotency-Key."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.requests import Request

from diffgen.errors import DiffgenError, InvalidRequest
from diffgen.handle import GenerationHandle
from diffgen.http.errors import HttpError
from diffgen.result import GenerationResult

#: OpenAI's client comes back within 8 s.
GRACE_S = 10.0
_KEPT_S = 600.0
_KEPT_BYTES = 2**27


@dataclasses.dataclass
class Work:
    """One request of the model. ``created`` is in seconds since 1970; ``ended``, by the monotonic clock, when its end
    was first noticed."""

    handle: GenerationHandle
    digest: str
    keyed: bool
    created: float
    waiting: int = 0
    ended: float | None = None
    leaving: asyncio.TimerHandle | None = None  # until it is cancelled, as nobody waits for it
    cancelled: bool = False

    @property
    def kept_bytes(self) -> int:
        """What a finished one holds in memory."""
        if not self.handle.done():
            return 0
        with contextlib.suppress(DiffgenError):
            raw = self.handle.result().raw
            return 0 if raw is None else raw.nbytes
        return 0

    def worth_keeping(self, now: float) -> bool:
        """Whether a request with the same key is to get this one's end. ``now`` is by the monotonic clock."""
        if not self.handle.done():
            return not self.cancelled
        try:
            self.handle.result()
        except DiffgenError as error:
            return not (error.retryable or error.code == "request_cancelled")
        return self.ended is None or now - self.ended < _KEPT_S


class Works:
    """All work that HTTP requests wait for. Belongs to the event loop's thread. ``grace_s`` is how long keyed work goes
    on without anybody who waits for it."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._keyed: collections.OrderedDict[str, Work] = collections.OrderedDict()
        self.waiting = 0  # HTTP requests

    def begin(self, request: Request, values: Mapping[str, Any], submit: Callable[[], GenerationHandle]) -> Work:
        """Submit, or join what the same Idempotency-Key has begun. The caller must :meth:`leave` it.

        Raises :class:`InvalidRequest` for a key that was used for other ``values``.
        """
        key, digest = idempotency_key(request), fingerprint(values)
        self._forget()
        work = None if key is None else self._keyed.get(key)
        if work is not None and work.digest != digest:
            raise reused_key()
        if work is None:
            work = Work(submit(), digest, key is not None, time.time())
            if key is not None:
                self._keyed[key] = work
        if work.leaving is not None:
            work.leaving.cancel()
        work.waiting += 1
        self.waiting += 1
        return work

    def leave(self, work: Work) -> None:
        """Somebody waits no more. Work that nobody waits for is cancelled, keyed work after its grace."""
        work.waiting -= 1
        self.waiting -= 1
        if work.waiting or work.handle.done():
            return
        if work.keyed:
            work.leaving = asyncio.get_running_loop().call_later(self._grace_s, _cancel, work)
        else:
            _cancel(work)

    def _forget(self) -> None:
        now = time.monotonic()
        for work in self._keyed.values():
            if work.ended is None and work.handle.done():
                work.ended = now
        for key in [key for key, work in self._keyed.items() if not work.worth_keeping(now)]:
            del self._keyed[key]
        excess = sum(work.kept_bytes for work in self._keyed.values()) - _KEPT_BYTES
        for key in list(self._keyed):
            if excess <= 0:
                return
            excess -= self._keyed[key].kept_bytes
            if self._keyed[key].handle.done():
                del self._keyed[key]

    async def result(self, work: Work, request: Request) -> GenerationResult:
        """What the work comes to. Raises the request's error, or :class:`HttpError` when the client has left."""
        async with leaving(request) as left:
            ended = asyncio.ensure_future(_end(work.handle))
            await asyncio.wait({left, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return ended.result()
            ended.cancel()
            raise client_left()


def _cancel(work: Work) -> None:
    work.cancelled = True
    work.handle.cancel()


async def _end(handle: GenerationHandle) -> GenerationResult:
    return await handle


def client_left() -> HttpError:
    return HttpError(499, "client_closed_request", "the client has closed the connection")


@contextlib.asynccontextmanager
async def leaving(request: Request) -> AsyncIterator[asyncio.Task[None]]:
    """A task that ends when the client closes the connection; the request's body must have been read."""

    async def wait() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(wait())
    try:
        yield task
    finally:
        task.cancel()


def idempotency_key(request: Request) -> str | None:
    """The request's Idempotency-Key, apart from those of other API keys and routes. Raises :class:`InvalidRequest`."""
    given = request.headers.get("idempotency-key")
    if given is None:
        return None
    if not 1 <= len(given) <= 255 or not given.isprintable():
        rule = "an Idempotency-Key has 1 to 255 printable characters"
        raise InvalidRequest(f"{rule}, not {len(given)}", code="invalid_idempotency_key")
    scope = "\n".join((request.url.path, request.headers.get("authorization", ""), given))
    return hashlib.sha256(scope.encode()).hexdigest()


def fingerprint(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def reused_key() -> InvalidRequest:
    rule = "it was used for another request; take a new key for each"
    return InvalidRequest(f"this Idempotency-Key cannot be used again: {rule}", code="idempotency_key_reused")
