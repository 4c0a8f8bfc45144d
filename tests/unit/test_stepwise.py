"""Calls that stand still between units, and which pipelines the fallback can call."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import diffusers
import pytest
import torch

from pipelines.signature import reason_against
from stages.stepwise import Pause, StepwiseCall


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("steps-")]


def test_a_call_goes_on_step_by_step() -> None:
    done: list[int] = []

    def function(pause: Pause) -> str:
        for step in range(3):
            done.append(step)
            pause(torch.tensor(step))
        return "made"

    call = StepwiseCall(function)
    assert done == []
    for step in range(3):
        call.advance()
        assert done == list(range(step + 1))
        assert call.told.latents == step
        assert not call.told.done
    for _ in range(2):
        call.advance()
        assert call.told.done
        assert call.told.made == "made"


@pytest.mark.parametrize("steps", [0, 2])
def test_a_call_that_is_dropped_ends_where_it_stands(steps: int) -> None:
    events: list[str] = []

    def function(pause: Pause) -> None:
        try:
            while True:
                events.append("step")
                try:
                    pause(None)
                except Exception:
                    events.append("caught")  # as a pipeline that goes on after any error
        finally:
            events.append("ended")

    gc.disable()  # what ends it must not wait for the collector
    try:
        call = StepwiseCall(function)
        for _ in range(steps):
            call.advance()
        assert len(_threads()) == 1
        del call
        assert _threads() == []
    finally:
        gc.enable()
    assert events == ["step"] * steps + ["ended"] * (steps > 0)


def test_a_call_that_raises_has_ended_and_holds_nothing() -> None:
    class Large:
        pass

    large: list[weakref.ref[Large]] = []

    def function(pause: Pause) -> None:
        held = Large()
        large.append(weakref.ref(held))
        pause(None)
        raise ValueError("step 2")

    gc.disable()
    try:
        call = StepwiseCall(function)
        call.advance()
        assert large[0]() is not None
        message = ""
        try:
            call.advance()
        except ValueError as error:
            message = str(error)
        assert message == "step 2"
        assert call.told.done
        call._thread.join()
        assert large[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (diffusers.StableDiffusion3Pipeline, None),
        (diffusers.PixArtAlphaPipeline, None),
        (diffusers.AnimateDiffPipeline, None),
        (diffusers.FluxKontextPipeline, None),
        (diffusers.Flux2Pipeline, None),
        (diffusers.StableCascadeCombinedPipeline, None),
        (diffusers.TextToVideoSDPipeline, None),
        (diffusers.StableDiffusion3Img2ImgPipeline, "needs pictures"),
        (diffusers.WanImageToVideoPipeline, "needs pictures"),
        (diffusers.CogVideoXVideoToVideoPipeline, "needs pictures"),
        (diffusers.StableDiffusionControlNetPipeline, "needs pictures"),
        (diffusers.StableDiffusionUpscalePipeline, "needs pictures"),
        (diffusers.QwenImageEditPipeline, "needs pictures"),
        (diffusers.StableVideoDiffusionPipeline, "needs pictures"),
        (diffusers.KandinskyV22Pipeline, "image_embeds"),
        (diffusers.DDPMPipeline, "no text"),
        (diffusers.StableAudioPipeline, "width"),
        (diffusers.StableDiffusionPAGPipeline, "take turns"),
    ],
)
def test_why_a_pipeline_cannot_be_served(kind: Any, reason: str | None) -> None:
    told = reason_against(kind)
    assert told is None if reason is None else reason in str(told), told
