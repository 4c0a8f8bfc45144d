"""What all routes share: the model, its state, and where files are kept."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from diffgen.api import DiffGenerator
from diffgen.errors import DiffgenError
from diffgen.handle import GenerationHandle
from diffgen.http.args import HttpArgs, HttpLimits, names
from diffgen.http.errors import HttpError, shutting_down
from diffgen.http.guard import exchange_of
from diffgen.http.jobs import VideoJobs
from diffgen.http.metrics import Metrics
from diffgen.http.remote import Remote, read_places
from diffgen.http.store import Job, Store
from diffgen.http.traces import Trace, Traces
from diffgen.http.work import Works
from diffgen.params import ModelSpec

logger = logging.getLogger("diffgen.http")

_SWEEP_S = 60.0


class Service:
    """Belongs to the event loop's thread.

    Attributes:
        args, limits: how the server was started.
        created: when, in seconds since 1970.
        draining: it was told to stop and takes nothing new.
    """

    def __init__(self, args: HttpArgs, limits: HttpLimits, store: Store) -> None:
        self.args, self.limits, self.store = args, limits, store
        self.works = Works()
        self.metrics = Metrics()
        self.traces = None if args.otlp_traces_endpoint is None else Traces(args.otlp_traces_endpoint)
        self.remote = Remote(read_places(names(args.remote_pictures)))
        self.jobs = VideoJobs(store, self.metrics, args.media_ttl, args.media_metadata)
        self.created = int(time.time())
        self.draining = False
        self.failure: DiffgenError | None = None
        self.generator: DiffGenerator | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def open(self, generator: DiffGenerator) -> None:
        """The model is loaded: take requests, and run what a former server left."""
        # Before new jobs can come, which would otherwise be among them.
        left = await asyncio.to_thread(self.store.unfinished)
        self.generator = generator
        self._sweeper = asyncio.create_task(self._sweep())
        self.jobs.resume(left, generator, self.resume_trace)

    async def _sweep(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self.store.sweep)
            except (DiffgenError, OSError) as error:
                logger.error("expired files cannot be removed: %s", error)
            await asyncio.sleep(_SWEEP_S)

    def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self.traces is not None:
            self.traces.close()
        self.store.close()

    def loaded(self) -> DiffGenerator:
        """The model. Raises :class:`HttpError` while it loads."""
        if self.generator is None:
            raise HttpError(503, "loading", "the model is being loaded; try again later", retry_after=5)
        return self.generator

    def accepting(self) -> DiffGenerator:
        """The model, for new work. Raises :class:`HttpError` while it loads or once the server is stopping."""
        if self.draining:
            raise shutting_down()
        return self.loaded()

    def begin_trace(self, output: str, request: Request) -> Trace | None:
        """Of a generation that makes an ``output``, "image" or "video"; None unless spans were asked for."""
        return self._trace(output, request.headers, {"diffgen.request_id": exchange_of(request.scope).id})

    def resume_trace(self, job: Job) -> Trace | None:
        """Of a job that an earlier server has begun, in the trace that it had there."""
        return self._trace("video", job.trace, {"diffgen.attempt": job.attempts + 1})

    def _trace(self, output: str, headers: Mapping[str, str], more: Mapping[str, Any]) -> Trace | None:
        if self.traces is None:
            return None
        about = {"gen_ai.request.model": self.served[0], "gen_ai.output.type": output, **more}
        return self.traces.begin(headers, **about)

    def followed(self, request: Request, handle: GenerationHandle) -> GenerationHandle:
        """A handle whose end is counted, and whose trace ends with the answer to ``request``."""
        params = handle.params
        frames = params.num_frames or self.model.defaults.get("num_frames")
        is_clip = frames not in (None, 1) or (params.num_frames is None and params.seconds is not None)
        output = "video" if is_clip else "image"
        self.metrics.follow(handle, self.model.name, output)
        trace = self.begin_trace(output, request)
        if trace is not None:
            trace.follow(handle)
            exchange_of(request.scope).trace = trace
        return handle

    @property
    def busy(self) -> int:
        """Requests and jobs that are not done."""
        return self.works.waiting + len(self.jobs)

    @property
    def model(self) -> ModelSpec:
        return self.loaded().model

    @property
    def served(self) -> tuple[str, ...]:
        """Names by which clients may call the model; the first is told."""
        return names(self.args.served_model_name) or (self.model.name,)

    @property
    def ignores_unknown(self) -> bool:
        return self.args.unknown_params == "ignore"

    def base_url(self, request: Request) -> str:
        """Start of the URLs in an answer, as the caller can use them."""
        return (self.args.public_base_url or str(request.base_url)).rstrip("/")


def service_of(request: Request) -> Service:
    found: Any = request.app.state.service
    assert isinstance(found, Service)
    return found
