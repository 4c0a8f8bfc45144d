"""Sana against diffusers' own ``__call__`` in another process: same weights, seed and steps, float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
from oracle import Oracle
from parity import Local
from tiny_sana import make_tiny_sana

# The quick part of the suite has Wan for the mechanism that all families share.
pytestmark = pytest.mark.slow

TINY = parity.PICTURE | {"num_inference_steps": 2, "guidance_scale": 4.0, "max_sequence_length": 16}
UNIPC = {"scheduler": "UniPCMultistepScheduler", "flow_shift": 3.0}
DPM = {"scheduler": "DPMSolverMultistepScheduler", "flow_shift": 3.0}
#: What diffusers is told: it would draw in another size, and scale.
EXACT = {"use_resolution_binning": False}

CASES: dict[str, dict[str, Any]] = {
    "1-step": {"num_inference_steps": 1},
    "2-steps": {},
    "8-steps": {"num_inference_steps": 8},
    "guidance-off": {"guidance_scale": 1.0},
    "guidance-zero": {"guidance_scale": 0.0},
    "negative-prompt": {"negative_prompt": "a blurry dark photo"},
    "negative-prompt-unused": {"negative_prompt": "a blurry dark photo", "guidance_scale": 1.0},
    "empty-prompt": {"prompt": "", "negative_prompt": "a dog"},
    "upper-case": {"prompt": "  A RED circle on a blue background "},
    "cut-prompt": {"max_sequence_length": 8, "negative_prompt": "two small cats and three large dogs on a sofa"},
    "wide": {"width": 128},
    "tall": {"width": 32, "height": 96},
    "n-4": {"n": 4},
    "flow-shift": {"flow_shift": 7.0},
    "unipc": UNIPC | {"num_inference_steps": 5},
    "dpm++": DPM | {"num_inference_steps": 5},
}


def _moves(case: parity.Case) -> dict[str, parity.Case]:
    return parity.changes(case, guidance={"guidance_scale": 8.0 if case["guidance_scale"] <= 1 else 1.0})


@pytest.fixture(scope="module")
def local(model_folder: Path) -> Local:
    return Local.load(make_tiny_sana(model_folder / "tiny-sana"))


@pytest.mark.parametrize("case", parity.params(CASES))
def test_equals_diffusers(oracle: Oracle, local: Local, case: dict[str, Any]) -> None:
    parity.check_equal(oracle, local, TINY | case, _moves, EXACT)


@pytest.mark.parametrize("mix", parity.params({"two": parity.TWO, "guided-and-not": parity.GUIDED_AND_NOT}))
def test_shared_forwards_equal_each_alone(oracle: Oracle, local: Local, mix: parity.Mix) -> None:
    parity.check_shared_forwards(oracle, local, TINY, mix, told=EXACT)


@pytest.mark.parametrize(("guidance", "rows"), [(4.0, 2), (1.0, 1)])
def test_rows_of_a_step(local: Local, guidance: float, rows: int) -> None:
    parity.check_rows(local, TINY | {"guidance_scale": guidance, "n": 3}, [rows * 3] * 2)


def test_a_unit_changes_no_request(local: Local) -> None:
    parity.check_units(local, TINY | UNIPC | {"num_inference_steps": 3, "n": 2}, 3 + 3 + 2)


def test_image_i_is_a_run_with_seed_plus_i(local: Local) -> None:
    parity.check_seeds(local, TINY)


def test_warnings_for_what_is_cut(local: Local) -> None:
    assert local.warnings(TINY) == ()
    cut, negative = local.warnings(TINY | {"max_sequence_length": 6, "negative_prompt": "a cat and a dog in a house"})
    assert cut == ("prompt has 9 tokens with the end of its template and Gemma reads 6; cut off: 'a blue background'")
    assert negative == "negative_prompt has 9 tokens and Gemma reads 6; cut off: 'in a house'"
    assert len(local.warnings(TINY | {"max_sequence_length": 6, "guidance_scale": 1.0})) == 1


@pytest.mark.parametrize(("param", "value"), {"width": 72, "num_frames": 5, "max_sequence_length": 301}.items())
def test_what_the_model_does_not_take_is_refused(local: Local, param: str, value: Any) -> None:
    parity.check_refused(local, TINY | {param: value}, param)
