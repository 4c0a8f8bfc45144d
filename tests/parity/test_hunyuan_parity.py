"""HunyuanVideo against diffusers' own ``__call__`` in another process: same weights, seed and steps, float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import THREADS, Oracle, level_difference
from parity import MAX_LEVELS, MIN_MOVE, Local, check, check_shared_forwards, forwards
from tiny_hunyuan import make_tiny_hunyuan

from diffgen import DiffGenerator
from diffgen.request import Update
from diffgen.worker.worker import fingerprint

TINY = {
    "prompt": "a red circle on a blue background",
    "seed": 7,
    "width": 64,
    "height": 64,
    "num_frames": 1,
    "num_inference_steps": 2,
    "guidance_scale": 6.0,
    "max_sequence_length": 24,
}
UNIPC = {"scheduler": "UniPCMultistepScheduler", "flow_shift": 3.0}
CFG = {"true_cfg_scale": 3.0, "negative_prompt": "a blurry dark photo"}

CASES: dict[str, dict[str, Any]] = {
    "1-step": {"num_inference_steps": 1},
    "2-steps": {},
    "5-steps": {"num_inference_steps": 5},
    "8-steps": {"num_inference_steps": 8},
    "guidance-zero": {"guidance_scale": 0.0},
    "guidance-1": {"guidance_scale": 1.0},
    "guidance-9": {"guidance_scale": 9.0},
    "true-cfg": CFG,
    "true-cfg-8-steps": CFG | {"num_inference_steps": 8, "true_cfg_scale": 1.5},
    "true-cfg-empty-negative": CFG | {"negative_prompt": ""},
    "true-cfg-off": CFG | {"true_cfg_scale": 1.0},
    "true-cfg-without-negative": {"true_cfg_scale": 3.0},
    "empty-prompt": {"prompt": ""},
    "cut-prompt": {"max_sequence_length": 8},
    "beyond-clip": {"prompt": "a red cat on a green sofa " * 14, "max_sequence_length": 40},
    "other-text-length": {"max_sequence_length": 40},
    "5-frames": {"num_frames": 5},
    "9-frames": {"num_frames": 9, **CFG},
    "17-frames-in-two-pieces": {"num_frames": 17},
    "25-frames-in-two-pieces": {"num_frames": 25, "width": 32, "height": 32},
    "29-frames-in-three-pieces": {"num_frames": 29, "width": 32, "height": 48, "n": 2},
    "wide": {"width": 160, "height": 64},
    "tall-clip": {"width": 48, "height": 80, "num_frames": 5},
    "n-4": {"n": 4},
    "n-3-clips": {"n": 3, "num_frames": 5, **CFG},
    "large-seed": {"seed": 2**63 - 1},
    "flow-shift": {"flow_shift": 3.0},
    "unipc": UNIPC | {"num_inference_steps": 8},
    "unipc-clip": UNIPC | CFG | {"num_inference_steps": 5, "num_frames": 5},
}
MIXES: dict[str, list[tuple[dict[str, Any], int]]] = {
    "two": [({"num_inference_steps": 8}, 3), ({"prompt": "a dog", "seed": 9, "num_inference_steps": 5}, 0)],
    "guidances-and-true-cfg": [
        ({"num_inference_steps": 8, "guidance_scale": 2.0}, 4),
        ({"prompt": "a cat", "seed": 9, "num_inference_steps": 6, **CFG}, 2),
        ({"seed": 11, "num_inference_steps": 4, "guidance_scale": 9.0, "n": 2}, 0),
    ],
    "clips-two-schedulers": [
        ({"num_frames": 5, "num_inference_steps": 8, **UNIPC}, 4),
        ({"num_frames": 5, "num_inference_steps": 6, "seed": 9}, 1),
    ],
}


def _params(cases: Mapping[str, Any]) -> list[Any]:
    return [pytest.param(case, id=name) for name, case in cases.items()]


def _controls(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    one = case | {"n": 1}
    prompt = "green star" if case["prompt"] != "green star" else "white square"
    changed = {
        "prompt": {"prompt": prompt},
        "guidance": {"guidance_scale": 3.0},
        "seed": {"seed": case["seed"] // 2 + 1},
        "true_cfg": CFG | {"true_cfg_scale": 5.0},
    }
    return {name: one | change for name, change in changed.items()}


@pytest.fixture(scope="module")
def folder(model_folder: Path) -> Path:
    return make_tiny_hunyuan(model_folder / "tiny-hunyuan")


@pytest.fixture(scope="module")
def local(folder: Path) -> Iterator[Local]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield Local.load(folder)
    torch.set_num_threads(before)


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


@pytest.mark.parametrize(("case", "rows"), [({}, 1), (CFG, 2), (CFG | {"true_cfg_scale": 1.0}, 1)])
def test_rows_of_a_step(local: Local, case: dict[str, Any], rows: int) -> None:
    with forwards(local.pipeline.pipe.transformer) as seen:
        local.pixels(TINY | case | {"n": 3})
    assert seen == [rows * 3] * 2


@pytest.mark.parametrize("scheduler", [{}, UNIPC])
def test_a_unit_changes_no_request(local: Local, scheduler: dict[str, Any]) -> None:
    req = local.enter(TINY | scheduler | {"num_inference_steps": 3, "num_frames": 29, "width": 32, "height": 32})
    units = 0
    while req.stage < len(local.pipeline.stages):
        first, second = (local.executor.run(local.pipeline.stages[req.stage], [req])[0] for _ in range(2))
        assert type(first) is type(second) is Update
        assert fingerprint(first) == fingerprint(second)
        local.unit([req])
        units += 1
    assert units == 3 + 3 + 3


def test_warnings_for_what_is_cut_and_what_has_no_effect(local: Local) -> None:
    def warnings(**case: Any) -> tuple[str, ...]:
        req = local.enter(TINY | case)
        local.unit([req])
        return req.warnings

    assert warnings() == ()
    (cut,) = warnings(max_sequence_length=8)
    assert "prompt has" in cut
    assert "Llama reads 8" in cut
    assert cut.endswith("'a blue background'")  # after four words and four tokens of the template
    assert any("CLIP reads 77" in each for each in warnings(prompt="a cat " * 60, max_sequence_length=300))
    (unused,) = warnings(negative_prompt="a dog")
    assert unused == "negative_prompt has no effect: true_cfg_scale 1.0 is off; it must be more than 1"
    (alone,) = warnings(true_cfg_scale=2.0)
    assert "true_cfg_scale has no effect" in alone


@pytest.mark.slow
def test_through_the_server(oracle: Oracle, folder: Path) -> None:
    with DiffGenerator.from_pretrained(str(folder), device="cpu", dtype="float32", threads=THREADS) as generator:
        assert generator.model.family == "hunyuan-video"
        cases = [TINY | {"num_inference_steps": 8}, TINY | CFG | {"seed": 40, "num_frames": 5}]
        handles = [generator.submit(**case) for case in cases]
        for case, handle, reference in zip(cases, handles, oracle.run_all(folder, cases), strict=True):
            pixels = handle.result(60).pixels
            assert level_difference(pixels, reference.pixels) <= MAX_LEVELS
            other = generator.generate(**case | {"seed": 1}).pixels
            assert level_difference(other, reference.pixels) >= MIN_MOVE
