"""A client of the wire protocol that speaks in bare frames."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from diffgen.wire import codec
from diffgen.wire.messages import Hello, Ping
from diffgen.wire.router import USER

PREFIX = bytes(codec.encode(Hello())[0])
_DECODER = codec.server_message_decoder()


class Raw:
    """``options`` are ZMQ's, set before it connects."""

    def __init__(self, address: str, token: str | None = None, options: dict[int, int | bytes] | None = None) -> None:
        self.tensors: list[bytes] = []  # of the last answer
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDTIMEO, 2000)
        for option, value in (options or {}).items():
            self.socket.setsockopt(option, value)
        if token is not None:
            self.socket.setsockopt(zmq.PLAIN_USERNAME, USER.encode())
            self.socket.setsockopt(zmq.PLAIN_PASSWORD, token.encode())
        self.socket.connect(address)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def tell(self, message: msgspec.Struct) -> None:
        self.send(PREFIX, msgspec.msgpack.encode(message))

    def answer(self, seconds: float = 5) -> Any:
        while self.socket.poll(int(1000 * seconds)):
            prefix, body, *self.tensors = self.socket.recv_multipart()
            message = codec.decode([prefix, body], _DECODER)
            if not isinstance(message, Ping):
                return message
        return None

    def hello(self, seconds: float = 5) -> Any:
        try:
            self.tell(Hello())
        except zmq.Again:
            return None  # refused already: there is no connection to send on
        return self.answer(seconds)
