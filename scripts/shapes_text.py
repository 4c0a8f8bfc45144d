"""The text stage of the shapes model: an encoder that learns what captions mean before it sees any picture.

Every word's embedding is trained to tell the whole scene by one linear layer for each of its aspects. A denoiser that
reads such embeddings need not find out by itself which colour belongs to what, which would take it most of its time.
"""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import shapes_parallel
import shapes_scene as scenes
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import UMT5Config, UMT5EncoderModel

TEXT_CONFIG: dict[str, Any] = {
    "vocab_size": len(scenes.VOCABULARY),
    "d_model": 128,
    "d_kv": 32,
    "d_ff": 256,
    "num_layers": 4,
    "num_decoder_layers": 4,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "pad_token_id": scenes.PAD,
    "eos_token_id": scenes.END,
}
WIDTH = 22  # words in a training batch; no caption of the grammar is longer
# Aspects of a scene and their values; value 0 is "not said".
ASPECTS: dict[str, tuple[str, ...]] = {
    "background": scenes.COLORS,
    "color 1": scenes.COLORS,
    "shape 1": scenes.SHAPES,
    "size 1": tuple(scenes.SIZES),
    "color 2": scenes.COLORS,
    "shape 2": scenes.SHAPES,
    "size 2": tuple(scenes.SIZES),
    "relation": ("left of", "above"),
    "motion": tuple(scenes.DIRECTIONS),
}
UNSAID = "something"  # a word outside the vocabulary
# A relation and the same one told from the other thing's side.
TURNED = {"right of": "left of", "below": "above"}


@dataclasses.dataclass(frozen=True)
class CaptionSettings:
    """How captions are spoilt in training, so that the model gets along with what users type."""

    dropped: float = 0.10
    partial: float = 0.08
    unknown: float = 0.12


def meaning(scene: scenes.Scene) -> dict[str, str]:
    """What a scene says, aspect by aspect, the left or upper thing first."""
    things, relation = scene.things, scene.relation
    if relation in TURNED:
        things, relation = things[::-1], TURNED[relation]
    said = {"background": scene.background}
    for number, thing in enumerate(things, 1):
        said |= {f"color {number}": thing.color, f"shape {number}": thing.shape, f"size {number}": thing.size}
    if relation:
        said["relation"] = relation
    if scene.motion:
        said["motion"] = scene.motion
    return said


def training_caption(
    scene: scenes.Scene, rng: random.Random, settings: CaptionSettings
) -> tuple[list[int], dict[str, str]]:
    """Word ids of a caption and what it says: now and then nothing, a part, or with words that nobody knows."""
    draw = rng.random()
    if draw < settings.dropped:
        return [scenes.END], {}
    said = meaning(scene)
    ids = scenes.tokenize(scenes.caption(scene, rng))
    if draw < settings.dropped + settings.partial and len(scene.things) == 1 and scene.motion is None:
        thing = scene.things[0]
        kept = rng.choice((("background",), ("color 1", "shape 1", "size 1"), ("shape 1", "background")))
        if "color 1" in kept:
            ids = scenes.tokenize(scenes.phrase(thing, rng, article=rng.random() < 0.7))
        elif "shape 1" in kept and thing.size == "normal":
            ids = scenes.tokenize(f"a {thing.shape} on a {scene.background} background")
        else:
            kept = ("background",)
            ids = scenes.tokenize(f"{rng.choice(('', 'a '))}{scene.background} background")
        said = {aspect: said[aspect] for aspect in kept}
    if rng.random() < settings.unknown:
        for _ in range(rng.choice((1, 1, 2, 3))):
            ids.insert(rng.randrange(len(ids)), scenes.UNKNOWN)
    return ids, said


def hide(scene: scenes.Scene, rng: random.Random) -> scenes.Scene:
    """A scene some of whose words are ones that nobody knows.

    Scenes that training never shows would otherwise be learned as impossible, and their captions be read as others. A
    thing whose shape is not said may have any colour: held out are only combinations of all three.
    """
    background = UNSAID if rng.random() < 0.3 else scene.background
    things = []
    for thing in scene.things:
        color, shape = thing.color, thing.shape
        if rng.random() < 0.4:
            color, shape = rng.choice([c for c in scenes.COLORS if c != scene.background]), UNSAID
        elif rng.random() < 0.3:
            color = UNSAID
        things.append(scenes.Thing(color, shape, thing.size))
    return dataclasses.replace(scene, background=background, things=tuple(things))


