"""What a preview takes for the picture: the latents without their noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch

from stages.preview import clean_latents
from stages.schedulers import make_flow_scheduler, make_noise_scheduler

# The numbers of this model need no scaling before a step.
pytestmark = pytest.mark.filterwarnings("ignore:__array:DeprecationWarning", "ignore:The `scale_model_input`")

CLEAN = torch.linspace(-1, 1, 48).view(1, 3, 4, 4)
NOISE = torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["ddim", "euler", "lms", "dpm++", "deis", "unipc"])
def test_a_model_that_knows_the_noise_shows_the_picture_from_its_first_step(name: str) -> None:
    scheduler = make_noise_scheduler(diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=False), name)
    _check(scheduler, lambda latents: NOISE)


@pytest.mark.parametrize("name", ["euler", "unipc", "dpm++"])
def test_flow_matching(name: str) -> None:
    scheduler = make_flow_scheduler(diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), name, None)
    _check(scheduler, lambda latents: NOISE - CLEAN)


def _check(scheduler: Any, predict: Callable[[torch.Tensor], torch.Tensor]) -> None:
    scheduler.set_timesteps(6)
    time = scheduler.timesteps[:1]
    if hasattr(scheduler, "add_noise"):
        latents = scheduler.add_noise(CLEAN, NOISE, time)
    else:
        latents = scheduler.scale_noise(CLEAN, time, NOISE)
    for step, time in enumerate(scheduler.timesteps):
        before, latents = latents, scheduler.step(predict(latents), time, latents, return_dict=False)[0]
        assert (clean_latents(scheduler, step, before, latents) - CLEAN).abs().max() < 0.05
