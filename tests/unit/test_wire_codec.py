"""Messages to frames and back, whatever the bytes are."""

from __future__ import annotations

import contextlib
import pickle

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from diffgen.errors import ProtocolError
from diffgen.params import ModelSpec, SamplingParams
from diffgen.request import OutputBatch, TensorHeader
from diffgen.wire import codec
from diffgen.wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Bye,
    Cancel,
    ClientMessage,
    Closing,
    Failed,
    Hello,
    Progress,
    Result,
    Submit,
    Welcome,
)

_CLIENT = msgspec.msgpack.Decoder(ClientMessage)
_PREFIX = codec.encode(Hello())[0]


@pytest.mark.parametrize(
    "message", [Hello(), Bye(), Cancel("a"), Submit("a", SamplingParams(prompt="猫", seed=2**63 - 1))]
)
def test_client_messages_survive(message: ClientMessage) -> None:
    frames = codec.encode(message)
    assert len(frames) == codec.MAX_CLIENT_FRAMES
    assert codec.decode([bytes(frame) for frame in frames], _CLIENT) == message


def test_server_messages_survive(model: ModelSpec) -> None:
    params = SamplingParams(prompt="a")
    output = OutputBatch(
        params=params, seeds=(2**63 - 1,), warnings=(), timings={"total": 0.5}, peak_memory_mb=1.0, latent=False,
        tensor=TensorHeader("uint8", (1,)),
    )  # fmt: skip
    error = ProtocolError("x").info()
    for message in (
        Welcome("e", model), Accepted("a", 0, params, ("w",)), Progress("a", "denoise", 1, 2), Result("a", output),
        Failed("", error), Closing(),
    ):  # fmt: skip
        frames = [bytes(frame) for frame in codec.encode(message)]
        assert codec.decode(frames, codec.server_message_decoder()) == message


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_any_frames_raise_only_protocol_errors(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(frames, _CLIENT)


@given(st.binary(max_size=60))
def test_any_body_raises_only_protocol_errors(body: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        codec.decode([bytes(_PREFIX), body], _CLIENT)


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 100_000,
        pickle.dumps({"type": "Hello"}),
        msgspec.msgpack.encode({"type": "Hello", "more": 1}),
        msgspec.msgpack.encode({"type": "Submit", "id": "a"}),
        msgspec.msgpack.encode({"type": "Cancel", "id": ""}),
        msgspec.msgpack.encode({"type": "Cancel", "id": "a" * 65}),
        msgspec.msgpack.encode({"type": "Welcome", "epoch": "a"}),
        msgspec.msgpack.encode({"type": "Submit", "id": "a", "params": {"prompt": "a", "sede": 1}}),
        msgspec.msgpack.encode({"type": "Submit", "id": "a", "params": {"prompt": "a", "seed": "1"}}),
        b"\x82\xa4type\xa6Cancel\xa2id\xa2\xff\xfe",
        msgspec.msgpack.encode(Hello()) + b"x",
        b"",
    ],
)
def test_bad_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed message"):
        codec.decode([bytes(_PREFIX), body], _CLIENT)


def test_a_body_over_the_limit_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(ProtocolError, match="over the limit of 10"):
        codec.decode([bytes(_PREFIX), b"x" * 11], _CLIENT, max_body=10)


def test_another_version_is_told_from_nonsense() -> None:
    theirs = PROTOCOL_VERSION + 1
    with pytest.raises(codec.VersionMismatch) as caught:
        codec.decode([b"DGEN" + theirs.to_bytes(2, "big"), b"\xc1"], _CLIENT)
    assert caught.value.code == "protocol_version"
    assert f"protocol {theirs}, this one {PROTOCOL_VERSION}" in caught.value.message
    assert "install" in caught.value.message
    with pytest.raises(ProtocolError, match="not a diffgen message"):
        codec.decode([b"DGENX", b""], _CLIENT)
    refusal = [bytes(frame) for frame in codec.version_refusal(caught.value)]
    answer = codec.decode(refusal, codec.server_message_decoder())
    assert isinstance(answer, Failed)
    assert (answer.id, answer.error.code) == ("", "protocol_version")


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_tensors_travel_as_raw_frames(dtype: type[np.generic]) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    frames = codec.encode(Closing(), array)
    assert len(frames) == 3
    back = codec.array(TensorHeader(str(array.dtype), array.shape), zmq.Frame(bytes(frames[2])))
    np.testing.assert_array_equal(back, array)
    assert back.dtype == array.dtype


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [
        ("uint8", (3,), b"ab"),
        ("uint8", (-1,), b"a"),
        ("uint8", (-1, -2), b"ab"),
        ("uint8", (2**40, 2**40), b"ab"),
        ("float32", (1,), b"abc"),
        ("float64", (1,), b"a" * 8),
        ("object", (1,), b"a" * 8),
        ("uint8", (1,), b""),
    ],
)
def test_tensors_that_do_not_fit_their_header_are_refused(dtype: str, shape: tuple[int, ...], data: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.array(TensorHeader(dtype, shape), zmq.Frame(data))
