"""Requests that come together against one after the other: what sharing steps saves.

    python benchmarks/batches.py [--rounds 3] [--steps 8] [--sizes 64 128 256] [--counts 1 2 4 8] [--threads 1]

Seconds a request, as ratios to one by itself; below 1 sharing is faster. The server decides by its own measurements
how many share a step, as it does for its users: the last column tells how many did. A few minutes.
"""

from __future__ import annotations

import argparse
import statistics
import time

import psutil

from diffgen import DiffGenerator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    print(f"{options.steps} steps, {options.threads} thread(s), median of {options.rounds} rounds after one")
    heads = f"{'wall s each':>12} {'CPU s each':>11} {'wall ratio':>11} {'CPU ratio':>10} {'shared by':>10}"
    print(f"{'px':>4} {'requests':>9} {heads}")
    with DiffGenerator.from_pretrained(device="cpu", threads=options.threads) as generator:
        rank = psutil.Process(generator.ranks()[0].pid)
        for size in options.sizes:
            first = None
            for count in options.counts:
                runs = [_run(generator, rank, size, count, options.steps) for _ in range(options.rounds + 1)][1:]
                wall, cpu, shared = (statistics.median(values) for values in zip(*runs, strict=True))
                first = first or (wall, cpu)
                ratios = f"{wall / first[0]:11.2f} {cpu / first[1]:10.2f}"
                print(f"{size:4} {count:9} {wall:12.4f} {cpu:11.4f} {ratios} {shared:10.1f}", flush=True)


def _run(
    generator: DiffGenerator, rank: psutil.Process, size: int, count: int, steps: int
) -> tuple[float, float, float]:
    """Wall and CPU seconds a request, and requests in a denoising unit on average."""
    before = generator.status()
    wall, busy = time.perf_counter(), sum(rank.cpu_times()[:2])
    prompts = [f"a red circle {number}" for number in range(count)]
    generator.generate(prompts, width=size, height=size, num_inference_steps=steps, seed=1, raise_errors=True)
    taken = (time.perf_counter() - wall) / count, (sum(rank.cpu_times()[:2]) - busy) / count
    after = generator.status()
    units = {n: each - before.batches.get(n, 0) for n, each in after.batches.items()}
    # All other stages run alone: what is left of the units of one are denoising steps.
    alone = units.pop(1, 0) - sum(
        each - before.units.get(stage, 0) for stage, each in after.units.items() if stage != "denoise"
    )
    ticks = alone + sum(units.values())
    return *taken, (alone + sum(n * each for n, each in units.items())) / ticks


if __name__ == "__main__":
    main()
