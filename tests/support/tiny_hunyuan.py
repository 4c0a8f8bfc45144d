"""A tiny random HunyuanVideo model in diffusers layout; see :mod:`tiny_models` for what its weights must be like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_models

CHANNELS = 8
DEFAULTS = {
    "width": 64,
    "height": 64,
    "num_frames": 1,
    "fps": 8,
    "num_inference_steps": 4,
    "guidance_scale": 6.0,
    "max_sequence_length": 24,
}


def make_tiny_hunyuan(folder: Path, *, seed: int = 5, heads: int = 4, layers: int = 1, flow_shift: float = 7.0) -> Path:
    """Spatial compression 8, temporal compression 4, patches of 2 x 2, Llama's template as published.

    The words of the template are unknown to the tokenizer and come to 99 tokens, of which 95 are cropped.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, HunyuanVideoPipeline

    with tiny_models._seeded(seed):
        llama, clip = _llama(), _clip()
        vae, transformer = _vae(), _transformer(heads, layers)
    pipe = HunyuanVideoPipeline(
        text_encoder=llama,
        tokenizer=_llama_tokenizer(),
        text_encoder_2=clip,
        tokenizer_2=tiny_models._tokenizer(),
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=flow_shift),
    )
    return tiny_models._save(pipe, folder, DEFAULTS)


def _llama_tokenizer() -> Any:
    """Llama's adds no token at the end."""
    import tokenizers

    tokenizer = tiny_models._tokenizer()
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="$A")
    return tokenizer


def _llama() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=len(tiny_models.WORDS) + 3,
        hidden_size=tiny_models.TEXT_DIM,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    return transformers.LlamaModel(config).eval()


def _clip() -> Any:
    import transformers

    config = transformers.CLIPTextConfig(
        vocab_size=len(tiny_models.WORDS) + 3,
        hidden_size=tiny_models.TEXT_DIM,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        projection_dim=tiny_models.TEXT_DIM,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    return transformers.CLIPTextModel(config).eval()


def _transformer(heads: int, layers: int) -> Any:
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
        text_embed_dim=tiny_models.TEXT_DIM,
        pooled_projection_dim=tiny_models.TEXT_DIM,
        rope_axes_dim=(4, 6, 6),
    ).eval()
    # Else the text hardly changes the prediction.
    model.context_embedder.proj_in.weight.mul_(4.0)
    model.time_text_embed.text_embedder.linear_2.weight.mul_(2.0)
    tiny_models._scale_output(model.proj_out, lambda: model(**_inputs(), return_dict=False)[0], std=1.0)
    return model


def _inputs() -> dict[str, Any]:
    import torch

    return {
        "hidden_states": torch.randn(1, CHANNELS, 2, 8, 8),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 16, tiny_models.TEXT_DIM),
        "encoder_attention_mask": torch.ones(1, 16),
        "pooled_projections": torch.randn(1, tiny_models.TEXT_DIM),
        "guidance": torch.tensor([6000.0]),
    }


def _vae() -> Any:
    import torch
    from diffusers import AutoencoderKLHunyuanVideo

    vae = AutoencoderKLHunyuanVideo(
        latent_channels=CHANNELS,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    ).eval()
    latents = torch.randn(1, CHANNELS, 2, 8, 8)
    tiny_models._scale_output(vae.decoder.conv_out.conv, lambda: vae.decode(latents, return_dict=False)[0], std=0.8)
    return vae
