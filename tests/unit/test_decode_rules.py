"""Of which VAEs the decode can be split."""

from __future__ import annotations

import diffusers
import pytest
from accelerate import init_empty_weights

from diffgen.distributed.decode import why_not_decode
from pipelines.base import ComposedPipelineBase
from pipelines.flux import FluxPipeline
from pipelines.hunyuan_video import HunyuanVideoPipeline
from pipelines.qwen_image import QwenImagePipeline
from pipelines.wan import WanPipeline


@pytest.mark.parametrize(
    ("kind", "family", "missing"),
    [
        ("AutoencoderKL", FluxPipeline, ""),
        ("AutoencoderKLWan", WanPipeline, ""),
        ("AutoencoderKLQwenImage", QwenImagePipeline, ""),
        ("AutoencoderKLHunyuanVideo", HunyuanVideoPipeline, ""),
        # Its attention over frames is the family's to know, also where another pipeline has the same VAE.
        ("AutoencoderKLHunyuanVideo", FluxPipeline, "Attention"),
        ("AutoencoderKLHunyuanVideo15", FluxPipeline, "Conv3d"),
        ("AutoencoderKLMochi", FluxPipeline, "Conv3d"),
        ("AutoencoderKLCogVideoX", FluxPipeline, "Conv3d"),
        ("AutoencoderDC", FluxPipeline, "RMSNorm"),
    ],
)
def test_every_layer_has_a_rule_or_none_is_split(kind: str, family: type[ComposedPipelineBase], missing: str) -> None:
    with init_empty_weights():
        vae = getattr(diffusers, kind)()
    reason = why_not_decode(vae, family.decode_rules)
    assert missing in reason
    assert bool(reason) == bool(missing)
