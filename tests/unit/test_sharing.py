"""Whether requests share a step: where it saves time, whatever else the machine does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from diffgen.scheduler.sharing import PIXELS_KNOWN, Sharing

# Seconds of 8 steps and all else of each of so many requests that came together, from docs/performance.md.
MEASURED = {
    64: {1: 0.120, 2: 0.075, 4: 0.065, 8: 0.051},
    128: {1: 0.220, 2: 0.180, 4: 0.160, 8: 0.148},
    256: {1: 0.640, 2: 0.655, 4: 0.665, 8: 0.680},
}
ROWS = 2  # of each request: it is guided
Noise = Callable[[random.Random], Iterator[float]]


def unit_seconds(pixels: int, requests: int) -> float:
    """On lines through what was measured."""
    points = {count: count * each for count, each in MEASURED[pixels].items()}
    below = max(count for count in points if count <= requests)
    above = min(count for count in points if count >= requests)
    part = 0.0 if above == below else (requests - below) / (above - below)
    return points[below] + part * (points[above] - points[below])


def quiet(draw: random.Random) -> Iterator[float]:
    while True:
        yield draw.uniform(0.98, 1.02)


def busy(draw: random.Random) -> Iterator[float]:
    """Each unit is disturbed, and at times all of them for long: as where other programs have most of the cores."""
    while True:
        pace = draw.choice([1.0, 2.0, 4.0])
        for _ in range(draw.randint(20, 200)):
            yield pace * draw.lognormvariate(0, 0.3)


def serve(sharing: Sharing, pixels: int, counts: Iterator[int], noise: Iterator[float], units: int) -> list[float]:
    """Of each unit, the part of those waiting that shared it: 0 where one of several ran alone."""
    shared = []
    for _ in range(units):
        waiting = next(counts)
        took_part = sharing.share(pixels, [ROWS] * waiting)
        assert 1 <= took_part <= waiting
        sharing.learn(pixels, [ROWS] * took_part, unit_seconds(pixels, took_part) * next(noise))
        shared.append((took_part - 1) / (waiting - 1))
    return shared


def model(pixels: int) -> Sharing:
    return Sharing(lambda size, rows: unit_seconds(size, max(1, rows // ROWS)))


def always(count: int) -> Iterator[int]:
    while True:
        yield count


def between(draw: random.Random, least: int, most: int) -> Iterator[int]:
    while True:
        yield draw.randint(least, most)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("kind", [quiet, busy])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_small_pictures_share_and_large_ones_do_not(
    kind: Callable[[random.Random], Iterator[float]], count: int
) -> None:
    """However the machine is: of 20 runs the mean, after as many units as a few requests have."""
    after: dict[int, float] = {}
    for pixels in MEASURED:
        runs = [serve(model(pixels), pixels, always(count), kind(random.Random(seed)), 600) for seed in range(20)]
        after[pixels] = mean([mean(run[60:]) for run in runs])
    assert after[64] > 0.95
    assert after[128] > (0.95 if kind is quiet else 0.8)
    assert after[256] < (0.05 if kind is quiet else 0.3)


def test_groups_of_changing_size() -> None:
    draw = random.Random(0)
    shared = {pixels: serve(model(pixels), pixels, between(draw, 2, 8), quiet(draw), 1000) for pixels in MEASURED}
    assert mean(shared[64]) > 0.85
    assert mean(shared[128]) > 0.85
    assert mean(shared[256][300:]) < 0.1


def test_the_first_units_share_and_soon_take_turns_with_single_ones() -> None:
    sharing = model(64)
    assert sharing.share(64, [ROWS] * 8) == 8, "nothing is known"
    sharing.learn(64, [ROWS] * 8, 1.0)
    turns = [round(7 * part) + 1 for part in serve(sharing, 64, always(8), quiet(random.Random(0)), 40)]
    assert turns[:12] == [1, 8] * 6
    assert turns[12:] == [8] * 28


def test_trials_go_on_now_and_then_and_follow_a_machine_that_changes() -> None:
    sharing, noise = model(64), quiet(random.Random(0))
    turns = serve(sharing, 64, always(8), noise, 1000)[100:]
    assert 10 <= turns.count(0) <= 15, "one alone in 64"
    took: list[int] = []
    for _ in range(2000):  # from here on sharing saves nothing
        took.append(sharing.share(64, [ROWS] * 8))
        sharing.learn(64, [ROWS] * took[-1], 0.1 * took[-1] * next(noise))
    assert took[-500:].count(1) > 450
    assert took[-500:].count(8) >= 5, "it is still tried"
    turns = serve(sharing, 64, always(8), noise, 2000)
    assert mean(turns[-300:]) > 0.9


def test_half_a_group_shares_where_the_whole_is_too_large() -> None:
    """As where the batch no longer fits into a cache."""
    sharing, noise, took = Sharing(lambda pixels, rows: 0.1 * rows), quiet(random.Random(0)), []
    for _ in range(300):
        took.append(sharing.share(64, [1] * 8))
        each = {8: 0.12, 4: 0.07, 1: 0.1}[took[-1]]
        sharing.learn(64, [1] * took[-1], took[-1] * each * next(noise))
    assert took[-200:].count(4) > 180


def test_members_of_different_rows_are_weighed_by_what_they_take() -> None:
    """One with six rows and one with two: 0.3 and 0.1 s apart."""
    for together, expected in ((0.3, 2), (0.39, 1)):
        sharing = Sharing(lambda pixels, rows: 0.05 * rows)
        for _ in range(20):
            sharing.learn(64, [2], 0.1)
            sharing.learn(64, [6, 2], together)
        assert sharing.share(64, [6, 2]) == expected


def test_what_ran_long_before_is_not_compared() -> None:
    sharing = model(64)
    sharing.learn(64, [ROWS], 0.001)
    for _ in range(20):
        sharing.learn(64, [ROWS] * 2, 1.0)
    assert sharing.share(64, [ROWS] * 2) == 1, "at most one trial has been made, so one runs alone for the next"
    sharing.learn(64, [ROWS], 1.0)
    assert sharing.share(64, [ROWS] * 2) == 2


def test_only_the_latest_sizes_are_remembered() -> None:
    sharing = model(64)
    for pixels in (64, 128):
        serve(sharing, pixels, always(8), quiet(random.Random(0)), 1)
        assert sharing.share(pixels, [ROWS] * 8) == 1, "one alone is next"
    for pixels in range(1000, 1000 + PIXELS_KNOWN - 1):
        sharing.learn(pixels, [ROWS], 1.0)
        sharing.learn(64, [ROWS] * 8, 1.0)
    assert sharing.share(64, [ROWS] * 8) == 1
    assert sharing.share(128, [ROWS] * 8) == 8, "nothing is known any more"
