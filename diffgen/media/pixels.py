"""The one way from a model's floats to the uint8 of every picture and clip."""

from __future__ import annotations

import torch

from diffgen.errors import NanOutput


def to_uint8(decoded: torch.Tensor) -> torch.Tensor:
    """(n, 3, frames, height, width) in [-1, 1] to uint8 (n, frames, height, width, 3): clamped, then rounded.

    Values and rounding are those of diffusers' ``VaeImageProcessor``. Raises :class:`NanOutput`.
    """
    check_finite(decoded, "decoded pixels", "decode in float32 or bfloat16")
    unit = (decoded.float() * 0.5 + 0.5).clamp(0, 1)
    return (unit * 255).round().to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous()


def check_finite(values: torch.Tensor, what: str, remedy: str) -> None:
    """Raises :class:`NanOutput` where a floating-point tensor holds NaN or infinity."""
    if values.is_floating_point() and not torch.isfinite(values).all():
        bad = int((~torch.isfinite(values)).sum())
        raise NanOutput(f"{bad} of {values.numel()} {what} are not finite; {remedy}")
