"""What a command was asked for, from its flags, a configuration file and a picture's metadata, in this order."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from diffgen.args import ModelArgs, RunArgs, parse_limits
from diffgen.cli.config import read_config
from diffgen.cli.flags import given
from diffgen.cli.options import CallOptions, ConnectOptions
from diffgen.errors import InvalidRequest
from diffgen.fields import build, fields
from diffgen.media.metadata import Metadata, read, read_params
from diffgen.media.save import SaveOptions
from diffgen.params import Limits, SamplingParams, parse_size

_SERVER: tuple[type[msgspec.Struct], ...] = (ConnectOptions, ModelArgs, RunArgs)
STRUCTS: tuple[type[msgspec.Struct], ...] = (SamplingParams, SaveOptions, CallOptions, *_SERVER)
# Parameters that stand for each other: one that is given hides those of a source that counts less.
_TOGETHER = ({"size", "width", "height"}, {"num_frames", "seconds"}, {"prompt", "prompt_path"})


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """A server to use, or how to start one: ``options`` are those of :meth:`DiffGenerator.from_pretrained`."""

    connect: ConnectOptions
    options: dict[str, Any]
    limits: Limits


@dataclasses.dataclass(frozen=True)
class Settings:
    """``prompts`` are those of a file, None where there is one prompt, which is in ``sampling`` then."""

    sampling: dict[str, Any]
    prompts: list[str] | None
    save: SaveOptions
    call: CallOptions
    server: ServerSettings
    source: Metadata | None


def read_settings(arguments: argparse.Namespace) -> Settings:
    """Everything that ``arguments`` name, checked as far as it can be without a model.

    Raises :class:`InvalidRequest`.
    """
    flags = {name: value for struct in STRUCTS for name, value in given(arguments, struct).items()}
    config = {} if arguments.config is None else read_config(Path(arguments.config), STRUCTS, ["limit"])
    values = layered(config, flags)
    if "limit" in config or arguments.limit:
        values["limit"] = [*_limit_items(config.get("limit", [])), *arguments.limit]  # of each name the last counts
    call = build(CallOptions, pick(CallOptions, values))
    source = None
    if call.from_metadata is not None:
        source = read(call.from_metadata)
        values = layered(read_params(call.from_metadata), values)
    if call.prompt_path is not None and values.get("prompt") is not None:
        both = "prompt and prompt_path are both given"
        raise InvalidRequest(f"{both}; give one of them", code="invalid_prompt_path", param="prompt_path")
    return Settings(
        sampling=pick(SamplingParams, values),
        prompts=None if call.prompt_path is None else read_prompts(Path(call.prompt_path)),
        save=build(SaveOptions, pick(SaveOptions, values)),
        call=call,
        server=_server(values),
        source=source,
    )


def read_server(arguments: argparse.Namespace) -> ServerSettings:
    """The server part alone, for commands without a configuration file. Raises :class:`InvalidRequest`."""
    values = {name: value for struct in _SERVER for name, value in given(arguments, struct).items()}
    return _server({**values, "limit": arguments.limit} if getattr(arguments, "limit", None) else values)


def _server(values: Mapping[str, Any]) -> ServerSettings:
    connect = build(ConnectOptions, pick(ConnectOptions, values))
    options = {**pick(ModelArgs, values), **pick(RunArgs, values)}
    _check_connect(connect, [*options, *(["limit"] if "limit" in values else [])])
    return ServerSettings(connect, options, parse_limits(values.get("limit", []), Limits))


def pick(struct: type[msgspec.Struct], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``values`` that are fields of ``struct``."""
    return {name: values[name] for name in fields(struct) if name in values}


def layered(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """``lower`` where ``upper`` says nothing. What stands for the same thing in other words counts as said."""
    lower, upper = _width_and_height(lower), _width_and_height(upper)
    hidden = {"width", "height"} if "size" in upper else set()
    for group in _TOGETHER[1:]:
        if group & upper.keys():
            hidden |= group
    if {"width", "height"} <= upper.keys():
        hidden.add("size")
    return {**{name: value for name, value in lower.items() if name not in hidden}, **upper}


def _width_and_height(values: Mapping[str, Any]) -> dict[str, Any]:
    """With ``size`` as what it stands for, so that one of the two may come from elsewhere."""
    size = values.get("size")
    if not isinstance(size, str) or size == "auto" or {"width", "height"} & values.keys():
        return dict(values)
    width_height = parse_size(size)
    assert width_height is not None, "not auto"
    rest = {name: value for name, value in values.items() if name != "size"}
    return {**rest, "width": width_height[0], "height": width_height[1]}


def _limit_items(items: object) -> list[str]:
    """Of a configuration file."""
    if isinstance(items, Mapping):
        return [f"{name}={value}" for name, value in items.items()]
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise InvalidRequest(f"limit is {items!r:.100}; give NAME: VALUE, or a list of NAME=VALUE", param="limit")
    return items


def _check_connect(options: ConnectOptions, server: list[str]) -> None:
    if options.connect is None and options.token_file is not None:
        raise InvalidRequest("token_file has no effect without connect; leave it out", param="token_file")
    if options.connect is not None and server:
        rule = "the server at connect was started with its own"
        raise InvalidRequest(f"{', '.join(server)} with connect: {rule}; leave it out", param=server[0])


def read_prompts(path: Path) -> list[str]:
    """The lines of a UTF-8 file that are not blank. Raises :class:`InvalidRequest`."""
    name = f"prompt_path {str(path)!r}"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # a ValueError where it is no UTF-8, or the path holds a NUL
        reason = error.strerror if isinstance(error, OSError) else error
        raise _wrong_prompts(f"cannot read {name}: {reason}; give a UTF-8 text file, a prompt a line") from None
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise _wrong_prompts(f"{name} has no line that is not blank; give a prompt a line")
    return lines


def _wrong_prompts(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_prompt_path", param="prompt_path")
