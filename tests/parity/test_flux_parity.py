"""FLUX.1 against diffusers' own ``__call__`` in another process: same weights, seed and steps, float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from oracle import Oracle
from parity import Local
from tiny_flux import CHANNELS, make_tiny_flux, make_tiny_flux_schnell, make_tiny_flux_unipc

from diffgen.loading.index import ModelIndex

# The quick part of the suite has Wan for the mechanism that all families share.
pytestmark = pytest.mark.slow

TINY = parity.PICTURE | {"num_inference_steps": 2, "guidance_scale": 3.5, "max_sequence_length": 16}
SCHNELL = {name: TINY[name] for name in TINY if name != "guidance_scale"}
CFG = parity.CFG

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
MIXES: dict[str, parity.Mix] = {
    "two": parity.TWO,
    "guidances-and-true-cfg": parity.GUIDANCES_AND_CFG,
    "texts-of-any-length": [
        ({"prompt": "", "num_inference_steps": 8}, 1),
        ({"prompt": "a red cat on a green sofa " * 14, "seed": 9, "num_inference_steps": 8}, 0),
    ],
}


def _schnell_moves(case: parity.Case) -> dict[str, parity.Case]:
    return parity.changes(case, true_cfg=CFG | {"true_cfg_scale": 5.0})


def _moves(case: parity.Case) -> dict[str, parity.Case]:
    return _schnell_moves(case) | {"guidance": {"guidance_scale": 6.0}}


@pytest.fixture(scope="module")
def local(model_folder: Path) -> Local:
    return Local.load(make_tiny_flux(model_folder / "tiny-flux"))


@pytest.fixture(scope="module")
def unipc(model_folder: Path) -> Local:
    return Local.load(make_tiny_flux_unipc(model_folder / "tiny-flux-unipc"))


@pytest.fixture(scope="module")
def schnell(model_folder: Path) -> Local:
    return Local.load(make_tiny_flux_schnell(model_folder / "tiny-flux-schnell"))


@pytest.mark.parametrize("case", parity.params(CASES))
def test_equals_diffusers(oracle: Oracle, local: Local, case: dict[str, Any]) -> None:
    parity.check_equal(oracle, local, TINY | case, _moves)


@pytest.mark.parametrize("case", parity.params(SCHNELL_CASES))
def test_without_embedded_guidance_equals_diffusers(oracle: Oracle, schnell: Local, case: dict[str, Any]) -> None:
    parity.check_equal(oracle, schnell, SCHNELL | case, _schnell_moves)


@pytest.mark.parametrize("case", parity.params({"5-steps": {"num_inference_steps": 5}, "wide": {"width": 128, **CFG}}))
def test_another_scheduler_of_the_folder_equals_diffusers(oracle: Oracle, unipc: Local, case: dict[str, Any]) -> None:
    parity.check_equal(oracle, unipc, TINY | case, _moves)


@pytest.mark.parametrize("mix", parity.params(MIXES))
def test_shared_forwards_equal_each_alone(oracle: Oracle, local: Local, mix: parity.Mix) -> None:
    parity.check_shared_forwards(oracle, local, TINY, mix, unit=1e-3)


@pytest.mark.parametrize("change", [{"width": 96}, {"width": 32, "height": 128}, {"max_sequence_length": 8}])
def test_other_shapes_do_not_share_a_forward(local: Local, change: dict[str, Any]) -> None:
    """Also where the number of tokens is the same: their places differ."""
    parity.check_keys_differ(local, TINY, TINY | change)


@pytest.mark.parametrize(("case", "rows"), [({}, 1), (CFG, 2), (CFG | {"true_cfg_scale": 1.0}, 1)])
def test_rows_of_a_step(local: Local, case: dict[str, Any], rows: int) -> None:
    parity.check_rows(local, TINY | case | {"n": 3}, [rows * 3] * 2)


def test_image_i_is_a_run_with_seed_plus_i(local: Local) -> None:
    parity.check_seeds(local, TINY)


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
    parity.check_units(local, TINY | CFG | {"num_inference_steps": 3, "n": 2}, 3 + 3 + 2)


def test_warnings_for_what_is_cut_and_what_has_no_effect(local: Local, schnell: Local) -> None:
    def warnings(model: Local, **case: Any) -> tuple[str, ...]:
        return model.warnings(SCHNELL | case)

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


REFUSED: dict[str, Any] = {"width": 72, "height": 8, "num_frames": 5, "max_sequence_length": 513}
REFUSED |= {"scheduler": "euler", "flow_shift": 2.0, "clip_skip": 1}


@pytest.mark.parametrize(("param", "value"), REFUSED.items())
def test_what_the_model_does_not_take_is_refused(local: Local, param: str, value: Any) -> None:
    parity.check_refused(local, TINY | {param: value}, param)


def test_defaults_follow_the_kind_of_model(local: Local, schnell: Local, tmp_path: Path) -> None:
    index = ModelIndex(tmp_path, "FluxPipeline", {})  # without defaults of its own
    dev, fast = (each.pipeline.make_spec(index, "m").defaults for each in (local, schnell))
    assert (dev["num_inference_steps"], dev["guidance_scale"], dev["max_sequence_length"]) == (28, 3.5, 512)
    assert (fast["num_inference_steps"], fast["max_sequence_length"]) == (4, 256)
    assert "guidance_scale" not in fast


def test_bfloat16_has_the_noise_and_the_picture_of_float32(local: Local) -> None:
    parity.check_bfloat16(local, TINY)


@pytest.mark.slow
def test_through_a_server_of_two_ranks(oracle: Oracle, local: Local) -> None:
    cases = [
        TINY | {"num_inference_steps": 8},
        TINY | CFG | {"seed": 40, "num_inference_steps": 5, "guidance_scale": 1.0, "n": 2},
        TINY | {"seed": 50, "width": 96, "num_inference_steps": 3},
    ]
    packed = (2, 4 * 4, 4 * CHANNELS)
    parity.check_server(oracle, local.folder, "flux", cases, packed, num_gpus=2)
