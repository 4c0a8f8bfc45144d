"""Tiny random Stable Diffusion models in diffusers layout; see :mod:`tiny_models` for what the weights must be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_parts

CHANNELS = 4
TEXT_LAYERS = 3
DEFAULTS = tiny_parts.STILL | {"guidance_scale": 4.0}
# As published with SD 1.x, 2.x and SDXL; what a class has no use for waits in its folder for one that has.
_BETAS: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
_BETAS |= {"clip_sample": False, "set_alpha_to_one": False, "skip_prk_steps": True}


def make_tiny_sd(folder: Path, *, seed: int = 20) -> Path:
    """Like SD 1.5: noise prediction, PNDM; without a safety checker."""
    return tiny_parts.save(_sd(seed), folder, DEFAULTS)


def make_tiny_sd_checked(folder: Path, *, seed: int = 20) -> Path:
    """:func:`make_tiny_sd` with a safety checker that flags about half of its pictures."""
    import torch

    pipe = _sd(seed)
    with tiny_parts.seeded(seed + 100):
        checker, extractor = _safety_checker()
        pipe.set_progress_bar_config(disable=True)
        generators = [torch.Generator("cpu").manual_seed(index) for index in range(6)]
        pictures = pipe("", num_inference_steps=2, height=64, width=64, num_images_per_prompt=6, generator=generators)
        inputs = extractor(pictures.images, return_tensors="pt").pixel_values
        embeds = checker.visual_projection(checker.vision_model(inputs)[1])
        likeness = torch.nn.functional.cosine_similarity(embeds, checker.concept_embeds[:1])
        checker.concept_embeds_weights.fill_(2.0)  # more alike than equal: never flagged
        checker.concept_embeds_weights[0] = likeness.median() - 0.002
        checker.special_care_embeds_weights.fill_(2.0)
    pipe.register_modules(safety_checker=checker, feature_extractor=extractor)
    return tiny_parts.save(pipe, folder, DEFAULTS)


def make_tiny_sd_v(folder: Path, *, seed: int = 21) -> Path:
    """Like SD 2.1: velocity prediction, DDIM, heads given per block, linear projections."""
    from diffusers import DDIMScheduler

    scheduler = DDIMScheduler.from_config({**_BETAS, "prediction_type": "v_prediction"})
    unet = {"attention_head_dim": (2, 4), "use_linear_projection": True}
    return tiny_parts.save(_sd(seed, scheduler, **unet), folder, DEFAULTS)


def make_tiny_sdxl(folder: Path, *, seed: int = 22) -> Path:
    """Like SDXL base: two encoders, pooled text and sizes, Euler; an empty negative prompt is zeros."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

    with tiny_parts.seeded(seed):
        encoders = _clip("CLIPTextModel"), _clip("CLIPTextModelWithProjection")
        vae = _vae()
        sizes = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8}
        unet = _unet(
            cross_attention_dim=2 * tiny_parts.TEXT_DIM,
            projection_class_embeddings_input_dim=6 * 8 + tiny_parts.TEXT_DIM,
            transformer_layers_per_block=(1, 2),
            use_linear_projection=True,
            **sizes,
        )
    pipe = StableDiffusionXLPipeline(
        vae=vae,
        text_encoder=encoders[0],
        text_encoder_2=encoders[1],
        tokenizer=_tokenizer(),
        tokenizer_2=_tokenizer(pad_token="!"),
        unet=unet,
        scheduler=EulerDiscreteScheduler.from_config({**_BETAS, "timestep_spacing": "leading"}),
    )
    return tiny_parts.save(pipe, folder, DEFAULTS)


def _sd(seed: int, scheduler: Any = None, **unet_options: Any) -> Any:
    from diffusers import PNDMScheduler, StableDiffusionPipeline

    with tiny_parts.seeded(seed):
        text_encoder, vae, unet = _clip("CLIPTextModel"), _vae(), _unet(**unet_options)
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=_tokenizer(),
        unet=unet,
        scheduler=scheduler or PNDMScheduler.from_config(_BETAS),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _tokenizer(pad_token: str = "<|endoftext|>") -> Any:
    """CLIP's own class, without merges: a token a character, so that texts over 77 tokens are short enough to read."""
    import transformers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters = list(bytes_to_unicode().values())
    special = ["<|startoftext|>", "<|endoftext|>"]
    pieces = [*characters, *(f"{each}</w>" for each in characters), *special]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], pad_token=pad_token, model_max_length=77)


def _clip(kind: str) -> Any:
    special = {"bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
    model = tiny_parts.clip(kind, vocab_size=514, num_hidden_layers=TEXT_LAYERS, **special)
    # Published encoders tell texts apart far better than freshly drawn weights do.
    text = getattr(model, "text_model", model)
    text.embeddings.token_embedding.weight.mul_(20.0)
    for layer in text.encoder.layers:
        layer.self_attn.v_proj.weight.mul_(10.0)
        layer.self_attn.out_proj.weight.mul_(10.0)
    return model


def _unet(**options: Any) -> Any:
    import torch
    from diffusers import UNet2DConditionModel

    settings = {"attention_head_dim": 4, "cross_attention_dim": tiny_parts.TEXT_DIM, **options}
    model = UNet2DConditionModel(
        sample_size=8,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        **settings,
    ).eval()
    for name, module in model.named_modules():
        if name.endswith("attn2"):
            module.to_out[0].weight.mul_(4.0)  # it averages over the text, which would hardly change the prediction
    added = {"text_embeds": torch.randn(1, tiny_parts.TEXT_DIM), "time_ids": torch.tensor([[64.0, 64.0, 0, 0, 64, 64]])}
    inputs = {
        "sample": torch.randn(1, CHANNELS, 8, 8),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 77, settings["cross_attention_dim"]),
        "added_cond_kwargs": added if "addition_embed_type" in options else None,
    }
    return tiny_parts.scale_denoiser(model, inputs)


def _vae() -> Any:
    return tiny_parts.image_vae(CHANNELS, std=0.6, spread=5.0)


def _safety_checker() -> tuple[Any, Any]:
    import torch
    import transformers
    from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker

    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        vision_config={**vision, "image_size": 32, "patch_size": 8, "projection_dim": 16}, projection_dim=16
    )
    checker = StableDiffusionSafetyChecker(config).eval()
    checker.visual_projection.weight.copy_(torch.randn_like(checker.visual_projection.weight))
    checker.concept_embeds.copy_(torch.randn_like(checker.concept_embeds))
    checker.special_care_embeds.copy_(torch.randn_like(checker.special_care_embeds))
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    return checker, transformers.CLIPImageProcessor(**size)
