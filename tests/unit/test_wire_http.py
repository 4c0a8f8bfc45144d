"""The connection over HTTP against a server that is slow to say which request it has begun."""

from __future__ import annotations

import http.server
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from local_http import Quiet, running

from diffgen.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    InvalidRequest,
    QueueFull,
    RequestCancelled,
    ServerClosed,
)
from diffgen.handle import Event
from diffgen.http.native import _frames
from diffgen.params import SamplingParams
from diffgen.wire import http as wire_http
from diffgen.wire.http import HttpConnection
from diffgen.wire.messages import Failed, Progress, Restarting


class Slow(http.server.ThreadingHTTPServer):
    """Takes requests, and answers each when it is told to: with ``events``, or until it is cancelled."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.asked, self.may_answer, self.cancelled = threading.Event(), threading.Event(), threading.Event()
        self.may_cancel = threading.Event()
        self.may_cancel.set()
        self.cancels: list[str] = []
        self.events: list[Event] = []
        self.ages: list[float] = []  # that requests told of themselves
        self.refusals = 0  # so many requests are answered as a proxy does while its server is away


class _Handler(Quiet):
    server: Slow
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.ages.append(float(self.headers["x-request-age"]))
        if self.server.refusals:
            self.server.refusals -= 1
            self.send_response(502)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        self.server.asked.set()
        self.server.may_answer.wait(10)
        self.send_response(200)
        self.send_header("x-generation-id", "theirs")
        self.send_header("connection", "close")
        self.end_headers()
        for event in self.server.events:
            frames = _frames(event)
            self.wfile.write(struct.pack(">I", len(frames)))
            for frame in frames:
                self.wfile.write(struct.pack(">Q", len(frame)) + frame)
        self.wfile.flush()
        if not self.server.events:
            self.server.cancelled.wait(10)

    def do_DELETE(self) -> None:
        self.server.cancels.append(self.path)
        self.server.may_cancel.wait(10)
        self.server.cancelled.set()
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")


@pytest.fixture
def slow() -> Iterator[Slow]:
    with running(Slow()) as server:
        yield server
        server.may_answer.set()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("known", [False, True])
def test_closing_cancels_a_request_also_before_its_id_is_known(slow: Slow, known: bool) -> None:
    connection = HttpConnection(slow.url)
    handle = connection.submit(SamplingParams(prompt="a"))
    assert slow.asked.wait(10)
    if known:
        slow.may_answer.set()
        while not connection._remote:
            pass
    else:
        # The server answers between the end of the handle and that of the connection.
        handle.subscribe(lambda event: slow.may_answer.set())
    connection.close()
    with pytest.raises(ServerClosed):
        handle.result(0)
    assert slow.cancelled.is_set()
    assert set(slow.cancels) == {"/v1/requests/theirs"}


@pytest.mark.timeout(30)
def test_closing_does_not_wait_for_a_server_that_hangs_or_is_gone(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = HttpConnection(slow.url)
    slow.may_cancel.clear()
    slow.may_answer.set()
    handles = [connection.submit(SamplingParams(prompt="a")) for _ in range(3)]
    while len(connection._remote) < 3:
        pass
    began = time.monotonic()
    connection.close()
    assert time.monotonic() - began < 5, "not for each of them"
    slow.may_cancel.set()
    monkeypatch.setattr(wire_http, "_RETRY_S", 20)
    gone = HttpConnection("http://127.0.0.1:1")
    handles.append(gone.submit(SamplingParams(prompt="a")))
    assert isinstance(next(handles[-1].events()), Restarting)
    began = time.monotonic()
    gone.close()
    assert time.monotonic() - began < 10, "it is not tried once more"
    for handle in handles:
        with pytest.raises(ServerClosed):
            handle.result(0)


@pytest.mark.timeout(30)
def test_a_death_of_the_ranks_behind_the_server_is_told(slow: Slow) -> None:
    failed = Failed("theirs", QueueFull("full").info())
    slow.events = [Progress("theirs", "denoise", 1, 2), Restarting("theirs"), failed]
    slow.may_answer.set()
    connection = HttpConnection(slow.url)
    handle = connection.submit(SamplingParams(prompt="a"))
    with pytest.raises(QueueFull):
        handle.result(10)
    assert [(type(event), event.id) for event in handle.events()] == [
        (Progress, handle.id),
        (Restarting, handle.id),
        (Failed, handle.id),
    ]
    connection.close()


@pytest.mark.timeout(30)
def test_cancel_while_no_server_is_there_takes_effect_at_once() -> None:
    connection = HttpConnection("http://127.0.0.1:1")
    handle = connection.submit(SamplingParams(prompt="a"))
    assert isinstance(next(handle.events()), Restarting)
    handle.cancel()
    with pytest.raises(RequestCancelled):
        handle.result(5)
    connection.close()


@pytest.mark.timeout(30)
def test_a_proxy_whose_server_is_away_is_asked_again(slow: Slow) -> None:
    slow.events = [Failed("theirs", QueueFull("full").info())]
    slow.may_answer.set()
    slow.refusals = 1
    connection = HttpConnection(slow.url)
    with pytest.raises(QueueFull):
        connection.submit(SamplingParams(prompt="a")).result(10)
    assert slow.refusals == 0
    assert slow.ages[0] < 0.5 <= slow.ages[1], "its time limit goes on"
    with pytest.raises(QueueFull):
        connection.submit(SamplingParams(prompt="a"), age=70).result(10)
    assert 70 <= slow.ages[2] < 71
    connection.close()


@pytest.mark.timeout(30)
def test_a_time_limit_holds_while_no_server_is_there() -> None:
    connection = HttpConnection("http://127.0.0.1:1")
    with pytest.raises(DeadlineExceeded, match=r"time_limit of 0\.3 s"):
        connection.submit(SamplingParams(prompt="a", time_limit=0.3)).result(5)
    connection.close()


@pytest.mark.timeout(30)
def test_a_server_that_says_nothing_is_waited_for_as_long_as_was_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connection = HttpConnection(f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(ConnectionFailed):
            connection.wait_ready(0.3)
        assert time.monotonic() - began < 10
        connection.close()


@pytest.mark.parametrize("token", ["", "a\nb", "x" * 300])
def test_a_token_that_cannot_be_sent_is_refused(token: str) -> None:
    with pytest.raises(InvalidRequest, match="a token of"):
        HttpConnection("http://127.0.0.1:1", token)
