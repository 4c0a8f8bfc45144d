"""The command line with files: formats, metadata, configuration, prompts, dry runs, running servers.

Most commands use the session's generator by ``--connect``, so that no model is loaded for them.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import termios
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from processes import DIFFGEN, leftovers, run_root, wait_until

from diffgen import DiffGenerator
from diffgen.errors import InvalidRequest
from diffgen.media.metadata import read, read_params

SMALL: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 2}
FLAGS = ["--size", "64x64", "--num-inference-steps", "2"]
NASTY = '猫 "red" circle 😀\nNegative prompt: Steps: 9'


def diffgen(*arguments: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*DIFFGEN, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=170, check=False, **options)


def pixels(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def test_the_third_of_four_pictures_is_made_again_alone(tiny_generator: DiffGenerator, tmp_path: Path) -> None:
    server = ["generate", "--connect", tiny_generator.address]
    asked = ["--prompt", NASTY, "--negative-prompt", "a dog", "--scheduler", "unipc", "--seed", "5", "-n", "4"]
    first = diffgen(*server, *FLAGS, *asked, "--num-frames", "1", cwd=tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    third = first.stdout.splitlines()[2]
    again = diffgen(*server, "--from-metadata", third, "--output-file-name", "again.png", cwd=tmp_path)
    assert (again.returncode, again.stderr, again.stdout) == (0, "", "outputs/again.png\n")
    assert read_params(tmp_path / third) == read_params(tmp_path / "outputs/again.png")
    assert read_params(tmp_path / third)["seed"] == 7
    assert read_params(tmp_path / third)["prompt"] == NASTY
    # Four shared their forwards, which may move a value by one level.
    difference = np.abs(pixels(tmp_path / third).astype(int) - pixels(tmp_path / "outputs/again.png"))
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.01
    other = diffgen(*server, "--from-metadata", third, "--seed", "8", "--output-file-name", "b", cwd=tmp_path)
    assert other.returncode == 0
    difference = pixels(tmp_path / third).astype(int) - pixels(tmp_path / "outputs/b.png")
    assert np.abs(difference).max() >= 3, "another seed is another picture"


@pytest.mark.parametrize(("chosen", "frames"), [("png", 1), ("jpeg", 1), ("webp", 1), ("mp4", 5), ("gif", 5)])
def test_every_format_can_be_repeated(tiny_generator: DiffGenerator, tmp_path: Path, chosen: str, frames: int) -> None:
    """A picture that shared no forward: to the same pixels."""
    asked = {"negative_prompt": "a\ndog", "guidance_scale": 3.5, "seed": 3, "num_frames": frames}
    asked |= {"fps": 10.0} if frames > 1 else {}
    made = tiny_generator.generate(NASTY, output_path=str(tmp_path), output_format=chosen, **asked, **SMALL)
    (path,) = made.paths
    assert path.suffix == f".{chosen}"
    again = tiny_generator.generate(**read_params(path))
    np.testing.assert_array_equal(again.pixels, made.pixels)
    assert (again.params, again.warnings) == (made.params, ())
    assert read(path).model == "tiny-wan"
    if chosen == "png":
        np.testing.assert_array_equal(pixels(path), again.pixels[0, 0])


def test_no_metadata(tiny_generator: DiffGenerator, tmp_path: Path) -> None:
    command = ["generate", "--connect", tiny_generator.address, *FLAGS, "--prompt", "secretcat", "--seed", "1"]
    # No stderr, a stdout that cannot write the name, and a wait that is longer than any.
    options = {"env": {**os.environ, "PYTHONIOENCODING": "ascii"}, "preexec_fn": lambda: os.close(2)}
    done = diffgen(*command, "--no-metadata", "--output-file-name", "猫", "--timeout", "1e12", cwd=tmp_path, **options)
    assert (done.returncode, done.stdout) == (0, "outputs/\\u732b.png\n")
    (tmp_path / "outputs/猫.png").rename(tmp_path / "outputs/x.png")
    data = (tmp_path / "outputs/x.png").read_bytes()
    assert b"secretcat" not in data
    assert b"tEXt" not in data
    assert b"iTXt" not in data
    with pytest.raises(InvalidRequest, match="no metadata"):
        read(tmp_path / "outputs/x.png")


def test_another_model_is_told(tiny_generator: DiffGenerator, tmp_path: Path) -> None:
    from diffgen.media.save import SaveOptions, save_result

    result = tiny_generator.generate("a red circle", num_frames=1, seed=1, **SMALL)
    result.model = "org/other"
    (path,) = save_result(result, SaveOptions(output_path=str(tmp_path)))
    command = ["generate", "--connect", tiny_generator.address, "--from-metadata", str(path)]
    done = diffgen(*command, cwd=tmp_path)
    assert done.returncode == 0
    assert "was made with the model 'org/other', and this is 'tiny-wan': its pixels will differ" in done.stderr
    assert diffgen(*command, "--quiet", cwd=tmp_path).stderr == ""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--output-format", "mp4"], "mp4 cannot hold a still image"),
        (["--output-file-name", "a.jpg"], "give output_format=jpeg"),
        (["--output-compression", "9"], "only jpeg and webp have a quality"),
        (["--num-frames", "5", "--output-format", "webp"], "webp cannot hold a clip of 5 frames"),
        (["--num-frames", "5", "--output-format", "gif", "--fps", "60"], "at most 50 frames a second"),
    ],
)
def test_formats_that_do_not_fit_are_refused_before_the_work(
    tiny_generator: DiffGenerator, tmp_path: Path, options: list[str], text: str
) -> None:
    steps = ["--num-inference-steps", "900"]
    command = ["generate", "--connect", tiny_generator.address, "--prompt", "a", *steps, *options]
    done = diffgen(*command, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr


def test_gif_and_its_warning(tiny_generator: DiffGenerator, tmp_path: Path) -> None:
    command = ["generate", "--connect", tiny_generator.address, *FLAGS, "--prompt", "a", "--num-frames", "5"]
    done = diffgen(*command, "--fps", "16", "--output-format", "gif", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert "frames last 0.06 or 0.07 s" in line["warnings"][0]
    assert line["warnings"][0] in done.stderr
    with Image.open(tmp_path / line["path"]) as image:
        assert (image.format, image.n_frames) == ("GIF", 5)  # type: ignore[attr-defined]


def test_config_file(tiny_generator: DiffGenerator, tmp_path: Path) -> None:
    values = {"prompt": "a red circle", "size": "64x64", "num_inference_steps": 2, "num_frames": 1, "seed": 1}
    values |= {"connect": tiny_generator.address, "output_file_name": "c", "output_format": "webp", "json": True}
    (tmp_path / "c.json").write_text(json.dumps(values))
    done = diffgen("generate", "--config", "c.json", "--seed", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert (line["path"], line["seed"], line["params"]["num_inference_steps"]) == ("outputs/c.webp", 2, 2)
    (tmp_path / "bad.yaml").write_text("num_infrence_steps: 2\n")
    done = diffgen("generate", "--config", "bad.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "config 'bad.yaml': unknown key 'num_infrence_steps'; did you mean 'num_inference_steps'?" in done.stderr


def test_prompts_of_a_file_in_order_and_one_that_fails(tiny_generator: DiffGenerator, tmp_path: Path) -> None:
    prompts = ["a red circle", "\0", "x" * 30_000, "猫", "a red circle"]
    (tmp_path / "p.txt").write_text("\n\n".join(prompts), encoding="utf-8")
    command = ["generate", "--connect", tiny_generator.address, *FLAGS, "--prompt-path", "p.txt", "--seed", "1"]
    done = diffgen(*command, "--overwrite", cwd=tmp_path)
    assert done.returncode == 1
    names = ["a-red-circle_1_00.png", "猫_1_00.png", "a-red-circle_1_00_1.png"]
    assert done.stdout.splitlines() == [f"outputs/{name}" for name in names]
    errors = done.stderr.splitlines()
    assert errors[0].startswith(r"diffgen: error: prompt 2 ('\x00'): prompt holds a NUL character")
    assert "prompt 3 ('xxxx" in errors[1]
    assert "30000 characters" in errors[1]
    assert errors[2:] == ["diffgen: error: 2 of 5 prompts failed"]
    assert read(tmp_path / "outputs/猫_1_00.png").params.prompt == "猫"


def test_a_mistake_that_all_prompts_share_is_told_once(tiny_generator: DiffGenerator, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a\nb\n")
    done = diffgen(
        *["generate", "--connect", tiny_generator.address, "--prompt-path", "p.txt", "--seed", "-1"], cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stderr == "diffgen: error: seed is -1; it must be at least 0\n"


def test_dry_run_of_a_server(tiny_generator: DiffGenerator, tmp_path: Path) -> None:
    command = ["generate", "--connect", tiny_generator.address, "--dry-run", "--prompt", "a", "--seconds", "1"]
    done = diffgen(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert (line["model"], line["params"]["num_frames"], line["memory_mb"]) == ("tiny-wan", 9, None)
    assert "seed" not in line["params"]
    assert "8 frames; wan makes 9" in line["warnings"][0]
    assert diffgen(*command, "--width", "100", cwd=tmp_path).returncode == 2
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_dry_run_reads_no_weights(tiny_wan: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    weights = 0
    for path in tiny_wan.rglob("*.*"):
        target = folder / path.relative_to(tiny_wan)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            target.write_bytes(b"no weights")
            weights += path.stat().st_size
        else:
            target.write_bytes(path.read_bytes())
    command = ["generate", "--model-path", "model", "--dry-run", "--device", "cpu", "--prompt", "a red circle"]
    done = diffgen(*command, "--seed", "3", "-n", "2", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    line = json.loads(done.stdout)
    assert (line["model"], line["params"]["seed"], line["params"]["num_inference_steps"]) == ("model", 3, 4)
    memory = line["memory_mb"]
    assert sum(memory["weights"].values()) == pytest.approx(weights / 2**20, abs=0.2), "but for the files' heads"
    assert memory["total"] >= sum(memory["weights"].values())
    (folder / "vae" / "config.json").unlink()
    broken = diffgen(*command, cwd=tmp_path)
    assert broken.returncode == 1
    assert "no configuration in vae/" in broken.stderr


@pytest.mark.slow
def test_a_server_with_a_token(tiny_wan: Path, tmp_path: Path) -> None:
    options = {"device": "cpu", "threads": 1, "address": "tcp://127.0.0.1:*", "token": "open sesame"}
    (tmp_path / "token").write_text("open sesame\n")
    (tmp_path / "wrong").write_text("close")
    with DiffGenerator.from_pretrained(str(tiny_wan), **options) as server:
        command = ["generate", "--connect", server.address, *FLAGS, "--prompt", "a", "--num-frames", "1"]
        done = diffgen(*command, "--token-file", "token", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        for extra in ([], ["--token-file", "wrong"]):
            refused = diffgen(*command, *extra, cwd=tmp_path)
            assert refused.returncode == 1
            assert "refused this client" in refused.stderr


def test_completion(tmp_path: Path) -> None:
    done = diffgen("completion", "bash", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--output-format" in done.stdout


@pytest.mark.slow
def test_the_second_ctrl_c_ends_at_once(tiny_wan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a unit hangs, the first waits for it and then ends the ranks by force."""
    monkeypatch.setenv("DIFFGEN_FAULT", "hang@denoise:1:0")
    with run_root() as root:
        leader, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (24, 80))
        model = ["--model-path", str(tiny_wan), "--device", "cpu"]
        process = subprocess.Popen(
            [*DIFFGEN, "generate", *model, *FLAGS, "--prompt", "hang", "--num-frames", "1"],
            stderr=terminal,
            cwd=root,
            env={**os.environ, "TMPDIR": str(root)},
            start_new_session=True,
        )
        os.close(terminal)
        shown = b""
        while b"denoise" not in shown:
            shown += os.read(leader, 4096)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert process.poll() is None, "the first waits for the unit"
        process.send_signal(signal.SIGINT)
        assert process.wait(6) == 130, "long before the ranks would be ended by force"
        os.close(leader)
        wait_until(lambda: not leftovers(root), 5, "ranks, sockets and folder are gone")
