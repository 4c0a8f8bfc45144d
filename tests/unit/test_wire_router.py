"""Rank 0's socket against everything that may arrive at it."""

from __future__ import annotations

import os
import pickle
import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from processes import wait_until
from proxy import Proxy
from raw_client import PREFIX, Raw

from diffgen.args import ListenArgs
from diffgen.errors import ConnectionFailed, GenerationError, StartFailed
from diffgen.params import ModelSpec, SamplingParams
from diffgen.request import OutputBatch, TensorHeader
from diffgen.server.outbox import KEEP_BYTES, KEEP_S, WRITE_S, Outbox
from diffgen.wire import codec
from diffgen.wire.client import Connection
from diffgen.wire.messages import (
    PROTOCOL_VERSION,
    Bye,
    Cancel,
    Closing,
    Failed,
    Gone,
    Hello,
    Ping,
    Progress,
    Received,
    Result,
    Submit,
    Welcome,
)
from diffgen.wire.router import Router

TOKEN = "s3cret"


class Served:
    """A router on a private ipc path and on tcp, with a thread that welcomes whoever says hello."""

    def __init__(self, folder: Path, model: ModelSpec) -> None:
        self.private = f"ipc://{folder}/s"
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.router = Router(self.private, ListenArgs(address="tcp://127.0.0.1:*", token=TOKEN), self.inbox)
        self.seen: list[Any] = []
        self._model = model
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        while (item := self.inbox.get()) is not None:
            client, message = item
            self.seen.append(message)
            if isinstance(message, Hello):
                self.router.send(client, Welcome("epoch", self._model))
            elif isinstance(message, Submit | Bye):
                self.router.send(client, Progress("a", "denoise", 1, 2))

    def close(self) -> None:
        self.inbox.put(None)
        self._thread.join()
        self.router.close(Closing())


