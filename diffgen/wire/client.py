"""A client's connection, which keeps every request until it is answered."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from diffgen import handle as handles
from diffgen.args import check_token
from diffgen.errors import (
    ConnectionFailed,
    DiffgenError,
    ProtocolError,
    RequestCancelled,
    ServerClosed,
    error_from,
)
from diffgen.handle import GenerationHandle
from diffgen.params import ModelSpec, SamplingParams
from diffgen.request import TensorHeader
from diffgen.result import GenerationResult
from diffgen.wire import codec
from diffgen.wire.dealer import HANDSHAKE_FAILED, Dealer
from diffgen.wire.mailbox import Mailbox
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
    Preview,
    Progress,
    Received,
    Restarting,
    Result,
    ServerMessage,
    Status,
    Submit,
    Welcome,
)
from diffgen.wire.router import HEARTBEAT_MS, SILENCE_MS
from diffgen.wire.unanswered import Answer, Questions, Unanswered, out_of_time

if TYPE_CHECKING:
    from numpy.typing import NDArray

_OPTIONS = {
    zmq.LINGER: 500,
    # A host that is gone without a word ends the connection too.
    zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
    zmq.HEARTBEAT_TIMEOUT: SILENCE_MS,
    zmq.RECONNECT_IVL_MAX: 1000,
}

_LONGEST_POLL_MS = 3_600_000  # of what the poll takes as a C integer


class Connection:
    """One client's socket and the requests that it waits for. Every method may be called from any thread.

    After a lost connection it says hello again and sends its unanswered requests again under the same ids, so that
    they survive a network fault or a restarted server; a request for which no server is there for ``patience`` seconds
    fails with :class:`ConnectionFailed`, and a later one may fare better.
    """

    def __init__(self, address: str, token: str | None = None, patience: float = 30.0) -> None:
        if token is not None:
            check_token(token)
        self.address = address
        self.patience = patience
        self._unanswered = Unanswered()
        self._questions = Questions()
        self._sent: set[str] = set()  # since the last Welcome
        self._cancelled: set[str] = set()  # asked for and not yet answered
        self._outgoing: Mailbox[msgspec.Struct | tuple[GetStatus | Abort, Answer] | None] = Mailbox()
        self._spec: ModelSpec | None = None
        self._settled = threading.Event()  # welcomed, or ended
        self._welcomed = False
        self._lost_at: float | None = time.monotonic()  # since when no server has been heard; None while welcomed
        self._decoder = codec.server_message_decoder()
        try:
            self._dealer = Dealer(address, _OPTIONS, token)
        except zmq.ZMQError as error:
            self._outgoing.close()
            raise ConnectionFailed(f"cannot connect to {address!r}: {error}; {_ADDRESS_RULE}") from None
        self._socket = self._dealer.socket
        self._thread = threading.Thread(target=self._run, name="diffgen-connection", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout: float) -> ModelSpec:
        """What the server serves, once it has welcomed this client.

        Raises :class:`ConnectionFailed` after ``timeout`` seconds, or what ended the connection.
        """
        if not self._settled.wait(handles.waitable(timeout)):
            error = ConnectionFailed(f"no diffgen server answered at {self.address} within {timeout:g} s; is it up?")
            self.end(error)
            raise error
        self._unanswered.check()
        assert self._spec is not None
        return self._spec

    def submit(self, params: SamplingParams, age: float = 0.0) -> GenerationHandle:
        """Send a request, for which somebody has waited ``age`` seconds. Raises what ended the connection, if it has
        ended."""
        handle = self._unanswered.begin(params, self.cancel, age)
        self._outgoing.put(Submit(handle.id, params, age))
        return handle

    def cancel(self, request_id: str) -> None:
        """Ask the server to cancel. The handle ends when the server says so, or at once if no server is there."""
        self._outgoing.put(Cancel(request_id))

    def ask(self, question: GetStatus | Abort, timeout: float) -> Status | Aborted:
        """The server's answer. Raises :class:`ConnectionFailed` after ``timeout`` s, or what ended the connection."""
        self._unanswered.check()
        answer = Answer()
        self._outgoing.put((question, answer))
        try:
            return answer.result(handles.waitable(timeout))
        except TimeoutError:
            remedy = "give it more time"
            if isinstance(question, Abort):
                remedy = f"the request ends with the present unit of work, whose end the answer waits for; {remedy}"
            raise ConnectionFailed(f"no answer from {self.address} within {timeout:g} s; {remedy}") from None

    def end(self, error: DiffgenError) -> None:
        """Fail every pending request, and every later one, with ``error``."""
        self._unanswered.end(error)
        self._settled.set()

    def close(self) -> None:
        """Say goodbye, which cancels what is pending, and close the socket."""
        self.end(ServerClosed("the connection was closed by this client"))
        self._outgoing.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            # The border of the thread: without it nobody would answer those who wait.
            self.end(ConnectionFailed(f"the connection to {self.address} broke: {type(error).__name__}: {error}"))
            raise
        finally:
            self._dealer.close()
            self._outgoing.close()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._outgoing.fileno(), zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._dealer.monitor, zmq.POLLIN)
        while True:
            ready = {source for source, _ in poller.poll(self._poll_ms())}
            if self._socket in ready:
                self._on_frames(self._socket.recv_multipart(copy=False))
            if self._dealer.monitor in ready:
                self._on_network(self._dealer.event())
            if self._outgoing.fileno() in ready and not self._send_waiting():
                break
            self._give_up()

    def _given_up(self, handle: GenerationHandle) -> tuple[float, DiffgenError]:
        """When, unless a server is heard before, and with what."""
        assert self._lost_at is not None
        none_there = ConnectionFailed(f"no server has answered at {self.address} for {self.patience:g} s")
        patient = max(self._lost_at, handle.created) + self.patience
        return (handle.late_at, out_of_time(handle)) if handle.late_at < patient else (patient, none_there)

    def _poll_ms(self) -> int | None:
        waiting = [] if self._lost_at is None else self._unanswered.all()
        until = min((self._given_up(handle)[0] for handle in waiting), default=math.inf)
        return None if until == math.inf else min(_LONGEST_POLL_MS, max(0, int(1000 * (until - time.monotonic()))) + 10)

    def _give_up(self) -> None:
        """Fail what has waited too long for a server."""
        now = time.monotonic()
        for handle in [] if self._lost_at is None else self._unanswered.all():
            when, error = self._given_up(handle)
            if when < now:
                if handle.id in self._sent:
                    self._cancelled.add(handle.id)  # a server may still hold it, and hears later
                self._unanswered.fail(handle.id, error)

    def _on_network(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._send(Hello())
        elif event == zmq.EVENT_DISCONNECTED:
            # What the server said before it went; the next says nothing before it has had a Hello.
            while self._socket.poll(0):
                self._on_frames(self._socket.recv_multipart(copy=False))
            self._welcomed = False
            self._fail_questions(f"the server at {self.address} has gone")
            if self._lost_at is None:
                self._lost_at = time.monotonic()
                self._tell_restarting()
        elif event & HANDSHAKE_FAILED:
            remedy = "give the token that the server was started with, or none where it has none"
            refusal = f"{self.address} refused this client; {remedy}"
            self.end(ConnectionFailed(refusal, code="unauthorized", retryable=False))

    def _tell_restarting(self) -> None:
        for handle in self._unanswered.all():
            handle.publish(Restarting(handle.id))

    def _send_waiting(self) -> bool:
        for message in self._outgoing.take():
            if message is None:
                self._fail_questions("the connection was closed by this client")
                if self._welcomed:
                    self._send(Bye())
                return False
            if isinstance(message, tuple):
                self._send_question(*message)
                continue
            if isinstance(message, Cancel):
                self._cancelled.add(message.id)
            if isinstance(message, Cancel) and not self._welcomed:
                self._end_cancelled(message.id)
            if isinstance(message, Submit):
                self._send_request(message)
            elif self._welcomed:
                self._send(message)
        return True

    def _send_question(self, question: GetStatus | Abort, answer: Answer) -> None:
        self._questions.add(question, answer)
        if self._welcomed:
            self._send(question)
        else:
            self._fail_questions(f"no server is connected at {self.address}")

    def _fail_questions(self, reason: str) -> None:
        self._questions.fail(ConnectionFailed(reason))

    def _send_request(self, message: Submit) -> None:
        """Send it unless it has ended, has just been sent, or must wait for the next Welcome, which sends it."""
        if self._welcomed and self._unanswered.get(message.id) is not None and message.id not in self._sent:
            self._sent.add(message.id)
            self._send(message)

    def _end_cancelled(self, request_id: str) -> None:
        """End a cancelled request here, where no server is there to do it; one may still hold it, and hears later."""
        self._unanswered.fail(request_id, RequestCancelled("cancelled by its owner while no server was connected"))

    def _send(self, message: msgspec.Struct) -> None:
        with contextlib.suppress(zmq.ZMQError):  # a lost peer shows as a network event
            self._socket.send_multipart(codec.encode(message))

    def _on_frames(self, frames: list[zmq.Frame]) -> None:
        try:
            message = codec.decode(frames, self._decoder, max_body=codec.MAX_ANSWER)
            self._on_message(message, frames[2:])
        except codec.VersionMismatch as error:
            self.end(error)
        except ProtocolError as error:
            remedy = "is it a server of the same diffgen?"
            self.end(ProtocolError(f"{self.address} said what cannot be read: {error.message}; {remedy}"))

    def _on_message(self, message: ServerMessage, tensors: list[zmq.Frame]) -> None:
        match message:
            case Welcome():
                self._spec, self._welcomed, self._lost_at = message.model, True, None
                for request_id in self._cancelled:
                    self._end_cancelled(request_id)
                    self._send(Cancel(request_id))
                self._cancelled.clear()
                self._sent.clear()
                for handle in self._unanswered.all():
                    self._send_request(Submit(handle.id, handle.params, time.monotonic() - handle.created))
                self._settled.set()
            case Ping():
                pass
            case Closing():
                self.end(ServerClosed(f"the server at {self.address} was stopped"))
            case Failed(id=""):
                self.end(error_from(message.error))
            case Accepted() | Progress() | Restarting():
                waiting = self._unanswered.get(message.id)
                if waiting is not None:
                    waiting.publish(message)
            case Failed():
                self._send(Received(message.id))
                failed = self._take(message.id)
                if failed is not None:
                    failed.publish(message, error_from(message.error))
            case Status() | Aborted():
                self._questions.tell(message)
            case Preview():
                pixels = _only_array(message.tensor, tensors)
                shown = self._unanswered.get(message.id)
                if shown is not None:
                    shown.publish(handles.Preview(message.id, message.step, message.total, pixels))
            case Result():
                self._on_result(message, tensors)

    def _on_result(self, message: Result, tensors: list[zmq.Frame]) -> None:
        pixels = _only_array(message.output.tensor, tensors)
        self._send(Received(message.id))
        handle = self._take(message.id)
        if handle is not None:
            model = "" if self._spec is None else self._spec.name
            handle.publish(GenerationResult.from_output(message.id, message.output, pixels, model))

    def _take(self, request_id: str) -> GenerationHandle | None:
        self._cancelled.discard(request_id)
        self._sent.discard(request_id)
        return self._unanswered.take(request_id)


def _only_array(header: TensorHeader, tensors: list[zmq.Frame]) -> NDArray[Any]:
    if len(tensors) != 1:
        raise ProtocolError(f"{len(tensors)} tensors where a message has one")
    return codec.array(header, tensors[0])


_ADDRESS_RULE = "an address is tcp://HOST:PORT or ipc://PATH, or http://HOST:PORT of diffgen serve"
