"""From a cold process to the first denoising step: DiffGenerator against bare ``from_pretrained``. And to the end of
``diffgen --help``, against a Python that does nothing.

    python benchmarks/startup.py [--rounds 3] [--model-path FOLDER]

Each round starts a new Python process for either side, in turns; files are in the page cache after the first round,
which is not counted.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time

from diffgen.loading.hub import BUNDLED

BARE = """
import sys, torch, diffusers
torch.set_num_threads(1)
class FirstStep(Exception): pass
def stop(pipe, step, timestep, values): raise FirstStep
pipe = diffusers.DiffusionPipeline.from_pretrained(sys.argv[1], dtype=torch.float32, use_safetensors=True)
pipe.set_progress_bar_config(disable=True)
try:
    pipe(prompt="a red circle", width=128, height=128, num_frames=1, num_inference_steps=2, max_sequence_length=20,
         callback_on_step_end=stop)
except FirstStep:
    pass
"""
OURS = """
import sys
from diffgen import DiffGenerator
with DiffGenerator.from_pretrained(sys.argv[1], device="cpu", threads=1) as generator:
    handle = generator.submit("a red circle", width=128, height=128, num_frames=1, num_inference_steps=2,
                              max_sequence_length=20)
    for event in handle.events():
        if getattr(event, "stage", None) == "denoise":
            break
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model-path", default=str(BUNDLED), help="folder of a text-to-video model")
    options = parser.parse_args()
    sides = {"diffusers": BARE, "diffgen": OURS}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number in range(options.rounds + 1):
        for name, code in sides.items():
            seconds = _measured([sys.executable, "-c", code, options.model_path])
            if number:
                taken[name].append(seconds)
    print(f"cold process to first step and out again, 1 thread, median of {options.rounds} rounds")
    print(f"{'':10} {'wall s':>8} {'CPU s':>8} {'wall ratio':>11} {'CPU ratio':>10}")
    medians = {name: [statistics.median(values) for values in zip(*rows, strict=True)] for name, rows in taken.items()}
    wall, cpu = medians["diffusers"]
    for name, (its_wall, its_cpu) in medians.items():
        print(f"{name:10} {its_wall:8.2f} {its_cpu:8.2f} {its_wall / wall:11.2f} {its_cpu / cpu:10.2f}")
    short = {"diffgen --help": ["-m", "diffgen", "--help"], "python": ["-c", ""]}
    for name, arguments in short.items():
        seconds = [_measured([sys.executable, *arguments])[0] for _ in range(10)]
        print(f"{name}: median {statistics.median(seconds):.3f} s of 10, at most {max(seconds):.3f} s")


def _measured(command: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a process with all its children."""

    def cpu() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    wall, busy = time.perf_counter(), cpu()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - wall, cpu() - busy


if __name__ == "__main__":
    main()
