"""Whether the server lives, is ready, and really generates."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from diffgen.api import DiffGenerator
from diffgen.errors import DiffgenError, QueueFull
from diffgen.http import schema
from diffgen.http.errors import HttpError, json_response
from diffgen.http.service import Service, service_of
from diffgen.server.replica import RankStatus

router = APIRouter()

# A rank tells each second that it lives, from a thread, whatever it computes.
_SILENT_S = 5.0
_PROBE_S = 30.0
_PROBE_SIZE = 64
#: A success this young answers for a probe.
FRESH_S = 10.0


def troubles(replicas: Sequence[Sequence[RankStatus]]) -> list[str | None]:
    """Of each replica, why it would answer no request now; None where it would."""
    return [_trouble(ranks) for ranks in replicas]


def _trouble(ranks: Sequence[RankStatus]) -> str | None:
    if not ranks:
        return "it has died too often and is not started again"
    down = [rank.rank for rank in ranks if rank.ready is None]
    if down:
        return f"ranks {down} are being started again"
    silent = [rank.rank for rank in ranks if time.monotonic() - rank.last_seen > _SILENT_S]
    return f"ranks {silent} have given no sign of life for over {_SILENT_S:g} s" if silent else None


def _report(service: Service, code: str) -> dict[str, Any]:
    """How the replicas are, for an answer. Raises :class:`HttpError` of this code where none of them serves."""
    if service.failure is not None:
        # The reason may name folders, and anybody may ask.
        raise HttpError(503, code, "the model cannot be served; the server ends, and its log says why", retry_after=1)
    supervisor = None if service.generator is None else service.generator.supervisor
    if supervisor is None:
        return {}
    found = troubles(supervisor.replicas())
    if None not in found:
        told = "; ".join(f"replica {index}: {trouble}" for index, trouble in enumerate(found))
        raise HttpError(503, code, told, retry_after=1)
    return {"replicas": [{"status": "down", "reason": each} if each else {"status": "ok"} for each in found]}


@router.get("/v2/health/live", include_in_schema=False)
@router.get("/health", **schema.gives("Any"))
async def health(request: Request) -> Response:
    """Alive: this process answers, and every rank of some replica has given a sign of life. Busy counts as alive."""
    service = service_of(request)
    status = "loading" if service.generator is None else "ok"
    return json_response({"status": status, **_report(service, "unhealthy")})


@router.get("/v2/health/ready", include_in_schema=False)
@router.get("/ready", **schema.gives("Any"))
async def ready(request: Request) -> Response:
    """Takes requests: loaded, alive, and not stopping."""
    service = service_of(request)
    service.accepting()
    report = _report(service, "not_ready")
    return json_response({"status": "ready", "model": service.served[0], **report})


@router.get("/health_generate", **schema.gives("Any"))
async def health_generate(request: Request) -> Response:
    """Alive by proof: makes a small picture in as few steps as the model has. One at a time, whoever asks."""
    service = service_of(request)
    generator = service.accepting()
    probe: Probe = request.app.state.probe
    return json_response(await probe.run(generator))


class Probe:
    """At most one generation in flight; its success answers for all who ask within :data:`FRESH_S`.

    Where the requests of others leave it no place, or no turn in time, their progress is the proof.
    """

    def __init__(self) -> None:
        self._running: asyncio.Task[dict[str, Any]] | None = None
        self._ended = 0.0

    async def run(self, generator: DiffGenerator) -> dict[str, Any]:
        """What there is to tell: ok or busy, and in how many seconds that was found. Raises :class:`HttpError`."""
        old = self._running
        if old is None or (old.done() and (old.exception() or time.monotonic() - self._ended > FRESH_S)):
            self._running = asyncio.create_task(self._generate(generator))
        assert self._running is not None
        # One who leaves must not stop it for the others.
        return await asyncio.shield(self._running)

    async def _generate(self, generator: DiffGenerator) -> dict[str, Any]:
        model, began = generator.model, time.monotonic()
        side = math.ceil(_PROBE_SIZE / model.size_multiple) * model.size_multiple
        few = {"num_inference_steps": model.least_steps, "num_frames": 1, "seed": 0}
        ticks, found = _ticks(generator), "ok"
        try:
            async with asyncio.timeout(_PROBE_S):
                await generator.agenerate("health", width=side, height=side, **few)
        except QueueFull:
            found = "busy"  # which the ranks say between two units of work
        except TimeoutError:
            if _ticks(generator) <= ticks:
                rule = f"no picture, and no unit of another request, within {_PROBE_S:g} s"
                raise HttpError(503, "unhealthy", rule, retry_after=_PROBE_S) from None
            found = "busy"
        except DiffgenError as error:
            raise HttpError(503, "unhealthy", error.public, retry_after=5) from None
        self._ended = time.monotonic()
        return {"status": found, "seconds": round(self._ended - began, 4)}


def _ticks(generator: DiffGenerator) -> int:
    """Units that the ranks had run when they last gave a sign of life, as they do each second."""
    return sum(rank.heartbeat.tick for rank in generator.ranks() if rank.heartbeat is not None)
