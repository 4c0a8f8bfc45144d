"""Pictures and clips from a shapes model through diffusers' WanPipeline, and sheets of them."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from diffusers import WanPipeline
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Frames = NDArray[np.uint8]


@dataclasses.dataclass(frozen=True)
class SamplingSettings:
    """How pictures are sampled."""

    steps: int = 20
    guidance: float = 3.0
    size: int = 128
    text_length: int = 32
    batch: int = 12


@dataclasses.dataclass(frozen=True)
class Job:
    """One picture or clip to make."""

    caption: str
    seed: int
    frames: int = 1
    negative: str = ""


def load(model: Path, dtype: torch.dtype = torch.float32) -> WanPipeline:
    """The pipeline of a model's folder."""
    pipeline = WanPipeline.from_pretrained(model, torch_dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@torch.no_grad()
def generate(pipeline: WanPipeline, jobs: list[Job], settings: SamplingSettings) -> list[Frames]:
    """Frames (frames, height, width, 3) of bytes for each job; a job's pixels depend on its own seed alone."""
    out: dict[int, Frames] = {}
    order = sorted(range(len(jobs)), key=lambda i: jobs[i].frames)
    while order:
        frames = jobs[order[0]].frames
        room = max(settings.batch // (1 if frames == 1 else frames // 4 + 1), 1)
        group = [i for i in order[:room] if jobs[i].frames == frames]
        order = order[len(group) :]
        video = pipeline(
            prompt=[jobs[i].caption for i in group],
            negative_prompt=[jobs[i].negative for i in group],
            height=settings.size,
            width=settings.size,
            num_frames=frames,
            num_inference_steps=settings.steps,
            guidance_scale=settings.guidance,
            generator=[torch.Generator().manual_seed(jobs[i].seed) for i in group],
            max_sequence_length=settings.text_length,
            output_type="np",
        ).frames
        for i, clip in zip(group, video, strict=True):
            out[i] = np.rint(np.asarray(clip) * 255).clip(0, 255).astype(np.uint8)
    return [out[i] for i in range(len(jobs))]


def sheet(items: Iterable[tuple[Frames, str]], columns: int = 6, side: int = 128) -> Image.Image:
    """A sheet of clips with words below; of a clip, its first and last frame side by side."""
    tiles = []
    for frames, words in items:
        shown = [frames[0]] if len(frames) == 1 else [frames[0], frames[-1]]
        tile = Image.new("RGB", (side + 8, side + 58), "white")
        part = side // len(shown)
        for index, frame in enumerate(shown):
            place = (4 + index * part, 4)
            tile.paste(Image.fromarray(frame).resize((part, part), Image.Resampling.LANCZOS), place)
        ImageDraw.Draw(tile).multiline_text((4, side + 6), "\n".join(textwrap.wrap(words, 23)[:4]), "black", spacing=1)
        tiles.append(tile)
    if not tiles:
        return Image.new("RGB", (1, 1), "white")
    width, height = tiles[0].size
    rows = -(-len(tiles) // columns)
    page = Image.new("RGB", (width * min(columns, len(tiles)), height * rows), "white")
    for index, tile in enumerate(tiles):
        page.paste(tile, (index % columns * width, index // columns * height))
    return page


def save_clip(path: Path, clips: list[Frames], scale: int = 2, milliseconds: int = 120) -> None:
    """Write clips of equal length side by side as one looping GIF."""
    wide = np.concatenate(clips, axis=2)
    frames = [
        Image.fromarray(frame).resize((frame.shape[1] * scale, frame.shape[0] * scale), Image.Resampling.LANCZOS)
        for frame in wide
    ]
    pauses = [milliseconds] * (len(frames) - 1) + [milliseconds * 6]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=pauses, loop=0, optimize=True)
