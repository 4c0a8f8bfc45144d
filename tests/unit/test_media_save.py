"""Which files a result becomes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diffgen.errors import InvalidRequest, OutputError
from diffgen.fields import build
from diffgen.media.save import SaveOptions, check_save, save_result
from diffgen.params import ModelSpec, SamplingParams
from diffgen.result import GenerationResult


def _result(frames: int = 1, outputs: int = 1, prompt: str = "a cat") -> GenerationResult:
    params = SamplingParams(prompt=prompt, num_frames=frames, fps=8)
    raw = np.zeros((outputs, frames, 16, 16, 3), np.uint8)
    return GenerationResult(id="x", params=params, seeds=tuple(range(7, 7 + outputs)), raw=raw)


def test_names_hold_prompt_seed_and_index(tmp_path: Path) -> None:
    result = _result(outputs=2)
    paths = save_result(result, SaveOptions(output_path=str(tmp_path / "new")))
    assert [path.name for path in paths] == ["a-cat_7_00.png", "a-cat_8_01.png"]
    assert result.paths == paths
    assert all(path.exists() for path in paths)


def test_the_same_again_is_two_files(tmp_path: Path) -> None:
    for _ in range(2):
        save_result(_result(), SaveOptions(output_path=str(tmp_path)))
    assert sorted(os.listdir(tmp_path)) == ["a-cat_7_00.png", "a-cat_7_00_1.png"]


@pytest.mark.parametrize("prompt", ["", "../../x", "/etc/x", "猫" * 300, "😀", "CON", "a.png", "l1\nl2", "-rf", "%s"])
def test_odd_prompts_stay_in_the_folder(tmp_path: Path, prompt: str) -> None:
    (path,) = save_result(_result(prompt=prompt), SaveOptions(output_path=str(tmp_path)))
    assert path.parent == tmp_path
    assert path.suffix == ".png"
    assert len(os.listdir(tmp_path)) == 1


@pytest.mark.parametrize("name", ["mine", "mine.mp4", "mine.MP4", "mine.v2", "mine.png.mp4"])
def test_a_chosen_name_keeps_its_extension_or_gets_one(tmp_path: Path, name: str) -> None:
    save_result(_result(frames=5), SaveOptions(output_path=str(tmp_path), output_file_name=name))
    assert os.listdir(tmp_path) == [name if name.lower().endswith("mp4") else f"{name}.mp4"]


def test_a_chosen_name_of_several_outputs_is_numbered(tmp_path: Path) -> None:
    save_result(_result(outputs=2), SaveOptions(output_path=str(tmp_path), output_file_name="mine.png"))
    assert sorted(os.listdir(tmp_path)) == ["mine_00.png", "mine_01.png"]


@pytest.mark.parametrize("name", ["../a", "a/b", "", ".png", "\udcff"])
def test_bad_names_are_refused_before_the_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError, match="output_file_name"):
        check_save(SaveOptions(output_path=str(tmp_path), output_file_name=name), SamplingParams(prompt="a"))


def test_latents_are_no_pictures(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="latent"):
        check_save(SaveOptions(output_path=str(tmp_path)), SamplingParams(prompt="a", output_type="latent"))


SPEC = ModelSpec(
    name="tiny",
    family="tiny",
    defaults={"width": 64, "height": 64, "num_frames": 5, "fps": 16.0, "num_inference_steps": 2, "guidance_scale": 1.0},
    size_multiple=1,
    frame_stride=4,
)


@pytest.mark.parametrize(
    ("options", "asked", "text"),
    [
        ({"output_format": "mp4"}, {"num_frames": 1}, "mp4 cannot hold a still image; use png or jpeg or webp"),
        ({"output_format": "png"}, {"num_frames": 5}, "png cannot hold a clip of 5 frames; use mp4 or gif"),
        ({"output_format": "webp"}, {}, "webp cannot hold a clip of 5 frames"),
        ({"output_format": "png"}, {"seconds": 0.5}, "clip of 9 frames"),
        ({"output_file_name": "a.png"}, {"num_frames": 5}, "saved as mp4; leave .png out"),
        ({"output_file_name": "a.gif"}, {"num_frames": 5}, "saved as mp4; give output_format=gif"),
        ({"output_file_name": "a.mp4"}, {"num_frames": 1}, "saved as png; leave .mp4 out"),
        ({"output_file_name": "a.jpg"}, {"num_frames": 1}, "saved as png; give output_format=jpeg"),
        ({"output_file_name": "a.JPG", "output_format": "webp"}, {}, "output_format is webp; leave JPG out"),
        ({"output_compression": 50}, {"num_frames": 1}, "with output_format unset: only jpeg and webp"),
        ({"output_format": "png", "output_compression": 50}, {"num_frames": 1}, "with output_format png: only jpeg"),
        ({"output_format": "gif"}, {"fps": 60.0}, "at most 50 frames a second"),
        ({"output_format": "webp"}, {"num_frames": 1, "width": 16384}, "at most 16383 pixels a side"),
        ({}, {"width": 63}, "63x64 is odd"),
        ({}, {"width": 16384}, "MP4 holds at most 16383 pixels a side"),
    ],
)
def test_formats_that_do_not_fit_are_refused_before_the_work(
    tmp_path: Path, options: dict[str, object], asked: dict[str, object], text: str
) -> None:
    save = build(SaveOptions, {"output_path": str(tmp_path), **options})
    with pytest.raises(InvalidRequest, match=text):
        check_save(save, build(SamplingParams, {"prompt": "a", **asked}), SPEC)


def test_without_a_model_what_is_made_may_be_unknown(tmp_path: Path) -> None:
    save = SaveOptions(output_path=str(tmp_path), output_format="png")
    check_save(save, SamplingParams(prompt="a"))
    with pytest.raises(InvalidRequest, match="cannot hold"):
        check_save(save, SamplingParams(prompt="a", num_frames=5))
    # What the server refuses is refused there, with its reason.
    check_save(save, SamplingParams(prompt="a", num_frames=4), SPEC)


@pytest.mark.parametrize("value", [-1, 101, 0.5, True])
def test_compression_is_a_percentage(value: object) -> None:
    with pytest.raises(InvalidRequest, match="output_compression"):
        build(SaveOptions, {"output_compression": value})


@pytest.mark.parametrize(
    ("chosen", "frames", "magic"),
    [
        ("png", 1, b"\x89PNG"),
        ("jpeg", 1, b"\xff\xd8\xff"),
        ("webp", 1, b"RIFF"),
        ("gif", 5, b"GIF89a"),
        ("mp4", 5, b"\0\0\0 ftyp"),
    ],
)
def test_content_is_what_the_extension_says(tmp_path: Path, chosen: str, frames: int, magic: bytes) -> None:
    save = build(SaveOptions, {"output_path": str(tmp_path), "output_format": chosen})
    (path,) = save_result(_result(frames=frames), save)
    assert path.suffix == f".{chosen}"
    assert path.read_bytes().startswith(magic)


@pytest.mark.parametrize("chosen", ["jpeg", "webp"])
def test_compression_makes_smaller_files(tmp_path: Path, chosen: str) -> None:
    result = _result()
    assert result.raw is not None
    result.raw[:] = np.random.default_rng(0).integers(0, 256, result.raw.shape, dtype=np.uint8)
    for quality in (10, 95, None):
        values = {"output_path": str(tmp_path), "output_format": chosen, "output_compression": quality}
        save_result(result, build(SaveOptions, {**values, "overwrite": True, "output_file_name": f"q{quality}"}))
    low, high, unset = ((tmp_path / f"q{quality}.{chosen}").read_bytes() for quality in (10, 95, None))
    assert len(low) < len(high)
    assert high == unset


@pytest.mark.parametrize(
    ("fps", "delays", "text"),
    [(20.0, [50] * 5, None), (16.0, [60, 60, 70, 60, 60], "frames last 0.06 or 0.07 s"), (8.0, None, "0.12 or 0.13")],
)
def test_gif_keeps_time_on_average_and_says_how(
    tmp_path: Path, fps: float, delays: list[int] | None, text: str | None
) -> None:
    result = _result(frames=5)
    assert result.raw is not None
    result.raw += np.arange(5, dtype=np.uint8)[None, :, None, None, None] * 40
    result.params = SamplingParams(prompt="a", num_frames=5, fps=fps)
    (path,) = save_result(result, SaveOptions(output_path=str(tmp_path), output_format="gif"))
    with Image.open(path) as read:
        shown = []
        for index in range(read.n_frames):  # type: ignore[attr-defined]
            read.seek(index)
            shown.append(read.info["duration"])
        assert read.info["loop"] == 0
    assert abs(sum(shown) - 5000 / fps) <= 5
    assert delays is None or shown == delays
    assert (result.warnings == ()) if text is None else (text in result.warnings[0])


def test_overwriting_spares_the_files_of_the_same_call(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"old")
    save = SaveOptions(output_path=str(tmp_path), output_file_name="a", overwrite=True)
    first = save_result(_result(), save)
    second = save_result(_result(), save, first)
    assert [path.name for path in first + second] == ["a.png", "a_1.png"]
    assert first[0].read_bytes() != b"old"
