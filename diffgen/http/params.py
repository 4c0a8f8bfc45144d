"""From a client's values to parameters: OpenAI's fields, SGLang's names at top level, nothing unknown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from diffgen.errors import InvalidRequest
from diffgen.fields import Field, build, fields, nearest_name, refuse
from diffgen.http.errors import HttpError
from diffgen.media import encode
from diffgen.params import ModelSpec, SamplingParams, parse_params, parse_size

#: As OpenAI's contract has it, whatever the server's own limit.
MAX_N = 10
#: Length of a clip where neither the client nor the model says one.
DEFAULT_SECONDS = 2.0

_OF_OPENAI = "OpenAI's; has no effect"
_QUALITIES = {"maximum": 100, "high": 90, "medium": 55, "low": 35, "default": 75}


class CommonOptions(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[str | None, Meta(description="name of the served model; any other is refused")] = None
    user: Annotated[str | None, Meta(description=_OF_OPENAI)] = None
    safety_identifier: Annotated[str | None, Meta(description=_OF_OPENAI)] = None
    generator_device: Annotated[
        str | None, Meta(description="SGLang's; noise is always drawn on the CPU, so that it is the same everywhere")
    ] = None


class ImageOptions(CommonOptions, frozen=True, kw_only=True):
    """What an image request may hold beside :class:`SamplingParams`."""

    response_format: Annotated[
        Literal["b64_json", "url"] | None, Meta(description="b64_json when unset; url keeps the file for a while")
    ] = None
    output_format: Annotated[Literal["png", "jpeg", "webp"] | None, Meta(description="png when unset")] = None
    output_compression: Annotated[
        int | None,
        Meta(
            description=f"quality of jpeg and webp; {encode.DEFAULT_QUALITY} when unset", extra={"min": 0, "max": 100}
        ),
    ] = None
    output_quality: Annotated[
        Literal["maximum", "high", "medium", "low", "default"] | None,
        Meta(description="SGLang's words for output_compression: 100, 90, 55, 35, 75"),
    ] = None
    background: Annotated[
        Literal["opaque", "auto", "transparent"] | None,
        Meta(description="transparent is refused: no model here draws alpha"),
    ] = None
    stream: Annotated[bool | None, Meta(description="answer with server-sent events")] = None
    partial_images: Annotated[
        int | None, Meta(description="previews to send while it runs, with stream", extra={"min": 0, "max": 3})
    ] = None
    quality: Annotated[str | None, Meta(description=_OF_OPENAI)] = None
    style: Annotated[str | None, Meta(description=_OF_OPENAI)] = None
    moderation: Annotated[str | None, Meta(description=_OF_OPENAI)] = None
    complexity: Annotated[str | None, Meta(description=_OF_OPENAI)] = None


class VideoOptions(CommonOptions, frozen=True, kw_only=True):
    """What a video request may hold beside :class:`SamplingParams`."""

    partial_images: Annotated[
        int | None,
        Meta(
            description="previews to make while it runs; the newest is content with variant=preview",
            extra={"min": 0, "max": 3},
        ),
    ] = None
    quality: Annotated[str | None, Meta(description=_OF_OPENAI)] = None


#: Parameters that mean nothing over HTTP.
HIDDEN = ("output_type", "preview_every")
_MOST_TOLD = 20  # unknown parameters, by name
_WITHOUT_EFFECT = ("user", "safety_identifier", "quality", "style", "moderation", "complexity")
_NEUTRAL = (None, "auto", "standard", "default")

O = TypeVar("O", bound=CommonOptions)  # noqa: E741


def known_fields(options: type[CommonOptions]) -> dict[str, Field]:
    """Every field that a request may hold, with its rules."""
    sampling = {name: field for name, field in fields(SamplingParams).items() if name not in HIDDEN}
    aliases = {field.extra["alias"]: field for field in sampling.values() if "alias" in field.extra}
    return {**sampling, **aliases, **fields(options)}


def split(values: Mapping[str, Any], options: type[O], *, ignore_unknown: bool) -> tuple[SamplingParams, O, list[str]]:
    """Parameters, options and warnings. Raises :class:`InvalidRequest` for what is unknown or wrong."""
    known = known_fields(options)
    warnings = unknown(values, known, ignore=ignore_unknown)
    mine = fields(options)
    built = build(options, {name: values[name] for name in mine if name in values})
    sampling = {name: value for name, value in values.items() if name in known and name not in mine}
    if isinstance(sampling.get("seconds"), str):  # OpenAI's form
        sampling["seconds"] = _seconds(sampling["seconds"])
    params = parse_params(sampling)
    count = params.num_outputs_per_prompt
    if count is not None and count > MAX_N:
        refuse("n", f"n is {count}; a request over HTTP makes at most {MAX_N}, as in OpenAI's API; send several")
    return params, built, warnings + _idle(built)


def unknown(given: Iterable[str], known: Collection[str], *, ignore: bool) -> list[str]:
    """Warnings of the names that are not known. Raises :class:`InvalidRequest` unless they are to be ignored."""
    names = [name for name in given if name not in known]
    if names and not ignore:
        remedy = nearest_name(names[0], known) if known else "this address takes none"
        wrong = f"unknown parameter {names[0]!r:.100}; {remedy}"
        raise InvalidRequest(wrong, code="unknown_parameter", param=names[0])
    told = [f"{name!r:.100} has no effect: it is not known" for name in names[:_MOST_TOLD]]
    more = len(names) - len(told)
    return [*told, f"{more} further parameters have no effect: they are not known"] if more else told


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        refuse("seconds", f"seconds is {text!r:.60}; it must be a number")


def _idle(options: CommonOptions) -> list[str]:
    """Warnings of fields that are known and mean nothing here."""
    given = [name for name in _WITHOUT_EFFECT if getattr(options, name, None) not in _NEUTRAL]
    found = [f"{name} has no effect" for name in given]
    if options.generator_device not in (None, "cpu"):
        found.append("generator_device has no effect: noise is drawn on the CPU")
    if (
        isinstance(options, ImageOptions)
        and options.output_quality not in _NEUTRAL
        and options.output_format in (None, "png")
    ):
        found.append("output_quality has no effect: png has none; give output_format=jpeg or webp")
    return found


def check_model(options: CommonOptions, served: tuple[str, ...]) -> None:
    """Raises :class:`HttpError` for a model that is not served."""
    if options.model is not None and options.model not in served:
        raise no_model(options.model, served)


def no_model(name: str, served: tuple[str, ...]) -> HttpError:
    rule = f"this server serves {' or '.join(served)}"
    return HttpError(404, "model_not_found", f"model {name!r:.200} is not here; {rule}", param="model")


def check_image(params: SamplingParams, options: ImageOptions) -> SamplingParams:
    """The parameters of a still image. Raises :class:`InvalidRequest`."""
    if params.seconds is not None or params.num_frames not in (None, 1):
        name = "num_frames" if params.seconds is None else "seconds"
        refuse(name, f"{name} {getattr(params, name)}: this route makes still images; use /v1/videos for clips")
    if options.background == "transparent":
        refuse("background", "background transparent: no model here draws alpha; use opaque or auto")
    if options.partial_images and not options.stream:
        refuse("partial_images", f"partial_images {options.partial_images} without stream; give stream=true")
    # 100 is OpenAI's default, and true of png.
    if options.output_format in (None, "png") and options.output_compression not in (None, 100):
        rule = "only jpeg and webp have a quality; leave it out, or give output_format=jpeg or webp"
        refuse("output_compression", f"output_compression {options.output_compression} with png: {rule}")
    _check_sides(params, options.output_format or "png")
    return msgspec.structs.replace(params, num_frames=1)


def _check_sides(params: SamplingParams, output_format: str) -> None:
    sides = (params.width, params.height, *((params.size and parse_size(params.size)) or ()))
    longest, side = encode.MAX_SIDE.get(output_format), max(each or 0 for each in sides)
    if longest is not None and side > longest:
        refuse("output_format", f"{output_format} holds at most {longest} pixels a side, not {side}; use png")


def quality_of(options: ImageOptions) -> int:
    if options.output_compression is not None:
        return options.output_compression
    return encode.DEFAULT_QUALITY if options.output_quality is None else _QUALITIES[options.output_quality]


def with_previews(params: SamplingParams, partial_images: int | None, model: ModelSpec) -> SamplingParams:
    """Previews spread over the steps, where the model has any."""
    if not partial_images or "preview_every" not in model.takes:
        return params
    steps = params.num_inference_steps or model.defaults.get("num_inference_steps") or 1
    return msgspec.structs.replace(params, preview_every=max(1, int(steps) // (partial_images + 1)))


def as_clip(params: SamplingParams, model: ModelSpec) -> SamplingParams:
    """The parameters of a clip, with a length where nobody says one. Raises :class:`InvalidRequest`."""
    if model.frame_stride == 0:
        raise InvalidRequest(f"{model.family} makes still images; use /v1/images/generations", code="unsupported_model")
    if params.num_frames is None and params.seconds is None and model.defaults.get("num_frames", 1) == 1:
        return msgspec.structs.replace(params, seconds=DEFAULT_SECONDS)
    return params
