"""Video jobs: stored before they run, run again after a restart, gone when deleted."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import msgspec

from diffgen.api import DiffGenerator
from diffgen.errors import (
    ConnectionFailed,
    DiffgenError,
    InvalidRequest,
    OutputError,
    QueueFull,
    RequestCancelled,
    ServerClosed,
    WorkerDied,
)
from diffgen.handle import Event, GenerationHandle, Preview, is_final
from diffgen.http.metrics import Metrics
from diffgen.http.store import Job, Store
from diffgen.http.traces import Trace
from diffgen.media import encode
from diffgen.media.metadata import of_output
from diffgen.result import GenerationResult
from diffgen.wire.messages import Accepted, Progress

logger = logging.getLogger("diffgen.http.jobs")

#: Runs that end with the whole server before a job counts as their cause.
MAX_ATTEMPTS = 3
_RETRY_S = 1.0
_THUMBNAIL_QUALITY = 80
# Where in the work a stage of several units stands, in per cent; the others are short.
_SPANS = {"denoise": (0, 85), "decode": (85, 98)}


@dataclasses.dataclass
class Live:
    """A job in this process's hands. As things stand, ``ahead`` requests go before it and it ends at ``ends_at``."""

    job: Job
    handle: GenerationHandle | None = None
    progress: int = 0
    ahead: int | None = None
    ends_at: float | None = None  # time.monotonic()
    previews: int = 0
    preview: Preview | None = None  # the newest
    deleted: bool = False
    trace: Trace | None = None

    def __post_init__(self) -> None:
        self._since = time.monotonic() - max(0.0, time.time() - self.job.created_at)

    @property
    def age(self) -> float:
        """Seconds that count to its time limit. The server's own limit is for what runs, and begins anew."""
        return 0.0 if self.job.params.time_limit is None else time.monotonic() - self._since

    def note(self, event: Event) -> None:
        if isinstance(event, Accepted):
            self.ahead = event.ahead
        if isinstance(event, Accepted | Progress) and event.eta is not None:
            self.ends_at = time.monotonic() + event.eta
        if isinstance(event, Preview):
            self.previews, self.preview = self.previews + 1, event
        if isinstance(event, Progress):
            self.progress = max(self.progress, percent(event))


def percent(event: Progress) -> int:
    """How much of the whole is done, 0 to 98: the rest is writing the file."""
    low, high = _SPANS.get(event.stage, (0, 0))
    return low + (high - low) * event.step // max(event.total, 1)


