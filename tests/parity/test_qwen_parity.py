"""Qwen-Image against diffusers' own ``__call__`` in another process: same weights, seed and steps, float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import THREADS, Oracle, level_difference, relative_difference
from parity import MAX_LEVELS, MAX_RELATIVE, MIN_MOVE, Local, check, check_shared_forwards, forwards
from tiny_qwen import CHANNELS, make_tiny_qwen_image

from diffgen import DiffGenerator
from diffgen.errors import InvalidRequest
from diffgen.request import Update
from diffgen.worker.worker import fingerprint

TINY = {
    "prompt": "a red circle on a blue background",
    "seed": 7,
    "width": 64,
    "height": 64,
    "num_inference_steps": 2,
    "max_sequence_length": 32,
}
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
MIXES: dict[str, list[tuple[dict[str, Any], int]]] = {
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


def _params(cases: Mapping[str, Any]) -> list[Any]:
    return [pytest.param(case, id=name) for name, case in cases.items()]


def _controls(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    one = case | {"n": 1}
    changed: dict[str, dict[str, Any]] = {
        "prompt": {"prompt": "green star"},
        "seed": {"seed": case["seed"] // 2 + 1},
        "true_cfg": CFG | {"true_cfg_scale": 7.0},
    }
    return {name: one | change for name, change in changed.items()}


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(model_folder: Path) -> Path:
    return make_tiny_qwen_image(model_folder / "tiny-qwen-image")


@pytest.fixture(scope="module")
def local(folder: Path) -> Local:
    return Local.load(folder)


def test_the_template_has_the_tokens_that_are_left_out(local: Local) -> None:
    """Else the tiny model would test other places of the text than the real one has."""
    pipe = local.pipeline.pipe
    beginning = pipe.prompt_template_encode.split("{}")[0]
    assert len(pipe.tokenizer(beginning).input_ids) == pipe.prompt_template_encode_start_idx


@pytest.mark.parametrize("case", _params(CASES))
def test_equals_diffusers(oracle: Oracle, local: Local, folder: Path, case: dict[str, Any]) -> None:
    case = TINY | case
    pixels, latents = local.pixels(case)
    controls = {name: local.pixels(control)[0] for name, control in _controls(case).items()}
    check(oracle.run(folder, case), pixels, latents, controls)


@pytest.mark.parametrize("mix", _params(MIXES))
def test_shared_forwards_equal_each_alone(
    oracle: Oracle, local: Local, folder: Path, mix: list[tuple[dict[str, Any], int]]
) -> None:
    check_shared_forwards(local, oracle, folder, [(TINY | case, step) for case, step in mix])


def test_texts_of_other_lengths_share_steps_and_equal_each_alone(oracle: Oracle, local: Local, folder: Path) -> None:
    cases = [
        TINY | {"num_inference_steps": 6},
        TINY | CFG | {"num_inference_steps": 4, "seed": 9, "n": 2},
        TINY | {"num_inference_steps": 5, "prompt": "a cat", "negative_prompt": "", "seed": 30},
        TINY | {"num_inference_steps": 4, "prompt": "a dog", "seed": 50},
    ]
    reqs = [local.at_step(case, step) for case, step in zip(cases, (2, 0, 1, 0), strict=True)]
    assert len({local.denoise.batch_key(req) for req in reqs}) == 1
    with forwards(local.pipeline.pipe.transformer) as seen:
        while all(local.pipeline.stages[req.stage] is local.denoise for req in reqs):
            local.unit(reqs)
    # Of equal length: the first two prompts; "a cat" and "a dog"; the two negative prompts have others.
    assert sorted(seen[:4]) == [1, 2, 2, 3]
    for case, req, reference in zip(cases, reqs, oracle.run_all(folder, cases), strict=True):
        pixels, latents = local.finish(req)
        check(reference, pixels, latents, {"seed": local.pixels(case | {"seed": 1, "n": 1})[0]})


@pytest.mark.parametrize("change", [{"width": 96}, {"width": 32, "height": 128}])
def test_other_sizes_do_not_share_a_forward(local: Local, change: dict[str, Any]) -> None:
    """Also where the number of tokens is the same: their places differ."""
    keys = {local.denoise.batch_key(local.at_step(case, 0)) for case in (TINY, TINY | change)}
    assert len(keys) == 2


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
    with forwards(local.pipeline.pipe.transformer) as seen:
        local.pixels(TINY | case | {"n": 3})
    assert seen == rows * 2


def test_guidance_keeps_the_length_of_each_tokens_prediction(local: Local) -> None:
    req = local.enter(TINY | CFG)
    predictions = [torch.randn(2, 16, 4 * CHANNELS, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    guided = local.pipeline.guide(predictions, req)
    assert torch.allclose(guided.norm(dim=-1), predictions[0].norm(dim=-1))
    assert not torch.allclose(guided, predictions[0], atol=0.1)


def test_image_i_is_a_run_with_seed_plus_i(local: Local) -> None:
    together = local.pixels(TINY | {"n": 3})[0]
    for index in range(3):
        alone = local.pixels(TINY | {"seed": 7 + index})[0]
        assert level_difference(together[index : index + 1], alone) <= MAX_LEVELS
    assert level_difference(together[:1], together[1:2]) >= MIN_MOVE


def test_a_unit_changes_no_request(local: Local) -> None:
    req = local.enter(TINY | CFG | {"num_inference_steps": 3})
    while req.stage < len(local.pipeline.stages):
        first, second = (local.executor.run(local.pipeline.stages[req.stage], [req])[0] for _ in range(2))
        assert type(first) is type(second) is Update
        assert fingerprint(first) == fingerprint(second)
        local.unit([req])


def test_warnings_for_what_is_cut_and_what_has_no_effect(local: Local) -> None:
    def warnings(**case: Any) -> tuple[str, ...]:
        req = local.enter(TINY | case)
        local.unit([req])
        return req.warnings

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


@pytest.mark.parametrize(
    ("case", "param"),
    [
        ({"width": 72}, "width"),
        ({"height": 8}, "height"),
        ({"num_frames": 5}, "num_frames"),
        ({"num_inference_steps": 1}, "num_inference_steps"),
        ({"max_sequence_length": 1025}, "max_sequence_length"),
        ({"scheduler": "euler"}, "scheduler"),
        ({"flow_shift": 2.0}, "flow_shift"),
    ],
)
def test_what_the_model_does_not_take_is_refused(local: Local, case: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        local.enter(TINY | case)
    assert caught.value.param == param


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
def test_through_the_server(oracle: Oracle, folder: Path) -> None:
    with DiffGenerator.from_pretrained(str(folder), device="cpu", dtype="float32", threads=THREADS) as generator:
        assert generator.model.family == "qwen-image"
        cases = [
            TINY | {"num_inference_steps": 8},
            TINY | CFG | {"seed": 40, "num_inference_steps": 5, "n": 2},
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
