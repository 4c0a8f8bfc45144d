"""Tiny random models in diffusers layout: one ``make_*`` function a family, each writing a complete folder.

The weights are random but not arbitrary: the prompt, the guidance scale and the seed must each move a picture by
several levels, or a parity test would pass for an implementation that ignores them. They are also smooth enough that
rounding errors of float32 stay far below one level. Everything is seeded: two calls write the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny_parts


def make_tiny_wan(folder: Path, *, seed: int = 0, heads: int = 4, layers: int = 2, flow_shift: float = 3.0) -> Path:
    """A Wan 2.1 text-to-video model: spatial compression 8, temporal compression 4, patches of 2 x 2."""
    return tiny_parts.save(_wan(seed, heads, layers, _flow_match_euler(flow_shift)), folder, _WAN_DEFAULTS)


def make_tiny_wan22(folder: Path, *, seed: int = 1, heads: int = 4, boundary_ratio: float = 0.875) -> Path:
    """A Wan 2.2 model with two experts: ``transformer`` for high noise, ``transformer_2`` below ``boundary_ratio``."""
    pipe = _wan(seed, heads, 2, _unipc(flow_shift=3.0), experts=2, boundary_ratio=boundary_ratio)
    return tiny_parts.save(pipe, folder, _WAN_DEFAULTS)


def make_tiny_wan22_5b(folder: Path, *, seed: int = 2, heads: int = 4) -> Path:
    """A model like Wan 2.2 TI2V 5B: a timestep a token, and a residual VAE that compresses space by 16."""
    pipe = _wan(seed, heads, 2, _unipc(flow_shift=5.0), is_residual=True, expand_timesteps=True)
    return tiny_parts.save(pipe, folder, _WAN_DEFAULTS | {"width": 128, "height": 128})


_WAN_DEFAULTS = tiny_parts.CLIP | {"guidance_scale": 4.0, "max_sequence_length": 16}


def _wan(
    seed: int, heads: int, layers: int, scheduler: Any, *, experts: int = 1, is_residual: bool = False, **options: Any
) -> Any:
    from diffusers import WanPipeline

    with tiny_parts.seeded(seed):
        text_encoder, vae = tiny_parts.t5("UMT5"), _wan_vae(is_residual)
        models = [_wan_transformer(vae.config.z_dim, heads, layers) for _ in range(experts)]
    return WanPipeline(
        tokenizer=tiny_parts.tokenizer(),
        text_encoder=text_encoder,
        vae=vae,
        **dict(zip(("transformer", "transformer_2"), models, strict=False)),
        **options,
        scheduler=scheduler,
    )


def _flow_match_euler(flow_shift: float) -> Any:
    import diffusers

    return diffusers.FlowMatchEulerDiscreteScheduler(shift=flow_shift)


def _unipc(flow_shift: float) -> Any:
    import diffusers

    return diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift
    )


def _wan_transformer(channels: int, heads: int, layers: int) -> Any:
    import torch
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=heads,
        attention_head_dim=16,
        in_channels=channels,
        out_channels=channels,
        text_dim=tiny_parts.TEXT_DIM,
        freq_dim=32,
        ffn_dim=128,
        num_layers=layers,
        rope_max_seq_len=128,
    ).eval()
    for block in model.blocks:
        # Cross-attention averages over the text; without this a prompt hardly changes the prediction.
        block.attn2.to_out[0].weight.mul_(4.0)
    inputs = {"hidden_states": torch.randn(1, channels, 2, 8, 8), "timestep": torch.tensor([500.0])}
    inputs["encoder_hidden_states"] = torch.randn(1, 16, tiny_parts.TEXT_DIM)
    return tiny_parts.scale_denoiser(model, inputs)


def _wan_vae(is_residual: bool) -> Any:
    """``AutoencoderKLWan`` as in Wan 2.1, or the residual one with a patch of 2 x 2 as in Wan 2.2 TI2V."""
    residual: dict[str, Any] = {}
    if is_residual:
        residual = {"is_residual": True, "in_channels": 12, "out_channels": 12}
        residual |= {"patch_size": 2, "scale_factor_spatial": 16}
    # Scaled by several frames: those after the first come out of other layers and are larger.
    return tiny_parts.causal_vae("AutoencoderKLWan", **residual)


def parameters(pipe: Any, names: Sequence[str] = ("text_encoder", "transformer", "transformer_2", "vae")) -> int:
    """How many numbers the components of a pipeline hold."""
    found = [getattr(pipe, name, None) for name in names]
    return sum(parameter.numel() for each in found if each is not None for parameter in each.parameters())
