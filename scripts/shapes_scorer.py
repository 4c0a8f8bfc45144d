"""Reads a scene back from pixels, by rules alone: colours, shapes, sizes, places, relation and direction."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import deque

import numpy as np
import shapes_scene as scenes
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

TEMPLATE = 48  # side of the grid on which shapes are compared
TEMPLATE_REACH = 1.9  # half the grid's side, in units of the square root of area over pi
LEAST_MATCH = 0.7  # a blob that overlaps no template by this much is no shape at all
LEAST_AREA = 0.006  # of the shorter side squared; the smallest star has 0.022
LEAST_TRAVEL = 0.04  # of the shorter side, over a whole clip


@dataclasses.dataclass(frozen=True)
class Seen:
    """One blob: its colour and shape (or None), its box's middle and radius in units of the shorter side."""

    color: str
    shape: str | None
    size: str
    x: float
    y: float
    radius: float


@dataclasses.dataclass(frozen=True)
class Reading:
    """What one frame shows."""

    background: str
    things: tuple[Seen, ...]


def nearest_color(rgb: Floats) -> str:
    """The palette's colour nearest to one (3,) of 0..255."""
    return min(scenes.COLORS, key=lambda name: float(np.abs(np.subtract(scenes.PALETTE[name], rgb)).sum()))


