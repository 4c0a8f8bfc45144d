"""Tiny random FLUX.1 models in diffusers layout; see :mod:`tiny_models` for what their weights must be like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_models

CHANNELS = 4  # of the VAE's latents; the transformer sees 2 x 2 of them a token
POOLED_DIM = 32
DEFAULTS = {
    "width": 64,
    "height": 64,
    "num_inference_steps": 4,
    "guidance_scale": 3.5,
    "max_sequence_length": 16,
}


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

    with tiny_models._seeded(seed):
        clip, t5, vae = _clip(), _t5(), _vae()
        transformer = _transformer(heads, layers, guidance_embeds)
    # A short base length, so that the small pictures of tests differ in their shift.
    dynamic = {"use_dynamic_shifting": True, "base_image_seq_len": 4, "max_image_seq_len": 64, "shift": 3.0}
    pipe = FluxPipeline(
        scheduler=scheduler or FlowMatchEulerDiscreteScheduler(**(dynamic if guidance_embeds else {"shift": 1.0})),
        vae=vae,
        text_encoder=clip,
        tokenizer=_clip_tokenizer(),
        text_encoder_2=t5,
        tokenizer_2=tiny_models._tokenizer(),
        transformer=transformer,
    )
    defaults = DEFAULTS if guidance_embeds else {name: DEFAULTS[name] for name in DEFAULTS if name != "guidance_scale"}
    return tiny_models._save(pipe, folder, defaults)


_CLIP_SPECIAL = ("<|startoftext|>", "<|endoftext|>", "<unk>")


def _clip_tokenizer() -> Any:
    """Word-level, with CLIP's tokens around a text and its length of 77."""
    import tokenizers
    import transformers

    vocabulary = {word: index for index, word in enumerate([*_CLIP_SPECIAL, *tiny_models.WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    start, end = _CLIP_SPECIAL[:2]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=[(start, 0), (end, 1)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=start,
        eos_token=end,
        pad_token=end,
        unk_token="<unk>",
        model_max_length=77,
    )


def _clip() -> Any:
    import transformers

    config = transformers.CLIPTextConfig(
        vocab_size=len(tiny_models.WORDS) + len(_CLIP_SPECIAL),
        hidden_size=POOLED_DIM,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return transformers.CLIPTextModel(config).eval()


def _t5() -> Any:
    import transformers

    config = transformers.T5Config(
        vocab_size=len(tiny_models.WORDS) + 3,
        d_model=tiny_models.TEXT_DIM,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        use_cache=False,
    )
    return transformers.T5EncoderModel(config).eval()


def _vae() -> Any:
    import torch
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[8, 8, 16, 16],
        layers_per_block=1,
        latent_channels=CHANNELS,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=0.5,
        shift_factor=0.1,
    ).eval()
    latents = torch.randn(1, CHANNELS, 8, 8)
    tiny_models._scale_output(vae.decoder.conv_out, lambda: vae.decode(latents, return_dict=False)[0], std=0.8)
    return vae


def _transformer(heads: int, layers: int, guidance_embeds: bool) -> Any:
    import torch
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4 * CHANNELS,
        num_layers=layers,
        num_single_layers=layers,
        attention_head_dim=16,
        num_attention_heads=heads,
        joint_attention_dim=tiny_models.TEXT_DIM,
        pooled_projection_dim=POOLED_DIM,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    ).eval()
    inputs = {
        "hidden_states": torch.randn(1, 16, 4 * CHANNELS),
        "encoder_hidden_states": torch.randn(1, 16, tiny_models.TEXT_DIM),
        "pooled_projections": torch.randn(1, POOLED_DIM),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(16, 3),
        "guidance": torch.tensor([3.5]) if guidance_embeds else None,
    }
    tiny_models._scale_output(model.proj_out, lambda: model(**inputs, return_dict=False)[0], std=1.0)
    return model
