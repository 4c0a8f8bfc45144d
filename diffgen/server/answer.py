"""A finished request as the message that answers it."""

from __future__ import annotations

from typing import Any

import torch

from diffgen.request import OutputBatch, Req, TensorHeader
from diffgen.wire.messages import Result
from diffgen.worker.worker import peak_memory_mb


def make_result(req: Req, timings: dict[str, float], device: torch.device) -> tuple[Result, Any]:
    """The message and the array that goes beside it: uint8 frames, or float32 latents."""
    latent = req.params.output_type == "latent"
    if latent:
        assert req.latents is not None
        tensor = req.latents.float()
    else:
        tensor = req.pixels
    array = tensor.cpu().contiguous().numpy()
    output = OutputBatch(
        params=req.params,
        seeds=req.seeds,
        warnings=req.warnings,
        timings=timings,
        peak_memory_mb=peak_memory_mb(device),
        latent=latent,
        tensor=TensorHeader(str(array.dtype), array.shape),
    )
    return Result(req.id, output), array
