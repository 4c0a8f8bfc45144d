"""Draw the README's pictures with a shapes model: `python scripts/sample_shapes.py --out docs/samples`.

The first results are kept, as they come: no seed is picked by hand.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import shapes_generate

STILLS: tuple[str, ...] = (
    "a red circle on a blue background",
    "a large yellow star on a purple background",
    "a small green square on a white background",
    "red triangle, white background",
    "a white background with a large black square",
    "a big orange circle on green",
    "a red circle left of a green square on a black background",
    "a small yellow triangle above a blue star on a white background",
    "white star right of purple circle, orange background",
    "a green circle below a red triangle on a yellow background",
    "blue background, white square left of yellow star",
    "a fluffy purple triangle on a sunny green background",
)
CLIPS: tuple[str, ...] = (
    "a large white star moving left on a purple background",
    "a red circle moving down on a white background",
    "blue background, yellow square moving right",
)


def main() -> None:
    """Write shapes-samples.png and shapes-clip.gif."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("diffgen/shapes"))
    parser.add_argument("--out", type=Path, default=Path("docs/samples"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frames", type=int, default=17)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    pipeline = shapes_generate.load(arguments.model)
    settings = shapes_generate.SamplingSettings()
    stills = [shapes_generate.Job(words, arguments.seed + index) for index, words in enumerate(STILLS)]
    items = zip(shapes_generate.generate(pipeline, stills, settings), STILLS, strict=True)
    shapes_generate.sheet(items).quantize(128).save(arguments.out / "shapes-samples.png", optimize=True)
    clips = [shapes_generate.Job(words, arguments.seed + i, arguments.frames) for i, words in enumerate(CLIPS)]
    shapes_generate.save_clip(
        arguments.out / "shapes-clip.gif", shapes_generate.generate(pipeline, clips, settings), scale=1
    )


if __name__ == "__main__":
    main()
