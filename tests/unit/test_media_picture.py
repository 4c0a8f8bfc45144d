"""Pictures that others made: every kind that people send, and what is no picture."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from diffgen.errors import InvalidRequest
from diffgen.media.picture import load_picture

RED, GREEN, WHITE = (255, 0, 0), (0, 255, 0), (255, 255, 255)


def file(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    held = io.BytesIO()
    image.save(held, form, **options)
    return held.getvalue()


def halves(left: Any, right: Any, mode: str = "RGB") -> Image.Image:
    """4 wide and 2 high."""
    image = Image.new(mode, (4, 2), left)
    image.paste(right, (2, 0, 4, 2))
    return image


def load(data: bytes, max_pixels: int = 10_000) -> np.ndarray:
    loaded = load_picture(data, max_pixels)
    assert loaded.dtype == np.uint8
    assert loaded.shape[2] == 3
    return loaded


def corners(data: bytes) -> list[tuple[int, ...]]:
    """Top left and bottom right."""
    loaded = load(data)
    return [tuple(map(int, loaded[0, 0])), tuple(map(int, loaded[-1, -1]))]


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_as_it_is(form: str) -> None:
    image = halves(RED, GREEN)
    assert np.array_equal(load(file(image, form, lossless=True)), np.asarray(image))


def test_turned_as_exif_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the top is on the right
    data = file(Image.new("RGB", (40, 20), RED), "JPEG", exif=exif, quality=95)
    assert load(data).shape == (40, 20, 3)


@pytest.mark.parametrize(("mode", "form"), [("RGBA", "PNG"), ("LA", "PNG"), ("RGBA", "WEBP"), ("P", "PNG")])
def test_on_white_where_it_is_transparent(mode: str, form: str) -> None:
    """Whatever colour is hidden there."""
    if mode == "P":
        hidden, options = halves(0, 1, "P"), {"transparency": 1}
        hidden.putpalette([10, 20, 30, 200, 0, 0])
    else:
        hidden, options = halves((10, 20, 30, 255), (200, 0, 0, 0), "RGBA").convert(mode), {"lossless": True}
    first, last = corners(file(hidden, form, **options))
    assert last == WHITE
    assert max(first) < 60


def test_half_transparent_is_mixed() -> None:
    ((red, green, blue), _) = corners(file(Image.new("RGBA", (4, 2), (255, 0, 0, 128))))
    assert (red, green, blue) == (255, 127, 127)


def test_sixteen_bits_are_scaled() -> None:
    grey = np.array([[0, 32768], [65535, 257]], dtype=np.uint16)
    assert load(file(Image.fromarray(grey)))[:, :, 0].tolist() == [[0, 128], [255, 1]]


def test_cmyk_and_grey_and_one_bit() -> None:
    cmyk = corners(file(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95))[0]
    assert cmyk[0] > 200
    assert max(cmyk[1:]) < 60
    assert corners(file(Image.new("L", (4, 2), 77))) == [(77, 77, 77)] * 2
    assert corners(file(halves(0, 1, "1"))) == [(0, 0, 0), WHITE]


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_first_frame_of_an_animation(form: str) -> None:
    others = {"save_all": True, "append_images": [Image.new("RGB", (4, 2), GREEN)], "duration": 100, "lossless": True}
    assert corners(file(Image.new("RGB", (4, 2), RED), form, **others))[0] == RED


def test_extreme_shapes() -> None:
    assert load(file(Image.new("RGB", (1, 1)))).shape == (1, 1, 3)
    assert load(file(Image.new("RGB", (1, 5000)))).shape == (5000, 1, 3)


PNG = file(Image.effect_noise((40, 40), 50))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "its 0 bytes begin as no PNG, JPEG or WebP does"),
        (b"a text named a.png", "begin as no"),
        (file(Image.new("RGB", (4, 2)), "GIF"), "begin as no"),
        (file(Image.new("RGB", (4, 2)), "TIFF"), "begin as no"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "begin as no"),
        (b"RIFF\0\0\0\0WAVEfmt ", "begin as no"),
        (PNG[: len(PNG) // 2], "truncated"),
        (PNG[:20], "cannot be decoded"),
        (b"\xff\xd8\xff" + bytes(100), "cannot be decoded"),
        (b"RIFF\x20\0\0\0WEBPVP8 " + bytes(40), "cannot be decoded"),
    ],
)
def test_what_is_no_picture(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        load_picture(data, 10_000, "mask")
    assert (caught.value.code, caught.value.param) == ("image_decode_failed", "mask")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [101, 12_000, 60_000])
def test_size_is_checked_before_it_is_decoded(side: int) -> None:
    """The head promises more than the file holds: who decoded it would fail in another way, or run out of memory."""
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    chunk = b"IHDR" + head
    data = PNG[:8] + struct.pack(">I", len(head)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    data += struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    with pytest.raises(InvalidRequest, match="limit pixels") as caught:
        load_picture(data, 10_000)
    assert caught.value.code == "image_too_large"
