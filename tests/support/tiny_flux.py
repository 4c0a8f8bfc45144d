"""Tiny random FLUX.1 models in diffusers layout; see :mod:`tiny_models` for what their weights must be like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_parts

CHANNELS = 4  # of the VAE's latents; the transformer sees 2 x 2 of them a token
DEFAULTS = tiny_parts.STILL | {"guidance_scale": 3.5, "max_sequence_length": 16}


def make_tiny_flux(folder: Path, *, seed: int = 10, heads: int = 4, layers: int = 2) -> Path:
    """Like FLUX.1-dev: embedded guidance, and a shift that grows with the picture. Spatial compression 8."""
    return _make(folder, seed, heads, layers, guidance_embeds=True)


def make_tiny_flux_unipc(folder: Path, *, seed: int = 12, heads: int = 4, layers: int = 1) -> Path:
    """Like FLUX.1-dev with a multistep scheduler that has sigmas of its own, in place of evenly spaced ones."""
    from diffusers import UniPCMultistepScheduler

    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    scheduler = UniPCMultistepScheduler(**flow, use_dynamic_shifting=True, time_shift_type="exponential")
    return _make(folder, seed, heads, layers, guidance_embeds=True, scheduler=scheduler)


def make_tiny_flux_schnell(folder: Path, *, seed: int = 11, heads: int = 4, layers: int = 1) -> Path:
    """Like FLUX.1-schnell: no embedded guidance, no dynamic shift."""
    return _make(folder, seed, heads, layers, guidance_embeds=False)


def _make(folder: Path, seed: int, heads: int, layers: int, *, guidance_embeds: bool, scheduler: Any = None) -> Path:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    with tiny_parts.seeded(seed):
        # The ends of _clip_tokenizer.
        clip = tiny_parts.clip(bos_token_id=0, eos_token_id=1, pad_token_id=1)
        t5, vae = tiny_parts.t5(), tiny_parts.image_vae(CHANNELS, **_VAE)
        transformer = _transformer(heads, layers, guidance_embeds)
    # A short base length, so that the small pictures of tests differ in their shift.
    dynamic = {"use_dynamic_shifting": True, "base_image_seq_len": 4, "max_image_seq_len": 64, "shift": 3.0}
    pipe = FluxPipeline(
        scheduler=scheduler or FlowMatchEulerDiscreteScheduler(**(dynamic if guidance_embeds else {"shift": 1.0})),
        vae=vae,
        text_encoder=clip,
        tokenizer=_clip_tokenizer(),
        text_encoder_2=t5,
        tokenizer_2=tiny_parts.tokenizer(),
        transformer=transformer,
    )
    defaults = DEFAULTS if guidance_embeds else {name: DEFAULTS[name] for name in DEFAULTS if name != "guidance_scale"}
    return tiny_parts.save(pipe, folder, defaults)


_VAE = {"use_quant_conv": False, "use_post_quant_conv": False, "scaling_factor": 0.5, "shift_factor": 0.1}


def _clip_tokenizer() -> Any:
    """Word-level, with CLIP's tokens around a text and its length of 77."""
    start, end = "<|startoftext|>", "<|endoftext|>"
    tokens = {"bos_token": start, "eos_token": end, "pad_token": end}
    return tiny_parts.tokenizer((start, end, "<unk>"), f"{start} $A {end}", 77, **tokens)


def _transformer(heads: int, layers: int, guidance_embeds: bool) -> Any:
    import torch
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4 * CHANNELS,
        num_layers=layers,
        num_single_layers=layers,
        attention_head_dim=16,
        num_attention_heads=heads,
        joint_attention_dim=tiny_parts.TEXT_DIM,
        pooled_projection_dim=tiny_parts.TEXT_DIM,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    ).eval()
    inputs = {
        "hidden_states": torch.randn(1, 16, 4 * CHANNELS),
        "encoder_hidden_states": torch.randn(1, 16, tiny_parts.TEXT_DIM),
        "pooled_projections": torch.randn(1, tiny_parts.TEXT_DIM),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(16, 3),
        "guidance": torch.tensor([3.5]) if guidance_embeds else None,
    }
    return tiny_parts.scale_denoiser(model, inputs)
