"""What a connection waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable

from diffgen.errors import DiffgenError
from diffgen.handle import GenerationHandle
from diffgen.params import SamplingParams
from diffgen.wire.messages import Failed


class Unanswered:
    """The requests of a connection that have no answer yet, and why there are no more once it has ended. Thread-safe.

    Attributes:
        reason: what has ended the connection; None while it lives.
    """

    def __init__(self) -> None:
        self.reason: DiffgenError | None = None
        self._handles: dict[str, GenerationHandle] = {}
        self._lock = threading.Lock()

    def begin(self, params: SamplingParams, cancel: Callable[[str], None]) -> GenerationHandle:
        """Wait for one more. Raises what has ended the connection."""
        handle = GenerationHandle(params, cancel)
        with self._lock:
            self.check()
            self._handles[handle.id] = handle
        return handle

    def check(self) -> None:
        """Raises what has ended the connection, if it has."""
        if self.reason is not None:
            raise self.reason

    def get(self, request_id: str) -> GenerationHandle | None:
        with self._lock:
            return self._handles.get(request_id)

    def take(self, request_id: str) -> GenerationHandle | None:
        """Wait for it no longer, since its answer has come."""
        with self._lock:
            return self._handles.pop(request_id, None)

    def all(self) -> list[GenerationHandle]:
        with self._lock:
            return list(self._handles.values())

    def fail(self, request_id: str, error: DiffgenError) -> None:
        """Answer with an error, if it has no answer."""
        handle = self.take(request_id)
        if handle is not None:
            _publish(handle, error)

    def end(self, error: DiffgenError) -> list[GenerationHandle]:
        """Fail every one, and every later one, with ``error``; returns those that it has failed."""
        with self._lock:
            self.reason = self.reason or error
            handles, self._handles = list(self._handles.values()), {}
        for handle in handles:
            _publish(handle, error)
        return handles


def _publish(handle: GenerationHandle, error: DiffgenError) -> None:
    handle.publish(Failed(handle.id, error.info()), error)
