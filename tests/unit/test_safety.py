"""The safety stage, and decoded parts as one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from diffgen.params import SamplingParams
from diffgen.request import Req
from stages.safety import SafetyStage


class FlagsBright:
    """A family whose checker flags what is bright."""

    def flag_pictures(self, pictures: torch.Tensor) -> Sequence[bool]:
        assert pictures.dtype == torch.uint8
        assert pictures.ndim == 4
        flags: Sequence[bool] = (pictures.amax(dim=(1, 2, 3)) > 200).tolist()
        return flags


def request(*frames: torch.Tensor, outputs: int, output_type: Any = "pil") -> Req:
    params = SamplingParams(prompt="", seed=5, num_outputs_per_prompt=outputs, output_type=output_type)
    return Req("r", params, warnings=("earlier",), frames=frames)


def parts(*values: int) -> list[torch.Tensor]:
    return [torch.full((1, 1, 2, 4, 3), value, dtype=torch.uint8) for value in values]


def check(req: Req) -> tuple[torch.Tensor, tuple[str, ...]]:
    context: Any = None
    (update,) = SafetyStage(FlagsBright()).run([req], context)
    return update.frames[0], update.warnings


def test_parts_are_joined_by_output_or_by_frame() -> None:
    outputs = request(*parts(1, 2, 3), outputs=3).pixels
    assert outputs.shape == (3, 1, 2, 4, 3)
    assert outputs[:, 0, 0, 0, 0].tolist() == [1, 2, 3]
    frames = request(*parts(1, 2, 3), outputs=1).pixels
    assert frames.shape == (1, 3, 2, 4, 3)
    assert frames[0, :, 0, 0, 0].tolist() == [1, 2, 3]
    both = request(torch.cat(parts(1, 2)), torch.cat(parts(3, 4)), outputs=2).pixels
    assert both[:, :, 0, 0, 0].tolist() == [[1, 3], [2, 4]]


def test_flagged_pictures_are_black_and_named() -> None:
    req = request(*parts(10, 250, 20), outputs=3)
    pixels, warnings = check(req)
    assert pixels.amax(dim=(1, 2, 3, 4)).tolist() == [10, 0, 20]
    assert warnings[0] == "earlier"
    (flagged,) = warnings[1:]
    assert flagged.startswith("output 1 (seed 6) was flagged by the safety checker and is black")
    assert [int(part.max()) for part in req.frames] == [10, 250, 20]  # only a committed update changes a request


def test_one_frame_of_a_clip_may_be_flagged() -> None:
    pixels, warnings = check(request(*parts(10, 250, 20), outputs=1))
    assert pixels[0, :, 0, 0, 0].tolist() == [10, 0, 20]
    assert len(warnings) == 2


def test_nothing_is_flagged_without_pixels() -> None:
    stage = SafetyStage(FlagsBright())
    assert stage.units(request(outputs=1, output_type="latent")) == 0
    assert stage.units(request(*parts(1), outputs=1)) == 1
    assert check(request(*parts(1), outputs=1))[1] == ("earlier",)
