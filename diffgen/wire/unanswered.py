"""What a connection waits for."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Callable

from diffgen.errors import ConnectionFailed, DeadlineExceeded, DiffgenError
from diffgen.handle import GenerationHandle
from diffgen.params import SamplingParams
from diffgen.wire.messages import Abort, Aborted, Failed, GetStatus, Status

Answer = concurrent.futures.Future[Status | Aborted]


class Unanswered:
    """The requests of a connection that have no answer yet, and why there are no more once it has ended. Thread-safe.

    Attributes:
        reason: what has ended the connection; None while it lives.
    """

    def __init__(self) -> None:
        self.reason: DiffgenError | None = None
        self._handles: dict[str, GenerationHandle] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()

    def begin(self, params: SamplingParams, cancel: Callable[[str], None], age: float) -> GenerationHandle:
        """Wait for one more, which is ``age`` seconds old. Raises what has ended the connection."""
        self._check_process()  # before the lock, which a thread that is no more may hold there
        handle = GenerationHandle(params, cancel, age)
        with self._lock:
            self.check()
            self._handles[handle.id] = handle
        return handle

    def check(self) -> None:
        """Raises what has ended the connection, if it has."""
        self._check_process()
        if self.reason is not None:
            raise self.reason

    def _check_process(self) -> None:
        """A fork has the connection without the thread that sends and receives."""
        if os.getpid() != self._process:
            forked = f"the connection belongs to process {self._process}, of which this one is a fork"
            raise ConnectionFailed(f"{forked}; call DiffGenerator.connect here", retryable=False)

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


class Questions:
    """What was asked and is not answered yet, oldest first. One thread uses it."""

    def __init__(self) -> None:
        self._asked: list[tuple[GetStatus | Abort, Answer]] = []

    def add(self, question: GetStatus | Abort, answer: Answer) -> None:
        self._asked.append((question, answer))

    def tell(self, message: Status | Aborted) -> None:
        """It is for the oldest that it can be for. Questions may be dropped, and of several replicas, a status waits
        for them all, so that it comes after what was asked later."""
        for place, (question, answer) in enumerate(self._asked):
            if _answers(message, question):
                del self._asked[place]
                answer.set_result(message)
                return

    def fail(self, error: DiffgenError) -> None:
        asked, self._asked = self._asked, []
        for _, answer in asked:
            answer.set_exception(error)


def out_of_time(handle: GenerationHandle) -> DeadlineExceeded:
    """For what no server ends, since none is there."""
    limit = handle.params.time_limit
    over = f"its time_limit of {limit:g} s is over"
    return DeadlineExceeded(f"request {handle.id} was ended: {over}, and no server is there")


def _answers(message: Status | Aborted, question: GetStatus | Abort) -> bool:
    return isinstance(question, GetStatus) if isinstance(message, Status) else question == Abort(message.id)


def _publish(handle: GenerationHandle, error: DiffgenError) -> None:
    handle.publish(Failed(handle.id, error.info()), error)
