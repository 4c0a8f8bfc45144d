"""One unit of work on one rank."""

from __future__ import annotations

import mmap
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffgen.errors import GenerationError, NanOutput, OutOfMemory
from diffgen.params import SamplingParams
from diffgen.request import Req, Update
from diffgen.worker.context import Row, StageContext, StageError
from diffgen.worker.executor import ParallelExecutor


class Runs:
    """A stage that does what it is given."""

    prepares = False
    stepped = False
    name = "stage"

    def __init__(self, run: Any) -> None:
        self._run = run

    def units(self, req: Req) -> int:
        return 1

    def batch_key(self, req: Req) -> Hashable:
        return None

    def run(self, reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
        return self._run(reqs, ctx)  # type: ignore[no-any-return]


REQS = [Req(name, SamplingParams(prompt=name)) for name in "ab"]


def run(function: Any) -> list[Update | StageError]:
    return ParallelExecutor(torch.device("cpu")).run(Runs(function), REQS)


def raising(error: Exception) -> Any:
    def function(reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (torch.OutOfMemoryError("tried 3 GiB"), OutOfMemory, "smaller size"),
        (ValueError("a text"), GenerationError, "stage failed: ValueError: a text"),
        (AssertionError(), GenerationError, "stage failed: AssertionError"),
        (NanOutput("not finite"), NanOutput, "not finite"),
    ],
)
def test_what_a_stage_raises_is_every_members_error(error: Exception, kind: type[Exception], words: str) -> None:
    items = run(raising(error))
    assert len(items) == 2
    for item in items:
        assert isinstance(item, StageError)
        assert type(item.error) is kind
        assert words in item.error.message


@pytest.mark.parametrize(
    "allocate", [lambda: torch.empty(2**50), lambda: bytearray(2**60), lambda: mmap.mmap(-1, 2**60)]
)
def test_lack_of_memory_on_a_cpu_is_told_as_such(allocate: Any) -> None:
    for item in run(lambda reqs, ctx: allocate()):
        assert isinstance(item, StageError)
        assert type(item.error) is OutOfMemory


def test_an_interrupt_is_not_an_answer() -> None:
    with pytest.raises(KeyboardInterrupt):
        run(raising(KeyboardInterrupt()))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["latents", "branches"])
def test_values_that_are_no_number_are_the_error_of_their_request_alone(bad: float, where: str) -> None:
    def function(reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
        tensors = [torch.zeros(2), torch.tensor([0, bad])]
        return [Update(latents=t) if where == "latents" else Update(branches=({"text": t},)) for t in tensors]

    first, second = run(function)
    assert isinstance(first, Update)
    assert isinstance(second, StageError)
    assert second.error.code == "nan_output"
    assert second.error.message.startswith("stage: ")


def test_no_gradients_are_kept() -> None:
    def function(reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
        assert torch.is_inference_mode_enabled()
        return [Update(latents=torch.ones(1)) for _ in reqs]

    assert all(isinstance(item, Update) for item in run(function))


@given(st.lists(st.sampled_from(["x", "y", None, ("x", 1)]), max_size=8))
def test_rows_of_one_key_are_one_forward_and_come_back_in_order(keys: list[Hashable]) -> None:
    executor = ParallelExecutor(torch.device("cpu"))
    rows = [Row(torch.tensor([float(i)]), torch.tensor(0), {}, key) for i, key in enumerate(keys)]
    forwards: list[set[Hashable]] = []

    def predict(given_rows: Sequence[Row]) -> list[torch.Tensor]:
        forwards.append({row.key for row in given_rows})
        return [row.latents * 2 for row in given_rows]

    assert [float(p) for p in executor.map_rows(predict, rows)] == [2.0 * i for i in range(len(keys))]
    assert all(len(seen) == 1 for seen in forwards)
    assert len(forwards) == len(set(keys))


def test_a_stage_that_returns_too_few_updates_fails_its_requests() -> None:
    items = run(lambda reqs, ctx: [Update(latents=torch.ones(1))])
    assert len(items) == 2
    assert all(isinstance(item, StageError) for item in items)
