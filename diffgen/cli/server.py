"""``diffgen status`` and ``diffgen cancel``: a look at a running server, and an end to one of its requests."""

from __future__ import annotations

import argparse
import sys

import msgspec

from diffgen.api import DiffGenerator
from diffgen.cli.connect import open_generator
from diffgen.cli.settings import read_server
from diffgen.errors import InvalidRequest
from diffgen.wire.messages import RequestStatus


def run(arguments: argparse.Namespace) -> int:
    """Connect and do what was asked. Returns the exit code."""
    server = read_server(arguments)
    if server.connect.connect is None:
        rule = "a server listens where its address option says"
        raise InvalidRequest(f"connect is missing; {rule}; give it as --connect ADDRESS", param="connect")
    with open_generator(server) as generator:
        return _cancel(generator, arguments.id) if arguments.command == "cancel" else _status(generator, arguments.json)


def _status(generator: DiffGenerator, as_json: bool) -> int:
    """Print a line for each request in work, oldest first, and a summary."""
    status = generator.status()
    if as_json:
        print(msgspec.json.encode(status).decode())
        return 0
    for request in status.requests:
        print(_line(request))
    finished = ", ".join(f"{count} {outcome}" for outcome, count in sorted(status.finished.items())) or "none"
    work = f"{status.running} running, {status.queued} queued"
    print(f"{generator.model.name}: {work}; ended: {finished}; up {status.seconds:.0f} s")
    return 0


def _cancel(generator: DiffGenerator, request_id: str) -> int:
    if generator.abort(request_id):
        return 0
    print(f"diffgen: error: no request {request_id!r} is in work; diffgen status lists them", file=sys.stderr)
    return 1


def _line(request: RequestStatus) -> str:
    frames = f", {request.num_frames} frames" if request.num_frames > 1 else ""
    what = f"{request.outputs} x {request.width}x{request.height}{frames}"
    place = f"{request.stage} {request.step}/{request.total}" if request.stage else request.state
    if request.priority == "batch":
        place += ", batch"
    ends = "" if request.eta is None else f", about {request.eta:.1f} s to go"
    return f"{request.id}  {what}  {place}, {request.ahead} ahead  {request.seconds:.1f} s{ends}"
