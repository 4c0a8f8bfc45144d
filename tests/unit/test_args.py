"""How to serve: rules that need no device."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from diffgen.args import ListenArgs, RunArgs, ServerArgs, check_args, parse_limits
from diffgen.errors import InvalidRequest
from diffgen.params import Limits


@pytest.mark.parametrize(
    ("field", "value", "bound"),
    [
        ("num_gpus", 0, "1"),
        ("num_gpus", -1, "1"),
        ("threads", 0, "1"),
        ("max_batch_size", 0, "1"),
        ("max_batch_size", 33, "32"),
        ("max_running", 0, "1"),
        ("start_timeout", 0.5, "1"),
        ("start_timeout", math.nan, "finite"),
        ("start_timeout", math.inf, "finite"),
        ("start_timeout", 1e9, "604800"),
    ],
)
def test_numbers_out_of_range_are_named(field: str, value: float, bound: str) -> None:
    values: Any = {field: value}
    with pytest.raises(InvalidRequest) as caught:
        check_args(ServerArgs(run=RunArgs(**values)))
    assert caught.value.param == field
    assert str(value) in caught.value.message
    assert bound in caught.value.message


def test_the_defaults_are_good() -> None:
    check_args(ServerArgs())


@pytest.mark.parametrize("address", ["localhost:1", "http://x", "", "tcp:/x"])
def test_addresses_have_a_scheme(address: str) -> None:
    with pytest.raises(InvalidRequest, match="tcp://HOST:PORT or ipc://PATH"):
        check_args(ServerArgs(listen=ListenArgs(address=address, token="t")))


@pytest.mark.parametrize("token", [None, ""])
def test_tcp_needs_a_token(token: str | None) -> None:
    with pytest.raises(InvalidRequest, match="give a token"):
        check_args(ServerArgs(listen=ListenArgs(address="tcp://127.0.0.1:0", token=token)))
    check_args(ServerArgs(listen=ListenArgs(address="ipc:///tmp/x")))
    check_args(ServerArgs(listen=ListenArgs(address="tcp://127.0.0.1:0", token="t")))


def test_a_token_without_an_address_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no effect without an address"):
        check_args(ServerArgs(listen=ListenArgs(token="t")))


@pytest.mark.parametrize("token", ["secret" * 50, "a\0b", "a\nb", "\ud800"])
def test_tokens_that_the_transport_cannot_carry_are_refused_unseen(token: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_args(ServerArgs(listen=ListenArgs(address="tcp://127.0.0.1:0", token=token)))
    assert caught.value.param == "token"
    assert token not in caught.value.message


def test_a_policy_without_replicas_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"dp_policy round_robin has no effect .*dp_size"):
        check_args(ServerArgs(run=RunArgs(dp_policy="round_robin")))


def test_limits_are_read_from_texts() -> None:
    assert parse_limits(["steps=50", "queue=1", "steps=60"], Limits) == Limits(steps=60, queue=1)
    assert parse_limits([], Limits) == Limits()


@pytest.mark.parametrize(
    "item", ["steps", "steps=", "steps=0", "steps=-1", "steps=1.5", "steps=١", "steps=1e3", "=5", "steps=" + "9" * 5000]
)
def test_limits_that_are_no_whole_number_are_refused(item: str) -> None:
    with pytest.raises(InvalidRequest, match="limit") as caught:
        parse_limits([item], Limits)
    assert len(caught.value.message) < 300


def test_an_unknown_limit_names_the_near_one() -> None:
    with pytest.raises(InvalidRequest, match="did you mean 'steps'"):
        parse_limits(["stepz=5"], Limits)


def test_limits_given_as_a_struct_are_checked_too() -> None:
    for value in (0, 2**64):
        with pytest.raises(InvalidRequest, match="limit queue"):
            check_args(ServerArgs(limits=Limits(queue=value)))


def test_args_survive_the_trip_to_a_rank() -> None:
    args = ServerArgs(run=RunArgs(num_gpus=2), limits=parse_limits(["pixels=1000000000000000"], Limits))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(args), type=ServerArgs) == args
