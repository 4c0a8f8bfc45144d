"""Score a shapes model: fresh captions, fresh seeds, and what the pixels show.

`python scripts/score_shapes.py --model diffgen/shapes --card` also tries other settings and negative prompts, and
writes all into the card.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import shapes_generate
import shapes_scene as scenes
import shapes_scorer as scorer
import torch

BARS: dict[str, float] = {
    "background": 0.98,
    "color": 0.98,
    "shape": 0.92,
    "relation": 0.92,
    "direction": 0.96,
    "size": 0.85,
}
ASPECTS: tuple[str, ...] = (*BARS, "count")
CARD_MARKS = ("<!-- scores begin -->", "<!-- scores end -->")
MISSES_SHOWN = 48
SETTINGS_CAPTIONS = 60


@dataclasses.dataclass(frozen=True)
class Trial:
    """One caption to be drawn and checked."""

    scene: scenes.Scene
    job: shapes_generate.Job
    unseen: bool


def make_trials(count: int, seed: int) -> list[Trial]:
    """Captions of changing wording: a third of combinations never trained on; 4 in 10 with one thing at rest, 3 in 10
    with two, 3 in 10 with one that moves."""
    rng = random.Random(f"score-{seed}")
    trials = []
    for index in range(count):
        kind = ("one", "two", "motion", "one", "two", "motion", "one", "two", "motion", "one")[index // 3 % 10]
        unseen = index % 3 == 0
        scene = scenes.sample_scene(rng, kind, unseen=unseen)
        frames = rng.choice((5, 9, 13, 17)) if kind == "motion" else 1
        job = shapes_generate.Job(scenes.caption(scene, rng), rng.getrandbits(31), frames)
        trials.append(Trial(scene, job, unseen))
    return trials


def tabulate(trials: list[Trial], marks: list[dict[str, bool]]) -> str:
    """A Markdown table of the share that is right, for each aspect, over all, trained and held-out combinations."""
    tallies: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for trial, mark in zip(trials, marks, strict=True):
        for aspect, right in mark.items():
            for column in ("all", "unseen" if trial.unseen else "seen"):
                tallies[aspect, column].append(right)
    lines = ["| aspect | right | of | bar | trained on | held out |", "|---|---|---|---|---|---|"]
    for aspect in ASPECTS:
        cells = [_percent(tallies[aspect, column]) for column in ("all", "seen", "unseen")]
        bar = f"{BARS[aspect]:.0%}" if aspect in BARS else ""
        lines.append(f"| {aspect} | {cells[0]} | {len(tallies[aspect, 'all'])} | {bar} | {cells[1]} | {cells[2]} |")
    everything = [all(mark.values()) for mark in marks]
    lines.append(f"| everything at once | {_percent(everything)} | {len(everything)} | | | |")
    return "\n".join(lines)


def _percent(values: list[bool]) -> str:
    """A share in words."""
    return f"{100 * sum(values) / len(values):.1f} %" if values else "none"


def spread(pipeline: object, settings: shapes_generate.SamplingSettings, seed: int) -> tuple[float, float]:
    """How far places stray between seeds, as a deviation in frame widths: of the model, and of drawn scenes."""
    rng = random.Random(f"spread-{seed}")
    made, drawn = [], []
    for background, thing in (("blue", scenes.Thing("red", "circle")), ("white", scenes.Thing("green", "star"))):
        scene = scenes.Scene(background, (thing,))
        jobs = [shapes_generate.Job(scenes.caption(scene), rng.getrandbits(31)) for _ in range(12)]
        found = [scorer.places(frames) for frames in shapes_generate.generate(pipeline, jobs, settings)]
        made.append([places[0] for places in found if places])
        drawn.append([scenes.sample_layout(scene, rng)[0, 0, :2] for _ in range(400)])
    model, truth = (np.mean([np.std(np.array(group), axis=0).mean() for group in groups]) for groups in (made, drawn))
    return float(model), float(truth)


def settings_table(pipeline: object, settings: shapes_generate.SamplingSettings, count: int, seed: int) -> str:
    """A Markdown table of what stills of `count` captions show with other steps, guidance and sizes."""
    changes: list[dict[str, int | float]] = [{}]
    changes += [{"steps": steps} for steps in (4, 8, 50)]
    changes += [{"guidance": guidance} for guidance in (1.0, 2.0, 5.0)]
    changes += [{"size": size} for size in (96, 192)]
    trials = [trial for trial in make_trials(2 * count, seed) if trial.scene.motion is None][:count]
    aspects = [aspect for aspect in ASPECTS if aspect != "direction"]
    lines = [f"| stills | {' | '.join(aspects)} |", "|---" * (1 + len(aspects)) + "|"]
    for change in changes:
        clips = shapes_generate.generate(
            pipeline, [trial.job for trial in trials], dataclasses.replace(settings, **change)
        )
        marks = [scorer.score(trial.scene, clip) for trial, clip in zip(trials, clips, strict=True)]
        shares = [_percent([mark[aspect] for mark in marks if aspect in mark]) for aspect in aspects]
        name = ", ".join(f"{key} {value:g}" for key, value in change.items()) or "recommended"
        lines.append(f"| {name} | {' | '.join(shares)} |")
    return "\n".join(lines)


def negatives(pipeline: object, settings: shapes_generate.SamplingSettings, seed: int) -> tuple[float, float]:
    """How often a thing whose colour the prompt leaves open has a given colour: without and with it as the negative."""
    rng = random.Random(f"negative-{seed}")
    hits: dict[bool, list[bool]] = {False: [], True: []}
    for background in scenes.COLORS[::2]:
        jobs, named = [], []
        for color in scenes.COLORS:
            for _ in range(5 if color != background else 0):
                prompt, sampled = f"a {rng.choice(scenes.SHAPES)} on a {background} background", rng.getrandbits(31)
                jobs.append(shapes_generate.Job(prompt, sampled, negative=color))
                named.append(color)
        for used in hits:
            drawn = jobs if used else [dataclasses.replace(job, negative="") for job in jobs]
            for color, frames in zip(named, shapes_generate.generate(pipeline, drawn, settings), strict=True):
                hits[used].append(any(seen.color == color for seen in scorer.read_frame(frames[0]).things))
    without, with_it = (sum(values) / len(values) for values in hits.values())
    return without, with_it


def write_card(card: Path, text: str) -> None:
    """Put a text between the card's marks."""
    old = card.read_text(encoding="utf-8")
    before, rest = old.split(CARD_MARKS[0])
    _, after = rest.split(CARD_MARKS[1])
    card.write_text(f"{before}{CARD_MARKS[0]}\n{text}\n{CARD_MARKS[1]}{after}", encoding="utf-8")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("diffgen/shapes"))
    parser.add_argument("--captions", type=int, default=300)
    parser.add_argument("--seed", type=int, default=300)
    parser.add_argument("--steps", type=int, default=shapes_generate.SamplingSettings.steps)
    parser.add_argument("--guidance", type=float, default=shapes_generate.SamplingSettings.guidance)
    parser.add_argument("--size", type=int, default=shapes_generate.SamplingSettings.size)
    parser.add_argument("--text-length", type=int, default=shapes_generate.SamplingSettings.text_length)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--misses", type=Path, help="where the picture of the misses goes")
    parser.add_argument("--sheet", type=Path, help="where a picture of the first results goes")
    parser.add_argument("--json", type=Path, help="where the marks go")
    parser.add_argument("--card", action="store_true", help="write table and misses into the model's card")
    return parser.parse_args()


