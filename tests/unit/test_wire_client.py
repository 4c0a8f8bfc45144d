"""A connection keeps every request until it is answered, whatever becomes of the server."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from processes import wait_until
from wire_server import PARAMS, SILENCE, Script, Server, draw, ignore, output

from diffgen.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    DiffgenError,
    InvalidRequest,
    ProtocolError,
    QueueFull,
    RequestCancelled,
    ServerClosed,
)
from diffgen.handle import GenerationHandle
from diffgen.params import ModelSpec, SamplingParams
from diffgen.wire import codec
from diffgen.wire.client import Connection
from diffgen.wire.messages import (
    Abort,
    Aborted,
    Accepted,
    Bye,
    Cancel,
    Closing,
    Failed,
    GetStatus,
    Hello,
    Ping,
    Progress,
    Received,
    RequestStatus,
    Restarting,
    Result,
    Status,
    Submit,
    Welcome,
)

Serve = Callable[..., Server]
Connect = Callable[..., Connection]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


@pytest.fixture
def serve(address: str, model: ModelSpec) -> Iterator[Serve]:
    servers: list[Server] = []

    def start(script: Script = draw, epoch: str = "one") -> Server:
        servers.append(Server(address, model, script, epoch))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def connect(address: str) -> Iterator[Connect]:
    connections: list[Connection] = []

    def start(where: str = address, **options: Any) -> Connection:
        connections.append(Connection(where, **options))
        return connections[-1]

    yield start
    for connection in connections:
        connection.close()


@pytest.fixture
def server(address: str) -> Iterator[zmq.Socket[bytes]]:
    """One that says nothing by itself."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        yield socket


def finals(handle: GenerationHandle) -> int:
    return sum(not isinstance(event, Accepted | Progress | Restarting) for event in handle.events())


def wait_lost(connection: Connection) -> None:
    """Until the connection has noticed that its server is gone."""
    deadline = time.monotonic() + 5
    while connection._lost_at is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_request_is_answered(serve: Serve, connect: Connect, model: ModelSpec) -> None:
    serve()
    connection = connect()
    assert connection.wait_ready(5) == model
    handle = connection.submit(PARAMS)
    result = handle.result(5)
    assert (result.id, result.seed, result.warnings, result.timings) == (handle.id, 3, ("w",), {"total": 0.5})
    np.testing.assert_array_equal(result.pixels, np.full((1, 1, 2, 2, 3), 3, np.uint8))
    assert [type(event).__name__ for event in handle.events()] == ["Accepted", "Progress", "GenerationResult"]


def test_every_one_of_many_connections_is_welcomed(serve: Serve, connect: Connect) -> None:
    serve()
    for _ in range(50):
        connection = connect()
        connection.wait_ready(5)
        connection.close()


def test_requests_from_many_threads_each_get_their_own_answer(serve: Serve, connect: Connect) -> None:
    server = serve()
    connection = connect()
    connection.wait_ready(5)
    wrong: list[int] = []

    def use(seed: int) -> None:
        for _ in range(10):
            pixels = connection.submit(SamplingParams(prompt="a", seed=seed)).result(10).pixels
            wrong.extend([seed] if (pixels != seed).any() else [])

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(set(server.submits())) == 80


def test_a_request_outlives_its_server(serve: Serve, connect: Connect) -> None:
    first = serve(ignore, "one")
    connection = connect()
    connection.wait_ready(5)
    handles = [connection.submit(PARAMS) for _ in range(3)]
    for handle in handles:
        assert isinstance(next(handle.events()), Accepted)
    first.close()
    wait_lost(connection)
    late = connection.submit(PARAMS)  # given while nobody is there
    second = serve(draw, "two")
    for handle in [*handles, late]:
        assert handle.result(5).seed == 3
        assert finals(handle) == 1
    assert set(second.submits()) == {handle.id for handle in [*handles, late]}
    time.sleep(0.05)
    assert len(second.submits()) == len(set(second.submits())), "each is sent once"


