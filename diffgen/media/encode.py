"""Files of pictures and clips from uint8 pixels."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from diffgen.errors import InvalidRequest
from diffgen.media.metadata import KEY, TEXT_KEY, Metadata, exif
from diffgen.params import rational_fps

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


DEFAULT_QUALITY = 95
MAX_SIDE = {"jpeg": 65_535, "webp": 16_383, "gif": 65_535}
MAX_MP4_SIDE = 16_383  # of the encoder, and of WebP, which thumbnails are
Target = Path | IO[bytes]
GIF_MAX_FPS = 50  # browsers show a frame of less than 1/50 s for 1/10 s


def save_png(image: NDArray[np.uint8], path: Target, metadata: Metadata | None = None) -> None:
    """Write (height, width, 3) as PNG."""
    from PIL import Image, PngImagePlugin

    texts = PngImagePlugin.PngInfo()
    if metadata is not None:
        texts.add_text(TEXT_KEY, metadata.text())
        texts.add_text(KEY, metadata.json())
    Image.fromarray(image).save(path, format="PNG", pnginfo=texts)


def save_jpeg(
    image: NDArray[np.uint8], path: Target, quality: int = DEFAULT_QUALITY, metadata: Metadata | None = None
) -> None:
    """Write (height, width, 3) as JPEG, with colours at full resolution."""
    _save_lossy(image, path, metadata, format="JPEG", quality=quality, subsampling="4:4:4")


def save_webp(
    image: NDArray[np.uint8], path: Target, quality: int = DEFAULT_QUALITY, metadata: Metadata | None = None
) -> None:
    """Write (height, width, 3) as lossy WebP."""
    _save_lossy(image, path, metadata, format="WEBP", quality=quality)


def _save_lossy(image: NDArray[np.uint8], path: Target, metadata: Metadata | None, **options: Any) -> None:
    from PIL import Image

    if metadata is not None:
        options["exif"] = exif(metadata)
    Image.fromarray(image).save(path, **options)


def save_gif(frames: NDArray[np.uint8], path: Path, fps: float, metadata: Metadata | None = None) -> None:
    """Write (frames, height, width, 3) as an endless GIF, 256 colours a frame, in the time of :func:`gif_delays`."""
    from PIL import Image

    first, *others = [Image.fromarray(frame).quantize(256) for frame in frames]
    options: dict[str, Any] = {} if metadata is None else {"comment": metadata.json().encode()}
    durations = [10 * delay for delay in gif_delays(len(frames), fps)]  # in ms
    first.save(path, format="GIF", save_all=True, append_images=others, duration=durations, loop=0, **options)


def gif_delays(frames: int, fps: float) -> list[int]:
    """How long each frame is shown, in the 1/100 s that a GIF tells time in: each begins at its time, rounded."""
    starts = [round(100 * index / rational_fps(fps)) for index in range(frames + 1)]
    return [end - start for start, end in itertools.pairwise(starts)]


def save_mp4(frames: NDArray[np.uint8], path: Path, fps: float, metadata: Metadata | None = None) -> None:
    """Write (frames, height, width, 3) as H.264 in yuv420p, BT.709, with the index first, at the exact frame rate.

    Raises :class:`InvalidRequest` as :func:`check_mp4`.
    """
    import av
    from av.video.reformatter import ColorRange, Colorspace

    _, height, width, _ = frames.shape
    check_mp4(width, height)
    # Without use_metadata_tags the muxer drops keys that it does not know.
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart+use_metadata_tags"}) as container:
        if metadata is not None:
            container.metadata.update({"comment": metadata.text(), KEY: metadata.json()})
        stream: Any = container.add_stream("libx264", rate=rational_fps(fps), options={"crf": "17"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        # Said in the stream, because players guess the matrix by size otherwise and shift the colours.
        context = stream.codec_context
        context.color_range, context.colorspace = ColorRange.MPEG, Colorspace.ITU709
        context.color_primaries = context.color_trc = 1
        for pixels in frames:
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame = frame.reformat(
                format="yuv420p",
                src_colorspace=Colorspace.DEFAULT,
                dst_colorspace=Colorspace.ITU709,
                src_color_range=ColorRange.JPEG,
                dst_color_range=ColorRange.MPEG,
            )
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def check_mp4(width: int, height: int) -> None:
    """Raises :class:`InvalidRequest` where a size cannot be written as an MP4 that every player shows."""
    if max(width, height) > MAX_MP4_SIDE:
        raise InvalidRequest(f"{width}x{height}: MP4 holds at most {MAX_MP4_SIDE} pixels a side here; use smaller ones")
    if width % 2 or height % 2:
        raise InvalidRequest(f"{width}x{height} is odd, and MP4 needs even sizes; use even width and height")
