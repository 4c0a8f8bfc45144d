"""Writes a trained shapes model in diffusers layout, float16, with its card."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import shapes_data as data
import shapes_denoiser
import shapes_scene as scenes
import shapes_text
import shapes_vae
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CARD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-video
---
# shapes

A tiny text-to-image and text-to-video model: a Wan-architecture pipeline of {millions:.1f} M parameters in float16
safetensors, trained from nothing on drawn scenes by `scripts/train_shapes.py`. It draws one or two coloured shapes on
a coloured background, as stills or as short clips, in seconds on a CPU.

## What to ask for

- Colours: {colors}. Shapes: {shapes}. Sizes: small, large, or no word for normal (little and big work too).
- A background: "on a blue background", "on blue", "blue background, a red circle".
- Two things: "left of", "right of", "above", "below".
- One moving thing in a clip: "moving left", "right", "up", "down".
- Words that it does not know are ignored. A thing's colour should differ from its background.

For instance: "a red circle on a blue background", "large white star moving left, purple background",
"a small yellow triangle above a blue star on a white background".

| setting | recommended | sensible |
|---|---|---|
| size | 128 x 128 | 96 to 192, multiples of 16 |
| frames | 1, or 9 for a clip | 1, 5, 9, 13, 17 |
| steps | 20 | 8 and more |
| guidance | 3 | 2 to 6 |
| `max_sequence_length` | 32 | 32 to 512 |

## Scores

Measured by `scripts/score_shapes.py` on pixels, by rules alone.

<!-- scores begin -->
Not scored yet.
<!-- scores end -->

Right means: the background's colour; the colour of every thing; the shape of every thing; the relation between things
of the right colours; the direction of travel from the first to the last frame; the size of every thing; count is
whether just as many things are there as were asked for.

## How it was made

Everything is drawn, so there is no outside data. A third of the {combinations} combinations of shape, colour and
background were never shown in training, neither to the autoencoder nor to the denoiser; they are listed below.

1. The latents are fixed beforehand: of each 8 x 8 block of pixels the mean colours of its four quarters, in the first
   frame or the last of each four, and its mean colour over those frames. So they are a small picture, which a small
   denoiser learns far faster than latents that only their decoder understands. The autoencoder (`AutoencoderKLWan`,
   {vae_millions:.1f} M parameters) learns to make these latents, and to draw sharply what slightly noisy ones show:
   squared error and a little absolute error, unclamped, stills and clips at 64 px, then mostly 128 px.
2. Scenes of several sizes and lengths are drawn once: {buckets}.
3. The text encoder (`UMT5EncoderModel`, {text_millions:.1f} M) learns to tell, from each word's embedding, every aspect
   of the scene that a caption describes: background, colours, shapes, sizes, relation, motion. It is frozen then.
4. The transformer (`WanTransformer3DModel`, {transformer_millions:.1f} M) learns by flow matching with logit-normal
   times, shifted to the noise in which shapes and places are decided; mostly at 64 px, then at all sizes. Its blocks'
   matrices are updated by Muon, the rest by Adam; the exported weights are a moving average. In training, the tokens of
   a middle block must also tell where each thing is, how large, of what shape and whither it goes. At last it goes on
   from that average, mostly at 128 px, on other scenes, in which small things and stars come more often. The weights
   are {finish_share:.0%} of the way from before that finish to its end.

To make the weights again: `python scripts/train_shapes.py --work FOLDER --export diffgen/shapes`; it goes on from its
checkpoints when it was stopped.

| stage | settings |
|---|---|
| autoencoder | {vae_settings} |
| text encoder | {text_settings} |
| denoiser | {denoiser_settings} |
| shares of its steps at first | {first_shares} |
| shares of its steps later | {later_shares} |
| finish | {finish_settings} |
| shares of its steps | {finish_shares} |

## Combinations held out of training

{held_out}
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of whole words that maps unknown ones to <unk> and ends each text with </s>."""
    tokenizer = Tokenizer(models.WordLevel(scenes.VOCABULARY, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", scenes.END)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="</s>",
        model_max_length=shapes_denoiser.TEXT_LENGTH * 2,
    )


def _settings(task: Any) -> str:
    """A task's settings in one line."""
    skipped = ("folder", "name", "captions")
    pairs = [f"{k} {v}" for k, v in dataclasses.asdict(task).items() if k not in skipped]
    if hasattr(task, "captions"):
        pairs += [f"captions {k} {v}" for k, v in dataclasses.asdict(task.captions).items()]
    return ", ".join(pairs)


def _held_out() -> str:
    """The held-out combinations, a line for each shape and colour."""
    lines = []
    for shape in scenes.SHAPES:
        for color in scenes.COLORS:
            grounds = sorted(c[2] for c in scenes.HELD_OUT if c[:2] == (shape, color))
            if grounds:
                lines.append(f"- {color} {shape} on {', '.join(grounds)}")
    return "\n".join(lines)


def write_card(
    path: Path, counts: dict[str, int], vae_task: Any, text_task: Any, denoiser_task: Any, finish_task: Any
) -> None:
    """Write the card of a model whose parts have these parameter counts."""
    shares = [", ".join(f"{k} {v:.0%}" for k, v in s.items()) for s in (data.MOSTLY_SMALL, data.ALL_SIZES, data.FINISH)]
    text = CARD.format(
        millions=sum(counts.values()) / 1e6,
        vae_millions=counts["vae"] / 1e6,
        text_millions=counts["text_encoder"] / 1e6,
        transformer_millions=counts["transformer"] / 1e6,
        colors=", ".join(scenes.COLORS),
        shapes=", ".join(scenes.SHAPES),
        combinations=len(scenes.all_combinations()),
        buckets=", ".join(f"{b.count} of {b.size} px and {b.frames} frames" for b in data.BUCKETS.values()),
        vae_settings=_settings(vae_task),
        text_settings=_settings(text_task),
        denoiser_settings=_settings(denoiser_task),
        first_shares=shares[0],
        later_shares=shares[1],
        finish_share=shapes_denoiser.FINISH_SHARE,
        finish_settings=_settings(finish_task),
        finish_shares=shares[2],
        held_out=_held_out(),
    )
    path.write_text(text, encoding="utf-8")


def export(folder: Path, target: Path, vae_task: Any, text_task: Any, denoiser_task: Any, finish_task: Any) -> None:
    """Write the averaged weights of a training folder as a pipeline."""
    vae = shapes_vae.load_vae(folder)
    mean, std = shapes_denoiser.load_statistics(folder)
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    transformer = shapes_denoiser.load_transformer(folder)
    parts = {"vae": vae, "text_encoder": shapes_text.load_text(folder), "transformer": transformer}
    pipeline = WanPipeline(
        tokenizer=make_tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=denoiser_task.shift),
        **{name: part.to(torch.float16) for name, part in parts.items()},
    )
    pipeline.save_pretrained(target, safe_serialization=True)
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()}
    write_card(target / "README.md", counts, vae_task, text_task, denoiser_task, finish_task)
