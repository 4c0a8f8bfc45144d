"""A connection to a server through its HTTP port, for those who cannot reach its sockets."""

from __future__ import annotations

import contextlib
import json
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import msgspec

from diffgen.args import check_token
from diffgen.errors import (
    ConnectionFailed,
    DiffgenError,
    InvalidRequest,
    ProtocolError,
    RequestCancelled,
    ServerClosed,
    ServerError,
    error_from,
)
from diffgen.handle import GenerationHandle, Preview, waitable
from diffgen.params import ModelSpec, SamplingParams
from diffgen.result import GenerationResult
from diffgen.wire import codec
from diffgen.wire.messages import Abort, Aborted, Accepted, Failed, GetStatus, Progress, Restarting, Result, Status
from diffgen.wire.messages import Preview as PreviewMessage
from diffgen.wire.unanswered import Unanswered, out_of_time

_RETRY_S = 0.5
# The server says every 15 s that it is still there.
_SILENCE_S = 60.0
_MAX_TENSOR = 2**40
#: Seconds since a request was first sent, which count to its time limit.
AGE_HEADER = "x-request-age"
_CLOSE_S = 2.0  # for a server that hangs to say which requests are to be cancelled, and to cancel them


class HttpConnection:
    """As :class:`diffgen.wire.client.Connection`: each request is one POST, whose answer is the stream of its events.

    A request whose answer breaks off is sent again under the same Idempotency-Key, so that the server goes on with it
    or gives its result; when no server answers for ``patience`` seconds it fails with :class:`ConnectionFailed`.
    """

    def __init__(self, address: str, token: str | None = None, patience: float = 30.0) -> None:
        if token is not None:
            check_token(token)
        self.address = address.rstrip("/")
        self.patience = patience
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        limits = httpx2.Limits(max_connections=None)
        timeout = httpx2.Timeout(_SILENCE_S, connect=10.0)
        try:
            self._http = httpx2.Client(base_url=self.address, headers=headers, limits=limits, timeout=timeout)
        except (httpx2.InvalidURL, ValueError) as error:
            raise ConnectionFailed(f"cannot connect to {address!r}: {error}; give http://HOST:PORT") from None
        self._decoder = codec.server_message_decoder()
        self._unanswered = Unanswered()
        self._lock = threading.Lock()
        self._remote: dict[str, str] = {}  # the server's ids
        self._cancelled: set[str] = set()
        self._threads: dict[str, threading.Thread] = {}  # by name, as long as they run
        self._ended = threading.Event()
        self._model = ""

    def wait_ready(self, timeout: float) -> ModelSpec:
        """What the server serves, once it does. Raises :class:`ConnectionFailed` after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                left = max(0.1, deadline - time.monotonic())
                spec = msgspec.convert(self._get("GET", "/v1/model", timeout=left), ModelSpec)
            except ConnectionFailed as error:
                if not error.retryable or time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)
            except (msgspec.ValidationError, ServerError) as error:
                raise ProtocolError(f"{self.address} is no server of this diffgen: {error}") from None
            else:
                self._model = spec.name
                return spec

    def submit(self, params: SamplingParams, age: float = 0.0) -> GenerationHandle:
        """Send a request, for which somebody has waited ``age`` seconds. Raises what ended the connection, if it has
        ended."""
        handle = self._unanswered.begin(params, self.cancel, age)
        self._start(f"request-{handle.id}", self._run, handle)
        return handle

    def _start(self, name: str, run: Callable[..., None], *arguments: Any) -> None:
        """In a thread, for which :meth:`close` waits."""

        def body() -> None:
            try:
                run(*arguments)
            finally:
                with self._lock:
                    self._threads.pop(name, None)

        thread = threading.Thread(target=body, name=name, daemon=True)
        with self._lock:
            self._threads[name] = thread
        thread.start()

    def cancel(self, request_id: str) -> None:
        """Ask the server to cancel. The handle ends when it says so, or at once if it is not there: it does not go on
        with what nobody waits for."""
        with self._lock:
            self._cancelled.add(request_id)
            remote = self._remote.get(request_id)
        if remote is not None:
            self._start(f"cancel-{request_id}", self._cancel_remote, remote)

    def _cancel_remote(self, remote: str) -> None:
        with contextlib.suppress(DiffgenError):
            self._get("DELETE", f"/v1/requests/{remote}")

    def ask(self, question: GetStatus | Abort, timeout: float) -> Status | Aborted:
        """The server's answer. Raises :class:`ConnectionFailed` after ``timeout`` s, or what ended the connection."""
        self._unanswered.check()
        if isinstance(question, Abort):
            path = f"/v1/requests/{urllib.parse.quote(question.id, safe='')}"
            found = self._get("DELETE", path, timeout=timeout)["found"]
            return Aborted(question.id, found)
        return msgspec.convert(self._get("GET", "/v1/status", timeout=timeout), Status, str_keys=True)

    def end(self, error: DiffgenError) -> None:
        """Fail every pending request, and every later one, with ``error``."""
        # One whose id the server has not told by now is cancelled by its own thread, once it is told.
        for handle in self._unanswered.end(error):
            self.cancel(handle.id)
        self._ended.set()

    def close(self) -> None:
        """Cancel what is pending and close the connections."""
        self.end(ServerClosed("the connection was closed by this client"))
        deadline = time.monotonic() + _CLOSE_S
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._http.close()

    def _get(self, method: str, path: str, timeout: float | None = None) -> Any:
        """The JSON of a route. Raises :class:`ConnectionFailed`, or :class:`ServerError` for an error it tells."""
        options: dict[str, Any] = {} if timeout is None else {"timeout": waitable(timeout)}
        try:
            answer = self._http.request(method, path, **options)
            _check(answer)
            return answer.json()
        except (httpx2.HTTPError, RuntimeError) as error:  # a RuntimeError once it is closed
            raise ConnectionFailed(f"no answer from {self.address}: {error or type(error).__name__}") from None
        except ValueError as error:
            if isinstance(error, DiffgenError):
                raise
            raise ServerError(f"{self.address} answers with something else than JSON") from None

    def _run(self, handle: GenerationHandle) -> None:
        """One request, until it is answered."""
        lost_at = time.monotonic()
        try:
            while not handle.done():
                try:
                    for message, tensor in self._events(handle):
                        lost_at = time.monotonic()
                        self._publish(handle, message, tensor)
                    if handle.done():
                        return
                    reason = "the answer broke off"
                except (httpx2.HTTPError, ConnectionFailed) as error:
                    if isinstance(error, ConnectionFailed) and not error.retryable:
                        raise
                    reason = str(error) or type(error).__name__
                if time.monotonic() - lost_at > self.patience:
                    rule = f"no server has answered at {self.address} for {self.patience:g} s"
                    raise ConnectionFailed(f"{rule}: {reason}")
                if time.monotonic() > handle.late_at:
                    raise out_of_time(handle)
                if handle.id in self._cancelled:
                    raise RequestCancelled("cancelled by its owner while no server was connected")
                handle.publish(Restarting(handle.id))
                self._ended.wait(min(_RETRY_S, max(0.0, handle.late_at - time.monotonic())))
        except DiffgenError as error:
            self._unanswered.fail(handle.id, error)
        except Exception as error:
            # The border of the thread: without it nobody would answer who waits.
            self._unanswered.fail(handle.id, ConnectionFailed(f"the connection to {self.address} broke: {error!r}"))
            if not self._ended.is_set():  # by which its sockets break
                raise
        finally:
            with self._lock:
                self._remote.pop(handle.id, None)
                self._cancelled.discard(handle.id)

    def _events(self, handle: GenerationHandle) -> Iterator[tuple[Any, bytes | None]]:
        values = {name: value for name, value in msgspec.structs.asdict(handle.params).items() if value is not None}
        age = f"{time.monotonic() - handle.created:.3f}"
        headers = {"content-type": "application/json", "idempotency-key": handle.id, AGE_HEADER: age}
        with self._http.stream("POST", "/v1/requests", content=json.dumps(values), headers=headers) as answer:
            if answer.status_code != 200:
                answer.read()
                _check(answer)
            remote = answer.headers["x-generation-id"]
            with self._lock:
                self._remote[handle.id] = remote
                cancelled = handle.id in self._cancelled
            if cancelled or handle.done():
                self._cancel_remote(remote)
            reader = _Reader(answer.iter_raw())
            while (count := reader.number(">I", 4)) is not None:
                frames = [reader.frame() for _ in range(count)]
                if frames:
                    message = codec.decode(frames[:2], self._decoder, max_body=codec.MAX_ANSWER)
                    yield message, frames[2] if len(frames) > 2 else None

    def _publish(self, handle: GenerationHandle, message: Any, tensor: bytes | None) -> None:
        """With the client's own id in place of the server's."""
        match message:
            case Accepted() | Progress() | Restarting():
                handle.publish(msgspec.structs.replace(message, id=handle.id))
            case PreviewMessage() if tensor is not None:
                pixels = codec.array(message.tensor, tensor)
                handle.publish(Preview(handle.id, message.step, message.total, pixels))
            case Result() if tensor is not None:
                raw = codec.array(message.output.tensor, tensor)
                if self._unanswered.take(handle.id) is not None:
                    handle.publish(GenerationResult.from_output(handle.id, message.output, raw, self._model))
            case Failed():
                self._unanswered.fail(handle.id, error_from(message.error))
            case _:
                raise ProtocolError(f"{type(message).__name__} is no event of a request")


