"""Tiny random models of pipelines that no family of its own serves, in diffusers layout; see :mod:`tiny_models`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_models

WORDS = len(tiny_models.WORDS) + 3
TEXT = tiny_models.TEXT_DIM
_STILL = {"width": 64, "height": 64, "num_inference_steps": 4}
_CLIP = _STILL | {"fps": 8}


def make_pixart(folder: Path) -> Path:
    """``PixArtSigmaPipeline``: the older kind of callback, DPM++, learned variance."""
    import diffusers
    import torch

    with tiny_models._seeded(11):
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
        inputs = {"encoder_hidden_states": torch.randn(1, 16, TEXT), "timestep": torch.tensor([500.0])}
        inputs["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}
        _scale(transformer.proj_out, lambda: transformer(torch.randn(1, 4, 8, 8), **inputs, return_dict=False)[0])
        pipe = diffusers.PixArtSigmaPipeline(
            tokenizer=tiny_models._tokenizer(),
            text_encoder=_t5(),
            vae=_vae(),
            transformer=transformer,
            scheduler=diffusers.DPMSolverMultistepScheduler(),
        )
    return tiny_models._save(pipe, folder, _STILL | {"guidance_scale": 4.0, "max_sequence_length": 16})


def make_sana(folder: Path) -> Path:
    """``SanaPipeline``: a language model reads the text, a VAE that compresses space by 8."""
    import diffusers
    import torch
    import transformers

    with tiny_models._seeded(12):
        transformer = diffusers.SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=TEXT,
            sample_size=32,
        ).eval()
        inputs = {"encoder_hidden_states": torch.randn(1, 16, TEXT), "timestep": torch.tensor([500.0])}
        _scale(transformer.proj_out, lambda: transformer(torch.randn(1, 4, 8, 8), **inputs, return_dict=False)[0])
        vae = diffusers.AutoencoderDC(
            in_channels=3,
            latent_channels=4,
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
        _scale(vae.decoder.conv_out, lambda: vae.decode(torch.randn(1, 4, 8, 8), return_dict=False)[0])
        config = transformers.Gemma2Config(
            vocab_size=WORDS,
            hidden_size=TEXT,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
        )
        pipe = diffusers.SanaPipeline(
            tokenizer=tiny_models._tokenizer(),
            text_encoder=transformers.Gemma2Model(config).eval(),
            vae=vae,
            transformer=transformer,
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        )
    return tiny_models._save(pipe, folder, _STILL | {"guidance_scale": 4.0, "max_sequence_length": 16})


def make_cogvideox(folder: Path) -> Path:
    """``CogVideoXPipeline``: clips, with a VAE that compresses time by 4 and a scheduler of its own."""
    import diffusers
    import torch

    with tiny_models._seeded(13):
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
        inputs: dict[str, Any] = {"encoder_hidden_states": torch.randn(1, 16, TEXT), "timestep": torch.tensor([500])}
        rope = diffusers.models.embeddings.get_3d_rotary_pos_embed(16, ((0, 0), (4, 4)), (4, 4), 3)
        inputs["image_rotary_emb"] = rope
        _scale(transformer.proj_out, lambda: transformer(torch.randn(1, 3, 4, 8, 8), **inputs, return_dict=False)[0])
        vae = diffusers.AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
            temporal_compression_ratio=4,
        ).eval()
        _scale(vae.decoder.conv_out.conv, lambda: vae.decode(torch.randn(1, 4, 3, 8, 8), return_dict=False)[0])
        pipe = diffusers.CogVideoXPipeline(
            tokenizer=tiny_models._tokenizer(),
            text_encoder=_t5(),
            vae=vae,
            transformer=transformer,
            scheduler=diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True),
        )
    return tiny_models._save(pipe, folder, _CLIP | {"num_frames": 9, "guidance_scale": 4.0, "max_sequence_length": 16})


def make_ltx(folder: Path) -> Path:
    """``LTXPipeline``: clips; packed latents, and a frame rate that the denoiser reads."""
    import diffusers
    import torch

    with tiny_models._seeded(14):
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
        inputs: dict[str, Any] = {"encoder_hidden_states": torch.randn(1, 16, TEXT), "timestep": torch.tensor([500.0])}
        inputs |= {"encoder_attention_mask": torch.ones(1, 16), "num_frames": 2, "height": 4, "width": 4}
        _scale(transformer.proj_out, lambda: transformer(torch.randn(1, 32, 8), **inputs, return_dict=False)[0])
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
        _scale(vae.decoder.conv_out.conv, lambda: vae.decode(torch.randn(1, 8, 3, 16, 16), return_dict=False)[0])
        pipe = diffusers.LTXPipeline(
            tokenizer=tiny_models._tokenizer(),
            text_encoder=_t5(),
            vae=vae,
            transformer=transformer,
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        )
    return tiny_models._save(pipe, folder, _CLIP | {"num_frames": 9, "guidance_scale": 3.0, "max_sequence_length": 16})


def make_sd3(folder: Path) -> Path:
    """``StableDiffusion3Pipeline``: two CLIP encoders with projections, and T5."""
    import diffusers
    import torch

    with tiny_models._seeded(15):
        transformer = diffusers.SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            caption_projection_dim=32,
            joint_attention_dim=2 * TEXT,
            pooled_projection_dim=2 * TEXT,
            pos_embed_max_size=16,
        ).eval()
        transformer.context_embedder.weight.mul_(4.0)
        inputs = {"encoder_hidden_states": torch.randn(1, 93, 2 * TEXT), "pooled_projections": torch.randn(1, 2 * TEXT)}
        inputs["timestep"] = torch.tensor([500.0])
        _scale(transformer.proj_out, lambda: transformer(torch.randn(1, 4, 8, 8), **inputs, return_dict=False)[0])
        pipe = diffusers.StableDiffusion3Pipeline(
            tokenizer=_clip_tokenizer(),
            tokenizer_2=_clip_tokenizer(),
            tokenizer_3=tiny_models._tokenizer(),
            text_encoder=_clip(),
            text_encoder_2=_clip(),
            text_encoder_3=_t5(2 * TEXT),
            vae=_vae(shift_factor=0.06),
            transformer=transformer,
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        )
    return tiny_models._save(pipe, folder, _STILL | {"guidance_scale": 5.0, "max_sequence_length": 16})


def make_kandinsky(folder: Path) -> Path:
    """``KandinskyV22CombinedPipeline``: a prior from text to an image embedding, and a UNet that draws it."""
    import diffusers
    import torch
    import transformers

    with tiny_models._seeded(16):
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
        _scale(movq.decoder.conv_out, lambda: movq.decode(latents, force_not_quantize=True)["sample"])
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
    return tiny_models._save(pipe, folder, _STILL | {"guidance_scale": 4.0})


def _scale(layer: Any, run: Any) -> None:
    tiny_models._scale_output(layer, run, std=0.8)


def _t5(width: int = TEXT) -> Any:
    import transformers

    config = transformers.T5Config(
        vocab_size=WORDS, d_model=width, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0, use_cache=False
    )
    return transformers.T5EncoderModel(config).eval()


def _clip_tokenizer() -> Any:
    """CLIP's length."""
    tokenizer = tiny_models._tokenizer()
    tokenizer.model_max_length = 77
    return tokenizer


def _clip() -> Any:
    import transformers

    config = transformers.CLIPTextConfig(
        vocab_size=WORDS,
        hidden_size=TEXT,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=77,
        projection_dim=TEXT,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    return transformers.CLIPTextModelWithProjection(config).eval()


def _vae(**config: Any) -> Any:
    """Compresses space by 8."""
    import diffusers
    import torch

    vae = diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[8, 8, 8, 8],
        norm_num_groups=4,
        latent_channels=4,
        **config,
    ).eval()
    _scale(vae.decoder.conv_out, lambda: vae.decode(torch.randn(1, 4, 8, 8), return_dict=False)[0])
    return vae
