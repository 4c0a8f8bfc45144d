"""Parts of the HTTP server that need neither a model nor a socket."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.datastructures import FormData, Headers

from diffgen.api import DiffGenerator
from diffgen.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    DiffgenError,
    GenerationError,
    InvalidRequest,
    NanOutput,
    OutOfMemory,
    OutputError,
    QueueFull,
    ServerError,
    StartFailed,
    WorkerDied,
)
from diffgen.handle import GenerationHandle
from diffgen.http.app import create_app
from diffgen.http.args import HttpArgs, HttpLimits, check_http, is_loopback, names, read_api_keys
from diffgen.http.bodies import _form_values, parse_json
from diffgen.http.errors import HttpError, from_diffgen
from diffgen.http.guard import Access
from diffgen.http.health import troubles
from diffgen.http.jobs import percent
from diffgen.http.listen import listen
from diffgen.http.params import ImageOptions, as_clip, check_image, known_fields, quality_of, split
from diffgen.http.schema import request_schema
from diffgen.http.server import _Server
from diffgen.http.service import Service
from diffgen.http.store import Job, Store
from diffgen.http.traces import Traces
from diffgen.http.work import Work, Works
from diffgen.logs import about, set_up_logs
from diffgen.params import ModelSpec, SamplingParams
from diffgen.result import GenerationResult
from diffgen.server.pipe import Ready
from diffgen.server.replica import RankStatus
from diffgen.wire.messages import Progress


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (InvalidRequest("x"), 400, None),
        (QueueFull("x", retry_after=7), 503, "7"),
        (DeadlineExceeded("x"), 504, None),
        (DeadlineExceeded("x", retryable=True, retry_after=3), 504, "3"),
        (OutOfMemory("x"), 500, None),
        (NanOutput("x"), 500, None),
        (OutputError("x"), 507, None),
        (WorkerDied("x"), 503, "5"),
        (WorkerDied("x", retryable=False), 500, None),
        (ConnectionFailed("x"), 503, "5"),
    ],
)
def test_errors_as_answers(error: DiffgenError, status: int, retry: str | None) -> None:
    answer = from_diffgen(error).response()
    assert answer.status_code == status
    assert answer.headers.get("retry-after") == retry
    assert answer.headers["x-should-retry"] == ("false" if retry is None else "true")
    assert json.loads(bytes(answer.body))["error"]["code"] == error.code


def test_no_path_of_the_server_is_told() -> None:
    for kind in (ConnectionFailed, OutputError, ServerError, WorkerDied):
        assert "/srv" not in from_diffgen(kind("no server at ipc:///srv/my run/s, /srv/x")).message
    assert from_diffgen(GenerationError("decode failed: '/srv/x'")).message == "decode failed: '(path)'"
    assert from_diffgen(InvalidRequest("/a/b")).message == "/a/b", "it is the client's own"


def asked(service: Service, method: str, address: str, **more: str) -> tuple[dict[str, str], list[bytes]]:
    """Headers and pieces of the body of an answer, as the application gives them to what serves it."""
    path, _, query = address.partition("?")
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode()}
    headers = {"host": "localhost", **more}
    scope |= {"headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
    scope |= {"asgi": {"spec_version": "2.4"}}
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(create_app(service, ())(scope, receive, send))  # type: ignore[arg-type]
    told = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return told, [message["body"] for message in sent[1:]]


def test_a_head_reads_no_file(tmp_path: Path) -> None:
    service = Service(HttpArgs(), HttpLimits(), Store(tmp_path))
    service.store.add_image("img_1", [b"x" * 200_000], "image/png", time.time() + 100)
    done = job(1, status="completed", expires_at=time.time() + 100)
    service.store.add(done)
    service.store.write(done.id, "mp4", lambda path: path.write_bytes(b"y" * 200_000))
    for address in ("/v1/images/img_1/content", f"/v1/videos/{done.id}/content"):
        told, body = asked(service, "GET", address)
        head, nothing = asked(service, "HEAD", address)
        assert (len(b"".join(body)), told["content-length"]) == (200_000, "200000")
        assert nothing == [b""]
        assert "etag" in head
        assert {**head, "x-request-id": ""} == {**told, "x-request-id": ""}
        for wrong in ("bytes=200000-", "bytes=x"):
            told, body = asked(service, "GET", address, range=wrong)
            error = json.loads(b"".join(body))["error"]
            assert (error["code"], told["x-should-retry"]) == ("invalid_range", "false")
            assert "200000 bytes" in error["message"]
        assert asked(service, "GET", address, range="bytes=0-9")[1][0] in (b"x" * 10, b"y" * 10)
    assert "unknown_route" not in str(asked(service, "GET", "/v1/images/img_1/content?variant=1"))
    (tmp_path / f"{done.id}.mp4").unlink()
    assert b"video_expired" in b"".join(asked(service, "GET", f"/v1/videos/{done.id}/content")[1])
    service.close()


def test_ignored_parameters_of_an_address_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a header, with the answer where it has a place for warnings, and in the log."""
    service = Service(HttpArgs(unknown_params="ignore", served_model_name="m"), HttpLimits(), Store(tmp_path))
    service.store.add(job(1, warnings=("its own",), status="failed", error=("code", "text")))
    caplog.set_level(logging.INFO, "diffgen.http")
    warning = "'limt' has no effect: it is not known"
    for address in ("/v1/videos/video_1?limt=2", "/v1/videos?limt=2&limit=1", "/v1/videos/video_1/content?limt=2"):
        headers, body = asked(service, "GET", address)
        assert headers["x-warnings"] == warning
        assert vars(caplog.records[-1])["warnings"] == [warning]
        if address.startswith("/v1/videos/video_1?"):
            assert json.loads(b"".join(body))["warnings"] == ["its own", warning]
    headers, _ = asked(service, "GET", "/v1/videos?limit=1")
    assert "x-warnings" not in headers
    assert "warnings" not in vars(caplog.records[-1])
    service.close()


