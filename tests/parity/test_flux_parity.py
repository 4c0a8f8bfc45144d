"""FLUX.1 against diffusers' own ``__call__`` in another process: same weights, seed and steps, float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import THREADS, Oracle, level_difference, relative_difference
from parity import MAX_LEVELS, MAX_RELATIVE, MIN_MOVE, Local, check, check_shared_forwards, forwards
from tiny_flux import CHANNELS, make_tiny_flux, make_tiny_flux_schnell, make_tiny_flux_unipc

from diffgen import DiffGenerator
from diffgen.errors import InvalidRequest
from diffgen.loading.index import ModelIndex
from diffgen.request import Update
from diffgen.worker.worker import fingerprint

TINY = {
    "prompt": "a red circle on a blue background",
    "seed": 7,
    "width": 64,
    "height": 64,
    "num_inference_steps": 2,
    "guidance_scale": 3.5,
    "max_sequence_length": 16,
}
SCHNELL = {name: TINY[name] for name in TINY if name != "guidance_scale"}
CFG = {"true_cfg_scale": 3.0, "negative_prompt": "a blurry dark photo"}

CASES: dict[str, dict[str, Any]] = {
    "1-step": {"num_inference_steps": 1},
    "2-steps": {},
    "3-steps": {"num_inference_steps": 3},
    "5-steps": {"num_inference_steps": 5},
    "8-steps": {"num_inference_steps": 8},
    "guidance-zero": {"guidance_scale": 0.0},
    "guidance-1": {"guidance_scale": 1.0},
    "guidance-10": {"guidance_scale": 10.0},
    "true-cfg": CFG,
    "true-cfg-8-steps": CFG | {"num_inference_steps": 8, "true_cfg_scale": 1.5},
    "true-cfg-empty-negative": CFG | {"negative_prompt": ""},
    "true-cfg-long-negative": CFG | {"negative_prompt": "a cat and a dog on a sofa in a house " * 3},
    "true-cfg-off": CFG | {"true_cfg_scale": 1.0},
    "true-cfg-zero": CFG | {"true_cfg_scale": 0.0},
    "true-cfg-without-negative": {"true_cfg_scale": 3.0},
    "empty-prompt": {"prompt": ""},
    "cut-prompt": {"prompt": "two small cats and three large dogs moving fast on a green sofa in a bright house"},
    "beyond-clip": {"prompt": "a red cat on a green sofa " * 14, "max_sequence_length": 100},
    "other-text-length": {"max_sequence_length": 7},
    "512-tokens": {"max_sequence_length": 512},
    "one-token": {"width": 16, "height": 16},
    "wide": {"width": 192, "height": 96},
    "tall": {"width": 48, "height": 80, **CFG},
    "odd-tokens": {"width": 80, "height": 112},
    "n-4": {"n": 4},
    "n-4-true-cfg": {"n": 4, **CFG},
    "large-seed": {"seed": 2**63 - 1},
}
SCHNELL_CASES: dict[str, dict[str, Any]] = {
    "1-step": {"num_inference_steps": 1},
    "4-steps": {"num_inference_steps": 4},
    "n-4-wide": {"n": 4, "width": 96, "height": 48},
    "true-cfg": CFG,
}
MIXES: dict[str, list[tuple[dict[str, Any], int]]] = {
    "two": [({"num_inference_steps": 8}, 3), ({"prompt": "a dog", "seed": 9, "num_inference_steps": 5}, 0)],
    "guidances-and-true-cfg": [
        ({"num_inference_steps": 8, "guidance_scale": 2.0}, 4),
        ({"prompt": "a cat", "seed": 9, "num_inference_steps": 6, **CFG}, 2),
        ({"seed": 11, "num_inference_steps": 4, "guidance_scale": 9.0, "n": 2}, 0),
    ],
    "texts-of-any-length": [
        ({"prompt": "", "num_inference_steps": 8}, 1),
        ({"prompt": "a red cat on a green sofa " * 14, "seed": 9, "num_inference_steps": 8}, 0),
    ],
}


def _params(cases: Mapping[str, Any]) -> list[Any]:
    return [pytest.param(case, id=name) for name, case in cases.items()]


def _controls(case: dict[str, Any], *, guidance: bool = True) -> dict[str, dict[str, Any]]:
    one = case | {"n": 1}
    changed: dict[str, dict[str, Any]] = {
        "prompt": {"prompt": "green star"},
        "seed": {"seed": case["seed"] // 2 + 1},
        "true_cfg": CFG | {"true_cfg_scale": 5.0},
    }
    if guidance:
        changed["guidance"] = {"guidance_scale": 6.0}
    return {name: one | change for name, change in changed.items()}


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(model_folder: Path) -> Path:
    return make_tiny_flux(model_folder / "tiny-flux")


@pytest.fixture(scope="module")
def schnell_folder(model_folder: Path) -> Path:
    return make_tiny_flux_schnell(model_folder / "tiny-flux-schnell")


@pytest.fixture(scope="module")
def local(folder: Path) -> Local:
    return Local.load(folder)


@pytest.fixture(scope="module")
def unipc_folder(model_folder: Path) -> Path:
    return make_tiny_flux_unipc(model_folder / "tiny-flux-unipc")


@pytest.fixture(scope="module")
def unipc(unipc_folder: Path) -> Local:
    return Local.load(unipc_folder)


@pytest.fixture(scope="module")
def schnell(schnell_folder: Path) -> Local:
    return Local.load(schnell_folder)


@pytest.mark.parametrize("case", _params(CASES))
def test_equals_diffusers(oracle: Oracle, local: Local, folder: Path, case: dict[str, Any]) -> None:
    case = TINY | case
    pixels, latents = local.pixels(case)
    controls = {name: local.pixels(control)[0] for name, control in _controls(case).items()}
    check(oracle.run(folder, case), pixels, latents, controls)


@pytest.mark.parametrize("case", _params(SCHNELL_CASES))
def test_without_embedded_guidance_equals_diffusers(
    oracle: Oracle, schnell: Local, schnell_folder: Path, case: dict[str, Any]
) -> None:
    case = SCHNELL | case
    pixels, latents = schnell.pixels(case)
    controls = {name: schnell.pixels(control)[0] for name, control in _controls(case, guidance=False).items()}
    check(oracle.run(schnell_folder, case), pixels, latents, controls)


@pytest.mark.parametrize("case", _params({"5-steps": {"num_inference_steps": 5}, "wide": {"width": 128, **CFG}}))
def test_another_scheduler_of_the_folder_equals_diffusers(
    oracle: Oracle, unipc: Local, unipc_folder: Path, case: dict[str, Any]
) -> None:
    case = TINY | case
    pixels, latents = unipc.pixels(case)
    controls = {name: unipc.pixels(control)[0] for name, control in _controls(case).items()}
    check(oracle.run(unipc_folder, case), pixels, latents, controls)


@pytest.mark.parametrize("mix", _params(MIXES))
def test_shared_forwards_equal_each_alone(
    oracle: Oracle, local: Local, folder: Path, mix: list[tuple[dict[str, Any], int]]
) -> None:
    check_shared_forwards(local, oracle, folder, [(TINY | case, step) for case, step in mix])


@pytest.mark.parametrize("change", [{"width": 96}, {"width": 32, "height": 128}, {"max_sequence_length": 8}])
def test_other_shapes_do_not_share_a_forward(local: Local, change: dict[str, Any]) -> None:
    """Also where the number of tokens is the same: their places differ."""
    keys = {local.denoise.batch_key(local.at_step(case, 0)) for case in (TINY, TINY | change)}
    assert len(keys) == 2


@pytest.mark.parametrize(("case", "rows"), [({}, 1), (CFG, 2), (CFG | {"true_cfg_scale": 1.0}, 1)])
def test_rows_of_a_step(local: Local, case: dict[str, Any], rows: int) -> None:
    with forwards(local.pipeline.pipe.transformer) as seen:
        local.pixels(TINY | case | {"n": 3})
    assert seen == [rows * 3] * 2


def test_image_i_is_a_run_with_seed_plus_i(local: Local) -> None:
    together = local.pixels(TINY | {"n": 3})[0]
    for index in range(3):
        alone = local.pixels(TINY | {"seed": 7 + index})[0]
        assert level_difference(together[index : index + 1], alone) <= MAX_LEVELS
    assert level_difference(together[:1], together[1:2]) >= MIN_MOVE


def test_the_shift_grows_with_the_picture(local: Local, schnell: Local) -> None:
    sizes = [{"width": 64, "height": 64}, {"width": 128, "height": 128}]
    dev, plain = ([each.at_step(SCHNELL | size, 0).timesteps for size in sizes] for each in (local, schnell))
    assert dev[0] is not None
    assert dev[1] is not None
    assert dev[0][-1] < dev[1][-1]
    assert plain[0] is not None
    assert plain[0].tolist() == [1000.0, 500.0]
    assert torch.equal(plain[0], plain[1] if plain[1] is not None else torch.empty(0))


def test_a_unit_changes_no_request(local: Local) -> None:
    req, units = local.enter(TINY | CFG | {"num_inference_steps": 3, "n": 2}), 0
    while req.stage < len(local.pipeline.stages):
        first, second = (local.executor.run(local.pipeline.stages[req.stage], [req])[0] for _ in range(2))
        assert type(first) is type(second) is Update
        assert fingerprint(first) == fingerprint(second)
        local.unit([req])
        units += 1
    assert units == 3 + 3 + 2


def test_warnings_for_what_is_cut_and_what_has_no_effect(local: Local, schnell: Local) -> None:
    def warnings(model: Local, **case: Any) -> tuple[str, ...]:
        req = model.enter(SCHNELL | case)
        model.unit([req])
        return req.warnings

    assert warnings(local, guidance_scale=2.0, **CFG) == warnings(schnell) == ()
    (cut,) = warnings(local, max_sequence_length=5)
    assert cut == "prompt has 8 tokens and the T5 encoder reads 5; cut off: 'a blue background'"
    t5, clip = warnings(local, prompt="a cat " * 60, max_sequence_length=100)
    assert t5.startswith("prompt has 121 tokens and the T5 encoder reads 100; cut off: 'cat a")
    assert clip.startswith("prompt has 122 tokens and the CLIP encoder reads 77; cut off: 'cat a")
    negative = warnings(local, true_cfg_scale=2.0, negative_prompt="a cat " * 60, max_sequence_length=512)
    assert [each.split(" has")[0] for each in negative] == ["negative_prompt"]
    for text in ("a dog", ""):
        (unused,) = warnings(local, negative_prompt=text)
        assert unused == "negative_prompt has no effect: true_cfg_scale 1.0 is off; it must be more than 1"
    (alone,) = warnings(local, true_cfg_scale=2.0)
    assert "true_cfg_scale has no effect: flux guides only with a negative_prompt" in alone
    (no_input,) = warnings(schnell, guidance_scale=0.0)
    assert "guidance_scale has no effect" in no_input


@pytest.mark.parametrize(
    ("case", "param"),
    [
        ({"width": 72}, "width"),
        ({"height": 8}, "height"),
        ({"num_frames": 5}, "num_frames"),
        ({"max_sequence_length": 513}, "max_sequence_length"),
        ({"scheduler": "euler"}, "scheduler"),
        ({"flow_shift": 2.0}, "flow_shift"),
        ({"clip_skip": 1}, "clip_skip"),
    ],
)
def test_what_the_model_does_not_take_is_refused(local: Local, case: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        local.enter(TINY | case)
    assert caught.value.param == param


def test_defaults_follow_the_kind_of_model(local: Local, schnell: Local, tmp_path: Path) -> None:
    index = ModelIndex(tmp_path, "FluxPipeline", {})  # without defaults of its own
    dev, fast = (each.pipeline.make_spec(index, "m").defaults for each in (local, schnell))
    assert (dev["num_inference_steps"], dev["guidance_scale"], dev["max_sequence_length"]) == (28, 3.5, 512)
    assert (fast["num_inference_steps"], fast["max_sequence_length"]) == (4, 256)
    assert "guidance_scale" not in fast


def test_bfloat16_has_the_noise_and_the_picture_of_float32(local: Local, folder: Path) -> None:
    half = Local.load(folder, "bfloat16")
    noise = [each.at_step(TINY, 0).latents for each in (local, half)]
    assert noise[0] is not None
    assert noise[1] is not None
    assert torch.equal(noise[0], noise[1])
    pixels = [torch.from_numpy(each.pixels(TINY)[0]).float() for each in (local, half)]
    other = torch.from_numpy(local.pixels(TINY | {"seed": 999})[0]).float()
    assert (pixels[0] - pixels[1]).abs().mean() < 0.2 * (pixels[0] - other).abs().mean()


@pytest.mark.slow
def test_through_a_server_of_two_ranks(oracle: Oracle, folder: Path) -> None:
    options: dict[str, Any] = {"num_gpus": 2, "device": "cpu", "dtype": "float32", "threads": THREADS}
    with DiffGenerator.from_pretrained(str(folder), **options) as generator:
        assert generator.model.family == "flux"
        cases = [
            TINY | {"num_inference_steps": 8},
            TINY | CFG | {"seed": 40, "num_inference_steps": 5, "guidance_scale": 1.0, "n": 2},
            TINY | {"seed": 50, "width": 96, "num_inference_steps": 3},
        ]
        handles = [generator.submit(**case) for case in cases]
        for case, handle, reference in zip(cases, handles, oracle.run_all(folder, cases), strict=True):
            assert level_difference(handle.result(60).pixels, reference.pixels) <= MAX_LEVELS
            other = generator.generate(**case | {"seed": 1}).pixels
            assert level_difference(other, reference.pixels) >= MIN_MOVE
        latents = generator.generate(**cases[1], output_type="latent").latents
        # Packed, as diffusers' output_type="latent".
        assert tuple(latents.shape) == (2, 4 * 4, 4 * CHANNELS)
        assert relative_difference(latents, oracle.run(folder, cases[1]).latents) <= MAX_RELATIVE
