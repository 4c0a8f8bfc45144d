"""``diffgen serve``: the port first, then the model, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any

import uvicorn

from diffgen.api import DiffGenerator
from diffgen.errors import DiffgenError, ServerError
from diffgen.http.app import create_app
from diffgen.http.args import HttpArgs, HttpLimits, is_loopback
from diffgen.http.listen import data_folder
from diffgen.http.service import Service
from diffgen.http.store import Store

logger = logging.getLogger("diffgen.http")

_POLL_S = 0.1
# Longer than proxies and clients keep a connection: who ends it first must not be this side, which would reset what the
# other has just sent.
_IDLE_S = 75
# After SIGTERM or a failure: for answers that are on their way.
_LAST_WORDS_S = 5


def serve(
    args: HttpArgs, keys: tuple[bytes, ...], limits: HttpLimits, options: dict[str, Any], listener: socket.socket
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. ``options`` start the model.

    Raises what keeps it from starting or makes it end; the folder is taken before the model is loaded.
    """
    with data_folder(args, listener) as folder:
        service = Service(args, limits, Store(folder))
        server = _Server(service, create_app(service, keys))
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"diffgen: listening at http://{shown}:{port}", file=sys.stderr, flush=True)
        if not keys and not is_loopback(args.host):
            print("diffgen: warning: everyone who can reach this server may use it", file=sys.stderr)
        try:
            return asyncio.run(server.work(listener, limits, options))
        finally:
            service.close()


class _Server(uvicorn.Server):
    """Loads the model while it already answers probes, and finishes work before it ends."""

    def __init__(self, service: Service, app: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False,
                timeout_keep_alive=_IDLE_S, timeout_graceful_shutdown=_LAST_WORDS_S,
            )
        )  # fmt: skip
        self._service = service
        self._told = threading.Event()  # to stop
        self._code = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._told.is_set() or self._service.generator is None:
            self.should_exit = self.force_exit = True
        self._told.set()
        self._service.draining = True
        self._code = 130 if sig == signal.SIGINT else 0

    async def work(self, listener: socket.socket, limits: HttpLimits, options: dict[str, Any]) -> int:
        """Returns the exit code. Raises why the model could not be loaded, or has gone."""
        tasks = [asyncio.create_task(self._load(limits, options)), asyncio.create_task(self._watch())]
        for task in tasks:
            task.add_done_callback(self._ended)
        await self.serve(sockets=[listener])
        for task in tasks:
            task.cancel()
        await self._end()
        if self._service.failure is not None:
            raise self._service.failure
        return self._code

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Without its tasks the server would neither become ready nor end."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if not isinstance(error, DiffgenError):
            logger.error("the server failed", exc_info=error)
            error = ServerError(f"the server failed: {type(error).__name__}: {error}")
        self._service.failure = error
        self.should_exit = True

    async def _load(self, limits: HttpLimits, options: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[DiffGenerator] = loop.create_future()

        def load() -> None:
            generator: DiffGenerator | None = None
            failure: BaseException | None = None
            try:
                generator = DiffGenerator.from_pretrained(limits=limits.of_requests(), **options)
            except BaseException as error:
                failure = error

            def tell() -> None:
                if failure is not None:
                    loaded.set_exception(failure)
                elif generator is not None:
                    loaded.set_result(generator)

            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(lambda: None if loaded.done() else tell())

        # A daemon, so that a load that takes long cannot hold up the end; the ranks see that this process is gone.
        threading.Thread(target=load, name="load", daemon=True).start()
        generator = await loaded
        await self._service.open(generator)
        print(f"diffgen: {generator.model.name} is ready", file=sys.stderr, flush=True)

    async def _watch(self) -> None:
        """Ends the server when it was told to and its work has ended, or when the ranks are gone for good."""
        service, loop = self._service, asyncio.get_running_loop()
        deadline: float | None = None
        while not self.should_exit:
            await asyncio.sleep(_POLL_S)
            supervisor = None if service.generator is None else service.generator.supervisor
            if supervisor is not None and supervisor.failure is not None:
                service.failure = supervisor.failure
                self.should_exit = True
            if self._told.is_set():
                deadline = deadline or loop.time() + service.args.shutdown_timeout
                if service.busy == 0 or loop.time() > deadline:
                    logger.info("stopping", extra={"unfinished": service.busy})
                    await self._end()
                    self.should_exit = True

    async def _end(self) -> None:
        """Close the model: what still waits is told so, and jobs stay in the store for the next server."""
        self._service.jobs.stopping = True
        if self._service.generator is not None:
            await asyncio.to_thread(self._service.generator.close)
        await self._service.jobs.ended()