@pytest.fixture
def served(tmp_path: Path, model: ModelSpec) -> Iterator[Served]:
    server = Served(tmp_path, model)
    yield server
    server.close()


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_malformed_messages_are_counted_and_nothing_else(served: Served, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    bad: list[tuple[bytes, ...]] = [
        (b"",),
        (b"x",),
        (b"\0" * 1000,),
        (b"HTTP/1", b"x"),
        (b"",) * 50,
        (b"", b""),
        (PREFIX,),
        (PREFIX, b""),
        (PREFIX, b"\xc1"),
        (PREFIX, pickle.dumps(Evil(marker))),
        (pickle.dumps(Evil(marker)),),
        (PREFIX, msgspec.msgpack.encode(Hello()), b"a third frame"),
        (PREFIX, msgspec.msgpack.encode({"type": "Shutdown"})),
        (PREFIX, msgspec.msgpack.encode(Closing())),
        (PREFIX, b"\x91" * 50_000),
    ]
    with Raw(served.private) as client:
        for frames in bad:
            client.send(*frames)
        assert isinstance(client.hello(), Welcome), "the same client is served after all that"
    assert served.router.malformed == len(bad)
    assert served.seen == [Hello()]
    assert not marker.exists()


def test_a_request_with_unknown_fields_is_answered_where_its_id_can_be_read(served: Served) -> None:
    with Raw(served.private) as client:
        client.send(PREFIX, msgspec.msgpack.encode({"type": "Submit", "id": "mine", "prompt": "a"}))
        answer = client.answer()
    assert isinstance(answer, Failed)
    assert (answer.id, answer.error.code) == ("mine", "invalid_request")
    assert "prompt" in answer.error.message
    assert served.seen == []


def test_a_client_of_another_version_is_told(served: Served) -> None:
    with Raw(served.private) as client:
        client.send(b"DGEN" + (PROTOCOL_VERSION + 1).to_bytes(2, "big"), b"whatever they say there")
        answer = client.answer()
        assert isinstance(answer, Failed)
        assert answer.id == ""
        assert answer.error.code == "protocol_version"
        assert f"protocol {PROTOCOL_VERSION + 1}" in answer.error.message
        assert isinstance(client.hello(), Welcome)


def test_an_oversized_message_costs_its_sender_the_connection(served: Served) -> None:
    with Raw(served.private) as client, Raw(served.private) as other:
        client.send(PREFIX, b"x" * (codec.MAX_BODY + 1))
        assert isinstance(other.hello(), Welcome)
        client.hello(seconds=0.5)  # which comes after it, or not at all
    assert served.router.malformed == 0, "it has not been read, so it has taken no memory"


def test_the_largest_request_that_clients_may_make_fits(served: Served) -> None:
    # Three bytes a character, and as many texts as there are.
    text = "猫" * (2**19 // 3)
    request = Submit("a", SamplingParams(prompt=text, negative_prompt=text, size=text, scheduler=text))
    with Raw(served.private) as client:
        client.send(*(bytes(frame) for frame in codec.encode(request)))
        assert isinstance(client.answer(), Progress)
    assert served.seen == [request]


def test_stray_bytes_of_a_port_scanner_do_no_harm(served: Served) -> None:
    host, _, port = served.router.address.removeprefix("tcp://").partition(":")
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00PLAIN" + b"\0" * 15
    for data in (b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(4096), greeting[:10], greeting, b"\xff" * 5000):
        with socket.create_connection((host, int(port))) as stray:
            stray.sendall(data)
    with Raw(served.router.address, TOKEN) as client:
        assert isinstance(client.hello(), Welcome)
    assert served.seen == [Hello()]


@pytest.mark.parametrize("token", [None, "wrong", TOKEN + "x"])
def test_tcp_without_the_token_is_refused(served: Served, token: str | None) -> None:
    with Raw(served.router.address, token) as client:
        assert client.hello(seconds=0.3) is None
    with Raw(served.router.address, TOKEN) as client:
        assert isinstance(client.hello(), Welcome)
    assert served.seen == [Hello()]


def test_the_private_socket_needs_no_token(served: Served) -> None:
    with Raw(served.private) as client:
        assert isinstance(client.hello(), Welcome)


def test_a_connection_with_the_token_is_welcomed(served: Served, model: ModelSpec) -> None:
    connection = Connection(served.router.address, TOKEN)
    try:
        assert connection.wait_ready(5) == model
    finally:
        connection.close()


def test_what_is_told_of_this_machine_stays_on_it(served: Served) -> None:
    failed = Failed("a", GenerationError("denoise failed: no /srv/my models/x").info())
    for address, token, told in (
        (served.private, None, "no /srv/my models/x"),
        (served.router.address, TOKEN, "no (path)"),
    ):
        with Raw(address, token, {zmq.IDENTITY: b"client"}) as client:
            assert isinstance(client.hello(), Welcome)
            served.router.send(b"client", failed)
            assert client.answer().error.message == f"denoise failed: {told}"


@pytest.mark.parametrize("token", ["wrong", None])
def test_a_connection_without_the_token_hears_why_at_once(served: Served, token: str | None) -> None:
    connection = Connection(served.router.address, token)
    try:
        with pytest.raises(ConnectionFailed, match="token") as caught:
            connection.wait_ready(5)
        assert (caught.value.code, caught.value.retryable) == ("unauthorized", False)
        assert served.router.address in caught.value.message
    finally:
        connection.close()


def test_nothing_is_sent_to_a_client_after_its_bye(served: Served) -> None:
    with Raw(served.private) as client:
        assert isinstance(client.hello(), Welcome)
        client.send(*(bytes(frame) for frame in codec.encode(Bye())))
        assert client.answer(seconds=0.2) is None


def test_a_client_that_left_does_not_stop_the_others(served: Served) -> None:
    with Raw(served.private) as gone:
        gone.hello()
        gone.send(*(bytes(frame) for frame in codec.encode(Submit("a", SamplingParams(prompt="a")))))
    with Raw(served.private) as client:
        assert isinstance(client.hello(), Welcome)


def test_a_client_that_does_not_read_holds_up_nobody_and_loses_nothing(served: Served) -> None:
    with Raw(served.private, options={zmq.RCVHWM: 1}) as slow, Raw(served.private) as client:
        assert isinstance(slow.hello(), Welcome)
        (identity,) = served.router._owner
        count = 20_000  # many times what sockets take unread
        for step in range(count):
            served.router.send(identity, Progress("a", "denoise", step, count))
        assert isinstance(client.hello(), Welcome)
        assert [slow.answer().step for _ in range(count)] == list(range(count))


def test_a_client_that_comes_back_before_its_old_connection_is_seen_to_end(served: Served) -> None:
    options: dict[int, int | bytes] = {zmq.IDENTITY: b"client"}
    with Raw(served.private, options={**options, zmq.RECONNECT_IVL: -1}) as old:
        assert isinstance(old.hello(), Welcome)
        with Raw(served.private, options=options) as new:
            assert isinstance(new.hello(), Welcome)


def test_every_client_hears_the_farewell(tmp_path: Path, model: ModelSpec) -> None:
    served = Served(tmp_path, model)
    with Raw(served.private) as first, Raw(served.router.address, TOKEN) as second:
        first.hello()
        second.hello()
        served.close()
        assert isinstance(first.answer(), Closing)
        assert isinstance(second.answer(), Closing)


def test_a_taken_address_is_an_error_that_names_it(served: Served, tmp_path: Path) -> None:
    private = f"ipc://{tmp_path}/other"
    with pytest.raises(StartFailed) as caught:
        Router(private, ListenArgs(address=served.router.address, token="t"), queue.SimpleQueue())
    assert caught.value.code == "address_in_use"
    assert served.router.address in caught.value.message


def test_the_path_of_a_live_server_is_not_taken_over(served: Served) -> None:
    with pytest.raises(StartFailed, match="another server"):
        Router(served.private, ListenArgs(), queue.SimpleQueue())
    with Raw(served.private) as client:
        assert isinstance(client.hello(), Welcome)


def test_a_client_that_vanishes_is_forgotten(served: Served) -> None:
    with Raw(served.private) as stays:
        with Raw(served.private) as leaves:
            assert isinstance(stays.hello(), Welcome)
            assert isinstance(leaves.hello(), Welcome)
            assert len(served.router._owner) == 2
        deadline = time.monotonic() + 10
        while not any(isinstance(message, Gone) for message in served.seen):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(served.router._owner) == 1
        assert isinstance(stays.hello(), Welcome)


def test_an_answer_is_kept_until_its_client_has_it(served: Served) -> None:
    now = 0.0
    outbox = Outbox(served.router, clock=lambda: now)
    submit = Submit("a", SamplingParams(prompt="p"))
    with Raw(served.private) as client:
        client.hello()
        (identity,) = served.router._owner
        outbox.send(identity, _result("a"), np.zeros(3, np.uint8))
        assert isinstance(client.answer(), Result)
        assert not outbox.take(b"another", submit), "ids of other clients are not told apart by chance"
        assert outbox.take(identity, submit)
        assert isinstance(client.answer(), Result), "once more"
        assert outbox.take(identity, Received("a"))
        assert not outbox.take(identity, submit), "it has been given up"
        failed = Failed("a", GenerationError("by design").info())
        outbox.send(identity, failed)
        assert client.answer() == failed
        assert outbox.take(identity, submit)
        assert client.answer() == failed, "once more"
        assert outbox.take(identity, Received("a"))
        outbox.send(identity, _result("a"), np.zeros(3, np.uint8))
        assert isinstance(client.answer(), Result)
        assert not outbox.take(b"another", Cancel("a"))
        assert outbox.take(identity, Cancel("a")), "the result is no longer wanted"
        assert not outbox.take(identity, Cancel("a")), "once more, of what has failed"
        assert outbox.take(identity, submit)
        assert client.answer().error.code == "request_cancelled"
    for leaves in (Bye(), None):
        outbox.send(b"gone", _result("a"), np.zeros(3, np.uint8))
        if leaves is None:
            now += KEEP_S - 1
            assert outbox.tend() == 1
            now += 1
            assert outbox.tend() is None
        else:
            outbox.take(b"gone", leaves)
        assert not outbox.take(b"gone", submit)
    for client in (b"one", b"two"):
        outbox.send(client, Failed("same", GenerationError("by design").info()))
    assert outbox.take(b"one", Submit("same", submit.params)), "that of another client does not take its place"
    assert outbox.take(b"two", Submit("same", submit.params))
    for name in "abc":
        outbox.send(b"gone", _result(name), np.zeros(KEEP_BYTES // 2 - 10_000, np.uint8))
    outbox.send(b"gone", _result("large"), np.zeros(KEEP_BYTES, np.uint8))
    held = [name for name in "abc" if outbox.take(b"gone", Submit(name, submit.params))]
    assert held == ["b", "c"], "as many bytes as may be, the newest"


def test_an_answer_outlives_the_process_that_made_it(served: Served, tmp_path: Path) -> None:
    now, folder, pixels = 0.0, tmp_path / "answers", np.array([1, 2, 3], np.uint8)

    def outbox() -> Outbox:
        """That of the next process."""
        return Outbox(served.router, folder, lambda: now)

    first = outbox()
    failed = Failed("../b", GenerationError("by design").info())
    with Raw(served.private) as client:
        client.hello()
        (identity,) = served.router._owner
        first.send(identity, _result("a"), pixels)
        first.send(identity, failed)
        first.send(identity, _result("confirmed"), pixels)
        for _ in range(3):
            client.answer()
        assert first.take(identity, Received("confirmed"))
        assert first.tend() == WRITE_S
        assert list(folder.iterdir()) == [], "most are confirmed before they are written"
        now += WRITE_S
        assert first.tend() == KEEP_S - WRITE_S
        wait_until(lambda: len(_whole(folder)) == 2, 10, "both are written")
        (folder / "torn.part").write_bytes(b"x")
        second = outbox()
        assert not second.take(b"another", Submit("a", SamplingParams(prompt="p")))
        assert not second.take(identity, Submit("confirmed", SamplingParams(prompt="p")))
        assert second.take(identity, Submit("a", SamplingParams(prompt="p")))
        assert (client.answer(), client.tensors) == (_result("a"), [pixels.tobytes()])
        assert second.take(identity, Submit("../b", SamplingParams(prompt="p")))
        assert client.answer() == failed
        assert second.take(identity, Received("a"))
        wait_until(lambda: len(_whole(folder)) == 1, 10, "its file is removed")
        third = outbox()
        assert not third.take(identity, Submit("a", SamplingParams(prompt="p"))), "it was confirmed to the second"
        now += KEEP_S
        assert third.tend() is None
    wait_until(lambda: list(folder.iterdir()) == [], 10, "nothing is left")


def test_damaged_files_are_passed_over_and_removed(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now, folder, pixels = 0.0, tmp_path / "answers", np.array([1, 2, 3], np.uint8)
    first = Outbox(served.router, folder, lambda: now)
    first.send(b"away", _result("a"), pixels)
    now += WRITE_S
    first.tend()
    wait_until(lambda: _whole(folder), 10, "it is written")
    (good,) = _whole(folder)
    data = good.read_bytes()
    damaged = [b"", data[:3], data[: len(data) // 2], data[:-1], data + b"x", bytes(len(data)), os.urandom(100)]
    for number, each in enumerate(damaged):
        (folder / f"{number}").write_bytes(each)
    second = Outbox(served.router, folder, lambda: now)
    assert _whole(folder) == [good]
    assert sum("cannot be read" in record.message for record in caplog.records) == len(damaged)
    assert second.take(b"away", Submit("a", SamplingParams(prompt="p")))


def test_an_answer_given_up_while_it_is_written_leaves_no_file(served: Served, tmp_path: Path) -> None:
    now, folder = 0.0, tmp_path / "answers"
    outbox = Outbox(served.router, folder, lambda: now)
    for number in range(8):  # each takes a while to write, so most are given up before their turn
        outbox.send(b"away", _result(f"{number}"), np.zeros(2**24, np.uint8))
    now += WRITE_S
    outbox.tend()
    for number in range(8):
        outbox.take(b"away", Received(f"{number}"))
    outbox.send(b"away", _result("last"), np.zeros(3, np.uint8))
    now += WRITE_S
    outbox.tend()
    wait_until(lambda: len(list(folder.iterdir())) == 1 and _whole(folder), 10, "all but the last are removed")
    assert outbox.take(b"away", Received("last"))
    outbox.send(b"away", _result("too large"), np.zeros(KEEP_BYTES, np.uint8))
    now += WRITE_S
    assert outbox.tend() is None, "it is not kept"
    wait_until(lambda: list(folder.iterdir()) == [], 10, "and that")


def _whole(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix != ".part"]


class _Answers:
    """A server that has whatever is kept in a folder, and makes nothing new."""

    def __init__(self, folder: Path, address: str, model: ModelSpec, epoch: str) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.router = Router(f"ipc://{folder}/{epoch}", ListenArgs(address=address, token=TOKEN), self.inbox)
        self.outbox = Outbox(self.router, folder / "answers")
        self.submits: list[tuple[bytes, Submit]] = []
        self._model, self._epoch = model, epoch
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while (item := self.inbox.get()) is not None:
            client, message = item
            if isinstance(message, Hello):
                self.router.send(client, Welcome(self._epoch, self._model))
            elif not self.outbox.take(client, message) and isinstance(message, Submit):
                self.submits.append((client, message))

    def close(self) -> None:
        self.inbox.put(None)
        self._thread.join()
        self.router.close(Ping())  # no farewell: it has died


def test_a_client_that_was_away_gets_its_result_from_the_next_server(tmp_path: Path, model: ModelSpec) -> None:
    first = _Answers(tmp_path, "tcp://127.0.0.1:*", model, "first")
    with Proxy(first.router.address) as proxy:
        connection = Connection(proxy.address, TOKEN)
        connection.wait_ready(10)
        handle = connection.submit(SamplingParams(prompt="p"))
        wait_until(lambda: first.submits, 10, "it has come")
        ((client, submit),) = first.submits
        proxy.cut()
        first.outbox.send(client, _result(submit.id), np.array([7, 8, 9], np.uint8))
        time.sleep(WRITE_S)
        first.outbox.tend()
        wait_until(lambda: _whole(tmp_path / "answers"), 10, "it is written")
        first.close()
        second = _Answers(tmp_path, first.router.address, model, "second")
        proxy.mend()
        assert np.array_equal(handle.result(20).raw, [7, 8, 9])
        wait_until(lambda: not list((tmp_path / "answers").iterdir()), 10, "it is confirmed")
        assert second.submits == [], "it did not run again"
        connection.close()
        second.close()


def test_what_waits_for_a_client_that_does_not_read_has_a_limit(
    tmp_path: Path, model: ModelSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In bytes, and in small messages; others are served meanwhile. When it reads again, it is welcomed once more."""
    monkeypatch.setattr("diffgen.wire.router.MOST_WAITING", 2**22)
    monkeypatch.setattr("diffgen.wire.router._MOST_MESSAGES", 1000)
    monkeypatch.setattr("diffgen.wire.router._PING_S", 0.1)
    served, many = Served(tmp_path, model), 20_000
    large = np.zeros(2**20, np.uint8)
    for content, most in (((_result("a"), large), 4 + 3), ((Progress("a", "denoise", 1, 2),), many - 1)):
        with (
            Raw(served.private, None, {zmq.RCVHWM: 1, zmq.RCVBUF: 4096}) as slow,
            Raw(served.private) as other,
        ):
            slow.hello()
            (client,) = served.router._owner
            for _ in range(30 if len(content) == 2 else many):
                served.router.send(client, *content)
            wait_until(lambda: any(each.behind for each in served.router._owner.values()), 30, "it is sent no more")
            assert served.router._owner[client].waiting() <= 2**22
            assert isinstance(other.hello(), Welcome)
            hellos = served.seen.count(Hello())
            read = 0
            while not isinstance(slow.answer(), Welcome):
                read += 1
            assert 1 <= read <= most
            assert served.seen.count(Hello()) == hellos + 1
        wait_until(lambda: not served.router._owner, 10, "both are forgotten")
        assert ["more is not sent" in caplog.text, "reads again" in caplog.text] == [True, True]
        caplog.clear()
    served.close()


def _result(request_id: str) -> Result:
    output = OutputBatch(
        params=SamplingParams(prompt="p", seed=1),
        seeds=(1,),
        warnings=(),
        timings={},
        peak_memory_mb=0.0,
        latent=False,
        tensor=TensorHeader("uint8", (3,)),
    )
    return Result(request_id, output)
