"""Which encoded texts are kept, used again and given up."""

from __future__ import annotations

from typing import Any

import pytest

from diffgen.params import SamplingParams
from diffgen.scheduler.texts import TextCache

MIB = 2**20


def ask(cache: TextCache, size: int = MIB, **values: Any) -> bool:
    """Whether it is a hit; a miss is kept in ``size`` bytes."""
    slot = cache.look_up(SamplingParams(**{"prompt": "a", **values}))
    assert slot is not None
    cache.kept(0 if slot.hit else size)
    return slot.hit


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"num_outputs_per_prompt": 3},
        {"num_inference_steps": 9},
        {"priority": "batch"},
        {"preview_every": 1},
    ],
)
def test_what_does_not_reach_the_encoder_is_no_matter(change: dict[str, Any]) -> None:
    cache = TextCache(MIB)
    assert not ask(cache, seed=1)
    assert ask(cache, **change)
    assert (cache.hits, cache.misses, cache.bytes) == (1, 1, MIB)


@pytest.mark.parametrize(
    "change",
    [{"prompt": "b"}, {"negative_prompt": ""}, {"guidance_scale": 1.0}, {"max_sequence_length": 5}, {"clip_skip": 1}],
)
def test_all_else_is(change: dict[str, Any]) -> None:
    cache = TextCache(4 * MIB)
    ask(cache)
    assert not ask(cache, **change)


def test_what_has_not_been_used_for_longest_goes_first() -> None:
    cache = TextCache(3 * MIB)
    for prompt in "abc":
        ask(cache, prompt=prompt)
    assert ask(cache, prompt="a")
    assert cache.evicted() == ()
    ask(cache, prompt="d")
    assert cache.evicted() == (2,), "the slot of b"
    assert cache.evicted() == (), "told once"
    assert cache.bytes == 3 * MIB
    assert not ask(cache, 4 * MIB, prompt="too large")
    assert set(cache.evicted()) == {1, 3, 4, 5}
    assert cache.bytes == 0


def test_what_could_not_be_encoded_is_not_kept() -> None:
    cache = TextCache(MIB)
    assert not ask(cache, size=0)
    assert not ask(cache)
    assert ask(cache)


def test_off() -> None:
    assert TextCache(0).look_up(SamplingParams(prompt="a")) is None
