"""What every family's parity tests share: the bars, and a pipeline whose requests advance unit by unit as on a rank."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from oracle import Oracle, Reference, level_difference, relative_difference

from diffgen.args import ModelArgs
from diffgen.params import Limits, parse_params, resolve
from diffgen.request import Req, Update
from diffgen.worker.executor import ParallelExecutor
from pipelines.registry import load_pipeline

MAX_LEVELS = 1
MAX_RELATIVE = 1e-4
MIN_MOVE = 3
# Of values that differ at all: truncating in place of rounding would be within one level too.
MAX_SHARE = 0.01


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

    pipeline: Any
    executor: ParallelExecutor

    @classmethod
    def load(cls, folder: Path, dtype: Any = "float32", **options: Any) -> Local:
        device = torch.device("cpu")
        model = ModelArgs(model_path=str(folder), dtype=dtype, **options)
        return cls(load_pipeline(folder, model, device), ParallelExecutor(device))

    @property
    def denoise(self) -> Any:
        return next(stage for stage in self.pipeline.stages if stage.name == "denoise")

    @property
    def denoiser(self) -> torch.nn.Module:
        pipe = self.pipeline.pipe
        model: torch.nn.Module = pipe.transformer if hasattr(pipe, "transformer") else pipe.unet
        return model

    def enter(self, case: Mapping[str, Any]) -> Req:
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

    def at_step(self, case: Mapping[str, Any], step: int) -> Req:
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

    def pixels(self, case: Mapping[str, Any]) -> tuple[Any, Any]:
        """Pixels and latents of a whole request."""
        return self.finish(self.enter(case))


def check_shared_forwards(
    local: Local, oracle: Oracle, folder: Path, mix: Sequence[tuple[Mapping[str, Any], int]]
) -> None:
    """Requests, each with the steps it has done when they meet, denoise in one forward a step and equal each alone."""
    reqs = [local.at_step(case, step) for case, step in mix]
    assert len({local.denoise.batch_key(req) for req in reqs}) == 1
    running, shared = list(reqs), 0
    with forwards(local.denoiser) as seen:
        while running:
            count, timesteps = len(seen), {float(_timestep(req)) for req in running}
            local.unit(running)
            assert len(seen) == count + 1
            shared += len(running) > 1 and len(timesteps) == len(running)
            running = [req for req in running if local.pipeline.stages[req.stage] is local.denoise]
    assert shared >= 2
    references = oracle.run_all(folder, [case for case, _ in mix])
    for (case, _), req, reference in zip(mix, reqs, references, strict=True):
        pixels, latents = local.finish(req)
        check(reference, pixels, latents, {"seed": local.pixels({**case, "seed": case["seed"] // 2 + 1, "n": 1})[0]})


def _timestep(req: Req) -> torch.Tensor:
    assert req.timesteps is not None
    return req.timesteps[req.unit]


@contextlib.contextmanager
def forwards(model: torch.nn.Module) -> Iterator[list[int]]:
    """The rows of each forward of a denoiser."""
    seen: list[int] = []

    def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(len(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]))

    hook = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()
