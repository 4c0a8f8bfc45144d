"""Tiny random models like Stable Diffusion 3 in diffusers layout; see :mod:`tiny_models` for their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_parts

CHANNELS = 4
#: Of each CLIP encoder; side by side they are as wide as T5 or less.
CLIP_LAYERS = 3
DEFAULTS = tiny_parts.STILL | {"guidance_scale": 4.0, "max_sequence_length": 16}


def make_tiny_sd3(folder: Path, *, seed: int = 25, heads: int = 4) -> Path:
    """Like 3 medium: every attention is joint, without norms; a fixed shift."""
    import diffusers

    return _make(folder, seed, diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), num_attention_heads=heads)


def make_tiny_sd35(folder: Path, *, seed: int = 26) -> Path:
    """Like 3.5 medium: a second attention in the first layer, queries and keys are normed; without T5.

    The shift grows with the picture, from a short base length on, so that the small pictures of tests differ in it.
    """
    import diffusers

    dynamic = {"use_dynamic_shifting": True, "base_image_seq_len": 4, "max_image_seq_len": 64}
    options: dict[str, Any] = {"dual_attention_layers": (0,), "qk_norm": "rms_norm"}
    return _make(folder, seed, diffusers.FlowMatchEulerDiscreteScheduler(**dynamic), t5=False, **options)


def _make(folder: Path, seed: int, scheduler: Any, *, t5: bool = True, **options: Any) -> Path:
    import diffusers
    import torch

    width = 2 * tiny_parts.TEXT_DIM
    with tiny_parts.seeded(seed):
        sizes = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4} | options
        transformer = diffusers.SD3Transformer2DModel(
            sample_size=8,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            caption_projection_dim=sizes["attention_head_dim"] * sizes["num_attention_heads"],
            joint_attention_dim=width,
            pooled_projection_dim=width,
            pos_embed_max_size=16,
            **sizes,
        ).eval()
        transformer.context_embedder.weight.mul_(4.0)
        inputs = {"hidden_states": torch.randn(1, CHANNELS, 8, 8), "timestep": torch.tensor([500.0])}
        inputs |= {"encoder_hidden_states": torch.randn(1, 93, width), "pooled_projections": torch.randn(1, width)}
        tiny_parts.scale_denoiser(transformer, inputs, std=0.8)
        clips = [tiny_parts.clip("CLIPTextModelWithProjection", num_hidden_layers=CLIP_LAYERS) for _ in range(2)]
        pipe = diffusers.StableDiffusion3Pipeline(
            tokenizer=tiny_parts.tokenizer(length=77),
            tokenizer_2=tiny_parts.tokenizer(length=77),
            tokenizer_3=tiny_parts.tokenizer() if t5 else None,
            text_encoder=clips[0],
            text_encoder_2=clips[1],
            text_encoder_3=tiny_parts.t5(d_model=width) if t5 else None,
            vae=tiny_parts.image_vae(CHANNELS, shift_factor=0.06),
            transformer=transformer,
            scheduler=scheduler,
        )
    return tiny_parts.save(pipe, folder, DEFAULTS)