def blobs(mask: Mask) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Connected parts (rows, columns) of a mask, four neighbours to a pixel, largest first."""
    left = mask.copy()
    height, width = mask.shape
    found = []
    for row, column in zip(*np.nonzero(mask), strict=True):
        if not left[row, column]:
            continue
        left[row, column] = False
        queue, cells = deque([(row, column)]), []
        while queue:
            r, c = queue.popleft()
            cells.append((r, c))
            for nr, nc in ((r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)):
                if 0 <= nr < height and 0 <= nc < width and left[nr, nc]:
                    left[nr, nc] = False
                    queue.append((nr, nc))
        rows, columns = np.array(cells).T
        found.append((rows, columns))
    return sorted(found, key=lambda cells: -len(cells[0]))


def _grid() -> tuple[Floats, Floats]:
    """Points (TEMPLATE, TEMPLATE) of the comparison grid, x and y."""
    steps = (np.arange(TEMPLATE) + 0.5) / TEMPLATE * 2 * TEMPLATE_REACH - TEMPLATE_REACH
    return np.meshgrid(steps, steps)


@functools.cache
def templates() -> dict[str, Floats]:
    """Each shape on the comparison grid, its centre of mass in the middle and its area made pi."""
    fine_x, fine_y = np.meshgrid(*[(np.arange(512) + 0.5) / 512 * 4 - 2] * 2)
    out = {}
    for shape in scenes.SHAPES:
        full = scenes.inside(shape, fine_x, fine_y)
        middle = float(fine_y[full].mean())
        scale = math.sqrt(scenes.UNIT_AREA[shape] / math.pi)
        x, y = _grid()
        out[shape] = scenes.inside(shape, x * scale, y * scale + middle).astype(np.float64)
    return out


def match_shape(alpha: Floats) -> tuple[str | None, float]:
    """The shape that a soft mask (height, width) in [0, 1] overlaps best, and by how much."""
    mass = alpha.sum()
    rows, columns = np.indices(alpha.shape)
    middle_y, middle_x = (alpha * rows).sum() / mass, (alpha * columns).sum() / mass
    scale = math.sqrt(mass / math.pi)
    x, y = _grid()
    sampled = _bilinear(alpha, y * scale + middle_y, x * scale + middle_x)
    scores = {}
    for shape, template in templates().items():
        scores[shape] = np.minimum(sampled, template).sum() / np.maximum(sampled, template).sum()
    best = max(scores, key=lambda shape: scores[shape])
    return (best if scores[best] >= LEAST_MATCH else None), float(scores[best])


def _bilinear(image: Floats, rows: Floats, columns: Floats) -> Floats:
    """Values of an image between its pixels; 0 outside."""
    padded = np.pad(image, 1)
    rows = np.clip(rows + 1, 0, padded.shape[0] - 1.001)
    columns = np.clip(columns + 1, 0, padded.shape[1] - 1.001)
    r, c = rows.astype(int), columns.astype(int)
    fr, fc = rows - r, columns - c
    top = padded[r, c] * (1 - fc) + padded[r, c + 1] * fc
    bottom = padded[r + 1, c] * (1 - fc) + padded[r + 1, c + 1] * fc
    return top * (1 - fr) + bottom * fr


def size_of(radius: float) -> str:
    """The size word of a radius: thresholds lie midway, by ratio, between the ranges that are drawn."""
    names = list(scenes.SIZES)
    for smaller, larger in itertools.pairwise(names):
        if radius < math.sqrt(scenes.SIZES[smaller][1] * scenes.SIZES[larger][0]):
            return smaller
    return names[-1]


def read_frame(pixels: NDArray[np.uint8]) -> Reading:
    """Read one frame (height, width, 3) of bytes."""
    image = _smooth(pixels.astype(np.float64))
    height, width = image.shape[:2]
    side = min(height, width)
    edge = np.concatenate([image[:2].reshape(-1, 3), image[-2:].reshape(-1, 3), image[:, 0], image[:, -1]])
    ground = np.median(edge, axis=0)
    distance = np.linalg.norm(image - ground, axis=2)
    things = []
    for rows, columns in blobs(distance > 40):
        if len(rows) < LEAST_AREA * side**2:
            break
        deep = distance[rows, columns]
        core = deep >= np.quantile(deep, 0.5)
        color = np.median(image[rows[core], columns[core]], axis=0)
        axis = color - ground
        alpha = np.zeros((height, width))
        r0, r1, c0, c1 = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
        grow = 2
        box = (slice(max(r0 - grow, 0), r1 + grow), slice(max(c0 - grow, 0), c1 + grow))
        alpha[box] = np.clip((image[box] - ground) @ axis / (axis @ axis), 0, 1)
        alpha[alpha < 0.15] = 0
        part = np.zeros((height, width), bool)
        part[rows, columns] = True
        alpha[~_spread(part, grow)] = 0
        shape, _ = match_shape(alpha[box])
        area = alpha.sum() / side**2
        radius = math.sqrt(area / scenes.UNIT_AREA[shape or "circle"])
        solid = np.nonzero(alpha > 0.5)
        if not len(solid[0]):
            continue
        y, x = ((s.min() + s.max() + 1) / 2 / side for s in solid)
        things.append(Seen(nearest_color(color), shape, size_of(radius), float(x), float(y), radius))
    return Reading(nearest_color(ground), tuple(things))


def _spread(mask: Mask, by: int) -> Mask:
    """A mask grown by some pixels in the four directions."""
    for _ in range(by):
        wide = np.pad(mask, 1)
        mask = wide[1:-1, 1:-1] | wide[:-2, 1:-1] | wide[2:, 1:-1] | wide[1:-1, :-2] | wide[1:-1, 2:]
    return mask


def _smooth(image: Floats) -> Floats:
    """A 3 x 3 binomial blur, against noise."""
    padded = np.pad(image, ((1, 1), (1, 1), (0, 0)), mode="edge")
    down = padded[:-2] + 2 * padded[1:-1] + padded[2:]
    return (down[:, :-2] + 2 * down[:, 1:-1] + down[:, 2:]) / 16


def direction(readings: list[Reading]) -> str | None:
    """Where the largest blob goes between the first and the last frame; None if it hardly moves or goes askew."""
    first, last = readings[0].things, readings[-1].things
    if not first or not last:
        return None
    dx, dy = last[0].x - first[0].x, last[0].y - first[0].y
    along, across = max(abs(dx), abs(dy)), min(abs(dx), abs(dy))
    if along < LEAST_TRAVEL or across > along / 2:
        return None
    if abs(dx) > abs(dy):
        return "left" if dx < 0 else "right"
    return "up" if dy < 0 else "down"


def relation_holds(relation: str, first: Seen, second: Seen) -> bool:
    """Whether the first blob stands to the second as a relation says, plainly: more along it than across."""
    dx, dy = second.x - first.x, second.y - first.y
    along, across = {"left of": (dx, dy), "right of": (-dx, dy), "above": (dy, dx), "below": (-dy, dx)}[relation]
    return along > 0 and along > abs(across)


def assign(scene: scenes.Scene, seen: tuple[Seen, ...]) -> list[Seen | None]:
    """Which blob is meant by which thing of a caption: by colour first, then by shape; None where there is none."""
    left = list(seen)
    chosen: list[Seen | None] = [None] * len(scene.things)
    for index, thing in enumerate(scene.things):
        same = [s for s in left if s.color == thing.color]
        if same:
            chosen[index] = max(same, key=lambda s: (s.shape == thing.shape, s.radius))
            left.remove(chosen[index])
    for index, thing in enumerate(scene.things):
        if chosen[index] is None and left:
            chosen[index] = max(left, key=lambda s: (s.shape == thing.shape, s.radius))
            left.remove(chosen[index])
    return chosen


def score(scene: scenes.Scene, frames: NDArray[np.uint8]) -> dict[str, bool]:
    """Check frames (frames, height, width, 3) against a scene: aspect to right or wrong, for the aspects it has."""
    readings = [read_frame(frame) for frame in (frames if len(frames) == 1 else frames[[0, -1]])]
    reading = readings[0]
    found = assign(scene, reading.things)
    pairs = list(zip(scene.things, found, strict=True))
    marks = {
        "background": all(r.background == scene.background for r in readings),
        "count": all(len(r.things) == len(scene.things) for r in readings),
        "color": all(s is not None and s.color == t.color for t, s in pairs),
        "shape": all(s is not None and s.shape == t.shape for t, s in pairs),
        "size": all(s is not None and s.size == t.size for t, s in pairs),
    }
    if scene.relation is not None:
        colors = all(s is not None and s.color == t.color for t, s in pairs)
        marks["relation"] = colors and relation_holds(scene.relation, *[s for s in found if s is not None])
    if scene.motion is not None and len(frames) > 1:
        marks["direction"] = direction(readings) == scene.motion
    return marks


def places(frames: NDArray[np.uint8]) -> list[tuple[float, float]]:
    """Where the things of the first frame (frames, height, width, 3) lie, largest first."""
    return [(seen.x, seen.y) for seen in read_frame(frames[0]).things]
