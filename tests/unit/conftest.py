"""What several unit tests need: a model to check against, and small messages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from diffgen.params import ModelSpec

# Few examples, no database: a unit test is a matter of seconds, and leaves nothing in the checkout.
settings.register_profile("quick", max_examples=40, deadline=None, database=None)
settings.load_profile("quick")


@pytest.fixture
def model() -> ModelSpec:
    """A clip model with classifier-free guidance, like Wan."""
    return ModelSpec(
        name="test",
        family="wan",
        defaults={
            "width": 128,
            "height": 64,
            "num_frames": 9,
            "fps": 16.0,
            "num_inference_steps": 20,
            "guidance_scale": 5.0,
            "max_sequence_length": 512,
        },
        size_multiple=16,
        frame_stride=4,
        guidance_off=1.0,
        schedulers=("euler", "unipc"),
        takes=("flow_shift", "scheduler", "max_sequence_length"),
        longest_text=512,
    )


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code in a fresh interpreter; ``env`` replaces the environment."""

    def run(code: str, *args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-c", code, *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=env)

    return run
