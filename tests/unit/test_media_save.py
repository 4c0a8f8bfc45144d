"""Which files a result becomes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from diffgen.errors import OutputError
from diffgen.media.save import SaveOptions, check_save, save_result
from diffgen.params import SamplingParams
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


@pytest.mark.parametrize("name", ["mine", "mine.mp4", "mine.MP4", "mine.png"])
def test_a_chosen_name_gets_the_extension_of_the_output(tmp_path: Path, name: str) -> None:
    save_result(_result(frames=5), SaveOptions(output_path=str(tmp_path), output_file_name=name))
    assert os.listdir(tmp_path) == ["mine.mp4"]


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
