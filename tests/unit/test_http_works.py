"""Work that HTTP requests wait for, and the files that they may fetch: without a model or a socket."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request

from diffgen.errors import (
    DiffgenError,
    GenerationError,
    InvalidRequest,
    OutputError,
    QueueFull,
    RequestCancelled,
)
from diffgen.handle import GenerationHandle
from diffgen.http import work
from diffgen.http.metrics import Metrics
from diffgen.http.store import Job, Store
from diffgen.http.work import Work, Works
from diffgen.params import SamplingParams
from diffgen.result import GenerationResult
from diffgen.wire.messages import Failed


class Submissions:
    """Handles that nothing works on. ``cancelled`` holds the ids of those that were asked to end."""

    def __init__(self) -> None:
        self.handles: list[GenerationHandle] = []
        self.cancelled: list[str] = []

    def __call__(self) -> GenerationHandle:
        self.handles.append(GenerationHandle(SamplingParams(prompt="a"), self.cancelled.append))
        return self.handles[-1]


class Clock:
    """The running loop's, which moves when it is told to."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._now = loop.time()
        loop.time = lambda: self._now  # type: ignore[method-assign]

    async def move(self, seconds: float) -> None:
        self._now += seconds
        for _ in range(3):  # what is due now, and what follows from it
            await asyncio.sleep(0)


def keyed(**headers: str) -> Request:
    told = {"host": "localhost", "idempotency-key": "k", **headers}
    raw = [(name.encode(), value.encode()) for name, value in told.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": raw})


def with_works(check: Callable[[Works, Submissions, Clock], Coroutine[Any, Any, None]]) -> None:
    """``check`` with a grace of 2 s."""

    async def run() -> None:
        await check(Works(grace_s=2), Submissions(), Clock())

    asyncio.run(run())


def test_each_leaving_of_keyed_work_has_its_whole_grace() -> None:
    async def check(works: Works, submit: Submissions, clock: Clock) -> None:
        def begin() -> Work:
            return works.begin(keyed(), {}, submit)

        works.leave(begin())
        await clock.move(1)
        works.leave(begin())
        await clock.move(1.5)
        assert submit.cancelled == [], "the time of the first has passed, that of the second has not"
        waiting = begin()
        await clock.move(9)
        assert submit.cancelled == [], "somebody waits"
        works.leave(waiting)
        await clock.move(2.5)
        assert submit.cancelled == [submit.handles[0].id]
        assert len(submit.handles) == 1

    with_works(check)


def test_work_that_is_being_cancelled_is_not_joined() -> None:
    """A cancel takes up to one unit of work, in which the client may come back."""

    async def check(works: Works, submit: Submissions, clock: Clock) -> None:
        works.leave(works.begin(keyed(), {}, submit))
        await clock.move(2.5)
        assert submit.cancelled == [submit.handles[0].id]
        assert not submit.handles[0].done()
        assert works.begin(keyed(), {}, submit).handle is submit.handles[1]

    with_works(check)


def test_which_ends_a_key_gets_again() -> None:
    """A result, and what will not be otherwise another time; nothing of another caller's."""

    async def check(works: Works, submit: Submissions, clock: Clock) -> None:
        def end(error: DiffgenError | None, **headers: str) -> bool:
            """Whether the same key gets the same end."""
            handle = works.begin(keyed(**headers), {}, submit).handle
            if error is None:
                handle.publish(GenerationResult(id=handle.id, params=handle.params, seeds=(1,), model="m"))
            else:
                handle.publish(Failed(handle.id, error.info()), error)
            return works.begin(keyed(**headers), {}, submit).handle is handle

        assert not end(QueueFull("full"))
        assert end(GenerationError("by design"))
        assert end(None, authorization="Bearer another")
        assert works.begin(keyed(), {}, submit).handle is submit.handles[1]
        assert len(submit.handles) == 3
        with pytest.raises(InvalidRequest, match="take a new key"):
            works.begin(keyed(), {"seed": 1}, submit)

    with_works(check)


def test_results_are_kept_for_their_keys_as_long_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_KEPT_BYTES", 250)

    async def check(works: Works, submit: Submissions, clock: Clock) -> None:
        def begin(key: str) -> GenerationHandle:
            return works.begin(keyed(**{"idempotency-key": key}), {}, submit).handle

        for key in "abc":
            handle = begin(key)
            raw = np.zeros(100, np.uint8)
            handle.publish(GenerationResult(id=handle.id, params=handle.params, seeds=(1,), model="m", raw=raw))
        assert [begin(key) in submit.handles[:3] for key in "cba"] == [True, True, False], "the oldest has gone"

    with_works(check)


def test_each_generation_is_counted_once() -> None:
    metrics, submit = Metrics(), Submissions()
    for output in ("image", "image", "video"):
        metrics.follow(submit(), "m", output)
    image, given_up, clip = submit.handles
    params = SamplingParams(prompt="a", num_frames=5, num_inference_steps=3)
    image.publish(GenerationResult(id=image.id, params=SamplingParams(prompt="a"), seeds=(1, 2), model="m"))
    error = RequestCancelled("x")
    given_up.publish(Failed(given_up.id, error.info()), error)
    clip.publish(GenerationResult(id=clip.id, params=params, seeds=(1,), model="m"))
    told = metrics.text(None, None).decode()
    for line in (
        'diffgen_requests_total{model="m",status="ok",task="image"} 1.0',
        'diffgen_requests_total{model="m",status="request_cancelled",task="image"} 1.0',
        'diffgen_requests_total{model="m",status="ok",task="video"} 1.0',
        'diffgen_images_generated_total{model="m"} 2.0',
        'diffgen_video_frames_generated_total{model="m"} 5.0',
        'diffgen_denoise_steps_total{model="m"} 3.0',
    ):
        assert line in told


def test_of_an_answer_whose_files_do_not_fit_none_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    files = [b"x" * 10, b"x" * 200_000]
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OutputError):
            store.add_image("img_1", files, "image/png", time.time() + 9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.glob("*img_1*")) == []
    store.add_image("img_2", files, "image/png", time.time() - 1)
    store.add_image("img_22", files, "image/png", time.time() + 9)
    store.sweep()
    assert sorted(path.name for path in tmp_path.glob("*img_*")) == ["img_22_0.png", "img_22_1.png"]
    store.close()


def test_jobs_may_be_deleted_while_they_are_paged_through(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for number in range(5):
        store.add(Job(id=f"video_{number}", model="m", params=SamplingParams(prompt="a"), created_at=1.0))
    seen: list[str] = []
    after: str | None = None
    while found := store.page(after, 2, newest_first=True):
        for job in found:
            seen.append(job.id)
            store.delete(job.id)
        after = found[-1].id
    assert seen == [f"video_{number}" for number in (4, 3, 2, 1, 0)]
    assert found == []
    assert store.page("video_5", 2, newest_first=True) is None
    store.close()
