"""Pictures in requests: uploads, base64, ``data:`` URLs, and where they are allowed addresses."""

from __future__ import annotations

import asyncio
import base64
import binascii
import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.datastructures import UploadFile

from diffgen.errors import InvalidRequest
from diffgen.fields import refuse, shown
from diffgen.http.args import HttpLimits
from diffgen.http.remote import Remote
from diffgen.media.picture import load_picture

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# OpenAI's client sends one picture as ``image`` and a list of them as ``image[]``; SGLang's names for addresses follow.
FIELDS = ("image", "image[]", "image_url", "url", "url[]", "mask")
_DATA = re.compile(r"data:[^,]{0,100};base64,", re.IGNORECASE)

# Decoding takes many times a file's memory.
_one_at_a_time = asyncio.Semaphore(1)


@dataclasses.dataclass(frozen=True)
class Picture:
    """One that a request holds: ``value`` is an upload, a text in base64, or an address that may be fetched."""

    name: str
    value: UploadFile | str
    is_remote: bool = False


def given(values: Mapping[str, Any], limits: HttpLimits, remote: Remote) -> list[Picture]:
    """The pictures of a request, in order; none of them is read yet. Raises :class:`InvalidRequest`."""
    found: list[Picture] = []
    for name in FIELDS:
        value = values.get(name)
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                found.append(_picture(name, each, remote))
    if len(found) > limits.pictures:
        rule = f"this server takes at most {limits.pictures} (limit pictures); send fewer"
        raise InvalidRequest(f"{len(found)} pictures, and {rule}", code="too_many_images", param=found[0].name)
    return found


def _picture(name: str, value: Any, remote: Remote) -> Picture:
    if isinstance(value, dict) and value.keys() == {"url"}:  # as chats send it
        value = value["url"]
    if isinstance(value, UploadFile):
        return Picture(name, value)
    if not isinstance(value, str):
        refuse(name, f"{name} is {shown(value)}; it must be a file, or a text in base64")
    if _DATA.match(value) or not re.match(r"[a-z][a-z0-9+.-]*:", value, re.IGNORECASE):
        return Picture(name, value)
    remote.check(name, value)
    return Picture(name, value, is_remote=True)


async def read_picture(picture: Picture, limits: HttpLimits, remote: Remote) -> NDArray[np.uint8]:
    """One of them as uint8 (height, width, 3). Raises :class:`InvalidRequest`."""
    name, value = picture.name, picture.value
    if isinstance(value, UploadFile):
        data = await value.read()
    elif picture.is_remote:
        data = await remote.fetch(name, value, limits.body)
    else:
        data = _decoded(name, value)
    async with _one_at_a_time:
        return await asyncio.to_thread(load_picture, data, limits.pixels, name)


def _decoded(name: str, text: str) -> bytes:
    try:
        return base64.b64decode(_DATA.sub("", text, count=1), validate=True)
    except (binascii.Error, ValueError):
        rule = "send a file, or a text in base64"
        raise InvalidRequest(f"{name} is no base64; {rule}", code="image_decode_failed", param=name) from None
