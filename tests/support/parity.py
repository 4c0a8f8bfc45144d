"""What every family's parity tests share: the bars, and a pipeline whose requests advance unit by unit as on a rank.

The ``check_*`` functions are bodies of tests that each family has with data of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import THREADS, Oracle, Reference, level_difference, relative_difference

from diffgen import DiffGenerator
from diffgen.args import ModelArgs
from diffgen.distributed.layout import Layout
from diffgen.errors import InvalidRequest
from diffgen.params import Limits, parse_params, resolve
from diffgen.request import Req, Update
from diffgen.server.pipe import Heartbeat
from diffgen.worker.executor import ParallelExecutor
from diffgen.worker.worker import fingerprint
from pipelines.registry import load_pipeline

Case = Mapping[str, Any]
#: Requests, each with the steps it has done when they meet.
Mix = Sequence[tuple[Case, int]]
#: The changes of a request that must each move its picture.
Moves = Callable[[Case], Mapping[str, Case]]

MAX_LEVELS = 1
MAX_RELATIVE = 1e-4
MIN_MOVE = 3
# Of values that differ at all: truncating in place of rounding would be within one level too.
MAX_SHARE = 0.01

PICTURE: dict[str, Any] = {"prompt": "a red circle on a blue background", "seed": 7, "width": 64, "height": 64}
#: Guidance by two forwards, of families whose denoiser also reads a guidance scale.
CFG: dict[str, Any] = {"true_cfg_scale": 3.0, "negative_prompt": "a blurry dark photo"}
TWO: Mix = [({"num_inference_steps": 8}, 3), ({"prompt": "a dog", "seed": 9, "num_inference_steps": 5}, 0)]
GUIDED_AND_NOT: Mix = [
    ({"num_inference_steps": 8}, 5),
    ({"prompt": "a cat", "seed": 9, "num_inference_steps": 6, "guidance_scale": 1.0}, 2),
    ({"negative_prompt": "sofa", "seed": 11, "num_inference_steps": 4, "guidance_scale": 8.0, "n": 2}, 0),
]
GUIDANCES_AND_CFG: Mix = [
    ({"num_inference_steps": 8, "guidance_scale": 2.0}, 4),
    ({"prompt": "a cat", "seed": 9, "num_inference_steps": 6, **CFG}, 2),
    ({"seed": 11, "num_inference_steps": 4, "guidance_scale": 9.0, "n": 2}, 0),
]


def params(cases: Mapping[str, Any], *marks: pytest.MarkDecorator) -> list[Any]:
    """Parameters of a test by the names of ``cases``."""
    return [pytest.param(case, id=name, marks=marks) for name, case in cases.items()]


def changes(case: Case, **family: Case) -> dict[str, Case]:
    """Another prompt, another seed and what else of the ``family``: each must move the picture of ``case``."""
    return {"prompt": {"prompt": "green star"}, **_other_seed(case), **family}


def check(reference: Reference, pixels: Any, latents: Any, controls: Mapping[str, Any]) -> None:
    """Equal to the oracle's, and moved by each of ``controls``: pictures of one output by what was changed."""
    assert level_difference(pixels, reference.pixels) <= MAX_LEVELS
    assert (pixels != reference.pixels).mean() <= MAX_SHARE
    assert relative_difference(latents, reference.latents) <= MAX_RELATIVE
    for name, control in controls.items():
        assert level_difference(control, reference.pixels[:1]) >= MIN_MOVE, name


@dataclasses.dataclass
class Local:
    """A loaded pipeline in this process."""

    folder: Path
    pipeline: Any
    executor: ParallelExecutor

    @classmethod
    def load(cls, folder: Path, dtype: Any = "float32", layout: Layout | None = None, **options: Any) -> Local:
        """With a ``layout``, as one of its ranks."""
        device = torch.device("cpu")
        model = ModelArgs(model_path=str(folder), dtype=dtype, **options)
        arrange = None if layout is None else lambda abilities, name: layout
        return cls(folder, load_pipeline(folder, model, device, arrange), ParallelExecutor(device, layout))

    @property
    def denoise(self) -> Any:
        return next(stage for stage in self.pipeline.stages if stage.name == "denoise")

    @property
    def denoiser(self) -> torch.nn.Module:
        pipe = self.pipeline.pipe
        model: torch.nn.Module = pipe.transformer if hasattr(pipe, "transformer") else pipe.unet
        return model

    def enter(self, case: Case) -> Req:
        resolved = resolve(parse_params(case), self.pipeline.spec, Limits())
        return Req("local", resolved.params, resolved.warnings)

    def unit(self, reqs: Sequence[Req]) -> None:
        """The next unit of requests that are in one stage, which is left when it is done."""
        stage = self.pipeline.stages[reqs[0].stage]
        for req, update in zip(reqs, self.executor.run(stage, reqs), strict=True):
            assert isinstance(update, Update), update
            total = stage.units(req)
            update.apply(req)
            req.unit += 1
            if req.unit == total:
                req.stage, req.unit = req.stage + 1, 0

    def at_step(self, case: Case, step: int) -> Req:
        """A request of which ``step`` denoising steps are done."""
        req = self.enter(case)
        while self.pipeline.stages[req.stage] is not self.denoise or req.unit < step:
            self.unit([req])
        return req

    def finish(self, req: Req) -> tuple[Any, Any]:
        """Pixels and latents of a request, by itself from here on."""
        while req.stage < len(self.pipeline.stages):
            self.unit([req])
        assert req.latents is not None
        return req.pixels.numpy(), req.latents.float().numpy()

    def pixels(self, case: Case) -> tuple[Any, Any]:
        """Pixels and latents of a whole request."""
        return self.finish(self.enter(case))

    def warnings(self, case: Case) -> tuple[str, ...]:
        """Those a request has after its first unit."""
        req = self.enter(case)
        self.unit([req])
        return req.warnings


