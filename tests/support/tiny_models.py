"""Tiny random models in diffusers layout: one ``make_*`` function a family, each writing a complete folder.

The weights are random but not arbitrary: the prompt, the guidance scale and the seed must each move a picture by
several levels, or a parity test would pass for an implementation that ignores them. They are also smooth enough that
rounding errors of float32 stay far below one level. Everything is seeded: two calls write the same weights.
"""

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
TEXT_DIM = 32


def make_tiny_wan(folder: Path, *, seed: int = 0, heads: int = 4, layers: int = 2, flow_shift: float = 3.0) -> Path:
    """A Wan 2.1 text-to-video model: spatial compression 8, temporal compression 4, patches of 2 x 2."""
    from diffusers import WanPipeline

    with _seeded(seed):
        text_encoder, vae = _umt5_encoder(), _wan_vae()
        transformer = _wan_transformer(vae.config.z_dim, heads, layers)
    pipe = WanPipeline(
        tokenizer=_tokenizer(),
        text_encoder=text_encoder,
        vae=vae,
        transformer=transformer,
        scheduler=_flow_match_euler(flow_shift),
    )
    return _save(pipe, folder, _WAN_DEFAULTS)


def make_tiny_wan22(folder: Path, *, seed: int = 1, heads: int = 4, boundary_ratio: float = 0.875) -> Path:
    """A Wan 2.2 model with two experts: ``transformer`` for high noise, ``transformer_2`` below ``boundary_ratio``."""
    from diffusers import WanPipeline

    with _seeded(seed):
        text_encoder, vae = _umt5_encoder(), _wan_vae()
        transformer = _wan_transformer(vae.config.z_dim, heads, layers=2)
        transformer_2 = _wan_transformer(vae.config.z_dim, heads, layers=2)
    pipe = WanPipeline(
        tokenizer=_tokenizer(),
        text_encoder=text_encoder,
        vae=vae,
        transformer=transformer,
        transformer_2=transformer_2,
        boundary_ratio=boundary_ratio,
        scheduler=_unipc(flow_shift=3.0),
    )
    return _save(pipe, folder, _WAN_DEFAULTS)


def make_tiny_wan22_5b(folder: Path, *, seed: int = 2, heads: int = 4) -> Path:
    """A model like Wan 2.2 TI2V 5B: a timestep a token, and a residual VAE that compresses space by 16."""
    from diffusers import WanPipeline

    with _seeded(seed):
        text_encoder, vae = _umt5_encoder(), _wan_vae(is_residual=True)
        transformer = _wan_transformer(vae.config.z_dim, heads, layers=2)
    pipe = WanPipeline(
        tokenizer=_tokenizer(),
        text_encoder=text_encoder,
        vae=vae,
        transformer=transformer,
        expand_timesteps=True,
        scheduler=_unipc(flow_shift=5.0),
    )
    return _save(pipe, folder, _WAN_DEFAULTS | {"width": 128, "height": 128})


_WAN_DEFAULTS = {
    "width": 64,
    "height": 64,
    "num_frames": 1,
    "fps": 8,
    "num_inference_steps": 4,
    "guidance_scale": 4.0,
    "max_sequence_length": 16,
}


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random weights from ``seed``, leaving the caller's random state as it was."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(seed)
        yield


def _save(pipe: Any, folder: Path, defaults: Mapping[str, int | float]) -> Path:
    pipe.save_pretrained(folder, safe_serialization=True)
    (folder / "diffgen.json").write_text(json.dumps({"defaults": defaults}, indent=2))
    return folder


def _tokenizer() -> Any:
    """A word-level tokenizer with T5's special tokens: ``</s>`` ends every text, ``<pad>`` is 0."""
    import tokenizers
    import transformers

    special = ["<pad>", "</s>", "<unk>"]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def _umt5_encoder() -> Any:
    import transformers

    config = transformers.UMT5Config(
        vocab_size=len(WORDS) + 3,
        d_model=TEXT_DIM,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        use_cache=False,
    )
    return transformers.UMT5EncoderModel(config).eval()


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
        text_dim=TEXT_DIM,
        freq_dim=32,
        ffn_dim=128,
        num_layers=layers,
        rope_max_seq_len=128,
    ).eval()
    for block in model.blocks:
        # Cross-attention averages over the text; without this a prompt hardly changes the prediction.
        block.attn2.to_out[0].weight.mul_(4.0)
    latents = torch.randn(1, channels, 2, 8, 8)
    text = torch.randn(1, 16, TEXT_DIM)
    _scale_output(
        model.proj_out,
        lambda: model(latents, torch.tensor([500.0]), encoder_hidden_states=text, return_dict=False)[0],
        std=1.0,
    )
    return model


def _wan_vae(*, is_residual: bool = False) -> Any:
    """``AutoencoderKLWan`` as in Wan 2.1, or the residual one with a patch of 2 x 2 as in Wan 2.2 TI2V."""
    import torch
    from diffusers import AutoencoderKLWan

    channels = 8
    residual: dict[str, Any] = {}
    if is_residual:
        residual = {"is_residual": True, "in_channels": 12, "out_channels": 12}
        residual |= {"patch_size": 2, "scale_factor_spatial": 16}
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=channels,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1 * (index - channels / 2) for index in range(channels)],
        latents_std=[0.6 + 0.1 * index for index in range(channels)],
        **residual,
    ).eval()
    # The frames after the first come out of other layers and are larger.
    latents = torch.randn(1, channels, 2, 8, 8)
    _scale_output(vae.decoder.conv_out, lambda: vae.decode(latents, return_dict=False)[0], std=0.8)
    return vae


def _scale_output(layer: Any, run: Callable[[], torch.Tensor], std: float) -> None:
    """Scale a model's last layer until its output has this standard deviation; small at first, below any clamp."""
    layer.weight.mul_(0.01)
    if layer.bias is not None:
        layer.bias.zero_()
    layer.weight.mul_(std / float(run().std()))


def parameters(pipe: Any, names: Sequence[str] = ("text_encoder", "transformer", "transformer_2", "vae")) -> int:
    """How many numbers the components of a pipeline hold."""
    found = [getattr(pipe, name, None) for name in names]
    return sum(parameter.numel() for each in found if each is not None for parameter in each.parameters())
