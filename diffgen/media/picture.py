"""Pictures that others made: the one way in, for files that may be broken, strange or hostile."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from diffgen.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

# By what their files begin with; a name or a content type proves nothing.
_BEGINNINGS = {"PNG": b"\x89PNG\r\n\x1a\n", "JPEG": b"\xff\xd8\xff", "WEBP": b"RIFF"}


def load_picture(data: bytes, max_pixels: int, name: str = "image") -> NDArray[np.uint8]:
    """A PNG, JPEG or WebP as a viewer shows it: uint8 (height, width, 3).

    It is turned as its EXIF says, and lies on white where it is transparent. 16 bits a colour are scaled to 8, CMYK and
    palettes become RGB, and of an animation the first frame counts. Its size is checked before it is decoded.

    Raises :class:`InvalidRequest`, with the code ``image_too_large`` above ``max_pixels``, else
    ``image_decode_failed``; ``name`` is the parameter that it names.
    """
    import numpy as np
    from PIL import Image, ImageOps

    kind = next((kind for kind, beginning in _BEGINNINGS.items() if data.startswith(beginning)), None)
    if kind is None or (kind == "WEBP" and data[8:12] != b"WEBP"):
        raise _undecodable(name, f"its {len(data)} bytes begin as no PNG, JPEG or WebP does")
    try:
        with Image.open(io.BytesIO(data), formats=[kind]) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise _too_large(name, f"{width} x {height} pixels", max_pixels)
            image.load()
            flat = _flat(ImageOps.exif_transpose(image))
    except InvalidRequest:
        raise
    except Image.DecompressionBombError:
        raise _too_large(name, "pixels by the hundred million", max_pixels) from None
    except Exception as error:
        # Decoders raise whatever comes to them from foreign bytes; none of it is this server's failure.
        raise _undecodable(name, str(error) or type(error).__name__) from None
    return np.asarray(flat)


def _flat(image: Image.Image) -> Image.Image:
    """In RGB, of 8 bits."""
    import numpy as np
    from PIL import Image

    if image.mode.startswith(("I", "F")):
        # Pillow's own conversion would cut off what is above 255.
        grey = np.asarray(image, dtype=np.float64) * (255 / 65535)
        return Image.fromarray(grey.round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _undecodable(name: str, reason: str) -> InvalidRequest:
    remedy = "send a whole PNG, JPEG or WebP"
    return InvalidRequest(f"{name} cannot be decoded: {reason[:200]}; {remedy}", code="image_decode_failed", param=name)


def _too_large(name: str, size: str, max_pixels: int) -> InvalidRequest:
    rule = f"this server takes at most {max_pixels} (limit pixels); send a smaller one"
    return InvalidRequest(f"{name} has {size}, and {rule}", code="image_too_large", param=name)
