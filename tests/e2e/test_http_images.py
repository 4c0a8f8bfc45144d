"""Still images over HTTP: OpenAI's client, the 4xx of every mistake, streams, clients that leave."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import socket
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
from http_server import LONG, SMALL, Server
from PIL import Image
from processes import wait_until

from diffgen import DiffGenerator

pytestmark = pytest.mark.slow
EXTRA = {"seed": 1, "num_inference_steps": 2}


def picture(item: Any) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(item.b64_json))))


def test_openai_client(http_server: Server, tiny_generator: DiffGenerator) -> None:
    made = http_server.client().images.generate(prompt="a red circle", size="64x64", n=2, extra_body=EXTRA)
    local = tiny_generator.generate("a red circle", n=2, size="64x64", num_frames=1, **EXTRA)
    assert [np.array_equal(picture(item), image[0]) for item, image in zip(made.data, local.pixels, strict=True)]
    assert [item.seed for item in made.data] == [1, 2]
    assert [(item.width, item.height, item.url) for item in made.data] == [(64, 64, None)] * 2
    assert made.usage.input_tokens == 3
    assert made.usage.total_tokens == 3 + made.usage.output_tokens
    assert abs(made.created - time.time()) < 60
    assert (made.size, made.output_format, made.model, made.warnings) == ("64x64", "png", "org/tiny-wan", [])
    assert made.params["guidance_scale"] == 4.0
    assert made._request_id.startswith("req_")


def test_zero_is_a_value_and_what_was_resolved_is_told(http_server: Server) -> None:
    zero = http_server.post({**SMALL, "seed": 0, "guidance_scale": 0}).json()
    assert (zero["params"]["seed"], zero["params"]["guidance_scale"]) == (0, 0)
    again = http_server.post({"prompt": "x", **zero["params"]}).json()
    assert again["data"][0]["b64_json"] == zero["data"][0]["b64_json"]
    drawn = http_server.post({"prompt": "a", "size": "64x64", "num_inference_steps": 1, "seed": None}).json()
    assert drawn["data"][0]["seed"] == drawn["params"]["seed"] > 0


def test_every_field_of_openai_has_an_effect_or_a_warning(http_server: Server) -> None:
    made = http_server.client().images.generate(
        prompt="a", model="tiny", n=1, size="64x64", quality="high", response_format="b64_json", output_format="jpeg",
        output_compression=50, background="opaque", moderation="low", style="vivid", user="me", extra_body=EXTRA,
    )  # fmt: skip
    assert {warning.split()[0] for warning in made.warnings} == {"quality", "moderation", "style", "user"}
    assert made.background == "opaque"


def test_formats(http_server: Server) -> None:
    sizes = {}
    for form, magic in (("png", b"\x89PNG"), ("jpeg", b"\xff\xd8\xff"), ("webp", b"RIFF")):
        content = base64.b64decode(http_server.post({**SMALL, "output_format": form}).json()["data"][0]["b64_json"])
        assert content.startswith(magic)
        sizes[form] = len(content)
    worse = http_server.post({**SMALL, "output_format": "jpeg", "output_compression": 5}).json()["data"][0]["b64_json"]
    assert len(base64.b64decode(worse)) < sizes["jpeg"] / 2
    low = {**SMALL, "output_format": "jpeg", "output_quality": "low"}
    assert http_server.post(low).status_code == 200


def test_urls(http_server: Server) -> None:
    made = http_server.client().images.generate(prompt="a", n=2, response_format="url", size="64x64", extra_body=EXTRA)
    assert all(item.url.startswith(f"{http_server.url}/v1/images/img_") and not item.b64_json for item in made.data)
    for item in made.data:
        answer = http_server.http.get(item.url)
        assert answer.headers["content-type"] == "image/png"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert Image.open(io.BytesIO(answer.content)).size == (64, 64)
    beyond = http_server.http.get(made.data[0].url.replace("variant=0", "variant=2"))
    assert (beyond.status_code, beyond.json()["error"]["code"]) == (404, "image_not_found")
    for name in ("img_1", "..%2F..%2Fetc%2Fpasswd", "%00"):
        assert http_server.http.get(f"/v1/images/{name}/content").status_code == 404


MISTAKES: list[tuple[dict[str, Any], str, str | None]] = [
    ({"size": "500x500"}, "invalid_size", "width"),
    ({"size": "0x0"}, "invalid_size", "size"),
    ({"size": "-64x64"}, "invalid_size", "size"),
    ({"size": "64X64"}, "invalid_size", "size"),
    ({"size": ""}, "invalid_size", "size"),
    ({"size": "64x64", "width": 128}, "invalid_size", "size"),
    ({"size": "99984x99984"}, "over_limit", "size"),
    ({"num_inference_steps": 10**8}, "over_limit", "num_inference_steps"),
    ({"num_inference_steps": 0}, "invalid_num_inference_steps", "num_inference_steps"),
    ({"n": 0}, "invalid_num_outputs_per_prompt", "num_outputs_per_prompt"),
    ({"n": 11}, "invalid_n", "n"),
    ({"n": "2"}, "invalid_num_outputs_per_prompt", "num_outputs_per_prompt"),
    ({"n": True}, "invalid_num_outputs_per_prompt", "num_outputs_per_prompt"),
    ({"seed": True}, "invalid_seed", "seed"),
    ({"seed": "7"}, "invalid_seed", "seed"),
    ({"seed": 1.5}, "invalid_seed", "seed"),
    ({"seed": -1}, "invalid_seed", "seed"),
    ({"seed": 2**64}, "invalid_seed", "seed"),
    ({"seed": 2**63 - 1, "n": 2}, "invalid_seed", "seed"),
    ({"guidance_scale": 1e999}, "invalid_json", None),
    ({"guidance_scale": -5}, "invalid_guidance_scale", "guidance_scale"),
    ({"guidance_scale": "5"}, "invalid_guidance_scale", "guidance_scale"),
    ({"prompt": None}, "missing_parameter", "prompt"),
    ({"prompt": ["a", "b"]}, "invalid_prompt", "prompt"),
    ({"prompt": "a\0b"}, "invalid_prompt", "prompt"),
    ({"prompt": "\ud800"}, "invalid_prompt", "prompt"),
    ({"prompt": "x" * 20_001}, "prompt_too_long", "prompt"),
    ({"sede": 1}, "unknown_parameter", "sede"),
    ({"\ud800": 1}, "unknown_parameter", "\ud800"),
    ({"output_path": "/tmp/x"}, "unknown_parameter", "output_path"),
    ({"output_type": "latent"}, "unknown_parameter", "output_type"),
    ({"model": "nope"}, "model_not_found", "model"),
    ({"background": "transparent"}, "invalid_background", "background"),
    ({"output_format": "gif"}, "invalid_output_format", "output_format"),
    ({"output_compression": 101}, "invalid_output_compression", "output_compression"),
    ({"output_compression": 50}, "invalid_output_compression", "output_compression"),
    ({"partial_images": 1}, "invalid_partial_images", "partial_images"),
    ({"partial_images": 4, "stream": True}, "invalid_partial_images", "partial_images"),
    ({"num_frames": 5}, "invalid_num_frames", "num_frames"),
    ({"clip_skip": 1}, "unsupported_parameter", "clip_skip"),
    ({"extra_body": {"sede": 5}}, "unknown_parameter", "sede"),
    ({"extra_body": 5}, "invalid_extra_body", "extra_body"),
]


def test_mistakes(http_server: Server) -> None:
    """Each is a 400 (404 for a model) in OpenAI's shape that is not tried again, also where a stream was asked for."""
    before = http_server.metric("diffgen_ticks_total")
    for change, code, param in MISTAKES:
        answer = http_server.post({**SMALL, **change})
        error = answer.json()["error"]
        assert answer.status_code == (404 if code == "model_not_found" else 400), change
        assert (error["code"], error["param"]) == (code, param), change
        assert error["message"]
        assert set(error) == {"message", "type", "param", "code"}
        assert answer.headers["x-should-retry"] == "false"
        assert answer.headers["x-request-id"]
        if code != "invalid_partial_images":
            streamed = http_server.post({**SMALL, "stream": True, **change})
            assert streamed.json()["error"]["code"] == code
    assert http_server.metric("diffgen_ticks_total") == before, "refused before any work"
    with pytest.raises(openai.BadRequestError) as caught:
        http_server.client().images.generate(prompt="a", size="500x500")
    assert (caught.value.code, caught.value.param) == ("invalid_size", "width")
    assert "nearest: 496 or 512" in caught.value.message
    assert caught.value.request_id


