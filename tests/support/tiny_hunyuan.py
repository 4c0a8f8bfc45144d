"""A tiny random HunyuanVideo model in diffusers layout; see :mod:`tiny_models` for what its weights must be like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_parts

CHANNELS = 8
DEFAULTS = tiny_parts.CLIP | {"guidance_scale": 6.0, "max_sequence_length": 24}


def make_tiny_hunyuan(folder: Path, *, seed: int = 5, heads: int = 4, layers: int = 1, flow_shift: float = 7.0) -> Path:
    """Spatial compression 8, temporal compression 4, patches of 2 x 2, Llama's template as published.

    The words of the template are unknown to the tokenizer and come to 99 tokens, of which 95 are cropped.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, HunyuanVideoPipeline

    with tiny_parts.seeded(seed):
        llama = tiny_parts.language_model("Llama", num_hidden_layers=3, initializer_range=0.3, use_cache=False)
        clip = tiny_parts.clip()
        vae, transformer = _vae(), _transformer(heads, layers)
    pipe = HunyuanVideoPipeline(
        text_encoder=llama,
        tokenizer=tiny_parts.tokenizer(template="$A"),  # Llama's adds no token at the end
        text_encoder_2=clip,
        tokenizer_2=tiny_parts.tokenizer(),
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=flow_shift),
    )
    return tiny_parts.save(pipe, folder, DEFAULTS)


def _transformer(heads: int, layers: int) -> Any:
    import torch
    from diffusers import HunyuanVideoTransformer3DModel

    model = HunyuanVideoTransformer3DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=heads,
        attention_head_dim=16,
        num_layers=layers,
        num_single_layers=layers,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=tiny_parts.TEXT_DIM,
        pooled_projection_dim=tiny_parts.TEXT_DIM,
        rope_axes_dim=(4, 6, 6),
    ).eval()
    # Else the text hardly changes the prediction.
    model.context_embedder.proj_in.weight.mul_(4.0)
    model.time_text_embed.text_embedder.linear_2.weight.mul_(2.0)
    inputs = {
        "hidden_states": torch.randn(1, CHANNELS, 2, 8, 8),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 16, tiny_parts.TEXT_DIM),
        "encoder_attention_mask": torch.ones(1, 16),
        "pooled_projections": torch.randn(1, tiny_parts.TEXT_DIM),
        "guidance": torch.tensor([6000.0]),
    }
    return tiny_parts.scale_denoiser(model, inputs)


def _vae() -> Any:
    from diffusers import AutoencoderKLHunyuanVideo

    sizes = {"latent_channels": CHANNELS, "block_out_channels": (8, 8, 8, 8), "layers_per_block": 1}
    vae = AutoencoderKLHunyuanVideo(**sizes, norm_num_groups=4).eval()
    return tiny_parts.scale_vae(vae, (CHANNELS, 2, 8, 8))
