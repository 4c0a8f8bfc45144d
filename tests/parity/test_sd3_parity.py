"""Stable Diffusion 3 and 3.5 against diffusers' own ``__call__`` in another process, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
from oracle import Oracle
from parity import Local
from tiny_sd3 import CLIP_LAYERS, make_tiny_sd3, make_tiny_sd35

# The quick part of the suite has Wan for the mechanism that all families share.
pytestmark = pytest.mark.slow

TINY = parity.PICTURE | {"num_inference_steps": 2, "guidance_scale": 4.0, "max_sequence_length": 16}
UNIPC = {"scheduler": "UniPCMultistepScheduler", "flow_shift": 3.0}
LONG = "a red circle on a blue background and a dog " * 10

CASES: dict[str, dict[str, Any]] = {
    "1-step": {"num_inference_steps": 1},
    "2-steps": {},
    "8-steps": {"num_inference_steps": 8},
    "guidance-off": {"guidance_scale": 1.0},
    "guidance-zero": {"guidance_scale": 0.0},
    "negative-prompt": {"negative_prompt": "a blurry dark photo"},
    "empty-prompt": {"prompt": "", "negative_prompt": "a dog"},
    "cut-prompts": {"prompt": LONG, "negative_prompt": LONG[6:]},
    "wide": {"width": 128},
    "tall": {"width": 48, "height": 96},
    "n-4": {"n": 4},
    "clip-skip-most": {"clip_skip": CLIP_LAYERS - 1, "negative_prompt": "a dog"},
    "flow-shift": {"flow_shift": 7.0},
    "unipc": UNIPC | {"num_inference_steps": 5},
}
#: With a shift by size, a second attention and no T5.
CASES_35 = {name: CASES[name] for name in ("2-steps", "guidance-off", "wide", "cut-prompts")}


def _moves(case: parity.Case) -> dict[str, parity.Case]:
    return parity.changes(case, guidance={"guidance_scale": 8.0 if case["guidance_scale"] <= 1 else 1.0})


@pytest.fixture(scope="module")
def local(model_folder: Path) -> Local:
    return Local.load(make_tiny_sd3(model_folder / "tiny-sd3"))


@pytest.fixture(scope="module")
def local35(model_folder: Path) -> Local:
    return Local.load(make_tiny_sd35(model_folder / "tiny-sd35"))


@pytest.mark.parametrize("case", parity.params(CASES))
def test_equals_diffusers(oracle: Oracle, local: Local, case: dict[str, Any]) -> None:
    parity.check_equal(oracle, local, TINY | case, _moves)


@pytest.mark.parametrize("case", parity.params(CASES_35))
def test_3_5_equals_diffusers(oracle: Oracle, local35: Local, case: dict[str, Any]) -> None:
    parity.check_equal(oracle, local35, TINY | case, _moves)


@pytest.mark.parametrize("mix", parity.params({"two": parity.TWO, "guided-and-not": parity.GUIDED_AND_NOT}))
def test_shared_forwards_equal_each_alone(oracle: Oracle, local: Local, mix: parity.Mix) -> None:
    parity.check_shared_forwards(oracle, local, TINY, mix)


@pytest.mark.parametrize(("guidance", "rows"), [(4.0, 2), (1.0, 1)])
def test_rows_of_a_step(local: Local, guidance: float, rows: int) -> None:
    parity.check_rows(local, TINY | {"guidance_scale": guidance, "n": 3}, [rows * 3] * 2)


def test_a_unit_changes_no_request(local: Local) -> None:
    parity.check_units(local, TINY | UNIPC | {"num_inference_steps": 3, "n": 2}, 3 + 3 + 2)


def test_bfloat16_has_the_noise_and_the_picture_of_float32(local: Local) -> None:
    parity.check_bfloat16(local, TINY)


def test_image_i_is_a_run_with_seed_plus_i(local: Local) -> None:
    parity.check_seeds(local, TINY)


def test_warnings_for_what_is_cut(local: Local, local35: Local) -> None:
    assert local.warnings(TINY) == ()
    long = "a cat and a dog " * 15
    cut = local.warnings(TINY | {"prompt": f"{long} in a house"})
    assert [each.partition(";")[0] for each in cut] == [
        "prompt has 79 tokens and the CLIP encoder reads 77",
        "prompt has 79 tokens and the T5 encoder reads 16",
    ]
    both = TINY | {"negative_prompt": long, "max_sequence_length": 76}
    (negative,) = local.warnings(both | {"negative_prompt": f"{long} in"})
    assert negative == "negative_prompt has 77 tokens and the T5 encoder reads 76; cut off: 'in'"
    assert local35.warnings(TINY | {"max_sequence_length": 4}) == (), "it has no T5"


REFUSED = [("width", 72), ("num_frames", 5), ("max_sequence_length", 513), ("clip_skip", CLIP_LAYERS)]


@pytest.mark.parametrize(("param", "value"), REFUSED)
def test_what_the_model_does_not_take_is_refused(local: Local, param: str, value: Any) -> None:
    parity.check_refused(local, TINY | {param: value}, param)


def test_a_shift_by_size_takes_no_other(local35: Local) -> None:
    parity.check_refused(local35, TINY | {"flow_shift": 3.0}, "flow_shift")
