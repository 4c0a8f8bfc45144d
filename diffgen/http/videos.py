"""Clips, as jobs: ``/v1/videos``."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from diffgen.errors import InvalidRequest, QueueFull
from diffgen.http import schema
from diffgen.http.args import keeping
from diffgen.http.bodies import read_body
from diffgen.http.errors import HttpError, json_response
from diffgen.http.guard import FileAnswer, exchange_of
from diffgen.http.images import note_params, shown_params
from diffgen.http.jobs import Live
from diffgen.http.params import VideoOptions, as_clip, check_model, known_fields, split, with_previews
from diffgen.http.previews import as_webp
from diffgen.http.service import Service, service_of
from diffgen.http.store import Job
from diffgen.http.work import fingerprint, idempotency_key, reused_key
from diffgen.media import encode
from diffgen.params import resolve

router = APIRouter()

_POLL = {"openai-poll-after-ms": "1000"}
_PICTURES = ("input_reference", "image", "mask")
_MOST_LISTED = 100
_FILES = {"video": ("{id}", "mp4", "video/mp4"), "thumbnail": ("{id}_thumbnail", "webp", "image/webp")}


@router.post("/v1/videos", **schema.posts(VideoOptions, "Video", forms=True))
async def create(request: Request) -> Response:
    """Begin a clip. It is stored before it runs, and runs again after a restart."""
    service = service_of(request)
    generator = service.accepting()
    key = idempotency_key(request)
    is_known = await service.jobs.knows(key)
    _check_place(service, is_known)
    values = await read_body(request, known_fields(VideoOptions), forms=True)
    for name in _PICTURES:
        if values.get(name) is not None:
            rule = f"{service.model.family} draws from text alone; leave it out"
            raise InvalidRequest(f"{name}: {rule}", code="unsupported_parameter", param=name)
    params, options, warnings = split(values, VideoOptions, ignore_unknown=service.ignores_unknown)
    check_model(options, service.served)
    if params.num_outputs_per_prompt not in (None, 1):
        raise InvalidRequest(f"n is {params.num_outputs_per_prompt}; a job makes one clip", code="invalid_n", param="n")
    clip = with_previews(as_clip(params, service.model), options.partial_images, service.model)
    resolved = resolve(clip, service.model, service.limits)
    if resolved.params.num_frames == 1:
        rule = "use /v1/images/generations for a still image"
        raise InvalidRequest(f"num_frames is 1: {rule}", code="invalid_num_frames", param="num_frames")
    encode.check_mp4(resolved.params.width or 0, resolved.params.height or 0)
    _check_place(service, is_known)  # others have come while the body was read
    trace, exchange = service.begin_trace("video", request), exchange_of(request.scope)
    job = Job(
        id=f"video_{uuid.uuid4().hex}",
        model=service.model.name,
        params=resolved.params,
        created_at=time.time(),
        warnings=(*exchange.warnings, *warnings, *resolved.warnings),
        key=key,
        digest=fingerprint(values),
        trace={} if trace is None else trace.headers,
    )
    stored = await service.jobs.create(job, generator, trace)
    if stored.digest != job.digest:
        raise reused_key()
    note_params(request, resolved.params)
    exchange.notes["video"] = stored.id
    return json_response(_view(service, stored), headers=_POLL)


def _check_place(service: Service, is_known: bool) -> None:
    """Raises :class:`QueueFull` where there is no place for another job; one that is known already needs none."""
    most, there = service.limits.queue, len(service.jobs)
    if there >= most and not is_known:
        rule = f"this server's limit is {most}; try again later"
        raise QueueFull(f"{there} clips are waiting or running, and {rule}")


def _view(service: Service, job: Job) -> dict[str, Any]:
    """A job as clients see it; what runs says how far it is."""
    live = service.jobs.live(job.id)
    job = service.jobs.latest(job)
    params = job.params
    frames, fps = params.num_frames or 1, params.fps or 1.0
    return {
        "id": job.id,
        "object": "video",
        "model": service.served[0],
        "status": job.status,
        "progress": _progress(job, live),
        "created_at": int(job.created_at),
        "completed_at": None if job.completed_at is None else int(job.completed_at),
        "expires_at": None if job.expires_at is None else int(job.expires_at),
        "seconds": f"{frames / fps:g}",
        "size": f"{params.width}x{params.height}",
        "prompt": params.prompt,
        "remixed_from_video_id": None,
        "error": None if job.error is None else {"code": job.error[0], "message": job.error[1]},
        "seed": params.seed,
        "params": shown_params(params),
        "warnings": list(job.warnings),
        "timings": {stage: round(seconds, 6) for stage, seconds in job.timings.items()},
        "inference_time_s": round(job.timings["total"], 6) if "total" in job.timings else None,
        "peak_memory_mb": round(job.peak_memory_mb, 1) or None,
        "eta": round(max(0.0, live.ends_at - time.monotonic()), 1) if live is not None and live.ends_at else None,
        "ahead": live.ahead if live is not None and job.status == "queued" else None,
        "previews": 0 if live is None else live.previews,
    }


def _progress(job: Job, live: Live | None) -> int:
    if job.status == "completed":
        return 100
    return 0 if live is None else live.progress


@router.get("/v1/videos", **schema.gives("Videos"))
async def list_videos(request: Request, after: str | None = None, limit: str = "20", order: str = "desc") -> Response:
    """Jobs by the time when they came."""
    service = service_of(request)
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {order!r:.60}; it must be asc or desc", code="invalid_order", param="order")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= _MOST_LISTED):
        rule = f"it must be from 1 to {_MOST_LISTED}"
        raise InvalidRequest(f"limit is {limit!r:.60}; {rule}", code="invalid_limit", param="limit")
    # One more than asked for tells whether there are more.
    found = await asyncio.to_thread(service.store.page, after, int(limit) + 1, order == "desc")
    if found is None:
        raise _not_found(after or "", "after")
    shown = [_view(service, job) for job in found[: int(limit)]]
    return json_response(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(found) > int(limit),
        }
    )


async def _find(service: Service, video_id: str) -> Job:
    job = await asyncio.to_thread(service.store.get, video_id)
    if job is not None and job.status in ("queued", "in_progress") and service.jobs.live(video_id) is None:
        job = await asyncio.to_thread(service.store.get, video_id)  # it has ended while it was looked up
    if job is None:
        raise _not_found(video_id)
    return job


def _not_found(video_id: str, param: str = "video_id") -> HttpError:
    return HttpError(404, "video_not_found", f"no video {video_id!r:.100} is here", param=param)


@router.get("/v1/videos/{video_id}", **schema.gives("Video"))
async def retrieve(request: Request, video_id: str) -> Response:
    service = service_of(request)
    shown = _view(service, await _find(service, video_id))
    shown["warnings"] += exchange_of(request.scope).warnings
    return json_response(shown, headers=_POLL)


@router.delete("/v1/videos/{video_id}", **schema.gives("DeletedVideo"))
async def delete(request: Request, video_id: str) -> Response:
    """Cancel a job, whatever its state, and remove its file."""
    if not await service_of(request).jobs.delete(video_id):
        raise _not_found(video_id)
    return json_response({"id": video_id, "object": "video.deleted", "deleted": True})


@router.get("/v1/videos/{video_id}/content", **schema.gives_file("video/mp4", "image/webp"))
async def content(request: Request, video_id: str, variant: str = "video") -> Response:
    """The clip, with ``variant=thumbnail`` its first frame, with ``preview`` what it is going to be, while it runs."""
    service = service_of(request)
    if variant == "preview":
        return await _preview(service, await _find(service, video_id))
    if variant not in _FILES:
        rule = f"variant is {variant!r:.60}; it must be {', '.join(_FILES)} or preview"
        raise InvalidRequest(rule, code="invalid_variant", param="variant")
    job = service.jobs.latest(await _find(service, video_id))
    if job.status == "failed":
        assert job.error is not None
        raise HttpError(404, job.error[0], f"video {video_id} has failed: {job.error[1]}")
    if job.status != "completed":
        rule = "ask again when its status is completed"
        raise HttpError(409, "video_not_ready", f"video {video_id} is not done; {rule}", headers=_POLL)
    name, extension, media_type = _FILES[variant]
    path = service.store.path(name.format(id=job.id), extension)
    gone = HttpError(
        404, "video_expired", f"the file of video {video_id} is not here any more; {keeping(service.args)}"
    )
    if job.expires_at is not None and time.time() > job.expires_at:
        raise gone
    return FileAnswer(path, media_type, gone)


async def _preview(service: Service, job: Job) -> Response:
    live = service.jobs.live(job.id)
    if live is None or live.preview is None:
        rule = "it has one while it runs, after some steps, if partial_images was given and the model has previews"
        raise HttpError(404, "no_preview", f"video {job.id} has no preview now; {rule}", param="variant")
    seconds = (job.params.num_frames or 1) / (job.params.fps or 1.0)
    content = await asyncio.to_thread(as_webp, live.preview.pixels[0], seconds)
    return Response(content, media_type="image/webp", headers={"cache-control": "no-store"})