class VideoJobs:
    """Runs jobs. Belongs to the event loop's thread; what touches the disk happens in others."""

    def __init__(self, store: Store, metrics: Metrics, ttl: float, metadata: bool) -> None:
        self._store, self._metrics, self._ttl, self._metadata = store, metrics, ttl, metadata
        self._live: dict[str, Live] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.stopping = False

    def __len__(self) -> int:
        return len(self._live)

    def live(self, job_id: str) -> Live | None:
        return self._live.get(job_id)

    def latest(self, stored: Job) -> Job:
        """A job as it is now, which the store may learn later."""
        live = self._live.get(stored.id)
        return stored if live is None or stored.status in ("completed", "failed") else live.job

    async def knows(self, key: str | None) -> bool:
        """Whether an Idempotency-Key has made a job."""
        return key is not None and await asyncio.to_thread(self._store.get, key, "key") is not None

    async def create(self, job: Job, generator: DiffGenerator, trace: Trace | None) -> Job:
        """Store a job, then run it; returns the one that its Idempotency-Key has made before, if any."""
        live = self._live[job.id] = Live(job, trace=trace)  # it counts from here on, or many at a time were too many
        try:
            stored = await asyncio.to_thread(self._store.add, job)
        except BaseException:
            del self._live[job.id]
            raise
        if stored.id == job.id:
            self._start(live, generator)
        else:
            del self._live[job.id]
        return stored

    def resume(self, jobs: Iterable[Job], generator: DiffGenerator, begin_trace: Callable[[Job], Trace | None]) -> None:
        """Run again what a former server had not finished."""
        for job in jobs:
            refusal: DiffgenError | None = None
            if job.model != generator.model.name:
                reason = f"it was for the model {job.model}, and this server now serves {generator.model.name}"
                refusal = InvalidRequest(reason, code="model_not_found")
            elif job.attempts >= MAX_ATTEMPTS:
                reason = f"the server has stopped {job.attempts} times meanwhile"
                refusal = WorkerDied(reason, retryable=False)
            live = self._live[job.id] = Live(msgspec.structs.replace(job, status="queued"), trace=begin_trace(job))
            self._start(live, generator, refusal)

    async def ended(self) -> None:
        """Wait until no job is in work, as after the generator was closed."""
        await asyncio.gather(*self._tasks)

    def _start(self, live: Live, generator: DiffGenerator, refusal: DiffgenError | None = None) -> None:
        task = asyncio.create_task(self._run(live, generator, refusal), name=live.job.id)
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)

    async def delete(self, job_id: str) -> bool:
        """Cancel a job, whatever its state, and forget it. False where there is none."""
        live = self._live.get(job_id)
        if live is not None:
            live.deleted = True
            if live.handle is not None:
                live.handle.cancel()
        return await asyncio.to_thread(self._store.delete, job_id)

    async def _run(self, live: Live, generator: DiffGenerator, refusal: DiffgenError | None) -> None:
        failure: str | None = None
        try:
            if refusal is not None:
                raise refusal
            result = await self._result(live, generator)
            if result is None:
                self._metrics.failed(live.job.model, "video", RequestCancelled.default_code)
            else:
                await self._complete(live, result)
                self._metrics.finished("video", result)
        except DiffgenError as error:
            failure = error.code
            self._metrics.failed(live.job.model, "video", error.code)
            if live.handle is not None:
                live.handle.cancel()  # where it was the store that failed, the work goes on
            # What ended with the server runs again in the next one.
            if not self._has_ended(generator, error):
                await self._fail(live, error.code, error.public)
        except Exception as error:  # the border of the task: nobody else would end the job
            failure = "internal_error"
            logger.exception("a video job failed", extra={"video": live.job.id})
            await self._fail(live, failure, f"{type(error).__name__} in the server; see its log")
        finally:
            if live.trace is not None:
                live.trace.end(failure)
            del self._live[live.job.id]

    def _has_ended(self, generator: DiffGenerator, error: DiffgenError) -> bool:
        """Whether ``error`` is the server's end, and not the job's."""
        gave_up = generator.supervisor is not None and generator.supervisor.failure is not None
        return isinstance(error, ServerClosed | ConnectionFailed) or (error.retryable and self.stopping) or gave_up

    async def _result(self, live: Live, generator: DiffGenerator) -> GenerationResult | None:
        """None where it was deleted meanwhile."""
        while not live.deleted:
            handle = live.handle = generator.submit(live.job.params, age=live.age)
            if live.trace is not None:
                live.trace.follow(handle)
            async for event in handle.aevents():
                live.note(event)
                if isinstance(event, Progress) and live.job.status == "queued":
                    running = {"status": "in_progress", "attempts": live.job.attempts + 1}
                    live.job = msgspec.structs.replace(live.job, **running)
                    logger.info("a video job runs", extra={"video": live.job.id, "generation": handle.id})
                    await asyncio.to_thread(self._store.update, live.job)
                if is_final(event):
                    break
            try:
                return await handle
            except QueueFull:
                await asyncio.sleep(_RETRY_S)
            except DiffgenError:
                if not live.deleted:
                    raise
        return None

    async def _complete(self, live: Live, result: GenerationResult) -> None:
        now = time.time()
        done = msgspec.structs.replace(
            live.job,
            status="completed",
            completed_at=now,
            expires_at=now + self._ttl,
            params=result.params,
            warnings=tuple(dict.fromkeys((*live.job.warnings, *result.warnings))),
            timings=result.timings,
            peak_memory_mb=result.peak_memory_mb,
        )

        def save() -> None:
            self._write(done, result)
            self._store.update(done)

        await asyncio.to_thread(save)

    def _write(self, job: Job, result: GenerationResult) -> None:
        assert job.params.fps is not None, "a model of clips has a default fps"
        clip = result.pixels[0]
        metadata = of_output(result.params, result.seeds[0], result.model) if self._metadata else None
        save_clip = partial(encode.save_mp4, clip, fps=job.params.fps, metadata=metadata)
        self._store.write(job.id, "mp4", save_clip)

        def save_thumbnail(path: Path) -> None:
            encode.save_webp(clip[0], path, _THUMBNAIL_QUALITY)

        self._store.write(f"{job.id}_thumbnail", "webp", save_thumbnail)

    async def _fail(self, live: Live, code: str, message: str) -> None:
        """Store it as failed. While that cannot be stored it is told from memory, and a next server runs it again."""
        ended = {"status": "failed", "error": (code, message), "expires_at": time.time() + self._ttl}
        live.job = msgspec.structs.replace(live.job, **ended)
        told = False
        while not live.deleted:
            try:
                await asyncio.to_thread(self._store.update, live.job)
                return
            except OutputError as error:
                if not told:
                    logger.error("a failed video job cannot be stored: %s", error, extra={"video": live.job.id})
                told = True
                if self.stopping:
                    return
                await asyncio.sleep(_RETRY_S)