def test_nothing_of_a_life_follows_its_end(serve: Serve, connect: Connect) -> None:
    """What a server has said before it went is told before the request is told to start again."""

    def talk(server: Server, client: bytes, message: Submit) -> None:
        ignore(server, client, message)
        for step in range(400):
            server.router.send(client, Progress(message.id, "denoise", step + 1, 400))

    first = serve(talk, "one")
    connection = connect()
    connection.wait_ready(5)
    handle = connection.submit(PARAMS)
    assert isinstance(next(handle.events()), Accepted)
    first.close()
    wait_lost(connection)
    serve(draw, "two")
    handle.result(5)
    kinds = [type(event) for event in handle.events()]
    told = kinds.index(Restarting)
    assert kinds[told + 1] is Accepted
    assert set(kinds[1:told]) == {Progress}


def test_an_answered_request_is_not_sent_again(serve: Serve, connect: Connect) -> None:
    first = serve()
    connection = connect()
    connection.wait_ready(5)
    connection.submit(PARAMS).result(5)
    first.close()
    wait_lost(connection)
    second = serve(draw, "two")
    connection.submit(PARAMS).result(5)
    assert len(second.submits()) == 1


def test_patience_runs_out_for_what_waits_and_not_for_what_comes_later(
    serve: Serve, connect: Connect, address: str
) -> None:
    first = serve(ignore)
    connection = connect(patience=0.3)
    connection.wait_ready(5)
    sent = connection.submit(PARAMS)
    first.wait_for(Submit)
    first.close()
    wait_lost(connection)
    late = connection.submit(PARAMS)
    for handle in (sent, late):
        with pytest.raises(ConnectionFailed) as caught:
            handle.result(5)
        assert caught.value.retryable
        assert address in caught.value.message
        assert "0.3 s" in caught.value.message
    second = serve(draw, "two")
    connection.wait_ready(5)
    wait_until(lambda: connection._welcomed, 5, "the next server is heard")
    again = connection.submit(PARAMS)
    assert again.result(5).seed == 3
    assert second.submits() == [again.id]
    assert Cancel(sent.id) in second.seen, "it may still hold what was sent"
    assert Cancel(late.id) not in second.seen


def test_a_time_limit_holds_while_no_server_is_there(serve: Serve, connect: Connect) -> None:
    first = serve(ignore)
    connection = connect(patience=math.inf)
    connection.wait_ready(math.inf)
    limited = connection.submit(msgspec.structs.replace(PARAMS, time_limit=0.5))
    others = [connection.submit(msgspec.structs.replace(PARAMS, time_limit=limit)) for limit in (None, 1e15)]
    wait_until(lambda: len(first.submits()) == 3, 5, "all are sent")
    first.close()
    wait_lost(connection)
    with pytest.raises(DeadlineExceeded, match=r"time_limit of 0\.5 s"):
        limited.result(5)
    assert not any(handle.done() for handle in others)
    second = serve(draw, "two")
    assert [handle.result(math.inf).seed for handle in others] == [3, 3]
    assert Cancel(limited.id) in second.seen, "it may still hold what was sent"


def test_each_welcome_is_answered_with_what_has_no_answer_yet(
    connect: Connect, server: zmq.Socket[bytes], model: ModelSpec
) -> None:
    """By another one a server says that it has not sent all that there was to send."""
    connection = connect()
    client, *_ = server.recv_multipart()
    handle = connection.submit(PARAMS)
    for _ in range(2):
        server.send_multipart([client, *codec.encode(Ping())])
        server.send_multipart([client, *codec.encode(Welcome("one", model))])
        assert handle.id.encode() in server.recv_multipart()[2]


def test_an_answer_to_one_question_is_not_taken_for_that_to_another(
    connect: Connect, server: zmq.Socket[bytes], model: ModelSpec
) -> None:
    connection = connect()
    client, *_ = server.recv_multipart()
    server.send_multipart([client, *codec.encode(Welcome("one", model))])
    connection.wait_ready(5)
    with pytest.raises(ConnectionFailed, match="no answer"):
        connection.ask(Abort("lost"), 0.1)
    server.recv_multipart()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(connection.ask, Abort("a"), 5)
        server.recv_multipart()
        server.send_multipart([client, *codec.encode(Aborted("another", False))])
        server.send_multipart([client, *codec.encode(Aborted("a", True))])
        assert asked.result(5) == Aborted("a", True)


