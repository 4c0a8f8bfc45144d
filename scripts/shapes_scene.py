"""Scenes of coloured shapes: their grammar, their captions, and how they are drawn.

A scene has one background colour and one or two things (colour, shape, size), perhaps a relation between two things or
one direction of motion. Lengths are in units of the frame's shorter side, so a scene looks alike at every resolution.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
import re

import numpy as np
from numpy.typing import NDArray

PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (225, 35, 35),
    "green": (30, 165, 60),
    "blue": (40, 75, 225),
    "yellow": (248, 225, 40),
    "purple": (145, 50, 180),
    "orange": (250, 140, 25),
    "white": (248, 248, 248),
    "black": (12, 12, 12),
}
COLORS: tuple[str, ...] = tuple(PALETTE)
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "star")
# Radius ranges leave gaps of a fifth between the sizes, so that a size can be told from pixels.
SIZES: dict[str, tuple[float, float]] = {"small": (0.10, 0.12), "normal": (0.15, 0.18), "large": (0.22, 0.26)}
RELATIONS: tuple[str, ...] = ("left of", "above", "right of", "below")
DIRECTIONS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}

TRIANGLE_RADIUS = 1.3  # circumscribed radius of the triangle, in radii of the thing
STAR_RADIUS = 1.3
STAR_INNER = 0.45  # inner over outer radius
# Half width and half height of each shape's bounding box, in radii; the box's middle is the thing's place.
EXTENT: dict[str, tuple[float, float]] = {
    "circle": (1.0, 1.0),
    "square": (0.9, 0.9),
    "triangle": (TRIANGLE_RADIUS * math.sqrt(3) / 2, TRIANGLE_RADIUS * 0.75),
    "star": (STAR_RADIUS * math.sin(math.radians(72)), STAR_RADIUS * (1 + math.cos(math.radians(36))) / 2),
}
# Area of each shape at radius 1.
UNIT_AREA: dict[str, float] = {
    "circle": math.pi,
    "square": 1.8**2,
    "triangle": TRIANGLE_RADIUS**2 * 3 * math.sqrt(3) / 4,
    "star": 5 * STAR_RADIUS**2 * STAR_INNER * math.sin(math.radians(36)),
}
MARGIN = 0.03
GAP = 0.05
HELD_OUT_SEED = 224

Combination = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Thing:
    """One drawn shape."""

    color: str
    shape: str
    size: str = "normal"


@dataclasses.dataclass(frozen=True)
class Scene:
    """What a caption says: a background, things, and a relation of the first to the second or a motion of the first."""

    background: str
    things: tuple[Thing, ...]
    relation: str | None = None
    motion: str | None = None

    def combinations(self) -> list[Combination]:
        """The (shape, colour, background) triples that this scene shows."""
        return [(thing.shape, thing.color, self.background) for thing in self.things]


def all_combinations() -> list[Combination]:
    """Every (shape, colour, background) whose colour can be seen on its background: 224 of them."""
    return [c for c in itertools.product(SHAPES, COLORS, COLORS) if c[1] != c[2]]


def held_out() -> frozenset[Combination]:
    """The third of the combinations that training never shows; the same set on every call."""
    combinations = all_combinations()
    return frozenset(random.Random(HELD_OUT_SEED).sample(combinations, round(len(combinations) / 3)))


HELD_OUT = held_out()


@functools.cache
def _pool(unseen: bool) -> tuple[Combination, ...]:
    """The combinations that are held out of training, or the others."""
    return tuple(c for c in all_combinations() if (c in HELD_OUT) == unseen)


def sample_scene(rng: random.Random, kind: str, *, unseen: bool = False) -> Scene:
    """Draw a scene of a kind: "one", "two" or "motion".

    With `unseen`, every combination of the scene is held out of training; without, none is.
    """
    pool = _pool(unseen)
    shape, color, background = rng.choice(pool)
    if kind == "two":
        others = [c for c in pool if c[2] == background and c[1] != color]
        while not others:
            shape, color, background = rng.choice(pool)
            others = [c for c in pool if c[2] == background and c[1] != color]
        second = rng.choice(others)
        # Two large things would not fit.
        mixed = [(a, b) for a in SIZES for b in SIZES if a != b or a == "small"]
        sizes = rng.choice([("normal", "normal")] * 3 + mixed)
        things = (Thing(color, shape, sizes[0]), Thing(second[1], second[0], sizes[1]))
        return Scene(background, things, relation=rng.choices(RELATIONS, (7, 7, 3, 3))[0])
    thing = Thing(color, shape, rng.choice(list(SIZES)))
    motion = rng.choice(list(DIRECTIONS)) if kind == "motion" else None
    return Scene(background, (thing,), motion=motion)


def _place_two(scene: Scene, rng: random.Random, radii: list[float], span: tuple[float, float]) -> list[list[float]]:
    """Places (x, y) of two things that stand in the scene's relation inside `span` (width, height)."""
    assert scene.relation is not None
    axis = 0 if scene.relation in ("left of", "right of") else 1
    order = (0, 1) if scene.relation in ("left of", "above") else (1, 0)
    half = [[e * r for e in EXTENT[t.shape]] for t, r in zip(scene.things, radii, strict=True)]
    first, second = order
    room = span[axis] - 2 * (half[0][axis] + half[1][axis] + MARGIN) - GAP
    cuts = sorted(rng.uniform(0, max(room, 0.0)) for _ in range(2))
    near = MARGIN + half[first][axis] + cuts[0]
    far = near + half[first][axis] + GAP + half[second][axis] + cuts[1] - cuts[0]
    across = 1 - axis
    low, high = (MARGIN + max(half[0][across], half[1][across]) for _ in range(2))
    high = span[across] - high
    base = rng.uniform(low, high)
    # The second thing strays across the axis by much less than along it, so that the relation stays plain.
    stray = 0.35 * (far - near)
    other = min(max(base + rng.uniform(-stray, stray), low), high)
    places: list[list[float]] = [[0.0, 0.0], [0.0, 0.0]]
    places[first][axis], places[first][across] = near, base
    places[second][axis], places[second][across] = far, other
    return places


