"""What a caller gets back, in each form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from diffgen.errors import GenerationError
from diffgen.params import SamplingParams
from diffgen.request import OutputBatch, TensorHeader
from diffgen.result import GenerationResult


def result(output_type: Any = "pil", frames: int = 1, outputs: int = 2) -> GenerationResult:
    params = SamplingParams(prompt="a", num_frames=frames, output_type=output_type)
    raw = np.random.default_rng(0).integers(0, 256, (outputs, frames, 4, 6, 3), dtype=np.uint8)
    raw.flags.writeable = False  # as it comes off the wire
    return GenerationResult(id="x", params=params, seeds=tuple(range(outputs)), raw=raw)


def test_pil_images_are_the_exact_pixels() -> None:
    got = result()
    assert [type(image) for image in got.images] == [Image.Image] * 2
    assert got.images[0].size == (6, 4)
    np.testing.assert_array_equal(np.asarray(got.images[1]), got.pixels[1, 0])


def test_np_is_float32_in_0_to_1() -> None:
    got = result("np")
    assert (got.images.dtype, got.images.shape) == (np.float32, (2, 4, 6, 3))
    np.testing.assert_array_equal((got.images * 255).round().astype(np.uint8), got.pixels[:, 0])


def test_pt_has_channels_first() -> None:
    got = result("pt", frames=5)
    assert got.frames.shape == (2, 5, 3, 4, 6)
    assert got.frames.dtype == torch.float32
    assert torch.equal((got.frames[1, 2, 0] * 255).round().to(torch.uint8), torch.tensor(got.pixels[1, 2, :, :, 0]))
    assert result("pt").images.shape == (2, 3, 4, 6)


def test_clips_have_frames_and_no_images() -> None:
    clip = result(frames=5)
    assert clip.is_video
    assert [len(frames) for frames in clip.frames] == [5, 5]
    with pytest.raises(AttributeError, match=r"clips of 5 frames: use \.frames"):
        _ = clip.images


def test_a_still_image_is_a_clip_of_one_frame() -> None:
    assert not result().is_video
    assert [len(frames) for frames in result().frames] == [1, 1]


def test_latents_are_a_writable_tensor_and_no_pixels() -> None:
    raw = np.arange(6, dtype=np.float32).reshape(1, 6)
    raw.flags.writeable = False
    got = GenerationResult(id="x", params=SamplingParams(prompt="a", output_type="latent"), seeds=(1,), raw=raw)
    got.latents[0, 0] = 5
    assert torch.equal(got.latents, torch.arange(6.0).view(1, 6))
    for name in ("pixels", "images", "frames"):
        with pytest.raises(AttributeError, match="latents, not pixels"):
            getattr(got, name)
    with pytest.raises(AttributeError, match="ask for output_type='latent'"):
        _ = result().latents


def test_a_failed_result_raises_its_error_when_looked_at() -> None:
    failed = GenerationResult(id="x", params=SamplingParams(prompt="a"), error=GenerationError("by design"))
    for name in ("pixels", "images", "frames", "latents"):
        with pytest.raises(GenerationError, match="by design"):
            getattr(failed, name)


def test_the_seed_of_a_failed_result_raises_its_error_as_well() -> None:
    failed = GenerationResult(id="x", params=SamplingParams(prompt="a"), error=GenerationError("by design"))
    with pytest.raises(GenerationError):
        _ = failed.seed


def test_what_the_server_said_is_kept() -> None:
    params = SamplingParams(prompt="a", seed=5, num_frames=1)
    output = OutputBatch(
        params=params, seeds=(5, 6), warnings=("w",), timings={"total": 1.0}, peak_memory_mb=2.0, latent=False,
        tensor=TensorHeader("uint8", (2, 1, 4, 4, 3)),
    )  # fmt: skip
    got = GenerationResult.from_output("id", output, np.zeros((2, 1, 4, 4, 3), np.uint8))
    assert (got.id, got.seed, got.seeds, got.warnings) == ("id", 5, (5, 6), ("w",))
    assert (got.timings, got.peak_memory_mb, got.params) == ({"total": 1.0}, 2.0, params)
    assert (got.paths, got.error) == ([], None)
    got.paths.append(Path("x"))
    assert result().paths == [], "results share no list"


def test_results_can_stand_in_lists_and_sets() -> None:
    one, other = result(), result()
    assert [one, other].index(other) == 1
    assert len({one, other}) == 2


def test_the_repr_is_short() -> None:
    assert len(repr(result(frames=5))) < 700
