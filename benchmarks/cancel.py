"""How many units run after a cancel, in each state of a request.

    python benchmarks/cancel.py [--rounds 10] [--size 128] [--frames 9] [--num-gpus 1]

Units are those that the server tells of after the call. The bar is at most one unit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from diffgen import DiffGenerator
from diffgen.errors import RequestCancelled
from diffgen.handle import Event
from diffgen.wire.messages import Progress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--frames", type=int, default=9)
    parser.add_argument("--num-gpus", type=int, default=1)
    options = parser.parse_args()
    sampling = {"width": options.size, "height": options.size, "num_frames": options.frames, "seed": 1}
    print(f"{options.frames} frames, {options.size} px, {options.num_gpus} rank(s), {options.rounds} rounds")
    print(f"{'cancelled in':14} {'units after, most':>18} {'seconds to the answer, median':>30} {'over a unit':>12}")
    with DiffGenerator.from_pretrained(device="cpu", threads=1, num_gpus=options.num_gpus, max_running=1) as generator:
        timings = generator.generate("a red circle", num_inference_steps=8, **sampling).timings
        step, latent_frames = timings["denoise"] / 8, (options.frames - 1) // 4 + 1
        unit = {"queue": step, "denoise": step, "decode": timings["decode"] / latent_frames}
        for state, seconds in unit.items():
            found = [_round(generator, state, sampling) for _ in range(options.rounds)]
            most, median = max(units for units, _ in found), statistics.median(taken for _, taken in found)
            print(f"{state:14} {most:18} {median:30.3f} {median / seconds:12.2f}")


def _round(generator: DiffGenerator, state: str, sampling: dict[str, Any]) -> tuple[int, float]:
    """Units that have run for the request after its cancel, and seconds until the answer."""
    steps = 2 if state == "decode" else 1000
    ahead = generator.submit("a red circle", num_inference_steps=1000, **sampling) if state == "queue" else None
    handle = generator.submit("a red circle", num_inference_steps=steps, **sampling)
    last = {"denoise": ("denoise", 3), "decode": ("denoise", steps)}.get(state)
    for event in handle.events():
        if last is None or (isinstance(event, Progress) and (event.stage, event.step) == last):
            break
    told: list[Event] = []
    handle.subscribe(told.append)
    before = len(told)
    began = time.perf_counter()
    handle.cancel()
    try:
        handle.result(timeout=60)
        raise AssertionError("it ended before it could be cancelled")
    except RequestCancelled:
        taken = time.perf_counter() - began
    if ahead is not None:
        ahead.cancel()
    return sum(isinstance(event, Progress) for event in told[before:]), taken


if __name__ == "__main__":
    main()
