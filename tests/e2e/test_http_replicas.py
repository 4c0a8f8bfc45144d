"""Two replicas behind one HTTP server, of which one dies."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from http_server import SMALL, Server, serving
from processes import leftovers, rank_processes, run_root, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
UP = {"status": "ok"}


class Watch(threading.Thread):
    """Asks /health, /ready and for images, over and over. ``told`` holds path, status and answer of each probe,
    in order; ``images`` the answers of the generations."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server, self.stopped = server, threading.Event()
        self.told: list[tuple[str, int, dict[str, Any]]] = []
        self.images: list[tuple[int, Any]] = []

    def run(self) -> None:
        generating = threading.Thread(target=self._generate)
        generating.start()
        while not self.stopped.wait(0.05):
            for path in ("/health", "/ready"):
                answer = self.server.http.get(path)
                self.told.append((path, answer.status_code, answer.json()))
        generating.join()

    def _generate(self) -> None:
        while not self.stopped.is_set():
            answer = self.server.post({**SMALL, "size": "64x64"})
            self.images.append((answer.status_code, answer.json().get("data")))

    def states(self, path: str) -> list[list[str]]:
        """What was told of the replicas, in order, without repetitions."""
        found: list[list[str]] = []
        for asked, _, answer in self.told:
            state = [each["status"] for each in answer.get("replicas", ())]
            if asked == path and found[-1:] != [state]:
                found.append(state)
        return found


def test_probes_are_truthful_while_a_replica_dies_and_comes_back(tiny_wan: Path) -> None:
    with run_root() as root:
        with serving(root, str(tiny_wan), "--num-gpus", "2", "--dp-size", "2", "--dp-policy", "round_robin") as server:
            assert server.http.get("/health").json()["replicas"] == [UP, UP]
            watch = Watch(server)
            watch.start()
            try:
                wait_until(lambda: len(watch.images) >= 2, 60, "images are made")
                os.kill(rank_processes(root)[0].pid, signal.SIGKILL)
                wait_until(lambda: replicas(server) != [UP, UP], 10, "the death is told")
                wait_until(lambda: replicas(server) == [UP, UP], 100, "both are up")
                told, made = len(watch.told), len(watch.images)
                wait_until(lambda: len(watch.told) > told + 4, 60, "it has been told")
                wait_until(lambda: len(watch.images) > made + 2, 60, "both make images")
            finally:
                watch.stopped.set()
                watch.join()
            one_down = watch.states("/health")[1]
            assert sorted(one_down) == ["down", "ok"]
            for path in ("/health", "/ready"):
                assert watch.states(path) == [["ok", "ok"], one_down, ["ok", "ok"]]
            assert {status for _, status, _ in watch.told} == {200}, "one serves all the while"
            victim = one_down.index("down")
            reasons = {told["replicas"][victim].get("reason") for _, _, told in watch.told} - {None}
            assert reasons == {f"ranks [{victim}] are being started again"}
            (image,) = {repr(each) for each in watch.images}
            assert image.startswith("(200, "), "each request is answered, with the same pixels"
            every_replica_dies(server, root)
            assert server.metric("diffgen_restarts_total") == 3
        wait_until(lambda: leftovers(root) == [], 10, "nothing is left")


def replicas(server: Server) -> Any:
    return server.http.get("/health").json().get("replicas")


def every_replica_dies(server: Server, root: Path) -> None:
    for rank in rank_processes(root):
        os.kill(rank.pid, signal.SIGKILL)
    wait_until(lambda: server.http.get("/health").status_code == 503, 10, "nothing serves")
    told = server.http.get("/health")
    if told.status_code == 503:  # it is not back already
        assert told.json()["error"]["code"] == "unhealthy"
        assert told.headers["retry-after"]
    wait_until(lambda: server.http.get("/ready").status_code == 200, 100, "one serves again")
    wait_until(lambda: replicas(server) == [UP, UP], 100, "both are up")
    assert server.post(SMALL).status_code == 200