@pytest.mark.timeout(60)
def test_a_server_ends_where_one_of_its_tasks_fails(tmp_path: Path) -> None:
    """As by a mistake in it, which no client and nobody at the terminal would learn otherwise."""
    args = HttpArgs(port=0)
    service = Service(args, HttpLimits(), Store(tmp_path))
    server = _Server(service, create_app(service, ()))
    with listen(args) as listener, pytest.raises(ServerError, match=r"the server failed: TypeError: .*limits"):
        asyncio.run(server.work(listener, HttpLimits(), {"limits": HttpLimits()}))
    service.close()


def test_no_job_is_taken_while_those_of_a_former_server_are_looked_up(tmp_path: Path) -> None:
    """It would be one of them, and run twice."""
    service, generator = Service(HttpArgs(), HttpLimits(), Store(tmp_path)), cast(DiffGenerator, object())

    async def check() -> None:
        with service.store._lock:  # for which the look-up waits
            opening = asyncio.create_task(service.open(generator))
            await asyncio.sleep(0.1)
            with pytest.raises(HttpError, match="being loaded"):
                service.accepting()
        await opening
        assert service.accepting() is generator

    asyncio.run(check())
    service.close()


def test_a_client_that_stalls_while_the_server_ends_is_told(tmp_path: Path) -> None:
    service = Service(HttpArgs(), HttpLimits(), Store(tmp_path))
    service.generator = cast(DiffGenerator, object())
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/images/generations",
        "query_string": b"",
        "headers": headers,
    }
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def check() -> None:
        stalls: asyncio.Future[Any] = asyncio.Future()
        task = asyncio.ensure_future(create_app(service, ())(scope, lambda: stalls, send))
        await asyncio.sleep(0.1)
        task.cancel()  # as uvicorn does
        await task

    asyncio.run(check())
    assert (sent[0]["status"], json.loads(sent[1]["body"])["error"]["code"]) == (503, "shutting_down")
    service.close()


