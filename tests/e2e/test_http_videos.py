"""Video jobs: OpenAI's client, every state, files, and what a restart leaves."""

from __future__ import annotations

import io
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import av
import httpx2
import numpy as np
import openai
import pytest
from http_server import LONG, SMALL, Server
from PIL import Image
from processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The Sora API")]

CLIP: dict[str, Any] = {**SMALL, "num_frames": 5}
EXTRA = {"seed": 1, "num_inference_steps": 2, "num_frames": 5, "fps": 10}


def ended(server: Server, video_id: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def look() -> bool:
        found.update(server.http.get(f"/v1/videos/{video_id}").json())
        return found["status"] in ("completed", "failed")

    wait_until(look, 60, "the job has ended")
    return found


def test_openai_client(http_server: Server, tmp_path: Path) -> None:
    client = http_server.client()
    made = client.videos.create_and_poll(prompt="a red circle", size="64x64", extra_body=EXTRA)
    assert (made.status, made.progress, made.size, made.seconds) == ("completed", 100, "64x64", "0.5")
    assert (made.object, made.model, made.prompt, made.error) == ("video", "org/tiny-wan", "a red circle", None)
    assert made.created_at <= made.completed_at < made.expires_at
    content = client.videos.download_content(made.id)
    (tmp_path / "clip.mp4").write_bytes(content.read())
    with av.open(str(tmp_path / "clip.mp4")) as clip:
        stream = clip.streams.video[0]
        assert (stream.width, stream.height, stream.average_rate) == (64, 64, 10)
        assert len(list(clip.decode(stream))) == 5
        assert "diffgen" not in clip.metadata, "not unless asked for"
    thumbnail = client.videos.download_content(made.id, variant="thumbnail").read()
    assert thumbnail[8:12] == b"WEBP"
    part = http_server.http.get(f"/v1/videos/{made.id}/content", headers={"range": "bytes=0-99"})
    assert (part.status_code, len(part.content)) == (206, 100)
    for variant in ("spritesheet", "../x"):
        answer = http_server.http.get(f"/v1/videos/{made.id}/content", params={"variant": variant})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_variant")
    assert client.videos.delete(made.id).to_dict() == {"id": made.id, "object": "video.deleted", "deleted": True}
    for call in (client.videos.retrieve, client.videos.delete, client.videos.download_content):
        with pytest.raises(openai.NotFoundError) as caught:
            call(made.id)
        assert caught.value.code == "video_not_found"


def test_json_and_form_make_the_same(http_server: Server) -> None:
    form = {name: (None, str(value)) for name, value in CLIP.items()}
    jobs = [http_server.http.post("/v1/videos", files=form).json(), http_server.post(CLIP, "/v1/videos").json()]
    other = {**CLIP, "seed": 2}
    jobs.append(http_server.post(other, "/v1/videos").json())
    assert jobs[0]["id"] != jobs[1]["id"]
    assert jobs[0]["params"] == jobs[1]["params"] == {**jobs[2]["params"], "seed": 1}
    clips = []
    for job in jobs:
        assert ended(http_server, job["id"])["status"] == "completed"
        clips.append(frames(http_server.http.get(f"/v1/videos/{job['id']}/content").content))
        http_server.http.delete(f"/v1/videos/{job['id']}")
    # They may have shared their steps or not, so that they can be a level apart; H.264 makes more of it in places.
    assert np.abs(clips[0] - clips[1]).mean() < 1
    assert np.abs(clips[0] - clips[2]).mean() > 10, "another seed is another clip"


def frames(mp4: bytes) -> np.ndarray:
    """(frames, height, width, 3) as int16."""
    with av.open(io.BytesIO(mp4)) as clip:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in clip.decode(video=0)]).astype(np.int16)


