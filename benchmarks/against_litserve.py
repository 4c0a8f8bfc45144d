"""The bundled model behind diffgen and behind LitServe: throughput of many clients, and what one of them feels.

    pip install litserve
    python benchmarks/against_litserve.py [--rounds 3] [--clients 8] [--requests 2] [--batches 1 2 4 8] [--threads 1]
        [--parts mixed large short]

Each side has one process with the model, warm and with as many threads; they take turns, and must draw the same. The
LitServe API here calls the diffusers pipeline, once for those of a batch that have one size and number of steps. Its
best setting is the batch size that was fastest for the same clients. The bars are 1.3 times its throughput for mixed
pictures of 64 to 128 px, and 1.0 times at 256 px.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx2
import numpy as np

from diffgen import DiffGenerator
from diffgen.loading.hub import BUNDLED

try:
    import litserve
except ImportError:
    raise SystemExit("LitServe is not installed: pip install litserve") from None

Case = dict[str, Any]
Ask = Callable[..., Any]  # draws a case; leaves its server after so many seconds

SAME: Case = {"guidance_scale": 4.0, "max_sequence_length": 32}
SHORT: Case = {
    "prompt": "a red circle",
    "seed": 1,
    "width": 64,
    "height": 64,
    "num_inference_steps": 5,
    "num_frames": 1,
}
LONG: Case = {**SHORT, "width": 128, "height": 128, "num_frames": 9, "num_inference_steps": 40}
PARTS = ["mixed", "large", "short"]
_BATCH_WAIT_S = 0.05
_STAGGER_S = 0.1
_AHEAD_S = 0.3
_START_S = 300.0


class Draw(litserve.LitAPI):
    """What LitServe serves."""

    def setup(self, device: str) -> None:
        import diffusers
        import torch
        import transformers

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        for library in (diffusers, transformers):
            library.utils.logging.disable_progress_bar()
        self.pipe = diffusers.WanPipeline.from_pretrained(BUNDLED, dtype=torch.float32, use_safetensors=True)
        self.pipe.set_progress_bar_config(disable=True)

    def predict(self, inputs: Any) -> Any:
        cases = [inputs] if isinstance(inputs, dict) else inputs
        alike: dict[tuple[int, ...], list[int]] = {}
        for index, case in enumerate(cases):
            kind = tuple(case[name] for name in ("width", "height", "num_frames", "num_inference_steps"))
            alike.setdefault(kind, []).append(index)
        drawn: dict[int, bytes] = {}
        for indices in alike.values():
            drawn |= zip(indices, self._draw([cases[index] for index in indices]), strict=True)
        found = [drawn[index] for index in range(len(cases))]
        return found[0] if isinstance(inputs, dict) else found

    def _draw(self, cases: Sequence[Case]) -> list[bytes]:
        import torch

        settings = {name: value for name, value in cases[0].items() if name not in ("prompt", "seed")}
        generators = [torch.Generator().manual_seed(case["seed"]) for case in cases]
        prompts = [case["prompt"] for case in cases]
        frames = self.pipe(prompts, generator=generators, output_type="np", **settings, **SAME).frames
        return [pixels.tobytes() for pixels in (np.asarray(frames) * 255).round().astype(np.uint8)]

    # LitServe reads the type of an answer from here: without one, it is passed on as it is.
    def encode_response(self, output):
        from fastapi import Response

        return Response(output)


def serve(port: int, batch: int) -> None:
    api = Draw(max_batch_size=batch, batch_timeout=_BATCH_WAIT_S if batch > 1 else 0.0)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=False)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="error")


@contextlib.contextmanager
def litserve_side(batch: int, threads: int) -> Iterator[Ask]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--serve", str(port), "--batches", str(batch)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(command, start_new_session=True, env=environment, stdout=subprocess.DEVNULL)
    local = threading.local()
    url = f"http://127.0.0.1:{port}"

    def ask(case: Case, leave_after: float | None = None) -> bytes:
        if not hasattr(local, "client"):
            local.client = httpx2.Client(base_url=url)
        answer = local.client.post("/predict", json=case, timeout=leave_after)
        answer.raise_for_status()
        return answer.content

    try:
        _wait_for(url, process)
        yield ask
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx2.TransportError):
            if httpx2.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise SystemExit("LitServe has not become ready")


@contextlib.contextmanager
def diffgen_side(threads: int) -> Iterator[Ask]:
    with DiffGenerator.from_pretrained(device="cpu", threads=threads) as generator:

        def ask(case: Case, leave_after: float | None = None) -> bytes:
            handle = generator.submit(**case, **SAME)
            try:
                return handle.result(leave_after).pixels.tobytes()
            except TimeoutError:
                handle.cancel()
                raise

        yield ask


def work(clients: int, requests: int, sizes: Sequence[int]) -> list[list[Case]]:
    """Of each client, its requests, one after the other."""
    draw = random.Random(1)

    def case(seed: int) -> Case:
        size, steps = draw.choice(sizes), draw.randint(4, 12)
        prompt = f"a {draw.choice(['red', 'green', 'blue', 'white'])} {draw.choice(['circle', 'star'])}"
        return {**SHORT, "prompt": prompt, "seed": seed, "width": size, "height": size, "num_inference_steps": steps}

    return [[case(client) for _ in range(requests)] for client in range(clients)]


def throughput(ask: Ask, plan: list[list[Case]]) -> float:
    """Requests a second, of clients that start one after the other."""

    def client(index: int) -> None:
        time.sleep(index * _STAGGER_S)
        for case in plan[index]:
            ask(case)

    threads = [threading.Thread(target=client, args=(index,)) for index in range(len(plan))]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(map(len, plan)) / (time.perf_counter() - began)


def short(ask: Ask) -> float:
    """Seconds of a short request."""
    began = time.perf_counter()
    ask(SHORT)
    return time.perf_counter() - began


def short_behind_long(ask: Ask) -> float:
    long = threading.Thread(target=ask, args=(LONG,))
    long.start()
    time.sleep(_AHEAD_S)
    taken = short(ask)
    long.join()
    return taken


def short_after_leaving(ask: Ask) -> float:
    """Where the client of a long request has just left its server."""
    with contextlib.suppress(httpx2.TimeoutException, TimeoutError):
        ask(LONG, _AHEAD_S)
        raise SystemExit("the long request is too short")
    return short(ask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=2, help="of each client")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8], help="LitServe's settings to try")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve, options.batches[0])
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # LitServe's processes are ended too
    what = f"{options.clients} clients, {options.requests} requests each, {options.threads} thread(s)"
    print(f"{what}, median of {options.rounds} rounds; ratio: how much better diffgen is")
    print(f"{'':44} {'LitServe':>9} {'diffgen':>9} {'ratio':>6} {'bar':>4}")
    with diffgen_side(options.threads) as ours:
        crowds = {"mixed": ("mixed, 64 to 128 px", (64, 96, 128), "1.3"), "large": ("256 px", (256,), "1.0")}
        for name, sizes, bar in (crowd for part, crowd in crowds.items() if part in options.parts):
            plan = work(options.clients, options.requests, sizes)
            batch = _best_batch(options, plan)
            with litserve_side(batch, options.threads) as theirs:
                _check_same(theirs, ours)
                speeds = _in_turn(options.rounds, lambda ask, plan=plan: throughput(ask, plan), theirs, ours)
            _print(f"requests/s, {name} (LitServe: batch {batch})", *speeds, bar)
        if "short" not in options.parts:
            return
        with litserve_side(1, options.threads) as theirs:
            for name, run in (
                ("s of a short request alone", short),
                ("s of one behind a long one", short_behind_long),
                ("s of one after the long one's client left", short_after_leaving),
            ):
                slow, fast = _in_turn(options.rounds, run, theirs, ours)
                _print(name, slow, fast, ratio=slow / fast)


def _best_batch(options: argparse.Namespace, plan: list[list[Case]]) -> int:
    speeds: dict[int, float] = {}
    for batch in options.batches:
        with litserve_side(batch, options.threads) as ask:
            short(ask)
            speeds[batch] = max(throughput(ask, plan) for _ in range(2))
    return max(speeds, key=speeds.__getitem__)


def _check_same(theirs: Ask, ours: Ask) -> None:
    one, other = (np.frombuffer(ask(SHORT), np.uint8).astype(int) for ask in (theirs, ours))
    if np.abs(one - other).max() > 1:
        raise SystemExit("the two sides draw different pictures")


def _in_turn(rounds: int, run: Callable[[Ask], float], *sides: Ask) -> list[float]:
    """Medians; a first round does not count."""
    found = [[run(ask) for ask in sides] for _ in range(1 + rounds)][1:]
    return [statistics.median(values) for values in zip(*found, strict=True)]


def _print(name: str, theirs: float, ours: float, bar: str = "", ratio: float | None = None) -> None:
    ratio = ours / theirs if ratio is None else ratio
    print(f"{name:44} {theirs:9.3f} {ours:9.3f} {ratio:6.2f} {bar:>4}", flush=True)


if __name__ == "__main__":
    main()
