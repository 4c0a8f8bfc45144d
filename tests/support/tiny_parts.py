"""Components that the tiny random models of several families have; see :mod:`tiny_models` for what weights must be."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Words that the tokenizer of every tiny model knows; all others are one unknown token.
WORDS = (
    *["a", "an", "the", "of", "on", "in", "with", "and", "no", "not", "very", "two", "three", "four"],
    *["red", "green", "blue", "yellow", "white", "black", "purple", "orange", "grey", "dark", "bright"],
    *["circle", "square", "triangle", "star", "cat", "dog", "house", "tree", "sofa", "sky", "sea", "background"],
    *["moving", "left", "right", "up", "down", "fast", "slow", "small", "large", "blurry", "sharp"],
    *["photo", "painting", "drawing", ",", ".", "!"],
)
VOCABULARY = 3 + len(WORDS)  # with the special tokens
TEXT_DIM = 32
STILL = {"width": 64, "height": 64, "num_inference_steps": 4}
CLIP = {"width": 64, "height": 64, "num_frames": 1, "fps": 8, "num_inference_steps": 4}


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random weights from ``seed``, leaving the caller's random state as it was."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(seed)
        yield


def save(pipe: Any, folder: Path, defaults: Mapping[str, int | float]) -> Path:
    pipe.save_pretrained(folder, safe_serialization=True)
    (folder / "diffgen.json").write_text(json.dumps({"defaults": defaults}, indent=2))
    return folder


def scale_output(layer: Any, run: Callable[[], torch.Tensor], std: float) -> None:
    """Scale a model's last layer until its output has this standard deviation; small at first, below any clamp."""
    layer.weight.mul_(0.01)
    if layer.bias is not None:
        layer.bias.zero_()
    layer.weight.mul_(std / float(run().std()))


def scale_denoiser(model: Any, inputs: Mapping[str, Any], std: float = 1.0) -> Any:
    """The denoiser itself, with predictions of this standard deviation."""
    layer = model.conv_out if hasattr(model, "conv_out") else model.proj_out
    scale_output(layer, lambda: model(**inputs, return_dict=False)[0], std)
    return model


def scale_vae(vae: Any, shape: Sequence[int], std: float = 0.8, spread: float = 1.0) -> Any:
    """The VAE itself, with pixels of this standard deviation for latents of one output's ``shape`` and ``spread``."""
    import torch

    latents = spread * torch.randn(1, *shape)
    layer = vae.decoder.conv_out
    scale_output(getattr(layer, "conv", layer), lambda: vae.decode(latents, return_dict=False)[0], std)
    return vae


def tokenizer(
    special: Sequence[str] = ("<pad>", "</s>", "<unk>"), template: str = "$A </s>", length: int = 512, **tokens: str
) -> Any:
    """A word-level tokenizer; by itself with T5's special tokens: ``</s>`` ends every text, ``<pad>`` is 0."""
    import tokenizers
    import transformers

    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.normalizer = tokenizers.normalizers.Lowercase()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    around = [(token, vocabulary[token]) for token in special if token in template.split()]
    backend.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=around)
    tokens = tokens or {"pad_token": "<pad>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, **tokens, unk_token="<unk>", model_max_length=length
    )


def t5(kind: str = "T5", **settings: Any) -> Any:
    """An encoder of ``kind`` T5 or UMT5."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": TEXT_DIM, "d_kv": 8, "d_ff": 64}
    sizes |= {"num_layers": 2, "num_heads": 4}
    sizes |= {"feed_forward_proj": "gated-gelu", "dropout_rate": 0.0, "use_cache": False} | settings
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return getattr(transformers, f"{kind}EncoderModel")(config).eval()


def clip(kind: str = "CLIPTextModel", **settings: Any) -> Any:
    """By itself with the special tokens of :func:`tokenizer`."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": TEXT_DIM, "projection_dim": TEXT_DIM}
    sizes |= {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 77}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1} | settings
    return getattr(transformers, kind)(transformers.CLIPTextConfig(**sizes)).eval()


def language_model(kind: str, **settings: Any) -> Any:
    """A decoder-only model that reads the text, as ``kind`` Llama or Gemma2."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": TEXT_DIM, "intermediate_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1} | settings
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return getattr(transformers, f"{kind}Model")(config).eval()


def image_vae(channels: int = 4, std: float = 0.8, spread: float = 1.0, **settings: Any) -> Any:
    """``AutoencoderKL``, which compresses space by 8."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=4,
        latent_channels=channels,
        **{"block_out_channels": (8, 8, 16, 16)} | settings,
    ).eval()
    return scale_vae(vae, (channels, 8, 8), std, spread)


def causal_vae(kind: str, std: float = 0.8, frames: int = 2, **settings: Any) -> Any:
    """Wan's or Qwen-Image's: space by 8, time by 4, 8 channels."""
    import diffusers

    channels = 8
    vae = getattr(diffusers, kind)(
        base_dim=8,
        z_dim=channels,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1 * (index - channels / 2) for index in range(channels)],
        latents_std=[0.6 + 0.1 * index for index in range(channels)],
        **settings,
    ).eval()
    return scale_vae(vae, (channels, frames, 8, 8), std)
