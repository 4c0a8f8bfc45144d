"""The one way from floats to uint8."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffgen.errors import NanOutput
from diffgen.media.pixels import check_finite, to_uint8


def _pixels(unit: list[float], dtype: torch.dtype = torch.float32) -> list[int]:
    """The red channel of a row of values in [0, 1]."""
    row = (torch.tensor(unit, dtype=torch.float64) * 2 - 1).to(dtype)
    return to_uint8(row.view(1, 1, 1, 1, -1).expand(1, 3, 1, 1, -1))[0, 0, 0, :, 0].tolist()


def test_values_are_clamped_then_rounded() -> None:
    assert _pixels([-0.01, 0, 0.4999 / 255, 0.5, 1, 1.002]) == [0, 0, 0, 128, 255, 255]
    assert _pixels([0.51 / 255, 1.49 / 255, 1.51 / 255, 254.4 / 255, 254.6 / 255, 1e9, -1e9]) == [
        1,
        1,
        2,
        254,
        255,
        255,
        0,
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_are_computed_in_float32(dtype: torch.dtype) -> None:
    assert _pixels([0, 0.5, 1], dtype) == [0, 128, 255]


def test_axes_become_frames_height_width_channels() -> None:
    decoded = torch.linspace(-1, 1, 2 * 3 * 4 * 5 * 6).view(2, 3, 4, 5, 6)
    pixels = to_uint8(decoded)
    assert pixels.shape == (2, 4, 5, 6, 3)
    assert pixels.dtype == torch.uint8
    assert pixels.is_contiguous()
    assert pixels[1, 2, 3, 4].tolist() == [_pixels([float(decoded[1, c, 2, 3, 4]) / 2 + 0.5])[0] for c in range(3)]


@given(st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=20))
def test_same_as_diffusers_image_processor(values: list[float]) -> None:
    """(x / 2 + 0.5).clamp(0, 1), then numpy's (x * 255).round()."""
    row = torch.tensor(values)
    theirs = ((row * 0.5 + 0.5).clamp(0, 1).numpy() * 255).round().astype(np.uint8)
    ours = to_uint8(row.view(1, 1, 1, 1, -1).expand(1, 3, 1, 1, -1))[0, 0, 0, :, 0].numpy()
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_no_number_raise(bad: float) -> None:
    decoded = torch.zeros(1, 3, 1, 2, 2)
    decoded[0, 1, 0, 1, 0] = bad
    with pytest.raises(NanOutput) as caught:
        to_uint8(decoded)
    assert caught.value.code == "nan_output"
    assert "1 of 12 decoded pixels" in caught.value.message
    assert "bfloat16" in caught.value.message


def test_integers_are_finite() -> None:
    check_finite(torch.tensor([1, 2]), "ids", "none")
    check_finite(torch.empty(0), "nothing", "none")