def test_a_status_of_a_long_queue_is_read(serve: Serve, connect: Connect) -> None:
    server = serve()
    request = RequestStatus("0" * 32, "queued", 1.0, 64, 64, 1, 1)
    server.status = Status((request,) * 60_000, {}, 1, 1.0, 60_000, 0, {}, {}, 0.1, {}, 0, {})
    assert len(bytes(codec.encode(server.status)[1])) > codec.MAX_BODY
    connection = connect()
    connection.wait_ready(5)
    assert connection.ask(GetStatus(), 30) == server.status


def test_a_fork_of_the_process_is_told_that_it_has_no_connection(serve: Serve, connect: Connect) -> None:
    serve()
    connection = connect()
    connection.wait_ready(5)
    child = os.fork()
    if child == 0:
        told = 0
        for use in (lambda: connection.submit(PARAMS), lambda: connection.ask(GetStatus(), 5)):
            with contextlib.suppress(BaseException):
                try:
                    use()
                except ConnectionFailed as error:
                    told += "fork" in error.message
        os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert connection.submit(PARAMS).result(5).seed == 3


def test_no_server_at_all_is_said(connect: Connect, address: str) -> None:
    with pytest.raises(ConnectionFailed, match="is it up") as caught:
        connect().wait_ready(0.1)
    assert address in caught.value.message


@pytest.mark.parametrize("where", ["nonsense", "tcp://", "http://127.0.0.1:1", ""])
def test_an_address_that_is_none_names_the_rule(connect: Connect, where: str) -> None:
    with pytest.raises(ConnectionFailed, match="tcp://HOST:PORT or ipc://PATH"):
        connect(where)


@pytest.mark.parametrize("token", ["", "x" * 300, "\ud800"])
def test_a_token_that_cannot_be_sent_is_refused(connect: Connect, token: str) -> None:
    with pytest.raises(DiffgenError, match="token"):
        connect("tcp://127.0.0.1:1", token=token)


def test_cancel_while_a_server_is_there_is_its_answer(serve: Serve, connect: Connect) -> None:
    server = serve(ignore)
    connection = connect()
    connection.wait_ready(5)
    handle = connection.submit(PARAMS)
    handle.cancel()
    handle.cancel()
    with pytest.raises(RequestCancelled, match="stopped"):
        handle.result(5)
    handle.cancel()
    assert finals(handle) == 1
    assert Cancel(handle.id) in server.seen


def test_cancel_while_disconnected_takes_effect_at_once_and_is_told_later(serve: Serve, connect: Connect) -> None:
    first = serve(ignore)
    connection = connect()
    connection.wait_ready(5)
    cancelled, kept = connection.submit(PARAMS), connection.submit(PARAMS)
    first.wait_for(Submit)
    first.close()
    wait_lost(connection)
    cancelled.cancel()
    with pytest.raises(RequestCancelled):
        cancelled.result(5)
    second = serve(draw, "two")
    kept.result(5)
    assert second.submits() == [kept.id]
    assert Cancel(cancelled.id) in second.seen, "the server may still hold it"


def test_a_cancel_is_not_lost_with_the_server_that_got_it(serve: Serve, connect: Connect) -> None:
    first = serve(ignore)
    connection = connect()
    connection.wait_ready(5)
    handle = connection.submit(PARAMS)
    first.wait_for(Submit)
    first._inbox.put(None)  # from here on, messages are received and nothing is done about them
    first._thread.join()
    handle.cancel()
    time.sleep(0.1)
    first.router.close(SILENCE)
    wait_lost(connection)
    second = serve(draw, "two")
    with pytest.raises(RequestCancelled):
        handle.result(5)
    assert second.submits() == []


