"""The one way from a model's floats to the uint8 of every picture and clip."""

from __future__ import annotations

import torch

from diffgen.errors import NanOutput


def to_uint8(decoded: torch.Tensor) -> torch.Tensor:
    """(n, 3, frames, height, width) in [-1, 1] to uint8 (n, frames, height, width, 3): clamped, then rounded.

    Values and rounding are those of diffusers' ``VaeImageProcessor``. Raises :class:`NanOutput`.
    """
    check_finite(decoded, "decoded pixels", "decode in float32 or bfloat16")
    return unit_to_uint8((decoded.float() * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1))


def unit_to_uint8(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels (n, frames, height, width, 3) in [0, 1] to uint8, rounded. Raises :class:`NanOutput`."""
    check_finite(pixels, "pixels", "decode in float32 or bfloat16")
    return (pixels * 255).round().to(torch.uint8).contiguous()


def check_finite(values: torch.Tensor, what: str, remedy: str) -> None:
    """Raises :class:`NanOutput` where a floating-point tensor holds NaN or infinity."""
    if values.is_floating_point() and not torch.isfinite(values).all():
        bad = int((~torch.isfinite(values)).sum())
        raise NanOutput(f"{bad} of {values.numel()} {what} are not finite; {remedy}")
