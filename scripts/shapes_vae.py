"""The autoencoder stage of the shapes model: the latents it is to use, its settings and its training.

The latents are not left to the training: they are to be a small picture of what is drawn (see :func:`latent_picture`).
A denoiser then works on something as plain as pixels, which it learns far faster than a code that only its decoder
understands; and it needs no encoder to be trained.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import shapes_parallel
import shapes_scene as scenes
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify
from torch import Tensor, nn
from torch.nn import functional as F

CHANNELS = 15
VAE_CONFIG: dict[str, Any] = {
    "base_dim": 16,
    "z_dim": CHANNELS,
    "dim_mult": [1, 2, 4],
    "num_res_blocks": 1,
    "temperal_downsample": [True, True],
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 8,
    "scale_factor_temporal": 4,
}


def latent_picture(pixels: Tensor) -> Tensor:
    """Latents (batch, 15, latent frames, height / 8, width / 8) of pixels (batch, 3, frames, height, width).

    A latent frame stands for the first frame, or for the next four. Twelve channels are the mean colours of the four
    quarters of each 8 x 8 block in the last of these frames; three are the block's mean colour over all of them.
    """
    count, _, frames = pixels.shape[:3]
    last = pixels[:, :, ::4].transpose(1, 2).flatten(0, 1)
    quarters = F.pixel_unshuffle(F.avg_pool2d(last, 4), 2)
    blocks = F.avg_pool2d(pixels.transpose(1, 2).flatten(0, 1), 8).unflatten(0, (count, frames))
    rest = blocks[:, 1:].unflatten(1, (-1, 4)).mean(2) if frames > 1 else blocks[:, 1:]
    trails = torch.cat([blocks[:, :1], rest], 1).flatten(0, 1)
    return torch.cat([quarters, trails], 1).unflatten(0, (count, -1)).transpose(1, 2)


@contextmanager
def fast_stills() -> Iterator[None]:
    """Run the causal convolutions of a first frame in two dimensions while the context is open.

    A first frame meets zeros in place of the frames before it, so only the last slice of a kernel has work to do.
    """
    original = WanCausalConv3d.forward

    def forward(self: WanCausalConv3d, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        if cache_x is None and x.shape[2] == 1 and self.stride[0] == 1:
            padding = (self._padding[2], self._padding[0])
            flat = F.conv2d(x[:, :, 0], self.weight[:, :, -1], self.bias, self.stride[1:], padding)
            return flat.unsqueeze(2)
        return original(self, x, cache_x)

    WanCausalConv3d.forward = forward
    try:
        yield
    finally:
        WanCausalConv3d.forward = original


def encode(vae: AutoencoderKLWan, pixels: Tensor) -> Tensor:
    """Mean latents (batch, 15, latent frames, height / 8, width / 8) of pixels (batch, 3, frames, height, width)."""
    return vae._encode(pixels).chunk(2, dim=1)[0]


def decode_unclamped(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """Pixels of latents without the class's clamp to [-1, 1], which would stop the gradients of saturated pixels."""
    vae.clear_cache()
    hidden = vae.post_quant_conv(latents)
    frames = []
    for index in range(latents.shape[2]):
        vae._conv_idx = [0]
        chunk = hidden[:, :, index : index + 1]
        frames.append(vae.decoder(chunk, feat_cache=vae._feat_map, feat_idx=vae._conv_idx, first_chunk=index == 0))
    vae.clear_cache()
    return unpatchify(torch.cat(frames, 2), patch_size=vae.config.patch_size)


def to_pixels(drawn: np.ndarray) -> Tensor:
    """Drawn frames (..., frames, height, width, 3) of bytes as floats (..., 3, frames, height, width) in [-1, 1]."""
    return torch.from_numpy(drawn).movedim(-1, -4).float() / 127.5 - 1


def draw_batch(rng: random.Random, count: int, frames: int, size: int) -> Tensor:
    """Draw scenes of the training combinations: (count, 3, frames, size, size)."""
    drawn = []
    for _ in range(count):
        kind = rng.choice(("one", "two")) if frames == 1 or rng.random() < 0.2 else "motion"
        scene = scenes.sample_scene(rng, kind)
        drawn.append(scenes.draw(scene, scenes.sample_layout(scene, rng, frames), size, size))
    return to_pixels(np.stack(drawn))


def new_vae(seed: int) -> AutoencoderKLWan:
    """A fresh autoencoder."""
    torch.manual_seed(seed)
    return AutoencoderKLWan(**VAE_CONFIG)


@dataclasses.dataclass
class VaeTask:
    """The autoencoder's training and what it is set to.

    `noise` is the most that is added to the latents: a decoder which has seen it draws clean edges from latents that
    are a little off. The encoder is only trained in `encoder_share` of the steps, since it has the easier part.
    """

    folder: Path
    steps: int = 2400
    batch: int = 32
    learning_rate: float = 3e-3
    warmup: int = 100
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    ema: float = 0.98
    l1_weight: float = 0.1
    noise: float = 0.15
    encoder_share: float = 0.25
    clip_share: float = 0.3
    clips_from: float = 0.25
    fine_from: float = 0.65
    seed: int = 1
    workers: int = 2
    name: str = "vae"

    def build(self) -> AutoencoderKLWan:
        """A fresh autoencoder."""
        return new_vae(self.seed)

    def matrices(self, model: nn.Module) -> list[nn.Parameter]:
        """None: nearly all of it is convolutions."""
        return []

    def prepare(self, model: nn.Module, worker: int) -> None:
        """Nothing to get ready: scenes are drawn as they are needed."""

    def rate(self, step: int) -> float:
        """A linear warm-up, then half a cosine down to zero."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        share = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * share))

    def batch_shape(self, step: int) -> tuple[int, int, int]:
        """A worker's count of scenes, their frames and their size at a step."""
        rng = random.Random(f"{self.name}-{self.seed}-{step}")
        share = step / self.steps
        size = 128 if share >= self.fine_from and rng.random() < 0.85 else 64
        frames = rng.choice((5, 5, 9)) if share >= self.clips_from and rng.random() < self.clip_share else 1
        count = self.batch // (self.workers * (4 if size == 128 else 1))
        return max(count // (1 if frames == 1 else frames - 1), 1), frames, size

    def loss(self, model: nn.Module, step: int, worker: int) -> tuple[Tensor, float]:
        """The error of what the decoder makes of noisy latents; the squared part is what is logged."""
        # Each step's randomness comes from its number, so that a resumed run goes on as if never stopped.
        rng = random.Random(f"{self.name}-{self.seed}-{step}-{worker}")
        generator = torch.Generator().manual_seed(rng.getrandbits(60))
        pixels = draw_batch(rng, *self.batch_shape(step))
        latents = latent_picture(pixels)
        amount = self.noise * torch.rand((len(pixels), 1, 1, 1, 1), generator=generator)
        with fast_stills():
            error = decode_unclamped(model, latents + amount * torch.randn(latents.shape, generator=generator)) - pixels
            mse = error.square().mean()
            loss = mse + self.l1_weight * error.abs().mean()
            if random.Random(f"encoder-{self.seed}-{step}").random() < self.encoder_share:
                loss = loss + (encode(model, pixels) - latents).square().mean()
        return loss, mse.item()


def load_vae(folder: Path) -> AutoencoderKLWan:
    """The trained autoencoder of a folder, frozen."""
    return shapes_parallel.load_average(VaeTask(folder))
