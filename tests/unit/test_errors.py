"""The tree of errors and its travelling form."""

from __future__ import annotations

import copy
import pickle

import msgspec
import pytest

from diffgen import errors
from diffgen.errors import DiffgenError, ErrorInfo, InvalidRequest, QueueFull, ServerError, error_from


def _all(base: type[DiffgenError]) -> list[type[DiffgenError]]:
    return [
        base,
        *(kind for child in base.__subclasses__() if child.__module__ == base.__module__ for kind in _all(child)),
    ]


@pytest.mark.parametrize("kind", _all(DiffgenError))
def test_every_error_travels(kind: type[DiffgenError]) -> None:
    error = kind("what, rule, remedy", code="some_code", retryable=True, param="seed", retry_after=2.5)
    data = msgspec.msgpack.encode(error.info())
    back = error_from(msgspec.msgpack.decode(data, type=ErrorInfo))
    assert type(back) is kind
    assert (back.message, back.code, back.retryable, back.param) == ("what, rule, remedy", "some_code", True, "seed")
    assert back.retry_after == 2.5
    assert str(back) == "what, rule, remedy"


@pytest.mark.parametrize("kind", _all(DiffgenError))
def test_every_error_is_in_the_tree_of_the_docstring(kind: type[DiffgenError]) -> None:
    assert kind.__name__ in (errors.__doc__ or "")


def test_codes_of_kinds_differ() -> None:
    codes = [kind.default_code for kind in _all(DiffgenError)]
    assert len(set(codes)) == len(codes)


def test_a_kind_of_a_later_version_becomes_a_server_error() -> None:
    error = error_from(ErrorInfo("Nonsense", "new_code", "text", True))
    assert type(error) is ServerError
    assert (error.code, error.retryable) == ("new_code", True)


def test_zero_like_values_are_values() -> None:
    error = QueueFull("full", retryable=False, code="")
    assert (error.retryable, error.code) == (False, "")


def test_errors_can_be_copied_and_pickled_by_executors_of_the_user() -> None:
    error = InvalidRequest("bad", param="size")
    for back in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(back) is InvalidRequest
        assert (back.param, back.code, back.message) == ("size", "invalid_request", "bad")


def test_a_mistake_of_the_caller_is_a_value_error() -> None:
    assert issubclass(InvalidRequest, ValueError)
