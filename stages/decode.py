"""Decoding: latents to pixels, a latent frame or an image at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch

from diffgen.media.pixels import to_uint8
from diffgen.request import Req, Update
from diffgen.worker.context import StageContext
from stages.base import PipelineStage


class Decodes(Protocol):
    def decode_units(self, req: Req) -> int:
        """Into how many parts the request's decode is cut."""
        ...

    def decode_unit(self, req: Req) -> tuple[torch.Tensor, Any]:
        """Part ``req.unit`` in [-1, 1], and the decoder's state after it.

        A part is (n, 3, frames, height, width), some frames of every output, or (k, 3, frames, height, width), all
        frames of the k outputs that are next. ``req.decoder`` is the state before it, None at first, and must not be
        changed.
        """
        ...


class DecodingStage(PipelineStage):
    """A unit is one latent frame of every output, or one output. Skipped where the latents are the result."""

    name: ClassVar[str] = "decode"

    def __init__(self, family: Decodes) -> None:
        self.family = family

    def units(self, req: Req) -> int:
        return 0 if req.params.output_type == "latent" else self.family.decode_units(req)

    def run(self, reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
        updates = []
        for req in reqs:
            pixels, state = self.family.decode_unit(req)
            updates.append(Update(frames=(*req.frames, to_uint8(pixels)), decoder=state))
        return updates
