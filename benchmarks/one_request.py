"""One request through DiffGenerator against the bare diffusers pipeline: same model, threads and work.

    python benchmarks/one_request.py [--rounds 5] [--steps 40] [--size 192] [--threads 1]

Both sides are loaded and warm; they take turns, so that a slow moment of the machine falls on both. The bar is 1.03.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import psutil
import torch

from diffgen import DiffGenerator
from diffgen.loading.hub import BUNDLED

PROMPT = "a red circle on a blue background"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--size", type=int, default=192)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pipe = _bare_pipeline()
    text_length = 20

    def bare() -> None:
        pipe(
            prompt=PROMPT,
            width=options.size,
            height=options.size,
            num_frames=1,
            num_inference_steps=options.steps,
            guidance_scale=5.0,
            max_sequence_length=text_length,
            generator=torch.Generator().manual_seed(1),
        )

    with DiffGenerator.from_pretrained(device="cpu", threads=options.threads) as generator:
        rank = psutil.Process(generator.ranks()[0].pid)

        def ours() -> None:
            generator.generate(
                PROMPT,
                width=options.size,
                height=options.size,
                num_frames=1,
                num_inference_steps=options.steps,
                guidance_scale=5.0,
                max_sequence_length=text_length,
                seed=1,
            )

        me = psutil.Process()
        sides: dict[str, tuple[Callable[[], None], list[psutil.Process]]] = {
            "diffusers": (bare, [me]),
            "diffgen": (ours, [me, rank]),
        }
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for run, _ in sides.values():
            run()
        for _ in range(options.rounds):
            for name, (run, processes) in sides.items():
                taken[name].append(_measured(run, processes))
    _print_table(taken, options)


def _bare_pipeline() -> object:
    import diffusers

    pipe = diffusers.WanPipeline.from_pretrained(BUNDLED, dtype=torch.float32, use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _measured(run: Callable[[], None], processes: list[psutil.Process]) -> tuple[float, float]:
    """Wall and CPU seconds of one run."""

    def cpu() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    wall, busy = time.perf_counter(), cpu()
    run()
    return time.perf_counter() - wall, cpu() - busy


def _print_table(taken: dict[str, list[tuple[float, float]]], options: argparse.Namespace) -> None:
    print(f"{options.steps} steps, {options.size} px, {options.threads} thread(s), median of {options.rounds} rounds")
    print(f"{'':10} {'wall s':>8} {'CPU s':>8} {'wall ratio':>11} {'CPU ratio':>10}")
    medians = {name: [statistics.median(values) for values in zip(*rows, strict=True)] for name, rows in taken.items()}
    wall, cpu = medians["diffusers"]
    for name, (its_wall, its_cpu) in medians.items():
        print(f"{name:10} {its_wall:8.3f} {its_cpu:8.3f} {its_wall / wall:11.3f} {its_cpu / cpu:10.3f}")


if __name__ == "__main__":
    main()