def _other_seed(case: Case) -> dict[str, Case]:
    return {"seed": {"seed": case["seed"] // 2 + 1}}


def check_equal(oracle: Oracle, local: Local, case: Case, moves: Moves, told: Case | None = None) -> None:
    """A whole request is diffusers', whose pipeline is ``told`` more, and each of ``moves`` makes another picture."""
    reference = oracle.run(local.folder, {**case, **(told or {})})
    check(reference, *local.pixels(case), _controls(local, case, moves))


def _controls(local: Local, case: Case, moves: Moves) -> dict[str, Any]:
    """Of one output, to cost less."""
    return {name: local.pixels({**case, "n": 1, **move})[0] for name, move in moves(case).items()}


def check_shared_forwards(
    oracle: Oracle,
    local: Local,
    base: Case,
    mix: Mix,
    moves: Moves = _other_seed,
    *,
    unit: float = 1.0,
    meet: int = 2,
    told: Case | None = None,
) -> None:
    """Requests denoise in one forward a step, ``meet`` times or more all at other timesteps, and equal each alone.

    The denoiser is told timesteps times ``unit``, and diffusers' pipeline is ``told`` more.
    """
    cases = [{**base, **case} for case, _ in mix]
    reqs = [local.at_step(case, step) for case, (_, step) in zip(cases, mix, strict=True)]
    assert len({local.denoise.batch_key(req) for req in reqs}) == 1
    running, met = list(reqs), 0
    with forwards(local.denoiser) as seen:
        while running:
            count, rows = len(seen), [each for req in running for each in _timesteps(req)]
            local.unit(running)
            # One forward for all, with each request's rows at its own timestep.
            assert len(seen) == count + 1
            assert sorted(seen[-1]) == pytest.approx([unit * each for each in sorted(rows)])
            met += len(running) > 1 and len(set(rows)) == len(running)
            running = [req for req in running if local.pipeline.stages[req.stage] is local.denoise]
    assert met >= meet
    check_finished(oracle, local, cases, reqs, moves, told)


def check_finished(
    oracle: Oracle,
    local: Local,
    cases: Sequence[Case],
    reqs: Sequence[Req],
    moves: Moves = _other_seed,
    told: Case | None = None,
) -> None:
    """Requests that have shared forwards end as each alone and as diffusers'."""
    references = oracle.run_all(local.folder, [{**case, **(told or {})} for case in cases])
    for case, req, reference in zip(cases, reqs, references, strict=True):
        pixels, latents = local.finish(req)
        alone_pixels, alone_latents = local.pixels(case)
        assert level_difference(pixels, alone_pixels) <= MAX_LEVELS
        assert relative_difference(latents, alone_latents) <= MAX_RELATIVE
        check(reference, pixels, latents, _controls(local, case, moves))


def _timesteps(req: Req) -> list[float]:
    """A number for each row that the request has in the next forward."""
    assert req.timesteps is not None
    return [float(req.timesteps[req.unit])] * (len(req.branches) * req.outputs)


@contextlib.contextmanager
def forwards(model: torch.nn.Module) -> Iterator[list[list[float]]]:
    """The timesteps of each forward of a denoiser: a forward an item, a row a number."""
    seen: list[list[float]] = []

    def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        timestep = kwargs["timestep"] if "timestep" in kwargs else args[1]
        assert len(timestep) == len(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])
        seen.append(timestep.reshape(len(timestep), -1)[:, 0].tolist())

    hook = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def check_rows(local: Local, case: Case, rows: Sequence[int]) -> None:
    """A whole request takes forwards of so many rows."""
    with forwards(local.denoiser) as seen:
        local.pixels(case)
    assert [len(each) for each in seen] == list(rows)


def check_keys_differ(local: Local, *cases: Case) -> None:
    """None of them denoise in one forward."""
    assert len({local.denoise.batch_key(local.at_step(case, 0)) for case in cases}) == len(cases)


def check_seeds(local: Local, case: Case, *, moves: bool = True) -> None:
    """Output i of three is a run with the seed plus i and, with ``moves``, another picture than the next."""
    together = local.pixels({**case, "n": 3})[0]
    for index in range(3):
        alone = local.pixels({**case, "seed": case["seed"] + index})[0]
        assert level_difference(together[index : index + 1], alone) <= MAX_LEVELS
    assert not moves or level_difference(together[:1], together[1:2]) >= MIN_MOVE


def check_units(local: Local, case: Case, units: int) -> None:
    """Any unit may be computed twice, as after a vote that fails: both times the values are the same.

    And after each step there is a preview, the last one of the final latents.
    """
    req, count = local.enter(case), 0
    while req.stage < len(local.pipeline.stages):
        stage = local.pipeline.stages[req.stage]
        first, second = (local.executor.run(stage, [req])[0] for _ in range(2))
        assert type(first) is type(second) is Update
        assert fingerprint(first) == fingerprint(second)
        if req.stage >= local.pipeline.stages.index(local.denoise):
            assert fingerprint(first) != 0
        before = req.latents
        local.unit([req])
        if stage is local.denoise:
            step, req.unit = req.unit, req.unit or stage.units(req)
            shown, final = (local.pipeline.preview(req, latents) for latents in (before, None))
            assert shown.dtype == torch.uint8
            assert shown.shape[0] == req.outputs
            assert shown.shape[-1] == 3
            # At the end of a schedule of sigmas no noise is left to take away.
            if step == 0 and hasattr(req.scheduler, "sigmas"):
                assert (shown.int() - final.int()).abs().max() <= 1
            req.unit = step
        count += 1
    assert count == units


def check_refused(local: Local, case: Case, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        local.enter(case)
    assert caught.value.param == param


def check_bfloat16(local: Local, case: Case, share: float = 0.2) -> torch.Tensor:
    """The noise of float32, which is returned, and the picture: far nearer to it than to another seed's."""
    half = Local.load(local.folder, "bfloat16")
    assert half.denoiser.dtype == torch.bfloat16
    noise = [each.at_step(case, 0).latents for each in (local, half)]
    assert noise[0] is not None
    assert noise[1] is not None
    assert noise[0].dtype == noise[1].dtype == torch.float32
    assert torch.equal(noise[0], noise[1])
    pixels = [torch.from_numpy(each.pixels(case)[0]).float() for each in (local, half)]
    other = torch.from_numpy(local.pixels({**case, "seed": 999})[0]).float()
    assert (pixels[0] - pixels[1]).abs().mean() < share * (pixels[0] - other).abs().mean()
    return noise[0]


# Through a server.


def serve(folder: Path, **options: Any) -> DiffGenerator:
    return DiffGenerator.from_pretrained(str(folder), device="cpu", dtype="float32", threads=THREADS, **options)


def check_served(
    generator: DiffGenerator,
    cases: Sequence[Case],
    references: Sequence[Reference] = (),
    alone: DiffGenerator | None = None,
) -> None:
    """Requests at once make diffusers' pixels, and those of each by itself where ``alone`` is given."""
    handles = [generator.submit(**case) for case in cases]
    results = [handle.result(60).pixels for handle in handles]
    for index, (case, pixels) in enumerate(zip(cases, results, strict=True)):
        expected = [reference.pixels for reference in references[index : index + 1]]
        expected += [] if alone is None else [alone.generate(**case).pixels]
        assert expected
        for each in expected:
            assert level_difference(pixels, each) <= MAX_LEVELS
        other = (alone or generator).generate(**{**case, "seed": 1}).pixels
        for each in (pixels, *expected):
            assert level_difference(other, each) >= MIN_MOVE


def check_server(
    oracle: Oracle,
    folder: Path,
    family: str,
    cases: Sequence[Case],
    latents: tuple[int, ...] | None = None,
    **options: Any,
) -> None:
    """A server of its own makes diffusers' pixels and, of the second case, latents of that shape."""
    references = oracle.run_all(folder, cases)
    with serve(folder, **options) as generator:
        assert generator.model.family == family
        check_served(generator, cases, references)
        if latents is not None:
            found = generator.generate(**cases[1], output_type="latent").latents
            assert tuple(found.shape) == latents
            assert relative_difference(found, references[1].latents) <= MAX_RELATIVE


def heartbeats(
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
