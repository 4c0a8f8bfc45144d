"""A tiny random Qwen-Image model in diffusers layout; see :mod:`tiny_models` for what its weights must be like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny_parts

CHANNELS = 8  # of the VAE's latents; the transformer sees 2 x 2 of them a token
DEFAULTS = tiny_parts.STILL | {"true_cfg_scale": 4.0, "max_sequence_length": 32}


def make_tiny_qwen_image(folder: Path, *, seed: int = 20, heads: int = 4, layers: int = 2) -> Path:
    """Spatial compression 8, a shift that grows with the picture and ends at 0.02, as published.

    The tokenizer has a token for each word of the template, so that its beginning has the 34 tokens that are left out.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline

    with tiny_parts.seeded(seed):
        tokenizer = _tokenizer()
        text_encoder = _text_encoder(len(tokenizer))
        vae = tiny_parts.causal_vae("AutoencoderKLQwenImage", std=0.5, frames=1)
        transformer = _transformer(heads, layers)
    # A short base length, so that the small pictures of tests differ in their shift.
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_image_seq_len=4,
        max_image_seq_len=64,
        max_shift=0.9,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )
    pipe = QwenImagePipeline(
        scheduler=scheduler, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, transformer=transformer
    )
    return tiny_parts.save(pipe, folder, DEFAULTS)


_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "system Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships "
    "of the objects and background: user assistant"
)


def _tokenizer() -> Any:
    """Byte-level BPE as Qwen's, with merges for whole words: those of the template, and those of all tiny models."""
    import tokenizers
    import transformers

    qwen = transformers.Qwen2Tokenizer()
    words = f"{_TEMPLATE} {' '.join(tiny_parts.WORDS)}".replace(",", " ,").replace(":", " :").split()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    # With and without the space that a word within a text begins with.
    qwen.backend_tokenizer.train_from_iterator([*words, *(f" {word}" for word in words)], trainer)
    model = json.loads(qwen.backend_tokenizer.to_str())["model"]
    return transformers.Qwen2Tokenizer(
        vocab=model["vocab"] | {"<|endoftext|>": len(model["vocab"])},
        merges=[tuple(pair) for pair in model["merges"]],
        additional_special_tokens=list(_SPECIAL[1:]),
    )


def _text_encoder(vocab_size: int) -> Any:
    """Qwen2.5-VL; the pictures' half of it is not used."""
    import transformers

    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": vocab_size,
            "hidden_size": tiny_parts.TEXT_DIM,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "initializer_range": 0.3,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1000000.0},
            "use_cache": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": tiny_parts.TEXT_DIM,
            "fullatt_block_indexes": [0],
        },
        # Beyond the vocabulary: no text has a picture's token.
        image_token_id=vocab_size + 1,
        video_token_id=vocab_size + 2,
        vision_start_token_id=vocab_size + 3,
        vision_end_token_id=vocab_size + 4,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config).eval()


def _transformer(heads: int, layers: int) -> Any:
    import torch
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        in_channels=4 * CHANNELS,
        out_channels=CHANNELS,
        num_layers=layers,
        attention_head_dim=16,
        num_attention_heads=heads,
        joint_attention_dim=tiny_parts.TEXT_DIM,
        axes_dims_rope=(4, 6, 6),
    ).eval()
    inputs = {
        "hidden_states": torch.randn(1, 16, 4 * CHANNELS),
        "encoder_hidden_states": torch.randn(1, 16, tiny_parts.TEXT_DIM),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 4, 4)]],
    }
    return tiny_parts.scale_denoiser(model, inputs)
