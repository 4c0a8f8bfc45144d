"""The bundled model's scenes and the scorer that reads them back from pixels."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import shapes_scene as scenes
import shapes_scorer as scorer
from numpy.typing import NDArray
from PIL import Image, ImageFilter

KINDS = ("one", "two", "motion")
Frames = NDArray[np.uint8]


def spoil(frames: Frames, rng: random.Random) -> Frames:
    """Blur and noise, at most as strong as would still please an eye."""
    radius = rng.uniform(0, 1.2) * frames.shape[1] / 128
    noise = np.random.default_rng(rng.getrandbits(32))
    spread = rng.uniform(0, 14)
    out = []
    for frame in frames:
        blurred = np.asarray(Image.fromarray(frame).filter(ImageFilter.GaussianBlur(radius)), np.float64)
        out.append(np.rint(blurred + noise.normal(0, spread, frame.shape)).clip(0, 255).astype(np.uint8))
    return np.stack(out)


@pytest.fixture(scope="module")
def drawn() -> list[tuple[str, scenes.Scene, Frames]]:
    """Spoilt drawings of every kind and size; of clips, the first and the last frame."""
    rng = random.Random(17)
    out = []
    for index in range(360):
        kind = KINDS[index % 3]
        scene = scenes.sample_scene(rng, kind, unseen=rng.random() < 1 / 3)
        layout = scenes.sample_layout(scene, rng, rng.choice((5, 9, 17)) if kind == "motion" else 1)
        size = rng.choice((96, 128, 128, 192))
        picked = layout if len(layout) == 1 else layout[[0, -1]]
        out.append((kind, scene, spoil(scenes.draw(scene, picked, size, size), rng)))
    return out


def shares(marks: Iterator[dict[str, bool]]) -> dict[str, float]:
    """How often each aspect is right."""
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for mark in marks:
        right.update({aspect: int(value) for aspect, value in mark.items()})
        total.update(mark.keys())
    return {aspect: right[aspect] / total[aspect] for aspect in total}


def test_the_scorer_reads_spoilt_drawings(drawn: list[tuple[str, scenes.Scene, Frames]]) -> None:
    got = shares(scorer.score(scene, frames) for _, scene, frames in drawn)
    assert set(got) == {"background", "count", "color", "shape", "size", "relation", "direction"}
    assert {aspect: share for aspect, share in got.items() if share < 0.99} == {}


def test_the_scorer_is_at_chance_on_wrong_captions(drawn: list[tuple[str, scenes.Scene, Frames]]) -> None:
    def swapped() -> Iterator[dict[str, bool]]:
        for index, (kind, _, frames) in enumerate(drawn):
            other, scene, _ = drawn[(index + 3) % len(drawn)]
            assert kind == other
            yield scorer.score(scene, frames)

    got = shares(swapped())
    # One of 8 colours, 4 shapes, 3 sizes and 4 directions; with two things, or a relation of the right colours, less.
    bounds = {"background": 0.2, "color": 0.2, "shape": 0.32, "size": 0.42, "direction": 0.36, "relation": 0.1}
    assert {aspect: got[aspect] for aspect, bound in bounds.items() if got[aspect] > bound} == {}


def test_a_shapeless_blob_is_no_shape() -> None:
    frames = np.full((1, 128, 128, 3), scenes.PALETTE["white"], np.uint8)
    frames[0, 60:68, 20:108] = scenes.PALETTE["red"]
    (seen,) = scorer.read_frame(frames[0]).things
    assert (seen.color, seen.shape) == ("red", None)


def test_a_wrong_number_of_things_is_noticed() -> None:
    scene = scenes.Scene("white", (scenes.Thing("red", "circle"), scenes.Thing("blue", "star")), relation="left of")
    frames = scenes.draw(scene, scenes.sample_layout(scene, random.Random(0)), 128, 128)
    alone = scenes.Scene("white", (scenes.Thing("red", "circle"),))
    marks = scorer.score(alone, frames)
    assert not marks["count"]
    assert marks["color"]
    assert marks["shape"]


def test_a_relation_turned_round_is_wrong() -> None:
    rng = random.Random(3)
    turned = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    for relation, opposite in turned.items():
        things = (scenes.Thing("red", "circle"), scenes.Thing("blue", "star"))
        scene = scenes.Scene("white", things, relation=relation)
        frames = scenes.draw(scene, scenes.sample_layout(scene, rng), 96, 96)
        assert scorer.score(scene, frames)["relation"]
        assert not scorer.score(scenes.Scene("white", things, relation=opposite), frames)["relation"]


def test_a_third_of_the_combinations_is_held_out_and_never_sampled() -> None:
    assert len(scenes.all_combinations()) == 224
    assert len(scenes.HELD_OUT) == 75
    assert scenes.held_out() == scenes.HELD_OUT
    rng = random.Random(1)
    for _ in range(300):
        for kind in KINDS:
            assert not scenes.HELD_OUT.intersection(scenes.sample_scene(rng, kind).combinations())
            assert scenes.HELD_OUT.issuperset(scenes.sample_scene(rng, kind, unseen=True).combinations())


def test_captions_hold_known_words_and_all_that_the_scene_says() -> None:
    rng = random.Random(2)
    for _ in range(300):
        scene = scenes.sample_scene(rng, rng.choice(KINDS))
        said = scenes.caption(scene, rng)
        assert scenes.UNKNOWN not in scenes.tokenize(said), said
        for word in (scene.background, *(w for t in scene.things for w in (t.color, t.shape))):
            assert word in said
        assert scene.relation is None or scene.relation in said
        assert scene.motion is None or f"moving {scene.motion}" in said


def test_the_plain_caption() -> None:
    thing = scenes.Thing("orange", "star", "large")
    assert scenes.caption(scenes.Scene("blue", (thing,), motion="up")) == (
        "a large orange star moving up on a blue background"
    )
    pair = (scenes.Thing("orange", "star"), scenes.Thing("red", "circle"))
    assert scenes.caption(scenes.Scene("black", pair, relation="above")) == (
        "an orange star above a red circle on a black background"
    )


def test_unknown_words_and_punctuation_are_tokens_of_their_own() -> None:
    ids = scenes.tokenize("Fluffy red circle, blue background!")
    names = {i: word for word, i in scenes.VOCABULARY.items()}
    assert [names[i] for i in ids] == ["<unk>", "red", "circle", ",", "blue", "background", "<unk>", "</s>"]


@pytest.mark.parametrize("shape", scenes.SHAPES)
def test_drawn_coverage_has_the_area_and_the_middle_of_the_shape(shape: str) -> None:
    place = np.array([0.413, 0.537, 0.18])
    share, rows, columns = scenes.coverage(shape, place, 128, 128)
    assert share.sum() / 128**2 == pytest.approx(scenes.UNIT_AREA[shape] * 0.18**2, rel=0.01)
    ys, xs = np.nonzero(share > 0.5)
    middle = ((xs.min() + xs.max() + 1) / 2 + columns.start, (ys.min() + ys.max() + 1) / 2 + rows.start)
    assert middle == pytest.approx((0.413 * 128, 0.537 * 128), abs=0.8)


def test_a_clip_moves_as_it_says_and_stays_in_the_frame() -> None:
    rng = random.Random(4)
    for direction, (dx, dy) in scenes.DIRECTIONS.items():
        for frames in (5, 9, 17):
            scene = scenes.Scene("black", (scenes.Thing("red", "star", "large"),), motion=direction)
            layout = scenes.sample_layout(scene, rng, frames)
            steps = np.diff(layout[:, 0, :2], axis=0)
            assert (steps @ np.array([dx, dy]) > 0).all()
            assert np.abs(steps @ np.array([dy, dx])).max() < 1e-9
            half = np.array(scenes.EXTENT["star"]) * layout[0, 0, 2]
            assert (layout[:, 0, :2] - half > 0).all()
            assert (layout[:, 0, :2] + half < 1).all()
