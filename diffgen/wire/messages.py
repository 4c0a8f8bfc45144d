"""Every message on the socket between a client and rank 0.

A client says :class:`Hello` on each connection and sends its unanswered requests again after each :class:`Welcome`;
rank 0 drops the ids it already holds. Each accepted :class:`Submit` is answered by exactly one :class:`Result` or
:class:`Failed`, after any number of :class:`Progress`, :class:`Preview` and :class:`Restarting`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from diffgen.errors import ErrorInfo
from diffgen.params import ModelSpec, SamplingParams
from diffgen.request import OutputBatch, TensorHeader

PROTOCOL_VERSION = 1

MAX_ID = 64

RequestId = Annotated[str, Meta(min_length=1, max_length=MAX_ID)]


def can_be_id(text: str) -> bool:
    """Whether a request may have this id. A message with another is dropped, and has no answer."""
    return 1 <= len(text) <= MAX_ID and not any("\ud800" <= char <= "\udfff" for char in text)


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Hello(_Message, frozen=True):
    """First message of a client on every connection."""


class Submit(_Message, frozen=True):
    """Generate. ``id`` is the client's own choice and must be unique; a UUID is.

    ``age`` is seconds since the request was first sent; they count as part of its time limit.
    """

    id: RequestId
    params: SamplingParams
    age: Annotated[float, Meta(ge=0)] = 0.0


class Cancel(_Message, frozen=True):
    """Take a request back, whatever its state; an unknown id is not an error."""

    id: RequestId


class Received(_Message, frozen=True):
    """The client has the answer to this request, which the server need not keep any longer."""

    id: RequestId


class Bye(_Message, frozen=True):
    """The client leaves: its requests are cancelled and nothing more is sent to it."""


class GetStatus(_Message, frozen=True):
    """Ask what the server has in work; answered by :class:`Status`."""


class Abort(_Message, frozen=True):
    """End a request of any client; answered by :class:`Aborted`, and to its owner by :class:`Failed`."""

    id: RequestId


ClientMessage = Hello | Submit | Cancel | Received | Bye | GetStatus | Abort


class Gone(msgspec.Struct, frozen=True):
    """Never sent: how the server's socket tells that a client's connection has ended."""


class Welcome(_Message, frozen=True):
    """Answer to :class:`Hello`. ``epoch`` is new with every start of the server."""

    epoch: str
    model: ModelSpec


class Accepted(_Message, frozen=True):
    """The request is valid and queued.

    As things stand, ``ahead`` requests go before it, and it ends in ``eta`` seconds: None while nothing is known yet of
    the time that steps take.
    """

    id: RequestId
    ahead: int
    params: SamplingParams
    warnings: tuple[str, ...]
    eta: float | None = None


class Progress(_Message, frozen=True):
    """``step`` of ``total`` units of ``stage`` are done; ``eta`` is as in :class:`Accepted`."""

    id: RequestId
    stage: str
    step: int
    total: int
    eta: float | None = None


class Preview(_Message, frozen=True):
    """What the output is going to be after ``step`` of ``total`` denoising steps; its tensor is in the frame beside
    this message: uint8 (outputs, latent frames, h, w, 3), a pixel for each of the latents'."""

    id: RequestId
    step: int
    total: int
    tensor: TensorHeader


class Restarting(_Message, frozen=True):
    """What had the request in work has gone: the server, as its client's own connection says, or of several replicas
    one. The request is kept and runs again from its seed, which a further :class:`Accepted` tells."""

    id: RequestId


class Result(_Message, frozen=True):
    """The output; its tensor is in the frame beside this message."""

    id: RequestId
    output: OutputBatch


class Failed(_Message, frozen=True):
    """The request ended with an error. An empty id speaks of the connection as a whole."""

    id: Annotated[str, Meta(max_length=MAX_ID)]
    error: ErrorInfo


class RequestStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request in work. ``step`` of ``total`` units of ``stage`` are done; a queued one has no stage yet.

    ``ahead`` and ``eta`` are as in :class:`Accepted`; ``time_left`` is seconds to its time limit.
    """

    id: str
    state: Literal["queued", "running"]
    seconds: float  # since it arrived
    width: int
    height: int
    num_frames: int
    outputs: int
    stage: str = ""
    step: int = 0
    total: int = 0
    priority: Literal["interactive", "batch"] = "interactive"
    ahead: int = 0
    eta: float | None = None
    time_left: float | None = None


class Status(_Message, frozen=True):
    """What the server has in work, oldest first, and what it has done since its start.

    Attributes:
        finished: ended requests by outcome: "done" or an error code.
        ticks, seconds: since this epoch began.
        queued, running: requests in work.
        units: of each stage that have run for a request; one that several share counts for each.
        batches: shared and single units by the number of requests in them.
        tick_seconds: all ticks together.
        refused: requests that were not accepted, by error code.
        restarts: how often the ranks have been started again.
        text_cache: "hits" and "misses" of encoded texts, and the "bytes" of those that each rank keeps.
        malformed: messages that could not be read.
        unread: messages that have come and are looked at once the present unit has ended.
    """

    requests: tuple[RequestStatus, ...]
    finished: dict[str, int]
    ticks: int
    seconds: float
    queued: int
    running: int
    units: dict[str, int]
    batches: dict[int, int]
    tick_seconds: float
    refused: dict[str, int]
    restarts: int
    text_cache: dict[str, int]
    malformed: int = 0
    unread: int = 0


class Aborted(_Message, frozen=True):
    """Answer to :class:`Abort`; not ``found`` where no such request is in work."""

    id: RequestId
    found: bool


class Ping(_Message, frozen=True):
    """Sent to every client every few seconds, to learn whether its connection is still there; needs no answer."""


class Closing(_Message, frozen=True):
    """The server stops on purpose; unanswered requests will not be answered."""


ServerMessage = (
    Welcome | Accepted | Progress | Preview | Restarting | Result | Failed | Status | Aborted | Ping | Closing
)
