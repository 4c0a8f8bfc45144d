"""What a user asks for, and the one validator of it.

:func:`parse_params` checks types, ranges and text without knowing a model: the Python API, the CLI and every other
front end call it before anything is sent. :func:`resolve` fills in the model's defaults and applies its rules and the
server's limits: rank 0 calls it on every request before any work is done. ``None`` is the only "unset": 0 is a value.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from diffgen.fields import MAX_INT, build, check_ranges, fields, refuse, shown

MAX_SEED = MAX_INT
MAX_TEXT = 2**19  # bytes of one text: a request with all its texts stays well below what a message may hold

_BATCH = {"batch": True}
_OPTIONAL = {"optional": True}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request: what to draw and how. Fields left at None take the model's defaults."""

    prompt: Annotated[str, Meta(description="text that says what to draw")]
    negative_prompt: Annotated[
        str | None, Meta(description="text that says what to avoid; works only while guidance is on")
    ] = None
    size: Annotated[
        str | None, Meta(description="WIDTHxHEIGHT in pixels, or auto for the model's own; instead of width and height")
    ] = None
    width: Annotated[int | None, Meta(description="width in pixels", extra={"min": 1, **_BATCH})] = None
    height: Annotated[int | None, Meta(description="height in pixels", extra={"min": 1, **_BATCH})] = None
    num_frames: Annotated[
        int | None, Meta(description="frames of a clip; 1 draws a still image", extra={"min": 1, **_BATCH})
    ] = None
    seconds: Annotated[
        float | None,
        Meta(description="length of a clip, rounded to frames the model can make; num_frames wins", extra={"above": 0}),
    ] = None
    fps: Annotated[
        float | None, Meta(description="frames a second of a saved clip", extra={"min": 0.01, "max": 240})
    ] = None
    num_inference_steps: Annotated[int | None, Meta(description="denoising steps", extra={"min": 1})] = None
    guidance_scale: Annotated[
        float | None,
        Meta(description="strength of classifier-free guidance; 1 or less is off", extra={"min": 0, "max": 1000}),
    ] = None
    guidance_scale_2: Annotated[
        float | None,
        Meta(
            description="guidance of the low-noise expert, where a model has two",
            extra={"min": 0, "max": 1000, **_OPTIONAL},
        ),
    ] = None
    true_cfg_scale: Annotated[
        float | None,
        Meta(
            description="strength of classifier-free guidance, where guidance_scale is an input of the model",
            extra={"min": 0, "max": 1000, **_OPTIONAL},
        ),
    ] = None
    seed: Annotated[
        int | None,
        Meta(description="seed of the first image; image i uses seed + i; drawn when unset", extra={"min": 0}),
    ] = None
    num_outputs_per_prompt: Annotated[
        int | None, Meta(description="images or clips to make from the prompt", extra={"min": 1, "alias": "n"})
    ] = None
    scheduler: Annotated[
        str | None, Meta(description="noise scheduler: a short name or a diffusers class", extra=_OPTIONAL)
    ] = None
    flow_shift: Annotated[
        float | None,
        Meta(
            description="shift of a flow-matching scheduler towards high noise",
            extra={"above": 0, "max": 100, **_OPTIONAL},
        ),
    ] = None
    max_sequence_length: Annotated[
        int | None, Meta(description="text tokens that the encoder reads", extra={"min": 1, **_BATCH, **_OPTIONAL})
    ] = None
    clip_skip: Annotated[
        int | None,
        Meta(
            description="last layers of the CLIP text encoder to leave out", extra={"min": 0, "max": 100, **_OPTIONAL}
        ),
    ] = None
    preview_every: Annotated[
        int | None,
        Meta(
            description="denoising steps from one preview to the next; 0 is none",
            extra={"min": 0, "cli": False, **_OPTIONAL},
        ),
    ] = None
    priority: Annotated[
        Literal["interactive", "batch"] | None,
        Meta(description="class to wait in; interactive requests, the default, go before batch ones"),
    ] = None
    time_limit: Annotated[
        float | None,
        Meta(description="seconds from acceptance after which the request is ended", extra={"above": 0}),
    ] = None
    output_type: Annotated[
        Literal["pil", "np", "pt", "latent"],
        Meta(description="form of the result in Python", extra={"cli": False}),
    ] = "pil"


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the server refuses before any work."""

    queue: Annotated[int, Meta(description="requests accepted and not yet answered")] = 256
    steps: Annotated[int, Meta(description="denoising steps")] = 1000
    frames: Annotated[int, Meta(description="frames of one clip")] = 1025
    pixels: Annotated[int, Meta(description="width x height")] = 4096 * 4096
    images: Annotated[int, Meta(description="images or clips of one request")] = 16
    prompt: Annotated[int, Meta(description="characters of a prompt")] = 20_000
    time: Annotated[int, Meta(description="seconds from acceptance to the end")] = 86_400
    grace: Annotated[int, Meta(description="seconds that requests outlive the connection of their client")] = 30


# A client does not know the server's limits, which the server applies itself.
NO_LIMITS = Limits(**dict.fromkeys(Limits.__struct_fields__, 2**62))


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the served model takes. Rank 0 makes it from the pipeline; every client receives it.

    Attributes:
        size_multiple: what width and height must be multiples of.
        frame_stride: k allows 1, k + 1, 2k + 1, ... frames; 0 allows still images only.
        takes: parameters beyond those that every model takes; ``guidance_scale`` where it is an input of the denoiser.
        guidance: the parameter that turns classifier-free guidance on, which computes a second, unconditional branch;
            None where the model has no such branch.
        guidance_off: the largest value of it at which guidance is off.
        guidance_needs_negative: guidance is on only for requests with a negative prompt.
        longest_text: the most text tokens that the encoder can read.
        least_steps: the fewest denoising steps that the model's schedule can have.
        most_clip_skip: the most layers of the text encoder that can be left out, where ``clip_skip`` is taken.
    """

    name: str
    family: str
    defaults: dict[str, int | float | str | None]
    size_multiple: int
    frame_stride: int
    takes: tuple[str, ...] = ()
    guidance: str | None = "guidance_scale"
    guidance_off: float = 1.0
    guidance_needs_negative: bool = False
    schedulers: tuple[str, ...] = ()
    longest_text: int | None = None
    least_steps: int = 1
    most_clip_skip: int | None = None