def test_lengths(http_server: Server) -> None:
    def made(**length: Any) -> dict[str, Any]:
        values = {"prompt": "a", "size": "64x64", "num_inference_steps": 1, **length}
        answer = http_server.post(values, "/v1/videos").json()
        http_server.http.delete(f"/v1/videos/{answer['id']}")
        return answer

    assert made()["params"]["num_frames"] == 17, "2 s at 8 frames a second, and one"
    one = made(seconds="1", fps=8)
    assert (one["params"]["num_frames"], one["seconds"]) == (9, "1.125")
    assert "8 frames" in one["warnings"][0]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"num_frames": 1}, "invalid_num_frames"),
        ({"num_frames": 6}, "invalid_num_frames"),
        ({"num_frames": 37}, "over_limit"),
        ({"seconds": "soon"}, "invalid_seconds"),
        ({"fps": 0}, "invalid_fps"),
        ({"n": 2}, "invalid_n"),
        ({"size": "65x64"}, "invalid_size"),
        ({"prompt": None}, "missing_parameter"),
        ({"sede": 1}, "unknown_parameter"),
        ({"stream": True}, "unknown_parameter"),
        ({"input_reference": "http://127.0.0.1:9/a.png"}, "unsupported_parameter"),
    ],
)
def test_mistakes_are_told_before_a_job_is_made(http_server: Server, change: dict[str, Any], code: str) -> None:
    for answer in (
        http_server.post({**CLIP, **change}, "/v1/videos"),
        http_server.http.post(
            "/v1/videos",
            files={k: (None, str(v)) for k, v in {**CLIP, **change}.items() if v is not None},
        ),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert http_server.http.get("/v1/videos").json()["data"] == []


def test_bad_forms(http_server: Server) -> None:
    def post(content: bytes, kind: str) -> tuple[int, str]:
        answer = http_server.http.post("/v1/videos", content=content, headers={"content-type": kind})
        return answer.status_code, answer.json()["error"]["code"]

    assert post(b"x", "multipart/form-data") == (400, "invalid_form")
    assert post(b"--b\r\n\r\n", "multipart/form-data; boundary=b") == (400, "invalid_form")
    assert post(b"prompt=a&prompt=b", "application/x-www-form-urlencoded") == (400, "invalid_form")
    picture = {"input_reference": ("../../../tmp/pwn.png", b"\x89PNG")}
    answer = http_server.http.post("/v1/videos", data={"prompt": "a"}, files=picture)
    assert answer.json()["error"]["code"] == "unsupported_parameter"
    assert not Path("/tmp/pwn.png").exists()
    large = {"prompt": (None, b"x" * 990_000)}
    assert http_server.http.post("/v1/videos", files=large).json()["error"]["code"] == "prompt_too_long"


def test_progress_then_cancel(http_server: Server) -> None:
    clip = {**LONG, "num_inference_steps": 400, "num_frames": 5}
    job = http_server.post({**clip, "partial_images": 3}, "/v1/videos").json()
    assert (job["status"], job["progress"], job["previews"]) == ("queued", 0, 0)
    path = f"/v1/videos/{job['id']}/content"
    assert http_server.http.get(path, params={"variant": "preview"}).json()["error"]["code"] == "no_preview"
    seen: list[dict[str, Any]] = []

    def look() -> bool:
        seen.append(http_server.http.get(f"/v1/videos/{job['id']}").json())
        return bool(seen[-1]["previews"] >= 1)

    wait_until(look, 30, "progress is told")
    assert [s["progress"] for s in seen] == sorted(s["progress"] for s in seen)
    assert seen[-1]["status"] == "in_progress"
    assert 0 < seen[-1]["progress"] < 100
    preview = Image.open(io.BytesIO(http_server.http.get(path, params={"variant": "preview"}).content))
    assert (preview.format, preview.size, preview.n_frames) == ("WEBP", (32, 32), 2), "a frame for each of the latents'"
    early = http_server.http.get(path)
    assert (early.status_code, early.json()["error"]["code"]) == (409, "video_not_ready")
    assert early.headers["x-should-retry"] == "false"
    before = http_server.metric("diffgen_requests_finished_total", outcome="request_cancelled")
    assert http_server.http.delete(f"/v1/videos/{job['id']}").json()["deleted"]
    name = "diffgen_requests_finished_total"
    wait_until(lambda: http_server.metric(name, outcome="request_cancelled") == before + 1, 10, "it is cancelled")
    assert http_server.http.get(f"/v1/videos/{job['id']}").status_code == 404
    at_once = http_server.post({**LONG, "num_frames": 5}, "/v1/videos").json()
    assert http_server.http.delete(f"/v1/videos/{at_once['id']}").status_code == 200
    wait_until(lambda: http_server.http.get("/v1/status").json()["requests"] == [], 10, "both are gone")


def test_pages(http_server: Server) -> None:
    ids = [http_server.post({**CLIP, "seed": seed}, "/v1/videos").json()["id"] for seed in range(3)]
    client = http_server.client()
    assert [video.id for video in client.videos.list(limit=2)] == ids[::-1]
    assert [video.id for video in client.videos.list(limit=1, order="asc")] == ids
    page = http_server.http.get("/v1/videos", params={"limit": 2}).json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[2], ids[1], True)
    for wrong, status in (({"limit": 0}, 400), ({"limit": "x"}, 400), ({"order": "up"}, 400), ({"after": "no"}, 404)):
        assert http_server.http.get("/v1/videos", params=wrong).status_code == status
    for video_id in ids:
        client.videos.delete(video_id)
    assert http_server.http.get("/v1/videos").json()["data"] == []
    for name in ("..%2F..%2Fetc%2Fpasswd", "a%2Fb", "%00", "é" * 300):
        assert http_server.http.get(f"/v1/videos/{name}").status_code == 404


