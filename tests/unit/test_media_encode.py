"""PNG and MP4 files, read back by another library than wrote them where there is one."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from av.video.reformatter import ColorRange, Colorspace
from PIL import Image

from diffgen.errors import InvalidRequest
from diffgen.media.encode import check_mp4, save_jpeg, save_mp4, save_png, save_webp


def _clip(frames: int, height: int = 48, width: int = 64) -> np.ndarray:
    """A ramp that moves."""
    ramp = np.arange(width)[None, None, :] * 3 + np.arange(frames)[:, None, None] * 7 + np.zeros((1, height, 1), int)
    return np.repeat((ramp % 256)[..., None], 3, axis=-1).astype(np.uint8)


def test_png_is_lossless(tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (33, 47, 3), dtype=np.uint8)
    save_png(image, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as read:
        assert (read.format, read.mode, read.size) == ("PNG", "RGB", (47, 33))
        np.testing.assert_array_equal(np.asarray(read), image)


@pytest.mark.parametrize("quality", [0, 95, 100])
def test_jpeg_of_noise_fits_the_encoder_at_any_quality(tmp_path: Path, quality: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (1024, 1024, 3), dtype=np.uint8)
    save_jpeg(image, tmp_path / "a.jpeg", quality)
    with Image.open(tmp_path / "a.jpeg") as read:
        assert (read.format, read.size) == ("JPEG", (1024, 1024))
        difference = np.abs(np.asarray(read).astype(int) - image).mean()
    assert difference < {0: 80, 95: 8, 100: 2}[quality]


@pytest.mark.parametrize(("save", "most"), [(save_jpeg, 5), (save_webp, 12)])
def test_colours_of_lossy_pictures(tmp_path: Path, save: Callable[[np.ndarray, Path], None], most: int) -> None:
    image = np.zeros((64, 64, 3), np.uint8)
    image[:, :31], image[:, 31:] = (255, 0, 0), (0, 0, 255)  # an edge that halved colours would blur
    save(image, tmp_path / "a")
    with Image.open(tmp_path / "a") as read:
        difference = np.abs(np.asarray(read.convert("RGB")).astype(int) - image)
    assert np.median(difference) <= 2
    assert difference[:, :30].mean() <= most


@pytest.mark.parametrize(
    ("frames", "fps", "rate"),
    [
        (9, 8.0, Fraction(8)),
        (5, 23.976, Fraction(24000, 1001)),
        (2, 12.5, Fraction(25, 2)),
        (81, 16.0, Fraction(16)),
        (3, 0.5, Fraction(1, 2)),
    ],
)
def test_mp4_has_exactly_the_frames_at_exactly_the_rate(
    tmp_path: Path, frames: int, fps: float, rate: Fraction
) -> None:
    save_mp4(_clip(frames), tmp_path / "a.mp4", fps)
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (stream.width, stream.height) == (64, 48)
        assert stream.average_rate == rate
        decoded = list(container.decode(stream))
        assert len(decoded) == frames
        assert stream.time_base is not None
        times = [frame.pts * stream.time_base for frame in decoded if frame.pts is not None]
        assert times == [index / rate for index in range(frames)]
        assert stream.duration is not None
        assert abs(stream.duration * stream.time_base - frames / rate) < Fraction(1, 1000), "the container's own unit"


def test_mp4_keeps_size_order_and_shape_of_frames(tmp_path: Path) -> None:
    clip = _clip(7, height=50, width=98)  # even, but no multiples of 16
    save_mp4(clip, tmp_path / "a.mp4", 8)
    with av.open(str(tmp_path / "a.mp4")) as container:
        for frame, original in zip(container.decode(video=0), clip, strict=True):
            read = frame.to_ndarray(format="rgb24").astype(int)
            assert read.shape == original.shape
            assert np.abs(read - original).mean() < 6


def test_mp4_index_comes_first_so_that_browsers_start_at_once(tmp_path: Path) -> None:
    save_mp4(_clip(5), tmp_path / "a.mp4", 8)
    data = (tmp_path / "a.mp4").read_bytes()
    assert 0 < data.index(b"moov") < data.index(b"mdat")


@pytest.mark.parametrize("colour", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (128, 64, 200)])
def test_colours_are_right_under_the_matrix_that_the_file_names(tmp_path: Path, colour: tuple[int, int, int]) -> None:
    save_mp4(np.full((3, 64, 64, 3), colour, np.uint8), tmp_path / "a.mp4", 8)
    with av.open(str(tmp_path / "a.mp4")) as container:
        context = container.streams.video[0].codec_context
        assert context.colorspace == Colorspace.ITU709
        assert context.color_range == ColorRange.MPEG
        assert (context.color_primaries, context.color_trc) == (1, 1)
        frame = list(container.decode(video=0))[1]
        planes = [
            np.frombuffer(bytes(plane), np.uint8).reshape(-1, plane.line_size)[16, 16].item() for plane in frame.planes
        ]
    np.testing.assert_allclose(_bt709(*planes), colour, atol=4)


def _bt709(y: int, cb: int, cr: int) -> list[float]:
    """Rec. ITU-R BT.709, limited range, by hand: a decoder may share our encoder's mistake."""
    luma, blue, red = (y - 16) / 219, (cb - 128) / 224, (cr - 128) / 224
    rgb = (luma + 1.5748 * red, luma - 0.187324 * blue - 0.468124 * red, luma + 1.8556 * blue)
    return [255 * min(max(value, 0.0), 1.0) for value in rgb]


@pytest.mark.parametrize(("width", "height"), [(63, 64), (64, 63), (63, 63)])
def test_odd_sizes_are_refused_before_a_file_is_made(tmp_path: Path, width: int, height: int) -> None:
    with pytest.raises(InvalidRequest, match=f"{width}x{height} is odd.*use even"):
        save_mp4(np.zeros((2, height, width, 3), np.uint8), tmp_path / "a.mp4", 8)
    assert not list(tmp_path.iterdir())
    check_mp4(64, 62)


def test_an_mp4_may_be_as_large_as_is_told(tmp_path: Path) -> None:
    for width, height in ((16382, 2), (2, 16382)):
        save_mp4(np.zeros((2, height, width, 3), np.uint8), tmp_path / "a.mp4", 8)
    for width, height in ((16384, 2), (2, 16384)):
        with pytest.raises(InvalidRequest, match="at most 16383 pixels a side"):
            check_mp4(width, height)


def test_frames_need_not_be_contiguous(tmp_path: Path) -> None:
    clip = np.ascontiguousarray(_clip(3).transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    save_mp4(clip, tmp_path / "a.mp4", 8)
    save_png(clip[0], tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as read:
        np.testing.assert_array_equal(np.asarray(read), clip[0])
