"""The OpenAPI document: what requests hold comes from the same fields that check them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

import diffgen
from diffgen.fields import MAX_INT, Field, fields
from diffgen.http.params import MAX_N, CommonOptions, ImageOptions, known_fields
from diffgen.params import SamplingParams

Json = dict[str, Any]

_TYPES: dict[Any, Json] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
}
_EXAMPLE = {"prompt": "a red circle on a blue background", "size": "64x64", "num_inference_steps": 2, "seed": 1}
_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer"}
_NUMBER: Json = {"type": "number"}


def _object(required: list[str], **properties: Json) -> Json:
    return {"type": "object", "required": required, "properties": properties}


_SCHEMAS: dict[str, Json] = {
    "Error": _object(
        ["error"],
        error=_object(
            ["message", "type", "param", "code"],
            message=_TEXT,
            type=_TEXT,
            param={"type": ["string", "null"]},
            code=_TEXT,
        ),
    ),
    "Images": _object(
        ["created", "data", "usage", "id", "model", "seed", "params", "warnings"],
        created=_COUNT,
        data={
            "type": "array",
            "minItems": 1,
            "items": _object(
                ["seed", "width", "height"], b64_json=_TEXT, url=_TEXT, seed=_COUNT, width=_COUNT, height=_COUNT
            ),
        },
        size=_TEXT,
        output_format=_TEXT,
        usage=_object(["input_tokens", "output_tokens", "total_tokens"]),
        id=_TEXT,
        model=_TEXT,
        seed=_COUNT,
        params={"type": "object", "description": "as they were resolved: the same again give the same pixels"},
        warnings={"type": "array", "items": _TEXT},
    ),
    "Video": _object(
        ["id", "object", "model", "status", "progress", "created_at", "seconds", "size", "prompt"],
        id=_TEXT,
        object={"const": "video"},
        model=_TEXT,
        status={"enum": ["queued", "in_progress", "completed", "failed"]},
        progress={"type": "integer", "minimum": 0, "maximum": 100},
        created_at=_COUNT,
        completed_at={"type": ["integer", "null"]},
        expires_at={"type": ["integer", "null"]},
        seconds=_TEXT,
        size=_TEXT,
        prompt=_TEXT,
        error={"type": ["object", "null"]},
    ),
    "Videos": _object(
        ["object", "data", "first_id", "last_id", "has_more"],
        object={"const": "list"},
        data={"type": "array", "items": {"$ref": "#/components/schemas/Video"}},
        has_more={"type": "boolean"},
    ),
    "DeletedVideo": _object(["id", "object", "deleted"], id=_TEXT, deleted={"const": True}),
    "Model": _object(
        ["id", "object", "created", "owned_by"], id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT
    ),
    "Models": _object(["object", "data"], data={"type": "array", "items": {"$ref": "#/components/schemas/Model"}}),
    "Any": {"type": "object"},
    # Of a stream: OpenAPI 3.1 has no word for its items, so this describes one.
    "ImageEvent": _object(
        ["event", "data"],
        event={"enum": ["image_generation.partial_image", "image_generation.completed", "error"]},
        data={
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": _object(["type"], type={**_TEXT, "description": "the event's name again"}),
        },
    ),
}


def _answers(content: Json | None, description: str = "Done.") -> Json:
    error = {"description": "Refused or failed.", "content": {"application/json": _ref("Error")}}
    done = {"description": description, **({"content": content} if content else {})}
    return {"response_class": Response, "responses": {200: done, "4XX": error, "5XX": error}}


def _ref(name: str) -> Json:
    return {"schema": {"$ref": f"#/components/schemas/{name}"}}


def gives(name: str, kind: str = "application/json") -> Json:
    """A route that answers with a named schema."""
    return _answers({kind: _ref(name)})


def gives_file(*kinds: str) -> Json:
    return _answers({kind: {"schema": {"type": "string", "format": "binary"}} for kind in kinds})


def gives_text(kind: str) -> Json:
    return _answers({kind: {"schema": _TEXT}})


def refuses() -> Json:
    """A route of OpenAI's that no served family can answer."""
    body = {"multipart/form-data": {"schema": {"type": "object"}}}
    return {**_answers({"application/json": _ref("Any")}), "openapi_extra": {"requestBody": {"content": body}}}


def posts(options: type[CommonOptions], name: str, *, event: str | None = None, forms: bool = False) -> Json:
    """A route that takes :class:`SamplingParams` and ``options`` in a JSON body, and maybe in a form; it answers with
    the schema ``name``, or if asked for with a stream of which ``event`` is one item."""
    schema = request_schema(known_fields(options))
    example = {**_EXAMPLE, "n": 2} if issubclass(options, ImageOptions) else {**_EXAMPLE, "num_frames": 5}
    kinds = ["application/json", *(["multipart/form-data"] if forms else [])]
    body = {kind: {"schema": schema, "example": example} for kind in kinds}
    streams = {} if event is None else {"text/event-stream": _ref(event)}
    answers = _answers({"application/json": _ref(name), **streams})
    return {**answers, "openapi_extra": {"requestBody": {"required": True, "content": body}}}


def native(kind: str) -> Json:
    """The route of diffgen's own clients: a stream of messages."""
    body = {"application/json": {"schema": request_schema(dict(fields(SamplingParams))), "example": _EXAMPLE}}
    return {**gives_file(kind), "openapi_extra": {"requestBody": {"required": True, "content": body}}}


def request_schema(known: Mapping[str, Field]) -> Json:
    properties = {name: field_schema(field) for name, field in known.items()}
    if "n" in properties:
        properties["n"]["maximum"] = properties["num_outputs_per_prompt"]["maximum"] = MAX_N
        merged = "merged; what stands beside it counts more"
        properties["extra_body"] = {"type": ["object", "null"], "description": merged}
    return {"type": "object", "required": ["prompt"], "properties": properties, "additionalProperties": False}


def field_schema(field: Field) -> Json:
    """JSON Schema of one field: type, range and description."""
    found: Json = {"description": field.description}
    (member,) = field.members
    if get_origin(member) is Literal:
        choices = list(get_args(member))
        found["enum"] = [*choices, None] if field.default is None else choices
        return found
    kind = _TYPES[member]["type"]
    found["type"] = [kind, "null"] if field.default is None else kind
    if member in (int, float):
        bounds = {"min": "minimum", "max": "maximum", "above": "exclusiveMinimum"}
        found |= {bounds[rule]: value for rule, value in field.extra.items() if rule in bounds}
        found.setdefault("maximum", MAX_INT)
    if field.name == "seconds":
        found["type"] = ["number", "string", "null"]
    return found


def install(app: FastAPI) -> None:
    """Let ``app`` describe itself with the schemas above."""

    def openapi() -> Json:
        if app.openapi_schema is None:
            made = get_openapi(
                title="diffgen", version=diffgen.__version__, summary="Images and clips from text", routes=app.routes
            )
            for path in made["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)  # FastAPI's own form, which is never sent
            made["components"] = {"schemas": _SCHEMAS, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
            made["security"] = [{"key": []}, {}]
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