class Resolved(msgspec.Struct, frozen=True):
    params: SamplingParams
    warnings: tuple[str, ...]


BATCH_FIELDS = tuple(name for name, field in fields(SamplingParams).items() if field.extra.get("batch"))


def parse_params(values: Mapping[str, object]) -> SamplingParams:
    """Build and check :class:`SamplingParams` from loose values, such as keyword arguments or a JSON object.

    Raises :class:`InvalidRequest` naming the parameter, its value, the rule and the remedy.
    """
    if values.get("prompt") is None:
        refuse("prompt", "prompt is missing; give a text (an empty one is allowed)", "missing_parameter")
    params = build(SamplingParams, values)
    check_params(params)
    return params


def check_params(params: SamplingParams) -> None:
    """Ranges and text rules that hold for every model. Raises :class:`InvalidRequest`."""
    check_ranges(params)
    for name in fields(SamplingParams):
        value = getattr(params, name)
        if isinstance(value, str):
            _check_text(name, value)
    count = params.num_outputs_per_prompt or 1
    if params.seed is not None and params.seed > MAX_SEED - (count - 1):
        rule = f"seed + outputs - 1 must be at most 2**63 - 1 ({MAX_SEED})"
        refuse("seed", f"seed {shown(params.seed)} with {count} output(s): {rule}; use a smaller seed")


def _check_text(name: str, value: str) -> None:
    if "\0" in value:
        refuse(name, f"{name} holds a NUL character at position {value.index(chr(0))}; remove it")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        refuse(name, f"{name} holds half of a surrogate pair at position {error.start}; send valid Unicode")
    if size > MAX_TEXT:
        refuse(name, f"{name} has {size} bytes; a text may have at most {MAX_TEXT}; shorten it", f"{name}_too_long")


def resolve(params: SamplingParams, model: ModelSpec, limits: Limits) -> Resolved:
    """Complete a checked request with the model's defaults; check it against the model and the limits.

    The result has no field unset that the model uses, ``size`` is turned into width and height, and a seed is drawn
    where none was given. Raises :class:`InvalidRequest`.
    """
    check_params(params)
    _check_taken(params, model)
    warnings: list[str] = []
    changes: dict[str, object] = {
        name: value for name, value in model.defaults.items() if getattr(params, name) is None
    }
    changes |= _resolve_size(params, model)
    changes |= _resolve_frames(params, model, warnings)
    if params.num_outputs_per_prompt is None:
        changes["num_outputs_per_prompt"] = 1
    if params.priority is None:
        changes["priority"] = "interactive"
    resolved = msgspec.structs.replace(params, **changes)
    _check_limits(resolved, limits)
    if resolved.seed is None:
        # Small enough to survive a trip through JavaScript's numbers, with room for seed + i.
        resolved = msgspec.structs.replace(resolved, seed=secrets.randbelow(2**48))
    check_params(resolved)
    resolved = _resolve_guidance(params, resolved, model, warnings)
    _check_sampler(resolved, model)
    return Resolved(resolved, tuple(warnings))


