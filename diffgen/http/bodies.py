"""What clients send: JSON and forms, as one dictionary of plain values."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any, Literal, NoReturn, get_origin

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from diffgen.errors import InvalidRequest
from diffgen.fields import Field, refuse, shown
from diffgen.http.errors import HttpError

_JSON, _FORM, _MULTIPART = "application/json", "application/x-www-form-urlencoded", "multipart/form-data"


async def read_body(request: Request, known: Mapping[str, Field], *, forms: bool = False) -> dict[str, Any]:
    """The request's values by name. A form's texts are read as the types of the ``known`` fields; "" is unset there.

    Raises :class:`HttpError` for another content type, and :class:`InvalidRequest` for a body that cannot be read.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == _JSON or (kind.startswith("application/") and kind.endswith("+json")):
        return _merged(parse_json(await request.body()))
    if forms and kind in (_FORM, _MULTIPART):
        return _merged(await _read_form(request, known))
    wanted = f"{_JSON} or {_MULTIPART}" if forms else _JSON
    told = f"content type {kind!r:.100}" if kind else "no content type"
    raise HttpError(415, "unsupported_content_type", f"{told}: this route takes {wanted}")


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object without NaN, infinities or a key that stands twice. Raises :class:`InvalidRequest`."""
    try:
        found = json.loads(body.decode(), parse_constant=_no_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidRequest):
            raise
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise InvalidRequest(f"the body is not JSON: {reason}", code="invalid_json") from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"the body is {shown(found)}; send a JSON object", code="invalid_json")
    return found


def _no_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"the body holds {name}, which is no JSON; send a number", code="invalid_json")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise InvalidRequest(f"{name!r:.100} stands in the body twice; send it once", code="invalid_json")
        found[name] = value
    return found


def _merged(values: dict[str, Any]) -> dict[str, Any]:
    """With the content of a literal ``extra_body``, as clients without OpenAI's library send it."""
    extra = values.pop("extra_body", None)
    if extra is None:
        return values
    if not isinstance(extra, dict):
        refuse("extra_body", f"extra_body is {shown(extra)}; it must be an object of parameters")
    return {**extra, **values}


async def _read_form(request: Request, known: Mapping[str, Field]) -> dict[str, Any]:
    try:
        # The whole body has a limit, which a picture in base64 may well use.
        form = await request.form(max_files=64, max_fields=100, max_part_size=sys.maxsize)
    except (MultiPartException, HTTPException) as error:
        reason = getattr(error, "message", None) or getattr(error, "detail", error)
        raise InvalidRequest(f"the form cannot be read: {reason}", code="invalid_form") from None
    return _form_values(form, known)


def _form_values(form: FormData, known: Mapping[str, Field]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in form.multi_items():
        if name.endswith("[]"):  # a list, one item a field
            found.setdefault(name, []).append(value)
            continue
        if name in found:
            raise InvalidRequest(f"{name!r:.100} stands in the form twice; send it once", code="invalid_form")
        if isinstance(value, UploadFile):
            found[name] = value
        elif value != "" or name in ("prompt", "negative_prompt"):
            found[name] = _from_text(known.get(name), value)
    return found


def _from_text(field: Field | None, text: str) -> Any:
    """The value that a text stands for in a field of this type; the text itself where it stands for none."""
    for member in () if field is None else field.members:
        if get_origin(member) is Literal or member is str:
            return text
        if member is bool and text in ("true", "false"):
            return text == "true"
        if member in (int, float):
            return _number(text)
    return text


def _number(text: str) -> int | float | str:
    if len(text) > 100 or "_" in text:
        return text
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        return value if math.isfinite(value) else text
    return text