@pytest.mark.parametrize(
    ("method", "path", "body", "kind", "status", "code"),
    [
        ("POST", "/v1/images/generations", b"{", "application/json", 400, "invalid_json"),
        ("POST", "/v1/images/generations", b"[]", "application/json", 400, "invalid_json"),
        ("POST", "/v1/images/generations", b"", "application/json", 400, "invalid_json"),
        ("POST", "/v1/images/generations", b"\xff", "application/json", 400, "invalid_json"),
        ("POST", "/v1/images/generations", b"[" * 10**5, "application/json", 400, "invalid_json"),
        ("POST", "/v1/images/generations", b'{"prompt":"a","seed":NaN}', "application/json", 400, "invalid_json"),
        ("POST", "/v1/images/generations", b'{"prompt":"a","prompt":"b"}', "application/json", 400, "invalid_json"),
        ("POST", "/v1/images/generations", b'{"seed":' + b"9" * 5000 + b"}", "application/json", 400, "invalid_json"),
        (
            *("POST", "/v1/images/generations", b'{"prompt":"a","size":"64x64","guidance_scale":1e999}'),
            *("application/json", 400, "invalid_guidance_scale"),
        ),
        ("POST", "/v1/images/generations", b"prompt=a", "application/x-www-form-urlencoded", 415, None),
        ("POST", "/v1/images/generations", b"{}", None, 415, None),
        ("GET", "/v1/images/generations", None, None, 405, "method_not_allowed"),
        ("GET", "/nothing", None, None, 404, "unknown_route"),
        ("POST", "/v1/images/edits", b"x", "multipart/form-data", 400, "invalid_form"),
        ("POST", "/v1/images/edits", b'{"image": "AAAA"}', "application/json", 400, "image_decode_failed"),
        ("POST", "/v1/images/edits", b'{"image": 1}', "application/json", 400, "invalid_image"),
        ("POST", "/v1/images/edits", b'{"image": "file:///etc/passwd"}', "application/json", 400, "url_not_allowed"),
        ("POST", "/v1/images/edits", b'{"url": ["http://[::1]:9/"]}', "application/json", 400, "url_not_allowed"),
        ("POST", "/v1/images/variations", b"{}", "application/json", 400, "unsupported_model"),
    ],
)
def test_bad_requests(
    http_server: Server, method: str, path: str, body: bytes | None, kind: str | None, status: int, code: str | None
) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = http_server.http.request(method, path, content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code or "unsupported_content_type")
    assert answer.headers["x-request-id"]


