"""A live ``diffgen serve`` for tests, and small ways to talk to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
from openai import OpenAI
from processes import DIFFGEN

SMALL: dict[str, Any] = {"prompt": "a red circle", "size": "64x64", "num_inference_steps": 2, "seed": 1}
LONG: dict[str, Any] = {**SMALL, "num_inference_steps": 900}


class Server:
    """One server process. ``url`` has no slash at its end; ``lines`` is what it has written to stderr,
    ``root`` its TMPDIR."""

    def __init__(self, process: subprocess.Popen[str], root: Path, key: str | None) -> None:
        self.process, self.root, self.key = process, root, key
        self.url = ""
        self.lines: list[str] = []
        self._listens = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._listens.wait(30), self.lines
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.http = httpx2.Client(base_url=self.url, headers=headers, timeout=170)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("diffgen: listening at "):
                self.url = line.split()[-1]
                self._listens.set()

    def wait_ready(self, seconds: float = 170) -> None:
        deadline = time.monotonic() + seconds
        while self.http.get("/ready").status_code != 200:
            assert time.monotonic() < deadline, self.lines
            assert self.process.poll() is None, self.lines
            time.sleep(0.1)

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=self.key or "EMPTY", **options)

    def post(self, values: dict[str, Any], path: str = "/v1/images/generations", **options: Any) -> httpx2.Response:
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        return self.http.post(path, content=json.dumps(values), headers=headers, **options)

    def metric(self, name: str, **labels: str) -> float:
        """The sum over the series that have these labels."""
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(f'{key}="{text}"' in series for key, text in labels.items()):
                total += float(value)
        return total

    def stop(self, number: int = signal.SIGTERM, seconds: float = 30) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code


@contextlib.contextmanager
def serving(root: Path, *arguments: str, key: str | None = None, ready: bool = True) -> Iterator[Server]:
    """``diffgen serve`` on a free port, with ``root`` as its TMPDIR; ended at the end, and nothing is left."""
    command = [*DIFFGEN, "serve", *arguments, "--device", "cpu", "--threads", "1"]
    command += [] if "--port" in arguments else ["--port", "0"]
    environment = {**os.environ, "TMPDIR": str(root), "XDG_STATE_HOME": str(root / "state")}
    environment.pop("DIFFGEN_API_KEY", None)
    if key is not None:
        environment["DIFFGEN_API_KEY"] = key
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            server = Server(process, root, key)
            if ready:
                server.wait_ready()
            yield server
            server.http.close()
            server.stop()
        finally:
            process.kill()