def parse_size(text: str) -> tuple[int, int] | None:
    """(width, height) of "WIDTHxHEIGHT"; None for "auto". Raises :class:`InvalidRequest`."""
    if text == "auto":
        return None
    match = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", text, re.ASCII)
    if match is None:
        refuse("size", f"size {text!r:.60} must be WIDTHxHEIGHT in pixels, such as 512x512, or auto")
    return int(match[1]), int(match[2])


def _resolve_size(params: SamplingParams, model: ModelSpec) -> dict[str, object]:
    changes: dict[str, object] = {"size": None}
    size = None if params.size is None else parse_size(params.size)
    if size is not None:
        for name, asked in zip(("width", "height"), size, strict=True):
            if getattr(params, name) not in (None, asked):
                refuse("size", f"size {params.size} and {name} {getattr(params, name)} differ; give one of them")
            changes[name] = asked
    for name in ("width", "height"):
        value = changes.get(name, getattr(params, name))
        if isinstance(value, int) and value % model.size_multiple:
            legal = nearest_steps(value, model.size_multiple, 0)
            rule = f"must be a multiple of {model.size_multiple} for {model.family}"
            refuse(name, f"{name} {value} {rule}; nearest: {legal}", "invalid_size")
    return changes


def _resolve_frames(params: SamplingParams, model: ModelSpec, warnings: list[str]) -> dict[str, object]:
    frames: object = params.num_frames
    changes: dict[str, object] = {}
    if frames is not None and params.seconds is not None:
        warnings.append(f"seconds={params.seconds} has no effect: num_frames={frames} was given")
        changes["seconds"] = None
    elif params.seconds is not None:
        fps = model.defaults.get("fps") if params.fps is None else params.fps
        if not isinstance(fps, int | float):
            refuse("seconds", f"{model.family} makes still images; remove seconds={params.seconds}")
        exact = params.seconds * fps
        if not math.isfinite(exact) or exact > 10**9:
            refuse("seconds", f"seconds={params.seconds} at {fps} frames a second is too long; ask for less")
        stride = max(model.frame_stride, 1)
        frames = max(0, round((exact - 1) / stride)) * stride + 1
        changes |= {"num_frames": frames, "seconds": None}
        if frames != exact:
            lasts = f"{frames / fps:.3f} s"
            warnings.append(
                f"seconds={params.seconds} at {fps} fps is {exact:g} frames; {model.family} makes {frames} ({lasts})"
            )
    if frames is None:
        frames = model.defaults.get("num_frames", 1)
    if not isinstance(frames, int) or (model.frame_stride == 0 and frames != 1):
        refuse("num_frames", f"num_frames {frames}: {model.family} makes still images; use 1")
    if model.frame_stride and (frames - 1) % model.frame_stride:
        legal = nearest_steps(frames, model.frame_stride, 1)
        rule = f"must be 1 or a multiple of {model.frame_stride} plus 1 for {model.family}"
        refuse("num_frames", f"num_frames {frames} {rule}; nearest: {legal}")
    if frames == 1 and params.fps is not None:
        warnings.append(f"fps={params.fps} has no effect on a still image")
    return changes


def nearest_steps(value: int, step: int, offset: int) -> str:
    """The legal values of ``offset + k * step`` on both sides of ``value``, as words; never below 1."""
    below = (value - offset) // step * step + offset
    return " or ".join(str(legal) for legal in (below, below + step) if legal >= max(offset, 1))


def _check_limits(params: SamplingParams, limits: Limits) -> None:
    def check(param: str, value: float, limit: int, code: str = "over_limit") -> None:
        if value > limit:
            refuse(param, f"{param} {value} is over this server's limit of {limit}; ask for less", code)

    for name in ("prompt", "negative_prompt"):
        text = getattr(params, name) or ""
        if len(text) > limits.prompt:
            rule = f"this server's limit is {limits.prompt}; shorten it"
            refuse(name, f"{name} has {len(text)} characters; {rule}", "prompt_too_long")
    width, height = params.width or 0, params.height or 0
    if width * height > limits.pixels:
        rule = f"over this server's limit of {limits.pixels}; ask for a smaller size"
        refuse("size", f"{width}x{height} is {width * height} pixels, {rule}", "over_limit")
    check("num_inference_steps", params.num_inference_steps or 0, limits.steps)
    check("num_frames", params.num_frames or 0, limits.frames)
    check("num_outputs_per_prompt", params.num_outputs_per_prompt or 0, limits.images)
    check("time_limit", params.time_limit or 0, limits.time)


