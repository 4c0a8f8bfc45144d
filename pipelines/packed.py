"""What families with packed latents share: a token is a patch of 2 x 2 latents, in a row with all others."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from diffgen.params import SamplingParams
from diffgen.request import Req
from pipelines.images import ImagePipelineBase


class PackedPipelineBase(ImagePipelineBase):
    """Image families whose denoiser takes latents as (n, rows x columns, 4 x channels of the VAE).

    Packing itself is that of the family's diffusers pipeline. ``output_type="latent"`` gives this form, as diffusers
    does.
    """

    @property
    def latent_channels(self) -> int:
        return super().latent_channels // 4

    @property
    def token_pixels(self) -> int:
        """Pixels a side of what one token stands for; width and height are multiples of it."""
        return 2 * int(self.pipe.vae_scale_factor)

    def grid(self, req: Req) -> tuple[int, int]:
        """Rows and columns of tokens."""
        assert req.params.height is not None
        assert req.params.width is not None
        return req.params.height // self.token_pixels, req.params.width // self.token_pixels

    def batch_key(self, req: Req) -> Hashable:
        """The last item is :meth:`grid`, which packed latents do not tell."""
        return (*super().batch_key(req), self.grid(req))  # type: ignore[misc]

    def make_scheduler(self, req: Req) -> Any:
        return self.pipe.scheduler.from_config(self.pipe.scheduler.config)

    def unpacked(self, req: Req) -> torch.Tensor:
        """Latents of the images of ``req.unit`` as the VAE takes them, (images, ...), before its scaling."""
        return self._unpack(self.unit_latents(req), req.params)

    def latent_image(self, latents: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        return super().latent_image(self._unpack(latents, params), params)

    def _unpack(self, latents: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        unpacked: torch.Tensor = self.pipe._unpack_latents(
            latents, params.height, params.width, self.pipe.vae_scale_factor
        )
        return unpacked
