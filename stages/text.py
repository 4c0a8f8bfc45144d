"""Text encoding: prompts to the denoiser's conditioning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch

from diffgen.request import Req, Update
from diffgen.worker.context import StageContext
from stages.base import PipelineStage


class EncodesText(Protocol):
    def encode_text(self, req: Req) -> tuple[tuple[dict[str, torch.Tensor], ...], tuple[str, ...]]:
        """The branches of a request, the prompt's first, with tensors of (1, ...); and warnings about its texts."""
        ...


class TextEncodingStage(PipelineStage):
    """One unit: the prompt and, with guidance, the negative prompt of each request."""

    name: ClassVar[str] = "encode"
    prepares: ClassVar[bool] = True
    encodes: ClassVar[bool] = True

    def __init__(self, family: EncodesText) -> None:
        self.family = family

    def run(self, reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
        updates = []
        for req in reqs:
            branches, warnings = self.family.encode_text(req)
            updates.append(Update(branches=branches, warnings=(*req.warnings, *warnings)))
        return updates
