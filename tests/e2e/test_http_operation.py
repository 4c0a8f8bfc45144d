"""Keys, hosts, limits of an HTTP server; its death, its drain, and the jobs that it leaves to the next one."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import psutil
import pytest
from collector import Collector, collecting, values
from http_server import LONG, SMALL, Server, serving
from processes import DIFFGEN, leftovers, rank_processes, run_root, wait_until

from diffgen.http.health import FRESH_S
from diffgen.http.store import Job, Store
from diffgen.params import SamplingParams

pytestmark = pytest.mark.slow
CLIP = {**SMALL, "num_frames": 5}
CALLER, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_every_route_but_probes_and_page_needs_the_key(http_server: Server) -> None:
    document = http_server.http.get("/openapi.json").json()
    open_routes = {"/health", "/ready"}
    with httpx2.Client(base_url=http_server.url) as stranger:
        paths = [*document["paths"], "/openapi.json", "/nothing", "/docs"]
        for path in paths:
            for method in ("GET", "POST", "DELETE"):
                answer = stranger.request(method, path.replace("{", "").replace("}", ""))
                if path in open_routes:
                    assert answer.status_code in (200, 405)
                else:
                    assert answer.status_code == 401, path
                    assert answer.json()["error"]["code"] == "invalid_api_key"
                    assert answer.headers["www-authenticate"] == "Bearer"
        assert stranger.get("/").status_code == stranger.get("/page.js").status_code == 200
        for header in ("Bearer wrong", "Basic x", "open sesame", "Bearer"):
            assert stranger.get("/v1/models", headers={"authorization": header}).status_code == 401


def test_other_names_and_other_sites_are_refused(http_server: Server) -> None:
    get = http_server.http.get
    assert get("/v1/models", headers={"host": "evil.example"}).json()["error"]["code"] == "host_not_allowed"
    port = http_server.url.rpartition(":")[2]
    for host in (f"localhost:{port}", "LOCALHOST", f"[::1]:{port}"):
        assert get("/v1/models", headers={"host": host}).status_code == 200
    foreign = get("/v1/models", headers={"origin": "http://evil.example"})
    assert foreign.json()["error"]["code"] == "origin_not_allowed"
    assert not [name for name in foreign.headers if name.startswith("access-control")]
    assert get("/v1/models", headers={"origin": http_server.url}).status_code == 200
    form = {"prompt": (None, "a")}
    assert http_server.http.post("/v1/videos", files=form, headers={"origin": "null"}).status_code == 403


def test_head_is_get_without_the_body(http_server: Server) -> None:
    counted = functools.partial(
        http_server.metric, "diffgen_http_requests_total", route="/health", method="HEAD", code="200"
    )
    document, before = http_server.http.get("/openapi.json").json(), counted()
    (made,) = http_server.post({**SMALL, "response_format": "url"}).json()["data"]
    for path in [*document["paths"], "/", "/page.js", "/openapi.json", "/nothing", made["url"]]:
        got, head = (http_server.http.request(method, path) for method in ("GET", "HEAD"))
        assert head.status_code == got.status_code
        assert head.content == b""
        assert head.headers.keys() == got.headers.keys()
        if path not in ("/metrics", "/v1/status"):  # which tell of something else each time
            assert head.headers["content-length"] == str(len(got.content))
    assert not any("head" in operations for operations in document["paths"].values())
    assert http_server.http.head("/v1/images/generations").headers["allow"] == "POST"
    assert http_server.http.put("/health").headers["allow"] == "GET, HEAD"
    assert http_server.http.put("/health").json()["error"]["message"] == "/health takes GET, HEAD, not PUT"
    assert counted() == before + 1
    with httpx2.Client(base_url=http_server.url) as stranger:
        assert [stranger.head(path).status_code for path in ("/health", "/v1/models")] == [200, 401]


def test_unknown_parameters_of_an_address_are_refused(http_server: Server) -> None:
    for method, path, remedy in (
        ("GET", "/v1/videos?limt=2", "did you mean 'limit'?"),
        ("GET", "/v1/videos/a/content?thumbnail=1", "known: variant"),
        ("GET", "/v1/models?limit=2", "this address takes none"),
        ("POST", "/v1/images/generations?seed=1", "this address takes none"),
    ):
        answer = http_server.http.request(method, path)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unknown_parameter")
        assert error["message"].endswith(remedy)
    assert http_server.http.get("/health?from=balancer").status_code == 200


def test_large_bodies_are_refused_without_being_read(http_server: Server) -> None:
    parent = psutil.Process(http_server.process.pid)
    before = parent.memory_info().rss
    said = http_server.http.post("/v1/videos", content=bytes(1_000_001), headers={"content-type": "application/json"})
    assert (said.status_code, said.json()["error"]["code"]) == (413, "body_too_large")

    def endless() -> object:
        for _ in range(2000):
            yield bytes(100_000)

    try:
        answer = http_server.http.post("/v1/videos", content=endless(), headers={"content-type": "application/json"})
        assert answer.status_code == 413
    except httpx2.HTTPError:
        pass  # the server has closed the connection while we were sending
    assert parent.memory_info().rss - before < 30_000_000
    with socket.create_connection(("127.0.0.1", int(http_server.url.rpartition(":")[2]))) as raw:
        raw.sendall(b"\x00\xff\r\n\r\nGET / HTTP/9\r\n\r\n")
        assert b"400" in raw.recv(1000)
    assert http_server.http.get("/health").status_code == 200


def test_health_generate_and_busy_is_not_dead(http_server: Server) -> None:
    # So large that it does not end meanwhile, which would count as a picture.
    job = http_server.post({**LONG, "size": "256x256", "num_frames": 5}, "/v1/videos").json()
    assert http_server.http.get("/health").json() == {"status": "ok", "replicas": [{"status": "ok"}]}
    with httpx2.Client(base_url=http_server.url, headers=http_server.http.headers, timeout=40) as client:

        def probe() -> tuple[int, set[float]]:
            """Three at once: how many pictures they made, and the seconds that they tell."""
            before = http_server.metric("diffgen_requests_finished_total", outcome="done")
            with ThreadPoolExecutor(3) as pool:
                answers = list(pool.map(lambda _: client.get("/health_generate"), range(3)))
            assert [answer.status_code for answer in answers] == [200] * 3
            made = http_server.metric("diffgen_requests_finished_total", outcome="done") - before
            return int(made), {answer.json()["seconds"] for answer in answers}

        made, told = probe()
        if made == 0:  # whoever asked before has had one
            time.sleep(FRESH_S)
            made, told = probe()
        assert (made, len(told)) == (1, 1), "one picture answers for all who ask together"
        assert probe() == (0, told), "and for those who ask within ten seconds"
    http_server.http.delete(f"/v1/videos/{job['id']}")


def test_log_lines(http_server: Server) -> None:
    answer = http_server.post(SMALL, headers={"X-Request-Id": "mine\x01"})
    found: list[str] = []

    def look() -> bool:
        found[:] = [line for line in http_server.lines if answer.headers["x-request-id"] in line]
        return bool(found)

    wait_until(look, 5, "the line is there")
    assert "POST /v1/images/generations 200" in found[0]
    assert "client_request_id=mine?" in found[0]
    assert "num_inference_steps=2" in found[0]
    assert "red circle" not in "\n".join(http_server.lines), "no prompts"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--host", "0.0.0.0"], 2, "no API key is set"),
        (["--port", "70000"], 2, "at most 65535"),
        (["--api-key-file", "/nope"], 2, "cannot read api_key_file"),
        (["--limit", "body=x"], 2, "NAME=VALUE"),
        (["./nope"], 1, "no such directory"),
        (["a", "--model-path", "b"], 2, "differ"),
        (["--data-path", "/proc/x"], 1, "output folder"),
    ],
)
def test_mistakes_at_the_start(arguments: list[str], code: int, text: str) -> None:
    port = [] if "--port" in arguments else ["--port", "0"]
    done = subprocess.run([*DIFFGEN, "serve", *arguments, *port], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_told_before_the_model_is_loaded(http_server: Server) -> None:
    command = [*DIFFGEN, "serve", "--port", http_server.url.rpartition(":")[2]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "choose another port" in done.stderr
    assert "listening" not in done.stderr


@pytest.mark.timeout(600)  # three starts, which a busy machine makes long
def test_a_life_with_deaths(tiny_wan: Path) -> None:
    """A rank is killed under a clip, the server is killed, and told to stop: the clip is made, each time honestly."""
    with run_root() as root, collecting() as collector:
        data = str(root / "data")
        arguments = (str(tiny_wan), "--data-path", data, "--log-format", "json", "--media-ttl", "4")
        arguments += ("--shutdown-timeout", "4", "--otlp-traces-endpoint", collector.url)
        late = left_by_an_earlier_server(root / "data")
        with serving(root, *arguments, ready=False) as server:
            loading = server.http.get("/ready")
            assert (loading.status_code, loading.headers["retry-after"]) == (503, "5")
            assert server.http.get("/health").json() == {"status": "loading"}
            assert server.post(SMALL).json()["error"]["code"] == "loading"
            server.wait_ready()
            wait_until(lambda: status(server, late) == "failed", 20, "its time was over before it could run")
            error = server.http.get(f"/v1/videos/{late['id']}").json()["error"]
            assert error["code"] == "deadline_exceeded"
            assert "time_limit of 60 s" in error["message"]
            caller = {"traceparent": f"00-{CALLER}-{SPAN}-01"}
            job = server.post({**CLIP, "num_inference_steps": 300}, "/v1/videos", headers=caller).json()
            waiting: list[httpx2.Response] = []
            other = threading.Thread(target=lambda: waiting.append(server.post({**SMALL, "num_inference_steps": 200})))
            other.start()
            wait_until(lambda: status(server, job) == "in_progress", 20, "it runs")
            (rank,) = rank_processes(root)
            os.kill(rank.pid, signal.SIGKILL)
            wait_until(lambda: server.http.get("/health").status_code == 503, 5, "health says so")
            assert str(root) not in server.http.get("/v1/status").text
            wait_until(lambda: server.http.get("/health").status_code == 200, 150, "the rank is back")
            other.join(150)
            assert waiting[0].status_code == 200, "a request survives the death"
            assert json.loads(server.lines[-1])["process"] in ("http", "rank 0")
            server.process.kill()
            server.stop()
        with serving(root, *arguments) as server:
            wait_until(lambda: status(server, job) == "completed", 60, "a job survives the death of the server")
            found = server.http.get(f"/v1/videos/{job['id']}").json()
            assert found["params"] == job["params"]
            assert server.http.get(f"/v1/videos/{job['id']}/content").content[4:8] == b"ftyp"
            second = subprocess.run(
                [*DIFFGEN, "serve", str(tiny_wan), "--port", "0", "--data-path", data],
                capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert "another server uses the folder" in second.stderr
            wait_until(lambda: time.time() > found["expires_at"] + 1, 10, "its time is over")
            gone = server.http.get(f"/v1/videos/{job['id']}/content")
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "video_expired")
            drain(server)
        wait_until(lambda: leftovers(root) == [], 5, "nothing is left")
        the_clip_stays_in_its_callers_trace(collector)


def left_by_an_earlier_server(data: Path) -> dict[str, str]:
    """A clip that was to be done within a minute, and came two minutes ago."""
    params = SamplingParams(prompt="a", width=64, height=64, num_frames=5, num_inference_steps=900, time_limit=60.0)
    store = Store(data)
    job = Job(id="video_late", model="tiny-wan", params=params, created_at=time.time() - 120)
    store.add(job)
    store.close()
    return {"id": job.id}


def the_clip_stays_in_its_callers_trace(collector: Collector) -> None:
    """The server that was killed could send no span; the next one sent those of its own run."""
    (clip,) = (span for span in collector.spans if values(span).get("diffgen.attempt") == 2)
    assert (clip.trace_id.hex(), clip.parent_span_id.hex()) == (CALLER, SPAN)
    parts = [span for span in collector.spans if span.parent_span_id == clip.span_id]
    assert [part.name for part in parts] == ["queue", "encode", "timesteps", "latents", "denoise", "decode", "send"]
    assert {part.trace_id.hex() for part in parts} == {CALLER}


def status(server: Server, job: dict[str, str]) -> str:
    return str(server.http.get(f"/v1/videos/{job['id']}").json()["status"])


def drain(server: Server) -> None:
    """SIGTERM under two images: nothing new is taken, the one that can be finished in time is, the other is told that
    it is not, and the exit code is 0."""
    answers: dict[str, httpx2.Response] = {}
    short = {**SMALL, "num_inference_steps": 20, "priority": "interactive"}
    long = {**SMALL, "num_inference_steps": 1000, "size": "256x256", "n": 2, "priority": "batch"}

    def post(name: str, body: dict[str, object]) -> None:
        answers[name] = server.post(body)

    posters = [threading.Thread(target=post, args=each) for each in (("long", long), ("short", short))]
    for poster in posters:
        poster.start()
    wait_until(lambda: len(server.http.get("/v1/status").json()["requests"]) == 2, 20, "they run")
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.http.get("/ready").status_code == 503, 5, "no longer ready")
    assert server.http.get("/health").status_code == 200
    assert server.post(SMALL).json()["error"]["code"] == "shutting_down"
    for poster in posters:
        poster.join(60)
    assert answers["short"].status_code == 200
    assert (answers["long"].status_code, answers["long"].json()["error"]["code"]) == (503, "server_closed")
    assert answers["long"].headers["retry-after"]
    assert server.stop() == 0


def test_sigterm_while_loading(tiny_wan: Path) -> None:
    with run_root() as root:
        with serving(root, str(tiny_wan), ready=False) as server:
            wait_until(lambda: rank_processes(root, "launch"), 20, "a process is started")
            assert server.stop() == 0
        wait_until(lambda: leftovers(root) == [], 10, "nothing is left")