def _check_taken(params: SamplingParams, model: ModelSpec) -> None:
    for name, field in fields(SamplingParams).items():
        if field.extra.get("optional") and getattr(params, name) is not None and name not in model.takes:
            refuse(name, f"{model.family} takes no {name}; leave it out", "unsupported_parameter")


def _resolve_guidance(
    asked: SamplingParams, resolved: SamplingParams, model: ModelSpec, warnings: list[str]
) -> SamplingParams:
    name = model.guidance
    scale = None if name is None else getattr(resolved, name)
    if not is_guided(resolved, model):
        off = f"{name} {scale} is off; it must be more than {model.guidance_off:g}"
        # Where a negative prompt is what turns guidance on, an empty one asks for it too.
        if asked.negative_prompt or (model.guidance_needs_negative and asked.negative_prompt is not None):
            why = "this model has no classifier-free guidance" if name is None else off
            warnings.append(f"negative_prompt has no effect: {why}")
        elif name is not None and (getattr(asked, name) or 0) > model.guidance_off:
            warnings.append(f"{name} has no effect: {model.family} guides only with a negative_prompt; give one")
        if asked.guidance_scale_2 is not None:
            warnings.append(f"guidance_scale_2 has no effect: {off}")
        never_on = model.guidance_needs_negative and resolved.negative_prompt is None
        if name is not None and never_on and getattr(asked, name) is None:
            # A default that cannot have an effect is not filled in.
            resolved = msgspec.structs.replace(resolved, **{name: None})
    if name != "guidance_scale" and "guidance_scale" not in model.takes:
        if asked.guidance_scale is not None:
            instead = "" if name is None else f"; {name} is its guidance"
            warnings.append(f"guidance_scale has no effect: it is no input of this model{instead}")
        resolved = msgspec.structs.replace(resolved, guidance_scale=None)
    if "guidance_scale_2" in model.takes and resolved.guidance_scale_2 is None:
        return msgspec.structs.replace(resolved, guidance_scale_2=resolved.guidance_scale)
    return resolved


def is_guided(params: SamplingParams, model: ModelSpec) -> bool:
    """Whether the unconditional branch is computed for these resolved parameters."""
    scale = None if model.guidance is None else getattr(params, model.guidance)
    if scale is None or (model.guidance_needs_negative and params.negative_prompt is None):
        return False
    return bool(scale > model.guidance_off)


def _check_sampler(params: SamplingParams, model: ModelSpec) -> None:
    if params.scheduler is not None and params.scheduler not in model.schedulers:
        remedy = f"{model.family} takes: {', '.join(model.schedulers)}"
        refuse("scheduler", f"scheduler {params.scheduler!r:.60} is not known; {remedy}")
    if (params.num_inference_steps or model.least_steps) < model.least_steps:
        rule = f"this model's schedule has at least {model.least_steps}; use {model.least_steps} or more"
        refuse("num_inference_steps", f"num_inference_steps is {params.num_inference_steps}; {rule}")
    longest = model.longest_text
    if longest is not None and (params.max_sequence_length or 0) > longest:
        given = params.max_sequence_length
        rule = f"this text encoder reads at most {longest} tokens; use {longest} or less"
        refuse("max_sequence_length", f"max_sequence_length is {given}; {rule}")
    most = model.most_clip_skip
    if most is not None and (params.clip_skip or 0) > most:
        refuse("clip_skip", f"clip_skip is {params.clip_skip}; this text encoder has {most} layers to leave out")


def rational_fps(fps: float) -> Fraction:
    """The exact frame rate meant by a decimal: 23.976 is 24000/1001, 12.5 is 25/2. Raises :class:`InvalidRequest`."""
    if not math.isfinite(fps) or fps <= 0:
        refuse("fps", f"fps is {fps}; it must be a positive, finite number")
    if fps == round(fps):
        return Fraction(round(fps))
    ntsc = Fraction(math.ceil(fps) * 1000, 1001)
    rate = ntsc if fps > 10 and abs(float(ntsc) - fps) < 0.005 else Fraction(fps).limit_denominator(1000)
    # Slower than a frame in 1,000 s would become 0, which the encoder takes for "unset".
    return rate or Fraction(1, math.ceil(1 / fps))
