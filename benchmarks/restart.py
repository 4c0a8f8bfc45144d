"""A dead replica: how soon its clients are told and answered again, against a cold start.

    python benchmarks/restart.py [--rounds 3] [--num-gpus 2] [--model-path FOLDER]

A cold start is from nothing to the result of one step; a restart is from the kill of a rank to the same result.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time

from diffgen import DiffGenerator
from diffgen.loading.hub import BUNDLED
from diffgen.wire.messages import Restarting

SMALL = {"prompt": "a red circle", "width": 64, "height": 64, "num_frames": 1, "num_inference_steps": 1, "seed": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-gpus", type=int, default=2)
    parser.add_argument("--model-path", default=str(BUNDLED))
    options = parser.parse_args()
    cold, told, back = [], [], []
    for _ in range(options.rounds):
        began = time.perf_counter()
        with DiffGenerator.from_pretrained(
            options.model_path, num_gpus=options.num_gpus, device="cpu", log_level="error"
        ) as generator:
            generator.generate(**SMALL)
            cold.append(time.perf_counter() - began)
            handle = generator.submit(**{**SMALL, "num_inference_steps": 500})
            next(event for event in handle.events() if getattr(event, "stage", None) == "denoise")
            began = time.perf_counter()
            os.kill(generator.ranks()[-1].pid, signal.SIGKILL)
            next(event for event in handle.events() if isinstance(event, Restarting))
            told.append(time.perf_counter() - began)
            handle.cancel()
            generator.generate(**SMALL)
            back.append(time.perf_counter() - began)
    start = statistics.median(cold)
    print(f"{options.num_gpus} rank(s), median of {options.rounds} rounds")
    print(f"{'':12} {'s':>8} {'ratio':>6}")
    for name, values in (("cold start", cold), ("clients told", told), ("restart", back)):
        print(f"{name:12} {statistics.median(values):8.2f} {statistics.median(values) / start:6.2f}")


if __name__ == "__main__":
    main()