def test_json_bodies() -> None:
    assert parse_json(b'{"a": [1, null, "\\u00e9"]}') == {"a": [1, None, "é"]}
    for wrong in (b"", b"{", b"[]", b"1", b"\xff", b'{"a":NaN}', b'{"a":Infinity}', b'{"a":1,"a":1}', b"[" * 10**5):
        with pytest.raises(InvalidRequest) as caught:
            parse_json(wrong)
        assert caught.value.code == "invalid_json"


def test_form_texts_become_the_types_of_their_fields() -> None:
    known = known_fields(ImageOptions)
    form = FormData(
        [("prompt", "12"), ("n", "2"), ("guidance_scale", "4.5"), ("seed", "x"), ("stream", "true"), ("size", "")]
    )
    expected = {"prompt": "12", "n": 2, "guidance_scale": 4.5, "seed": "x", "stream": True}
    assert _form_values(form, known) == expected
    assert _form_values(FormData([("seed", "1_0"), ("fps", "nan")]), known) == {"seed": "1_0", "fps": "nan"}
    with pytest.raises(InvalidRequest, match="twice"):
        _form_values(FormData([("n", "1"), ("n", "2")]), known)


def test_split() -> None:
    params, options, warnings = split(
        {
            "prompt": "a",
            "n": 2,
            "style": "vivid",
            "quality": "auto",
            "output_quality": "low",
            "generator_device": "cuda",
        },
        ImageOptions,
        ignore_unknown=False,
    )
    assert (params.num_outputs_per_prompt, quality_of(options)) == (2, 35)
    assert [warning.split()[0] for warning in warnings] == ["style", "generator_device", "output_quality"]
    with pytest.raises(InvalidRequest, match="did you mean 'seed'"):
        split({"prompt": "a", "sede": 1}, ImageOptions, ignore_unknown=False)
    assert split({"prompt": "a", "sede": 1}, ImageOptions, ignore_unknown=True)[2] == [
        "'sede' has no effect: it is not known"
    ]
    many = split({"prompt": "a", **dict.fromkeys(map(str, range(500)))}, ImageOptions, ignore_unknown=True)[2]
    assert (len(many), many[-1]) == (21, "480 further parameters have no effect: they are not known")
    assert check_image(params, options).num_frames == 1
    check_image(params, ImageOptions(output_compression=100))  # of png, which loses nothing
    webp = ImageOptions(output_format="webp")
    for size in ({"size": "16384x64"}, {"height": 16384}):
        with pytest.raises(InvalidRequest, match="webp holds at most 16383 pixels a side"):
            check_image(SamplingParams(prompt="a", **size), webp)
        check_image(SamplingParams(prompt="a", **size), options)
    check_image(SamplingParams(prompt="a", size="auto"), webp)


def test_a_clip_has_a_length(model: ModelSpec) -> None:
    assert as_clip(SamplingParams(prompt="a"), model).seconds is None, "the model's own"
    still = ModelSpec(name="m", family="f", defaults={}, size_multiple=8, frame_stride=0)
    with pytest.raises(InvalidRequest, match="still images"):
        as_clip(SamplingParams(prompt="a"), still)


def test_the_schema_has_the_fields_rules() -> None:
    schema = request_schema(known_fields(ImageOptions))
    assert schema["properties"]["seed"] == {
        "description": schema["properties"]["seed"]["description"],
        "type": ["integer", "null"],
        "minimum": 0,
        "maximum": 2**63 - 1,
    }
    assert schema["properties"]["n"]["maximum"] == 10
    assert "output_type" not in schema["properties"]
    assert not schema["additionalProperties"]


