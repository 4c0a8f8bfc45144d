"""Attention over tokens that lie on several ranks: communication here, the kernel behind a protocol.

Shapes: b rows, s tokens of this rank, h heads, d a head. Ranks may have different numbers of tokens, also none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from diffgen.distributed.axis import AxisGroup


class AttentionKernel(Protocol):
    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention without a mask on one device: (b, s, h, d), and the float32 log-sum-exp (b, s, h) of its scores.

        ``key`` and ``value`` may have another number of tokens; no tensor is empty.
        """
        ...


class SequenceAttention(Protocol):
    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sizes: Sequence[int], scale: float | None
    ) -> torch.Tensor:
        """Attention of this rank's queries (b, s, h, d) to the keys of all ranks, of which each has ``sizes``."""
        ...


def native_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's own kernels, those of them that give the log-sum-exp."""
    queries = query.shape[1]
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=scale)
    elif query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] % 8 == 0:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)[:2]
    else:
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, None, True, scale=scale)[
            :2
        ]
    # Some kernels round the number of queries up.
    return out.transpose(1, 2), lse[..., :queries].transpose(1, 2).float()


class UnifiedAttention:
    """Ulysses (Jacobs et al., 2023) inside Ring (Liu et al., 2023), together USP (Fang and Zhao, 2024).

    Ulysses exchanges tokens for heads, so each of its ranks has all of their tokens and its share of the heads. Around
    the ring, keys and values go from rank to rank, and what each block adds is merged by its log-sum-exp in float32.
    """

    def __init__(self, ulysses: AxisGroup, ring: AxisGroup, kernel: AttentionKernel = native_kernel) -> None:
        self._ulysses = ulysses
        self._ring = ring
        self._kernel = kernel

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sizes: Sequence[int], scale: float | None
    ) -> torch.Tensor:
        count = self._ulysses.size
        # Of ranks in a line, those of one Ulysses group are neighbours.
        blocks = [sizes[first : first + count] for first in range(0, len(sizes), count)]
        mine = blocks[self._ring.rank]
        gathered = self._heads_for_tokens(torch.stack([query, key, value]), mine)
        out = self._around_ring(gathered[0], gathered[1:], [sum(block) for block in blocks], scale)
        return self._tokens_for_heads(out, mine)

    def _heads_for_tokens(self, qkv: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """(3, b, s, h, d) to (3, b, all tokens of the group, h / ranks, d)."""
        if self._ulysses.size == 1:
            return qkv
        three, rows, _, heads, width = qkv.shape
        parts = qkv.chunk(self._ulysses.size, dim=3)
        shapes = [(three, rows, size, heads // self._ulysses.size, width) for size in sizes]
        return torch.cat(self._ulysses.all_to_all(parts, shapes), dim=2)

    def _tokens_for_heads(self, out: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        if self._ulysses.size == 1:
            return out
        rows, _, heads, width = out.shape
        parts = torch.split(out, list(sizes), dim=1)
        shape = (rows, sizes[self._ulysses.rank], heads, width)
        return torch.cat(self._ulysses.all_to_all(parts, [shape] * self._ulysses.size), dim=2)

    def _around_ring(
        self, query: torch.Tensor, keys_values: torch.Tensor, sizes: Sequence[int], scale: float | None
    ) -> torch.Tensor:
        count = self._ring.size
        if count == 1:
            key, value = keys_values
            query, key, value = (each.transpose(1, 2) for each in (query, key, value))
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale)
            return out.transpose(1, 2)
        two, rows, _, heads, width = keys_values.shape
        merged = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        total = query.new_full(query.shape[:-1], -torch.inf, dtype=torch.float32)
        for step in range(count):
            if keys_values.shape[2] and query.shape[1]:
                out, lse = self._kernel(query, keys_values[0], keys_values[1], scale)
                higher = torch.logaddexp(total, lse)
                merged = merged * (total - higher).exp().unsqueeze(-1) + out * (lse - higher).exp().unsqueeze(-1)
                total = higher
            if step < count - 1:
                size = sizes[(self._ring.rank - step - 1) % count]
                keys_values = self._ring.shift(keys_values, (two, rows, size, heads, width))
        return merged.to(query.dtype)
