"""AxisGroup: the ranks along some axes of a layout, and the collectives that they run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diffgen.distributed.collectives import Collectives


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

    def __init__(self, rank: int = 0, size: int = 1, collectives: Collectives | None = None) -> None:
        """``collectives``: None for a rank that exchanges nothing."""
        self.rank = rank
        self.size = size
        self.sent = 0
        self.calls = 0
        self._collectives = collectives

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, equal in every bit on all of them; may be ``values`` itself."""
        if self._collectives is None:
            return values
        self._count(2 * (self.size - 1) * _bytes(values) // self.size)
        return self._collectives.all_reduce(values)

    def all_gather(self, values: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        """The ranks' tensors, in rank order along ``dim``, where they have these sizes."""
        if self._collectives is None:
            return values
        self._count((self.size - 1) * _bytes(values))
        return self._collectives.all_gather(values, sizes, dim)

    def all_to_all(self, values: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """A tensor from each rank, of these shapes, for one to each; all of one dtype."""
        if self._collectives is None:
            return list(values)
        self._count(sum(_bytes(each) for index, each in enumerate(values) if index != self.rank))
        return self._collectives.all_to_all(values, shapes)

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
