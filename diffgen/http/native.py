"""diffgen's own protocol over HTTP, for ``DiffGenerator.connect("http://...")``; and a look at what is in work.

The events of a request are a stream of the wire's messages. Each is the number of its frames as uint32, then each
frame as its length in uint64 and its bytes, big-endian; a message of no frames says that the server is still there.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from diffgen.errors import InvalidRequest
from diffgen.handle import Event, Preview
from diffgen.http import schema
from diffgen.http.bodies import parse_json
from diffgen.http.errors import json_response
from diffgen.http.guard import exchange_of
from diffgen.http.images import note_params
from diffgen.http.service import service_of
from diffgen.http.stream import until
from diffgen.http.work import Work, Works, leaving
from diffgen.params import parse_params
from diffgen.request import OutputBatch, TensorHeader
from diffgen.result import GenerationResult
from diffgen.wire import codec, messages
from diffgen.wire.http import AGE_HEADER

router = APIRouter()

MEDIA_TYPE = "application/vnd.diffgen.messages"


@router.get("/v1/model", **schema.gives("Any"))
async def model(request: Request) -> Response:
    """What is served, as diffgen's own clients know it."""
    return json_response(msgspec.to_builtins(service_of(request).model))


@router.get("/v1/status", **schema.gives("Any"))
async def status(request: Request) -> Response:
    """Every client's requests in work, and what has been done."""
    found = await asyncio.to_thread(service_of(request).loaded().status)
    return json_response(msgspec.to_builtins(found, str_keys=True))


@router.delete("/v1/requests/{request_id}", **schema.gives("Any"))
async def abort(request: Request, request_id: str) -> Response:
    """End a request of any client; ``found`` is false where none of that id is in work."""
    generator = service_of(request).loaded()
    found = await asyncio.to_thread(generator.abort, request_id)
    return json_response({"id": request_id[:100], "found": found})


@router.post("/v1/requests", **schema.native(MEDIA_TYPE))
async def submit(request: Request) -> Response:
    """Generate, with every event and exact values. The header ``x-generation-id`` is the id to cancel it by."""
    service = service_of(request)
    generator = service.accepting()
    values = parse_json(await request.body())
    params = parse_params(values)
    age = _age(request)
    note_params(request, params)
    work = service.works.begin(request, values, lambda: service.followed(request, generator.submit(params, age=age)))
    exchange_of(request.scope).notes["generation"] = work.handle.id
    headers = {"x-generation-id": work.handle.id, "cache-control": "no-store"}
    return StreamingResponse(_messages(service.works, work, request), media_type=MEDIA_TYPE, headers=headers)


def _age(request: Request) -> float:
    given = request.headers.get(AGE_HEADER, "0")
    try:
        return float(given)
    except ValueError:
        raise InvalidRequest(f"{AGE_HEADER} is {given!r:.60}; it must be a number of seconds") from None


async def _messages(works: Works, work: Work, request: Request) -> AsyncIterator[bytes | memoryview]:
    try:
        events = work.handle.aevents()
        async with leaving(request) as left:
            async for event in until(left, await anext(events), events):
                if isinstance(event, messages.Failed):
                    exchange_of(request.scope).notes["code"] = event.error.code  # its status has been sent
                frames = [] if event is None else _frames(event)
                yield struct.pack(">I", len(frames))
                for frame in frames:
                    yield struct.pack(">Q", len(frame))
                    yield frame
    finally:
        works.leave(work)


def _frames(event: Event) -> list[bytes | memoryview]:
    if isinstance(event, Preview):
        pixels = event.pixels
        return codec.encode(messages.Preview(event.id, event.step, event.total, _header(pixels)), pixels)
    if isinstance(event, GenerationResult):
        assert event.raw is not None, "a result that came has values"
        output = OutputBatch(
            params=event.params,
            seeds=event.seeds,
            warnings=event.warnings,
            timings=event.timings,
            peak_memory_mb=event.peak_memory_mb,
            latent=event.params.output_type == "latent",
            tensor=_header(event.raw),
        )
        return codec.encode(messages.Result(event.id, output), event.raw)
    if isinstance(event, messages.Failed):
        return codec.encode(messages.Failed(event.id, event.error.public()))
    return codec.encode(event)


def _header(array: Any) -> TensorHeader:
    return TensorHeader(str(array.dtype), array.shape)
