"""DiffGenerator: diffgen as a Python object."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

import msgspec

from diffgen.args import ListenArgs, ModelArgs, RunArgs, ServerArgs
from diffgen.errors import DiffgenError, InvalidRequest
from diffgen.fields import build, fields, nearest_name
from diffgen.handle import Event, GenerationHandle, is_final, waitable
from diffgen.loading.hub import local_folder
from diffgen.loading.index import read_index
from diffgen.media.files import check_folder
from diffgen.media.save import SaveOptions, check_save, save_result
from diffgen.params import Limits, ModelSpec, SamplingParams, parse_params
from diffgen.result import GenerationResult
from diffgen.server.controller import DataParallelController
from diffgen.server.replica import RankStatus
from diffgen.server.supervisor import Supervisor
from diffgen.wire.client import Connection
from diffgen.wire.messages import Abort, Aborted, GetStatus, Progress, Status, can_be_id

if TYPE_CHECKING:
    from diffgen.wire.http import HttpConnection

ProgressCallback = Callable[[Progress], None]

_HELLO_S = 30.0
# Requests of one list that a server holds at a time: enough to fill its batches, few enough for its queue.
_WINDOW = 32


class DiffGenerator:
    """A model that generates images and clips.

    :meth:`from_pretrained` starts the processes that run it, :meth:`connect` uses those of another. Thread-safe. Use
    it as a context manager or call :meth:`close`; one left open is closed at exit, or when nobody has it or a handle
    of its requests any more.

    Attributes:
        model: what is served.
        supervisor: of the processes that :meth:`from_pretrained` started; None for a server of another process.
    """

    def __init__(
        self,
        connection: Connection | HttpConnection,
        model: ModelSpec,
        supervisor: Supervisor | DataParallelController | None,
    ) -> None:
        self.model = model
        self._connection = connection
        self.supervisor = supervisor
        self._process = os.getpid()
        _open.add(self)
        self._forgotten = weakref.finalize(self, _close_forgotten, self._process, connection, supervisor)
        self._forgotten.atexit = False

    @classmethod
    def from_pretrained(
        cls,
        model_path: str | os.PathLike[str] | None = None,
        *,
        num_gpus: int = 1,
        device: str | None = None,
        dtype: Any = None,
        limits: Limits | None = None,
        **options: Any,
    ) -> DiffGenerator:
        """Load a model and start serving it.

        Args:
            model_path: folder in diffusers layout or Hub id; the bundled model when None.
            num_gpus: ranks, one process a device; on a CPU, one process each.
            device: "cpu" or "cuda"; cuda where there is one when None.
            dtype: "float32", "float16", "bfloat16" or the torch dtype; the device's usual one when None.
            limits: what to refuse before any work.
            options: any other field of :class:`ModelArgs`, :class:`RunArgs` or :class:`ListenArgs`.

        Raises:
            InvalidRequest: an option is unknown or has a wrong value.
            ModelError: the model is not found, incomplete or of an unknown family.
            StartFailed: a rank could not start.
        """
        options |= {"model_path": _as_text(model_path), "num_gpus": num_gpus, "device": device}
        options["dtype"] = _dtype_name(dtype)
        args = _server_args(options, limits)
        folder = local_folder(args.model)
        if folder is not None:
            # What is missing shows before any process is started.
            read_index(folder, args.model.variant, args.model.safety_checker)
        connections: list[Connection] = []

        def fail(error: DiffgenError) -> None:
            for connection in connections:
                connection.end(error)

        supervisor = (DataParallelController if args.run.dp_size > 1 else Supervisor)(args, fail)
        try:
            supervisor.start()
            # Whether the server comes back is the supervisor's to say.
            connection = Connection(supervisor.socket, patience=math.inf)
            connections.append(connection)
            if supervisor.failure is not None:
                raise supervisor.failure
            model = connection.wait_ready(_HELLO_S)
        except BaseException:
            supervisor.stop()
            for connection in connections:
                connection.close()
            raise
        return cls(connection, model, supervisor)

    @classmethod
    def connect(cls, address: str, *, token: str | None = None, timeout: float = 10.0) -> DiffGenerator:
        """Use the server at ``tcp://HOST:PORT``, ``ipc://PATH`` or ``http(s)://HOST:PORT``; closing this does not stop
        it. Over HTTP the token is an API key.

        Raises :class:`ConnectionFailed` when none answers within ``timeout`` seconds or the token is wrong, and
        :class:`ProtocolError` when it speaks another version.
        """
        connection = _connection(address, token)
        try:
            return cls(connection, connection.wait_ready(timeout), None)
        except BaseException:
            connection.close()
            raise

    @property
    def address(self) -> str:
        """Where others can :meth:`connect`: the address asked for, else a socket for processes of this user."""
        listens = None if self.supervisor is None else self.supervisor.address
        return self._connection.address if listens is None else listens

    def ranks(self) -> list[RankStatus]:
        """What each rank last said of itself; empty for a server of another process."""
        replicas = [] if self.supervisor is None else self.supervisor.replicas()
        return [rank for ranks in replicas for rank in ranks]

    def submit(
        self, prompt: str | SamplingParams | None = None, *, age: float = 0.0, **sampling: Any
    ) -> GenerationHandle:
        """Send one request and return at once.

        ``sampling`` takes the fields of :class:`SamplingParams`; or give a whole one in place of the prompt. ``age`` is
        how many seconds somebody has waited for it already: they count to its ``time_limit``.

        Raises :class:`InvalidRequest` for what can be known without the model; the rest comes by the handle.
        """
        if not (isinstance(age, int | float) and 0 <= age < math.inf):
            raise InvalidRequest(f"age is {age!r:.60}; it must be seconds, 0 or more", param="age")
        return self._send(_params(prompt, sampling), age)

    def _send(self, params: SamplingParams, age: float = 0.0) -> GenerationHandle:
        handle = self._connection.submit(params, age)
        handle.owner = self
        return handle

    def status(self, timeout: float = 10.0) -> Status:
        """Every client's requests in work, and what the server has done so far."""
        answer = self._connection.ask(GetStatus(), timeout)
        assert isinstance(answer, Status)
        return answer

    def abort(self, request_id: str, timeout: float = 10.0) -> bool:
        """End a request of any client; its owner gets ``RequestCancelled``. False where none of that id is in work."""
        if not can_be_id(request_id):
            return False
        answer = self._connection.ask(Abort(request_id), timeout)
        assert isinstance(answer, Aborted)
        return answer.found

    @overload
    def generate(self, prompt: str | SamplingParams | None = None, **options: Any) -> GenerationResult: ...

    @overload
    def generate(self, prompt: Iterable[str | SamplingParams], **options: Any) -> list[GenerationResult]: ...

    def generate(
        self,
        prompt: str | SamplingParams | Iterable[str | SamplingParams] | None = None,
        *,
        callback: ProgressCallback | None = None,
        timeout: float | None = None,
        raise_errors: bool | None = None,
        output_path: str | os.PathLike[str] | None = None,
        output_file_name: str | None = None,
        output_format: str | None = None,
        output_compression: int | None = None,
        overwrite: bool = False,
        metadata: bool = True,
        **sampling: Any,
    ) -> GenerationResult | list[GenerationResult]:
        """Generate and wait.

        Args:
            prompt: one text or whole :class:`SamplingParams`, or a list of them, which gives a list of results in its
                order.
            callback: called on this thread with each :class:`Progress`; what it raises cancels the request.
            timeout: seconds to wait in all, after which the requests are cancelled.
            raise_errors: raise a request's error. False puts it into ``result.error``. By default raised for one
                prompt and kept for a list, where the other results still count.
            output_path, output_file_name, output_format, output_compression, overwrite, metadata: save as files; see
                :class:`SaveOptions`.
            sampling: fields of :class:`SamplingParams`; with a list, they hold for each prompt. Previews are for
                :meth:`submit`, whose events have them.

        Raises:
            DiffgenError: see ``raise_errors``.
            TimeoutError: ``timeout`` has passed.
        """
        if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
            raise InvalidRequest(f"timeout is {timeout!r}; it must be seconds, 0 or more, or None", param="timeout")
        is_list = False
        prompts: list[Any] = [prompt]  # what is no text is refused as one
        if isinstance(prompt, Iterable) and not isinstance(prompt, str | bytes | Mapping):
            prompts, is_list = list(prompt), True
        save = _save_options(
            output_path=_as_text(output_path),
            output_file_name=output_file_name,
            output_format=output_format,
            output_compression=output_compression,
            overwrite=overwrite,
            metadata=metadata,
        )
        all_params = [_unseen(_params(text, sampling)) for text in prompts]
        if save is not None:
            for params in all_params:
                check_save(save, params, self.model)
            check_folder(Path(save.output_path))
        handles: list[GenerationHandle] = []
        results: list[GenerationResult] = []
        try:
            for event in self._events(all_params, handles, timeout):
                if callback is not None and isinstance(event, Progress):
                    callback(event)
                while len(results) < len(handles) and handles[len(results)].done():
                    results.append(_settled(handles[len(results)], save, results))
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        for handle in handles[len(results) :]:  # told of, and done in a moment
            results.append(_settled(handle, save, results))
        if raise_errors or (raise_errors is None and not is_list):
            for result in results:
                if result.error is not None:
                    raise result.error
        return results if is_list else results[0]

    def _events(
        self, all_params: list[SamplingParams], handles: list[GenerationHandle], timeout: float | None
    ) -> Iterator[Event]:
        """Submit requests in order, a window of them at a time, and yield their events until each has ended.

        Handles are appended as they are made. Raises :class:`TimeoutError`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        ended = 0
        # Of a server of another process, the limit is not known.
        window = _WINDOW if self.supervisor is None else min(_WINDOW, self.supervisor.args.limits.queue)
        while ended < len(all_params):
            while len(handles) < min(len(all_params), ended + window):
                handles.append(self._send(all_params[len(handles)]))
                handles[-1].subscribe(events.put)
            try:
                left = None if deadline is None else waitable(max(0.0, deadline - time.monotonic()))
                event = events.get(timeout=left)
            except queue.Empty:
                late = len(all_params) - ended
                raise TimeoutError(f"{late} request(s) had not ended after {timeout:g} s and were cancelled") from None
            ended += is_final(event)
            yield event

    async def agenerate(self, prompt: str | SamplingParams | None = None, **sampling: Any) -> GenerationResult:
        """:meth:`generate` of one prompt for asyncio; cancelling the task cancels the request."""
        handle = self._send(_unseen(_params(prompt, sampling)))
        try:
            return await handle
        except BaseException:
            handle.cancel()
            raise

    def close(self) -> None:
        """Cancel what is pending, end the processes that :meth:`from_pretrained` started. Repeatable."""
        _open.discard(self)
        self._forgotten.detach()
        _close(self._process, self._connection, self.supervisor)

    def __enter__(self) -> DiffGenerator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_open: weakref.WeakSet[DiffGenerator] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for generator in list(_open):
        with contextlib.suppress(DiffgenError):
            generator.close()


def _close(
    process: int, connection: Connection | HttpConnection, supervisor: Supervisor | DataParallelController | None
) -> None:
    if os.getpid() != process:
        return  # a fork's copy: all this is another process's
    connection.close()
    if supervisor is not None:
        supervisor.stop()


def _close_forgotten(*what: Any) -> None:
    # It may be called anywhere, with any lock held, and takes as long as the unit in work. Python's exit waits for it.
    threading.Thread(target=_close, args=what, name="diffgen-close").start()


def _connection(address: str, token: str | None) -> Connection | HttpConnection:
    if not isinstance(address, str):
        raise InvalidRequest(f"address is {address!r:.100}; it must be a text, such as tcp://HOST:PORT")
    if address.startswith(("http://", "https://")):
        from diffgen.wire.http import HttpConnection

        return HttpConnection(address, token)
    return Connection(address, token)


def _params(prompt: str | SamplingParams | None, sampling: dict[str, Any]) -> SamplingParams:
    if isinstance(prompt, SamplingParams):
        if sampling:
            raise InvalidRequest(f"{', '.join(sampling)} beside SamplingParams: put them into these")
        # Its constructor checks nothing, and what cannot be sent would end the connection.
        return parse_params(msgspec.structs.asdict(prompt))
    return parse_params({"prompt": prompt, **sampling})


def _unseen(params: SamplingParams) -> SamplingParams:
    """Raises :class:`InvalidRequest` for previews, where nobody sees the events."""
    if params.preview_every:
        rule = "has no effect without events: use submit, or leave it out"
        raise InvalidRequest(f"preview_every {params.preview_every} {rule}", param="preview_every")
    return params


def _as_text(path: str | os.PathLike[str] | None) -> str | None:
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _dtype_name(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _server_args(options: dict[str, Any], limits: Limits | None) -> ServerArgs:
    if not isinstance(limits, Limits | None):
        raise InvalidRequest(f"limits is {limits!r:.100}; give diffgen.params.Limits(NAME=VALUE)", param="limits")
    groups: dict[str, type[msgspec.Struct]] = {"model": ModelArgs, "run": RunArgs, "listen": ListenArgs}
    owner = {name: group for group, struct in groups.items() for name in fields(struct)}
    values: dict[str, dict[str, Any]] = {group: {} for group in groups}
    for name, value in options.items():
        if name not in owner:
            remedy = nearest_name(name, owner)
            raise InvalidRequest(f"unknown option {name!r}; {remedy}", code="unknown_parameter", param=name)
        values[owner[name]][name] = value
    built: dict[str, Any] = {group: build(struct, values[group]) for group, struct in groups.items()}
    return ServerArgs(limits=limits or Limits(), **built)


def _save_options(**values: Any) -> SaveOptions | None:
    if values["output_path"] is not None:
        return build(SaveOptions, values)
    unused = [name for name, field in fields(SaveOptions).items() if values[name] not in (None, field.default)]
    if unused:
        raise InvalidRequest(f"{' and '.join(unused)} only matter with output_path; give it", param="output_path")
    return None


def _settled(
    handle: GenerationHandle, save: SaveOptions | None, earlier: Sequence[GenerationResult]
) -> GenerationResult:
    """The result of what has ended, saved beside those of the same call."""
    paths: list[Path] = []
    try:
        result = handle.result()
        paths = result.paths
        if save is not None:
            save_result(result, save, (path for each in earlier for path in each.paths))
        return result
    except DiffgenError as error:
        # Of several outputs, those that were saved before one could not be are kept.
        return GenerationResult(id=handle.id, params=handle.params, error=error, paths=paths)