def main() -> None:
    """Generate, score, print the table."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    settings = shapes_generate.SamplingSettings(
        arguments.steps, arguments.guidance, arguments.size, arguments.text_length
    )
    pipeline = shapes_generate.load(arguments.model)
    trials = make_trials(arguments.captions, arguments.seed)
    began = time.monotonic()
    clips = shapes_generate.generate(pipeline, [trial.job for trial in trials], settings)
    marks = [scorer.score(trial.scene, clip) for trial, clip in zip(trials, clips, strict=True)]
    stray, drawn = spread(pipeline, settings, arguments.seed)
    text = (
        f"{len(trials)} captions (seed {arguments.seed}), {settings.size} px, {settings.steps} steps, "
        f"guidance {settings.guidance:g}, text length {settings.text_length}:\n\n{tabulate(trials, marks)}\n\n"
        f"Places vary with the seed: they deviate by {stray:.2f} of the frame (in drawn scenes: {drawn:.2f})."
    )
    print(f"{text}\n\n{time.monotonic() - began:.0f} s")
    missed = [
        (clip, f"{trial.job.caption} [{', '.join(a for a, right in mark.items() if not right)}]")
        for trial, clip, mark in zip(trials, clips, marks, strict=True)
        if not all(mark.values())
    ]
    misses = arguments.misses or (arguments.model / "misses.png" if arguments.card else None)
    if misses:
        shapes_generate.sheet(missed[:MISSES_SHOWN], columns=8).quantize(128).save(misses, optimize=True)
    if arguments.sheet:
        first = [(clip, trial.job.caption) for trial, clip in zip(trials[:60], clips[:60], strict=True)]
        shapes_generate.sheet(first, columns=10).save(arguments.sheet)
    if arguments.json:
        rows = [
            {"caption": trial.job.caption, "seed": trial.job.seed, "frames": trial.job.frames, **mark}
            for trial, mark in zip(trials, marks, strict=True)
        ]
        arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    if arguments.card:
        shown = f"{min(len(missed), MISSES_SHOWN)} of the {len(missed)} captions with any miss, its name in brackets"
        others = settings_table(pipeline, settings, SETTINGS_CAPTIONS, arguments.seed + 1)
        without, with_it = negatives(pipeline, settings, arguments.seed)
        behaviour = (
            f"{SETTINGS_CAPTIONS} stills of other captions (seed {arguments.seed + 1}), with other settings:\n\n"
            f"{others}\n\n"
            f"Where the prompt leaves a thing's colour open, a given colour comes in {without:.0%} of the stills, "
            f"and in {with_it:.0%} when it is the negative prompt."
        )
        print(behaviour)
        write_card(arguments.model / "README.md", f"{text}\n\n{shown}:\n\n![misses](misses.png)\n\n{behaviour}")


if __name__ == "__main__":
    main()
