"""``diffgen bulk``, ``status`` and ``cancel`` as a user runs them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import level_difference
from PIL import Image
from processes import DIFFGEN, leftovers, run_root, wait_until

from diffgen import DiffGenerator
from diffgen.wire.messages import Progress

COUNT = 40
SMALL = {"width": 64, "height": 64, "num_frames": 1, "num_inference_steps": 3}


def bulk(root: Path, *arguments: str) -> list[str]:
    return [*DIFFGEN, "bulk", str(root / "requests.jsonl"), "--output-path", str(root / "out"), *arguments]


def run(command: list[str], root: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(root)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)


def write_requests(root: Path, requests: list[dict[str, Any]]) -> None:
    (root / "requests.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))


def entries(root: Path) -> list[dict[str, Any]]:
    manifest = root / "out" / "manifest.jsonl"
    return [json.loads(line) for line in manifest.read_text().splitlines()[1:]] if manifest.exists() else []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_killed_in_the_middle_is_resumed_and_each_is_done_once(tiny_wan: Path) -> None:
    with run_root() as root:
        write_requests(root, [{"prompt": f"a {i}", **SMALL, **({"seed": i} if i % 2 else {})} for i in range(COUNT)])
        command = bulk(root, "--model-path", str(tiny_wan), "--device", "cpu")
        process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(root)}, stdout=subprocess.DEVNULL)
        wait_until(lambda: len(entries(root)) >= COUNT // 3, 120, "a third is done")
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_until(lambda: not leftovers(root), 5, "the ranks are gone")
        before = entries(root)
        assert len(before) < COUNT
        files = {path: (root / "out" / path).stat().st_mtime_ns for entry in before for path in entry["paths"]}
        # As if the crash had come between a file and its line, and in the middle of a line and of a file.
        (root / "out" / ".000001_1.1-abcdef01.png").write_text("half")
        with (root / "out" / "manifest.jsonl").open("a") as manifest:
            manifest.write('{"line": 3')

        done = run(command, root)
        assert done.returncode == 0, done.stderr
        assert f"{len(before)} of {COUNT} requests are in the manifest" in done.stderr
        after = entries(root)
        assert after[: len(before)] == before, "nothing is done twice"
        assert sorted(entry["line"] for entry in after) == list(range(1, COUNT + 1))
        assert {entry["status"] for entry in after} == {"done"}
        assert len(done.stdout.splitlines()) == COUNT - len(before)
        names = sorted(path.name for path in (root / "out").iterdir())
        assert names == sorted(["manifest.jsonl", *(path for entry in after for path in entry["paths"])])
        assert {path: (root / "out" / path).stat().st_mtime_ns for path in files} == files
        assert [entry["seed"] for entry in sorted(after, key=lambda e: e["line"]) if not entry["line"] % 2] == [
            *range(1, COUNT, 2)
        ]
        again = run(command, root)
        assert again.returncode == 0
        assert again.stdout == ""


@pytest.mark.slow
def test_failures_are_noted_and_retried_on_demand(tiny_wan: Path) -> None:
    with run_root() as root:
        write_requests(root, [{"prompt": "a", "seed": 1, **SMALL}, {"prompt": "a", **SMALL, "width": 100}])
        command = bulk(root, "--model-path", str(tiny_wan), "--device", "cpu")
        first = run(command, root)
        assert first.returncode == 1
        assert [(e["line"], e["status"], e.get("code")) for e in sorted(entries(root), key=lambda e: e["line"])] == [
            (1, "done", None),
            (2, "failed", "invalid_size"),
        ]
        assert run(command, root).returncode == 1
        assert len(entries(root)) == 2
        assert run([*command, "--retry-failed"], root).returncode == 1
        assert len(entries(root)) == 3
        write_requests(root, [{"prompt": "other", "seed": 1, **SMALL}])
        other = run(command, root)
        assert other.returncode == 2
        assert "other content" in other.stderr


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "line 2.*is not JSON.*give a JSON object"),
        ("[]", "line 2.*JSON object"),
        ('{"prompt": "a", "sede": 1}', "line 2.*did you mean 'seed'"),
        ('{"seed": 1}', "line 2.*prompt is missing"),
        ('{"prompt": "a", "output_type": "np"}', "line 2.*output_type"),
        ('{"prompt": "a", "seed": 1, "seed": 2}', "line 2.*'seed' stands there twice"),
        ('{"prompt": "a", "seed": %s}' % ("9" * 5000), "line 2.*is not JSON"),
        ("[" * 100_000, "line 2.*is not JSON"),
        ('{"prompt": "a", "preview_every": 2}', "line 2.*preview_every"),
        ("a cat\na dog", r"line 2.*is not JSON.*\n.*line 3.*is not JSON.*\n.*2 of 3 lines"),
    ],
)
def test_bad_lines_are_told_before_anything_is_loaded(line: str, text: str) -> None:
    with run_root() as root:
        (root / "requests.jsonl").write_text(json.dumps({"prompt": "a"}) + f"\n{line}\n")
        done = run(bulk(root), root)
        assert done.returncode == 2
        assert re.search(text, done.stderr)
        assert "Traceback" not in done.stderr


def test_a_file_that_was_refused_may_be_mended(tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    command = [*bulk(tmp_path), "--connect", "nowhere"]
    for content in (b'{"prompt": "a", "sede": 1}', b"", b" \n", b'{"prompt": "\xff"}'):
        requests.write_bytes(content)
        refused = run(command, tmp_path)
        assert (refused.returncode, "Traceback" in refused.stderr) == (2, False), refused.stderr
    requests.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "priority": null}\r\n')  # as Windows writes it
    mended = run(command, tmp_path)
    assert mended.returncode == 1
    assert "cannot connect" in mended.stderr
    piped = subprocess.run([*command[:4], "-", *command[5:]], input=b"\xff", capture_output=True, check=False)
    assert (piped.returncode, b"Traceback" in piped.stderr) == (2, False), piped.stderr
    assert b"UTF-8" in piped.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_request_that_kills_the_ranks_does_not_hold_up_the_others(
    tiny_wan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIFFGEN_FAULT", "exit@denoise:1:0:*:deadly")
    with run_root() as root:
        write_requests(root, [{"prompt": prompt, "seed": 1, **SMALL} for prompt in ("deadly", "a", "b")])
        done = run(bulk(root, "--model-path", str(tiny_wan), "--device", "cpu"), root)
        assert done.returncode == 1
        assert "1 of 3 requests have failed" in done.stderr
        assert [(e["line"], e["status"], e.get("code")) for e in sorted(entries(root), key=lambda e: e["line"])] == [
            (1, "failed", "worker_died"),
            (2, "done", None),
            (3, "done", None),
        ]


@pytest.mark.slow
def test_bulk_status_and_cancel_on_a_running_server(tiny_wan: Path) -> None:
    with run_root() as root, DiffGenerator.from_pretrained(str(tiny_wan), device="cpu") as generator:
        write_requests(root, [{"prompt": "a", "seed": seed, **SMALL} for seed in range(3)])
        done = run(bulk(root, "--connect", generator.address), root)
        assert done.returncode == 0, done.stderr
        expected = generator.generate("a", seed=2, **SMALL)
        image = np.asarray(Image.open(root / "out" / "000003_2.png"))
        assert level_difference(image, expected.pixels[0, 0]) <= 1

        # So large that it runs longer than the commands take to start, however fast the machine is.
        handle = generator.submit("a", seed=1, num_inference_steps=900, width=384, height=384, num_frames=1)
        next(event for event in handle.events() if isinstance(event, Progress) and event.stage == "denoise")
        status = run([*DIFFGEN, "status", "--connect", generator.address], root)
        assert status.returncode == 0, status.stderr
        assert re.search(rf"{handle.id}  1 x 384x384  denoise \d+/900", status.stdout)
        assert "1 running, 0 queued; ended: 4 done" in status.stdout
        as_json = json.loads(run([*DIFFGEN, "status", "--json", "--connect", generator.address], root).stdout)
        assert as_json["requests"][0]["id"] == handle.id
        assert run([*DIFFGEN, "cancel", handle.id, "--connect", generator.address], root).returncode == 0
        wait_until(handle.done, 30, "the request has ended")
        gone = run([*DIFFGEN, "cancel", handle.id, "--connect", generator.address], root)
        assert gone.returncode == 1
        assert "no request" in gone.stderr
