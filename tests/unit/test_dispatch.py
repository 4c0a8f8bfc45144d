"""Which replica a request goes to, and one status of several."""

from __future__ import annotations

import collections

import pytest

from diffgen.params import SamplingParams, parse_params
from diffgen.server.dispatch import Dispatcher, Load, request_cost
from diffgen.server.questions import merged
from diffgen.wire.messages import RequestStatus, Status


def params(prompt: str = "a", **more: object) -> SamplingParams:
    return parse_params({"prompt": prompt, **more})


def test_round_robin_passes_over_those_that_are_down() -> None:
    dispatcher, loads = Dispatcher("round_robin"), {index: Load() for index in range(3)}
    chosen = [dispatcher.choose(params(), up, loads) for up in ([0, 1, 2], [0, 1, 2], [0, 2], [0, 2], [1, 2], [0])]
    assert chosen == [0, 1, 2, 0, 1, 0]


@pytest.mark.parametrize(
    ("policy", "loads", "chosen"),
    [
        ("least_requests", {0: Load(3, 1.0), 1: Load(2, 9.0), 2: Load(2, 8.0)}, 1),
        ("least_cost", {0: Load(3, 1.0), 1: Load(2, 9.0), 2: Load(2, 8.0)}, 0),
        ("least_cost", {0: Load(1, 0.0), 1: Load(0, 0.0), 2: Load(2, 8.0)}, 1),
    ],
)
def test_least(policy: str, loads: dict[int, Load], chosen: int) -> None:
    assert Dispatcher(policy).choose(params(), sorted(loads), loads) == chosen


def test_affinity_keeps_a_text_at_its_replica() -> None:
    dispatcher, loads = Dispatcher("affinity"), {index: Load() for index in range(4)}
    texts = [f"a picture of {number}" for number in range(200)]
    first = [dispatcher.choose(params(text), [0, 1, 2, 3], loads) for text in texts]
    assert first == [dispatcher.choose(params(text, seed=9), [0, 1, 2, 3], loads) for text in texts]
    assert min(collections.Counter(first).values()) > 20
    # Without replica 3, only its own texts go elsewhere.
    without = [dispatcher.choose(params(text), [0, 1, 2], loads) for text in texts]
    assert all(before in (after, 3) for before, after in zip(first, without, strict=True))


def test_cost_grows_with_steps_and_pixels() -> None:
    defaults = {"width": 64, "height": 64, "num_inference_steps": 10}
    assert request_cost(params(), defaults) == 64 * 64 * 10
    assert request_cost(params(width=128, n=2, num_frames=5), defaults) == 64 * 64 * 10 * 2 * 2 * 5


def test_a_status_of_all() -> None:
    def part(age: float, done: int) -> Status:
        one = RequestStatus(f"r{age}", "running", age, 64, 64, 1, 1)
        return Status(
            (one,), {"done": done}, 3, age, 0, 1, {"denoise": 2}, {1: 2}, 0.5, {"queue_full": 1}, 0, {"hits": 1}, 1
        )

    whole = merged([part(1.0, 2), part(5.0, 3)], restarts=4, malformed=3)
    assert [each.id for each in whole.requests] == ["r5.0", "r1.0"]
    assert (whole.finished, whole.ticks, whole.seconds) == ({"done": 5}, 6, 5.0)
    assert (whole.queued, whole.running, whole.restarts) == (0, 2, 4)
    assert (whole.units, whole.batches, whole.refused) == ({"denoise": 4}, {1: 4}, {"queue_full": 2})
    assert (whole.text_cache, whole.malformed) == ({"hits": 2}, 5)