def test_edits_are_refused_plainly(http_server: Server) -> None:
    """After what is wrong with their pictures, which OpenAI's client sends one as ``image``, several as ``image[]``."""

    def picture(side: int) -> bytes:
        file = io.BytesIO()
        Image.new("RGB", (side, side)).save(file, "PNG")
        return file.getvalue()

    small = picture(4)
    cases: list[tuple[Any, str, str]] = [
        (small, "unsupported_model", "image"),
        ([small] * 16, "unsupported_model", "image"),
        ([small] * 17, "too_many_images", "image[]"),
        ([small, picture(257)], "image_too_large", "image[]"),
        (small[:-30], "image_decode_failed", "image"),
        (b"\x89PNG" + bytes(100_000), "image_decode_failed", "image"),
    ]
    for image, code, param in cases:
        with pytest.raises(openai.BadRequestError) as caught:
            http_server.client().images.edit(image=image, prompt="a")
        assert (caught.value.code, caught.value.param) == (code, param)
    text = f"data:image/png;base64,{base64.b64encode(small).decode()}"
    answer = http_server.post({"image": text, "mask": text, "prompt": "a"}, "/v1/images/edits")
    assert answer.json()["error"]["code"] == "unsupported_model"


def test_extra_body_is_merged(http_server: Server) -> None:
    nested = http_server.post({"prompt": "a red circle", "seed": 1, "extra_body": {**SMALL, "seed": 5}}).json()
    assert nested["data"] == http_server.post(SMALL).json()["data"]


def test_stream(http_server: Server) -> None:
    client = http_server.client()
    whole = client.images.generate(prompt="a red circle", size="64x64", n=2, extra_body=EXTRA)
    events = list(client.images.generate(prompt="a red circle", size="64x64", n=2, stream=True, extra_body=EXTRA))
    assert [event.type for event in events] == ["image_generation.completed"] * 2
    assert [event.b64_json for event in events] == [item.b64_json for item in whole.data]
    assert [event.image_index for event in events] == [0, 1]
    assert [event.seed for event in events] == [1, 2]
    assert events[0].usage.input_tokens == 3
    with http_server.http.stream("POST", "/v1/images/generations", json={**SMALL, "stream": True}) as answer:
        text = answer.read().decode()
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert ": denoise 1/2\n\n: denoise 2/2\n\n" in text
    assert text.endswith("}\n\n"), "the last event ends with a blank line"


