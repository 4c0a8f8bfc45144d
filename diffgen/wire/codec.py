"""Messages to frames and back.

A message is ``[magic and version, msgpack body, tensor frames...]``. The version stands outside the body, so that two
versions can tell each other apart without understanding each other's bodies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import zmq

from diffgen.errors import ErrorInfo, ProtocolError
from diffgen.request import TensorHeader
from diffgen.wire.messages import PROTOCOL_VERSION, Failed, ServerMessage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_BODY = 4 * 2**20  # of a client
MAX_ANSWER = 2**28  # of a server, which tells in a status of every request in a queue of any length
MAX_CLIENT_FRAMES = 2  # magic and body: no client message carries tensors

_MAGIC = b"DGEN"
_PREFIX = _MAGIC + PROTOCOL_VERSION.to_bytes(2, "big")
_ENCODER = msgspec.msgpack.Encoder()

T = TypeVar("T")


class VersionMismatch(ProtocolError):
    """The other side is diffgen, but of another protocol version."""

    def __init__(self, theirs: int) -> None:
        rule = f"the other side speaks diffgen protocol {theirs}, this one {PROTOCOL_VERSION}"
        super().__init__(f"{rule}; install the same diffgen on both", code="protocol_version")


def encode(message: msgspec.Struct, tensor: NDArray[Any] | None = None) -> list[bytes | memoryview]:
    """Frames of a message; ``tensor`` must be C-contiguous."""
    frames: list[bytes | memoryview] = [_PREFIX, _ENCODER.encode(message)]
    if tensor is not None:
        frames.append(tensor.data.cast("B"))
    return frames


def decode(frames: Sequence[zmq.Frame | bytes], decoder: msgspec.msgpack.Decoder[T], max_body: int = MAX_BODY) -> T:
    """The message of the first two frames. Raises :class:`ProtocolError` whatever the bytes are."""
    if len(frames) < 2:
        raise ProtocolError(f"{len(frames)} frame(s) where a message has two or more")
    prefix, body = (memoryview(frame if isinstance(frame, bytes) else frame.buffer) for frame in frames[:2])
    if prefix.nbytes != len(_PREFIX) or bytes(prefix[: len(_MAGIC)]) != _MAGIC:
        raise ProtocolError("not a diffgen message")
    if bytes(prefix) != _PREFIX:
        raise VersionMismatch(int.from_bytes(prefix[len(_MAGIC) :], "big"))
    if body.nbytes > max_body:
        raise ProtocolError(f"a message of {body.nbytes} bytes is over the limit of {max_body}")
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from None


def version_refusal(error: VersionMismatch) -> list[bytes | memoryview]:
    """What to answer a client of another version: our magic tells it ours even if it cannot read the body."""
    return encode(Failed("", ErrorInfo("ProtocolError", error.code, error.message)))


def array(header: TensorHeader, frame: zmq.Frame | bytes) -> NDArray[Any]:
    """The tensor of a frame, (shape) as the header says, without a copy. Raises :class:`ProtocolError`."""
    import numpy as np

    allowed: dict[str, type[np.generic]] = {"uint8": np.uint8, "float32": np.float32}
    if header.dtype not in allowed:
        raise ProtocolError(f"tensors of {header.dtype} are not sent")
    try:
        flat: NDArray[Any] = np.frombuffer(
            frame if isinstance(frame, bytes) else frame.buffer, dtype=allowed[header.dtype]
        )
    except ValueError as error:
        raise ProtocolError(f"a frame that is no {header.dtype} tensor: {error}") from None
    size = 1
    for axis in header.shape:
        size *= axis
    if size != flat.size or any(axis < 0 for axis in header.shape):
        raise ProtocolError(f"a frame of {flat.size} numbers for the shape {header.shape}")
    return flat.reshape(header.shape)


def server_message_decoder() -> msgspec.msgpack.Decoder[ServerMessage]:
    return msgspec.msgpack.Decoder(ServerMessage)
