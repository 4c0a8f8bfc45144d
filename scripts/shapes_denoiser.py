"""The denoiser stage of the shapes model: the transformer, and how it is trained on encoded scenes."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import shapes_data as data
import shapes_text
import shapes_vae
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from torch.nn import functional as F

TRANSFORMER_CONFIG: dict[str, Any] = {
    "patch_size": [1, 2, 2],
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 128,
    "freq_dim": 128,
    "ffn_dim": 768,
    "num_layers": 6,
    "cross_attn_norm": True,
    "rope_max_seq_len": 256,
}
TEXT_LENGTH = 32  # what the card recommends as max_sequence_length
LONGEST_TEXT = 512  # what WanPipeline pads to unless told otherwise


class TrainingAttention:
    """Wan's attention, with a bias that lets one padding row stand for all the rows a pipeline pads a text with."""

    def __init__(self) -> None:
        self.bias: Tensor | None = None

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attention of hidden states (batch, tokens, width) to themselves or to a text (batch, words, width)."""
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        key = attn.norm_k(attn.to_k(source)).unflatten(2, (attn.heads, -1))
        value = attn.to_v(source).unflatten(2, (attn.heads, -1))
        if rotary_emb is not None:
            cos, sin = rotary_emb[0][..., 0::2], rotary_emb[1][..., 1::2]
            query, key = (_rotate(x, cos, sin) for x in (query, key))
        bias = self.bias if encoder_hidden_states is not None else None
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=bias
        )
        return attn.to_out[0](out.transpose(1, 2).flatten(2))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of (batch, tokens, heads, width), pairs lying side by side."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).type_as(x)


def new_transformer(seed: int) -> WanTransformer3DModel:
    """A fresh transformer; its velocity starts at zero, which keeps the first steps calm."""
    torch.manual_seed(seed)
    transformer = WanTransformer3DModel(**TRANSFORMER_CONFIG)
    nn.init.zeros_(transformer.proj_out.weight)
    nn.init.zeros_(transformer.proj_out.bias)
    return transformer


def padding_bias(lengths: Tensor, width: int, padded: Tensor) -> Tensor:
    """Attention bias (batch, 1, 1, width) by which the first pad of a row stands for all pads up to `padded` (batch,).

    All pads look alike to attention, so one of them weighs as much as n if its score is raised by log n.
    """
    bias = torch.zeros(len(lengths), width).masked_fill(torch.arange(width) >= lengths[:, None], -torch.inf)
    bias.scatter_(1, lengths[:, None], (padded - lengths).clamp(min=1).float().log()[:, None])
    return bias[:, None, None, :]


@dataclasses.dataclass
class DenoiserTask:
    """The denoiser's training and what it is set to."""

    folder: Path
    steps: int = 24000
    all_sizes_from: float = 0.62
    learning_rate: float = 1.5e-3
    warmup: int = 300
    decay_from: float = 0.7
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0
    ema: float = 0.998
    shift: float = 1.5
    seed: int = 2
    workers: int = 2
    compile: bool = True
    captions: shapes_text.CaptionSettings = dataclasses.field(default_factory=shapes_text.CaptionSettings)
    name: str = "denoiser"

    def build(self) -> WanTransformer3DModel:
        """A fresh transformer."""
        return new_transformer(self.seed)

    def rate(self, step: int) -> float:
        """A warm-up, a plateau, and a straight way down to zero."""
        warm = (step + 1) / self.warmup
        left = (self.steps - step) / (self.steps * (1 - self.decay_from))
        return self.learning_rate * min(warm, left, 1.0)

    def prepare(self, model: nn.Module, worker: int) -> None:
        """Set up the training attention, and read what the latents are normalised by."""
        self.processor = TrainingAttention()
        model.set_attn_processor(self.processor)
        if self.compile:
            for block in model.blocks:
                block.compile(dynamic=False)
        self.vae = shapes_vae.load_vae(self.folder)
        self.text = shapes_text.load_text(self.folder)
        mean, std = load_statistics(self.folder)
        self.mean, self.std = (value.view(1, -1, 1, 1, 1) for value in (mean, std))
        self.latents: dict[str, Tensor] = {}

    def bucket(self, step: int) -> data.Bucket:
        """The bucket of a step, the same for every worker."""
        shares = data.MOSTLY_SMALL if step < self.steps * self.all_sizes_from else data.ALL_SIZES
        name = random.Random(f"bucket-{self.seed}-{step}").choices(list(shares), list(shares.values()))[0]
        return data.BUCKETS[name]

    def batch(self, step: int, worker: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """A worker's clean latents, noise, sigmas, text embeddings and bias against padding at a step."""
        bucket = self.bucket(step)
        if bucket.name not in self.latents:
            self.latents[bucket.name] = data.load_bucket(self.vae, self.folder, bucket, self.seed, worker, self.workers)
        latents = self.latents[bucket.name]
        rng = random.Random(f"batch-{self.seed}-{step}-{worker}")
        generator = torch.Generator().manual_seed(rng.getrandbits(60))
        picks = [rng.randrange(len(latents)) for _ in range(bucket.batch)]
        first = bucket.count * worker // self.workers
        shown = [data.bucket_scene(bucket, first + pick, self.seed)[0] for pick in picks]
        captions = [shapes_text.training_caption(scene, rng, self.captions)[0] for scene in shown]
        ids, lengths = shapes_text.pad_tokens(captions)
        # Half the captions are padded as the card recommends, the others to any length up to the pipeline's default.
        padded = [TEXT_LENGTH if rng.random() < 0.5 else round(LONGEST_TEXT ** rng.uniform(0.5, 1)) for _ in picks]
        clean = (latents[picks].float() - self.mean) / self.std
        noise = torch.randn(clean.shape, generator=generator)
        even = torch.randn(bucket.batch, generator=generator).sigmoid()
        sigmas = self.shift * even / (1 + (self.shift - 1) * even)
        text = shapes_text.embed(self.text, ids, lengths)
        return clean, noise, sigmas, text, padding_bias(lengths, ids.shape[1], torch.tensor(padded))

    def loss(self, model: nn.Module, step: int, worker: int) -> tuple[Tensor, float]:
        """The squared error of the velocity."""
        clean, noise, sigmas, text, self.processor.bias = self.batch(step, worker)
        noisy = clean + sigmas.view(-1, 1, 1, 1, 1) * (noise - clean)
        with torch.compiler.set_stance("default" if self.bucket(step).compiled else "force_eager"):
            velocity = model(noisy, sigmas * 1000, text, return_dict=False)[0]
        loss = (velocity - (noise - clean)).square().mean()
        return loss, loss.item()


def load_statistics(folder: Path) -> tuple[Tensor, Tensor]:
    """Mean and deviation (16,) of the latents' channels, measured at the first call."""
    path = folder / "statistics.pt"
    if not path.exists():
        mean, std = data.latent_statistics(shapes_vae.load_vae(folder), 0)
        torch.save({"mean": mean, "std": std}, path)
    saved = torch.load(path, weights_only=True)
    return saved["mean"], saved["std"]
