"""Still images: ``/v1/images``."""

from __future__ import annotations

import asyncio
import base64
import io
import math
import time
from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from diffgen.errors import InvalidRequest
from diffgen.http import schema
from diffgen.http.args import keeping
from diffgen.http.bodies import read_body
from diffgen.http.errors import HttpError, json_response
from diffgen.http.guard import FileAnswer, exchange_of
from diffgen.http.params import (
    HIDDEN,
    ImageOptions,
    check_image,
    check_model,
    known_fields,
    quality_of,
    split,
    with_previews,
)
from diffgen.http.pictures import given, read_picture
from diffgen.http.previews import enlarged
from diffgen.http.service import Service, service_of
from diffgen.http.stream import stream
from diffgen.http.work import Work
from diffgen.media import encode
from diffgen.media.metadata import fits_jpeg, of_output
from diffgen.params import SamplingParams
from diffgen.result import GenerationResult

router = APIRouter()


@router.post("/v1/images/generations", **schema.posts(ImageOptions, "Images", event="ImageEvent"))
async def generate(request: Request) -> Response:
    """Make images from a text."""
    service = service_of(request)
    generator = service.accepting()
    values = await read_body(request, known_fields(ImageOptions))
    params, options, warnings = split(values, ImageOptions, ignore_unknown=service.ignores_unknown)
    check_model(options, service.served)
    params = with_previews(check_image(params, options), options.partial_images, generator.model)
    note_params(request, params)
    work = service.works.begin(request, values, lambda: service.followed(request, generator.submit(params)))
    exchange = exchange_of(request.scope)
    exchange.notes["generation"] = work.handle.id
    answer = ImageAnswer(service, request, options, work, (*exchange.warnings, *warnings))
    if options.stream:
        return await stream(answer, options.partial_images or 0)
    try:
        result = await service.works.result(work, request)
    finally:
        service.works.leave(work)
    # Of many megabytes, with several images.
    return await asyncio.to_thread(json_response, await answer.whole(result))


def note_params(request: Request, params: SamplingParams) -> None:
    """For the log line."""
    notes = exchange_of(request.scope).notes
    for name in ("num_outputs_per_prompt", "size", "width", "height", "num_frames", "num_inference_steps", "seed"):
        if getattr(params, name) is not None:
            notes[name] = getattr(params, name)
    if service_of(request).args.log_prompts:
        notes["prompt"] = params.prompt


