"""The tree of errors and its travelling form."""

from __future__ import annotations

import copy
import pickle

import msgspec
import pytest

from diffgen import errors
from diffgen.errors import (
    DeadlineExceeded,
    DiffgenError,
    ErrorInfo,
    InvalidRequest,
    QueueFull,
    RequestCancelled,
    ServerError,
    WorkerDied,
    error_from,
    without_paths,
)


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


@pytest.mark.parametrize("kind", _all(DiffgenError))
def test_clients_on_other_machines_are_told_no_path(kind: type[DiffgenError]) -> None:
    text = "cannot read /srv/my models/x.bin, '/a/dog'"
    info = kind(text, code="some_code").info()
    told = info.public()
    assert (told.kind, told.code, told.retryable) == (info.kind, info.code, info.retryable)
    assert told.message
    assert told.public() == told, "told once or twice is the same"
    if issubclass(kind, InvalidRequest | QueueFull | RequestCancelled | DeadlineExceeded):
        assert told.message == text, "it speaks of the request alone"
    else:
        assert "/srv" not in told.message
        assert "dog" not in told.message


def test_whether_to_try_again_is_told() -> None:
    assert "try again" in WorkerDied("x").public
    assert "not be tried again" in WorkerDied("x", retryable=False).public


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cannot open /usr/lib/a.so: no such file", "cannot open (path): no such file"),
        ("No such file or directory: '/srv/my models, new (2)/x y'", "No such file or directory: '(path)'"),
        ('"/srv/it\'s/x" is no folder', '"(path)" is no folder'),
        ("at /srv/my models/x.bin (error 5)", "at (path) (error 5)"),
        ("at /srv/ my  models /x.bin (error 5)", "at (path) (error 5)"),
        ("'/srv/ my models /x.bin '", "'(path)'"),
        ("[/srv/a/b] error:/srv/a, root=/srv/a/, file:///srv/a", "[(path)] error:(path), root=(path), file://(path)"),
        ("in /home/猫/b", "in (path)"),
    ],
)
def test_paths_are_taken_out_of_what_others_say(text: str, told: str) -> None:
    assert without_paths(text) == told


@pytest.mark.parametrize(
    "text",
    [
        "image/png or image/svg+xml; cats and/or dogs; 24/7; w/o",
        "16/9, 1/2, 3 / 4, 1 /2, (9/16) and 2024/05/30",
        "http://a.example/b/c?d=/e and https://[::1]:80/x/y and tcp://127.0.0.1:5/a/b",
        "the token '</s>' or <s>/<s>, and '/imagine a cat'",
        "/imagine a cat and/or a dog",
        "stabilityai/stable-diffusion-xl/unet and ./a/b and ../a/b",
        "The size of tensor a (77) must match the size of tensor b (128) at dimension 1 // 2",
        "猫/犬/鳥",
    ],
)
def test_texts_of_the_user_stay(text: str) -> None:
    assert without_paths(text) == text


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
