"""Each family from a folder, by the command line as a user runs it, against diffusers' own pipeline."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from families import MAKERS
from oracle import Oracle, level_difference
from PIL import Image
from processes import DIFFGEN

from pipelines.registry import FAMILIES

CLIPS = ("wan", "hunyuan-video")
# Parameters that diffusers' pipelines call as we do.
CALLED = ("prompt", "seed", "width", "height", "num_inference_steps", "guidance_scale", "max_sequence_length")


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"fallback"}))
def test_a_saved_picture_is_that_of_diffusers(family: str, tmp_path: Path, oracle: Oracle) -> None:
    folder = MAKERS[family](tmp_path / "model")
    command = [*DIFFGEN, "generate", "--model-path", str(folder), "--prompt", "a red circle", "--seed", "5", "--json"]
    size = ["--width", "64", "--height", "96", "--num-inference-steps", "3", "--num-frames", "1", "--device", "cpu"]
    done = subprocess.run(
        [*command, *size, "--output-path", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    told = json.loads(done.stdout)
    picture = np.asarray(Image.open(told["path"]))
    # Run as the answer says that it was run, so that the defaults are compared as well.
    case = {name: value for name, value in told["params"].items() if name in CALLED}
    if family in CLIPS:
        case["num_frames"] = 1
    if family == "sana":
        case["use_resolution_binning"] = False  # it would draw in another size, and scale
    assert level_difference(picture[None, None], oracle.run(folder, case).pixels) <= 1
