"""The page at ``/``: three files, sent as they are."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter
from starlette.responses import Response

router = APIRouter()

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; "
        "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def _file(name: str, kind: str) -> Response:
    return Response(resources.files(__name__).joinpath(name).read_bytes(), media_type=kind, headers=_HEADERS)


@router.get("/", include_in_schema=False)
def page() -> Response:
    return _file("page.html", "text/html")


@router.get("/page.js", include_in_schema=False)
def script() -> Response:
    return _file("page.js", "text/javascript")


@router.get("/page.css", include_in_schema=False)
def style() -> Response:
    return _file("page.css", "text/css")
