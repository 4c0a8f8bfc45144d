"""How to serve: small frozen groups, from which the command line is built as well."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from diffgen.distributed.dims import check_degrees
from diffgen.errors import InvalidRequest
from diffgen.fields import check_ranges, fields, nearest_name, refuse, shown
from diffgen.params import Limits

MAX_LIMIT = 10**15  # "no limit" in practice, and exact in every number format

L = TypeVar("L", bound=Limits)

Dtype = Literal["float32", "float16", "bfloat16"]


class ModelArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model, and in which numbers."""

    model_path: Annotated[
        str | None, Meta(description="folder or Hugging Face id in diffusers layout; the bundled model when unset")
    ] = None
    revision: Annotated[str | None, Meta(description="branch, tag or commit on the Hub")] = None
    variant: Annotated[str | None, Meta(description="variant of the weight files, such as fp16")] = None
    dtype: Annotated[
        Dtype | None, Meta(description="numbers of the weights; bfloat16 on an accelerator, float32 on a CPU")
    ] = None
    pipeline: Annotated[
        str | None, Meta(description="pipeline to use: a registered name or module:Class of your own")
    ] = None
    safety_checker: Annotated[
        bool, Meta(description="load the model's safety checker, and make the pictures black that it flags")
    ] = False


class RunArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and how the model runs."""

    num_gpus: Annotated[int, Meta(description="ranks: one process a device", extra={"min": 1, "max": 256})] = 1
    tp_size: Annotated[
        int | None, Meta(description="ranks that share the weights of denoiser and text encoder", extra={"min": 1})
    ] = None
    sp_degree: Annotated[
        int | None,
        Meta(description="ranks that share the tokens: ulysses where heads divide, else ring", extra={"min": 1}),
    ] = None
    ulysses_degree: Annotated[
        int | None, Meta(description="ranks that share the tokens and, in attention, the heads", extra={"min": 1})
    ] = None
    ring_degree: Annotated[
        int | None, Meta(description="ranks that share the tokens and pass keys around a ring", extra={"min": 1})
    ] = None
    cfg_degree: Annotated[
        int | None, Meta(description="groups of ranks that share the guidance branches and outputs", extra={"min": 1})
    ] = None
    enable_cfg_parallel: Annotated[bool, Meta(description="as cfg_degree 2")] = False
    parallel_decode: Annotated[
        bool, Meta(description="share the decode among all ranks of a replica, where the VAE can be split")
    ] = True
    attention_backend: Annotated[
        Literal["native", "xfuser"],
        Meta(description="what computes attention over split tokens: native, or the package xfuser on CUDA"),
    ] = "native"
    dp_size: Annotated[int, Meta(description="replicas, each with its share of num_gpus", extra={"min": 1})] = 1
    dp_policy: Annotated[
        Literal["least_cost", "least_requests", "round_robin", "affinity"],
        Meta(description="which replica a request goes to"),
    ] = "least_cost"
    device: Annotated[
        Literal["cpu", "cuda"] | None, Meta(description="kind of device; cuda where there is one, else cpu")
    ] = None
    threads: Annotated[
        int | None, Meta(description="CPU threads of a rank; the cores shared out when unset", extra={"min": 1})
    ] = None
    max_batch_size: Annotated[
        int, Meta(description="images that may share one forward of the denoiser", extra={"min": 1, "max": 32})
    ] = 8
    max_batch_pixels: Annotated[
        int,
        Meta(description="pixels of all images and frames that may share one forward", extra={"min": 1}),
    ] = 1024 * 1024
    max_running: Annotated[
        int,
        Meta(description="requests in flight; interactive ones do not count those of batch", extra={"min": 1}),
    ] = 32
    text_cache_mb: Annotated[
        int, Meta(description="MB of encoded texts that each rank keeps for requests with the same", extra={"min": 0})
    ] = 256
    warmup: Annotated[
        str, Meta(description="sizes to draw before the server is ready, such as 512x512,832x480x17; or off")
    ] = "off"
    start_timeout: Annotated[
        float,
        Meta(description="seconds until a start that is not done counts as failed", extra={"min": 1, "max": 604800}),
    ] = 1800.0
    unit_timeout: Annotated[
        float,
        Meta(
            description="seconds until a unit of work that is not done counts as hung", extra={"min": 1, "max": 604800}
        ),
    ] = 900.0
    max_restarts: Annotated[
        int, Meta(description="times in ten minutes that dead ranks are started again", extra={"min": 0})
    ] = 3
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severe log line to print")
    ] = "warning"
    log_format: Annotated[Literal["text", "json"], Meta(description="form of the log lines, on stderr")] = "text"


class ListenArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where rank 0 listens. Unset: a private socket in the run folder, for this process and its children."""

    address: Annotated[
        str | None, Meta(description="tcp://HOST:PORT or ipc://PATH to listen at besides the private socket")
    ] = None
    token: Annotated[str | None, Meta(description="secret that clients of a tcp address must show")] = None


class ServerArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: ModelArgs = ModelArgs()
    run: RunArgs = RunArgs()
    listen: ListenArgs = ListenArgs()
    limits: Limits = Limits()


def warmup_shapes(text: str) -> list[tuple[int, int, int | None]]:
    """(width, height, frames) of each size. Raises :class:`InvalidRequest`."""
    shapes = []
    for part in [] if text == "off" else text.split(","):
        match = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})(?:x([1-9][0-9]{0,5}))?", part.strip(), re.ASCII)
        if match is None:
            refuse("warmup", f"warmup {part!r:.60} must be off, or sizes such as 512x512,480x832x17")
        shapes.append((int(match[1]), int(match[2]), int(match[3]) if match[3] else None))
    return shapes


def check_args(args: ServerArgs) -> None:
    """Rules that need no device and no model. Raises :class:`InvalidRequest`."""
    check_ranges(args.run)
    warmup_shapes(args.run.warmup)
    check_degrees(args.run)
    if args.run.dp_size == 1 and args.run.dp_policy != RunArgs().dp_policy:
        rule = "has no effect with one replica; give dp_size, or leave it out"
        refuse("dp_policy", f"dp_policy {args.run.dp_policy} {rule}")
    for name in fields(Limits):
        value = getattr(args.limits, name)
        if type(value) is not int or not 1 <= value <= MAX_LIMIT:
            refuse("limit", f"limit {name} is {shown(value)}; it must be a whole number from 1 to {MAX_LIMIT}")
    address = args.listen.address
    if address is not None and not address.startswith(("tcp://", "ipc://")):
        refuse("address", f"address {address!r} must be tcp://HOST:PORT or ipc://PATH")
    if address is not None and address.startswith("tcp://") and not args.listen.token:
        refuse("token", f"{address} can be reached by others; give a token that clients must show")
    if address is None and args.listen.token is not None:
        refuse("token", "a token has no effect without an address; give one, or leave the token out")
    if args.listen.token is not None:
        check_token(args.listen.token)


def check_token(token: str) -> None:
    """What the transport can carry. Raises :class:`InvalidRequest`, without the token itself in the text."""
    size = len(token.encode(errors="replace"))
    if not token.isprintable() or not 1 <= size <= 255:
        refuse("token", f"a token of {size} bytes: it must be 1 to 255 bytes of printable text; choose another")


def parse_limits(items: list[str], kind: type[L]) -> L:
    """Limits from NAME=VALUE texts. Raises :class:`InvalidRequest` for an unknown name or a value below 1."""
    values: dict[str, int] = {}
    for item in items:
        name, sign, value = item.partition("=")
        if not sign or re.fullmatch("[0-9]{1,18}", value) is None or not 1 <= int(value) <= MAX_LIMIT:
            rule = f"must be NAME=VALUE with a whole number from 1 to {MAX_LIMIT}, such as steps=100"
            raise InvalidRequest(f"limit {item!r:.100} {rule}", param="limit")
        if name not in fields(kind):
            raise InvalidRequest(f"unknown limit {name!r}; {nearest_name(name, fields(kind))}", param="limit")
        values[name] = int(value)
    return kind(**values)
