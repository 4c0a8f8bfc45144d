"""How an output was made, as text inside its own file, and read back from it.

A file holds two texts: ``parameters`` in the form of AUTOMATIC1111's web UI, which many viewers show and which cannot
be parsed safely, and ``diffgen``, JSON from which :func:`read_params` gets everything that is needed to make it again.

===========  ======================================  ===============================
format       ``parameters``                          ``diffgen``
===========  ======================================  ===============================
PNG          text chunk of that name                 text chunk of that name
JPEG, WebP   EXIF UserComment (UTF-16)               EXIF MakerNote
MP4          metadata key ``comment``                metadata key ``diffgen``
GIF          (none: a GIF has one comment)           comment
===========  ======================================  ===============================
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import diffgen
from diffgen.errors import InvalidRequest
from diffgen.params import SamplingParams, parse_params

if TYPE_CHECKING:
    from PIL import Image

KEY = "diffgen"
TEXT_KEY = "parameters"
MAX_EXIF = 65_500  # bytes: JPEG holds EXIF in one segment

_EXIF_IFD, _USER_COMMENT, _MAKER_NOTE, _SOFTWARE = 0x8769, 0x9286, 0x927C, 0x0131
_PICTURES = ("PNG", "JPEG", "WEBP", "GIF")
_REMEDY = "give a PNG, JPEG, WebP, GIF or MP4 that diffgen saved with its metadata"
# Of the client that asked, not of the picture.
_LEFT_OUT = {"output_type", "preview_every", "priority", "time_limit"}


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """How one output was made.

    Attributes:
        params: all parameters of this output alone: its own seed, and one output.
        model: name of the model, never a path; empty where it is not known.
        version: diffgen's.
    """

    params: SamplingParams
    model: str = ""
    version: str = diffgen.__version__

    def json(self) -> str:
        """In ASCII, which every container holds as it is."""
        params = msgspec.structs.asdict(self.params)
        params = {name: value for name, value in params.items() if value is not None and name not in _LEFT_OUT}
        return json.dumps({"version": self.version, "model": self.model, "params": params})

    def text(self) -> str:
        """In AUTOMATIC1111's form: the prompt, the negative prompt, a line of settings."""
        params = self.params
        settings = {
            "Steps": params.num_inference_steps,
            "Sampler": params.scheduler,
            "CFG scale": params.guidance_scale,
            "True CFG scale": params.true_cfg_scale,
            "Seed": params.seed,
            "Size": None if params.width is None else f"{params.width}x{params.height}",
            "Clip skip": params.clip_skip,
            "Frames": params.num_frames if is_clip(params) else None,
            "FPS": params.fps,
            "Model": self.model or None,
            "Version": f"diffgen {self.version}",
        }
        lines = [params.prompt]
        if params.negative_prompt:
            lines.append(f"Negative prompt: {params.negative_prompt}")
        lines.append(", ".join(f"{name}: {_short(value)}" for name, value in settings.items() if value is not None))
        return "\n".join(lines)


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def is_clip(params: SamplingParams) -> bool:
    return params.num_frames not in (None, 1)


def of_output(params: SamplingParams, seed: int, model: str) -> Metadata:
    """The metadata of the output that ``seed`` made, of a request with the resolved ``params``."""
    changes: dict[str, Any] = {"seed": seed, "num_outputs_per_prompt": 1}
    if not is_clip(params):
        changes["fps"] = None  # a default without a meaning for a still image
    return Metadata(params=msgspec.structs.replace(params, **changes), model=model)


def exif(metadata: Metadata) -> Image.Exif:
    """EXIF for JPEG and WebP."""
    from PIL import Image

    made = Image.Exif()
    made.endian = ">"  # UserComment is UTF-16 in the byte order of the whole
    made[_SOFTWARE] = f"diffgen {metadata.version}"
    ifd = made.get_ifd(_EXIF_IFD)
    ifd[_USER_COMMENT] = b"UNICODE\0" + metadata.text().encode("utf-16-be")
    ifd[_MAKER_NOTE] = metadata.json().encode()
    return made


def fits_jpeg(metadata: Metadata) -> bool:
    return len(exif(metadata).tobytes()) <= MAX_EXIF


def read_params(path: str | Path) -> dict[str, Any]:
    """The sampling parameters that a file of diffgen's was made with, for ``generate(**read_params(path))``.

    With the same model and the same numbers they give the same pixels. Raises :class:`InvalidRequest` as :func:`read`.
    """
    params = msgspec.structs.asdict(read(path).params)
    return {name: value for name, value in params.items() if value is not None and name not in _LEFT_OUT}


def read(path: str | Path) -> Metadata:
    """The metadata of a PNG, JPEG, WebP, GIF or MP4 file that diffgen wrote.

    Raises :class:`InvalidRequest` where there is no such file, it holds no metadata of diffgen's or a wrong one.
    """
    text = _find(Path(path))
    if text is None:
        raise _wrong(f"{str(path)!r} holds no metadata of diffgen's; {_REMEDY}")
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
        params, model, version = found["params"], found.get("model", ""), found.get("version", "")
        if not (isinstance(params, dict) and isinstance(model, str) and isinstance(version, str)):
            raise TypeError("a value of another type than diffgen writes")
    except (msgspec.DecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise _wrong(f"the metadata of {str(path)!r} is broken: {type(error).__name__}: {error}") from None
    try:
        return Metadata(params=parse_params(params), model=model, version=version)
    except InvalidRequest as error:
        raise _wrong(f"the metadata of {str(path)!r}, of diffgen {version!r:.40}: {error}") from None


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_metadata", param="from_metadata")


def _find(path: Path) -> str | bytes | None:
    try:
        with open(path, "rb") as file:
            start = file.read(12)
    except (OSError, ValueError) as error:  # a ValueError where the path holds a NUL
        reason = error.strerror if isinstance(error, OSError) else error
        raise _wrong(f"cannot read {str(path)!r}: {reason}") from None
    return _find_in_clip(path) if start[4:8] == b"ftyp" else _find_in_picture(path)


def _find_in_clip(path: Path) -> str | None:
    import av

    try:
        with av.open(str(path)) as container:
            return container.metadata.get(KEY)
    except av.FFmpegError as error:
        raise _wrong(f"cannot read {str(path)!r}: {error}; {_REMEDY}") from None


def _find_in_picture(path: Path) -> str | bytes | None:
    from PIL import Image

    try:
        with Image.open(path, formats=_PICTURES) as image:  # reads the head of the file, not the pixels
            found: Any = image.info.get(KEY)
            if image.format == "GIF":
                found = image.info.get("comment")
            elif image.format != "PNG":
                found = image.getexif().get_ifd(_EXIF_IFD).get(_MAKER_NOTE)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise _wrong(f"cannot read {str(path)!r}: {error}; {_REMEDY}") from None
    if isinstance(found, bytes) and not re.match(rb'\{"version": ', found):
        return None  # another program's comment or note
    return found if isinstance(found, str | bytes) else None
