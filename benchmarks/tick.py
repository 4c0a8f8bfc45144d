"""What a tick costs without its work: plan, broadcast, an empty unit, vote, commit.

    python benchmarks/tick.py [--ticks 2000] [--requests 1] [--threads 1]

Real ranks and groups, and a stage that computes nothing. CPU is rank 0's. The bar is a median below 1 ms at 2 ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from diffgen.args import RunArgs
from diffgen.distributed.groups import RankInfo, join
from diffgen.params import Limits, ModelSpec, SamplingParams
from diffgen.request import Req, Update
from diffgen.scheduler.plan import Plan, StageInfo
from diffgen.scheduler.scheduler import Scheduler
from diffgen.wire.messages import Submit
from diffgen.worker.executor import ParallelExecutor
from diffgen.worker.worker import GPUWorker

_WARM = 200


class Nothing:
    """Steps without work; every request shares them."""

    name, prepares, stepped = "denoise", False, True

    def units(self, req: Req) -> int:
        return req.params.num_inference_steps or 1

    def batch_key(self, req: Req) -> str:
        return "all"

    def run(self, reqs: Sequence[Req], ctx: Any) -> list[Update]:
        return [Update(latents=torch.zeros(16)) for _ in reqs]


class Empty:
    stages = (Nothing(),)
    preview = None
    spec = ModelSpec(
        name="empty",
        family="empty",
        defaults={"width": 64, "height": 64, "num_frames": 1, "num_inference_steps": 1},
        size_multiple=1,
        frame_stride=0,
        guidance=None,
    )


def rank_main(rank: int, ranks: int, folder: str, ticks: int, requests: int) -> None:
    control = join(RankInfo(rank, ranks), Path(folder) / "rendezvous", None)
    worker = GPUWorker(Empty(), ParallelExecutor(torch.device("cpu")), control)
    if rank:
        decoder = msgspec.msgpack.Decoder(Plan)
        while not (plan := decoder.decode(control.broadcast())).stop:
            worker.tick(plan)
        return
    scheduler = Scheduler(
        Empty.spec, Limits(steps=10**9), RunArgs(num_gpus=ranks), "e", stages=[StageInfo("denoise", stepped=True)]
    )
    params = SamplingParams(prompt="a" * 200, num_inference_steps=10**8)
    for number in range(requests):
        scheduler.handle(b"client", Submit(str(number), params))
    taken, busy = [], 0.0
    for number in range(_WARM + ticks):
        if number == _WARM:
            busy = time.process_time()
        began = time.perf_counter()
        scheduler.expire()
        plan = scheduler.plan()
        control.broadcast(msgspec.msgpack.encode(plan))
        started = time.perf_counter()
        outcomes, _ = worker.tick(plan)
        for admit in plan.admit:
            if admit.id not in plan.ids:
                scheduler.place(admit.id, worker.position(admit.id))
        scheduler.commit(outcomes, time.perf_counter() - started)
        taken.append(time.perf_counter() - began)
    busy = time.process_time() - busy
    control.broadcast(msgspec.msgpack.encode(scheduler.stop()))
    print(json.dumps([busy, taken[_WARM:]]))


def measure(ranks: int, ticks: int, requests: int, threads: int) -> tuple[float, list[float]]:
    """Rank 0's CPU seconds in all, and wall seconds of each tick."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--ticks", str(ticks), "--requests", str(requests)]
        command += ["--threads", str(threads), "--folder", folder, "--ranks", str(ranks), "--rank"]
        others = [subprocess.Popen([*command, str(rank)]) for rank in range(1, ranks)]
        try:
            told = subprocess.run([*command, "0"], check=True, stdout=subprocess.PIPE, text=True).stdout
        finally:
            for other in others:
                other.wait(60)
    busy, taken = json.loads(told)
    return busy, taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ticks", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=1, help="requests in flight, which share every unit")
    parser.add_argument("--threads", type=int, default=1)
    for name in ("--rank", "--ranks", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.rank is not None:
        rank_main(int(options.rank), int(options.ranks), options.folder, options.ticks, options.requests)
        sys.stdout.flush()
        os._exit(0)
    print(f"{options.ticks} ticks, {options.requests} request(s) in each")
    print(f"{'ranks':>5} {'median us':>10} {'p10 us':>8} {'p90 us':>8} {'CPU us':>8} {'median ratio':>13}")
    first = None
    for ranks in (1, 2):
        busy, taken = measure(ranks, options.ticks, options.requests, options.threads)
        deciles = [1e6 * each for each in statistics.quantiles(taken, n=10)]
        first, cpu = first or deciles[4], 1e6 * busy / options.ticks
        print(f"{ranks:5} {deciles[4]:10.0f} {deciles[0]:8.0f} {deciles[8]:8.0f} {cpu:8.0f} {deciles[4] / first:13.2f}")


if __name__ == "__main__":
    main()
