"""A short image that comes while a long clip runs: its time against its time alone.

    python benchmarks/image_behind_video.py [--rounds 5] [--steps 5] [--size 128] [--frames 17] [--clip-steps 400]

The bar is at most twice its time alone, plus the clip's longest unit.
"""

from __future__ import annotations

import argparse
import statistics
import time

from diffgen import DiffGenerator
from diffgen.handle import GenerationHandle
from diffgen.wire.messages import Progress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--frames", type=int, default=17)
    parser.add_argument("--clip-steps", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    size = {"width": options.size, "height": options.size}
    with DiffGenerator.from_pretrained(device="cpu", threads=options.threads) as generator:

        def image() -> float:
            began = time.perf_counter()
            generator.generate("a red circle", seed=1, num_inference_steps=options.steps, **size)
            return time.perf_counter() - began

        def clip(steps: int) -> GenerationHandle:
            return generator.submit(
                "a red circle moving left", num_frames=options.frames, num_inference_steps=steps, seed=1, **size
            )

        image()
        unit = _longest_unit(clip(5))
        alone, behind = [], []
        for _ in range(options.rounds):
            alone.append(image())
            running = clip(options.clip_steps)
            next(event for event in running.events() if isinstance(event, Progress) and event.stage == "denoise")
            behind.append(image())
            assert not running.done()
            running.cancel()
    first, second = statistics.median(alone), statistics.median(behind)
    what = f"image of {options.steps} steps, clip of {options.frames} frames, {options.size} px"
    print(f"{what}, {options.threads} thread(s)")
    print(f"{'':24} {'median s':>9} {'ratio':>6}")
    print(f"{'alone':24} {first:9.3f} {1:6.2f}")
    print(f"{'behind the clip':24} {second:9.3f} {second / first:6.2f}")
    print(f"{'the clip' + chr(39) + 's longest unit':24} {unit:9.3f} {unit / first:6.2f}")
    print(f"{'behind, less that unit':24} {second - unit:9.3f} {(second - unit) / first:6.2f}")


def _longest_unit(handle: GenerationHandle) -> float:
    longest, last = 0.0, None
    for event in handle.events():
        if isinstance(event, Progress):
            now = time.perf_counter()
            longest = max(longest, 0.0 if last is None else now - last)
            last = now
    return longest


if __name__ == "__main__":
    main()
