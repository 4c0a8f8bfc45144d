"""How the HTTP server listens, whom it lets in and what it keeps."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from diffgen.errors import InvalidRequest
from diffgen.fields import refuse
from diffgen.params import Limits

API_KEY_VARIABLE = "DIFFGEN_API_KEY"


class HttpArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """HTTP server."""

    host: Annotated[str, Meta(description="address to listen at")] = "127.0.0.1"
    port: Annotated[int, Meta(description="port to listen at; 0 picks a free one", extra={"min": 0, "max": 65535})] = (
        8000
    )
    api_key_file: Annotated[
        str | None,
        Meta(description=f"file with an API key a line, any of which lets a client in; {API_KEY_VARIABLE} is one more"),
    ] = None
    insecure: Annotated[bool, Meta(description="listen beyond this machine without an API key")] = False
    served_model_name: Annotated[
        str | None, Meta(description="names of the model for clients, separated by commas; its own when unset")
    ] = None
    allowed_hosts: Annotated[
        str | None, Meta(description="further names, separated by commas, under which clients may reach this server")
    ] = None
    allowed_origins: Annotated[
        str | None,
        Meta(description="origins, separated by commas, whose web pages may use this server; none when unset"),
    ] = None
    remote_pictures: Annotated[
        str | None,
        Meta(
            description="where pictures that a request names by address may come from, separated by commas: public, "
            "host names, networks, each maybe with :PORT; nowhere when unset"
        ),
    ] = None
    public_base_url: Annotated[
        str | None, Meta(description="start of the URLs in answers, for a server behind a proxy")
    ] = None
    data_path: Annotated[
        str | None, Meta(description="folder for video jobs and files; one of the user's own for each port when unset")
    ] = None
    media_ttl: Annotated[
        float, Meta(description="seconds that finished files are kept", extra={"min": 1, "max": 31_536_000})
    ] = 86400.0
    shutdown_timeout: Annotated[
        float,
        Meta(description="seconds that work in progress has to end after SIGTERM", extra={"min": 0, "max": 86400}),
    ] = 30.0
    unknown_params: Annotated[
        Literal["refuse", "ignore"], Meta(description="what happens to parameters that nobody knows")
    ] = "refuse"
    media_metadata: Annotated[bool, Meta(description="write into the files how they were made")] = False
    otlp_traces_endpoint: Annotated[
        str | None, Meta(description="URL that takes OpenTelemetry's spans, OTLP over HTTP; needs diffgen[otel]")
    ] = None
    log_prompts: Annotated[bool, Meta(description="write prompts into the log")] = False


def keeping(args: HttpArgs) -> str:
    """For who asks for a file that has gone."""
    return f"files are kept {args.media_ttl:g} s"


class HttpLimits(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an HTTP server refuses beside."""

    body: Annotated[int, Meta(description="bytes of one HTTP request")] = 2**24
    pictures: Annotated[int, Meta(description="pictures in one HTTP request")] = 16

    def of_requests(self) -> Limits:
        """Those that hold for a request however it comes."""
        return Limits(**{name: getattr(self, name) for name in Limits.__struct_fields__})


def names(text: str | None) -> tuple[str, ...]:
    """The parts of a list that is separated by commas."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def check_http(args: HttpArgs) -> None:
    """Raises :class:`InvalidRequest` for what could be noticed only by clients otherwise."""
    for origin in names(args.allowed_origins):
        # As browsers send it: anything else would never be equal to it.
        if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#*@\sA-Z]+|null", origin):
            rule = "it must be as browsers send it, such as https://app.example or http://localhost:3000"
            refuse("allowed_origins", f"allowed_origins holds {origin!r:.100}; {rule}")
    base = args.public_base_url
    if base is not None and not re.fullmatch(r"https?://[^/?#\s]+[^?#\s]*", base):
        rule = "it must be a URL, such as https://draw.example or https://example.org/draw"
        refuse("public_base_url", f"public_base_url is {base!r:.100}; {rule}")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_api_keys(args: HttpArgs) -> tuple[bytes, ...]:
    """Every key that lets a client in; none means that nobody needs one.

    Raises :class:`InvalidRequest` for a file that cannot be read or holds no key, where others could reach a server
    that asks for none, and where they were to be let in without one.
    """
    keys: list[str] = []
    if args.api_key_file is not None:
        try:
            lines = Path(args.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:  # a ValueError where it is no UTF-8, or the path holds a NUL
            reason = error.strerror if isinstance(error, OSError) else error
            refuse("api_key_file", f"cannot read api_key_file {args.api_key_file!r}: {reason}")
        keys = [line.strip() for line in lines if line.strip()]
        if not keys:
            refuse("api_key_file", f"api_key_file {args.api_key_file!r} holds no key; write one a line")
    if os.environ.get(API_KEY_VARIABLE):
        keys.append(os.environ[API_KEY_VARIABLE])
    if keys and args.insecure:
        rule = f"it is asked for; leave out one of them, {API_KEY_VARIABLE} too"
        refuse("insecure", f"insecure with an API key: {rule}")
    if not keys and not is_loopback(args.host) and not args.insecure:
        remedy = "give api_key_file, or insecure where everyone who can reach it may use it"
        raise InvalidRequest(f"host {args.host} can be reached by others and no API key is set; {remedy}", param="host")
    return tuple(key.encode() for key in keys)
