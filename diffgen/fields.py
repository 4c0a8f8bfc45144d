"""The rules that stand in a struct's fields, read in one place: for checking values and for building flags.

A field is ``Annotated[type, Meta(description=..., extra={...})]``. Keys of ``extra``: ``min`` and ``max`` bound the
value, ``above`` is an open lower bound, ``alias`` is a second name, ``batch`` marks a parameter that two requests must
share to run in one forward, ``optional`` marks one that only models take which name it, ``cli=False`` keeps a field
out of the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import numbers
import operator
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NoReturn, TypeVar

import msgspec

from diffgen.errors import InvalidRequest

MAX_INT = 2**63 - 1  # what the wire carries

_LONGEST_NAME = 100  # that is compared with known ones, which takes memory by the character
# Parameters by their names in OpenAI's API, diffusers, SGLang, ComfyUI and AUTOMATIC1111. They are not taken: what they
# mean there differs in places. The last have no counterpart, though some name here looks like it.
_ELSEWHERE: dict[str, str | None] = {
    **dict.fromkeys(("steps", "num_steps", "n_steps", "sampling_steps"), "num_inference_steps"),
    **dict.fromkeys(("cfg", "cfg_scale", "guidance"), "guidance_scale"),
    **dict.fromkeys(("sampler", "sampler_name", "sampler_index", "sampling_method"), "scheduler"),
    **dict.fromkeys(
        ("n_images", "num_images", "num_images_per_prompt", "num_videos_per_prompt", "num_outputs", "num_samples",
         "batch_size", "batch_count", "n_iter"),
        "num_outputs_per_prompt",
    ),
    **dict.fromkeys(("frames", "frame_count", "n_frames", "num_video_frames", "video_length"), "num_frames"),
    **dict.fromkeys(("frame_rate", "framerate"), "fps"),
    **dict.fromkeys(("duration", "length"), "seconds"),
    **dict.fromkeys(("text", "input", "inputs", "positive", "caption"), "prompt"),
    **dict.fromkeys(("negative", "uc"), "negative_prompt"),
    **dict.fromkeys(("noise_seed", "random_seed", "generator"), "seed"),
    **dict.fromkeys(("image_size", "resolution", "aspect_ratio"), "size"),
    **dict.fromkeys(("shift", "sigma_shift"), "flow_shift"),
    **dict.fromkeys(("format", "image_format"), "output_format"),
    "clip_stop_at_last_layers": "clip_skip",
    **dict.fromkeys(("image", "images", "init_image", "init_images", "input_image", "lora", "loras")),
}  # fmt: skip

S = TypeVar("S", bound=msgspec.Struct)


@dataclasses.dataclass(frozen=True)
class Field:
    """``members`` are the field's types without None."""

    name: str
    members: tuple[Any, ...]
    description: str
    default: Any
    extra: Mapping[str, Any]


@functools.cache
def fields(struct: type[msgspec.Struct]) -> Mapping[str, Field]:
    """The struct's fields by name."""
    hints = typing.get_type_hints(struct, include_extras=True)
    found = {}
    for field in msgspec.structs.fields(struct):
        kind, meta = typing.get_args(hints[field.name])[:2]
        is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
        members = tuple(part for part in typing.get_args(kind) if part is not types.NoneType) if is_union else (kind,)
        found[field.name] = Field(field.name, members, meta.description or "", field.default, meta.extra or {})
    return found


def refuse(param: str, message: str, code: str | None = None) -> NoReturn:
    raise InvalidRequest(message, code=code or f"invalid_{param}", param=param)


def nearest_name(name: str, known: Iterable[str]) -> str:
    """A remedy for a wrong name: the known one that is meant, or all of them."""
    known = sorted(known)
    close = close_name(name, known)
    return f"did you mean {close!r}?" if close else f"known: {', '.join(known)}"


def close_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that others call so, is closest to it or contains it."""
    known = sorted(known)
    if name.lower() in _ELSEWHERE:
        meant = _ELSEWHERE[name.lower()]
        return meant if meant in known else None
    if len(name) > _LONGEST_NAME:
        return None
    holding = [each for each in known if len(name) > 2 and name in each]
    return next(iter(difflib.get_close_matches(name, known, n=1) or holding), None)


def build(struct: type[S], values: Mapping[str, object]) -> S:
    """The struct from loose values, such as keyword arguments or a JSON object.

    Raises :class:`InvalidRequest` naming the field, its value, the rule and the remedy: for an unknown name, a wrong
    type (numbers are not read from texts, nor integers from booleans), a value out of range or not finite.
    """
    known = fields(struct)
    aliases = {field.extra["alias"]: name for name, field in known.items() if "alias" in field.extra}
    found: dict[str, Any] = {}
    given: dict[str, str] = {}
    for key, value in values.items():
        name = aliases.get(key, key)
        if name not in known:
            remedy = nearest_name(key, [*known, *aliases])
            raise InvalidRequest(f"unknown parameter {key!r:.100}; {remedy}", code="unknown_parameter", param=key)
        if name in found:
            refuse(name, f"{given[name]} and {key} are the same parameter; give one of them")
        found[name], given[name] = _typed(known[name], _plain(value)), key
    built = struct(**found)
    check_ranges(built)
    return built


def _typed(field: Field, value: Any) -> Any:
    if value is None and field.default is None:
        return None
    for member in field.members:
        if typing.get_origin(member) is Literal:
            if isinstance(value, str) and value in typing.get_args(member):
                return value
        elif member is float and isinstance(value, int | float) and not isinstance(value, bool):
            # Left as it is where no float is as large: the range check says so.
            return value if isinstance(value, int) and abs(value) > MAX_INT else float(value)
        elif type(value) is member:
            return value
    refuse(field.name, f"{field.name} is {shown(value)}; it must be {_type_words(field)}")


def _plain(value: Any) -> Any:
    """Numbers and texts of other libraries, such as numpy's, as Python's own; anything else as it is."""
    if isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if hasattr(value, "__index__"):
        try:
            return operator.index(value)
        except TypeError:
            return value  # an array of several numbers, say
    return float(value) if isinstance(value, numbers.Real) else value


def shown(value: object) -> str:
    """A value for an error text, short."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print the longest
    return f"{value!r:.200}"


def _type_words(field: Field) -> str:
    words = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
    parts: list[str] = []
    for member in field.members:
        choices = typing.get_args(member) if typing.get_origin(member) is Literal else ()
        parts += map(repr, choices) if choices else [words.get(member, str(member))]
    return " or ".join(parts)


def check_ranges(struct: msgspec.Struct) -> None:
    """Check every number of a struct against its field's bounds. Raises :class:`InvalidRequest`."""
    for name, field in fields(type(struct)).items():
        value = getattr(struct, name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        rules = field.extra
        if isinstance(value, float) and not math.isfinite(value):
            refuse(name, f"{name} is {value}; it must be a finite number")
        highest = rules.get("max", MAX_INT)
        if "min" in rules and value < rules["min"]:
            refuse(name, f"{name} is {shown(value)}; it must be at least {rules['min']}")
        if "above" in rules and value <= rules["above"]:
            refuse(name, f"{name} is {shown(value)}; it must be more than {rules['above']}")
        if value > highest:
            refuse(name, f"{name} is {shown(value)}; it must be at most {highest}")