def test_idempotency_key(http_server: Server) -> None:
    headers = {"Idempotency-Key": "clip"}
    first, again = (http_server.post(CLIP, "/v1/videos", headers=headers).json() for _ in range(2))
    assert first["id"] == again["id"]
    other = http_server.post({**CLIP, "seed": 9}, "/v1/videos", headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (400, "idempotency_key_reused")
    assert len(http_server.http.get("/v1/videos").json()["data"]) == 1
    http_server.http.delete(f"/v1/videos/{first['id']}")


def test_a_full_queue_is_told_with_a_time(http_server: Server) -> None:
    """The limit is 24: what is over it is refused, the others are answered, nothing is left."""

    def post(seed: int) -> httpx2.Response:
        key = {"Idempotency-Key": f"full {seed}"}
        return http_server.post({**LONG, "num_frames": 5, "seed": seed}, "/v1/videos", headers=key)

    answers = [post(seed) for seed in range(20)]
    with ThreadPoolExecutor(8) as pool:  # none may slip in beside another
        answers += pool.map(post, range(20, 28))
    assert sorted(answer.status_code for answer in answers) == [200] * 24 + [503] * 4
    *_, late = (answer for answer in answers if answer.status_code == 503)
    error = late.json()["error"]
    assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
    assert int(late.headers["retry-after"]) >= 1
    assert late.headers["x-should-retry"] == "true"
    assert post(3).json()["id"] == answers[3].json()["id"], "of a job that is here already"
    image = http_server.post(SMALL)
    assert (image.status_code, image.json()["error"]["code"]) == (503, "queue_full")
    began = time.monotonic()
    assert [http_server.http.get(path).status_code for path in ("/health", "/ready")] == [200, 200]
    assert time.monotonic() - began < 2
    probe = http_server.http.get("/health_generate")
    assert (probe.status_code, probe.json()["status"]) == (200, "busy"), "a full queue that makes progress is health"
    for video in http_server.client().videos.list(limit=10):  # deleted while they are listed
        assert http_server.client().videos.delete(video.id).deleted
    assert http_server.http.get("/v1/videos").json()["data"] == []
    wait_until(lambda: http_server.http.get("/v1/status").json()["requests"] == [], 20, "all are gone")
