"""Parity and timings of every layout on as many CUDA devices as there are, in bfloat16.

    python benchmarks/gpu_parallel.py [--models flux.1 wan-1.3b] [--steps 5] [--attention-backend xfuser]

Weights are random and of full size, made on the devices: nothing is downloaded. A layout's mean difference from one
device should be at most that of two batch sizes, which the first line of each table has. Not where that is 0, as on a
CPU: two batch sizes are equal in every bit there, and a layout that adds in another order rounds in other places.
"""

from __future__ import annotations

import argparse

import parallel
import torch

from diffgen.distributed.dims import AXES, ParallelDims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=parallel.MODELS, default=["flux.1", "wan-1.3b"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--attention-backend", choices=["native", "xfuser"], default="native")
    parser.add_argument("--cpus", type=int, default=0, help="so many processes on a CPU in the place of devices")
    options = parser.parse_args()
    devices, device = options.cpus or torch.cuda.device_count(), "cpu" if options.cpus else "cuda"
    if devices < 1:
        raise SystemExit("there is no CUDA device; --cpus 2 --models flux-tiny wan-tiny tries the layouts on a CPU")
    for model in options.models:
        found = [dims for dims in layouts(devices) if options.attention_backend == "native" or dims.sp > 1 == dims.tp]
        found = [dims for dims in found if not parallel.why_not(model, dims)]
        parallel.table(model, found, options.steps, device, "bfloat16", options.attention_backend)
        print()


def layouts(devices: int) -> list[ParallelDims]:
    """One axis over 2, 4 and 8 devices, and every pair of axes of two."""
    sizes = [size for size in (2, 4, 8) if size <= devices]
    found = [ParallelDims(**{axis: size}) for size in sizes for axis in AXES if axis != "cfg" or size == 2]
    if devices >= 4:
        pairs = [(first, second) for index, first in enumerate(AXES) for second in AXES[index + 1 :]]
        found += [ParallelDims(**{first: 2, second: 2}) for first, second in pairs]
    return found


if __name__ == "__main__":
    main()