class ImageAnswer:
    """A finished request in the form that its client asked for."""

    def __init__(
        self, service: Service, request: Request, options: ImageOptions, work: Work, warnings: tuple[str, ...]
    ) -> None:
        self.service, self.request, self.options, self.work = service, request, options, work
        self._warnings = warnings
        self.format = options.output_format or "png"

    async def preview(self, pixels: Any) -> tuple[str, tuple[int, int]]:
        """A preview's first output at four times its size, in base64, and that size (width, height)."""

        def encode() -> tuple[str, tuple[int, int]]:
            (large,) = enlarged(pixels[0, :1])
            return base64.b64encode(self.encode(np.asarray(large))).decode(), large.size

        return await asyncio.to_thread(encode)

    def common(self, size: tuple[int, int]) -> dict[str, Any]:
        """What every event and answer says. ``size`` is (width, height)."""
        return {
            "background": "opaque",
            "output_format": self.format,
            "quality": self.options.quality or "auto",
            "size": f"{size[0]}x{size[1]}",
        }

    async def images(self, result: GenerationResult) -> list[dict[str, Any]]:
        """One entry an image: ``b64_json`` or ``url``, its seed and size."""
        contents, texts = await asyncio.to_thread(self._encode, result)
        image_id = f"img_{self.work.handle.id}"
        height, width = result.pixels.shape[2:4]
        if self.options.response_format == "url":
            expires = time.time() + self.service.args.media_ttl
            kind = f"image/{self.format}"
            await asyncio.to_thread(self.service.store.add_image, image_id, contents, kind, expires)
        found = []
        for variant, (text, seed) in enumerate(zip(texts, result.seeds, strict=True)):
            entry: dict[str, Any] = {"seed": seed, "width": width, "height": height}
            if self.options.response_format == "url":
                base = self.service.base_url(self.request)
                entry["url"] = f"{base}/v1/images/{image_id}/content?variant={variant}"
            else:
                entry["b64_json"] = text
            found.append({**entry, "revised_prompt": None})
        return found

    def _encode(self, result: GenerationResult) -> tuple[list[bytes], list[str]]:
        """The files, and the same in base64."""
        clips = zip(result.pixels, result.seeds, strict=True)
        files = [self.encode(clip[0], result, seed) for clip, seed in clips]
        return files, [base64.b64encode(file).decode() for file in files]

    def encode(self, image: Any, result: GenerationResult | None = None, seed: int = 0) -> bytes:
        """(height, width, 3) as a file of the format asked for."""
        metadata = None
        if result is not None and self.service.args.media_metadata:
            metadata = of_output(result.params, seed, result.model)
            if self.format == "jpeg" and not fits_jpeg(metadata):
                metadata = None
        file = io.BytesIO()
        if self.format == "png":
            encode.save_png(image, file, metadata)
        else:
            save = encode.save_jpeg if self.format == "jpeg" else encode.save_webp
            save(image, file, quality_of(self.options), metadata)
        return file.getvalue()

    async def whole(self, result: GenerationResult) -> dict[str, Any]:
        """The answer without a stream."""
        height, width = result.pixels.shape[2:4]
        return {
            "created": int(self.work.created),
            "data": await self.images(result),
            **self.common((width, height)),
            "usage": self.usage(result),
            **self.details(result),
        }

    def usage(self, result: GenerationResult) -> dict[str, Any]:
        """In place of tokens, which differ by model: words, and squares of the model's smallest step in size."""
        square = self.service.model.size_multiple
        params = result.params
        words = len(params.prompt.split()) + len((params.negative_prompt or "").split())
        size = math.ceil((params.width or 0) / square) * math.ceil((params.height or 0) / square)
        made = size * len(result.seeds)
        details = {"text_tokens": words, "image_tokens": 0}
        return {
            "input_tokens": words,
            "input_tokens_details": details,
            "output_tokens": made,
            "total_tokens": words + made,
        }

    def details(self, result: GenerationResult) -> dict[str, Any]:
        """What goes beyond OpenAI's contract."""
        return {
            "id": f"img_{self.work.handle.id}",
            "model": self.service.served[0],
            "seed": result.seeds[0],
            "params": shown_params(result.params),
            "warnings": [*self._warnings, *result.warnings],
            "timings": {stage: round(seconds, 6) for stage, seconds in result.timings.items()},
            "inference_time_s": round(result.timings.get("total", 0.0), 6),
            "peak_memory_mb": round(result.peak_memory_mb, 1),
        }


def shown_params(params: SamplingParams) -> dict[str, Any]:
    """The resolved parameters, without those that are unset or mean nothing over HTTP."""
    values = {name: getattr(params, name) for name in params.__struct_fields__ if name not in HIDDEN}
    return {name: value for name, value in values.items() if value is not None}


@router.get("/v1/images/{image_id}/content", **schema.gives_file("image/png"))
async def content(request: Request, image_id: str, variant: str = "0") -> Response:
    """A file of an answer with ``response_format`` url."""
    service = service_of(request)
    found = await asyncio.to_thread(service.store.image, image_id)
    if found is None:
        raise HttpError(404, "image_not_found", f"no image {image_id!r:.100} is here")
    media_type, expires_at = found
    if not variant.isascii() or not variant.isdigit():
        raise InvalidRequest(f"variant is {variant!r:.60}; it must be the image's number, from 0", param="variant")
    path = service.store.path(f"{image_id}_{int(variant[:9])}", media_type.partition("/")[2])
    if time.time() > expires_at:
        raise HttpError(404, "image_expired", f"image {image_id} is not here any more; {keeping(service.args)}")
    rule = f"image {image_id} has no variant {variant[:9]}, or none any more; {keeping(service.args)}"
    gone = HttpError(404, "image_not_found", rule, param="variant")
    return FileAnswer(path, media_type, gone)


@router.post("/v1/images/edits", **schema.refuses())
async def edit(request: Request) -> Response:
    """Refused, since the families served here draw from text alone; what is wrong with a picture is told first, as far
    as can be told without fetching it."""
    service = service_of(request)
    service.accepting()
    values = await read_body(request, known_fields(ImageOptions), forms=True)
    for picture in given(values, service.limits, service.remote):
        if not picture.is_remote:
            await read_picture(picture, service.limits, service.remote)
    rule = f"{service.model.family} draws from text alone; use /v1/images/generations"
    raise InvalidRequest(f"this model takes no pictures: {rule}", code="unsupported_model", param="image")


@router.post("/v1/images/variations", **schema.refuses())
async def vary(request: Request) -> Response:
    """Refused, as edits."""
    return await edit(request)
