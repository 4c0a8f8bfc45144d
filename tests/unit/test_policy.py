"""Which requests the next tick serves."""

from __future__ import annotations

from diffgen.params import Resolved, SamplingParams
from diffgen.scheduler.job import Job
from diffgen.scheduler.plan import MAX_UNIT_REQS, Position
from diffgen.scheduler.policy import PATIENCE_S, choose


def job(
    name: str,
    *,
    outputs: int = 1,
    key: object = "k",
    stage: int = 1,
    arrived: float = 0,
    served: float = 0,
    steps: int = 8,
    done: int = 0,
    frames: int = 1,
    alone: bool = False,
) -> Job:
    params = SamplingParams(
        prompt="a", num_outputs_per_prompt=outputs, num_inference_steps=steps, width=64, height=64, num_frames=frames
    )
    position = Position(stage, "denoise", 0, 4, key)
    resolved = Resolved(params, ())
    return Job(name, b"c", resolved, arrived, position=position, served=served, done=done, alone=alone)


def ids(jobs: list[Job], cap: int = 4, now: float = 0) -> list[str]:
    return [chosen.id for chosen in choose(jobs, cap, now)]


def test_nothing_waits() -> None:
    assert choose([], 4, 0) == []


def test_equal_keys_share_a_unit_and_others_wait() -> None:
    assert ids([job("a"), job("b", key="other"), job("c")]) == ["a", "c"]
    assert ids([job("a"), job("b", stage=2)]) == ["a"]


def test_none_shares_with_nobody() -> None:
    assert ids([job("a", key=None), job("b", key=None)]) == ["a"]


def test_the_least_work_left_leads_and_equals_by_arrival() -> None:
    assert ids([job("clip", frames=9), job("picture", key="other")])[0] == "picture"
    assert ids([job("many", steps=50), job("few", steps=8, key="other")])[0] == "few"
    assert ids([job("new"), job("half done", key="other", done=4)])[0] == "half done"
    assert ids([job("late", arrived=2), job("early", key="other", arrived=1)])[0] == "early"


def test_a_long_one_gets_a_unit_in_time() -> None:
    """A stream of new pictures passes a clip of 32 times their work for five times the patience, and no longer."""
    clip = job("clip", frames=32)
    for waited in (0, 1, 4.9 * PATIENCE_S):
        assert ids([clip, job("picture", key="other", served=waited)], now=waited)[0] == "picture"
    assert ids([clip, job("picture", key="other", served=5.1 * PATIENCE_S)], now=5.1 * PATIENCE_S)[0] == "clip"


def test_a_batch_is_capped_by_outputs_not_by_requests() -> None:
    assert ids([job("a"), job("b", outputs=2), job("c", outputs=2)], cap=4) == ["a", "b"]
    assert ids([job("a"), job("b", outputs=2, steps=9), job("c", outputs=3)], cap=4) == ["a", "b"]


def test_a_request_larger_than_the_cap_runs_by_itself() -> None:
    assert ids([job("a", outputs=9, steps=1), job("b", steps=10)], cap=4) == ["a"]


def test_one_that_failed_with_others_runs_alone() -> None:
    assert ids([job("a", alone=True), job("b")]) == ["a"]
    assert ids([job("a"), job("b", alone=True), job("c")]) == ["a", "c"]


def test_one_that_is_not_placed_yet_runs_alone() -> None:
    new = job("a")
    new.position = None
    assert ids([new, job("b")]) == ["a"]


def test_what_only_has_to_be_prepared_goes_first_to_share_the_next_steps() -> None:
    clip = job("clip", frames=9)
    clip.position = Position(0, "encode", 0, 1, None, prepares=True)
    assert ids([job("picture"), clip]) == ["clip"]


def test_a_unit_has_a_slot_in_the_vote_for_each() -> None:
    assert len(ids([job(str(number)) for number in range(100)], cap=1000)) == MAX_UNIT_REQS
