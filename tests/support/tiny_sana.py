"""A tiny random Sana model in diffusers layout; see :mod:`tiny_models` for what its weights must be like."""

from __future__ import annotations

from pathlib import Path

import tiny_parts

CHANNELS = 4


def make_tiny_sana(folder: Path, *, seed: int = 12) -> Path:
    """A VAE that compresses space by 8, and not 32; a tokenizer that begins a text as Gemma's does."""
    import diffusers
    import torch

    with tiny_parts.seeded(seed):
        transformer = diffusers.SanaTransformer2DModel(
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=tiny_parts.TEXT_DIM,
            sample_size=32,
        ).eval()
        inputs = {"hidden_states": torch.randn(1, CHANNELS, 8, 8), "timestep": torch.tensor([500.0])}
        inputs["encoder_hidden_states"] = torch.randn(1, 16, tiny_parts.TEXT_DIM)
        tiny_parts.scale_denoiser(transformer, inputs, std=0.8)
        vae = diffusers.AutoencoderDC(
            in_channels=3,
            latent_channels=CHANNELS,
            attention_head_dim=4,
            encoder_block_types=("ResBlock",) * 4,
            decoder_block_types=("ResBlock",) * 4,
            encoder_block_out_channels=(8, 8, 16, 16),
            decoder_block_out_channels=(8, 8, 16, 16),
            encoder_layers_per_block=(1,) * 4,
            decoder_layers_per_block=(1,) * 4,
            encoder_qkv_multiscales=((),) * 4,
            decoder_qkv_multiscales=((),) * 4,
            scaling_factor=0.41,
        ).eval()
        tiny_parts.scale_vae(vae, (CHANNELS, 8, 8))
        text_encoder = tiny_parts.language_model("Gemma2", num_hidden_layers=2, head_dim=8)
    pipe = diffusers.SanaPipeline(
        tokenizer=tiny_parts.tokenizer(("<pad>", "<bos>", "<unk>"), "<bos> $A", pad_token="<pad>", bos_token="<bos>"),
        text_encoder=text_encoder,
        vae=vae,
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    return tiny_parts.save(pipe, folder, tiny_parts.STILL | {"guidance_scale": 4.0, "max_sequence_length": 16})