def test_previews_in_a_stream(http_server: Server) -> None:
    whole = http_server.post({**SMALL, "num_inference_steps": 8}).json()["data"][0]["b64_json"]
    for count in (0, 1, 3):
        *partial, last = http_server.client().images.generate(
            prompt="a red circle", size="64x64", stream=True, partial_images=count,
            extra_body={"seed": 1, "num_inference_steps": 8},
        )  # fmt: skip
        assert [event.type for event in partial] == ["image_generation.partial_image"] * count
        assert [event.partial_image_index for event in partial] == list(range(count))
        assert [picture(event).shape for event in partial] == [(32, 32, 3)] * count
        assert last.b64_json == whole, "previews change no pixel"


def test_error_in_a_stream(http_server: Server) -> None:
    client, found = http_server.client(), []

    def read() -> None:
        try:
            found.extend(client.images.generate(prompt="a", size="64x64", stream=True, extra_body={**EXTRA, **_MANY}))
        except openai.APIError as error:
            found.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    (running,) = wait_for_status(http_server, 1)
    assert http_server.http.delete(f"/v1/requests/{running['id']}").json() == {"id": running["id"], "found": True}
    reader.join(30)
    assert isinstance(found[-1], openai.APIError)
    assert found[-1].code == "request_cancelled"


def test_a_fault_of_the_server_in_a_stream(http_server: Server) -> None:
    """Such as a trigger in its database, which somebody else has put there: an event tells of it, or a 500, and the log
    says what it was."""
    (database,) = http_server.root.glob("diffgen-serve-*/jobs.sqlite")
    asked = {**SMALL, "response_format": "url"}
    trigger = "CREATE TRIGGER broken BEFORE INSERT ON images BEGIN SELECT RAISE(ABORT, 'on purpose'); END"
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute(trigger)
        try:
            streamed, whole = http_server.post({**asked, "stream": True}), http_server.post(asked)
        finally:
            other.execute("DROP TRIGGER broken")
    assert streamed.status_code == 200
    _, _, event = streamed.text.rpartition("event: error\ndata: ")
    assert event.endswith("}\n\n")
    assert (json.loads(event)["type"], json.loads(event)["error"]["code"]) == ("error", "internal_error")
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "internal_error")
    assert whole.headers["connection"] == "close"
    assert "on purpose" not in streamed.text + whole.text
    told = f"request_id={streamed.headers['x-request-id']}"

    def lines() -> list[str]:
        return [line for line in http_server.lines if told in line]

    wait_until(lambda: len(lines()) == 2, 5, "the log has it")
    assert "a stream failed" in lines()[0]
    assert " 200 " in lines()[1]
    assert "code=internal_error" in lines()[1]
    assert any("IntegrityError: on purpose" in line for line in http_server.lines)
    assert http_server.post({**asked, "stream": True}).text.count("event: image_generation.completed") == 1
    assert http_server.http.get("/v1/status").json()["requests"] == []


_MANY = {"num_inference_steps": 900}


def wait_for_status(server: Server, count: int) -> list[dict[str, Any]]:
    """Requests in work, once there are ``count``."""
    found: list[dict[str, Any]] = []

    def look() -> bool:
        found[:] = server.http.get("/v1/status").json()["requests"]
        return len(found) == count and all(request["state"] == "running" for request in found)

    wait_until(look, 20, f"{count} requests run")
    return found


def cancelled(server: Server) -> float:
    return server.metric("diffgen_requests_finished_total", outcome="request_cancelled")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_stops_the_work(http_server: Server, streamed: bool) -> None:
    before = cancelled(http_server)
    body = {**LONG, "stream": streamed}
    with socket.create_connection(("127.0.0.1", int(http_server.url.rpartition(":")[2]))) as raw:
        text = str(body).replace("'", '"').replace("False", "false").replace("True", "true")
        raw.sendall(
            f"POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {http_server.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()
        )
        (running,) = wait_for_status(http_server, 1)
        assert running["stage"] in ("", "encode", "timesteps", "latents", "denoise")
    wait_until(lambda: cancelled(http_server) == before + 1, 10, "it was cancelled")
    assert http_server.http.get("/v1/status").json()["requests"] == []


