"""Families that fail on purpose, given as ``pipeline="faulty_families:Class"`` with this folder on PYTHONPATH."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from diffgen.args import ModelArgs
from diffgen.loading.index import ModelIndex
from diffgen.request import Req, Update
from diffgen.worker.context import StageContext
from pipelines.wan import WanPipeline
from stages.base import PipelineStage
from stages.decode import DecodingStage
from stages.denoise import DenoisingStage


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class FailsToLoadOnRank1(WanPipeline):
    def __init__(self, index: ModelIndex, model: ModelArgs, device: torch.device) -> None:
        if _rank() == 1:
            raise ValueError("rank 1 has no luck")
        super().__init__(index, model, device)


class DiesWhileLoadingOnRank1(WanPipeline):
    def __init__(self, index: ModelIndex, model: ModelArgs, device: torch.device) -> None:
        if _rank() == 1:
            os._exit(7)
        super().__init__(index, model, device)


class LoadsSlowly(WanPipeline):
    def __init__(self, index: ModelIndex, model: ModelArgs, device: torch.device) -> None:
        print("loading", flush=True)
        time.sleep(60)


class FailingDenoising(DenoisingStage):
    """Raises on rank 1 for requests whose prompt begins with "bad", as a bug in a model would; "odd" diverges there."""

    def run(self, reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
        if _rank() == 1 and any(req.params.prompt.startswith("bad") and req.unit == 1 for req in reqs):
            raise RuntimeError("rank 1 has a bug")
        updates = super().run(reqs, ctx)
        if _rank() == 1:
            for req, update in zip(reqs, updates, strict=True):
                if req.params.prompt.startswith("odd"):
                    update.latents = update.latents + 1e-6
        return updates


class FailsOnRank1(WanPipeline):
    def make_stages(self) -> Sequence[PipelineStage]:
        return [FailingDenoising(self) if isinstance(s, DenoisingStage) else s for s in super().make_stages()]


class EndingDenoising(DenoisingStage):
    """Ends the process for requests whose prompt begins with "poison", hangs for "hang", in their second step."""

    def run(self, reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
        for req in reqs:
            if req.unit == 1 and req.params.prompt.startswith("poison"):
                os._exit(9)
            if req.unit == 1 and req.params.prompt.startswith("hang"):
                time.sleep(600)
        return super().run(reqs, ctx)


class EndsItsProcess(WanPipeline):
    def make_stages(self) -> Sequence[PipelineStage]:
        return [EndingDenoising(self) if isinstance(s, DenoisingStage) else s for s in super().make_stages()]


class OutOfMemoryDecoding(DecodingStage):
    def run(self, reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
        if any(req.params.prompt.startswith("big") for req in reqs):
            raise torch.OutOfMemoryError("tried to allocate 999 GiB")
        return super().run(reqs, ctx)


class RunsOutOfMemory(WanPipeline):
    def make_stages(self) -> Sequence[PipelineStage]:
        stages: list[Any] = list(super().make_stages())
        return [OutOfMemoryDecoding(self) if isinstance(s, DecodingStage) else s for s in stages]
