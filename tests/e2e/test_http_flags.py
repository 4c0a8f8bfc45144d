"""A server with most of its flags, whose disk fills up and whose rank dies for good."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import resource
import signal
import socket
import sqlite3
import threading
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from collector import Collector, collecting, values
from http_server import LONG, SMALL, Server, serving
from PIL import Image
from processes import leftovers, rank_processes, run_root, wait_until

from diffgen.media.metadata import read_params

pytestmark = pytest.mark.slow
CLIP: dict[str, Any] = {**SMALL, "num_frames": 5}
ORIGIN = "https://app.example"
CALLER = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.timeout(400)  # all that takes these flags, which a busy machine makes long
def test_flags_a_full_disk_and_giving_up(tiny_wan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFGEN_FAULT", "raise@denoise:1:0:*:broken")
    with run_root() as root, collecting() as collector, socket.create_server(("127.0.0.1", 0)) as pictures:
        arguments = [str(tiny_wan), "--data-path", str(root / "data"), "--allowed-origins", ORIGIN]
        arguments += ["--public-base-url", "https://draw.example/tiny/", "--unknown-params", "ignore"]
        arguments += ["--media-metadata", "--log-format", "json", "--log-prompts", "--max-restarts", "0"]
        arguments += ["--remote-pictures", f"images.example,127.0.0.1:{pictures.getsockname()[1]}"]
        with serving(root, *arguments, "--otlp-traces-endpoint", collector.url) as server:
            pages_of_one_other_site_may_use_it(server)
            nothing_is_fetched_for_a_model_without_pictures(server, pictures)
            made = urls_unknown_parameters_and_metadata(server)
            failed = a_rank_tells_which_request_it_works_for(server)
            clip = a_full_disk(server, root / "data")
            giving_up(server, root)
        wait_until(lambda: leftovers(root) == [], 10, "nothing is left")
        spans(collector, made, failed, clip)


def pages_of_one_other_site_may_use_it(server: Server) -> None:
    asks = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "x-stainless-os",
    }
    allowed = server.http.options("/v1/images/generations", headers=asks)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]
    assert server.http.get("/v1/models", headers={"origin": ORIGIN}).headers["access-control-allow-origin"] == ORIGIN
    other = server.http.get("/v1/models", headers={"origin": "https://other.example"})
    assert other.status_code == 403
    assert "access-control-allow-origin" not in other.headers


def nothing_is_fetched_for_a_model_without_pictures(server: Server, pictures: socket.socket) -> None:
    """But what is wrong with an address is told first."""
    port = pictures.getsockname()[1]
    addresses = {
        f"http://127.0.0.1:{port}/a.png": "unsupported_model",
        "https://images.example/a.png": "unsupported_model",
        f"http://localhost:{port + 1}/": "url_not_allowed",
        f"http://me:key@127.0.0.1:{port}/": "url_not_allowed",
        "http://169.254.169.254/latest": "url_not_allowed",
        "https://other.example/a.png": "url_not_allowed",
        "file:///etc/passwd": "url_not_allowed",
        "/etc/passwd": "image_decode_failed",
    }
    for address, code in addresses.items():
        form = server.http.post("/v1/images/edits", files={"url": (None, address), "prompt": (None, "a")})
        for answer in (form, server.post({"image_url": address, "prompt": "a"}, "/v1/images/edits")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, code), address
    noise = np.random.default_rng(0).integers(0, 256, (800, 800, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file := io.BytesIO(), "PNG")
    text = base64.b64encode(file.getvalue()).decode()
    assert len(text) > 2**20, "more than Starlette lets into a field by itself"
    large = server.http.post("/v1/images/edits", files={"image": (None, text), "prompt": (None, "a")})
    assert large.json()["error"]["code"] == "unsupported_model"
    pictures.setblocking(False)
    with pytest.raises(BlockingIOError):
        pictures.accept()


def urls_unknown_parameters_and_metadata(server: Server) -> str:
    """Returns the generation's id."""
    asked = {**SMALL, "sede": 1, "response_format": "url"}
    headers = {"traceparent": f"00-{CALLER}-b7ad6b7169203331-01"}
    answer = server.post(asked, "/v1/images/generations?sead=1", headers=headers).json()
    in_vain = [f"'{name}' has no effect: it is not known" for name in ("sead", "sede", "sid")]
    assert answer["warnings"] == in_vain[:2]
    clip = server.post({**CLIP, "sede": 1}, "/v1/videos?sead=1").json()
    assert clip["warnings"] == in_vain[:2]
    assert server.http.get(f"/v1/videos/{clip['id']}?sid=1").json()["warnings"] == in_vain
    assert server.http.delete(f"/v1/videos/{clip['id']}?sid=1").json()["deleted"]
    wait_until(lambda: in_vain[2:] in [line.get("warnings") for line in logged(server)], 5, "the log has it")
    url = answer["data"][0]["url"]
    base = "https://draw.example/tiny/v1/"
    assert url.startswith(f"{base}images/{answer['id']}/content")
    (server.root / "a.png").write_bytes(server.http.get(url.replace(base, "/v1/")).content)
    params = read_params(server.root / "a.png")
    assert (params["prompt"], params["seed"], params["num_inference_steps"]) == ("a red circle", 1, 2)
    return str(answer["id"]).removeprefix("img_")


