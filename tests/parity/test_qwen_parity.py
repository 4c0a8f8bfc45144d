"""Qwen-Image against diffusers' own ``__call__`` in another process: same weights, seed and steps, float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from oracle import Oracle
from parity import Local
from tiny_qwen import CHANNELS, make_tiny_qwen_image

# The quick part of the suite has Wan for the mechanism that all families share.
pytestmark = pytest.mark.slow

TINY = parity.PICTURE | {"num_inference_steps": 2, "max_sequence_length": 32}
CFG = {"true_cfg_scale": 4.0, "negative_prompt": "a blurry dark photo of a very small dog"}
LONG = "two small cats and three large dogs moving fast on a green sofa in a bright house " * 4

# A schedule that ends at a noise above 0, as this one, has no single step.
CASES: dict[str, dict[str, Any]] = {
    "2-steps": {},
    "3-steps": {"num_inference_steps": 3},
    "5-steps": {"num_inference_steps": 5},
    "8-steps": {"num_inference_steps": 8},
    "true-cfg": CFG,
    "true-cfg-by-default": {"negative_prompt": "a dog"},
    "true-cfg-8-steps": CFG | {"num_inference_steps": 8, "true_cfg_scale": 1.5},
    "true-cfg-10": CFG | {"true_cfg_scale": 10.0},
    "true-cfg-equal-lengths": CFG | {"negative_prompt": "a blue circle on a red background"},
    "true-cfg-empty-negative": CFG | {"negative_prompt": ""},
    "true-cfg-space": CFG | {"negative_prompt": " "},
    "true-cfg-long-negative": CFG | {"negative_prompt": LONG, "max_sequence_length": 512},
    "true-cfg-off": CFG | {"true_cfg_scale": 1.0},
    "true-cfg-zero": CFG | {"true_cfg_scale": 0.0},
    "true-cfg-without-negative": {"true_cfg_scale": 3.0},
    "empty-prompt": {"prompt": ""},
    "other-scripts": {"prompt": 'a red 円, "été" {0} on the sea'},
    "cut-prompt": {"prompt": LONG},
    "cut-template": {"max_sequence_length": 9},
    "beyond-1024-tokens": {"prompt": LONG * 16, "max_sequence_length": 1024},
    "one-token": {"width": 16, "height": 16},
    "wide": {"width": 192, "height": 96},
    "tall": {"width": 48, "height": 80, **CFG},
    "odd-tokens": {"width": 80, "height": 112},
    "n-4": {"n": 4},
    "n-4-true-cfg": {"n": 4, **CFG},
    "large-seed": {"seed": 2**63 - 1},
}
# Texts of equal length.
MIXES: dict[str, parity.Mix] = {
    "two": [
        ({"num_inference_steps": 8}, 3),
        ({"prompt": "a white star on a green sofa", "seed": 9, "num_inference_steps": 5}, 0),
    ],
    "true-cfg-and-none": [
        ({"num_inference_steps": 8, "n": 2}, 4),
        (CFG | {"negative_prompt": "a dog on a purple house !", "seed": 9, "num_inference_steps": 6}, 2),
        ({"negative_prompt": "very dark and blurry photo , sharp", "seed": 11, "num_inference_steps": 4}, 0),
    ],
}


def _moves(case: parity.Case) -> dict[str, parity.Case]:
    return parity.changes(case, true_cfg=CFG | {"true_cfg_scale": 7.0})


@pytest.fixture(scope="module")
def local(model_folder: Path) -> Local:
    return Local.load(make_tiny_qwen_image(model_folder / "tiny-qwen-image"))


def test_the_template_has_the_tokens_that_are_left_out(local: Local) -> None:
    """Else the tiny model would test other places of the text than the real one has."""
    pipe = local.pipeline.pipe
    beginning = pipe.prompt_template_encode.split("{}")[0]
    assert len(pipe.tokenizer(beginning).input_ids) == pipe.prompt_template_encode_start_idx


@pytest.mark.parametrize("case", parity.params(CASES))
def test_equals_diffusers(oracle: Oracle, local: Local, case: dict[str, Any]) -> None:
    parity.check_equal(oracle, local, TINY | case, _moves)


@pytest.mark.parametrize("mix", parity.params(MIXES))
def test_shared_forwards_equal_each_alone(oracle: Oracle, local: Local, mix: parity.Mix) -> None:
    parity.check_shared_forwards(oracle, local, TINY, mix, unit=1e-3)


def test_texts_of_other_lengths_share_steps_and_equal_each_alone(oracle: Oracle, local: Local) -> None:
    cases = [
        TINY | {"num_inference_steps": 6},
        TINY | CFG | {"num_inference_steps": 4, "seed": 9, "n": 2},
        TINY | {"num_inference_steps": 5, "prompt": "a cat", "negative_prompt": "", "seed": 30},
        TINY | {"num_inference_steps": 4, "prompt": "a dog", "seed": 50},
    ]
    reqs = [local.at_step(case, step) for case, step in zip(cases, (2, 0, 1, 0), strict=True)]
    assert len({local.denoise.batch_key(req) for req in reqs}) == 1
    with parity.forwards(local.denoiser) as seen:
        while all(local.pipeline.stages[req.stage] is local.denoise for req in reqs):
            local.unit(reqs)
    # Of equal length: the first two prompts; "a cat" and "a dog"; the two negative prompts have others.
    assert sorted(len(each) for each in seen[:4]) == [1, 2, 2, 3]
    parity.check_finished(oracle, local, cases, reqs)


@pytest.mark.parametrize("change", [{"width": 96}, {"width": 32, "height": 128}])
def test_other_sizes_do_not_share_a_forward(local: Local, change: dict[str, Any]) -> None:
    """Also where the number of tokens is the same: their places differ."""
    parity.check_keys_differ(local, TINY, TINY | change)


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        ({}, [3]),
        (CFG, [3, 3]),
        (CFG | {"negative_prompt": "a blue circle on a red background"}, [6]),
        (CFG | {"true_cfg_scale": 1.0}, [3]),
    ],
)
def test_rows_of_a_step(local: Local, case: dict[str, Any], rows: list[int]) -> None:
    parity.check_rows(local, TINY | case | {"n": 3}, rows * 2)


def test_guidance_keeps_the_length_of_each_tokens_prediction(local: Local) -> None:
    req = local.enter(TINY | CFG)
    predictions = [torch.randn(2, 16, 4 * CHANNELS, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    guided = local.pipeline.guide(predictions, req)
    assert torch.allclose(guided.norm(dim=-1), predictions[0].norm(dim=-1))
    assert not torch.allclose(guided, predictions[0], atol=0.1)


def test_image_i_is_a_run_with_seed_plus_i(local: Local) -> None:
    parity.check_seeds(local, TINY)


def test_a_unit_changes_no_request(local: Local) -> None:
    parity.check_units(local, TINY | CFG | {"num_inference_steps": 3}, 3 + 3 + 1)


def test_warnings_for_what_is_cut_and_what_has_no_effect(local: Local) -> None:
    def warnings(**case: Any) -> tuple[str, ...]:
        return local.warnings(TINY | case)

    assert warnings() == warnings(**CFG) == ()
    (cut,) = warnings(max_sequence_length=4)
    assert cut.startswith("prompt has 12 tokens with the end of its template and the encoder reads 4;")
    assert "cut off: ' a blue background<" in cut
    (template,) = warnings(max_sequence_length=9)
    assert template.endswith(r"cut off: '<|im_start|>assistant\n'")
    long, longer = warnings(prompt=LONG, negative_prompt=LONG + LONG)
    ends = local.pipeline.pipe.prompt_template_encode.split("{}")[1]
    count = len(local.pipeline.pipe.tokenizer(LONG + ends).input_ids)
    assert long.startswith(f"prompt has {count} tokens")
    assert longer.startswith("negative_prompt has ")
    for text in ("a dog", ""):
        (unused,) = warnings(negative_prompt=text, true_cfg_scale=1.0)
        assert unused == "negative_prompt has no effect: true_cfg_scale 1.0 is off; it must be more than 1"
    (alone,) = warnings(true_cfg_scale=2.0)
    assert "true_cfg_scale has no effect: qwen-image guides only with a negative_prompt" in alone
    (no_input,) = warnings(guidance_scale=2.0)
    assert "guidance_scale has no effect" in no_input


REFUSED: dict[str, Any] = {"width": 72, "height": 8, "num_frames": 5, "num_inference_steps": 1}
REFUSED |= {"max_sequence_length": 1025, "scheduler": "euler", "flow_shift": 2.0}


@pytest.mark.parametrize(("param", "value"), REFUSED.items())
def test_what_the_model_does_not_take_is_refused(local: Local, param: str, value: Any) -> None:
    parity.check_refused(local, TINY | {param: value}, param)


def test_bfloat16_has_the_noise_and_the_picture_of_float32(local: Local) -> None:
    parity.check_bfloat16(local, TINY)


@pytest.mark.slow
def test_through_the_server(oracle: Oracle, local: Local) -> None:
    cases = [
        TINY | {"num_inference_steps": 8},
        TINY | CFG | {"seed": 40, "num_inference_steps": 5, "n": 2},
        TINY | {"seed": 50, "width": 96, "num_inference_steps": 3},
    ]
    packed = (2, 4 * 4, 4 * CHANNELS)
    parity.check_server(oracle, local.folder, "qwen-image", cases, packed)
