"""Buckets of scenes that are drawn once, for the denoiser to learn from."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import shapes_scene as scenes
import shapes_text
import shapes_vae
import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Scenes of one size and length: how many are drawn, and how many one worker takes a step."""

    size: int
    frames: int
    count: int
    batch: int

    @property
    def name(self) -> str:
        """A name for files."""
        return f"{self.size}px{self.frames}f"


BUCKETS: dict[str, Bucket] = {
    bucket.name: bucket
    for bucket in (
        Bucket(64, 1, 40000, 32),
        Bucket(64, 5, 4000, 16),
        Bucket(64, 9, 3000, 12),
        Bucket(64, 13, 1500, 8),
        Bucket(64, 17, 2000, 8),
        Bucket(96, 1, 8000, 16),
        Bucket(128, 1, 16000, 10),
        Bucket(128, 5, 2400, 5),
        Bucket(128, 9, 2000, 4),
        Bucket(128, 17, 1500, 3),
        Bucket(192, 1, 2000, 5),
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
    "64px1f": 0.06,
    "64px5f": 0.05,
    "64px9f": 0.05,
    "64px13f": 0.03,
    "64px17f": 0.04,
    "96px1f": 0.07,
    "128px1f": 0.34,
    "128px5f": 0.10,
    "128px9f": 0.11,
    "128px17f": 0.10,
    "192px1f": 0.05,
}
# Those of the finish, which is for what is hardest to draw well.
FINISH: dict[str, float] = {
    "96px1f": 0.08,
    "128px1f": 0.50,
    "128px5f": 0.10,
    "128px9f": 0.14,
    "128px17f": 0.13,
    "192px1f": 0.05,
}
GREATEST_WEIGHT = 3.0


def weight(scene: scenes.Scene) -> float:
    """How often the finish draws a scene, from 1 to `GREATEST_WEIGHT`: small things and stars are the hardest."""
    return max((2.0 if t.shape == "star" else 1.0) * (1.5 if t.size == "small" else 1.0) for t in scene.things)


def bucket_scene(bucket: Bucket, index: int, seed: int, *, weighted: bool) -> tuple[scenes.Scene, random.Random]:
    """The scene of a place in a bucket, and the randomness left for its layout; perhaps by `weight`."""
    rng = random.Random(f"bucket-{seed}-{bucket.name}-{index}")
    if bucket.frames == 1:
        kind = rng.choices(("one", "two", "motion"), (10, 9, 1))[0]
    else:
        kind = rng.choices(("motion", "one", "two"), (17, 2, 1))[0]
    scene = scenes.sample_scene(rng, kind)
    while weighted and rng.random() >= weight(scene) / GREATEST_WEIGHT:
        scene = scenes.sample_scene(rng, kind)
    return scene, rng


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Scenes as the denoiser learns them.

    `latents` is (count, 15, latent frames, size / 8, size / 8), in float16. `places` is (count, latent frames, 2, 5),
    for each thing its x, y, radius and how far it goes in x and y in one frame, in units of the frame's side;
    `shapes` is (count, 2), -1 where there is no second thing. The left or upper thing comes first, as in
    `shapes_text.meaning`.
    """

    latents: Tensor
    places: Tensor
    shapes: Tensor


def draw_bucket(bucket: Bucket, seed: int, part: range, *, weighted: bool) -> Drawn:
    """Draw some of a bucket's scenes."""
    group = max(8192 * 16 // (bucket.size**2 * bucket.frames), 1)
    latents, drawn = [], []
    places = torch.zeros(len(part), 1 + (bucket.frames - 1) // 4, 2, 5)
    shapes = torch.full((len(part), 2), -1)
    for row, index in enumerate(part):
        scene, rng = bucket_scene(bucket, index, seed, weighted=weighted)
        layout = scenes.sample_layout(scene, rng, bucket.frames)
        drawn.append(scenes.draw(scene, layout, bucket.size, bucket.size))
        order = (1, 0) if scene.relation in shapes_text.TURNED else range(len(scene.things))
        for place, thing in enumerate(order):
            path = torch.from_numpy(layout[:, thing])
            places[row, :, place, :3] = path[::4]
            if bucket.frames > 1:
                places[row, :, place, 3:] = (path[-1, :2] - path[0, :2]) / (bucket.frames - 1)
            shapes[row, place] = scenes.SHAPES.index(scene.things[thing].shape)
        if len(drawn) == group or row + 1 == len(part):
            latents.append(shapes_vae.latent_picture(shapes_vae.to_pixels(np.stack(drawn))).half())
            drawn = []
    return Drawn(torch.cat(latents), places, shapes)


def load_bucket(folder: Path, bucket: Bucket, seed: int, worker: int, workers: int, *, weighted: bool) -> Drawn:
    """A worker's part of a bucket, drawn at the first call and read from its file later."""
    path = folder / "scenes" / f"{bucket.name}-{seed}-{worker}.pt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = range(bucket.count * worker // workers, bucket.count * (worker + 1) // workers)
        torch.save(dataclasses.asdict(draw_bucket(bucket, seed, part, weighted=weighted)), path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
    return Drawn(**torch.load(path, weights_only=True))


def latent_statistics(seed: int) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each of the 15 channels over stills and clips of small and default size."""
    totals = []
    for name in ("64px1f", "64px9f", "128px1f", "128px9f"):
        count = 100 if BUCKETS[name].frames > 1 else 1000
        flat = draw_bucket(BUCKETS[name], seed, range(count), weighted=False).latents.float().transpose(0, 1).flatten(1)
        totals.append(torch.stack([flat.mean(1), flat.square().mean(1)]))
    mean, square = torch.stack(totals).mean(0)
    return mean, (square - mean.square()).sqrt()
