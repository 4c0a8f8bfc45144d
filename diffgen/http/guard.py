"""What stands before every route: request ids, who may come in, how much may be sent, and the log line."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import FileResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffgen.http.errors import HttpError, shutting_down
from diffgen.http.traces import Trace

logger = logging.getLogger("diffgen.http")

#: Answered without a key: probes, and the page, which is where a user types it.
OPEN = frozenset({"/health", "/ready", "/v2/health/live", "/v2/health/ready", "/", "/page.js", "/page.css"})
_QUIET = frozenset({"/health", "/ready", "/metrics", "/v2/health/live", "/v2/health/ready"})


@dataclasses.dataclass
class Exchange:
    """One request and its answer. ``notes`` go into its log line; ``trace`` is that of work that it has begun;
    ``warnings`` are of parameters in its address."""

    id: str
    began: float
    method: str
    status: int = 0
    warnings: list[str] = dataclasses.field(default_factory=list)
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    trace: Trace | None = None


def exchange_of(scope: Scope) -> Exchange:
    found = scope["state"]["exchange"]
    assert isinstance(found, Exchange)
    return found


class FileAnswer(FileResponse):
    """A file, or the error ``gone`` where there is none. Of one that a HEAD asks for, only the size and the like are
    looked up."""

    def __init__(self, path: Path, media_type: str, gone: HttpError) -> None:
        super().__init__(path, media_type=media_type)
        self._gone = gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_file(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in (400, 416):
                raise _wrong_range(message["status"], Headers(scope=scope).get("range", ""), found.st_size)
            await send(message)

        try:
            found = self.stat_result = await asyncio.to_thread(os.stat, self.path)
        except FileNotFoundError:
            raise self._gone from None
        self.set_stat_headers(found)
        await super().__call__({**scope, "method": exchange_of(scope).method}, receive, send_file)


def _wrong_range(status: int, asked: str, size: int) -> HttpError:
    rule = f"the file has {size} bytes; ask for a part of them, such as bytes=0-99"
    headers = {"content-range": f"bytes */{size}"} if status == 416 else {}
    return HttpError(status, "invalid_range", f"range {asked!r:.100}: {rule}", headers=headers)


class Access:
    """Who may come in: by key, by the name under which the server is called, and by the page that calls it.

    Args:
        keys: none means that nobody needs one.
        hosts: names that a Host header may hold, without port; None allows any.
        origins: of other sites' pages that may use the server.
    """

    def __init__(self, keys: Iterable[bytes], hosts: Iterable[str] | None, origins: Iterable[str]) -> None:
        self._keys = tuple(keys)
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)
        self.origins = frozenset(origins)

    def check(self, path: str, headers: Headers) -> None:
        """Raises :class:`HttpError`."""
        host = headers.get("host", "")
        # Every browser tells a name; a balancer's probe in HTTP/1.0 need not.
        if host and self._hosts is not None and _without_port(host) not in self._hosts:
            remedy = "use localhost, or start the server with allowed_hosts"
            raise HttpError(403, "host_not_allowed", f"this server is not called {host!r:.100}; {remedy}")
        origin = headers.get("origin")
        # A page of another site could otherwise post forms here, which needs no permission of CORS.
        if origin is not None and origin not in self.origins and origin.partition("://")[2] != host:
            rule = "pages of other sites may not use this server; see allowed_origins"
            raise HttpError(403, "origin_not_allowed", f"origin {origin!r:.100}: {rule}")
        if path not in OPEN:
            self._check_key(headers.get("authorization", ""))

    def _check_key(self, header: str) -> None:
        if not self._keys:
            return
        scheme, _, given = header.partition(" ")
        # As it was sent: Starlette reads the bytes of headers as Latin-1.
        key = given.encode("latin-1").strip() if scheme.lower() == "bearer" else b""
        if not any(hmac.compare_digest(key, known) for known in self._keys):
            rule = "send the header 'Authorization: Bearer KEY' with a key of this server"
            problem = "the API key is wrong" if key else "an API key is missing"
            challenge = {"www-authenticate": "Bearer"}
            raise HttpError(401, "invalid_api_key", f"{problem}; {rule}", headers=challenge)


def _without_port(host: str) -> str:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name.strip("[]").lower()


class Guard:
    """Wraps the application. ``observe`` is told of each exchange that has ended, with route, method and seconds."""

    def __init__(
        self, app: ASGIApp, access: Access, max_body: int, observe: Callable[[str, str, int, float], None]
    ) -> None:
        self._app, self._access, self._max_body, self._observe = app, access, max_body, observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(f"req_{uuid.uuid4().hex}", time.monotonic(), scope["method"])
        scope.setdefault("state", {})["exchange"] = exchange
        headers = Headers(scope=scope)
        # A HEAD is answered as a GET, of which the server that calls this leaves out the body.
        asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                _mark(MutableHeaders(scope=message), exchange, headers.get("x-request-id"))
            await send(message)

        async def refuse(error: HttpError) -> None:
            exchange.notes["code"] = error.code
            await error.response()(scope, receive, send_marked)

        try:
            self._access.check(scope["path"], headers)
            limited = _limited(receive, headers, self._max_body)
        except HttpError as error:
            await refuse(error)
        else:
            try:
                await self._app(asked, limited, send_marked)
            except asyncio.CancelledError:  # by a server that ends, as of a client that stalls
                if not exchange.status:
                    await refuse(shutting_down())
        finally:
            self._end(asked, exchange, headers)

    def _end(self, scope: Scope, exchange: Exchange, headers: Headers) -> None:
        if exchange.trace is not None:
            exchange.trace.end()
        seconds = time.monotonic() - exchange.began
        route = getattr(scope.get("route"), "path", "unknown")
        self._observe(route, exchange.method, exchange.status, seconds)
        level = logging.ERROR if exchange.status in (0, 500) else logging.INFO
        if scope["path"] in _QUIET and level == logging.INFO:
            level = logging.DEBUG
        theirs = headers.get("x-request-id")
        notes = exchange.notes if theirs is None else {"client_request_id": _printable(theirs), **exchange.notes}
        logger.log(
            level,
            "%s %s %s",
            exchange.method,
            _printable(scope["path"]),
            exchange.status or "no answer",
            extra={"request_id": exchange.id, "seconds": round(seconds, 4), **notes},
        )


def _mark(headers: MutableHeaders, exchange: Exchange, theirs: str | None) -> None:
    headers["x-request-id"] = exchange.id
    headers["x-content-type-options"] = "nosniff"
    if theirs is not None:
        headers["x-client-request-id"] = _printable(theirs)
    if exchange.warnings:  # not every answer has a place for them in its body
        headers["x-warnings"] = "; ".join(map(_printable, exchange.warnings))


def _printable(text: str) -> str:
    return "".join(char if " " <= char <= "~" else "?" for char in text[:200])


def _limited(receive: Receive, headers: Headers, most: int) -> Receive:
    """``receive`` that gives at most ``most`` bytes. Raises :class:`HttpError`, at once where the length is said."""

    def too_large(size: str) -> HttpError:
        rule = f"this server takes at most {most} (limit body); send less"
        return HttpError(413, "body_too_large", f"the request has {size} bytes, and {rule}")

    length = headers.get("content-length", "")
    if length.isdigit() and int(length[:20]) > most:
        raise too_large(length[:20])
    taken = 0

    async def receive_limited() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > most:
            raise too_large(f"more than {most}")
        return message

    return receive_limited
