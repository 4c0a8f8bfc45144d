"""What ended requests, kept until their clients have it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import queue
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from diffgen.errors import ProtocolError, RequestCancelled
from diffgen.wire import codec
from diffgen.wire.messages import Bye, Cancel, ClientMessage, Failed, Gone, Received, Result, Submit
from diffgen.wire.router import Router

logger = logging.getLogger(__name__)

KEEP_S = 300.0
KEEP_BYTES = 256 * 2**20
#: An answer that its client has not confirmed by then is written to a file. Most are confirmed in milliseconds.
WRITE_S = 1.0
_MESSAGE_BYTES = 2048  # about what one takes without its tensor
_PART = ".part"
_LENGTH = struct.Struct(">I")

_Key = tuple[bytes, str]  # a client, and a request's id, which is its own choice


class _Head(msgspec.Struct, frozen=True):
    """What stands in a file before the bytes of the tensor. ``until`` is of the system's monotonic clock."""

    client: bytes
    message: Result | Failed
    until: float


@dataclasses.dataclass(frozen=True)
class _Kept:
    client: bytes
    message: Result | Failed
    tensor: Any  # numpy array
    until: float

    @property
    def key(self) -> _Key:
        return self.client, self.message.id

    @property
    def size(self) -> int:
        return _MESSAGE_BYTES + (0 if self.tensor is None else self.tensor.nbytes)


class Outbox:
    """An answer is lost when its connection breaks while it is on its way. So the last one of each request is kept
    until its client says that it has it, for at most ``KEEP_S`` seconds and, all together, ``KEEP_BYTES``, the oldest
    going first; asked for again in that time, it is sent again. One that is larger by itself is not kept.

    With a ``folder`` it also outlives this process: what is not confirmed soon is written there, and found by the next
    one. A thread of its own does that, since a disk may be slow and the caller's ticks must not wait for it.
    """

    def __init__(self, router: Router, folder: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._router, self._folder, self._clock = router, folder, clock
        self._kept: dict[_Key, _Kept] = {}  # oldest first
        self._bytes = 0
        self._unwritten: dict[_Key, float] = {}  # when each is to be written, oldest first
        self._changed: queue.SimpleQueue[_Key] = queue.SimpleQueue()  # whose file is to be written or removed
        if folder is not None:
            folder.mkdir(exist_ok=True)
            for kept in sorted(_read(folder), key=lambda kept: kept.until):
                self._keep(kept)
            threading.Thread(target=self._store, args=(folder,), name="outbox", daemon=True).start()

    def send(self, client: bytes, message: Result | Failed, tensor: Any = None) -> None:
        self._add(client, message, tensor)
        self._router.send(client, message, tensor)

    def take(self, client: bytes, message: ClientMessage | Gone) -> bool:
        """Whether the message was about a kept answer, and is done with."""
        match message:
            case Received():
                self._drop((client, message.id))
                return True
            case Submit() if (kept := self._kept.get((client, message.id))) is not None:
                self._router.send(client, kept.message, kept.tensor)
                return True
            case Cancel() if (kept := self._kept.get((client, message.id))) and isinstance(kept.message, Result):
                # What is on its way cannot be called back, but need not be kept: its client does not want it.
                stopped = RequestCancelled(f"request {message.id} was stopped: cancelled by its client")
                self._add(client, Failed(message.id, stopped.info()))
                return True
            case Bye():
                for key in [each for each in self._kept if each[0] == client]:
                    self._drop(key)
        return False

    def tend(self) -> float | None:
        """Drop what is too old, write what is not confirmed; the seconds until there is more to do, or None."""
        now = self._clock()
        while self._kept and (oldest := next(iter(self._kept.values()))).until <= now:
            self._drop(oldest.key)
        while self._unwritten and (first := next(iter(self._unwritten.items())))[1] <= now:
            del self._unwritten[first[0]]
            self._changed.put(first[0])
        due = [next(iter(self._kept.values())).until] if self._kept else []
        due += [next(iter(self._unwritten.values()))] if self._unwritten else []
        return min(due) - now if due else None

    def _add(self, client: bytes, message: Result | Failed, tensor: Any = None) -> None:
        now = self._clock()
        kept = _Kept(client, message, tensor, now + KEEP_S)
        self._drop(kept.key)
        if kept.size > KEEP_BYTES:
            return  # the others would all go for it
        self._keep(kept)
        if self._folder is not None:
            self._unwritten[kept.key] = now + WRITE_S

    def _keep(self, kept: _Kept) -> None:
        self._kept[kept.key] = kept
        self._bytes += kept.size
        while self._bytes > KEEP_BYTES:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: _Key) -> None:
        kept = self._kept.pop(key, None)
        if kept is None:
            return
        self._bytes -= kept.size
        self._unwritten.pop(key, None)
        if self._folder is not None:
            self._changed.put(key)

    def _store(self, folder: Path) -> None:
        """The thread: makes each file agree with what is kept now, so that one dropped while it is written goes too."""
        while True:
            client, request_id = key = self._changed.get()
            kept = self._kept.get(key)
            path = folder / hashlib.sha256(f"{client.hex()} {request_id}".encode()).hexdigest()
            try:
                if kept is None:
                    path.unlink(missing_ok=True)
                else:
                    _write(path, kept)
            except OSError as error:
                # What is kept is still in memory; only a death of this process would make the request run again.
                logger.warning("the file of the answer to %s cannot be changed: %s", request_id, error)


def _write(path: Path, kept: _Kept) -> None:
    """Whole or not at all. Raises :class:`OSError`."""
    head = msgspec.msgpack.encode(_Head(kept.client, kept.message, kept.until))
    part = path.with_suffix(_PART)
    try:
        with part.open("wb") as file:
            file.write(_LENGTH.pack(len(head)) + head)
            if kept.tensor is not None:
                file.write(kept.tensor.data.cast("B"))
        part.rename(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _read(folder: Path) -> list[_Kept]:
    """What an earlier process has written; what it has begun and not ended, or is damaged, is removed."""
    found = []
    for path in folder.iterdir():
        try:
            if path.suffix != _PART:
                found.append(_decode(path.read_bytes()))
                continue
        except (OSError, struct.error, ValueError, RecursionError, ProtocolError) as error:
            logger.warning("a kept answer cannot be read, so its request would run again: %s", error)
        with contextlib.suppress(OSError):  # it is only in the way, and this process is to start
            path.unlink()
    return found


def _decode(data: bytes) -> _Kept:
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    head = msgspec.msgpack.decode(data[_LENGTH.size : start], type=_Head)
    tensor = codec.array(head.message.output.tensor, data[start:]) if isinstance(head.message, Result) else None
    return _Kept(head.client, head.message, tensor, head.until)