def sample_layout(
    scene: Scene, rng: random.Random, frames: int = 1, aspect: tuple[float, float] = (1.0, 1.0)
) -> NDArray[np.float64]:
    """Choose where things are: (frames, things, 3) of x, y and radius, in units of the shorter side.

    `aspect` is (width, height) in those units, so its smaller entry is 1.
    """
    radii = [rng.uniform(*SIZES[t.size]) for t in scene.things]
    layout = np.zeros((frames, len(scene.things), 3))
    if len(scene.things) == 2:
        axis = 0 if scene.relation in ("left of", "right of") else 1
        extents = [EXTENT[t.shape][axis] for t in scene.things]
        if 2 * (sum(e * r for e, r in zip(extents, radii, strict=True)) + MARGIN) + GAP > aspect[axis]:
            radii = [SIZES[t.size][0] for t in scene.things]
        layout[:, :, :2] = _place_two(scene, rng, radii, aspect)
        layout[:, :, 2] = radii
        return layout
    radius = radii[0]
    half = [e * radius + MARGIN for e in EXTENT[scene.things[0].shape]]
    start = [rng.uniform(half[i], aspect[i] - half[i]) for i in range(2)]
    end = list(start)
    if scene.motion is not None and frames > 1:
        step = DIRECTIONS[scene.motion]
        axis = 0 if step[0] else 1
        room = aspect[axis] - 2 * half[axis]
        travel = min(rng.uniform(0.028, 0.038) * (frames - 1), room)
        low = half[axis] + rng.uniform(0, room - travel)
        start[axis], end[axis] = (low, low + travel) if step[axis] > 0 else (low + travel, low)
    for index in range(frames):
        share = index / max(frames - 1, 1)
        layout[index, 0] = [start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1]), radius]
    return layout


