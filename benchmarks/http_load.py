"""Many clients of ``diffgen serve`` at a time, against as many of the same model in Python.

    python benchmarks/http_load.py [--clients 32] [--requests 8] [--rounds 2] [--steps 4] [--sizes 64 96 128]

Each client sends its next request when it has its answer: over HTTP a PNG in base64, in Python an array. Rounds of
both alternate; both servers live throughout. Meanwhile /health is asked five times a second. CPU seconds are those of
all processes, clients included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx2
import psutil

from diffgen import DiffGenerator
from diffgen.params import Limits

HEALTH_S = 0.2

Send = Callable[[int], "tuple[int, float]"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=8, help="of each client in a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 96, 128], help="in turn, in pixels")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    def body(number: int) -> dict[str, Any]:
        side = options.sizes[number % len(options.sizes)]
        size = {"width": side, "height": side}
        return {"prompt": "a red circle", "seed": number, "num_inference_steps": options.steps, **size}

    limits = Limits(queue=2 * options.clients)
    generator = DiffGenerator.from_pretrained(device="cpu", threads=options.threads, limits=limits)
    with generator, serving(options) as (server, url), httpx2.Client(base_url=url, timeout=600) as http:

        def over_http(seed: int) -> tuple[int, float]:
            answer = http.post("/v1/images/generations", json=body(seed)).raise_for_status().json()
            return answer["data"][0]["width"], answer["timings"]["total"]

        def in_python(seed: int) -> tuple[int, float]:
            result = generator.generate(**body(seed))
            return result.params.width, result.timings["total"]

        sides: dict[str, Send] = {"Python": in_python, "HTTP": over_http}
        probes: dict[str, list[float]] = {"idle": [], "under load": []}
        figures: dict[str, list[Round]] = {name: [] for name in sides}
        for send in sides.values():
            in_parallel(send, options.clients, 1)
        with asking(http, probes["idle"]):
            time.sleep(20 * HEALTH_S)
        memory = []
        for _ in range(options.rounds):
            figures["Python"].append(in_parallel(in_python, options.clients, options.requests))
            with asking(http, probes["under load"]):
                figures["HTTP"].append(in_parallel(over_http, options.clients, options.requests))
            memory.append(psutil.Process(server.pid).memory_info().rss / 2**20)
    what = f"{options.clients} clients, {options.requests} requests each a round, {options.rounds} round(s)"
    print(f"{what}, {options.steps} steps, {options.sizes} px, {options.threads} thread(s)")
    report(figures)
    for name, seconds in probes.items():
        worst = f"p50 {1000 * quantile(seconds, 50):.1f} ms, p99 {1000 * quantile(seconds, 99):.1f} ms"
        print(f"/health {name}: {worst}, most {1000 * max(seconds):.1f} ms, of {len(seconds)}")
    print(f"memory of the HTTP process after the first and the last round: {memory[0]:.0f}, {memory[-1]:.0f} MB")


class Answer(NamedTuple):
    """The size asked for, seconds to the answer, and how many of them the request was at the ranks."""

    side: int
    seconds: float
    at_ranks: float


class Round(NamedTuple):
    """What one round took: wall and CPU seconds, and its answers."""

    wall: float
    cpu: float
    answers: list[Answer]


def in_parallel(send: Send, clients: int, requests: int) -> Round:
    answers: list[Answer] = []

    def client(number: int) -> None:
        for turn in range(requests):
            began = time.perf_counter()
            side, at_ranks = send(number * requests + turn)
            answers.append(Answer(side, time.perf_counter() - began, at_ranks))

    began, before = time.perf_counter(), cpu_seconds()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))
    return Round(time.perf_counter() - began, cpu_seconds() - before, answers)


def cpu_seconds() -> float:
    """Of this process and all below it."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def report(figures: dict[str, list[Round]]) -> None:
    def of(rounds: list[Round], side: int | None = None) -> list[Answer]:
        return [answer for each in rounds for answer in each.answers if side in (None, answer.side)]

    def seconds(per_cent: int, side: int | None = None) -> Callable[[list[Round]], float]:
        return lambda rounds: quantile([answer.seconds for answer in of(rounds, side)], per_cent)

    rows: dict[str, Callable[[list[Round]], float]] = {
        "requests a second": lambda rounds: len(of(rounds)) / sum(each.wall for each in rounds),
        "CPU s a request": lambda rounds: sum(each.cpu for each in rounds) / len(of(rounds)),
        "s to the answer, mean": lambda rounds: statistics.fmean(answer.seconds for answer in of(rounds)),
        "p50": seconds(50),
        "p99": seconds(99),
    }
    rows |= {f"p50 at {side} px": seconds(50, side) for side in sorted({each.side for each in of(figures["HTTP"])})}
    rows["not at the ranks, p50"] = lambda rounds: quantile([each.seconds - each.at_ranks for each in of(rounds)], 50)
    rows["not at the ranks, p90"] = lambda rounds: quantile([each.seconds - each.at_ranks for each in of(rounds)], 90)
    print(f"{'':22}" + "".join(f"{name:>10}" for name in figures) + f"{'ratio':>8}")
    for name, figure in rows.items():
        python, http = (figure(rounds) for rounds in figures.values())
        print(f"{name:22}{python:10.3f}{http:10.3f}{http / python:8.2f}")


def quantile(values: list[float], per_cent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[per_cent - 1]


@contextlib.contextmanager
def serving(options: argparse.Namespace) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``diffgen serve`` with the bundled model and its URL, once it is ready."""
    command: list[Any] = [sys.executable, "-m", "diffgen", "serve", "--port", 0, "--device", "cpu"]
    command += ["--threads", options.threads, "--limit", f"queue={2 * options.clients}", "--log-level", "warning"]
    with subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            url = next(line for line in server.stderr if "listening at" in line).split()[-1]
            next(line for line in server.stderr if line.endswith("is ready\n"))
            threading.Thread(target=server.stderr.read, daemon=True).start()
            yield server, url
        finally:
            server.terminate()


@contextlib.contextmanager
def asking(http: httpx2.Client, seconds: list[float]) -> Iterator[None]:
    """Ask /health every so often meanwhile; append how long each answer took."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(HEALTH_S):
            began = time.perf_counter()
            answer = http.get("/health")
            seconds.append(time.perf_counter() - began)
            assert json.loads(answer.content)["status"] == "ok", answer.text

    prober = threading.Thread(target=ask)
    prober.start()
    try:
        yield
    finally:
        stop.set()
        prober.join()


if __name__ == "__main__":
    main()