def a_rank_tells_which_request_it_works_for(server: Server) -> str:
    """Returns the generation's id."""
    answer = server.post({**SMALL, "prompt": "broken"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "generation_failed")

    def traced() -> list[dict[str, Any]]:
        return [line for line in logged(server) if line["process"] == "rank 0" and "traceback" in line]

    def ours() -> list[dict[str, Any]]:
        return [line for line in logged(server) if line.get("request_id") == answer.headers["x-request-id"]]

    wait_until(lambda: traced() and ours(), 5, "the rank's line is there, and the request's")
    (told,) = traced()
    assert told["generation"] == ours()[0]["generation"]
    assert told["message"] == "denoise failed"
    assert ours()[0]["prompt"] == "broken"
    return str(told["generation"])


def logged(server: Server) -> list[dict[str, Any]]:
    """The lines of the log that have come."""
    return [json.loads(line) for line in server.lines if line.startswith("{")]


def a_full_disk(server: Server, data: Path) -> str:
    """Nothing more can be written: who asks is told so, and a clip that is done fails. Returns the clip's id."""
    clip = server.post({**CLIP, "num_inference_steps": 400}, "/v1/videos").json()["id"]
    wait_until(lambda: told(server, clip)["status"] == "in_progress", 20, "it runs")
    waiting = server.post({**CLIP, "num_inference_steps": 900, "priority": "batch"}, "/v1/videos").json()["id"]
    wait_until(lambda: len(server.http.get("/v1/status").json()["requests"]) == 2, 20, "another one waits")
    # A limit on the size of files acts as a full disk does, without one.
    before = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    try:
        for path, body in (("/v1/images/generations", {**SMALL, "response_format": "url"}), ("/v1/videos", CLIP)):
            answer = server.post(body, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (507, "output_failed")
            assert str(server.root) not in answer.text
        assert server.post(SMALL).status_code == 200, "what needs no disk goes on"
        assert server.http.get("/health").status_code == 200
        assert server.http.delete(f"/v1/videos/{waiting}").json()["deleted"]
        assert server.http.get(f"/v1/videos/{waiting}").status_code == 404
        assert [video["id"] for video in server.http.get("/v1/videos").json()["data"]] == [clip]
        wait_until(lambda: len(server.http.get("/v1/status").json()["requests"]) == 1, 20, "it is cancelled")
        wait_until(lambda: told(server, clip)["status"] == "failed", 60, "the clip has ended")
        assert told(server, clip)["error"]["code"] == "output_failed"
        assert server.http.get(f"/v1/videos/{clip}/content").status_code == 404
    finally:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, before)
    wait_until(lambda: server.metric("diffgen_requests_running") == 0, 20, "nothing runs")
    again = server.post(CLIP, "/v1/videos").json()["id"]
    wait_until(lambda: told(server, again)["status"] == "completed", 30, "there is room again")
    assert told(server, clip)["status"] == "failed", "and now it is stored"
    assert [path.name for path in data.glob(f".{clip}*")] == [], "no half of a file"
    assert Image.open(io.BytesIO(server.http.get(f"/v1/videos/{again}/content?variant=thumbnail").content)).size == (
        64,
        64,
    )
    return str(clip)


def told(server: Server, video: str) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get(f"/v1/videos/{video}").json()
    return found


def giving_up(server: Server, root: Path) -> None:
    """The rank dies once too often: who waits is told, clips are left to the next server, and this one ends with the
    reason."""
    clip = server.post({**LONG, "num_frames": 5, "priority": "batch"}, "/v1/videos").json()["id"]
    waiting: list[httpx2.Response] = []
    poster = threading.Thread(target=lambda: waiting.append(server.post(LONG)))
    poster.start()
    wait_until(lambda: len(server.http.get("/v1/status").json()["requests"]) == 2, 20, "they run")
    (rank,) = rank_processes(root)
    os.kill(rank.pid, signal.SIGKILL)
    poster.join(30)
    assert waiting[0].status_code in (500, 503)
    assert waiting[0].json()["error"]["code"] == "worker_died"
    assert server.process.wait(30) == 1
    server.stop()
    with contextlib.closing(sqlite3.connect(root / "data" / "jobs.sqlite")) as database:
        ((status,),) = database.execute("SELECT status FROM videos WHERE id = ?", (clip,))
    assert status in ("queued", "in_progress")
    assert "given up after 1 failure(s) in a row" in server.lines[-1]
    assert not any("Traceback" in line for line in server.lines if not line.startswith("{"))


def spans(collector: Collector, made: str, failed: str, clip: str) -> None:
    """The collector has them, those of the last second too."""
    whole, parts = collector.of(made)
    assert whole.trace_id.hex() == CALLER, "below the caller's own"
    assert [part.name for part in parts] == ["queue", "encode", "timesteps", "latents", "denoise", "decode", "send"]
    moments = [moment for part in parts for moment in (part.start_time_unix_nano, part.end_time_unix_nano)]
    assert moments == sorted(moments)
    assert (whole.start_time_unix_nano, whole.end_time_unix_nano) == (moments[0], moments[-1])
    known = values(whole)
    assert (known["gen_ai.request.model"], known["gen_ai.output.type"], known["gen_ai.request.seed"]) == (
        "tiny-wan", "image", 1,
    )  # fmt: skip
    assert known["diffgen.request_id"].startswith("req_")
    denoise = values(parts[4])
    assert denoise["diffgen.units"] == 2
    assert denoise["diffgen.busy_seconds"] > 0
    assert not any("red circle" in str(span) for span in collector.spans), "no prompts"
    assert values(collector.of(failed)[0])["error.type"] == "generation_failed"
    kinds = [values(span).get("error.type") for span in collector.spans if not span.parent_span_id]
    assert {"output_failed", "worker_died"} <= set(kinds)