def inside(shape: str, x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether points are inside a shape of radius 1 whose bounding box is centred at 0 (y grows downwards)."""
    if shape == "circle":
        return x * x + y * y <= 1
    if shape == "square":
        return (np.abs(x) <= 0.9) & (np.abs(y) <= 0.9)
    if shape == "triangle":
        top = -TRIANGLE_RADIUS * 0.75
        return (y <= -top) & (np.abs(x) * math.sqrt(3) <= y - top)
    # A point of the star is folded into one of its ten mirrored sectors, where the edge is a single line.
    y = y - STAR_RADIUS * (1 - math.cos(math.radians(36))) / 2
    angle = np.abs((np.arctan2(x, -y) + math.radians(36)) % math.radians(72) - math.radians(36))
    radius = np.hypot(x, y)
    u, v = radius * np.cos(angle), radius * np.sin(angle)
    inner = STAR_INNER * STAR_RADIUS
    corner = (inner * math.cos(math.radians(36)), inner * math.sin(math.radians(36)))
    return (STAR_RADIUS - u) * corner[1] - v * (STAR_RADIUS - corner[0]) >= 0


def coverage(
    shape: str, place: NDArray[np.float64], height: int, width: int, samples: int = 4
) -> tuple[NDArray[np.float32], slice, slice]:
    """How much of each pixel a shape covers: a block of (rows, columns) in [0, 1] and where it lies in the frame."""
    scale = min(height, width)
    x, y, radius = place[0] * scale, place[1] * scale, place[2] * scale
    half_x, half_y = (e * radius for e in EXTENT[shape])
    rows = slice(max(math.floor(y - half_y), 0), min(math.ceil(y + half_y) + 1, height))
    columns = slice(max(math.floor(x - half_x), 0), min(math.ceil(x + half_x) + 1, width))
    # Sample points are the middles of samples x samples cells of a pixel: their mean is the covered share.
    ys = rows.start + (np.arange((rows.stop - rows.start) * samples) + 0.5) / samples
    xs = columns.start + (np.arange((columns.stop - columns.start) * samples) + 0.5) / samples
    mask = inside(shape, (xs[None, :] - x) / radius, (ys[:, None] - y) / radius)
    blocks = mask.reshape(rows.stop - rows.start, samples, columns.stop - columns.start, samples)
    return blocks.mean(axis=(1, 3), dtype=np.float32), rows, columns


def draw(scene: Scene, layout: NDArray[np.float64], height: int, width: int) -> NDArray[np.uint8]:
    """Draw a layout (frames, things, 3) as pixels (frames, height, width, 3)."""
    canvas = np.empty((len(layout), height, width, 3), np.float32)
    canvas[:] = PALETTE[scene.background]
    for frame, places in zip(canvas, layout, strict=True):
        for thing, place in zip(scene.things, places, strict=True):
            share, rows, columns = coverage(thing.shape, place, height, width)
            color = np.array(PALETTE[thing.color], np.float32)
            frame[rows, columns] += share[..., None] * (color - frame[rows, columns])
    return np.rint(canvas).astype(np.uint8)


WORDS: tuple[str, ...] = (
    *(",", "a", "an", "the", "on", "with", "and", "to", "of", "background", "moving"),
    *("left", "right", "up", "down", "above", "below", "small", "large", "little", "big"),
    *COLORS,
    *SHAPES,
)
VOCABULARY: dict[str, int] = {word: i for i, word in enumerate(("<pad>", "</s>", "<unk>", *WORDS))}
PAD, END, UNKNOWN = 0, 1, 2
_SIZE_WORDS: dict[str, tuple[str, ...]] = {
    "small": ("small", "small", "small", "little"),
    "normal": ("",),
    "large": ("large", "large", "large", "big"),
}


def tokenize(caption: str) -> list[int]:
    """Word ids of a caption, with the end mark: what the exported tokenizer gives, without its padding."""
    return [*(VOCABULARY.get(word, UNKNOWN) for word in re.findall(r"\w+|[^\w\s]+", caption.lower())), END]


def phrase(thing: Thing, rng: random.Random | None, article: bool) -> str:
    """A thing in words, such as "a small red circle"."""
    size = rng.choice(_SIZE_WORDS[thing.size]) if rng else _SIZE_WORDS[thing.size][0]
    words = [word for word in (size, thing.color, thing.shape) if word]
    if article:
        words.insert(0, "an" if words[0][0] in "aeiou" else "a")
    return " ".join(words)


def caption(scene: Scene, rng: random.Random | None = None) -> str:
    """Say a scene in words: plainly without `rng`, with changing order, articles and joints with one."""
    article = rng is None or rng.random() < 0.7
    things = [phrase(thing, rng, article) for thing in scene.things]
    motion = f" moving {scene.motion}" if scene.motion else ""
    relation = scene.relation or ""
    if rng and relation in ("left of", "right of") and rng.random() < 0.15:
        relation = f"to the {relation}"
    subject = f" {relation} ".join(things)
    background = f"{scene.background} background"
    if rng is None or rng.random() < 0.5:
        return f"{subject}{motion} on {'an' if scene.background == 'orange' else 'a'} {background}"
    style = rng.choice(("comma", "comma", "first", "on", "with", "late"))
    if style == "comma":
        return f"{subject}{motion}, {background}"
    if style == "first":
        return f"{background}, {subject}{motion}"
    if style == "with":
        return f"a {background} with {subject}{motion}"
    if style == "late" and article:
        return f"{subject} on a {background}{motion}"
    return f"{subject}{motion} on {scene.background}"
