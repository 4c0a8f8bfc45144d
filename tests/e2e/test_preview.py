"""Previews of a running request."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from diffgen import DiffGenerator
from diffgen.errors import InvalidRequest
from diffgen.handle import Preview
from diffgen.wire.messages import Progress

CASE = {"prompt": "a red circle on a blue background", "num_inference_steps": 9, "width": 128, "height": 96, "seed": 1}


@pytest.mark.parametrize(("frames", "every", "steps"), [(1, 4, [4, 8]), (9, 3, [3, 6, 9])])
def test_previews_show_the_result_and_do_not_change_it(
    bundled_generator: DiffGenerator, frames: int, every: int, steps: list[int]
) -> None:
    case = {**CASE, "n": 2, "num_frames": frames}
    plain = bundled_generator.generate(**case)
    events = list(bundled_generator.submit(**case, preview_every=every).events())
    assert np.array_equal(events[-1].pixels, plain.pixels)
    shown = [event for event in events if isinstance(event, Preview)]
    assert [(event.step, event.total) for event in shown] == [(step, 9) for step in steps]
    for event in shown:
        assert event.pixels.shape == (2, 1 + (frames - 1) // 4, 12, 16, 3)
        before = events[events.index(event) - 1]
        assert isinstance(before, Progress | Preview)
    for output in range(2):
        real = np.asarray(Image.fromarray(plain.pixels[output, 0]).resize((16, 12), Image.Resampling.BOX))
        mine, other = (np.corrcoef(real.ravel(), shown[-1].pixels[i, 0].ravel())[0, 1] for i in (output, 1 - output))
        assert mine > 0.6
        assert mine > other


def test_none_unless_asked_for(bundled_generator: DiffGenerator) -> None:
    for every in (None, 0):
        events = bundled_generator.submit(**CASE, preview_every=every).events()
        assert not any(isinstance(event, Preview) for event in events)
    with pytest.raises(InvalidRequest, match="preview_every"):
        bundled_generator.submit(**CASE, preview_every=-1)
