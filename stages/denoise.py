"""Denoising: one step for a batch of requests, each at its own timestep."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Protocol

import torch

from diffgen.request import Req, Update
from diffgen.worker.context import Row, StageContext
from stages.base import PipelineStage


class Denoises(Protocol):
    def denoise(
        self, latents: torch.Tensor, timestep: torch.Tensor, branch: dict[str, torch.Tensor], key: Hashable
    ) -> torch.Tensor:
        """The model's prediction for (b, ...) latents at (b,) timesteps; ``key`` is the rows' common batch key."""
        ...

    def batch_key(self, req: Req) -> Hashable:
        """What must be equal for two requests to share a forward, as it is before their next step."""
        ...

    def guide(self, predictions: Sequence[torch.Tensor], req: Req) -> torch.Tensor:
        """One prediction from those of the request's branches, each (n, ...)."""
        ...


class DenoisingStage(PipelineStage):
    """A unit is one step of the request's scheduler; second-order schedulers have more than one a step asked for."""

    name: ClassVar[str] = "denoise"
    stepped: ClassVar[bool] = True

    def __init__(self, family: Denoises) -> None:
        self.family = family

    def units(self, req: Req) -> int:
        return 0 if req.timesteps is None else len(req.timesteps)

    def batch_key(self, req: Req) -> Hashable:
        return self.family.batch_key(req)

    def run(self, reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
        # A scheduler's step, and for some its scaling of the input, changes it and cannot be repeated: both are done on
        # copies, which count once the unit is committed.
        schedulers = [copy.deepcopy(req.scheduler) for req in reqs]
        rows, owners = [], []
        for index, (req, scheduler) in enumerate(zip(reqs, schedulers, strict=True)):
            for row in self._rows(req, scheduler):
                rows.append(row)
                owners.append(index)
        predictions = ctx.map_rows(self._predict, rows)
        updates = []
        for index, (req, scheduler) in enumerate(zip(reqs, schedulers, strict=True)):
            mine = [prediction for owner, prediction in zip(owners, predictions, strict=True) if owner == index]
            updates.append(step(req, scheduler, self.family.guide(mine, req)))
        return updates

    def _rows(self, req: Req, scheduler: Any) -> list[Row]:
        """One row a guidance branch. Only rows whose tensors have equal shapes can share a forward."""
        timestep, latents = scaled(req, scheduler)
        key = self.family.batch_key(req)
        return [Row(latents, timestep, branch, (key, _shapes(branch))) for branch in req.branches]

    def _predict(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        sizes = [len(row.latents) for row in rows]
        latents = torch.cat([row.latents for row in rows])
        timesteps = torch.cat([row.timestep.expand(size) for row, size in zip(rows, sizes, strict=True)])
        branch = {
            name: torch.cat([_repeated(row.branch[name], len(row.latents)) for row in rows]) for name in rows[0].branch
        }
        key = rows[0].key[0]  # type: ignore[index]
        return list(torch.split(self.family.denoise(latents, timesteps, branch, key), sizes))


def scaled(req: Req, scheduler: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The next timestep, and the request's latents as the denoiser takes them at it."""
    assert req.latents is not None
    assert req.timesteps is not None
    timestep, latents = req.timesteps[req.unit], req.latents
    if hasattr(scheduler, "scale_model_input"):
        latents = scheduler.scale_model_input(latents, timestep)
    return timestep, latents


def step(req: Req, scheduler: Any, prediction: torch.Tensor) -> Update:
    """The request's latents after a step of ``scheduler``, its own copy."""
    assert req.timesteps is not None
    generators = tuple(generator.clone_state() for generator in req.generators)
    # As diffusers' pipelines do: TCD's own default adds noise.
    options = {"generator": list(generators), "eta": 0.0}
    takes = inspect.signature(scheduler.step).parameters
    options = {name: value for name, value in options.items() if name in takes}
    latents = scheduler.step(prediction, req.timesteps[req.unit], req.latents, return_dict=False, **options)[0]
    return Update(latents=latents, scheduler=scheduler, generators=generators)


def _shapes(branch: dict[str, torch.Tensor]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(tensor.shape)) for name, tensor in sorted(branch.items()))


def _repeated(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """(1, ...) to (count, ...), without a copy."""
    return tensor.expand(count, *tensor.shape[1:])
