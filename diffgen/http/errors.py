"""Errors as HTTP answers, in the shape that OpenAI's clients read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from diffgen.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    DiffgenError,
    InvalidRequest,
    OutputError,
    QueueFull,
    RequestCancelled,
    ServerClosed,
    WorkerDied,
)

#: Seconds after which a client may come back where nothing better is known.
RETRY_S = 5


class HttpError(Exception):
    """An answer that is an error. ``retry_after`` in seconds invites the client to come back; without it the same
    request would fail again, which ``x-should-retry: false`` tells it."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.kind = kind or _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.retry_after = retry_after
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        headers = {"x-should-retry": "false" if self.retry_after is None else "true", **self.headers}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after)))
        return json_response(self.body(), self.status, headers)


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    499: "request_cancelled",
}
_STATUS: dict[type[DiffgenError], int] = {
    InvalidRequest: 400,
    RequestCancelled: 499,
    DeadlineExceeded: 504,
    QueueFull: 503,
    OutputError: 507,
    ServerClosed: 503,
    ConnectionFailed: 503,
}


def from_diffgen(error: DiffgenError) -> HttpError:
    """What a client is told of an error of the server's."""
    status = next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), 500)
    if isinstance(error, WorkerDied) and error.retryable:
        status = 503
    kind = "rate_limit_error" if isinstance(error, QueueFull) else None
    again = (error.retry_after or RETRY_S) if status == 503 or error.retryable else None
    return HttpError(status, error.code, error.public, kind=kind, param=error.param, retry_after=again)


def internal_error() -> HttpError:
    rule = "the server has failed; its log says more, under this x-request-id"
    # The connection ends with it: who went on to use it would have the next request reset.
    return HttpError(500, "internal_error", rule, headers={"connection": "close"})


def shutting_down() -> HttpError:
    return HttpError(503, "shutting_down", "the server is stopping and takes nothing new", retry_after=10)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """In ASCII, which holds whatever text a client has sent; NaN cannot get in."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return Response(text, status, headers, media_type="application/json")
