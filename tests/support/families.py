"""A tiny random model of each family, by the family's name in the registry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import tiny_flux
import tiny_hunyuan
import tiny_models
import tiny_qwen
import tiny_sana
import tiny_sd
import tiny_sd3

MAKERS: dict[str, Callable[[Path], Path]] = {
    "flux": tiny_flux.make_tiny_flux,
    "hunyuan-video": tiny_hunyuan.make_tiny_hunyuan,
    "qwen-image": tiny_qwen.make_tiny_qwen_image,
    "sana": tiny_sana.make_tiny_sana,
    "stable-diffusion": tiny_sd.make_tiny_sd,
    "stable-diffusion-3": tiny_sd3.make_tiny_sd3,
    "stable-diffusion-xl": tiny_sd.make_tiny_sdxl,
    "wan": tiny_models.make_tiny_wan22,
}
