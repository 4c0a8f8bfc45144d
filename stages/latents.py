"""Latent preparation: a request's noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch

from diffgen.request import Req, Update
from diffgen.worker.context import StageContext
from stages.base import PipelineStage


class PreparesLatents(Protocol):
    def prepare_latents(self, req: Req, generators: list[torch.Generator]) -> torch.Tensor:
        """The first latents, float32 (n, ...), on the device, with one generator an output."""
        ...


class LatentPreparationStage(PipelineStage):
    """One unit: noise, whole, from one CPU generator an output, seeded with ``seed + i``.

    So one seed gives one picture for any n, batch, layout and device. On the CPU float32 is drawn whatever the
    model's dtype.
    """

    name: ClassVar[str] = "latents"
    prepares: ClassVar[bool] = True

    def __init__(self, family: PreparesLatents) -> None:
        self.family = family

    def run(self, reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
        updates = []
        for req in reqs:
            generators = [torch.Generator("cpu").manual_seed(seed) for seed in req.seeds]
            latents = self.family.prepare_latents(req, generators)
            updates.append(Update(latents=latents, generators=tuple(generators)))
        return updates