def test_access() -> None:
    access = Access([b"k1", "clà".encode()], ["localhost"], ["https://ours.example"])

    def code(path: str, **headers: str) -> str | None:
        try:
            access.check(path, Headers({"host": "localhost:8000", **headers}))
        except HttpError as error:
            return error.code
        return None

    assert code("/v1/models") == "invalid_api_key"
    assert code("/v1/models", authorization="Bearer k1") is None
    assert code("/v1/models", authorization="Bearer clà".encode().decode("latin-1")) is None
    assert code("/v1/models", authorization="Bearer k") == "invalid_api_key"
    assert code("/health") is None
    assert code("/health", host="evil.example") == "host_not_allowed"
    assert code("/health", host="") is None, "as HTTP/1.0 has it"
    assert code("/health", origin="http://evil.example") == "origin_not_allowed"
    assert code("/health", origin="http://localhost:8000") is None
    assert code("/health", origin="https://ours.example") is None


def test_where_keys_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIFFGEN_API_KEY", raising=False)
    assert read_api_keys(HttpArgs()) == ()
    with pytest.raises(InvalidRequest, match="no API key is set"):
        read_api_keys(HttpArgs(host="0.0.0.0"))
    assert read_api_keys(HttpArgs(host="0.0.0.0", insecure=True)) == ()
    (tmp_path / "keys").write_text("a\n\n b \n")
    monkeypatch.setenv("DIFFGEN_API_KEY", "c")
    with pytest.raises(InvalidRequest, match=r"insecure with an API key.*leave out one"):
        read_api_keys(HttpArgs(insecure=True))
    assert read_api_keys(HttpArgs(host="0.0.0.0", api_key_file=str(tmp_path / "keys"))) == (b"a", b"b", b"c")
    (tmp_path / "keys").write_text("\n")
    with pytest.raises(InvalidRequest, match="holds no key"):
        read_api_keys(HttpArgs(api_key_file=str(tmp_path / "keys")))
    assert [is_loopback(host) for host in ("localhost", "127.0.0.2", "::1", "0.0.0.0", "example.org")] == [True] * 3 + [
        False
    ] * 2
    assert names(" a, b,,") == ("a", "b")


@pytest.mark.parametrize("origin", ["*", "https://a.example/", "https://a.example/x", "a.example", "https://A.example"])
def test_an_origin_that_no_page_has_is_refused(origin: str) -> None:
    with pytest.raises(InvalidRequest, match="as browsers send it") as caught:
        check_http(HttpArgs(allowed_origins=f"http://localhost:3000,{origin}"))
    assert caught.value.param == "allowed_origins"


def test_where_clients_are_sent_to_is_a_url() -> None:
    check_http(
        HttpArgs(allowed_origins="https://a.example, http://[::1]:80,null", public_base_url="https://b.example/c/")
    )
    for wrong in ("b.example", "https://", "https://b.example?x", "ftp://b.example"):
        with pytest.raises(InvalidRequest, match="it must be a URL"):
            check_http(HttpArgs(public_base_url=wrong))


def job(number: int, **changes: object) -> Job:
    fields = {"id": f"video_{number}", "model": "m", "params": SamplingParams(prompt="a"), "created_at": 1.0}
    return Job(**{**fields, **changes})  # type: ignore[arg-type]


def test_store(tmp_path: Path) -> None:
    store = Store(tmp_path / "data")
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    with pytest.raises(StartFailed, match="another server"):
        Store(tmp_path / "data")
    jobs = [store.add(job(number)) for number in range(3)]
    assert store.page(None, 2, True) == jobs[:0:-1]
    assert store.page("video_1", 5, True) == jobs[:1]
    assert store.page("video_1", 5, False) == jobs[2:]
    assert store.page("nope", 5, True) is None
    first = store.add(job(7, key="k"))
    assert store.add(job(8, key="k")) == first, "an Idempotency-Key makes one job"
    store.write("video_0", "mp4", lambda path: path.write_bytes(b"x"))
    assert store.delete("video_0")
    assert not store.delete("video_0")
    assert not store.path("video_0", "mp4").exists()
    store.close()
    again = Store(tmp_path / "data")
    assert [each.id for each in again.unfinished()] == ["video_1", "video_2", "video_7"]
    again.write("video_1", "mp4", lambda path: path.write_bytes(b"x"))
    again.update(job(1, status="completed", expires_at=time.time() - 1))
    again.update(job(2, status="failed", expires_at=time.time() - 90_000))
    again.sweep()
    assert not again.path("video_1", "mp4").exists()
    assert again.get("video_1") is not None, "an expired job is remembered for a day"
    assert again.get("video_2") is None
    again.write("video_9", "mp4", lambda path: path.write_bytes(b"x"))
    again.update(job(9, status="completed"))
    assert not again.path("video_9", "mp4").exists(), "of a job deleted meanwhile nothing stays"
    again.close()


