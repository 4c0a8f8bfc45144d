"""Pictures in requests: uploads, base64 and ``data:`` URLs. Addresses are never fetched."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.datastructures import UploadFile

from diffgen.errors import InvalidRequest
from diffgen.fields import refuse, shown
from diffgen.media.picture import load_picture
from diffgen.params import Limits

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# SGLang's, where it takes any.
_ADDRESSES = ("url", "url[]")
# OpenAI's client sends one picture as ``image`` and a list of them as ``image[]``.
FIELDS = ("image", "image[]", "mask")
_DATA = re.compile(r"data:[^,]{0,100};base64,", re.IGNORECASE)

# Decoding takes many times a file's memory.
_one_at_a_time = asyncio.Semaphore(1)


def given(values: Mapping[str, Any], limits: Limits) -> list[tuple[str, Any]]:
    """The pictures of a request, each with the name of its field, in order. Raises :class:`InvalidRequest`."""
    for name in (name for name in _ADDRESSES if name in values):
        raise _not_fetched(name, str(values[name]))
    found: list[tuple[str, Any]] = []
    for name in FIELDS:
        value = values.get(name)
        found += [(name, each) for each in (value if isinstance(value, list) else [value]) if each is not None]
    if len(found) > limits.pictures:
        rule = f"this server takes at most {limits.pictures} (limit pictures); send fewer"
        raise InvalidRequest(f"{len(found)} pictures, and {rule}", code="too_many_images", param=found[0][0])
    return found


async def read_picture(name: str, value: Any, limits: Limits) -> NDArray[np.uint8]:
    """One of them as uint8 (height, width, 3). Raises :class:`InvalidRequest`."""
    data = await value.read() if isinstance(value, UploadFile) else _decoded(name, value)
    async with _one_at_a_time:
        return await asyncio.to_thread(load_picture, data, limits.pixels, name)


def _decoded(name: str, value: Any) -> bytes:
    if not isinstance(value, str):
        refuse(name, f"{name} is {shown(value)}; it must be a file, or a text in base64")
    if re.match(r"[a-z][a-z0-9+.-]*:", value, re.IGNORECASE) and not _DATA.match(value):
        raise _not_fetched(name, value)
    try:
        return base64.b64decode(_DATA.sub("", value, count=1), validate=True)
    except (binascii.Error, ValueError):
        rule = "send a file, or a text in base64"
        raise InvalidRequest(f"{name} is no base64; {rule}", code="image_decode_failed", param=name) from None


def _not_fetched(name: str, address: str) -> InvalidRequest:
    rule = "addresses are not fetched; send the picture itself, as a file or as data:image/png;base64,..."
    return InvalidRequest(f"{name} {address[:60]!r}: {rule}", code="url_not_allowed", param=name)
