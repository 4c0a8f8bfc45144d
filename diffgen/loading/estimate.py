"""How much memory a request needs on a rank, from a pipeline without weights.

A rule of thumb, for choosing a device and a size, not a promise. With n outputs, b guidance branches and the layout's
degrees tp, sp and cfg::

    weights   parameters x bytes of their numbers, components one by one, sliced by tp
    latents   n x elements x 4 bytes x (2 + b): latents, the scheduler's last prediction, one prediction a branch
    denoise   3 x (n x b) / cfg x tokens / sp x widest x bytes: three tensors of the widest layer input, sliced by tp
    decode    the most bytes of tensors alive at once in a decode unit, counted by running rank 0's share of it on
              shapes without values
    pixels    n x frames x height x width x 3 bytes
    total     weights + latents + pixels + the larger of denoise and decode

Shares are rounded up. Tokens are the latents' positions over the denoiser's patch. Attention is taken to need no more
than its inputs, as it does on the devices that matter. Work space of a device's libraries comes on top.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diffgen.params import SamplingParams, is_guided
from diffgen.request import Req

_LIVE = 3
_UNITS = 3


def estimate_memory(pipeline: Any, params: SamplingParams) -> dict[str, Any]:
    """MiB of each part on rank 0 of the pipeline's layout, for resolved ``params``; "weights" by component.

    Parts beside the weights are None where the pipeline does not say what its latents are.
    """
    models = {name: part for name, part in pipeline.pipe.components.items() if isinstance(part, torch.nn.Module)}
    weights = {
        name: sum(each.numel() * each.element_size() for each in part.parameters()) for name, part in models.items()
    }
    parts = _parts(pipeline, params, models)
    found: dict[str, Any] = {"weights": {name: _mib(size) for name, size in weights.items()}}
    found |= {name: None if size is None else _mib(size) for name, size in parts.items()}
    sizes = {name: size or 0 for name, size in parts.items()}
    work = sizes["latents"] + sizes["pixels"] + max(sizes["denoise"], sizes["decode"])
    return found | {"total": _mib(sum(weights.values()) + work)}


def _mib(size: int) -> float:
    return round(size / 2**20, 1)


def _parts(pipeline: Any, params: SamplingParams, models: dict[str, torch.nn.Module]) -> dict[str, int | None]:
    req = Req("estimate", params)
    count, frames = req.outputs, params.num_frames or 1
    outside = frames * (params.height or 0) * (params.width or 0)
    found: dict[str, int | None] = {"latents": None, "denoise": None, "decode": None, "pixels": count * outside * 3}
    if not hasattr(pipeline, "prepare_latents"):
        return found
    req.scheduler = pipeline.make_scheduler(req)  # some scale the noise
    # A generator would draw the noise on its own device, which is no empty one.
    latents = req.latents = pipeline.prepare_latents(req, None)
    branches = 2 if is_guided(params, pipeline.spec) else 1
    found["latents"] = latents.numel() * 4 * (2 + branches)
    decoders = [part for part in models.values() if hasattr(part, "decode")]
    denoisers = [part for part in models.values() if part not in decoders and hasattr(part.config, "in_channels")]
    if denoisers:
        dims = pipeline.layout.dims
        rows = math.ceil(count * branches / dims.cfg)
        found["denoise"] = max(
            _LIVE * rows * math.ceil(_tokens(latents, part) / dims.sp) * _widest(part) * _item(part)
            for part in denoisers
        )
    if hasattr(pipeline, "decode_unit"):
        found["decode"] = _decode_peak(pipeline, req)
    return found


def _tokens(latents: torch.Tensor, denoiser: Any) -> int:
    """Of an output: (n, tokens, channels) are packed already, (n, channels, [frames,] height, width) are not."""
    if latents.ndim == 3:
        return latents.shape[1]
    patch = getattr(denoiser.config, "patch_size", None) or 1
    sides = list(patch) if isinstance(patch, list | tuple) else [patch, patch]
    return math.ceil(latents[0, 0].numel() / math.prod(sides))


def _widest(model: torch.nn.Module) -> int:
    """The most features that a layer reads; what a layer writes counts where the next one reads it."""
    linear = [layer.in_features for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    return max([1, *linear, *(layer.in_channels for layer in _convolutions(model))])


def _decode_peak(pipeline: Any, req: Req) -> int | None:
    """Bytes, over the first units, which differ in what they keep; None where the decoder needs values."""
    counter = _LiveBytes()
    try:
        with torch.inference_mode(), counter:
            for unit in range(min(pipeline.decode_units(req), _UNITS)):
                req.unit = unit
                _, req.decoder = pipeline.decode_unit(req)
    except (RuntimeError, NotImplementedError):  # torch's, for operators that cannot do without
        return None
    return counter.peak


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that operators make and that are still held."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                key = storage._cdata
                if key not in self._sizes:
                    self._sizes[key] = storage.nbytes()
                    weakref.finalize(storage, self._sizes.pop, key)
        self.peak = max(self.peak, sum(self._sizes.values()))
        return made


def _convolutions(model: torch.nn.Module) -> list[torch.nn.Conv2d | torch.nn.Conv3d]:
    return [layer for layer in model.modules() if isinstance(layer, torch.nn.Conv2d | torch.nn.Conv3d)]


def _item(model: torch.nn.Module) -> int:
    return next(iter(model.parameters())).element_size()