KILLED = """
import os, pathlib, sys
from diffgen.media import files

def save(path):
    path.write_bytes(b"x")
    os.kill(os.getpid(), 9)

files.write(pathlib.Path(sys.argv[1]), "video_1_thumbnail", "webp", save)
"""


def test_halves_of_files_do_not_stay(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False).returncode == -9
    (half,) = tmp_path.iterdir()
    theirs = tmp_path / half.name.replace("video_1", "cat")
    theirs.touch()  # another program's, which may be at it
    store = Store(tmp_path)
    assert (half.exists(), theirs.exists()) == (False, True)
    store.close()


def test_a_file_that_cannot_be_removed_keeps_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of files that have expired and of one that is deleted. Once it can be removed, it is."""
    store = Store(tmp_path)
    for number in (1, 2):
        store.add(job(number))
        store.update(job(number, status="completed", expires_at=time.time() - 90_000))
    (tmp_path / "video_1.mp4").mkdir()  # which nobody can unlink
    for name in ("img_1_0.png", "img_2_0.png", "img_2_1.png"):
        (tmp_path / name).mkdir() if name == "img_2_0.png" else (tmp_path / name).touch()
    for number in (1, 2):
        store.add_image(f"img_{number}", [], "image/png", time.time() - 90_000)
    store.sweep()
    assert sorted(path.name for path in tmp_path.glob("*_*")) == ["img_2_0.png", "video_1.mp4"]
    assert "Is a directory: '" in caplog.text
    assert [store.get("video_1") is None, store.get("video_2") is None] == [False, True]
    assert [store.image("img_1") is None, store.image("img_2") is None] == [True, False]
    assert store.delete("video_1")
    assert store.get("video_1") is None, "gone for every client"
    for name in ("img_2_0.png", "video_1.mp4"):
        (tmp_path / name).rmdir()
        (tmp_path / name).touch()
    store.sweep()
    assert list(tmp_path.glob("*_*")) == []
    assert (store.page(None, 9, True), store.image("img_2")) == ([], None)
    store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "diffgen", folder], check=False).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_jobs_can_be_deleted_while_the_disk_is_full(small_disk: Path) -> None:
    store = Store(small_disk)
    texts = [SamplingParams(prompt=f"{number}" * 2000) for number in range(9)]
    for number, params in enumerate(texts):
        store.add(job(number, params=params))
    store.write("video_0", "mp4", lambda path: path.write_bytes(b"x"))
    with pytest.raises(OSError, match="No space"):
        (small_disk / "other").write_bytes(bytes(2**22))
    with pytest.raises(OutputError, match="disk is full"):
        store.add(job(9))
    assert [store.delete(f"video_{number}") for number in (0, 1, 2, 2)] == [True, True, True, False]
    assert [each.id for each in store.page(None, 9, False) or ()] == [f"video_{number}" for number in range(3, 9)]
    (small_disk / "jobs.sqlite").rename(small_disk / "jobs")
    (small_disk / "jobs.sqlite-wal").rename(small_disk / "jobs-wal")
    after = sqlite3.connect(f"file:{small_disk / 'jobs'}?mode=ro", uri=True).execute("SELECT id FROM videos").fetchall()
    assert after == [(f"video_{number}",) for number in range(3, 9)], "what a server would find after a crash"


def test_a_deletion_that_cannot_be_stored_is_remembered(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, second = (store.add(job(number, key=f"k{number}")) for number in range(2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        assert store.delete(first.id)
        assert store.get(first.id) is None
        assert store.page(None, 9, True) == [second]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.add(job(2, key="k0")).id == "video_2", "its key is free again"
    store.close()
    assert [each.id for each in Store(tmp_path).unfinished()] == ["video_1", "video_2"]


def test_progress_grows_with_the_work() -> None:
    events = [("encode", 1, 1), *(("denoise", k, 4) for k in range(1, 5)), ("decode", 1, 2), ("decode", 2, 2)]
    found = [percent(Progress("i", *event)) for event in events]
    assert found == sorted(found)
    assert found[1] > 0
    assert found[-1] < 100


def test_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: logging.getLogger(name).handlers[:] for name in (None, "torch")}
    try:
        set_up_logs("info", "json", "http")
        logging.getLogger("a").info("said %s", "x", extra={"request_id": "r"})
        line = json.loads(capsys.readouterr().err)
        set_up_logs("info", "text", "rank 0")
        logging.getLogger("a").warning("y", extra={"n": 1})
        text = capsys.readouterr().err
        with about(["a1", "b2"]):
            logging.getLogger("torch").warning("slow")
        during = capsys.readouterr().err
    finally:
        for name, handlers in before.items():
            logging.getLogger(name).handlers[:] = handlers
        logging.captureWarnings(False)
    expected = {"level": "info", "process": "http", "logger": "a", "message": "said x", "request_id": "r"}
    assert {name: line[name] for name in expected} == expected
    assert text.endswith("rank 0 WARNING a: y n=1\n")
    assert during.endswith("rank 0 WARNING torch: slow generation=a1 b2\n")


def test_spans_are_refused_where_they_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="it must be a URL, such as"):
        Traces("localhost:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(StartFailed, match=r"pip install 'diffgen\[otel\]'"):
        Traces("http://localhost:4318/v1/traces")


def test_health_of_replicas() -> None:
    """One silent rank takes its replica down, not the others."""
    now, ready = time.monotonic(), Ready("m")
    alive, silent, starting = (
        RankStatus(0, 1, ready, now),
        RankStatus(1, 2, ready, now - 9),
        RankStatus(2, 3, None, now),
    )
    found = troubles([[alive], [alive, silent], [starting], []])
    assert found[0] is None
    told = ["[1] have given no sign of life for over 5 s", "[2] are being started again", "not started again"]
    assert all(text in str(trouble) for text, trouble in zip(told, found[1:], strict=True))


def test_another_run_of_a_job_is_in_the_trace_of_the_first() -> None:
    sent = InMemorySpanExporter()
    traces = Traces("http://127.0.0.1:9/v1/traces", sent)
    caller = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "authorization": "Bearer x"}
    called, alone = traces.begin(caller), traces.begin({})
    assert called.headers == {"traceparent": caller["traceparent"]}, "and no other header of the client's"
    for trace in (called, alone, traces.begin(called.headers), traces.begin(alone.headers)):
        trace.end()
    traces.close()
    wholes = [span for span in sent.get_finished_spans() if span.name == "generate_content"]
    ids = [format(span.context.trace_id, "032x") for span in wholes]
    assert ids[0] == ids[2] == "a" * 32
    assert ids[1] == ids[3] != ids[0]
    assert [span.parent.span_id if span.parent else None for span in wholes] == [
        *(0xBBBBBBBBBBBBBBBB, None, 0xBBBBBBBBBBBBBBBB, wholes[1].context.span_id),
    ]


def test_a_result_is_kept_for_its_key_from_its_end_on() -> None:
    """However long the request has taken."""
    handle = GenerationHandle(SamplingParams(prompt="a"), lambda request_id: None)
    work = Work(handle, "digest", keyed=True, created=0.0)
    assert work.worth_keeping(5000.0)
    handle.publish(GenerationResult(id=handle.id, params=handle.params, seeds=(1,)))
    works = Works()
    works._keyed["key"] = work
    works._forget()
    assert works._keyed == {"key": work}
    assert work.ended is not None
    assert work.worth_keeping(work.ended + 599)
    assert not work.worth_keeping(work.ended + 601)
