"""``DiffGenerator.connect("http://...")``: the same as a local generator. And the OpenAPI document."""

from __future__ import annotations

import contextlib
import json
import subprocess
import unittest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schemathesis
from http_server import LONG, Server
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from processes import DIFFGEN, wait_until
from schemathesis import GenerationMode
from schemathesis.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from diffgen import DiffGenerator
from diffgen.errors import ConnectionFailed, InvalidRequest, RequestCancelled, ServerClosed
from diffgen.handle import Preview
from diffgen.wire.messages import Accepted, Progress

pytestmark = pytest.mark.slow
CLIP: dict[str, Any] = {"size": "64x64", "num_inference_steps": 4, "num_frames": 5, "seed": 3, "preview_every": 2}


def test_same_results_as_a_local_one(http_server: Server, tiny_generator: DiffGenerator) -> None:
    with DiffGenerator.connect(http_server.url, token=http_server.key) as remote:
        assert remote.model == tiny_generator.model
        for options in (CLIP, {**CLIP, "num_frames": 1, "n": 2}):
            local, far = tiny_generator.submit("a cat", **options), remote.submit("a cat", **options)
            assert np.array_equal(far.result(60).pixels, local.result(60).pixels)
            assert far.result().params == local.result().params
            assert (far.result().seeds, far.result().warnings) == (local.result().seeds, local.result().warnings)
            assert [told(event) for event in far.events()] == [told(event) for event in local.events()]
            assert {event.id for event in far.events()} == {far.id}
        before = http_server.metric("diffgen_video_frames_generated_total")
        asked = {**CLIP, "output_type": "latent", "preview_every": None}
        latents = remote.generate("a cat", **asked).latents
        assert http_server.metric("diffgen_video_frames_generated_total") == before + 5
        assert np.array_equal(latents, tiny_generator.generate("a cat", **asked).latents)


def told(event: Any) -> tuple[Any, ...]:
    if isinstance(event, Progress):
        return ("progress", event.stage, event.step, event.total)
    if isinstance(event, Preview):
        return ("preview", event.step, event.total, event.pixels.tobytes())
    return (type(event).__name__,)


def test_errors_cancel_status_and_close(http_server: Server) -> None:
    with DiffGenerator.connect(http_server.url, token=http_server.key) as remote:
        with pytest.raises(InvalidRequest) as caught:
            remote.generate("a", width=65)
        assert (caught.value.code, caught.value.param) == ("invalid_size", "width")
        handle = remote.submit(**LONG)
        events = handle.events()
        assert isinstance(next(events), Accepted)
        assert next(events).id == handle.id
        wait_until(lambda: len(remote.status().requests) == 1, 10, "it is in work")
        handle.cancel()
        with pytest.raises(RequestCancelled):
            handle.result(10)
        other = remote.submit(**LONG)
        wait_until(lambda: len(remote.status().requests) == 1, 10, "it is in work")
        assert remote.abort(remote.status().requests[0].id)
        with pytest.raises(RequestCancelled):
            other.result(10)
        assert not remote.abort("none")
        last = remote.submit(**LONG)
        wait_until(lambda: len(remote.status().requests) == 1, 10, "it is in work")
    with pytest.raises(ServerClosed):
        last.result(10)
    wait_until(lambda: http_server.http.get("/v1/status").json()["requests"] == [], 10, "closing cancels")
    with pytest.raises(ConnectionFailed) as refused:
        DiffGenerator.connect(http_server.url, token="wrong")
    assert refused.value.code == "unauthorized"
    with pytest.raises(ConnectionFailed):
        DiffGenerator.connect("http://127.0.0.1:1", timeout=0.5)


def test_command_line(http_server: Server, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{http_server.key}\n")
    command = ["generate", "--prompt", "a", "--size", "64x64", "--num-inference-steps", "2", "--json"]
    connect = ["--connect", http_server.url, "--token-file", "key"]
    done = subprocess.run([*DIFFGEN, *command, *connect], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / json.loads(done.stdout)["path"]).exists()


FEW = settings(
    max_examples=5, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
CONFORMS = [response_schema_conformance, content_type_conformance, status_code_conformance]


def test_openapi_document(http_server: Server) -> None:
    """What fits the document, and what does not, is answered in its forms, never by a 500; its examples succeed."""
    headers = {"authorization": f"Bearer {http_server.key}"}
    document = http_server.http.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for kind, content in operations.get("post", {}).get("requestBody", {}).get("content", {}).items():
            if kind == "application/json":
                assert http_server.post(content["example"], path).status_code == 200, path
            elif "example" in content:
                form = {name: (None, str(value)) for name, value in content["example"].items()}
                assert http_server.http.post(path, files=form).status_code == 200, path
    schema = schemathesis.openapi.from_dict(document)
    images = schema["/v1/images/generations"]["POST"]
    streamed = {"prompt": "a", "size": "64x64", "num_inference_steps": 2, "stream": True, "partial_images": 1}
    case = images.Case(body=streamed, media_type="application/json")
    answer = case.call(base_url=http_server.url, headers=headers, timeout=60)
    assert answer.headers["content-type"][0].startswith("text/event-stream"), answer.text
    case.validate_response(answer, checks=CONFORMS)
    seen = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

            @FEW
            @given(operation.as_strategy(generation_mode=mode))
            def check(case: Any) -> None:
                seen.add(case.operation.label)
                answer = case.call(base_url=http_server.url, headers=headers, timeout=60)
                assert answer.status_code != 500, answer.text
                case.validate_response(answer, checks=CONFORMS)

            # Where there is nothing that could be wrong, nothing is tried.
            with contextlib.suppress(Unsatisfiable, unittest.SkipTest):
                check()
    assert {"POST /v1/images/generations", "POST /v1/videos", "GET /v1/models/{model_id}"} <= seen
    for job in http_server.http.get("/v1/videos", params={"limit": 100}).json()["data"]:
        http_server.http.delete(f"/v1/videos/{job['id']}")
    wait_until(lambda: http_server.http.get("/v1/status").json()["requests"] == [], 20, "nothing is left")
