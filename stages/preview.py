"""Previews: a cheap small picture of what a request's latents are going to be."""

from __future__ import annotations

import logging
import math
from typing import Any, Protocol

import msgspec
import torch
import torch.nn.functional as F

from diffgen.media.pixels import unit_to_uint8
from diffgen.params import Limits, ModelSpec, SamplingParams, resolve
from diffgen.request import Req
from stages.decode import Decodes
from stages.latents import PreparesLatents
from stages.timesteps import MakesScheduler

logger = logging.getLogger(__name__)

_SIZE = 128  # pixels a side of the pictures from which the projection is fitted
_BLOCKS = 4  # and independent areas a side


class Previewed(Decodes, PreparesLatents, MakesScheduler, Protocol):
    spec: ModelSpec
    device: torch.device

    def latent_image(self, latents: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        """The denoiser's latents as (n, C, T, h, w), without another change."""
        ...


class Previewer:
    """Latents to colours by one linear map, an output pixel for each latent one.

    No table of factors is needed: the map is fitted once, by least squares, to what the model's own VAE makes of some
    random latents.
    """

    def __init__(self, family: Previewed) -> None:
        self._family = family
        with torch.inference_mode():
            req = _example(family)
            latents, pixels = family.latent_image(_held(req), req.params), _decoded(family, req)
            small = F.interpolate(pixels, size=latents.shape[-2:], mode="area")
            rows = _rows(latents).double()
            # Slightly towards 0, for channels that hardly matter.
            penalty = 1e-3 * len(rows) * torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
            wanted = rows.T @ small.permute(0, 2, 3, 1).flatten(0, 2).double()
            self._map = torch.linalg.solve(rows.T @ rows + penalty, wanted).float()

    def __call__(self, req: Req, before: torch.Tensor | None) -> torch.Tensor:
        """uint8 (n, T, h, w, 3) of a request that has just made step ``req.unit`` - 1 from the latents ``before``."""
        with torch.inference_mode():
            clean = _held(req) if before is None else clean_latents(req.scheduler, req.unit - 1, before, _held(req))
            latents = self._family.latent_image(clean, req.params)
            n, _, frames, height, width = latents.shape
            pixels = (_rows(latents) @ self._map).clamp(0, 1).view(n, frames, height, width, 3)
            return unit_to_uint8(pixels)


def make_previewer(family: Previewed) -> Previewer | None:
    """None where the family's latents cannot be shown; that must not keep its model from being served."""
    try:
        return Previewer(family)
    except Exception:
        logger.warning("no previews for %s", type(family).__name__, exc_info=True)
        return None


def clean_latents(scheduler: Any, step: int, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """What a step from ``before`` to ``after`` leads to once all noise is gone.

    Both are a part of the clean latents and a part of one noise, in proportions that the scheduler's schedule says: two
    equations for two unknowns. Exact for a first-order sampler without noise of its own, and close for the others.
    """
    signal, noise = _proportions(scheduler, step)
    next_signal, next_noise = _proportions(scheduler, step + 1)
    determinant = signal * next_noise - next_signal * noise
    if abs(determinant) < 1e-6:  # a step that stays at its noise level
        return after / next_signal if next_signal > 0.1 else after
    return (before * next_noise - after * noise) / determinant


def _proportions(scheduler: Any, step: int) -> tuple[float, float]:
    """Of the clean latents and of the noise in the latents before a step."""
    config = scheduler.config
    if not hasattr(scheduler, "sigmas"):
        times = scheduler.timesteps
        last = getattr(scheduler, "final_alpha_cumprod", 1.0)
        kept = float(scheduler.alphas_cumprod[int(times[step])] if step < len(times) else last)
        return math.sqrt(kept), math.sqrt(1 - kept)
    sigma = float(scheduler.sigmas[step]) if step < len(scheduler.sigmas) else 0.0
    if type(scheduler).__name__.startswith("FlowMatch") or config.get("use_flow_sigmas"):
        return 1 - sigma, sigma
    # Of those with sigmas, the ones with an order keep the variance of their latents at 1.
    signal = 1 / math.sqrt(1 + sigma**2) if "solver_order" in config else 1.0
    return signal, sigma * signal


def _held(req: Req) -> torch.Tensor:
    assert req.latents is not None
    return req.latents


def _rows(latents: torch.Tensor) -> torch.Tensor:
    """(n, C, T, h, w) to (n T h w, C + 1) with a constant."""
    rows = latents.float().movedim(1, -1).flatten(0, -2)
    return F.pad(rows, (0, 1), value=1.0)


def _example(family: Previewed) -> Req:
    """A request of small pictures, as many as its latents' channels ask for, whose latents are random and smooth."""
    spec = family.spec
    side = -(-_SIZE // spec.size_multiple) * spec.size_multiple
    params = SamplingParams(prompt="", width=side, height=side, num_frames=1, seed=0, num_outputs_per_prompt=1)
    params = resolve(params, spec, Limits()).params
    one = _prepared(family, params)
    channels = family.latent_image(_held(one), params).shape[1]
    # Several times as many areas as there are numbers to fit.
    count = min(16, math.ceil(4 * (channels + 1) / _BLOCKS**2))
    params = msgspec.structs.replace(params, num_outputs_per_prompt=count)
    req = _prepared(family, params)
    # Where each number of the image lies in the latents.
    places = torch.arange(float(_held(req).numel()), dtype=torch.float64).view_as(_held(req))
    image = family.latent_image(places, params).long()
    areas = torch.randn(count, channels, _BLOCKS, _BLOCKS, generator=torch.Generator("cpu").manual_seed(0))
    values = F.interpolate(areas, size=image.shape[-2:], mode="bilinear")[:, :, None].expand(image.shape)
    req.latents = torch.empty(image.numel()).index_copy(0, image.flatten(), values.flatten())
    req.latents = req.latents.view(places.shape).to(family.device)
    return req


def _prepared(family: Previewed, params: SamplingParams) -> Req:
    req = Req("preview", params)
    req.scheduler = family.make_scheduler(req)
    family.set_timesteps(req.scheduler, req)
    req.timesteps = req.scheduler.timesteps
    req.latents = family.prepare_latents(req, [torch.Generator("cpu").manual_seed(seed) for seed in req.seeds])
    return req


def _decoded(family: Previewed, req: Req) -> torch.Tensor:
    """float (n, 3, height, width) in [0, 1]."""
    parts = []
    for unit in range(family.decode_units(req)):
        req.unit = unit
        part, req.decoder = family.decode_unit(req)
        parts.append(part.float())
    return (torch.cat(parts)[:, :, 0] * 0.5 + 0.5).clamp(0, 1)
