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

    def __init__(self, family: Denoises) -> None:
        self.family = family

    def units(self, req: Req) -> int:
        return 0 if req.timesteps is None else len(req.timesteps)

    def batch_key(self, req: Req) -> Hashable:
        return self.family.batch_key(req)

    def run(self, reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
        rows, owners = [], []
        for index, req in enumerate(reqs):
            assert req.latents is not None
            assert req.timesteps is not None
            key = self.family.batch_key(req)
            for branch in req.branches:
                rows.append(Row(req.latents, req.timesteps[req.unit], branch, key))
                owners.append(index)
        predictions = ctx.map_rows(self._predict, rows)
        updates = []
        for index, req in enumerate(reqs):
            mine = [prediction for owner, prediction in zip(owners, predictions, strict=True) if owner == index]
            updates.append(self._step(req, self.family.guide(mine, req)))
        return updates

    def _predict(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        sizes = [len(row.latents) for row in rows]
        latents = torch.cat([row.latents for row in rows])
        timesteps = torch.cat([row.timestep.expand(size) for row, size in zip(rows, sizes, strict=True)])
        branch = {
            name: torch.cat([_repeated(row.branch[name], len(row.latents)) for row in rows]) for name in rows[0].branch
        }
        return list(torch.split(self.family.denoise(latents, timesteps, branch, rows[0].key), sizes))

    def _step(self, req: Req, prediction: torch.Tensor) -> Update:
        assert req.timesteps is not None
        # step() changes the scheduler and the generators, and cannot be repeated: they are stepped on copies.
        scheduler = copy.deepcopy(req.scheduler)
        generators = tuple(generator.clone_state() for generator in req.generators)
        options: dict[str, Any] = {}
        if "generator" in inspect.signature(scheduler.step).parameters:
            options["generator"] = list(generators)
        latents = scheduler.step(prediction, req.timesteps[req.unit], req.latents, return_dict=False, **options)[0]
        return Update(latents=latents, scheduler=scheduler, generators=generators)


def _repeated(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """(1, ...) to (count, ...), without a copy."""
    return tensor.expand(count, *tensor.shape[1:])
