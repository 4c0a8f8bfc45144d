"""How tensors come from rank to rank: by a process group of torch.distributed, or through memory that all have mapped.

A CPU process takes half the time to copy through shared memory that gloo takes to send through sockets. It also hears
there when a rank has left the unit, where a rank that waits in a process group does not.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from diffgen.distributed.groups import Control, peers_needed
from diffgen.errors import RanksDiverged

_ALIGNED = 64  # bytes: a cache line, and more than any dtype
_PLACE = struct.Struct("<qqq")  # which buffer, first byte, number of bytes; the dtype's name follows


class Collectives(Protocol):
    """Among some ranks, all of which call the same methods in one order."""

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, equal in every bit on all of them; may be ``values`` itself."""

    def all_gather(self, values: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        """The ranks' tensors, in rank order along ``dim``, where they have these sizes."""

    def all_to_all(self, values: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """A tensor from each rank, of these shapes, for one to each; all of one dtype."""


class ProcessGroupCollectives:
    """NCCL between CUDA devices, gloo between CPU processes."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """``group``: None for that of all ranks."""
        self._group = group

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        values = values.contiguous()
        with peers_needed():
            dist.all_reduce(values, group=self._group)
        return values

    def all_gather(self, values: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        values = values.contiguous()
        # The backends gather equal sizes alone.
        shape, most = list(values.shape), max(sizes)
        shape[dim] = most
        padded = values
        if values.shape[dim] != most:
            padded = values.new_zeros(shape)
            padded.narrow(dim, 0, values.shape[dim]).copy_(values)
        parts = [values.new_empty(shape) for _ in sizes]
        with peers_needed():
            dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)

    def all_to_all(self, values: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        flat = torch.cat([each.reshape(-1) for each in values])
        counts = [torch.Size(shape).numel() for shape in shapes]
        received = flat.new_empty(sum(counts))
        with peers_needed():
            dist.all_to_all_single(received, flat, counts, [each.numel() for each in values], group=self._group)
        return [part.view(*shape) for part, shape in zip(torch.split(received, counts), shapes, strict=True)]


class SharedMemoryCollectives:
    """CPU processes that read each other's memory.

    Each rank has two files without a name, which it fills in turn: before it writes to one again, every peer has told,
    by what it sent for the other, that it has read it. They grow to the largest that a rank has had to show at a time.
    """

    def __init__(self, control: Control, ranks: Sequence[int]) -> None:
        """``ranks``: of the replica, this one among them."""
        self._control, self._ranks = control, ranks
        self._rank = control.info.rank
        peers = [rank for rank in ranks if rank != self._rank]
        files = [os.memfd_create(f"diffgen-{turn}") for turn in range(2)]
        self._mine = [_Pages(file) for file in files]
        theirs = control.swap_files(peers, files)
        self._theirs = {rank: [_Pages(file) for file in theirs[rank]] for rank in peers}
        self._turn = 0

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        first, second, *rest = self._show([values] * len(self._ranks), [values.shape] * len(self._ranks))
        total = first + second
        for other in rest:
            total += other
        return total

    def all_gather(self, values: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        before, after = values.shape[:dim], values.shape[dim + 1 :]
        return torch.cat(self._show([values] * len(sizes), [(*before, size, *after) for size in sizes]), dim)

    def all_to_all(self, values: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return [each.clone() for each in self._show(values, shapes)]

    def _show(self, values: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """A tensor from each rank for one to each, in the peers' memory: theirs again after the next call."""
        self._turn = 1 - self._turn
        pages, stop = self._mine[self._turn], 0
        written: dict[int, int] = {}  # a tensor that several ranks are shown is written once
        messages = {}
        for rank, part in zip(self._ranks, values, strict=True):
            if rank == self._rank:
                continue
            start = written.setdefault(id(part), stop)
            if start == stop:
                pages.view(start, part.dtype, part.shape).copy_(part)
                stop += -(-part.nbytes // _ALIGNED) * _ALIGNED
            messages[rank] = _PLACE.pack(self._turn, start, part.nbytes) + str(part.dtype).encode()
        answers = self._control.exchange(messages)
        parts = []
        for rank, own, shape in zip(self._ranks, values, shapes, strict=True):
            if rank == self._rank:
                parts.append(own)
                continue
            turn, start, size = _PLACE.unpack_from(answers[rank])
            sent = f"{size} bytes of {answers[rank][_PLACE.size :].decode()}"
            expected = f"{torch.Size(shape).numel() * own.itemsize} bytes of {own.dtype}"
            if sent != expected:
                raise RanksDiverged(f"rank {rank} sends {sent}, not {expected}: it computes something else")
            parts.append(self._theirs[rank][turn].view(start, own.dtype, shape))
        return parts


class _Pages:
    """A file, mapped as far as has been asked for."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._mapped = torch.empty(0, dtype=torch.uint8)

    def view(self, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A tensor that begins at a byte; the file grows to hold it."""
        stop = start + torch.Size(shape).numel() * dtype.itemsize
        if stop > len(self._mapped):
            size = os.fstat(self._file).st_size
            if stop > size:
                size = 1 << (stop - 1).bit_length()
                os.ftruncate(self._file, size)
            self._mapped = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
        return self._mapped[start:stop].view(dtype).view(torch.Size(shape))
