"""The command line as a user runs it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from oracle import level_difference
from PIL import Image
from processes import DIFFGEN, leftovers, rank_processes, run_root, wait_until

FAST = ["--width", "64", "--height", "64", "--num-inference-steps", "2", "--device", "cpu"]


def diffgen(*arguments: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*DIFFGEN, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=170, check=False, **options)


def test_help_is_quick_and_imports_nothing_heavy(tmp_path: Path) -> None:
    def seconds() -> float:
        began = time.monotonic()
        assert diffgen("generate", "--help", cwd=tmp_path).returncode == 0
        return time.monotonic() - began

    assert min(seconds() for _ in range(3)) < 3.0, "ten times the bar of 0.3 s"
    code = "import sys, diffgen.cli.main as m; m.build_parser(); print({'torch', 'numpy', 'zmq'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_env(tmp_path: Path) -> None:
    done = diffgen("env", cwd=tmp_path)
    assert done.returncode == 0
    names = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert {"diffgen", "python", "torch", "diffusers", "cpu", "cuda"} <= set(names)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--seed", "1"], 2, "prompt is missing"),
        (["--prompt", "a", "--seed", "-1"], 2, "at least 0"),
        (["--prompt", "a", "--seed", "1.5"], 2, "invalid int value"),
        (["--prompt", "a", "--guidance-scale", "nan"], 2, "finite"),
        (["--prompt", "a", "--sede", "1"], 2, "unrecognized arguments: --sede 1; did you mean --seed?"),
        (["--prompt", "a", "--frame-count=5"], 2, "did you mean --num-frames?"),
        (["--prompt", "a", "--no-metadat"], 2, "did you mean --no-metadata?"),
        (["--prompt", "a", "b"], 2, "unrecognized arguments: b; a prompt stands after --prompt"),
        (["--prompt", "a", "--limit", "stepz=5"], 2, "did you mean 'steps'"),
        (["--prompt", "a", "--fps", "0"], 2, "fps is 0"),
        (["--prompt", "a", "--model-path", "./nope"], 1, "no such directory"),
        (["--prompt", "a", "--output-path", "/proc/nope"], 1, "output folder"),
        (["--prompt", "a", "--output-file-name", "../a"], 1, "plain file name"),
        (["--prompt", "a\udc80"], 2, "surrogate"),
    ],
)
def test_mistakes_are_told_within_a_second_or_so(tmp_path: Path, arguments: list[str], code: int, text: str) -> None:
    began = time.monotonic()
    done = diffgen("generate", *arguments, cwd=tmp_path)
    assert done.returncode == code
    assert text in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < 5


def test_a_full_disk_behind_stdout_is_told() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*DIFFGEN, "completion", "bash"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (1, "diffgen: error: [Errno 28] No space left on device\n")


@pytest.mark.slow
def test_the_same_seed_twice_gives_the_same_pixels_in_two_files(tiny_wan: Path, tmp_path: Path) -> None:
    command = ["generate", "--model-path", str(tiny_wan), "--prompt", "a red circle", "--num-frames", "1", *FAST]
    first = diffgen(*command, "--seed", "1", cwd=tmp_path)
    second = diffgen(*command, "--seed", "1", "--num-gpus", "2", cwd=tmp_path)
    assert first.stderr == second.stderr == "", "no bar, no noise of libraries"
    one, two = Path(first.stdout.strip()), Path(second.stdout.strip())
    assert one != two
    assert level_difference(*(np.asarray(Image.open(tmp_path / path)) for path in (one, two))) <= 1


@pytest.mark.slow
def test_json_and_a_clip(tiny_wan: Path, tmp_path: Path) -> None:
    done = diffgen(
        *["generate", "--model-path", str(tiny_wan), "--prompt", "猫 moving", "--num-frames", "5", *FAST],
        *["--fps", "23.976", "-n", "2", "--negative-prompt", "b", "--guidance-scale", "1", "--json"],
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["seed"] for line in lines] == [lines[0]["seed"], lines[0]["seed"] + 1]
    assert lines[0]["params"]["num_frames"] == 5
    assert "negative_prompt has no effect" in lines[0]["warnings"][0]
    assert "diffgen: warning: negative_prompt" in done.stderr
    for line in lines:
        with av.open(str(tmp_path / line["path"])) as container:
            video = container.streams.video[0]
            assert (video.width, video.height, video.codec_context.pix_fmt) == (64, 64, "yuv420p")
            assert video.average_rate == video.average_rate.__class__(24000, 1001)
            assert sum(1 for _ in container.decode(video)) == 5


def _read_terminal(leader: int, shown: bytearray) -> None:
    """All that is shown, until nobody has the terminal open any more."""
    with contextlib.suppress(OSError):
        while True:
            shown += os.read(leader, 4096)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_cancel_and_leave_nothing(tiny_wan: Path, number: signal.Signals, code: int) -> None:
    """On a terminal, where Ctrl-C goes to the whole foreground group and progress is shown."""
    with run_root() as root:
        leader, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (24, 80))
        command = [*DIFFGEN, "generate", "--model-path", str(tiny_wan), "--prompt", "a", *FAST[:4], "--num-frames", "1"]
        process = subprocess.Popen(
            [*command, "--num-inference-steps", "900", "--output-path", str(root / "out"), "--device", "cpu"],
            stdout=subprocess.PIPE,
            stderr=terminal,
            env={**os.environ, "TMPDIR": str(root)},
            start_new_session=True,
        )
        os.close(terminal)
        shown = bytearray()
        reader = threading.Thread(target=_read_terminal, args=(leader, shown))
        reader.start()
        wait_until(lambda: b"denoise" in shown, 60, "a bar is shown")
        assert rank_processes(root)
        os.killpg(process.pid, number)
        assert process.wait(15) == code
        assert process.stdout is not None
        assert process.stdout.read() == b""
        reader.join()
        os.close(leader)
        assert shown.startswith(b"diffgen: loading " + os.fsencode(tiny_wan))
        assert b"Traceback" not in shown
        wait_until(lambda: not leftovers(root), 5, "ranks, sockets and folder are gone")
        assert list((root / "out").iterdir()) == []


@pytest.mark.slow
def test_a_disk_that_is_full_ends_a_file_of_prompts(tiny_wan: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("a\n" * 40)

    def let_no_file_grow() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    command = ["generate", "--model-path", str(tiny_wan), "--prompt-path", "prompts", "--num-frames", "1", *FAST]
    done = diffgen(*command, cwd=tmp_path, preexec_fn=let_no_file_grow)
    assert done.returncode == 1
    assert len(re.findall("cannot write", done.stderr)) == 1
    assert list((tmp_path / "outputs").iterdir()) == []


@pytest.mark.slow
def test_time_out(tiny_wan: Path, tmp_path: Path) -> None:
    done = diffgen(
        *["generate", "--model-path", str(tiny_wan), "--prompt", "a", "--num-frames", "1", *FAST[:4]],
        *["--num-inference-steps", "900", "--timeout", "1"],
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "had not ended after 1 s" in done.stderr
