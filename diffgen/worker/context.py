"""What the worker needs of a stage and of a pipeline, and what a stage gets to work with.

Stages and pipelines live in packages of their own and are known here by these protocols alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch

from diffgen.errors import DiffgenError
from diffgen.params import ModelSpec
from diffgen.request import Req, Update


@dataclasses.dataclass(frozen=True)
class Row:
    """One guidance branch of one request: what the denoiser must predict in a step.

    ``latents`` is (n, ...) with the n outputs of the request, ``timestep`` a scalar tensor, and the tensors of
    ``branch`` are (1, ...). Rows of equal ``key`` may share a forward.
    """

    latents: torch.Tensor
    timestep: torch.Tensor
    branch: dict[str, torch.Tensor]
    key: Hashable


Predict = Callable[[Sequence[Row]], list[torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class StageContext:
    """The executor's side of a unit.

    ``map_rows(predict, rows)`` gives each row's prediction, (n, ...) as its latents, on every rank; which rank computes
    which rows is the layout's business.
    """

    device: torch.device
    map_rows: Callable[[Predict, Sequence[Row]], list[torch.Tensor]]


class Stage(Protocol):
    """A part of a pipeline, cut into units; it keeps nothing between requests.

    ``name`` is what users see in progress and timings, each only once in a pipeline. A stage that ``prepares`` takes
    little and makes the request ready for work that it may share with others. Units of one that is ``stepped`` are
    denoising steps: they take equally long, and there are the more of them the more steps were asked for. What one that
    ``encodes`` makes, branches and warnings, depends on the parameters alone, not on seed, number of outputs or steps.
    """

    name: str
    prepares: bool
    stepped: bool
    encodes: bool

    def units(self, req: Req) -> int:
        """How many units the request has in this stage; 0 skips it. Asked when the request enters the stage."""
        ...

    def batch_key(self, req: Req) -> Hashable:
        """Requests with equal keys may share the next unit; None shares with no other."""
        ...

    def run(self, reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
        """Compute unit ``req.unit`` of each request and return the new values in order; change no request."""
        ...


class Pipeline(Protocol):
    """What the worker runs: the stages in order, and what the model takes."""

    stages: Sequence[Stage]
    spec: ModelSpec
    # uint8 (n, T, h, w, 3) of a request after a denoising step, and its latents before it; None: it shows nothing.
    preview: Callable[[Req, torch.Tensor | None], torch.Tensor] | None


@dataclasses.dataclass(frozen=True)
class StageError:
    """A unit failed for a request on this rank."""

    error: DiffgenError
