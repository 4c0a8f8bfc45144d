"""Wan against the diffusers pipeline's own ``__call__`` in another process: same weights, seed and steps, float32.

Bars: pixels at most one level of 255 apart, latents 1e-4 relative. Each comparison comes with controls: another prompt,
guidance or seed moves the picture by three levels or more, so that equality is not that of pictures all alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from oracle import Oracle, level_difference, relative_difference
from parity import MAX_LEVELS, MAX_RELATIVE, MIN_MOVE, Local, forwards

from diffgen import DiffGenerator
from diffgen.handle import GenerationHandle
from diffgen.loading.hub import BUNDLED
from diffgen.request import Update
from diffgen.wire.messages import Progress

TINY = parity.PICTURE | {
    "num_frames": 1,
    "num_inference_steps": 2,
    "guidance_scale": 4.0,
    "max_sequence_length": 16,
}
SHAPES = TINY | {"width": 128, "height": 128, "guidance_scale": 4.0, "max_sequence_length": 32}
WAN22_5B = TINY | {"width": 128, "height": 128}
EULER = {"scheduler": "FlowMatchEulerDiscreteScheduler", "flow_shift": 5.0}
UNIPC = {"scheduler": "UniPCMultistepScheduler", "flow_shift": 3.0}
DPM = {"scheduler": "DPMSolverMultistepScheduler", "flow_shift": 3.0}

# UniPC and DPM++ are multistep: only a few steps in do they use all that they keep.
CASES: dict[str, dict[str, Any]] = {
    "1-step": {"num_inference_steps": 1},
    "2-steps": {},
    "8-steps": {"num_inference_steps": 8},
    "guidance-off": {"guidance_scale": 1.0},
    "guidance-zero": {"guidance_scale": 0.0},
    "guidance-below-1": {"guidance_scale": 0.5},
    "guidance-just-on": {"guidance_scale": 1.25},
    "negative-prompt": {"negative_prompt": "blurry dark photo"},
    "negative-prompt-unused": {"negative_prompt": "blurry dark photo", "guidance_scale": 1.0},
    "empty-prompt": {"prompt": "", "negative_prompt": "a dog"},
    "cut-prompt": {"prompt": "two small cats and three large dogs moving fast on a green sofa in a bright house"},
    "unclean-prompt": {"prompt": "  a red &amp; blue\n circle â€” on   a sofa "},
    "other-text-length": {"max_sequence_length": 8},
    "5-frames": {"num_frames": 5},
    "9-frames": {"num_frames": 9},
    "wide": {"width": 192, "height": 96},
    "tall-clip": {"width": 96, "height": 144, "num_frames": 5},
    "odd-latents": {"width": 80, "height": 112},
    "n-4": {"n": 4},
    "n-4-clips": {"n": 4, "num_frames": 5, "guidance_scale": 1.0},
    "large-seed": {"seed": 2**63 - 1},
    "flow-shift": {"flow_shift": 7.0},
    "euler": EULER | {"num_inference_steps": 8},
    "unipc": UNIPC | {"flow_shift": 5.0, "num_inference_steps": 8},
    "unipc-clip-off": UNIPC | {"num_inference_steps": 5, "num_frames": 5, "guidance_scale": 1.0},
    "unipc-1-step": UNIPC | {"num_inference_steps": 1},
    "dpm++": DPM | {"flow_shift": 5.0, "num_inference_steps": 8},
    "dpm++-2-steps": DPM | {"flow_shift": 1.0},
}
BUNDLED_CASES: dict[str, dict[str, Any]] = {
    "still": {"num_inference_steps": 2},
    "n-4-off": {"n": 4, "guidance_scale": 1.0},
    "clip": {"num_frames": 5, "width": 96, "height": 96},
    "unipc-wide": UNIPC | {"flow_shift": 1.5, "num_inference_steps": 8, "width": 192, "height": 96},
}
BUNDLED_SLOW: dict[str, dict[str, Any]] = {
    "8-steps": {"num_inference_steps": 8},
    "9-frames": {"num_frames": 9, "negative_prompt": "a blue square"},
    "n-4": {"n": 4},
    "tall": {"width": 96, "height": 192, "num_inference_steps": 8, "guidance_scale": 1.0},
    # With a shift of 3 diffusers' own result moves by 7e-5 when its noise does by 1e-6: no test of anyone's rounding.
    "dpm++": DPM | {"flow_shift": 1.5, "num_inference_steps": 8},
}
# Each crosses the boundary, 0.875 of 1000 timesteps.
WAN22_CASES: dict[str, dict[str, Any]] = {
    "one-guidance": {"num_inference_steps": 8},
    "two-guidances": {"num_inference_steps": 8, "guidance_scale_2": 2.0},
    "second-guidance-off": {"num_inference_steps": 4, "guidance_scale_2": 1.0},
    "second-guidance-zero": {"num_inference_steps": 4, "guidance_scale_2": 0.0},
    "first-guidance-off": {"num_inference_steps": 4, "guidance_scale": 1.0, "guidance_scale_2": 3.0},
    "clips": {"num_inference_steps": 4, "guidance_scale_2": 2.0, "num_frames": 5, "n": 2},
    "euler": EULER | {"num_inference_steps": 8},
}
WAN22_5B_CASES: dict[str, dict[str, Any]] = {
    "still": {},
    "clip": {"num_frames": 5, "width": 160, "height": 96},
    "n-2-off": {"n": 2, "guidance_scale": 1.0},
}


def _moves(case: parity.Case) -> dict[str, parity.Case]:
    return parity.changes(case, guidance={"guidance_scale": 8.0 if case["guidance_scale"] <= 1 else 1.0})


def _check_served(generator: DiffGenerator, oracle: Oracle, model: Path, case: dict[str, Any]) -> None:
    reference = oracle.run(model, case)
    pixels = generator.generate(**case).pixels
    latents = generator.generate(**case, output_type="latent").latents
    handles = {name: generator.submit(**{**case, "n": 1, **move}) for name, move in _moves(case).items()}
    controls = {name: handle.result(60).pixels for name, handle in handles.items()}
    parity.check(reference, pixels, latents, controls)


@pytest.mark.parametrize("case", parity.params(CASES))
def test_tiny_model_equals_diffusers(
    oracle: Oracle, tiny_generator: DiffGenerator, tiny_wan: Path, case: dict[str, Any]
) -> None:
    _check_served(tiny_generator, oracle, tiny_wan, TINY | case)


@pytest.mark.parametrize("case", [*parity.params(BUNDLED_CASES), *parity.params(BUNDLED_SLOW, pytest.mark.slow)])
def test_bundled_model_equals_diffusers(oracle: Oracle, bundled_generator: DiffGenerator, case: dict[str, Any]) -> None:
    _check_served(bundled_generator, oracle, BUNDLED, SHAPES | case)


@pytest.mark.parametrize("options", [{}, {"num_frames": 5}, {"guidance_scale": 1.0}])
def test_image_i_is_a_run_with_seed_plus_i(tiny_generator: DiffGenerator, options: dict[str, Any]) -> None:
    case = TINY | options
    together = tiny_generator.generate(**case, n=4)
    assert together.seeds == (7, 8, 9, 10)
    for index, seed in enumerate(together.seeds):
        alone = tiny_generator.generate(**case | {"seed": seed}).pixels
        assert level_difference(together.pixels[index : index + 1], alone) <= MAX_LEVELS
    assert level_difference(together.pixels[:1], together.pixels[1:2]) >= MIN_MOVE


# Requests that share forwards, through the server.


def _await_step(handle: GenerationHandle, step: int) -> None:
    for event in handle.events():
        if isinstance(event, Progress) and event.stage == "denoise" and event.step >= step:
            return
    raise AssertionError(f"{handle} ended before step {step}")


def test_requests_that_join_later_equal_each_alone(
    oracle: Oracle, tiny_generator: DiffGenerator, tiny_wan: Path
) -> None:
    long = TINY | {"num_inference_steps": 120}
    second = TINY | {"prompt": "a green star", "num_inference_steps": 8, "seed": 20, "guidance_scale": 2.0}
    third = TINY | {"prompt": "a dog", "num_inference_steps": 8, "seed": 30, "guidance_scale": 1.0}
    before = parity.heartbeats(tiny_generator)[0]
    first = tiny_generator.submit(**long)
    _await_step(first, 3)
    joined = [tiny_generator.submit(**second)]
    _await_step(joined[0], 2)
    joined.append(tiny_generator.submit(**third))
    together = [handle.result(60).pixels for handle in (first, *joined)]

    after = parity.heartbeats(tiny_generator)[0]
    units = sum(after.units.values()) - sum(before.units.values())
    assert units == 3 * (1 + 1 + 1 + 1) + 120 + 8 + 8
    # The steps of the later two cost no ticks of their own; a few may pass before the server knows of them.
    assert after.tick - before.tick <= units - 14
    for case, pixels in zip((long, second, third), together, strict=True):
        alone = tiny_generator.generate(**case).pixels
        reference = oracle.run(tiny_wan, case)
        assert level_difference(pixels, alone) <= MAX_LEVELS
        assert level_difference(pixels, reference.pixels) <= MAX_LEVELS
    assert level_difference(together[1], together[2]) >= MIN_MOVE


def test_six_different_requests_at_once_equal_each_alone(
    oracle: Oracle, tiny_generator: DiffGenerator, tiny_wan: Path
) -> None:
    cases = [
        TINY | {"num_inference_steps": 8},
        TINY | {"num_inference_steps": 3, "guidance_scale": 1.0, "seed": 100, "prompt": "a cat"},
        TINY | {"num_inference_steps": 5, "guidance_scale": 9.0, "seed": 200, "negative_prompt": "a red circle"},
        TINY | {"num_inference_steps": 4, "width": 96, "height": 64, "seed": 300},
        TINY | {"num_inference_steps": 6, "width": 96, "height": 64, "seed": 400, "guidance_scale": 0.0},
        TINY | {"num_inference_steps": 4, "n": 2, "seed": 500, **UNIPC},
    ]
    parity.check_served(tiny_generator, cases, oracle.run_all(tiny_wan, cases), tiny_generator)


def test_two_ranks_make_the_pixels_of_one(tiny_wan: Path, tiny_generator: DiffGenerator) -> None:
    cases = [
        TINY | {"num_inference_steps": 4},
        TINY | {"num_frames": 5, "n": 2, "guidance_scale": 1.0, "seed": 50},
        TINY | {"width": 96, "prompt": "a cat", **DPM},
    ]
    expected = {"encode": 3, "timesteps": 3, "latents": 3, "denoise": 4 + 2 + 2, "decode": 1 + 2 + 1}
    with parity.serve(tiny_wan, num_gpus=2) as generator:
        parity.check_served(generator, cases, alone=tiny_generator)
        beats = parity.heartbeats(generator, lambda beats: all(beat.units == expected for beat in beats))
    assert len(beats) == 2
    assert beats[0].tick == beats[1].tick
    assert beats[0].fingerprint == beats[1].fingerprint != 0


# Units, in this process.


@pytest.fixture(scope="module")
def local(tiny_wan: Path) -> Local:
    return Local.load(tiny_wan)


@pytest.fixture(scope="module")
def local22(tiny_wan22: Path) -> Local:
    return Local.load(tiny_wan22)


@pytest.fixture(scope="module")
def local22_5b(tiny_wan22_5b: Path) -> Local:
    return Local.load(tiny_wan22_5b)


@pytest.mark.parametrize(("guidance", "rows"), [(4.0, 2), (1.0, 1), (0.0, 1)])
@pytest.mark.parametrize("n", [1, 3])
def test_rows_of_a_step(local: Local, guidance: float, rows: int, n: int) -> None:
    case = TINY | {"guidance_scale": guidance, "num_inference_steps": 3, "n": n}
    parity.check_rows(local, case, [rows * n] * 3)


# (case, steps it has done when the others join); schedulers that keep past predictions must keep them apart.
MIXES: dict[str, parity.Mix] = {
    "two": parity.TWO,
    "three-guided-and-not": parity.GUIDED_AND_NOT,
    "three-clips-three-schedulers": [
        ({"num_frames": 5, "num_inference_steps": 8, **UNIPC}, 4),
        ({"num_frames": 5, "num_inference_steps": 8, "seed": 9, **DPM}, 2),
        ({"num_frames": 5, "seed": 11, "num_inference_steps": 6}, 1),
    ],
    "same-seed-and-prompt": [({"num_inference_steps": 8}, 1), ({"num_inference_steps": 8}, 0)],
}


@pytest.mark.parametrize("mix", parity.params(MIXES))
def test_shared_forwards_equal_each_alone(oracle: Oracle, local: Local, mix: parity.Mix) -> None:
    parity.check_shared_forwards(oracle, local, TINY, mix, _moves, meet=3)


@pytest.mark.parametrize("scheduler", [EULER, UNIPC, DPM])
def test_a_unit_changes_no_request(local: Local, scheduler: dict[str, Any]) -> None:
    parity.check_units(local, TINY | scheduler | {"num_inference_steps": 5, "num_frames": 9}, 3 + 5 + 3)


@pytest.mark.parametrize("case", parity.params(WAN22_CASES))
def test_two_experts_equal_diffusers(oracle: Oracle, local22: Local, case: dict[str, Any]) -> None:
    case = TINY | case
    pipe = local22.pipeline.pipe
    with forwards(pipe.transformer) as high, forwards(pipe.transformer_2) as low:
        local22.pixels(case)
    assert len(high) > 0
    assert len(low) > 0
    assert len(high) + len(low) == case["num_inference_steps"]
    assert min(high)[0] >= 875 > max(low)[0]
    parity.check_equal(oracle, local22, case, _moves)


def test_second_guidance_moves_the_picture(local22: Local) -> None:
    case = TINY | {"num_inference_steps": 4}
    pixels = [local22.pixels(case | {"guidance_scale_2": scale})[0] for scale in (4.0, 8.0)]
    assert level_difference(*pixels) >= MIN_MOVE
    assert level_difference(pixels[0], local22.pixels(case)[0]) == 0  # unset: as guidance_scale


def test_experts_do_not_share_a_forward(local22: Local) -> None:
    case = TINY | {"num_inference_steps": 8}
    reqs = [local22.at_step(case, 0), local22.at_step(case | {"seed": 8}, 7)]
    assert local22.denoise.batch_key(reqs[0]) != local22.denoise.batch_key(reqs[1])
    pipe = local22.pipeline.pipe
    alone = [local22.executor.run(local22.denoise, [req])[0] for req in reqs]
    with forwards(pipe.transformer) as high, forwards(pipe.transformer_2) as low:
        together = local22.executor.run(local22.denoise, reqs)
    assert [len(high), len(low)] == [1, 1]
    for one, both in zip(alone, together, strict=True):
        assert isinstance(one, Update)
        assert isinstance(both, Update)
        assert relative_difference(both.latents, one.latents) <= MAX_RELATIVE


@pytest.mark.parametrize("case", parity.params(WAN22_5B_CASES))
def test_timestep_a_token_equals_diffusers(oracle: Oracle, local22_5b: Local, case: dict[str, Any]) -> None:
    parity.check_equal(oracle, local22_5b, WAN22_5B | case, _moves)


@pytest.mark.slow
def test_two_experts_through_the_server(oracle: Oracle, tiny_wan22: Path) -> None:
    with parity.serve(tiny_wan22) as generator:
        case = TINY | {"num_inference_steps": 8, "guidance_scale_2": 2.0}
        _check_served(generator, oracle, tiny_wan22, case)
        # Two that cross the boundary at different times.
        cases = [case | {"seed": 40}, case | {"seed": 41, "num_inference_steps": 20, "num_frames": 1}]
        parity.check_served(generator, cases, oracle.run_all(tiny_wan22, cases))


def test_noise_is_the_same_in_bfloat16(local: Local) -> None:
    noise = parity.check_bfloat16(local, TINY | {"n": 2, "num_frames": 5, "seed": 123})
    drawn = [torch.randn(1, 8, 2, 8, 8, generator=torch.Generator("cpu").manual_seed(seed)) for seed in (123, 124)]
    assert torch.equal(noise, torch.cat(drawn))
