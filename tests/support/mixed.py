"""What a server of any layout must do, beside one rank that has drawn the same requests."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest
from oracle import level_difference
from processes import wait_until

from diffgen import DiffGenerator
from diffgen.errors import GenerationError, NanOutput, RanksDiverged, RequestCancelled
from diffgen.handle import GenerationHandle
from diffgen.wire.messages import Accepted, Progress, Restarting

FAST: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 3}
LONG: dict[str, Any] = {**FAST, "num_inference_steps": 900, "seed": 1}
#: Requests that meet in forwards: guided and not, several outputs, a clip, texts of other lengths.
CASES: tuple[dict[str, Any], ...] = (
    {"prompt": "a red circle on a blue background", "seed": 1, **FAST},
    {"prompt": "a dog", "seed": 2, **FAST, "guidance_scale": 1.0, "num_outputs_per_prompt": 3},
    {"prompt": "a", "seed": 3, **FAST, "num_inference_steps": 5},
    {"prompt": "a cat on a sofa", "seed": 4, **FAST, "num_frames": 5, "negative_prompt": "a blurry dark photo"},
)
_FAULTS = {"raise": "forward", "nan": "denoise", "differ": "denoise"}


def faults(rank: int) -> str:
    """Of that rank of each replica, for :func:`check_failures`."""
    return ";".join(f"{kind}@{stage}:1:{rank}:*:{kind} " for kind, stage in _FAULTS.items())


def draw(generator: DiffGenerator) -> list[Any]:
    """The pixels of ``CASES``, one by one."""
    return [generator.generate(**case).pixels for case in CASES]


def check_same(handles: Sequence[GenerationHandle], alone: Sequence[Any]) -> None:
    for handle, expected in zip(handles, alone, strict=True):
        assert level_difference(handle.result(100).pixels, expected) <= 1


def check_batches(generator: DiffGenerator, alone: Sequence[Any]) -> None:
    check_same([generator.submit(**case) for case in CASES], alone)


def running(generator: DiffGenerator, **case: Any) -> GenerationHandle:
    """A request that is being denoised."""
    handle = generator.submit(**{"prompt": "a", **LONG, **case})
    next(event for event in handle.events() if isinstance(event, Progress) and event.stage == "denoise")
    return handle


def check_cancels(generator: DiffGenerator) -> None:
    """One that runs, and one that has not begun; nothing is left of them."""
    for handle in [running(generator), generator.submit("a", **LONG)]:
        handle.cancel()
        with pytest.raises(RequestCancelled):
            handle.result(10)
    wait_until(lambda: not generator.status().requests, 10, "they are gone")


def check_failures(generator: DiffGenerator, rank: int, alone: Sequence[Any]) -> None:
    """Each of :func:`faults` ends its request with its reason, and what runs beside it makes its pixels.

    Peers that wait for the failing rank in the same forward hear of it, so nothing is started again.
    """
    before = generator.status().restarts
    for prompt, error, words in (
        ("nan ", NanOutput, r"rank \d: denoise: .* latents"),
        ("differ ", RanksDiverged, rf"ranks \[{rank}\]"),
        ("raise ", GenerationError, rf"rank {rank}: .*RuntimeError: fault on purpose"),
    ):
        bad = generator.submit(prompt, seed=1, **FAST)
        company = [generator.submit(**case) for case in CASES[:2]]
        with pytest.raises(error, match=words):
            bad.result(100)
        check_same(company, alone[:2])
    assert generator.status().restarts == before


def check_agreement(generator: DiffGenerator, replicas: int = 1) -> None:
    """The ranks of each replica have run the same units to the same values."""
    time.sleep(1.2)  # a heartbeat later
    wait_until(lambda: _agree(generator, replicas), 10, "all have said the same")


def _agree(generator: DiffGenerator, replicas: int) -> bool:
    beats = [rank.heartbeat for rank in generator.ranks()]
    said = [None if beat is None else (beat.tick, beat.fingerprint, str(beat.units)) for beat in beats]
    size = len(said) // replicas
    return None not in said and all(len({*said[first : first + size]}) == 1 for first in range(0, len(said), size))


def check_death(generator: DiffGenerator, alone: Sequence[Any]) -> None:
    """The last rank dies while it denoises: what ran there is told, and all requests make the same pixels."""
    restarts = generator.status().restarts
    # So many steps that the first still runs when the second does.
    handles = [running(generator, num_inference_steps=500) for _ in range(2)]
    os.kill(generator.ranks()[-1].pid, signal.SIGKILL)
    check_batches(generator, alone)
    first, second = (handle.result(100).pixels for handle in handles)
    assert level_difference(first, second) <= 1
    wait_until(lambda: generator.status().restarts == restarts + 1, 60, "the replica is up again")
    found = [[type(event) for event in handle.events()] for handle in handles]
    told = [tuple(kind for kind in kinds if kind in (Accepted, Restarting)) for kinds in found]
    # With several replicas one of the two may have run where nothing died.
    assert set(told) - {(Accepted,)} == {(Accepted, Restarting, Accepted)}
