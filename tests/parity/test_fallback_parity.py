"""The fallback against diffusers' own ``__call__`` in another process: same weights, seed and steps, float32."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import parity
import pytest
import tiny_fallback
from oracle import Oracle, Reference, level_difference, relative_difference
from parity import MAX_LEVELS, MAX_RELATIVE, MIN_MOVE, Local, forwards

from diffgen import DiffGenerator
from diffgen.args import RunArgs
from diffgen.distributed.dims import choose_dims
from diffgen.errors import InvalidRequest, NanOutput, RequestCancelled
from diffgen.loading.index import read_index
from diffgen.wire.messages import Progress
from diffgen.worker.context import StageError
from pipelines.fallback import FallbackPipeline

# The quick part of the suite has Wan for the mechanism that all families share.
pytestmark = pytest.mark.slow

TINY = parity.PICTURE | {"num_inference_steps": 3, "guidance_scale": 4.0}
#: What the model takes beside those, and what its pipeline is told beside that.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pixart": ({"max_sequence_length": 16}, {"use_resolution_binning": False}),
    "cogvideox": ({"max_sequence_length": 16, "num_frames": 9}, {}),
    "ltx": ({"max_sequence_length": 16, "num_frames": 9}, {"frame_rate": 8}),
    "kandinsky": ({}, {}),
}
CASES: dict[str, dict[str, Any]] = {
    "3-steps": {},
    "1-step": {"num_inference_steps": 1},
    "8-steps": {"num_inference_steps": 8},
    "guidance-off": {"guidance_scale": 1.0},
    "negative-prompt": {"negative_prompt": "a blurry dark photo"},
    "wide": {"width": 128},
}
VIDEO_CASES = {"longer": {"num_frames": 17, "num_inference_steps": 2}}
ALL = [(model, name) for model in MODELS for name in CASES]
ALL += [(model, name) for model in ("cogvideox", "ltx") for name in VIDEO_CASES]


Models = Callable[[str], Local]


def _case(model: str, **changes: Any) -> dict[str, Any]:
    return TINY | MODELS[model][0] | changes


def _references(oracle: Oracle, models: Models, model: str, cases: list[dict[str, Any]]) -> list[Reference]:
    return oracle.run_all(models(model).folder, [case | MODELS[model][1] for case in cases])


@pytest.fixture(scope="module")
def models(model_folder: Path) -> Models:
    loaded: dict[str, Local] = {}

    def local(model: str) -> Local:
        if model not in loaded:
            make = getattr(tiny_fallback, f"make_{model}")
            loaded[model] = Local.load(make(model_folder / f"tiny-{model}"))
        return loaded[model]

    return local


@pytest.fixture(scope="module")
def served(models: Models) -> Iterator[DiffGenerator]:
    with parity.serve(models("pixart").folder) as generator:
        yield generator


@pytest.mark.parametrize(("model", "name"), ALL)
def test_equals_diffusers(oracle: Oracle, models: Models, model: str, name: str) -> None:
    case = _case(model, **(CASES | VIDEO_CASES)[name])
    moves: dict[str, parity.Case] = {"guidance": {"guidance_scale": 8.0}, "seed": {"seed": 1}}
    moves["prompt"] = {"prompt": "a green star"}
    parity.check_equal(oracle, models(model), case, lambda _: moves, MODELS[model][1])


@pytest.mark.parametrize("model", MODELS)
def test_requests_that_take_turns_equal_each_alone(oracle: Oracle, models: Models, model: str) -> None:
    local = models(model)
    cases = [_case(model), _case(model, seed=20, prompt="a dog", num_inference_steps=5, guidance_scale=2.0)]
    reqs = [local.enter(case) for case in cases]
    stages = local.pipeline.stages
    while running := [req for req in reqs if req.stage < len(stages)]:
        for req in running:
            assert stages[req.stage].batch_key(req) is None
            local.unit([req])
    for req, reference in zip(reqs, _references(oracle, models, model, cases), strict=True):
        pixels, _ = local.finish(req)
        assert level_difference(pixels, reference.pixels) <= MAX_LEVELS


@pytest.mark.parametrize("model", MODELS)
def test_several_outputs(oracle: Oracle, models: Models, model: str) -> None:
    local, case = models(model), _case(model, negative_prompt="a blurry dark photo")
    req = local.enter(case | {"n": 2})
    assert local.denoise.units(req) == 2 * local.denoise.units(local.enter(case))
    pixels, _ = local.finish(req)
    latents = local.enter(case | {"n": 2, "output_type": "latent"})
    while latents.stage < len(local.pipeline.stages):
        local.unit([latents])
    assert latents.frames == ()
    assert latents.latents is not None
    assert len(latents.latents) == 2
    references = _references(oracle, models, model, [case | {"seed": seed} for seed in (7, 8)])
    for index, reference in enumerate(references):
        assert level_difference(pixels[index : index + 1], reference.pixels) <= MAX_LEVELS
        one = latents.latents[index : index + 1].float().numpy()
        if one.shape == reference.latents.shape:  # else the callback has them packed
            assert relative_difference(one, reference.latents) <= MAX_RELATIVE
    assert level_difference(pixels[:1], pixels[1:]) >= MIN_MOVE
    # As one batch, where diffusers takes a count.
    if model not in ("cogvideox", "kandinsky"):
        (batch,) = _references(oracle, models, model, [case | {"n": 2}])
        assert level_difference(pixels, batch.pixels) <= MAX_LEVELS


@pytest.mark.parametrize(("model", "steps"), [("pixart", 4), ("kandinsky", 25 + 4)])
def test_units_are_the_pipelines_own_steps(models: Models, model: str, steps: int) -> None:
    local = models(model)
    req = local.enter(_case(model, num_inference_steps=4))
    seen: list[int] = []
    hook = local.denoiser.register_forward_pre_hook(lambda *_: seen.append(req.unit))
    while req.stage == 0:
        assert local.pipeline.stages[0].units(req) == steps
        local.unit([req])
    hook.remove()
    assert seen == list(range(steps - 4, steps))  # a forward a unit
    assert local.pipeline.stages[1].units(req) == 1


def _step_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("steps-")}


def test_a_request_that_is_dropped_ends_its_call(models: Models) -> None:
    local = models("pixart")
    with forwards(local.denoiser) as seen:
        reqs = [local.at_step(_case("pixart", num_inference_steps=50, seed=seed), 3) for seed in (1, 2)]
    assert len(seen) == 6
    assert len(_step_threads()) == 2
    reqs.pop()
    assert len(_step_threads()) == 1
    local.finish(reqs[0])
    assert not _step_threads()


def test_what_fails_ends_its_call_and_leaves_the_next_alone(oracle: Oracle, models: Models) -> None:
    local = models("pixart")
    decoder = local.pipeline.pipe.vae.decoder.conv_out
    bias = decoder.bias.clone()
    req = local.at_step(_case("pixart"), 2)
    local.unit([req])
    decoder.bias.data.fill_(float("nan"))
    (failed,) = local.executor.run(local.pipeline.stages[1], [req])
    decoder.bias.data.copy_(bias)
    assert isinstance(failed, StageError)
    assert isinstance(failed.error, NanOutput)
    (failed,) = local.executor.run(local.pipeline.stages[0], [models("ltx").enter(_case("ltx", width=68))])
    assert isinstance(failed, StageError)
    assert not _step_threads()
    pixels, _ = local.pixels(_case("pixart"))
    (reference,) = _references(oracle, models, "pixart", [_case("pixart")])
    assert level_difference(pixels, reference.pixels) <= MAX_LEVELS


def test_the_pipelines_own_refusal_is_an_invalid_request(models: Models) -> None:
    local = models("ltx")
    (failed,) = local.executor.run(local.pipeline.stages[0], [local.enter(_case("ltx", width=68))])
    assert isinstance(failed, StageError)
    assert isinstance(failed.error, InvalidRequest)
    assert "LTXPipeline refuses the request" in str(failed.error)
    assert "divisible by 32" in str(failed.error)


@pytest.mark.parametrize(
    ("model", "change", "code"),
    [
        ("ltx", {"scheduler": "euler"}, "unsupported_parameter"),
        ("pixart", {"clip_skip": 1}, "unsupported_parameter"),
        ("kandinsky", {"max_sequence_length": 16}, "unsupported_parameter"),
        ("pixart", {"num_frames": 5}, "invalid_num_frames"),
        ("pixart", {"width": 72}, "invalid_size"),
        ("cogvideox", {"num_frames": 8}, "invalid_num_frames"),
    ],
)
def test_refused_before_any_work(models: Models, model: str, change: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        models(model).enter(_case(model, **change))
    assert refused.value.code == code


def test_other_sizes_than_asked_are_told(models: Models) -> None:
    local = models("kandinsky")
    req = local.enter(_case("kandinsky", width=96, num_inference_steps=1))
    pixels, _ = local.finish(req)
    assert pixels.shape == (1, 1, 64, 128, 3)
    (warning,) = req.warnings
    assert warning.startswith("asked for 1 x 1 frames of 96 x 64 pixels, ")
    assert warning.endswith("made 1 x 1 frames of 128 x 64")


def test_what_diffusers_logs_is_a_warning(models: Models) -> None:
    local = models("pixart")
    long = {"prompt": "two small cats and three large dogs moving fast on a green sofa", "max_sequence_length": 8}
    reqs = [local.enter(_case("pixart", n=2, **long)), local.enter(_case("pixart"))]
    while reqs[0].stage < len(local.pipeline.stages):
        local.unit(reqs[:1])
        if reqs[1].stage < len(local.pipeline.stages):
            local.unit(reqs[1:])
    cut = [[each for each in req.warnings if "truncated" in each] for req in reqs]
    assert [len(each) for each in cut] == [1, 0]
    assert cut[0][0].startswith("PixArtSigmaPipeline: The following part of your input was truncated")
    assert "green sofa" in cut[0][0]


# Through the server.


def test_served_with_progress(oracle: Oracle, served: DiffGenerator, models: Models) -> None:
    assert served.model.family == "fallback"
    case = _case("pixart", n=2)
    handle = served.submit(**case)
    progress = [(event.stage, event.step, event.total) for event in handle.events() if isinstance(event, Progress)]
    assert progress == [*[("denoise", step, 6) for step in range(1, 7)], ("decode", 1, 1)]
    result = handle.result(60)
    assert result.seeds == (7, 8)
    (reference,) = _references(oracle, models, "pixart", [case])
    assert level_difference(result.pixels, reference.pixels) <= MAX_LEVELS
    alone = served.generate(**_case("pixart", seed=8)).pixels
    assert level_difference(result.pixels[1:], alone) <= MAX_LEVELS
    assert level_difference(result.pixels[:1], alone) >= MIN_MOVE


def test_cancel_stops_the_steps(oracle: Oracle, served: DiffGenerator, models: Models) -> None:
    def units() -> int:
        (beat,) = parity.heartbeats(served)
        return beat.units["denoise"]

    handle = served.submit(**_case("pixart", num_inference_steps=500))
    for event in handle.events():
        if isinstance(event, Progress) and event.step == 5:
            break
    handle.cancel()
    with pytest.raises(RequestCancelled):
        handle.result(60)
    stopped = units()
    pixels = served.generate(**_case("pixart")).pixels
    (reference,) = _references(oracle, models, "pixart", [_case("pixart")])
    assert level_difference(pixels, reference.pixels) <= MAX_LEVELS
    assert units() - stopped == 3  # the next request's alone


def test_layouts_are_refused(models: Models) -> None:
    """A call of diffusers' own cannot be shared out."""
    folder = models("pixart").folder
    for asked in ({}, {"ulysses_degree": 2}, {"enable_cfg_parallel": True}):
        run = RunArgs(num_gpus=2, **asked)
        index = read_index(folder, None)
        with pytest.raises(InvalidRequest, match="diffusers' own"):
            choose_dims(run, FallbackPipeline.abilities(index), index.pipeline_class)
