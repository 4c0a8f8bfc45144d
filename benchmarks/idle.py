"""What a server costs that has nothing to do: CPU of each of its processes.

    python benchmarks/idle.py [--seconds 20] [--num-gpus 2]

After a first request, so that all threads are there. The bar is 1 % of a core a rank.
"""

from __future__ import annotations

import argparse
import time

import psutil

from diffgen import DiffGenerator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--num-gpus", type=int, default=2)
    options = parser.parse_args()
    with DiffGenerator.from_pretrained(device="cpu", threads=1, num_gpus=options.num_gpus) as generator:
        generator.generate("a red circle", width=64, height=64, num_inference_steps=2)
        ranks = {status.pid: f"rank {status.rank}" for status in generator.ranks()}
        me = psutil.Process()
        processes = [me, *me.children(recursive=True)]
        before = {process.pid: sum(process.cpu_times()[:2]) for process in processes}
        time.sleep(options.seconds)
        print(f"{options.seconds:g} s without work, {options.num_gpus} rank(s)")
        print(f"{'process':16} {'CPU ms':>8} {'of a core':>10} {'threads':>8}")
        for process in processes:
            name = "parent" if process == me else ranks.get(process.pid, process.name())
            busy = sum(process.cpu_times()[:2]) - before[process.pid]
            print(f"{name:16} {1000 * busy:8.0f} {busy / options.seconds:10.2%} {process.num_threads():8}")


if __name__ == "__main__":
    main()
