"""What units are expected to take."""

from __future__ import annotations

import pytest

from diffgen.params import Resolved, SamplingParams
from diffgen.scheduler.cost import CostModel
from diffgen.scheduler.job import Job
from diffgen.scheduler.plan import Position, StageInfo
from diffgen.scheduler.sharing import PIXELS_KNOWN

STAGES = (StageInfo("encode", prepares=True), StageInfo("denoise", stepped=True), StageInfo("decode"))


def job(
    name: str = "a", *, size: int = 64, steps: int = 4, outputs: int = 1, branches: int = 1, frames: int = 1
) -> Job:
    params = SamplingParams(
        prompt="a",
        width=size,
        height=size,
        num_frames=frames,
        num_inference_steps=steps,
        num_outputs_per_prompt=outputs,
    )
    return Job(name, b"c", Resolved(params, ()), 0.0, branches=branches)


def taught(*units: tuple[Job, float]) -> CostModel:
    cost = CostModel(STAGES)
    for each, seconds in units:
        for _ in range(2):
            cost.learn_unit("denoise", [each], seconds)
    return cost


def test_nothing_is_known_until_a_step_has_run() -> None:
    cost = CostModel(STAGES)
    cost.learn_stage("encode", job(), 1, 0.5)
    assert not cost.known
    assert cost.ends([job()]) == {}
    cost.learn_unit("denoise", [job()], 1.0)
    assert cost.known
    assert not CostModel().known


def test_a_request_takes_its_stages_and_its_steps() -> None:
    cost = taught((job(), 2.0))
    cost.learn_stage("encode", job(), 1, 0.5)
    cost.learn_stage("decode", job(), 2, 3.0)
    assert cost.seconds_left(job(steps=4)) == 0.5 + 4 * 2 + 3
    placed = job(steps=4)
    placed.position = Position(1, "denoise", 3, 4, None)
    assert cost.seconds_left(placed) == 2 + 3
    placed.position = Position(2, "decode", 1, 2, None)
    assert cost.seconds_left(placed) == 1.5


def test_second_order_schedulers_have_more_units_than_steps() -> None:
    cost = taught((job(), 1.0))
    cost.learn_stage("denoise", job(steps=4), 7, 7.0)
    assert cost.seconds_left(job(steps=8)) == 14.0


@pytest.mark.parametrize(
    ("other", "times"),
    [
        (job(size=128), 4),
        (job(frames=3), 3),
        (job(outputs=2), 2),
        (job(branches=2), 2),
        (job(steps=8), 2),
        (job(size=32), 0.25),
    ],
)
def test_from_one_shape_all_others_follow_in_proportion(other: Job, times: float) -> None:
    cost = taught((job(steps=4), 1.0))
    assert cost.seconds_left(other) == pytest.approx(4 * times)


def test_what_lies_between_measured_shapes_is_on_a_line_through_them() -> None:
    cost = taught((job(size=64, steps=1), 2.0), (job(size=128, steps=1), 5.0))
    assert cost.seconds_left(job(size=64, steps=1, outputs=4)) == 8.0, "same pixels, in proportion to rows"
    assert cost.seconds_left(job(size=96, steps=1)) == pytest.approx(2 + 3 * (96**2 - 64**2) / (128**2 - 64**2))
    assert cost.seconds_left(job(size=256, steps=1)) == pytest.approx(2 + 3 * 15 / 3), "and beyond them"
    assert cost.seconds_left(job(size=32, steps=1)) == pytest.approx(2 - 0.75), "with what a unit takes at least"
    cost = taught((job(size=64, steps=1), 1.0), (job(size=128, steps=1), 9.0))
    assert cost.seconds_left(job(size=32, steps=1)) == 0.25, "never below proportion"


def test_the_first_measurement_counts_only_until_the_second_and_later_ones_a_part() -> None:
    cost = CostModel(STAGES)
    for seconds, left in ((10.0, 10.0), (1.0, 1.0), (2.0, 1.3)):
        cost.learn_unit("denoise", [job(steps=1)], seconds)
        assert cost.seconds_left(job(steps=1)) == pytest.approx(left)


def test_only_steps_are_asked_whether_sharing_them_pays() -> None:
    cost, pair = taught((job(), 1.0)), [job("a"), job("b")]
    for _ in range(10):
        cost.learn_unit("denoise", pair, 2.0)
        cost.learn_unit("denoise", pair[:1], 1.0)
    assert cost.share("denoise", pair) == 1
    assert cost.share("denoise", [job("a", size=128), job("b", size=128)]) == 2, "another shape is another question"
    assert cost.share("encode", pair) == cost.share("odd", pair) == 2


def test_a_request_of_several_rows_is_as_a_batch_of_them() -> None:
    cost = taught((job(), 1.0))
    for _ in range(2):
        cost.learn_unit("denoise", [job("a"), job("b")], 1.5)
    assert cost.seconds_left(job(steps=1, outputs=2)) == 1.5
    assert cost.seconds_left(job(steps=1, branches=2)) == 1.5


def test_ends_follow_the_order_and_what_sharing_saves() -> None:
    cost = taught((job(), 1.0))
    assert cost.ends([job("a", steps=2), job("b", steps=3)]) == {"a": 2.0, "b": 5.0}
    for _ in range(50):
        cost.learn_unit("denoise", [job("a"), job("b")], 1.0)
    ends = cost.ends([job("a", steps=2), job("b", steps=2), job("c", steps=2)])
    assert ends == pytest.approx({"a": 2.0, "b": 2.0, "c": 3.0})


def test_a_stage_that_nobody_told_of_counts_nothing() -> None:
    cost = taught((job(), 1.0))
    cost.learn_unit("odd", [job()], 9.0)
    cost.learn_stage("odd", job(), 1, 9.0)
    placed = job()
    placed.position = Position(9, "odd", 0, 1, None)
    assert cost.seconds_left(placed) == 0


def test_only_the_latest_sizes_are_remembered() -> None:
    cost = taught((job(), 9.0))
    for size in range(65, 65 + PIXELS_KNOWN):
        cost.learn_unit("denoise", [job(size=size)], 1.0)
    assert cost.seconds_left(job(steps=1)) < 2
