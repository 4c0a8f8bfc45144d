"""HunyuanVideo against diffusers' own ``__call__`` in another process: same weights, seed and steps, float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
from oracle import Oracle
from parity import Local
from tiny_hunyuan import make_tiny_hunyuan

# The quick part of the suite has Wan for the mechanism that all families share.
pytestmark = pytest.mark.slow

TINY = parity.PICTURE | {"num_frames": 1, "num_inference_steps": 2, "guidance_scale": 6.0, "max_sequence_length": 24}
UNIPC = {"scheduler": "UniPCMultistepScheduler", "flow_shift": 3.0}
CFG = parity.CFG

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
MIXES: dict[str, parity.Mix] = {
    "two": parity.TWO,
    "guidances-and-true-cfg": parity.GUIDANCES_AND_CFG,
    "clips-two-schedulers": [
        ({"num_frames": 5, "num_inference_steps": 8, **UNIPC}, 4),
        ({"num_frames": 5, "num_inference_steps": 6, "seed": 9}, 1),
    ],
}


def _moves(case: parity.Case) -> dict[str, parity.Case]:
    return parity.changes(case, guidance={"guidance_scale": 3.0}, true_cfg=CFG | {"true_cfg_scale": 5.0})


@pytest.fixture(scope="module")
def local(model_folder: Path) -> Local:
    return Local.load(make_tiny_hunyuan(model_folder / "tiny-hunyuan"))


@pytest.mark.parametrize("case", parity.params(CASES))
def test_equals_diffusers(oracle: Oracle, local: Local, case: dict[str, Any]) -> None:
    parity.check_equal(oracle, local, TINY | case, _moves)


@pytest.mark.parametrize("mix", parity.params(MIXES))
def test_shared_forwards_equal_each_alone(oracle: Oracle, local: Local, mix: parity.Mix) -> None:
    parity.check_shared_forwards(oracle, local, TINY, mix)


@pytest.mark.parametrize(("case", "rows"), [({}, 1), (CFG, 2), (CFG | {"true_cfg_scale": 1.0}, 1)])
def test_rows_of_a_step(local: Local, case: dict[str, Any], rows: int) -> None:
    parity.check_rows(local, TINY | case | {"n": 3}, [rows * 3] * 2)


@pytest.mark.parametrize("scheduler", [{}, UNIPC])
def test_a_unit_changes_no_request(local: Local, scheduler: dict[str, Any]) -> None:
    clip = {"num_inference_steps": 3, "num_frames": 29, "width": 32, "height": 32}
    parity.check_units(local, TINY | scheduler | clip, 3 + 3 + 3)


def test_warnings_for_what_is_cut_and_what_has_no_effect(local: Local) -> None:
    def warnings(**case: Any) -> tuple[str, ...]:
        return local.warnings(TINY | case)

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
def test_through_the_server(oracle: Oracle, local: Local) -> None:
    cases = [TINY | {"num_inference_steps": 8}, TINY | CFG | {"seed": 40, "num_frames": 5}]
    parity.check_server(oracle, local.folder, "hunyuan-video", cases)