def pad_tokens(captions: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids (batch, WIDTH) and lengths (batch,) of captions; every row ends with at least one pad."""
    cut = [ids if len(ids) < WIDTH else [*ids[: WIDTH - 2], scenes.END] for ids in captions]
    ids = torch.tensor([row + [scenes.PAD] * (WIDTH - len(row)) for row in cut])
    return ids, torch.tensor([len(row) for row in cut])


class Reader(nn.Module):
    """The text encoder, and the layers that ask it for each aspect."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.text = UMT5EncoderModel(UMT5Config(**TEXT_CONFIG))
        width = TEXT_CONFIG["d_model"]
        self.heads = nn.ModuleDict({name: nn.Linear(width, len(values) + 1) for name, values in ASPECTS.items()})

    def forward(self, ids: Tensor, lengths: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Scores (batch, words, values) of each aspect, and which words (batch, words) are real."""
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        hidden = self.text(ids, mask.long()).last_hidden_state
        return {name: head(hidden) for name, head in self.heads.items()}, mask


@dataclasses.dataclass
class TextTask:
    """The text encoder's training and what it is set to."""

    folder: Path
    steps: int = 1900
    batch: int = 48
    learning_rate: float = 2e-3
    warmup: int = 100
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0
    ema: float = 0.98
    hidden: float = 0.5
    seed: int = 3
    workers: int = 2
    captions: CaptionSettings = dataclasses.field(default_factory=CaptionSettings)
    name: str = "text"

    def build(self) -> Reader:
        """A fresh text encoder with its heads."""
        return Reader(self.seed)

    def matrices(self, model: nn.Module) -> list[nn.Parameter]:
        """None: Adam serves well."""
        return []

    def prepare(self, model: nn.Module, worker: int) -> None:
        """Nothing to get ready: captions are made as they are needed."""

    def rate(self, step: int) -> float:
        """A linear warm-up, then half a cosine down to zero."""
        share = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.learning_rate * min((step + 1) / self.warmup, 0.5 * (1 + math.cos(math.pi * max(share, 0))))

    def loss(self, model: nn.Module, step: int, worker: int) -> tuple[Tensor, float]:
        """The cross-entropy of all aspects, asked of every word; logged is the share of aspects that are wrong."""
        rng = random.Random(f"{self.name}-{self.seed}-{step}-{worker}")
        pairs = []
        for _ in range(self.batch):
            scene = scenes.sample_scene(rng, rng.choice(("one", "two", "two", "motion")))
            scene = hide(scene, rng) if rng.random() < self.hidden else scene
            pairs.append(training_caption(scene, rng, self.captions))
        ids, lengths = pad_tokens([ids for ids, _ in pairs])
        scores, mask = model(ids, lengths)
        losses, wrong = [], []
        for name, values in ASPECTS.items():
            wanted = torch.tensor(
                [values.index(said[name]) + 1 if said.get(name) in values else 0 for _, said in pairs]
            )
            wide = wanted[:, None].expand(mask.shape)[mask]
            losses.append(F.cross_entropy(scores[name][mask], wide))
            wrong.append((scores[name][mask].argmax(-1) != wide).float().mean())
        return torch.stack(losses).mean(), torch.stack(wrong).mean().item()


def load_text(folder: Path) -> UMT5EncoderModel:
    """The trained text encoder of a folder, frozen."""
    return shapes_parallel.load_average(TextTask(folder)).text


@torch.no_grad()
def embed(text: UMT5EncoderModel, ids: Tensor, lengths: Tensor) -> Tensor:
    """Embeddings (batch, words, 128) of captions, zero where there is no word, as the pipeline gives them."""
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return text(ids, mask.long()).last_hidden_state * mask[..., None]
