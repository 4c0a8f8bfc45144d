"""How an output was made, written into its file and read back."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
import pytest
from PIL import Image

from diffgen.errors import InvalidRequest
from diffgen.fields import build
from diffgen.media import encode
from diffgen.media.metadata import Metadata, of_output, read, read_params
from diffgen.media.save import SaveOptions, save_result
from diffgen.params import SamplingParams
from diffgen.result import GenerationResult

FORMATS = [("png", 1), ("jpeg", 1), ("webp", 1), ("mp4", 5), ("gif", 5)]
NASTY = "猫 😀 \"q\" 'r' \\ <x> &amp; {}\nNegative prompt: none\nSteps: 9, Seed: 3\r\n\tend "


def result(frames: int = 1, outputs: int = 1, **changes: Any) -> GenerationResult:
    values: dict[str, Any] = {"prompt": NASTY, "negative_prompt": "Steps: 1\nblurry", "width": 32, "height": 16}
    values |= {"num_frames": frames, "fps": 8.0, "num_inference_steps": 4, "guidance_scale": 4.5, "seed": 7}
    values |= {"num_outputs_per_prompt": outputs, "scheduler": "euler", "flow_shift": 3.0, **changes}
    raw = np.random.default_rng(0).integers(0, 256, (outputs, frames, 16, 32, 3), dtype=np.uint8)
    seeds = tuple(range(7, 7 + outputs))
    return GenerationResult(id="x", params=SamplingParams(**values), seeds=seeds, raw=raw, model="org/tiny")


def save(tmp_path: Path, made: GenerationResult, **options: Any) -> list[Path]:
    return save_result(made, build(SaveOptions, {"output_path": str(tmp_path), **options}))


@pytest.mark.parametrize(("chosen", "frames"), FORMATS)
def test_every_parameter_comes_back(tmp_path: Path, chosen: str, frames: int) -> None:
    made = result(frames)
    (path,) = save(tmp_path, made, output_format=chosen)
    found = read(path)
    expected = msgspec.structs.replace(made.params, fps=8.0 if frames > 1 else None)
    assert found.params == expected
    assert found.model == "org/tiny"
    params = read_params(path)
    assert "output_type" not in params
    assert build(SamplingParams, params) == expected


def test_each_output_has_its_own_seed(tmp_path: Path) -> None:
    made = result(outputs=4)
    paths = save(tmp_path, made)
    assert [(read_params(path)["seed"], read_params(path)["num_outputs_per_prompt"]) for path in paths] == [
        *[(7, 1), (8, 1), (9, 1), (10, 1)]
    ]


@pytest.mark.parametrize(("chosen", "frames"), FORMATS)
def test_it_can_be_left_out(tmp_path: Path, chosen: str, frames: int) -> None:
    (path,) = save(tmp_path, result(frames, prompt="secretcat", negative_prompt=None), output_format=chosen,
                   metadata=False, output_file_name="x")  # fmt: skip
    data = path.read_bytes()
    for word in (b"secretcat", "secretcat".encode("utf-16-be"), b"diffgen", b"parameters", b"Steps", b"Exif"):
        assert word not in data
    with pytest.raises(InvalidRequest, match="holds no metadata of diffgen's") as caught:
        read(path)
    assert caught.value.code == "invalid_metadata"


@pytest.mark.parametrize(("chosen", "frames"), FORMATS)
def test_nothing_of_the_machine_is_in_it(tmp_path: Path, chosen: str, frames: int) -> None:
    made = result(frames, prompt="a", negative_prompt=None)
    (path,) = save(tmp_path, made, output_format=chosen)
    data = path.read_bytes()
    words = [str(tmp_path), str(Path.home()), f"/{getpass.getuser()}"]
    for word in words:
        assert word.encode() not in data
        assert word.encode("utf-16-be") not in data


def test_the_text_that_viewers_show() -> None:
    text = of_output(result(prompt="a cat", negative_prompt="blurry").params, 9, "tiny").text()
    assert text.splitlines()[:2] == ["a cat", "Negative prompt: blurry"]
    assert text.splitlines()[2].startswith(
        "Steps: 4, Sampler: euler, CFG scale: 4.5, Seed: 9, Size: 32x16, Model: tiny, Version: diffgen "
    )
    assert "Frames: 5, FPS: 8, " in of_output(result(5).params, 9, "tiny").text()
    assert "Negative prompt" not in of_output(result(prompt="a", negative_prompt=None).params, 9, "").text()


@pytest.mark.parametrize(("chosen", "frames"), FORMATS[:4])
def test_the_text_stands_where_viewers_look(tmp_path: Path, chosen: str, frames: int) -> None:
    made = result(frames)
    (path,) = save(tmp_path, made, output_format=chosen)
    expected = of_output(made.params, 7, "org/tiny").text()
    if chosen == "mp4":
        with av.open(str(path)) as container:
            assert container.metadata["comment"] == expected
        return
    with Image.open(path) as image:
        if chosen == "png":
            assert image.text["parameters"] == expected  # type: ignore[attr-defined]
        else:
            comment = image.getexif().get_ifd(0x8769)[0x9286]
            assert comment.startswith(b"UNICODE\0")
            assert comment[8:].decode("utf-16-be") == expected


def test_what_no_jpeg_holds_is_told(tmp_path: Path) -> None:
    made = result(prompt="猫" * 20_000)
    (path,) = save(tmp_path, made, output_format="jpeg", output_file_name="x")
    assert made.warnings == ("the metadata is too long for a JPEG and was left out; use png or webp to keep it",)
    with pytest.raises(InvalidRequest, match="no metadata"):
        read(path)
    for chosen in ("png", "webp"):
        (path,) = save(tmp_path, result(prompt="猫" * 20_000), output_format=chosen, output_file_name="x")
        assert read(path).params.prompt == "猫" * 20_000


def _png(path: Path, text: str | None) -> Path:
    from PIL import PngImagePlugin

    info = PngImagePlugin.PngInfo()
    if text is not None:
        info.add_text("diffgen", text)
    Image.new("RGB", (8, 8)).save(path, pnginfo=info)
    return path


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "holds no metadata of diffgen's"),
        ("no json", "is broken: DecodeError"),
        ("[]", "is broken: ValidationError"),
        ("{}", "is broken: KeyError: 'params'"),
        ('{"params": []}', "is broken: TypeError"),
        ('{"params": {}}', "prompt is missing"),
        ('{"params": {"prompt": "a", "seed": "7"}}', "seed is '7'; it must be an integer"),
        ('{"params": {"prompt": "a", "future": 1}, "version": "9.0"}', "of diffgen '9.0': unknown parameter 'future'"),
    ],
)
def test_metadata_of_others_is_refused_with_the_reason(tmp_path: Path, text: str | None, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        read(_png(tmp_path / "a.png", text))


def test_files_that_are_no_pictures(tmp_path: Path) -> None:
    for name, content in (
        ("a.png", b""),
        ("b.png", b"\x89PNG\r\n\x1a\nxxxx"),
        ("c.mp4", b"\0\0\0 ftypisom"),
        ("d", b"x"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidRequest, match="cannot read") as caught:
            read(tmp_path / name)
        assert caught.value.param == "from_metadata"
    for path in (tmp_path, tmp_path / "missing.png", "a\0b"):
        with pytest.raises(InvalidRequest, match="cannot read"):
            read(path)


def test_comments_of_other_programs_are_not_ours(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.gif", comment=b"made by hand")
    with pytest.raises(InvalidRequest, match="no metadata"):
        read(tmp_path / "a.gif")


def test_pixels_are_the_same_with_metadata(tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (16, 32, 3), dtype=np.uint8)
    encode.save_png(image, tmp_path / "a.png", Metadata(params=SamplingParams(prompt=NASTY)))
    with Image.open(tmp_path / "a.png") as read_back:
        np.testing.assert_array_equal(np.asarray(read_back), image)
