"""Which requests the next tick serves."""

from __future__ import annotations

from diffgen.params import Resolved, SamplingParams
from diffgen.scheduler.job import Job
from diffgen.scheduler.plan import MAX_UNIT_REQS, Position
from diffgen.scheduler.policy import choose


def job(
    name: str,
    *,
    outputs: int = 1,
    key: object = "k",
    stage: int = 1,
    last: int = 0,
    arrived: float = 0,
    alone: bool = False,
) -> Job:
    params = SamplingParams(prompt="a", num_outputs_per_prompt=outputs)
    position = Position(stage, "denoise", 0, 4, key)
    return Job(name, b"c", Resolved(params, ()), arrived, position=position, last_tick=last, alone=alone)


def ids(jobs: list[Job], cap: int = 4) -> list[str]:
    return [chosen.id for chosen in choose(jobs, cap)]


def test_nothing_waits() -> None:
    assert choose([], 4) == []


def test_equal_keys_share_a_unit_and_others_wait() -> None:
    assert ids([job("a"), job("b", key="other"), job("c")]) == ["a", "c"]
    assert ids([job("a"), job("b", stage=2)]) == ["a"]


def test_none_shares_with_nobody() -> None:
    assert ids([job("a", key=None), job("b", key=None)]) == ["a"]


def test_who_has_waited_longest_leads() -> None:
    assert ids([job("a", last=3), job("b", key="other", last=2)])[0] == "b"
    assert ids([job("late", arrived=2), job("early", key="other", arrived=1)])[0] == "early"


def test_a_batch_is_capped_by_outputs_not_by_requests() -> None:
    assert ids([job("a", outputs=2), job("b", outputs=2), job("c")], cap=4) == ["a", "b"]
    assert ids([job("a", outputs=3), job("b", outputs=2), job("c")], cap=4) == ["a", "c"]


def test_a_request_larger_than_the_cap_runs_by_itself() -> None:
    assert ids([job("a", outputs=9), job("b")], cap=4) == ["a"]


def test_one_that_failed_with_others_runs_alone() -> None:
    assert ids([job("a", alone=True), job("b")]) == ["a"]
    assert ids([job("a"), job("b", alone=True), job("c")]) == ["a", "c"]


def test_one_that_is_not_placed_yet_runs_alone() -> None:
    new = job("a")
    new.position = None
    assert ids([new, job("b", last=1)]) == ["a"]


def test_a_unit_has_a_slot_in_the_vote_for_each() -> None:
    assert len(ids([job(str(number)) for number in range(100)], cap=1000)) == MAX_UNIT_REQS
