"""The bundled model draws what the prompt says, as far as a few seconds can show; its card has the figures."""

from __future__ import annotations

from collections import Counter

import pytest
import shapes_scene as scenes
import shapes_scorer as scorer

from diffgen import DiffGenerator

CIRCLE, STAR = scenes.Thing("red", "circle"), scenes.Thing("yellow", "star", "large")
SQUARE = scenes.Thing("green", "square", "small")
SCENES = (
    scenes.Scene("blue", (CIRCLE,)),
    scenes.Scene("purple", (STAR,)),
    scenes.Scene("white", (SQUARE,)),
    scenes.Scene("black", (CIRCLE, SQUARE), relation="left of"),
    scenes.Scene("white", (SQUARE, STAR), relation="above"),
    scenes.Scene("blue", (CIRCLE,), motion="left"),
    scenes.Scene("black", (STAR,), motion="down"),
)


@pytest.mark.slow
def test_pictures_and_clips_show_what_was_asked_for(bundled_generator: DiffGenerator) -> None:
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for scene in SCENES:
        result = bundled_generator.generate(scenes.caption(scene), seed=1, num_frames=5 if scene.motion else 1)
        marks = scorer.score(scene, result.pixels[0])
        asked.update(marks.keys())
        right.update(aspect for aspect, value in marks.items() if value)
    assert right["background"] == asked["background"]
    assert all(right[aspect] >= asked[aspect] - 1 for aspect in asked), f"{dict(right)} of {dict(asked)}"


def test_unknown_words_are_ignored(bundled_generator: DiffGenerator) -> None:
    words = "a fluffy red circle on a gorgeous blue background"
    result = bundled_generator.generate(words, seed=1)
    assert scorer.score(scenes.Scene("blue", (CIRCLE,)), result.pixels[0])["background"]