def test_a_client_that_leaves_while_it_sends_is_no_fault_of_the_server(http_server: Server) -> None:
    def counted(code: str) -> float:
        name = "diffgen_http_requests_total"
        return http_server.metric(name, route="/v1/images/generations", method="POST", code=code)

    left, failed, lines = counted("499"), counted("500"), len(http_server.lines)
    for kind in ("application/json", "multipart/form-data; boundary=b"):
        path = "generations" if kind == "application/json" else "edits"
        with socket.create_connection(("127.0.0.1", int(http_server.url.rpartition(":")[2]))) as raw:
            raw.sendall(
                f"POST /v1/images/{path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {http_server.key}\r\n"
                f"Content-Type: {kind}\r\nContent-Length: 1000\r\n\r\n--b\r\n".encode()
            )
            time.sleep(0.2)
    wait_until(lambda: counted("499") == left + 1, 10, "it is told apart")
    assert counted("500") == failed
    assert not [line for line in http_server.lines[lines:] if "Traceback" in line or "internal_error" in line]


def test_retries_do_not_run_the_work_three_times(http_server: Server) -> None:
    done = http_server.metric("diffgen_requests_finished_total", outcome="done")
    before, seen = cancelled(http_server), []
    client = http_server.client(timeout=1.0)

    def call() -> None:
        with pytest.raises(openai.APITimeoutError):
            client.images.generate(prompt="a", size="64x64", extra_body={**EXTRA, **_MANY})

    caller = threading.Thread(target=call)
    caller.start()
    while caller.is_alive():
        seen.append(len(http_server.http.get("/v1/status").json()["requests"]))
        time.sleep(0.1)
    wait_until(lambda: cancelled(http_server) == before + 3, 10, "each try was cancelled when its client left")
    assert max(seen) == 1, "never two at a time"
    assert http_server.metric("diffgen_requests_finished_total", outcome="done") == done


def test_idempotency_key(http_server: Server) -> None:
    """The same key gets the same work, also for the client that has left meanwhile, whole or as a stream."""
    submitted = http_server.metric("diffgen_requests_finished_total")
    body = {"prompt": "a red circle", "size": "64x64", "num_inference_steps": 300, "seed": None}
    client = http_server.client(timeout=1.0, max_retries=9)
    key = {"Idempotency-Key": "one"}
    made = client.images.generate(
        prompt="a red circle", size="64x64", extra_headers=key, extra_body={"num_inference_steps": 300, "seed": None}
    )
    again = http_server.post(body, headers=key)
    assert again.status_code == 200, again.text
    assert again.json()["data"][0]["b64_json"] == made.data[0].b64_json
    assert again.json()["created"] == made.created
    assert http_server.metric("diffgen_requests_finished_total") == submitted + 1
    other = http_server.post({**body, "seed": 2}, headers=key)
    assert (other.status_code, other.json()["error"]["code"]) == (400, "idempotency_key_reused")
    assert http_server.post(body, headers={"Idempotency-Key": ""}).status_code == 400


def test_request_ids_do_not_collide(http_server: Server) -> None:
    headers = {"X-Request-Id": "same"}
    with ThreadPoolExecutor(8) as pool:
        values = [{**SMALL, "num_inference_steps": 1, "seed": seed} for seed in range(8)]
        answers = list(pool.map(lambda body: http_server.post(body, headers=headers), values))
    assert [answer.json()["seed"] for answer in answers] == list(range(8))
    assert len({answer.headers["x-request-id"] for answer in answers}) == 8
    assert {answer.headers["x-client-request-id"] for answer in answers} == {"same"}


def test_models_and_capabilities(http_server: Server) -> None:
    client = http_server.client()
    assert [model.id for model in client.models.list()] == ["org/tiny-wan", "tiny"]
    assert client.models.retrieve("org/tiny-wan").owned_by == "diffgen"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"
    told = http_server.http.get("/v1/capabilities").json()
    assert (told["family"], told["tasks"], told["size_multiple"]) == ("wan", ["image", "video"], 16)
    assert told["limits"]["pixels"] == 65536
    assert told["parameters"]["num_inference_steps"]["default"] == 4
    assert "flow_shift" in told["parameters"]
    assert "clip_skip" not in told["parameters"]
