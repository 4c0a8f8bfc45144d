"""Previews as pictures that can be looked at."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image

# A preview has a pixel for each of the latents'.
_ENLARGED = 4


def enlarged(frames: Any) -> list[Image.Image]:
    """Frames of a preview, uint8 (frames, h, w, 3), at four times their size."""
    from PIL import Image

    height, width = frames.shape[1:3]
    size = (width * _ENLARGED, height * _ENLARGED)
    return [Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC) for frame in frames]


def as_webp(frames: Any, seconds: float) -> bytes:
    """A preview of a clip that lasts so long, as a small animation."""
    first, *others = enlarged(frames)
    file = io.BytesIO()
    each_ms = max(1, round(1000 * seconds / (1 + len(others))))
    first.save(file, "WEBP", save_all=True, append_images=others, duration=each_ms, loop=0)
    return file.getvalue()
