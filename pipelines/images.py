"""What image families share: noise of a picture's size, and a decode by the image, or by as many images as there are
ranks."""

from __future__ import annotations

import torch

from diffgen.request import Req
from pipelines.base import ComposedPipelineBase


class ImagePipelineBase(ComposedPipelineBase):
    """A family whose decode takes images one by one."""

    @property
    def latent_channels(self) -> int:
        """Of the latents that the pipeline's own ``prepare_latents`` is asked for."""
        channels: int = self.pipe.transformer.config.in_channels
        return channels

    def prepare_latents(self, req: Req, generators: list[torch.Generator]) -> torch.Tensor:
        """Noise (n, ...), float32, from the pipeline's own method."""
        size = (req.params.height, req.params.width)
        latents: torch.Tensor = self.pipe.prepare_latents(
            req.outputs, self.latent_channels, *size, torch.float32, self.device, generators
        )
        return latents

    @property
    def images_a_unit(self) -> int:
        """Of a request's images, how many are decoded in one unit: one, or one a rank."""
        return self.layout.decode.size if self.splits_decode else 1

    def decode_units(self, req: Req) -> int:
        return -(-req.outputs // self.images_a_unit)

    def unit_latents(self, req: Req) -> torch.Tensor:
        """The latents (images, ...) of the images that unit ``req.unit`` decodes."""
        assert req.latents is not None
        return req.latents[req.unit * self.images_a_unit :][: self.images_a_unit]
