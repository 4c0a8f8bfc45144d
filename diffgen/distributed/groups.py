"""The process groups of a replica, and the control channel on which rank 0 leads the others."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from diffgen.distributed.axis import peers_needed

# The watchdog decides what is dead; a collective that waits is a rank that computes.
NEVER = datetime.timedelta(days=1)
_FIRST_BROADCAST = 4096
MAX_GATHERED = 4096


@dataclasses.dataclass(frozen=True)
class RankInfo:
    """One rank among ``size``."""

    rank: int
    size: int

    @property
    def leads(self) -> bool:
        return self.rank == 0


class Control:
    """Plans from rank 0 to all, votes from all to all; never a model's tensors.

    It has a gloo group of its own on every kind of device: on one group shared with data, a vote and a reduction of
    the same size would mix without an error. One thread a rank may use it.
    """

    def __init__(self, info: RankInfo, group: dist.ProcessGroup | None) -> None:
        self.info = info
        self._group = group

    def broadcast(self, data: bytes = b"") -> bytes:
        """Rank 0's bytes, on every rank. The first 4 KiB go as one fixed message, longer ones as a second."""
        if self._group is None:
            return data
        first = torch.zeros(_FIRST_BROADCAST, dtype=torch.uint8)
        room = _FIRST_BROADCAST - 8
        if self.info.leads:
            head = len(data).to_bytes(8, "big") + data[:room]
            first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        with peers_needed():
            dist.broadcast(first, src=0, group=self._group)
        raw = first.numpy().tobytes()
        length = int.from_bytes(raw[:8], "big")
        if length <= room:
            return raw[8 : 8 + length]
        rest = torch.zeros(length - room, dtype=torch.uint8)
        if self.info.leads:
            rest[:] = torch.frombuffer(bytearray(data[room:]), dtype=torch.uint8)
        with peers_needed():
            dist.broadcast(rest, src=0, group=self._group)
        return raw[8:] + rest.numpy().tobytes()

    def gather_vote(self, vote: Sequence[int]) -> list[list[int]]:
        """Every rank's vector of int64, all of one length, by rank."""
        mine = torch.tensor(vote, dtype=torch.int64)
        if self._group is None:
            return [mine.tolist()]
        return [other.tolist() for other in self._all_gather(mine)]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank; at most ``MAX_GATHERED`` of them."""
        if self._group is None:
            return [data]
        assert len(data) <= MAX_GATHERED
        mine = torch.zeros(8 + MAX_GATHERED, dtype=torch.uint8)
        framed = len(data).to_bytes(8, "big") + data
        mine[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        raws = [other.numpy().tobytes() for other in self._all_gather(mine)]
        return [raw[8 : 8 + int.from_bytes(raw[:8], "big")] for raw in raws]

    def _all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(mine) for _ in range(self.info.size)]
        with peers_needed():
            dist.all_gather(gathered, mine, group=self._group)
        return gathered


def join(info: RankInfo, rendezvous: Path, device: torch.device) -> Control:
    """Join the replica's groups and run one collective in each, so that a fault shows at start.

    ``rendezvous`` is a file in the private run folder: no port is opened for it.
    """
    if info.size == 1:
        return Control(info, None)
    with peers_needed():
        return _join(info, rendezvous, device)


def _join(info: RankInfo, rendezvous: Path, device: torch.device) -> Control:
    store = dist.FileStore(str(rendezvous), info.size)  # type: ignore[attr-defined]
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.size, timeout=NEVER)
    control = Control(info, dist.new_group(backend="gloo", timeout=NEVER))
    dist.all_reduce(torch.ones(1, device=device))
    control.gather_vote([info.rank])
    return control
