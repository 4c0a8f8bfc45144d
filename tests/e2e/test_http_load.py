"""The commands of docs/http.md, and many clients at a time."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import psutil
import pytest
from http_server import SMALL, Server
from processes import wait_until

pytestmark = pytest.mark.slow
PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_pages_commands(http_server: Server, tmp_path: Path) -> None:
    """As they stand, but for the port and the key of this server, and the name of its model."""
    here = {"http://127.0.0.1:8000": http_server.url, "/models/shapes": "/models/tiny"}
    (tmp_path / ".curlrc").write_text(f'header = "Authorization: Bearer {http_server.key}"\nfail-with-body\n')
    for block in blocks("sh"):
        for ours, theirs in here.items():
            block = block.replace(ours, theirs)
        environment = {**os.environ, "CURL_HOME": str(tmp_path)}
        done = subprocess.run(["bash", "-ec", block], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{block}{done.stdout}{done.stderr}"
        assert done.stdout
    (python,) = blocks("python")
    python = python.replace("http://127.0.0.1:8000", http_server.url).replace('"EMPTY"', repr(http_server.key))
    done = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for job in http_server.http.get("/v1/videos").json()["data"]:
        http_server.http.delete(f"/v1/videos/{job['id']}")


def test_the_page_names_every_route_and_number(http_server: Server) -> None:
    for path in http_server.http.get("/openapi.json").json()["paths"]:
        assert re.sub(r"\{\w+\}", "{id}", path) in PAGE, path
    told = set(re.findall(r"^# TYPE (\w+)", http_server.http.get("/metrics").text, re.MULTILINE))
    assert {name for name in told if f"`{name}`" not in PAGE} == set()


def test_many_clients(http_server: Server) -> None:
    """32 at a time, of which some leave and some are wrong: each is answered, /health is truthful, memory is level."""
    process, chance = psutil.Process(http_server.process.pid), random.Random(1)
    outcomes: collections.Counter[int | str] = collections.Counter()
    probes: list[tuple[int, float]] = []
    stop = threading.Event()

    def probe() -> None:
        while not stop.wait(0.3):
            began = time.monotonic()
            status = http_server.http.get("/health").status_code
            probes.append((status, time.monotonic() - began))

    def client(number: int) -> None:
        kind = number % 8
        body = {
            **SMALL,
            "size": ("64x64", "96x64", "128x128")[number % 3],
            "num_inference_steps": 1 + number % 5,
            "seed": number,
        }
        if kind == 0:
            with contextlib.suppress(httpx2.TimeoutException):
                http_server.http.post("/v1/images/generations", json={**body, "num_inference_steps": 900}, timeout=0.5)
            outcomes["left"] += 1
            return
        if kind == 1:
            body["size"] = "1x1"
        answer = http_server.post({**body, "stream": kind == 2})
        outcomes[answer.status_code] += 1
        assert answer.headers["x-request-id"]

    def wave(numbers: range) -> int:
        shuffled = chance.sample(numbers, len(numbers))
        with ThreadPoolExecutor(32) as pool:
            list(pool.map(client, shuffled))
        return process.memory_info().rss

    prober = threading.Thread(target=probe)
    prober.start()
    idle = socket.create_connection(("127.0.0.1", int(http_server.url.rpartition(":")[2])))
    request = b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    idle.sendall(request)
    began = time.monotonic()
    assert b" 200 OK" in idle.recv(1000)
    try:
        first = wave(range(64))
        time.sleep(max(0.0, 6 - (time.monotonic() - began)))
        with idle:  # as a proxy would use it again
            idle.sendall(request)
            assert b" 200 OK" in idle.recv(1000)
        second = wave(range(64, 128))
    finally:
        stop.set()
        prober.join()
    assert outcomes["left"] == 16
    assert outcomes[200] + outcomes[400] + outcomes[503] == 112, outcomes
    assert outcomes[200] > 0
    assert 0 < outcomes[400] <= 16, "a full queue is told before what is wrong"
    assert {status for status, _ in probes} == {200}
    seconds = sorted(taken for _, taken in probes)
    assert seconds[len(seconds) // 2] < 1
    assert seconds[-1] < 5
    assert second < first + 30_000_000
    wait_until(lambda: http_server.http.get("/v1/status").json()["requests"] == [], 20, "nothing is left")
