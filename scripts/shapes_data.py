"""Buckets of scenes that are drawn and encoded once, for the denoiser to learn from."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import shapes_scene as scenes
import shapes_vae
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Scenes of one size and length: how many are encoded, and how many one worker takes a step.

    Steps of the commonest buckets run compiled; for the others, compiling would take longer than it saves.
    """

    size: int
    frames: int
    count: int
    batch: int
    compiled: bool = False

    @property
    def name(self) -> str:
        """A name for files."""
        return f"{self.size}px{self.frames}f"


BUCKETS: dict[str, Bucket] = {
    bucket.name: bucket
    for bucket in (
        Bucket(64, 1, 30000, 32, compiled=True),
        Bucket(64, 5, 1200, 16),
        Bucket(64, 9, 1000, 12),
        Bucket(64, 13, 400, 8),
        Bucket(64, 17, 700, 8),
        Bucket(96, 1, 3000, 16),
        Bucket(128, 1, 6000, 10, compiled=True),
        Bucket(128, 5, 300, 5),
        Bucket(128, 9, 300, 4),
        Bucket(128, 17, 180, 3),
        Bucket(192, 1, 1200, 5),
    )
}
# Shares of the steps that a bucket gets in a phase.
MOSTLY_SMALL: dict[str, float] = {
    "64px1f": 0.66,
    "64px5f": 0.06,
    "64px9f": 0.06,
    "64px13f": 0.03,
    "64px17f": 0.05,
    "96px1f": 0.04,
    "128px1f": 0.10,
}
ALL_SIZES: dict[str, float] = {
    "64px1f": 0.10,
    "64px5f": 0.05,
    "64px9f": 0.06,
    "64px13f": 0.03,
    "64px17f": 0.04,
    "96px1f": 0.10,
    "128px1f": 0.36,
    "128px5f": 0.07,
    "128px9f": 0.07,
    "128px17f": 0.05,
    "192px1f": 0.07,
}


def bucket_scene(bucket: Bucket, index: int, seed: int) -> tuple[scenes.Scene, random.Random]:
    """The scene of a place in a bucket, and the randomness left for its layout."""
    rng = random.Random(f"bucket-{seed}-{bucket.name}-{index}")
    if bucket.frames == 1:
        kind = rng.choices(("one", "two", "motion"), (10, 9, 1))[0]
    else:
        kind = rng.choices(("motion", "one", "two"), (17, 2, 1))[0]
    return scenes.sample_scene(rng, kind), rng


@torch.no_grad()
def encode_bucket(vae: AutoencoderKLWan, bucket: Bucket, seed: int, part: range) -> Tensor:
    """Latents (len(part), 16, latent frames, size / 8, size / 8) in float16 of some of a bucket's scenes."""
    group = max(8192 * 16 // (bucket.size**2 * bucket.frames), 1)
    encoded = []
    with shapes_vae.fast_stills():
        for start in range(part.start, part.stop, group):
            drawn = []
            for index in range(start, min(start + group, part.stop)):
                scene, rng = bucket_scene(bucket, index, seed)
                layout = scenes.sample_layout(scene, rng, bucket.frames)
                drawn.append(scenes.draw(scene, layout, bucket.size, bucket.size))
            encoded.append(shapes_vae.encode(vae, shapes_vae.to_pixels(np.stack(drawn))).half())
    return torch.cat(encoded)


def part_path(folder: Path, bucket: Bucket, worker: int) -> Path:
    """Where a worker keeps its part of a bucket."""
    return folder / "latents" / f"{bucket.name}-{worker}.pt"


def load_bucket(vae: AutoencoderKLWan, folder: Path, bucket: Bucket, seed: int, worker: int, workers: int) -> Tensor:
    """A worker's part of a bucket, encoded at the first call and read from its file later."""
    path = part_path(folder, bucket, worker)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = range(bucket.count * worker // workers, bucket.count * (worker + 1) // workers)
        torch.save(encode_bucket(vae, bucket, seed, part), path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
    return torch.load(path, weights_only=True)


def latent_statistics(vae: AutoencoderKLWan, seed: int) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each of the 16 channels over stills and clips of small and default size."""
    names = ("64px1f", "64px9f", "128px1f", "128px9f")
    totals = []
    for name in names:
        count = 24 if BUCKETS[name].frames > 1 else 192
        latents = encode_bucket(vae, BUCKETS[name], seed, range(count)).float()
        flat = latents.transpose(0, 1).flatten(1)
        totals.append(torch.stack([flat.mean(1), flat.square().mean(1)]))
    mean, square = torch.stack(totals).mean(0)
    return mean, (square - mean.square()).sqrt()
