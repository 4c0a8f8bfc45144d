"""PNG and MP4 files from uint8 pixels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffgen.errors import InvalidRequest
from diffgen.params import rational_fps

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def save_png(image: NDArray[np.uint8], path: Path) -> None:
    """Write (height, width, 3) as PNG."""
    from PIL import Image

    Image.fromarray(image).save(path, format="PNG")


def save_mp4(frames: NDArray[np.uint8], path: Path, fps: float) -> None:
    """Write (frames, height, width, 3) as H.264 in yuv420p, BT.709, with the index first, at the exact frame rate.

    Raises :class:`InvalidRequest` for odd sizes, which yuv420p cannot hold.
    """
    import av
    from av.video.reformatter import ColorRange, Colorspace

    _, height, width, _ = frames.shape
    check_even(width, height)
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
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


def check_even(width: int, height: int) -> None:
    """Raises :class:`InvalidRequest` where a size cannot be written as an MP4 that every player shows."""
    if width % 2 or height % 2:
        raise InvalidRequest(f"{width}x{height} is odd, and MP4 needs even sizes; use even width and height")