def test_close_fails_what_is_pending_and_says_goodbye(serve: Serve, connect: Connect) -> None:
    server = serve(ignore)
    connection = connect()
    connection.wait_ready(5)
    handle = connection.submit(PARAMS)
    server.wait_for(Submit)
    connection.close()
    connection.close()
    with pytest.raises(ServerClosed):
        handle.result(0)
    with pytest.raises(ServerClosed):
        connection.submit(PARAMS)
    server.wait_for(Bye)


def test_close_without_a_server_is_quick(connect: Connect) -> None:
    connection = connect()
    handle = connection.submit(PARAMS)
    began = time.monotonic()
    connection.close()
    assert time.monotonic() - began < 2
    with pytest.raises(ServerClosed):
        handle.result(0)


def test_a_server_that_stops_on_purpose_ends_its_clients(serve: Serve, connect: Connect, address: str) -> None:
    server = serve(ignore)
    connection = connect()
    connection.wait_ready(5)
    handle = connection.submit(PARAMS)
    server.wait_for(Submit)
    server.close(Closing())
    with pytest.raises(ServerClosed, match="stopped") as caught:
        handle.result(5)
    assert address in caught.value.message


def test_an_error_comes_with_its_type(serve: Serve, connect: Connect) -> None:
    def refuse(server: Server, client: bytes, message: Submit) -> None:
        bad = InvalidRequest("size 1x1: too small", code="invalid_size", param="size")
        error = QueueFull("full") if message.params.seed else bad
        server.router.send(client, Failed(message.id, error.info()))

    server = serve(refuse)
    connection = connect()
    connection.wait_ready(5)
    with pytest.raises(QueueFull) as full:
        connection.submit(PARAMS).result(5)
    assert full.value.retryable
    with pytest.raises(InvalidRequest) as bad:
        connection.submit(SamplingParams(prompt="a", seed=0)).result(5)
    assert (bad.value.code, bad.value.param) == ("invalid_size", "size")
    confirmed = [Received(request_id) for request_id in server.submits()]
    wait_until(lambda: [each for each in server.seen if isinstance(each, Received)] == confirmed, 5, "all are told")


def test_a_question_ends_with_the_server_that_was_asked(serve: Serve, connect: Connect) -> None:
    server = serve()
    connection = connect()
    connection.wait_ready(5)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(connection.ask, GetStatus(), 60)
        server.wait_for(GetStatus)
        server.close()
        with pytest.raises(ConnectionFailed, match="has gone"):
            asked.result(10)


def test_a_result_that_does_not_fit_its_header_fails_the_request(serve: Serve, connect: Connect) -> None:
    def lie(server: Server, client: bytes, message: Submit) -> None:
        pixels = np.zeros((1, 1, 2, 2, 3), np.uint8)
        server.router.send(client, Result(message.id, output(pixels, message.params)), pixels[:, :, :1].copy())

    serve(lie)
    connection = connect()
    connection.wait_ready(5)
    with pytest.raises(ProtocolError):
        connection.submit(PARAMS).result(5)


def test_a_server_of_another_version_is_named_plainly(connect: Connect, server: zmq.Socket[bytes]) -> None:
    connection = connect()
    client, *_ = server.recv_multipart()
    server.send_multipart([client, b"DGEN\x00\x07", b"\xc1 a body that nobody here can read"])
    with pytest.raises(ProtocolError) as caught:
        connection.wait_ready(5)
    assert caught.value.code == "protocol_version"
    assert "protocol 7" in caught.value.message
    assert "install the same diffgen" in caught.value.message


def test_something_else_at_the_address_is_no_diffgen_server(connect: Connect, server: zmq.Socket[bytes]) -> None:
    connection = connect()
    client, *_ = server.recv_multipart()
    server.send_multipart([client, b"hello", b"world"])
    with pytest.raises(ProtocolError, match="not a diffgen message"):
        connection.wait_ready(5)


def test_the_first_frame_of_every_message_is_the_version(server: zmq.Socket[bytes], connect: Connect) -> None:
    connect()
    _, prefix, body = server.recv_multipart()
    assert prefix == bytes(codec.encode(Hello())[0])
    assert msgspec.msgpack.decode(body) == {"type": "Hello"}
