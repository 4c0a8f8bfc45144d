"""The process groups of a replica, and the control channel on which rank 0 leads the others."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import datetime
import errno
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import torch
import torch.distributed as dist

from diffgen.errors import PEER_FAILED, PEER_LOST, RanksDiverged, WorkerDied
from diffgen.scheduler.plan import MAX_PLAN

# The watchdog decides what is dead; a collective that waits is a rank that computes.
NEVER = datetime.timedelta(days=1)
MAX_GATHERED = 4096  # less than a socket takes unread: every rank sends its own before it reads the others'
_REACH_S = 0.01
_PLAN, _VOTE, _BYTES, _PART = b"p", b"v", b"b", b"u"


@contextlib.contextmanager
def peers_needed() -> Iterator[None]:
    """What fails when a peer has gone; the reason is the peer's to tell, and the supervisor hears it."""
    try:
        yield
    except (RuntimeError, EOFError, OSError) as error:
        if lacks_memory(error):
            raise  # this rank's own: backends make copies
        what = str(error) or type(error).__name__
        raise WorkerDied(f"lost contact with another rank: {what}", code=PEER_LOST) from error


def lacks_memory(error: Exception) -> bool:
    """Whether an exception says that memory has run out, of a device or of the machine."""
    # PyTorch has no type of its own for what the CPU's allocator says; to map a file fails as a system call does.
    on_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    mapped = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return on_cpu or mapped or isinstance(error, torch.OutOfMemoryError | MemoryError)


@dataclasses.dataclass(frozen=True)
class RankInfo:
    """One rank among ``size``."""

    rank: int
    size: int

    @property
    def leads(self) -> bool:
        return self.rank == 0


class Control:
    """Plans from rank 0 to all, votes from all to all, and in a unit where tensors lie in shared memory; never the
    tensors themselves.

    A socket between any two ranks, apart from all process groups: a message of a few hundred bytes takes a hundredth of
    a millisecond, where a collective of gloo, which is handed from thread to thread, takes half of one; and a rank that
    waits sleeps, without a time limit. One thread a rank may use it.
    """

    def __init__(self, info: RankInfo, peers: Mapping[int, Connection] | None = None) -> None:
        """``peers``: connections to all other ranks."""
        self.info = info
        self._peers = peers or {}
        self._unread: dict[int, bytes] = {}  # votes that came while this rank was still in its unit
        assert len(self._peers) == info.size - 1

    def broadcast(self, data: bytes = b"") -> bytes:
        """Rank 0's bytes, at most ``MAX_PLAN``, on every rank."""
        assert len(data) <= MAX_PLAN
        if not self.info.leads:
            return self._receive(0, _PLAN, MAX_PLAN)
        self._send(_PLAN, data)
        return data

    def gather_vote(self, vote: Sequence[int]) -> list[list[int]]:
        """Every rank's vector of int64, all of one length, by rank."""
        mine = array.array("q", vote)
        if not self._peers:
            return [mine.tolist()]
        return [array.array("q", other).tolist() for other in self._gather(_VOTE, mine.tobytes())]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank; at most ``MAX_GATHERED`` of them."""
        return self._gather(_BYTES, data)

    def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """A few bytes for each of some ranks, which do the same inside of a unit, and theirs.

        Raises :class:`RanksDiverged`, with the code of an error that another rank explains, when one of them has left
        the unit: it votes.
        """
        with peers_needed():
            for rank, message in messages.items():
                self._peers[rank].send_bytes(_PART + message)
        return {rank: self._receive(rank, _PART, MAX_GATHERED) for rank in messages}

    def swap_files(self, ranks: Sequence[int], files: Sequence[int]) -> dict[int, list[int]]:
        """The open files of some ranks, which do the same; before any unit."""
        found = {}
        with peers_needed():
            for rank in ranks:
                with socket.socket(fileno=os.dup(self._peers[rank].fileno())) as peer:
                    socket.send_fds(peer, [_PART], files)
            for rank in ranks:
                with socket.socket(fileno=os.dup(self._peers[rank].fileno())) as peer:
                    found[rank] = socket.recv_fds(peer, len(_PART), len(files))[1]
                if len(found[rank]) < len(files):
                    raise EOFError(f"rank {rank} has sent no files")
        return found

    def _gather(self, kind: bytes, data: bytes) -> list[bytes]:
        assert len(data) <= MAX_GATHERED
        self._send(kind, data)
        ranks = range(self.info.size)
        return [data if rank == self.info.rank else self._receive(rank, kind, MAX_GATHERED) for rank in ranks]

    def _send(self, kind: bytes, data: bytes) -> None:
        with peers_needed():
            for peer in self._peers.values():
                peer.send_bytes(kind + data)

    def _receive(self, rank: int, kind: bytes, most: int) -> bytes:
        message = self._unread.pop(rank, None) or self._read(rank, most)
        while message[:1] == _PART != kind:  # of a unit that this rank has left
            message = self._read(rank, most)
        if message[:1] == _VOTE and kind == _PART:
            self._unread[rank] = message
            raise RanksDiverged(f"rank {rank} does not take part in a unit to its end", code=PEER_FAILED)
        if message[:1] != kind:
            raise RanksDiverged(f"rank {rank} sends {message[:1]!r} where {kind!r} is expected: it runs other ticks")
        return message[1:]

    def _read(self, rank: int, most: int) -> bytes:
        with peers_needed():
            return self._peers[rank].recv_bytes(1 + most)


def join(info: RankInfo, rendezvous: Path, group_on: torch.device | None) -> Control:
    """Join the other ranks: control, and for ranks that exchange over a process group the default one, on this device.
    Each carries something, so that a fault shows at start.

    ``rendezvous`` is a path in the private run folder: of a file for the group, beside which control's sockets are.
    """
    if info.size == 1:
        return Control(info)
    with peers_needed():
        control = _connect(info, rendezvous)
        control.gather_vote([info.rank])
        if group_on is not None:
            _make_group(info, rendezvous, group_on)
    return control


def _connect(info: RankInfo, rendezvous: Path) -> Control:
    """Each rank connects to those before it, and says who it is."""
    peers: dict[int, Connection] = {}
    with Listener(f"{rendezvous}.{info.rank}", "AF_UNIX", backlog=info.size) as listener:
        for rank in range(info.rank):
            peers[rank] = _reach(f"{rendezvous}.{rank}")
            peers[rank].send_bytes(bytes([info.rank]))
        for _ in range(info.rank + 1, info.size):
            peer = listener.accept()
            peers[peer.recv_bytes(1)[0]] = peer
    return Control(info, peers)


def _reach(address: str) -> Connection:
    """Once the rank there listens; that it never does is for the supervisor to see."""
    while True:
        try:
            return Client(address, "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(_REACH_S)


def _make_group(info: RankInfo, rendezvous: Path, device: torch.device) -> None:
    store = dist.FileStore(str(rendezvous), info.size)  # type: ignore[attr-defined]
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.size, timeout=NEVER)
    dist.all_reduce(torch.ones(1, device=device))