class _Reader:
    """Whole frames from chunks of any size."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._held = bytearray()

    def _bytes(self, size: int) -> bytes | None:
        while len(self._held) < size:
            chunk = next(self._chunks, None)
            if chunk is None:
                return None
            self._held += chunk
        found = bytes(self._held[:size])
        del self._held[:size]
        return found

    def number(self, form: str, size: int) -> int | None:
        """None at the end of the stream."""
        found = self._bytes(size)
        return None if found is None else int(struct.unpack(form, found)[0])

    def frame(self) -> bytes:
        size = self.number(">Q", 8)
        found = None if size is None or size > _MAX_TENSOR else self._bytes(size)
        if found is None:
            raise ConnectionFailed("a message broke off")
        return found


def _check(answer: httpx2.Response) -> None:
    """Raises the error that an answer tells: one worth another try is a :class:`ConnectionFailed`."""
    if answer.is_success:
        return
    try:
        told = answer.json()["error"]
        message, code, param = str(told["message"]), str(told["code"]), told["param"]
    except (ValueError, KeyError, TypeError):
        message, code, param = f"HTTP status {answer.status_code}", "http_error", None
    if answer.status_code == 401:
        raise ConnectionFailed(f"the server refused this client: {message}", code="unauthorized", retryable=False)
    if answer.status_code in (502, 503, 504):  # 502 and 504 are a proxy's, of a server that is not there
        raise ConnectionFailed(message, code=code)
    if 400 <= answer.status_code < 500 and answer.status_code != 404:
        raise InvalidRequest(message, code=code, param=param)
    raise ServerError(message, code=code)
