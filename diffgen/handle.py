"""A submitted request as its owner sees it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from diffgen.errors import DiffgenError
from diffgen.params import SamplingParams
from diffgen.result import GenerationResult
from diffgen.wire.messages import Accepted, Failed, Progress, Restarting

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Preview:
    """What the outputs are going to be, small, after ``step`` of ``total`` denoising steps.

    ``pixels`` is uint8 (outputs, latent frames, h, w, 3): a pixel for each of the latents', a frame for each latent
    frame.
    """

    id: str
    step: int
    total: int
    pixels: NDArray[np.uint8]


Event = Accepted | Progress | Preview | Restarting | Failed | GenerationResult


def is_final(event: Event) -> bool:
    """Whether nothing comes after this event."""
    return isinstance(event, Failed | GenerationResult)


def waitable(timeout: float) -> float:
    """The seconds, or the most that the waits of the standard library take: they fail on more."""
    return min(timeout, threading.TIMEOUT_MAX)


class GenerationHandle:
    """Thread-safe view of one request, made by :meth:`diffgen.DiffGenerator.submit`.

    Awaiting it gives the result as well: ``result = await handle``.

    Attributes:
        created: by the monotonic clock, since when somebody has waited for it.
        owner: for who has made it: what must not end before the request has.
    """

    def __init__(self, params: SamplingParams, cancel: Callable[[str], None], age: float = 0.0) -> None:
        self.id = uuid.uuid4().hex
        self.params = params
        self.created = time.monotonic() - age
        self.owner: object = None
        self._cancel = cancel
        self._events: list[Event] = []
        self._news = threading.Condition()
        self._listeners: list[Callable[[Event], None]] = []
        self._future: concurrent.futures.Future[GenerationResult] = concurrent.futures.Future()
        self._future.set_running_or_notify_cancel()

    def __repr__(self) -> str:
        last = self._events[-1] if self._events else None
        return f"<GenerationHandle {self.id} {type(last).__name__ if last else 'sent'}>"

    @property
    def late_at(self) -> float:
        """When its time limit has passed, on the monotonic clock."""
        limit = self.params.time_limit
        return math.inf if limit is None else self.created + limit

    def done(self) -> bool:
        return self._future.done()

    def cancel(self) -> None:
        """Take the request back, within one unit of work; the handle then ends with ``RequestCancelled``.

        Calling it again, or after the end, does nothing.
        """
        if not self.done():
            self._cancel(self.id)

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the result, at most ``timeout`` seconds.

        Raises :class:`TimeoutError` (the request goes on) or the request's own :class:`DiffgenError`.
        """
        try:
            return self._future.result(None if timeout is None else waitable(timeout))
        except TimeoutError:
            raise TimeoutError(f"request {self.id} has not ended within {timeout:g} s and goes on") from None

    def events(self) -> Iterator[Event]:
        """All events from the first, as they come; the last is the result or a ``Failed``. Any number may iterate."""
        position = 0
        while True:
            with self._news:
                while len(self._events) <= position:
                    self._news.wait()
                event = self._events[position]
            position += 1
            yield event
            if is_final(event):
                return

    async def aevents(self) -> AsyncIterator[Event]:
        """:meth:`events` for asyncio."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def forward(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(queue.put_nowait, event)

        self.subscribe(forward)
        try:
            while True:
                event = await queue.get()
                yield event
                if is_final(event):
                    return
        finally:
            self.unsubscribe(forward)

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        return asyncio.wrap_future(self._future).__await__()

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        """Call ``listener`` with each event, past ones included, on the thread that learns of it; it must be quick."""
        with self._news:
            for event in self._events:
                _tell(listener, event)
            self._listeners.append(listener)

    def unsubscribe(self, listener: Callable[[Event], None]) -> None:
        with self._news:
            self._listeners.remove(listener)

    def publish(self, event: Event, error: DiffgenError | None = None) -> None:
        """For the connection: the next event, with the exception to raise where it is a failure."""
        with self._news:
            if self._future.done():
                return
            self._events.append(event)
            for listener in tuple(self._listeners):  # one may unsubscribe itself
                _tell(listener, event)
            # The future is set last, so that who waits on it finds every event told.
            if isinstance(event, GenerationResult):
                self._future.set_result(event)
            elif error is not None:
                self._future.set_exception(error)
            self._news.notify_all()


def _tell(listener: Callable[[Event], None], event: Event) -> None:
    try:
        listener(event)
    except Exception:
        # One listener's fault must not keep the others, and who waits for the result, from the event.
        logger.exception("a listener failed on %s", type(event).__name__)
