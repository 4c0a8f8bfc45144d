"""Tiny random models of pipelines that no family of its own serves, in diffusers layout; see :mod:`tiny_models`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny_parts

TEXT = tiny_parts.TEXT_DIM
_STILL = tiny_parts.STILL
_CLIP = tiny_parts.CLIP | {"num_frames": 9}


def make_pixart(folder: Path) -> Path:
    """``PixArtSigmaPipeline``: the older kind of callback, DPM++, learned variance."""
    import diffusers

    with tiny_parts.seeded(11):
        transformer = diffusers.PixArtTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            cross_attention_dim=32,
            sample_size=32,
            caption_channels=TEXT,
            use_additional_conditions=False,
        ).eval()
        transformer.caption_projection.linear_2.weight.mul_(8.0)
        _scale(transformer, (4, 8, 8), added_cond_kwargs={"resolution": None, "aspect_ratio": None})
        pipe = diffusers.PixArtSigmaPipeline(
            tokenizer=tiny_parts.tokenizer(),
            text_encoder=_t5(),
            vae=_vae(),
            transformer=transformer,
            scheduler=diffusers.DPMSolverMultistepScheduler(),
        )
    return tiny_parts.save(pipe, folder, _STILL | {"guidance_scale": 4.0, "max_sequence_length": 16})


def make_cogvideox(folder: Path) -> Path:
    """``CogVideoXPipeline``: clips, with a VAE that compresses time by 4 and a scheduler of its own."""
    import diffusers
    import torch

    with tiny_parts.seeded(13):
        transformer = diffusers.CogVideoXTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            time_embed_dim=8,
            text_embed_dim=TEXT,
            num_layers=2,
            sample_width=8,
            sample_height=8,
            sample_frames=9,
            max_text_seq_length=16,
            use_rotary_positional_embeddings=True,
        ).eval()
        rope = diffusers.models.embeddings.get_3d_rotary_pos_embed(16, ((0, 0), (4, 4)), (4, 4), 3)
        _scale(transformer, (3, 4, 8, 8), timestep=torch.tensor([500]), image_rotary_emb=rope)
        vae = diffusers.AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
            temporal_compression_ratio=4,
        ).eval()
        tiny_parts.scale_vae(vae, (4, 3, 8, 8))
        pipe = diffusers.CogVideoXPipeline(
            tokenizer=tiny_parts.tokenizer(),
            text_encoder=_t5(),
            vae=vae,
            transformer=transformer,
            scheduler=diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True),
        )
    return tiny_parts.save(pipe, folder, _CLIP | {"guidance_scale": 4.0, "max_sequence_length": 16})


def make_ltx(folder: Path) -> Path:
    """``LTXPipeline``: clips; packed latents, and a frame rate that the denoiser reads."""
    import diffusers
    import torch

    with tiny_parts.seeded(14):
        transformer = diffusers.LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            patch_size=1,
            patch_size_t=1,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=32,
            num_layers=2,
            caption_channels=TEXT,
        ).eval()
        transformer.caption_projection.linear_2.weight.mul_(4.0)
        _scale(transformer, (32, 8), encoder_attention_mask=torch.ones(1, 16), num_frames=2, height=4, width=4)
        vae = diffusers.AutoencoderKLLTXVideo(
            in_channels=3,
            out_channels=3,
            latent_channels=8,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
            spatio_temporal_scaling=(True, True, False, False),
            decoder_spatio_temporal_scaling=(True, True, False, False),
            decoder_inject_noise=(False, False, False, False, False),
            upsample_residual=(False, False, False, False),
            upsample_factor=(1, 1, 1, 1),
            timestep_conditioning=False,
            patch_size=1,
            patch_size_t=1,
            encoder_causal=True,
            decoder_causal=False,
        ).eval()
        tiny_parts.scale_vae(vae, (8, 3, 16, 16))
        pipe = diffusers.LTXPipeline(
            tokenizer=tiny_parts.tokenizer(),
            text_encoder=_t5(),
            vae=vae,
            transformer=transformer,
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        )
    return tiny_parts.save(pipe, folder, _CLIP | {"guidance_scale": 3.0, "max_sequence_length": 16})


def make_kandinsky(folder: Path) -> Path:
    """``KandinskyV22CombinedPipeline``: a prior from text to an image embedding, and a UNet that draws it."""
    import diffusers
    import torch
    import transformers

    with tiny_parts.seeded(16):
        prior = diffusers.PriorTransformer(
            num_attention_heads=2,
            attention_head_dim=12,
            embedding_dim=TEXT,
            num_layers=1,
            num_embeddings=77,
            additional_embeddings=4,
        ).eval()
        prior.clip_std.data.fill_(1.0)
        unet = diffusers.UNet2DConditionModel(
            in_channels=4,
            out_channels=8,
            addition_embed_type="image",
            down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
            up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
            mid_block_type="UNetMidBlock2DSimpleCrossAttn",
            block_out_channels=(16, 32),
            layers_per_block=1,
            encoder_hid_dim=TEXT,
            encoder_hid_dim_type="image_proj",
            cross_attention_dim=16,
            attention_head_dim=4,
            resnet_time_scale_shift="scale_shift",
            norm_num_groups=8,
            class_embed_type=None,
        ).eval()
        movq = diffusers.VQModel(
            block_out_channels=(32, 32, 32, 32),
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 3 + ["AttnUpDecoderBlock2D"],
            in_channels=3,
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=4,
            norm_type="spatial",
            num_vq_embeddings=12,
            out_channels=3,
            vq_embed_dim=4,
        ).eval()
        latents = torch.randn(1, 4, 8, 8)
        tiny_parts.scale_output(
            movq.decoder.conv_out, lambda: movq.decode(latents, force_not_quantize=True)["sample"], 0.8
        )
        image = transformers.CLIPVisionConfig(
            hidden_size=TEXT,
            image_size=32,
            intermediate_size=37,
            num_attention_heads=4,
            num_hidden_layers=1,
            patch_size=16,
            projection_dim=TEXT,
        )
        processor = transformers.CLIPImageProcessor(size=32, crop_size=32)
        pipe = diffusers.KandinskyV22CombinedPipeline(
            unet=unet,
            scheduler=diffusers.DDPMScheduler(
                beta_schedule="linear", beta_start=0.00085, beta_end=0.012, variance_type="learned_range"
            ),
            movq=movq,
            prior_prior=prior,
            prior_image_encoder=transformers.CLIPVisionModelWithProjection(image).eval(),
            prior_text_encoder=_clip(),
            prior_tokenizer=_clip_tokenizer(),
            prior_scheduler=diffusers.UnCLIPScheduler(
                variance_type="fixed_small_log", prediction_type="sample", clip_sample_range=10.0
            ),
            prior_image_processor=processor,
        )
    return tiny_parts.save(pipe, folder, _STILL | {"guidance_scale": 4.0})


def _scale(transformer: Any, shape: Sequence[int], **inputs: Any) -> None:
    import torch

    if "encoder_hidden_states" not in inputs:
        inputs["encoder_hidden_states"] = torch.randn(1, 16, TEXT)
    inputs = {"timestep": torch.tensor([500.0]), "hidden_states": torch.randn(1, *shape)} | inputs
    tiny_parts.scale_denoiser(transformer, inputs, std=0.8)


def _t5() -> Any:
    return tiny_parts.t5(feed_forward_proj="relu")


def _clip_tokenizer() -> Any:
    """T5's special tokens, CLIP's length."""
    return tiny_parts.tokenizer(length=77)


def _clip() -> Any:
    return tiny_parts.clip("CLIPTextModelWithProjection", num_hidden_layers=3)


def _vae() -> Any:
    return tiny_parts.image_vae(block_out_channels=(8, 8, 8, 8))
