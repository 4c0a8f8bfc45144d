"""Encoded texts that are used again, and pictures drawn before a server is ready."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from diffgen import DiffGenerator
from diffgen.errors import InvalidRequest, StartFailed

CASE = {"width": 64, "height": 64, "num_frames": 1, "num_inference_steps": 3, "negative_prompt": "blue " * 30}


@pytest.mark.slow
def test_a_text_used_again_gives_the_same_pixels(tiny_wan: Path) -> None:
    with DiffGenerator.from_pretrained(
        str(tiny_wan), num_gpus=2, device="cpu", text_cache_mb=1, warmup="64x64,64x96x5"
    ) as generator:
        status = generator.status()
        assert (status.finished, status.ticks, status.units) == ({}, 0, {}), "warming up leaves nothing"
        prompts = [f"a {colour} circle" for colour in ("red", "green", "blue")] * 2
        first, second = ([generator.generate(p, seed=1, **CASE) for p in prompts[i : i + 3]] for i in (0, 3))
        for one, other in zip(first, second, strict=True):
            assert np.array_equal(one.pixels, other.pixels)
            assert one.warnings == other.warnings != ()
        cache = generator.status().text_cache
        assert (cache["hits"], cache["misses"]) == (3, 3)
        assert 0 < cache["bytes"] <= 2**20
        assert not np.array_equal(first[0].pixels, first[1].pixels)


def test_sizes_that_cannot_be_drawn_are_no_start(tiny_wan: Path) -> None:
    with pytest.raises(InvalidRequest, match="512x512"):
        DiffGenerator.from_pretrained(str(tiny_wan), device="cpu", warmup="64")
    with pytest.raises(StartFailed, match=r"cannot warm up with 100x64: width 100 must be a multiple of 16"):
        DiffGenerator.from_pretrained(str(tiny_wan), device="cpu", warmup="100x64")
