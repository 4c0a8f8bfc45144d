"""The data of a request in flight (:class:`Req`) and of its result (:class:`OutputBatch`)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec

from diffgen.params import SamplingParams

if TYPE_CHECKING:
    import torch


class TensorHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """dtype and shape of a raw C-order frame."""

    dtype: str
    shape: tuple[int, ...]


class OutputBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request made.

    The tensor beside it is uint8 (outputs, frames, height, width, 3), or with ``latent`` the final latents as float32
    (outputs, channels, ...). ``timings`` are seconds a stage plus "queue" and "total"; ``peak_memory_mb`` is rank 0's.
    """

    params: SamplingParams
    seeds: tuple[int, ...]
    warnings: tuple[str, ...]
    timings: dict[str, float]
    peak_memory_mb: float
    latent: bool
    tensor: TensorHeader


@dataclasses.dataclass(slots=True)
class Req:
    """One request on one rank. Every rank holds the same values; only a committed :class:`Update` changes them.

    Shapes: n outputs, C channels, T latent frames, h x w latent size.

    Attributes:
        branches: arguments of the denoiser, one dict a guidance branch, the prompt's first; tensors of (1, ...).
        latents: float32 (n, C, T, h, w), or what the family's denoiser takes.
        timesteps: (steps,); second-order schedulers have more than ``num_inference_steps``.
        generators: one CPU generator an output, seeded with ``seed + i``.
        decoder: what the decoder keeps between latent frames.
        frames: decoded parts, each uint8 (n, frames, height, width, 3), or (k, ...), all frames of k outputs.
        stage, unit: position: units of the current stage that are done.
        without_previews: one could not be made, so no other is tried; only on rank 0, which draws them.
        extra: whatever one family needs beside all this, typed by it.
    """

    id: str
    params: SamplingParams
    warnings: tuple[str, ...] = ()
    branches: tuple[dict[str, torch.Tensor], ...] = ()
    scheduler: Any = None
    timesteps: torch.Tensor | None = None
    generators: tuple[torch.Generator, ...] = ()
    latents: torch.Tensor | None = None
    decoder: Any = None
    frames: tuple[torch.Tensor, ...] = ()
    stage: int = 0
    unit: int = 0
    without_previews: bool = False
    extra: object = None

    @property
    def outputs(self) -> int:
        return self.params.num_outputs_per_prompt or 1

    @property
    def seeds(self) -> tuple[int, ...]:
        assert self.params.seed is not None, "rank 0 resolves the seed"
        return tuple(self.params.seed + index for index in range(self.outputs))

    @property
    def pixels(self) -> torch.Tensor:
        """The decoded parts as one: uint8 (n, frames, height, width, 3)."""
        import torch

        return torch.cat(self.frames, dim=1 if len(self.frames[0]) == self.outputs else 0)


class Unset:
    """Marks a field that an :class:`Update` leaves alone."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Any = Unset()


@dataclasses.dataclass(slots=True, kw_only=True)
class Update:
    """New values that one unit computed for one request; they count only once every rank has voted for them."""

    warnings: tuple[str, ...] = UNSET
    branches: tuple[dict[str, torch.Tensor], ...] = UNSET
    scheduler: Any = UNSET
    timesteps: torch.Tensor = UNSET
    generators: tuple[torch.Generator, ...] = UNSET
    latents: torch.Tensor = UNSET
    decoder: Any = UNSET
    frames: tuple[torch.Tensor, ...] = UNSET
    extra: object = UNSET

    def changes(self) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(self)]
        return {name: value for name in names if (value := getattr(self, name)) is not UNSET}

    def apply(self, req: Req) -> None:
        for name, value in self.changes().items():
            setattr(req, name, value)
