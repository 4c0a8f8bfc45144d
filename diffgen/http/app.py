"""The application: all routes, behind the guard."""

from __future__ import annotations

import asyncio
import contextlib
import inspect

from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from diffgen.errors import DiffgenError
from diffgen.http import health, images, models, native, page, schema, videos
from diffgen.http.args import HttpArgs, is_loopback, names
from diffgen.http.errors import HttpError, from_diffgen, internal_error
from diffgen.http.guard import Access, Guard, exchange_of
from diffgen.http.params import unknown
from diffgen.http.service import Service, service_of
from diffgen.http.work import client_left

metrics_router = APIRouter()
_STATUS_S = 2.0


@metrics_router.get("/metrics", **schema.gives_text("text/plain"))
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    service = service_of(request)
    generator, status = service.generator, None
    if generator is not None:
        with contextlib.suppress(DiffgenError):  # the ranks are being started again
            status = await asyncio.to_thread(generator.status, _STATUS_S)
    return Response(service.metrics.text(generator, status), media_type="text/plain; version=0.0.4; charset=utf-8")


def create_app(service: Service, keys: tuple[bytes, ...]) -> ASGIApp:
    """What a server runs."""
    # FastAPI's own pages load scripts from elsewhere.
    app = FastAPI(docs_url=None, redoc_url=None, dependencies=[Depends(_check_address)])
    app.state.service, app.state.probe = service, health.Probe()
    for routes in (images, videos, models, native, health, page):
        app.include_router(routes.router)
    app.include_router(metrics_router)
    app.add_exception_handler(HttpError, _answer_error)
    app.add_exception_handler(DiffgenError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_error)
    app.add_exception_handler(ClientDisconnect, _answer_error)
    app.add_exception_handler(Exception, _answer_error)
    schema.install(app)
    args = service.args
    access = Access(keys, _hosts(args), names(args.allowed_origins))
    guarded = Guard(app, access, service.limits.body, service.metrics.answered)
    if not access.origins:
        return guarded
    exposed = ["x-request-id", "x-should-retry", "x-warnings", "retry-after", "openai-poll-after-ms"]
    return CORSMiddleware(
        guarded, list(access.origins), allow_methods=["*"], allow_headers=["*"], expose_headers=exposed
    )


async def _check_address(request: Request) -> None:
    """Of the parameters in an address under /v1. Raises :class:`InvalidRequest` for an unknown one, or notes it."""
    if not request.url.path.startswith("/v1/"):
        return
    known = inspect.signature(request.scope["endpoint"]).parameters.keys() - {"request", *request.path_params}
    exchange = exchange_of(request.scope)
    exchange.warnings = unknown(request.query_params, known, ignore=service_of(request).ignores_unknown)
    if exchange.warnings:
        exchange.notes["warnings"] = exchange.warnings  # not every answer has a place for them


def _hosts(args: HttpArgs) -> tuple[str, ...] | None:
    """Names under which the server may be called. Beyond this machine the key protects it, or nothing was asked to."""
    further = names(args.allowed_hosts)
    if not is_loopback(args.host) and not further:
        return None
    return ("localhost", "127.0.0.1", "::1", args.host, *further)


async def _answer_error(request: Request, error: Exception) -> Response:
    found = _as_http(request, error)
    notes = exchange_of(request.scope).notes
    notes["code"] = found.code
    if isinstance(error, DiffgenError) and error.message != found.message:
        notes["error"] = error.message  # which the client is not told
    return found.response()


def _as_http(request: Request, error: Exception) -> HttpError:
    if isinstance(error, HttpError):
        return error
    if isinstance(error, DiffgenError):
        return from_diffgen(error)
    if isinstance(error, ClientDisconnect):  # while it sent its request
        return client_left()
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return HttpError(400, "invalid_request", str(first["msg"]), param=str(first["loc"][-1]))
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        if error.status_code == 405:
            methods = set(names(headers.get("Allow")))
            # The guard makes a GET of a HEAD.
            takes = ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))
            rule = f"{request.url.path} takes {takes}, not {request.method}"
            return HttpError(405, "method_not_allowed", rule, headers={"Allow": takes})
        if error.status_code == 404:
            return HttpError(404, "unknown_route", f"there is no {request.url.path[:200]} here; see /openapi.json")
        return HttpError(error.status_code, "invalid_request", str(error.detail), headers=headers)
    return internal_error()
