"""What is served, and what it takes: ``/v1/models`` and ``/v1/capabilities``."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from diffgen.fields import fields
from diffgen.http import schema
from diffgen.http.errors import json_response
from diffgen.http.params import DEFAULT_SECONDS, HIDDEN, MAX_N, no_model
from diffgen.http.service import Service, service_of
from diffgen.params import SamplingParams

router = APIRouter()


def _entry(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "diffgen",
        "root": service.model.name,
    }


@router.get("/v1/models", **schema.gives("Models"))
async def list_models(request: Request) -> Response:
    """Every name under which the model can be called."""
    service = service_of(request)
    return json_response({"object": "list", "data": [_entry(service, name) for name in service.served]})


@router.get("/v1/models/{model_id:path}", **schema.gives("Model"))
async def get_model(request: Request, model_id: str) -> Response:
    service = service_of(request)
    if model_id not in service.served:
        raise no_model(model_id, service.served)
    return json_response(_entry(service, model_id))


@router.get("/v1/capabilities", **schema.gives("Any"))
async def capabilities(request: Request) -> Response:
    """Sizes, limits, defaults and parameters of the model."""
    service = service_of(request)
    model = service.model
    parameters = {
        name: {**schema.field_schema(field), "default": model.defaults.get(name)}
        for name, field in fields(SamplingParams).items()
        if name not in ("prompt", "size", *HIDDEN) and (not field.extra.get("optional") or name in model.takes)
    }
    if model.schedulers and "scheduler" in parameters:
        parameters["scheduler"]["enum"] = list(model.schedulers)
    return json_response(
        {
            "model": service.served[0],
            "family": model.family,
            "tasks": ["image", *(["video"] if model.frame_stride else [])],
            "defaults": model.defaults,
            "limits": {**msgspec.structs.asdict(service.limits), "n": MAX_N},
            "size_multiple": model.size_multiple,
            "frame_stride": model.frame_stride,
            "default_clip_seconds": DEFAULT_SECONDS,
            "guidance": model.guidance,
            "guidance_off": model.guidance_off,
            "guidance_needs_negative": model.guidance_needs_negative,
            "takes_pictures": False,
            "output_formats": {"image": ["png", "jpeg", "webp"], "video": ["mp4"]},
            "parameters": parameters,
        }
    )
