"""The denoiser stage of the shapes model: the transformer, and how it is trained on drawn scenes.

Beside the velocity, the tokens of a middle block must tell, by one linear layer, where each thing is, how large, of
what shape and whither it goes. The layer is thrown away afterwards; it leads the first blocks to find the things in the
noise, as aligning them with another network's features does (Yu et al. 2025, "Representation Alignment
for Generation").
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import shapes_data as data
import shapes_parallel
import shapes_scene as scenes
import shapes_text
import shapes_vae
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from torch.nn import functional as F

TRANSFORMER_CONFIG: dict[str, Any] = {
    "patch_size": [1, 2, 2],
    "num_attention_heads": 3,
    "attention_head_dim": 64,
    "in_channels": shapes_vae.CHANNELS,
    "out_channels": shapes_vae.CHANNELS,
    "text_dim": 128,
    "freq_dim": 128,
    "ffn_dim": 512,
    "num_layers": 6,
    "cross_attn_norm": True,
    "rope_max_seq_len": 256,
}
TEXT_LENGTH = 32  # what the card recommends as max_sequence_length
LONGEST_TEXT = 512  # what WanPipeline pads to unless told otherwise
ASKED_BLOCK = 2
FINISH_SHARE = 0.75
ANSWERS = 7 + len(scenes.SHAPES)


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


class Student(nn.Module):
    """The transformer, and the layer that asks a middle block's tokens about the things.

    The velocity starts at zero, which keeps the first steps calm.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.transformer = WanTransformer3DModel(**TRANSFORMER_CONFIG)
        nn.init.zeros_(self.transformer.proj_out.weight)
        nn.init.zeros_(self.transformer.proj_out.bias)
        width = TRANSFORMER_CONFIG["num_attention_heads"] * TRANSFORMER_CONFIG["attention_head_dim"]
        self.asked = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * ANSWERS))
        self.transformer.blocks[ASKED_BLOCK].register_forward_hook(self._keep)

    def _keep(self, block: nn.Module, inputs: Any, hidden: Tensor) -> None:
        self.hidden = hidden

    def forward(self, noisy: Tensor, timesteps: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity, as `noisy` (batch, 15, frames, height, width), and answers (batch, tokens, 2 things, ANSWERS)."""
        velocity = self.transformer(noisy, timesteps, text, return_dict=False)[0]
        return velocity, self.asked(self.hidden).unflatten(-1, (2, ANSWERS))


def right_answers(places: Tensor, shapes: Tensor, side: int) -> Tensor:
    """What `side` x `side` tokens a latent frame are to say: (batch, tokens, 2 things, ANSWERS), zero for no thing.

    Of each thing: that it is there; where it lies from the token and how near, in its diameters; its radius; its
    motion; its shape. Arguments as in `shapes_data.Drawn`.
    """
    grid = (torch.arange(side) + 0.5) / side
    x, y, radius, *motion = places[:, :, None, None].unbind(-1)
    dx = (x - grid[None, None, None, :, None]) / (2 * radius + 1e-6)
    dy = (y - grid[None, None, :, None, None]) / (2 * radius + 1e-6)
    dx, dy = torch.broadcast_tensors(dx, dy)
    near = (-2 * (dx.square() + dy.square())).exp()
    told = [torch.ones_like(dx), dx.tanh(), dy.tanh(), near]
    told += [value.expand_as(dx) for value in (radius / 0.2, motion[0] / 0.03, motion[1] / 0.03)]
    kinds = F.one_hot(shapes.clamp(min=0), len(scenes.SHAPES))[:, None, None, None].expand(*dx.shape, -1)
    there = (shapes >= 0)[:, None, None, None, :, None]
    return (torch.cat([torch.stack(told, -1), kinds], -1) * there).flatten(1, 3)


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
    steps: int = 18000
    all_sizes_from: float = 0.32
    learning_rate: float = 2e-3
    warmup: int = 200
    decay_from: float = 0.65
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0
    ema: float = 0.998
    shift: float = 3.0
    answers_weight: float = 1.0
    seed: int = 2
    workers: int = 2
    captions: shapes_text.CaptionSettings = dataclasses.field(default_factory=shapes_text.CaptionSettings)
    name: str = "denoiser"
    weighted: bool = False

    def build(self) -> Student:
        """A fresh transformer."""
        return Student(self.seed)

    def matrices(self, model: nn.Module) -> list[nn.Parameter]:
        """Those of the blocks."""
        return [weight for name, weight in model.named_parameters() if ".blocks." in name and weight.dim() == 2]

    def rate(self, step: int) -> float:
        """A warm-up, a plateau, and a straight way down to zero."""
        warm = (step + 1) / self.warmup
        left = (self.steps - step) / (self.steps * (1 - self.decay_from))
        return self.learning_rate * min(warm, left, 1.0)

    def prepare(self, model: nn.Module, worker: int) -> None:
        """Set up the training attention, and read what the latents are normalised by."""
        self.processor = TrainingAttention()
        model.transformer.set_attn_processor(self.processor)
        self.text = shapes_text.load_text(self.folder)
        mean, std = load_statistics(self.folder)
        self.mean, self.std = (value.view(1, -1, 1, 1, 1) for value in (mean, std))
        self.drawn: dict[str, data.Drawn] = {}

    def shares(self, step: int) -> dict[str, float]:
        """The share of each bucket about a step."""
        return data.MOSTLY_SMALL if step < self.steps * self.all_sizes_from else data.ALL_SIZES

    def bucket(self, step: int) -> data.Bucket:
        """The bucket of a step, the same for every worker."""
        shares = self.shares(step)
        name = random.Random(f"bucket-{self.seed}-{step}").choices(list(shares), list(shares.values()))[0]
        return data.BUCKETS[name]

    def loss(self, model: nn.Module, step: int, worker: int) -> tuple[Tensor, float]:
        """The squared errors of the velocity, which is logged, and of the answers about the things."""
        bucket = self.bucket(step)
        if bucket.name not in self.drawn:
            self.drawn[bucket.name] = data.load_bucket(
                self.folder, bucket, self.seed, worker, self.workers, weighted=self.weighted
            )
        drawn = self.drawn[bucket.name]
        rng = random.Random(f"batch-{self.seed}-{step}-{worker}")
        generator = torch.Generator().manual_seed(rng.getrandbits(60))
        picks = [rng.randrange(len(drawn.latents)) for _ in range(bucket.batch)]
        first = bucket.count * worker // self.workers
        shown = [data.bucket_scene(bucket, first + pick, self.seed, weighted=self.weighted)[0] for pick in picks]
        captions = [shapes_text.training_caption(scene, rng, self.captions)[0] for scene in shown]
        ids, lengths = shapes_text.pad_tokens(captions)
        ids = ids[:, : int(lengths.max()) + 1]
        # Half the captions are padded as the card recommends, the others to any length up to the pipeline's default.
        padded = [TEXT_LENGTH if rng.random() < 0.5 else round(LONGEST_TEXT ** rng.uniform(0.5, 1)) for _ in picks]
        self.processor.bias = padding_bias(lengths, ids.shape[1], torch.tensor(padded))
        clean = (drawn.latents[picks].float() - self.mean) / self.std
        noise = torch.randn(clean.shape, generator=generator)
        even = torch.randn(bucket.batch, generator=generator).sigmoid()
        sigmas = self.shift * even / (1 + (self.shift - 1) * even)
        noisy = clean + sigmas.view(-1, 1, 1, 1, 1) * (noise - clean)
        velocity, answers = model(noisy, sigmas * 1000, shapes_text.embed(self.text, ids, lengths))
        error = (velocity - (noise - clean)).square().mean()
        right = right_answers(drawn.places[picks], drawn.shapes[picks], bucket.size // 16)
        return error + self.answers_weight * (answers - right).square().mean(), error.item()


@dataclasses.dataclass
class FinishTask(DenoiserTask):
    """The last steps of the denoiser: from the average of those before, mostly at the default size, on what is hard."""

    steps: int = 3500
    all_sizes_from: float = 0.0
    learning_rate: float = 1e-3
    decay_from: float = 0.2
    seed: int = 5
    name: str = "finish"
    weighted: bool = True

    def shares(self, step: int) -> dict[str, float]:
        """The share of each bucket, the same at every step."""
        return data.FINISH


@torch.no_grad()
def load_transformer(folder: Path) -> WanTransformer3DModel:
    """The trained transformer of a folder, frozen: `FINISH_SHARE` of the way from before the finish to its end.

    What the finish has little of is then kept better (Wortsman et al. 2022, "Robust fine-tuning of zero-shot models").
    """
    student = shapes_parallel.load_average(DenoiserTask(folder))
    finished = shapes_parallel.load_average(FinishTask(folder))
    for before, after in zip(student.parameters(), finished.parameters(), strict=True):
        before.lerp_(after, FINISH_SHARE)
    return student.transformer


def load_statistics(folder: Path) -> tuple[Tensor, Tensor]:
    """Mean and deviation (15,) of the latents' channels, measured at the first call."""
    path = folder / "statistics.pt"
    if not path.exists():
        mean, std = data.latent_statistics(0)
        torch.save({"mean": mean, "std": std}, path)
    saved = torch.load(path, weights_only=True)
    return saved["mean"], saved["std"]
