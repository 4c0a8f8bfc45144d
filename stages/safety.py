"""Safety: pictures that a model's own checker flags become black."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch

from diffgen.request import Req, Update
from diffgen.worker.context import StageContext
from stages.base import PipelineStage


class FlagsPictures(Protocol):
    def flag_pictures(self, pictures: torch.Tensor) -> Sequence[bool]:
        """Which of the uint8 (pictures, height, width, 3) must not be shown."""
        ...


class SafetyStage(PipelineStage):
    """One unit: all pictures of a request. Skipped where the latents are the result: nothing is decoded then."""

    name: ClassVar[str] = "safety"

    def __init__(self, family: FlagsPictures) -> None:
        self.family = family

    def units(self, req: Req) -> int:
        return 0 if req.params.output_type == "latent" else 1

    def run(self, reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
        return [self._checked(req) for req in reqs]

    def _checked(self, req: Req) -> Update:
        pixels = req.pixels
        flags = torch.tensor(self.family.flag_pictures(pixels.flatten(0, 1))).view(pixels.shape[:2])
        pixels = pixels.masked_fill(flags.to(pixels.device)[:, :, None, None, None], 0)
        remedy = "was flagged by the safety checker and is black; try another prompt or seed"
        flagged = [
            f"output {index} (seed {seed}) {remedy}"
            for index, (seed, bad) in enumerate(zip(req.seeds, flags.any(dim=1).tolist(), strict=True))
            if bad
        ]
        return Update(frames=(pixels,), warnings=(*req.warnings, *flagged))
