"""AxisGroup: the ranks along some axes of a layout, and the collectives that they run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from diffgen.errors import PEER_LOST, WorkerDied


@contextlib.contextmanager
def peers_needed() -> Iterator[None]:
    """What fails when a peer has gone; the reason is the peer's to tell, and the supervisor hears it."""
    try:
        yield
    except (RuntimeError, EOFError, OSError) as error:
        what = str(error) or type(error).__name__
        raise WorkerDied(f"lost contact with another rank: {what}", code=PEER_LOST) from error


def pieces(total: int, parts: int) -> list[int]:
    """Sizes of ``total`` things in ``parts``, which differ by one at most; as ``torch.tensor_split`` cuts."""
    return [total // parts + (index < total % parts) for index in range(parts)]


class AxisGroup:
    """Ranks in a line. One thread a rank may use it, and all of its ranks must call the same methods in one order.

    Attributes:
        rank: place in the group.
        sent: bytes that this rank has sent so far: to each other rank its part of a gather or an exchange, and of a
            reduction what a ring of ranks passes on.
        calls: collectives so far.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.size = size
        self.sent = 0
        self.calls = 0
        self._group = group

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, equal in every bit on all of them; may be ``values`` itself."""
        if self.size == 1:
            return values
        values = values.contiguous()
        self._count(2 * (self.size - 1) * _bytes(values) // self.size)
        with peers_needed():
            if self.size == 2 and values.device.type == "cpu":
                # As many bytes as gloo's own sum, which sends halves there and back, for 0.6 of its CPU time.
                other = torch.empty_like(values)
                counts = [0, 0]
                counts[1 - self.rank] = values.numel()
                dist.all_to_all_single(other.view(-1), values.view(-1), counts, counts, group=self._group)
                return other.add_(values)
            dist.all_reduce(values, group=self._group)
        return values

    def all_gather(self, values: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        """The ranks' tensors, in rank order along ``dim``, where they have these sizes."""
        if self.size == 1:
            return values
        values = values.contiguous()
        self._count((self.size - 1) * _bytes(values))
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
        """A tensor from each rank, of these shapes, for one to each."""
        if self.size == 1:
            return list(values)
        self._count(sum(_bytes(each) for index, each in enumerate(values) if index != self.rank))
        flat = torch.cat([each.reshape(-1) for each in values])
        counts = [torch.Size(shape).numel() for shape in shapes]
        received = flat.new_empty(sum(counts))
        with peers_needed():
            dist.all_to_all_single(received, flat, counts, [each.numel() for each in values], group=self._group)
        return [part.view(*shape) for part, shape in zip(torch.split(received, counts), shapes, strict=True)]

    def shift(self, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The tensor of the rank before, which has this shape, while ``values`` go to the one behind; in a ring."""
        parts = [values.new_empty(0)] * self.size
        parts[(self.rank + 1) % self.size] = values
        shapes: list[Sequence[int]] = [(0,)] * self.size
        shapes[self.rank - 1] = shape
        return self.all_to_all(parts, shapes)[self.rank - 1]

    def _count(self, sent: int) -> None:
        self.calls += 1
        self.sent += sent


class EmptyGroup(AxisGroup):
    """The first of ``size`` ranks whose peers are not there, for tensors without values, of the shapes alone."""

    def __init__(self, size: int = 1) -> None:
        super().__init__(0, size)

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def all_gather(self, values: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        shape = list(values.shape)
        return torch.cat([values.new_empty([*shape[:dim], size, *shape[dim + 1 :]]) for size in sizes], dim)

    def all_to_all(self, values: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return [values[0].new_empty(shape) for shape in shapes]


def _bytes(values: torch.Tensor) -> int:
    return values.numel() * values.element_size()
