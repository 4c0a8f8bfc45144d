"""Wan against the diffusers pipeline's own ``__call__`` in another process: same weights, seed and steps, float32.

Bars: pixels at most one level of 255 apart, latents 1e-4 relative. Each comparison comes with controls: another prompt,
guidance or seed moves the picture by three levels or more, so that equality is not that of pictures all alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import THREADS, Oracle, Reference, level_difference, relative_difference

from diffgen import DiffGenerator
from diffgen.args import ModelArgs
from diffgen.handle import GenerationHandle
from diffgen.loading.hub import BUNDLED
from diffgen.params import Limits, parse_params, resolve
from diffgen.request import Req, Update
from diffgen.server.pipe import Heartbeat
from diffgen.wire.messages import Progress
from diffgen.worker.executor import ParallelExecutor
from diffgen.worker.worker import fingerprint
from pipelines.registry import load_pipeline

MAX_LEVELS = 1
MAX_RELATIVE = 1e-4
MIN_MOVE = 3
# Of values that differ at all: truncating in place of rounding would be within one level too.
MAX_SHARE = 0.01

TINY = {
    "prompt": "a red circle on a blue background",
    "seed": 7,
    "width": 64,
    "height": 64,
    "num_frames": 1,
    "num_inference_steps": 2,
    "guidance_scale": 4.0,
    "max_sequence_length": 16,
}
SHAPES = TINY | {"width": 128, "height": 128, "guidance_scale": 5.0, "max_sequence_length": 20}
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


def _params(cases: dict[str, dict[str, Any]], *marks: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(case, id=name, marks=marks) for name, case in cases.items()]


def _controls(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The case with another prompt, another guidance and another seed; of one output, to cost less."""
    one = case | {"n": 1}
    prompt = "green star" if case["prompt"] != "green star" else "white square"
    guidance = 8.0 if case["guidance_scale"] <= 1 else 1.0
    return [one | {"prompt": prompt}, one | {"guidance_scale": guidance}, one | {"seed": case["seed"] // 2 + 1}]


def _check(reference: Reference, pixels: Any, latents: Any, controls: list[Any]) -> None:
    assert level_difference(pixels, reference.pixels) <= MAX_LEVELS
    assert (pixels != reference.pixels).mean() <= MAX_SHARE
    assert relative_difference(latents, reference.latents) <= MAX_RELATIVE
    for name, control in zip(("prompt", "guidance", "seed"), controls, strict=True):
        assert level_difference(control, reference.pixels[:1]) >= MIN_MOVE, name


def _check_served(generator: DiffGenerator, oracle: Oracle, model: Path, case: dict[str, Any]) -> None:
    reference = oracle.run(model, case)
    pixels = generator.generate(**case).pixels
    latents = generator.generate(**case, output_type="latent").latents
    controls = [generator.submit(**control) for control in _controls(case)]
    _check(reference, pixels, latents, [control.result(60).pixels for control in controls])


@pytest.mark.parametrize("case", _params(CASES))
def test_tiny_model_equals_diffusers(
    oracle: Oracle, tiny_generator: DiffGenerator, tiny_wan: Path, case: dict[str, Any]
) -> None:
    _check_served(tiny_generator, oracle, tiny_wan, TINY | case)


@pytest.mark.parametrize("case", [*_params(BUNDLED_CASES), *_params(BUNDLED_SLOW, pytest.mark.slow)])
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


def _beats(
    generator: DiffGenerator, ready: Callable[[list[Heartbeat]], bool] = lambda beats: True, timeout: float = 30.0
) -> list[Heartbeat]:
    """Heartbeats of all ranks that tell of everything done so far and, with ``ready``, of what is still to come."""
    # A beat on its way may be older than the last answer, so only those from half a second on count.
    since, deadline = time.monotonic() + 0.5, time.monotonic() + timeout
    while time.monotonic() < deadline:
        ranks = generator.ranks()
        beats = [rank.heartbeat for rank in ranks if rank.heartbeat is not None and rank.last_seen > since]
        if len(beats) == len(ranks) and ready(beats):
            return beats
        time.sleep(0.05)
    raise AssertionError(f"no such heartbeats within {timeout} s: {generator.ranks()}")


def test_requests_that_join_later_equal_each_alone(
    oracle: Oracle, tiny_generator: DiffGenerator, tiny_wan: Path
) -> None:
    long = TINY | {"num_inference_steps": 120}
    second = TINY | {"prompt": "a green star", "num_inference_steps": 8, "seed": 20, "guidance_scale": 2.0}
    third = TINY | {"prompt": "a dog", "num_inference_steps": 8, "seed": 30, "guidance_scale": 1.0}
    before = _beats(tiny_generator)[0]
    first = tiny_generator.submit(**long)
    _await_step(first, 3)
    joined = [tiny_generator.submit(**second)]
    _await_step(joined[0], 2)
    joined.append(tiny_generator.submit(**third))
    together = [handle.result(60).pixels for handle in (first, *joined)]

    after = _beats(tiny_generator)[0]
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
    handles = [tiny_generator.submit(**case) for case in cases]
    together = [handle.result(60).pixels for handle in handles]
    references = oracle.run_all(tiny_wan, cases)
    for case, pixels, reference in zip(cases, together, references, strict=True):
        assert level_difference(pixels, tiny_generator.generate(**case).pixels) <= MAX_LEVELS
        assert level_difference(pixels, reference.pixels) <= MAX_LEVELS
        other = tiny_generator.generate(**case | {"seed": 1}).pixels
        assert level_difference(pixels, other) >= MIN_MOVE


def test_two_ranks_make_the_pixels_of_one(tiny_wan: Path, tiny_generator: DiffGenerator) -> None:
    cases = [
        TINY | {"num_inference_steps": 4},
        TINY | {"num_frames": 5, "n": 2, "guidance_scale": 1.0, "seed": 50},
        TINY | {"width": 96, "prompt": "a cat", **DPM},
    ]
    expected = {"encode": 3, "timesteps": 3, "latents": 3, "denoise": 4 + 2 + 2, "decode": 1 + 2 + 1}
    with DiffGenerator.from_pretrained(
        str(tiny_wan), num_gpus=2, device="cpu", dtype="float32", threads=THREADS
    ) as generator:
        handles = [generator.submit(**case) for case in cases]
        results = [handle.result(60).pixels for handle in handles]
        beats = _beats(generator, lambda beats: all(beat.units == expected for beat in beats))
    assert len(beats) == 2
    assert beats[0].tick == beats[1].tick
    assert beats[0].fingerprint == beats[1].fingerprint != 0
    for case, pixels in zip(cases, results, strict=True):
        assert level_difference(pixels, tiny_generator.generate(**case).pixels) <= MAX_LEVELS
        other = tiny_generator.generate(**case | {"seed": 1}).pixels
        assert level_difference(pixels, other) >= MIN_MOVE


# Units, in this process.


@dataclasses.dataclass
class Local:
    """A loaded pipeline, whose requests advance unit by unit as on a rank."""

    pipeline: Any
    executor: ParallelExecutor

    @classmethod
    def load(cls, folder: Path, dtype: Any = "float32") -> Local:
        device = torch.device("cpu")
        model = ModelArgs(model_path=str(folder), dtype=dtype)
        return cls(load_pipeline(folder, model, device), ParallelExecutor(device))

    @property
    def denoise(self) -> Any:
        return next(stage for stage in self.pipeline.stages if stage.name == "denoise")

    def enter(self, case: dict[str, Any]) -> Req:
        resolved = resolve(parse_params(case), self.pipeline.spec, Limits())
        return Req("local", resolved.params, resolved.warnings)

    def unit(self, reqs: list[Req]) -> None:
        """The next unit of requests that are in one stage, which is left when it is done."""
        stage = self.pipeline.stages[reqs[0].stage]
        for req, update in zip(reqs, self.executor.run(stage, reqs), strict=True):
            assert isinstance(update, Update), update
            total = stage.units(req)
            update.apply(req)
            req.unit += 1
            if req.unit == total:
                req.stage, req.unit = req.stage + 1, 0

    def at_step(self, case: dict[str, Any], step: int) -> Req:
        """A request of which ``step`` denoising steps are done."""
        req = self.enter(case)
        while self.pipeline.stages[req.stage] is not self.denoise or req.unit < step:
            self.unit([req])
        return req

    def pixels(self, case: dict[str, Any]) -> tuple[Any, Any]:
        """Pixels and latents of a whole request, by itself."""
        req = self.enter(case)
        while req.stage < len(self.pipeline.stages):
            self.unit([req])
        assert req.latents is not None
        return torch.cat(req.frames, dim=1).numpy(), req.latents.float().numpy()


@contextlib.contextmanager
def _forwards(model: torch.nn.Module) -> Iterator[list[list[float]]]:
    """The timesteps of each forward of a denoiser: a forward an item, a row a number."""
    seen: list[list[float]] = []

    def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        timestep = kwargs["timestep"] if "timestep" in kwargs else args[1]
        seen.append(timestep.reshape(len(timestep), -1)[:, 0].tolist())

    hook = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


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
    with _forwards(local.pipeline.pipe.transformer) as forwards:
        local.pixels(TINY | {"guidance_scale": guidance, "num_inference_steps": 3, "n": n})
    assert [len(forward) for forward in forwards] == [rows * n] * 3


# (case, steps it has done when the others join); schedulers that keep past predictions must keep them apart.
MIXES: dict[str, list[tuple[dict[str, Any], int]]] = {
    "two": [({"num_inference_steps": 8}, 3), ({"prompt": "a dog", "seed": 9, "num_inference_steps": 5}, 0)],
    "three-guided-and-not": [
        ({"num_inference_steps": 8}, 5),
        ({"prompt": "a cat", "seed": 9, "num_inference_steps": 6, "guidance_scale": 1.0}, 2),
        ({"negative_prompt": "sofa", "seed": 11, "num_inference_steps": 4, "guidance_scale": 8.0, "n": 2}, 0),
    ],
    "three-clips-three-schedulers": [
        ({"num_frames": 5, "num_inference_steps": 8, **UNIPC}, 4),
        ({"num_frames": 5, "num_inference_steps": 8, "seed": 9, **DPM}, 2),
        ({"num_frames": 5, "seed": 11, "num_inference_steps": 6}, 1),
    ],
    "same-seed-and-prompt": [({"num_inference_steps": 8}, 1), ({"num_inference_steps": 8}, 0)],
}


@pytest.mark.parametrize("mix", [pytest.param(mix, id=name) for name, mix in MIXES.items()])
def test_shared_forwards_equal_each_alone(
    oracle: Oracle, local: Local, tiny_wan: Path, mix: list[tuple[dict[str, Any], int]]
) -> None:
    cases = [TINY | case for case, _ in mix]
    reqs = [local.at_step(case, step) for case, (_, step) in zip(cases, mix, strict=True)]
    assert len({local.denoise.batch_key(req) for req in reqs}) == 1
    running, shared = list(reqs), 0
    with _forwards(local.pipeline.pipe.transformer) as forwards:
        while running:
            count = len(forwards)
            rows = [
                float(req.timesteps[req.unit])
                for req in running
                for _ in range(len(req.branches) * req.outputs)
                if req.timesteps is not None
            ]
            local.unit(running)
            # One forward for all, with each request's rows at its own timestep.
            assert len(forwards) == count + 1
            assert sorted(forwards[-1]) == pytest.approx(sorted(rows))
            shared += len(running) > 1 and len(set(rows)) == len(running)
            running = [req for req in running if local.pipeline.stages[req.stage] is local.denoise]
    assert shared >= 3
    for case, req, reference in zip(cases, reqs, oracle.run_all(tiny_wan, cases), strict=True):
        assert req.latents is not None
        latents = req.latents.numpy()
        while req.stage < len(local.pipeline.stages):
            local.unit([req])
        pixels = torch.cat(req.frames, dim=1).numpy()
        alone_pixels, alone_latents = local.pixels(case)
        assert level_difference(pixels, alone_pixels) <= MAX_LEVELS
        assert relative_difference(latents, alone_latents) <= MAX_RELATIVE
        _check(reference, pixels, latents, [local.pixels(control)[0] for control in _controls(case)])


@pytest.mark.parametrize("scheduler", [EULER, UNIPC, DPM])
def test_a_unit_changes_no_request(local: Local, scheduler: dict[str, Any]) -> None:
    """Any unit may be computed twice, as after a vote that fails: both times the values are the same."""
    req = local.enter(TINY | scheduler | {"num_inference_steps": 5, "num_frames": 9})
    units = 0
    while req.stage < len(local.pipeline.stages):
        first, second = (local.executor.run(local.pipeline.stages[req.stage], [req])[0] for _ in range(2))
        assert type(first) is type(second) is Update
        if req.stage >= local.pipeline.stages.index(local.denoise):
            assert fingerprint(first) == fingerprint(second) != 0
        local.unit([req])
        units += 1
    assert units == 3 + 5 + 3


@pytest.mark.parametrize("case", _params(WAN22_CASES))
def test_two_experts_equal_diffusers(oracle: Oracle, local22: Local, tiny_wan22: Path, case: dict[str, Any]) -> None:
    case = TINY | case
    pipe = local22.pipeline.pipe
    with _forwards(pipe.transformer) as high, _forwards(pipe.transformer_2) as low:
        pixels, latents = local22.pixels(case)
    assert len(high) > 0
    assert len(low) > 0
    assert len(high) + len(low) == case["num_inference_steps"]
    assert min(high)[0] >= 875 > max(low)[0]
    controls = [local22.pixels(control)[0] for control in _controls(case)]
    _check(oracle.run(tiny_wan22, case), pixels, latents, controls)


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
    with _forwards(pipe.transformer) as high, _forwards(pipe.transformer_2) as low:
        together = local22.executor.run(local22.denoise, reqs)
    assert [len(high), len(low)] == [1, 1]
    for one, both in zip(alone, together, strict=True):
        assert isinstance(one, Update)
        assert isinstance(both, Update)
        assert relative_difference(both.latents, one.latents) <= MAX_RELATIVE


@pytest.mark.parametrize("case", _params(WAN22_5B_CASES))
def test_timestep_a_token_equals_diffusers(
    oracle: Oracle, local22_5b: Local, tiny_wan22_5b: Path, case: dict[str, Any]
) -> None:
    case = WAN22_5B | case
    pixels, latents = local22_5b.pixels(case)
    controls = [local22_5b.pixels(control)[0] for control in _controls(case)]
    _check(oracle.run(tiny_wan22_5b, case), pixels, latents, controls)


@pytest.mark.slow
def test_two_experts_through_the_server(oracle: Oracle, tiny_wan22: Path) -> None:
    with DiffGenerator.from_pretrained(str(tiny_wan22), device="cpu", dtype="float32", threads=THREADS) as generator:
        case = TINY | {"num_inference_steps": 8, "guidance_scale_2": 2.0}
        _check_served(generator, oracle, tiny_wan22, case)
        # Two that cross the boundary at different times.
        cases = [case | {"seed": 40}, case | {"seed": 41, "num_inference_steps": 20, "num_frames": 1}]
        handles = [generator.submit(**each) for each in cases]
        for handle, reference in zip(handles, oracle.run_all(tiny_wan22, cases), strict=True):
            assert level_difference(handle.result(60).pixels, reference.pixels) <= MAX_LEVELS


def test_noise_is_the_same_in_bfloat16(local: Local, tiny_wan: Path) -> None:
    half = Local.load(tiny_wan, "bfloat16")
    assert half.pipeline.pipe.transformer.dtype == torch.bfloat16
    case = TINY | {"n": 2, "num_frames": 5, "seed": 123}
    noise = [each.at_step(case, 0).latents for each in (local, half)]
    drawn = [torch.randn(1, 8, 2, 8, 8, generator=torch.Generator("cpu").manual_seed(seed)) for seed in (123, 124)]
    assert noise[0] is not None
    assert noise[1] is not None
    assert noise[0].dtype == noise[1].dtype == torch.float32
    assert torch.equal(noise[0], torch.cat(drawn))
    assert torch.equal(noise[1], torch.cat(drawn))
    # The pictures are those of one seed: far nearer to each other than to another seed's.
    pixels = [torch.from_numpy(each.pixels(case)[0]).float() for each in (local, half)]
    other = torch.from_numpy(local.pixels(case | {"seed": 999})[0]).float()
    assert (pixels[0] - pixels[1]).abs().mean() < 0.2 * (pixels[0] - other).abs().mean()
