"""Server-sent events of an image request: previews, the images, errors; progress as comments."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from starlette.responses import Response, StreamingResponse

from diffgen.errors import DiffgenError, error_from
from diffgen.handle import Event, Preview, is_final
from diffgen.http.errors import HttpError, from_diffgen, internal_error
from diffgen.http.guard import exchange_of
from diffgen.http.work import leaving
from diffgen.result import GenerationResult
from diffgen.wire.messages import Failed, Progress

if TYPE_CHECKING:
    from diffgen.http.images import ImageAnswer

logger = logging.getLogger("diffgen.http")

# Keeps proxies from closing a connection on which nothing happens.
_PING_S = 15.0


async def stream(answer: ImageAnswer, partial_images: int) -> Response:
    """The events of ``answer``'s work. What is refused before any work is raised, for a plain error."""
    events = answer.work.handle.aevents()
    try:
        first = await anext(events)
        if isinstance(first, Failed):
            raise error_from(first.error)
    except BaseException:
        answer.service.works.leave(answer.work)
        raise
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    body = _lines(answer, first, events, partial_images)
    return StreamingResponse(body, media_type="text/event-stream", headers=headers)


async def _lines(
    answer: ImageAnswer, first: Event, events: AsyncIterator[Event], partial_images: int
) -> AsyncIterator[str]:
    shown = 0
    try:
        async with leaving(answer.request) as left:
            async for event in until(left, first, events):
                if event is None:
                    yield ": ping\n\n"
                elif isinstance(event, Progress):
                    yield f": {event.stage} {event.step}/{event.total}\n\n"
                elif isinstance(event, Preview) and shown < partial_images:
                    yield await _partial(answer, event, shown)
                    shown += 1
                elif isinstance(event, Failed):
                    yield _error(answer, from_diffgen(error_from(event.error)))
                elif isinstance(event, GenerationResult):
                    for line in await _completed(answer, event):
                        yield line
    except Exception:  # the status has been sent: nobody else would tell the client
        logger.exception("a stream failed", extra={"request_id": exchange_of(answer.request.scope).id})
        yield _error(answer, internal_error())
    finally:
        answer.service.works.leave(answer.work)


async def until(left: asyncio.Task[None], first: Event, events: AsyncIterator[Event]) -> AsyncIterator[Event | None]:
    """Every event until the last or until the client has left; None where nothing has happened for a while."""
    event: Event | None = first
    coming: asyncio.Future[Event] | None = None
    try:
        while not left.done():
            yield event
            if event is not None and is_final(event):
                return
            coming = coming or asyncio.ensure_future(anext(events))
            waiting: set[asyncio.Future[Any]] = {left, coming}
            await asyncio.wait(waiting, timeout=_PING_S, return_when=asyncio.FIRST_COMPLETED)
            event = coming.result() if coming.done() else None
            coming = None if coming.done() else coming
    finally:
        if coming is not None:
            coming.cancel()


async def _partial(answer: ImageAnswer, preview: Preview, index: int) -> str:
    text, size = await answer.preview(preview.pixels)
    name = "image_generation.partial_image"
    content = {"b64_json": text, "partial_image_index": index, "created_at": int(time.time()), **answer.common(size)}
    return _event(name, {"type": name, **content, "step": preview.step, "total": preview.total})


async def _completed(answer: ImageAnswer, result: GenerationResult) -> list[str]:
    try:
        images = await answer.images(result)
    except DiffgenError as error:
        return [_error(answer, from_diffgen(error))]
    lines = []
    for index, image in enumerate(images):
        size = (image.pop("width"), image.pop("height"))
        content = {"image_index": index, "created_at": int(time.time()), **image, **answer.common(size)}
        name = "image_generation.completed"
        extra = {"usage": answer.usage(result), **answer.details(result), "seed": image["seed"]}
        lines.append(_event(name, {"type": name, **content, **extra}))
    return lines


def _error(answer: ImageAnswer, error: HttpError) -> str:
    """For the client, which has its status already, and for the log line."""
    exchange_of(answer.request.scope).notes["code"] = error.code
    return _event("error", {"type": "error", **error.body()})


def _event(name: str, content: dict[str, Any]) -> str:
    # The blank line ends an event; without it clients lose the last one.
    return f"event: {name}\ndata: {json.dumps(content, allow_nan=False, separators=(',', ':'))}\n\n"
