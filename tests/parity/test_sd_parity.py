"""Stable Diffusion 1.x, 2.x and XL against diffusers' own ``__call__`` in another process, in float32.

Schedulers are given to diffusers as its pages have it: ``from_config`` of the folder's settings.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import diffusers
import parity
import pytest
from diffusers import UNet2DConditionModel
from oracle import Oracle, level_difference, relative_difference
from parity import MAX_LEVELS, MAX_RELATIVE, MIN_MOVE, Local
from tiny_sd import TEXT_LAYERS, make_tiny_sd, make_tiny_sd_checked, make_tiny_sd_v, make_tiny_sdxl

from diffgen.errors import InvalidRequest, ModelError
from diffgen.worker.context import StageError
from stages.schedulers import NOISE_SCHEDULERS

TINY = parity.PICTURE | {"num_inference_steps": 4, "guidance_scale": 4.0}
# diffusers' own, of schedulers that mix tensors and numpy.
# The quick part of the suite has Wan for the mechanism that all families share.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:__array:DeprecationWarning")]

LONG = "a red circle on a blue background and a dog " * 2

CASES: dict[str, dict[str, Any]] = {
    **{f"{steps}-steps": {"num_inference_steps": steps} for steps in range(1, 9)},
    "guidance-off": {"guidance_scale": 1.0},
    "guidance-zero": {"guidance_scale": 0.0},
    "guidance-below-1": {"guidance_scale": 0.5},
    "guidance-just-on": {"guidance_scale": 1.25},
    "negative-prompt": {"negative_prompt": "blurry dark photo"},
    "negative-prompt-empty": {"negative_prompt": ""},
    "negative-prompt-unused": {"negative_prompt": "blurry dark photo", "guidance_scale": 1.0},
    "empty-prompt": {"prompt": "", "negative_prompt": "a dog"},
    "cut-prompts": {"prompt": LONG, "negative_prompt": LONG[6:]},
    "wide": {"width": 136, "height": 64},
    "tall": {"width": 56, "height": 96},
    "odd-latents": {"width": 72, "height": 40},
    "n-4": {"n": 4},
    "n-4-off": {"n": 4, "guidance_scale": 1.0},
    "large-seed": {"seed": 2**63 - 1},
    "clip-skip-0": {"clip_skip": 0},
    "clip-skip-1": {"clip_skip": 1, "negative_prompt": "a dog"},
    "clip-skip-most": {"clip_skip": TEXT_LAYERS - 1},
}
# Requests by the class of their scheduler; those before it may have had another number of evaluations a step.
EULER_A, HEUN, UNIPC = (
    {"scheduler": f"{name}Scheduler"} for name in ("EulerAncestralDiscrete", "HeunDiscrete", "UniPCMultistep")
)
MIXES: dict[str, parity.Mix] = {
    "two": parity.TWO,
    "guided-and-not": parity.GUIDED_AND_NOT,
    "four-schedulers": [
        ({"num_inference_steps": 8, "n": 2, **EULER_A}, 4),
        ({"num_inference_steps": 6, "seed": 9, **HEUN}, 3),
        ({"num_inference_steps": 8, "seed": 11, **UNIPC}, 2),
        ({"num_inference_steps": 8, "seed": 13}, 1),
    ],
    "clip-skips": [({"num_inference_steps": 8, "clip_skip": 1}, 2), ({"seed": 9, "num_inference_steps": 6}, 0)],
}
MODELS = {"sd": make_tiny_sd, "sd-v": make_tiny_sd_v, "sdxl": make_tiny_sdxl}


def _moves(case: parity.Case) -> dict[str, parity.Case]:
    return parity.changes(case, guidance={"guidance_scale": 8.0})


@pytest.fixture(scope="module", params=MODELS)
def local(request: pytest.FixtureRequest, model_folder: Path) -> Local:
    return Local.load(MODELS[request.param](model_folder / f"tiny-{request.param}"))


@pytest.mark.parametrize("case", parity.params(CASES))
def test_equals_diffusers(oracle: Oracle, local: Local, case: dict[str, Any]) -> None:
    parity.check_equal(oracle, local, TINY | case, _moves)


@pytest.mark.parametrize("name", NOISE_SCHEDULERS)
def test_schedulers_equal_diffusers(oracle: Oracle, local: Local, name: str) -> None:
    kind, settings = NOISE_SCHEDULERS[name]
    for steps in (1, 2, 8) if local.folder.name == "tiny-sd" else (5,):
        case = TINY | {"num_inference_steps": steps, "n": 2, "scheduler": name}
        told = {"scheduler": kind, "scheduler_options": settings}
        parity.check_equal(oracle, local, case, lambda _: {"seed": {"seed": 3}}, told)


def test_schedulers_by_class_have_the_settings_of_the_folder(oracle: Oracle, local: Local) -> None:
    names = [name for name in local.pipeline.spec.schedulers if name.endswith("Scheduler")]
    assert set(names) == {kind for kind, _ in NOISE_SCHEDULERS.values()}
    cases = [TINY | {"scheduler": name, "num_inference_steps": 3} for name in names]
    for case, reference in zip(cases, oracle.run_all(local.folder, cases), strict=True):
        parity.check(reference, *local.pixels(case), {})


@pytest.mark.parametrize("name", ["LCMScheduler", "TCDScheduler"])
def test_a_scheduler_of_the_folder_alone_equals_diffusers(
    oracle: Oracle, local: Local, tmp_path: Path, name: str
) -> None:
    """Of those that no request can name."""
    copy = Path(shutil.copytree(local.folder, tmp_path / "model"))
    getattr(diffusers, name).from_config(local.pipeline.pipe.scheduler.config).save_pretrained(copy / "scheduler")
    index = json.loads((copy / "model_index.json").read_text())
    (copy / "model_index.json").write_text(json.dumps(index | {"scheduler": ["diffusers", name]}))
    case = TINY | {"n": 2}
    parity.check(oracle.run(local.folder, case | {"scheduler": name}), *Local.load(copy).pixels(case), {})


def test_samplers_with_noise_keep_each_output_apart(local: Local) -> None:
    for name in ("euler_a", "ddpm", "dpm++_sde", "dpm2_a"):
        parity.check_seeds(local, TINY | {"scheduler": name})


@pytest.mark.parametrize("mix", parity.params(MIXES))
def test_shared_forwards_equal_each_alone(oracle: Oracle, local: Local, mix: parity.Mix) -> None:
    parity.check_shared_forwards(oracle, local, TINY, mix)


@pytest.mark.parametrize(("guidance", "rows"), [(4.0, 2), (1.0, 1), (0.0, 1)])
def test_rows_of_a_step(local: Local, guidance: float, rows: int) -> None:
    case = TINY | {"guidance_scale": guidance, "n": 3, "scheduler": "heun"}
    parity.check_rows(local, case, [rows * 3] * (2 * 4 - 1))


@pytest.mark.parametrize("name", ["pndm", "euler_a", "unipc", "heun"])
def test_a_unit_changes_no_request(local: Local, name: str) -> None:
    steps = {"pndm": 4, "heun": 5}.get(name, 3)
    # An image a unit of the decode.
    parity.check_units(local, TINY | {"num_inference_steps": 3, "n": 2, "scheduler": name}, 3 + steps + 2)


def test_cut_texts_are_named_with_what_is_lost(local: Local) -> None:
    def warnings(**case: Any) -> tuple[str, ...]:
        return local.warnings(TINY | case)

    assert warnings() == ()
    # A character a token, without the spaces; 75 of them beside the two that stand around a text.
    long = "a bc " * 25 + "de fgh"
    (cut,) = warnings(prompt=long)
    assert cut == "prompt has 82 tokens and the encoder reads 77; cut off: 'de fgh'"
    both = warnings(prompt=long, negative_prompt=long)
    assert [each.partition(" ")[0] for each in both] == ["prompt", "negative_prompt"]
    assert len(warnings(prompt=long, negative_prompt=long, guidance_scale=1.0)) == 2
    (unread,) = warnings(negative_prompt="a dog", guidance_scale=1.0)
    assert unread.startswith("negative_prompt has no effect")


REFUSED: list[tuple[str, Any]] = [
    *[("width", 60), ("num_frames", 5), ("clip_skip", TEXT_LAYERS + 1), ("flow_shift", 2.0)],
    *[("scheduler", "FlowMatchEulerDiscreteScheduler"), ("scheduler", "DPMSolverSDEScheduler")],
    ("max_sequence_length", 40),
]


@pytest.mark.parametrize(("param", "value"), REFUSED)
def test_what_the_model_does_not_take_is_refused(local: Local, param: str, value: Any) -> None:
    parity.check_refused(local, TINY | {param: value}, param)


def test_the_most_clip_skip_works_and_one_more_is_refused(local: Local) -> None:
    most = local.pipeline.spec.most_clip_skip
    local.pixels(TINY | {"clip_skip": most})
    with pytest.raises(InvalidRequest, match=f"has {most} layers to leave out"):
        local.enter(TINY | {"clip_skip": most + 1})


def test_defaults_come_from_the_unet(local: Local) -> None:
    index = type("Bare", (), {"defaults": {}})()
    defaults = local.pipeline.make_spec(index, "m").defaults
    assert (defaults["width"], defaults["height"], defaults["num_inference_steps"]) == (64, 64, 50)
    xl = local.pipeline.spec.family == "stable-diffusion-xl"
    assert defaults["guidance_scale"] == (5.0 if xl else 7.5)


def test_bfloat16_has_the_noise_and_the_picture_of_float32(local: Local) -> None:
    parity.check_bfloat16(local, TINY | {"num_inference_steps": 2, "guidance_scale": 1.0}, 0.3)


def test_a_schedule_that_diffusers_cannot_make_is_refused(local: Local, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(local.folder, tmp_path / "model"))
    path = copy / "scheduler" / "scheduler_config.json"
    path.write_text(path.read_text().replace('"skip_prk_steps": true', '"skip_prk_steps": false'))
    changed = Local.load(copy)
    case = TINY | {"scheduler": "pndm", "num_inference_steps": 3}
    req = changed.enter(case)
    changed.unit([req])
    failed = changed.executor.run(changed.pipeline.stages[req.stage], [req])[0]
    assert isinstance(failed, StageError)
    assert isinstance(failed.error, InvalidRequest)
    assert failed.error.param == "num_inference_steps"
    assert "num_inference_steps 3: PNDMScheduler has no such schedule" in failed.error.message
    changed.pixels(case | {"num_inference_steps": 4})


# The safety checker.


@pytest.fixture(scope="module")
def checked_folder(model_folder: Path) -> Path:
    return make_tiny_sd_checked(model_folder / "tiny-sd-checked")


def test_flagged_pictures_are_black_as_diffusers_has_them(
    oracle: Oracle, checked_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("diffusers.pipelines.pipeline_loading_utils")
    logger.addHandler(caplog.handler)
    try:
        checked, free = Local.load(checked_folder, safety_checker=True), Local.load(checked_folder)
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records, "the checker's layers"
    case = TINY | {"n": 8}
    reference = oracle.run(checked_folder, case)
    black = [index for index, picture in enumerate(reference.pixels) if not picture.any()]
    assert 0 < len(black) < 8

    req = checked.enter(case)
    pixels, latents = checked.finish(req)
    parity.check(reference, pixels, latents, {})
    assert [text.partition(" was flagged by the safety checker and is black")[0] for text in req.warnings] == [
        f"output {index} (seed {7 + index})" for index in black
    ]
    unchecked = free.pixels(case)[0]
    assert free.pipeline.pipe.safety_checker is None
    for index, picture in enumerate(unchecked):
        assert picture.any()
        same = level_difference(picture[None], pixels[index : index + 1]) <= MAX_LEVELS
        assert same == (index not in black)


def test_a_model_without_a_safety_checker_says_so(local: Local) -> None:
    with pytest.raises(ModelError, match="has no safety checker"):
        Local.load(local.folder, safety_checker=True)


def test_what_only_the_safety_checker_needs_may_be_missing(checked_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checked_folder, tmp_path / "model"))
    shutil.rmtree(folder / "safety_checker")
    shutil.rmtree(folder / "feature_extractor")
    local = Local.load(folder)
    assert level_difference(local.pixels(TINY)[0], Local.load(checked_folder).pixels(TINY)[0]) == 0
    with pytest.raises(ModelError, match=r"no folder feature_extractor/; no folder safety_checker/"):
        Local.load(folder, safety_checker=True)


def test_a_unet_that_takes_guidance_as_an_input_is_refused(local: Local, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(local.folder, tmp_path / "model"))
    config = UNet2DConditionModel.load_config(copy / "unet")
    UNet2DConditionModel.from_config(config, time_cond_proj_dim=8).save_pretrained(copy / "unet")
    with pytest.raises(ModelError, match="time_cond_proj_dim"):
        Local.load(copy)


@pytest.mark.slow
def test_through_the_server(oracle: Oracle, checked_folder: Path) -> None:
    with parity.serve(checked_folder, safety_checker=True) as generator:
        assert generator.model.family == "stable-diffusion"
        cases = [
            TINY | {"num_inference_steps": 8, "n": 4},
            TINY | {"seed": 40, "num_inference_steps": 5, "guidance_scale": 1.0, **EULER_A},
            TINY | {"seed": 50, "width": 96, "clip_skip": 1},
        ]
        handles = [generator.submit(**case) for case in cases]
        results = [handle.result(60) for handle in handles]
        for case, result, reference in zip(cases, results, oracle.run_all(checked_folder, cases), strict=True):
            assert level_difference(result.pixels, reference.pixels) <= MAX_LEVELS
            assert sum(not picture.any() for picture in reference.pixels) == len(result.warnings)
            latents = generator.generate(**case, output_type="latent").latents
            assert relative_difference(latents, reference.latents) <= MAX_RELATIVE
            moved = generator.generate(**case | {"seed": 1}, output_type="latent").latents
            assert relative_difference(moved, reference.latents) > 0.1
        assert results[0].pixels.shape == (4, 1, 64, 64, 3)
        assert max(int(picture.max()) for picture in results[0].pixels) >= MIN_MOVE
