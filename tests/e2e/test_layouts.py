"""Servers of four ranks in mixed layouts; tests/e2e/test_replicas.py has one of two replicas with sliced weights."""

from __future__ import annotations

from pathlib import Path

import mixed
import pytest

from diffgen import DiffGenerator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

#: One in every run of the tests; the others have the same body.
FURTHER = pytest.mark.exhaustive
LAYOUTS = [
    {"ulysses_degree": 2, "cfg_degree": 2},
    pytest.param({"ulysses_degree": 2, "ring_degree": 2}, marks=FURTHER),
    pytest.param({"tp_size": 2, "cfg_degree": 2}, marks=FURTHER),
    pytest.param({"dp_size": 2, "cfg_degree": 2}, marks=FURTHER),
    pytest.param({"dp_size": 2, "ulysses_degree": 2}, marks=FURTHER),
    pytest.param({"dp_size": 2, "ring_degree": 2}, marks=FURTHER),
]


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_a_mixed_layout_serves_as_one_rank_does(
    tiny_wan: Path,
    tiny_generator: DiffGenerator,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    degrees: dict[str, int],
) -> None:
    replicas = degrees.get("dp_size", 1)
    last = 4 // replicas - 1
    monkeypatch.setenv("DIFFGEN_FAULT", mixed.faults(rank=last))
    alone = mixed.draw(tiny_generator)
    with DiffGenerator.from_pretrained(
        str(tiny_wan), device="cpu", num_gpus=4, log_level="error", **degrees
    ) as generator:
        assert len(generator.ranks()) == 4
        mixed.check_batches(generator, alone)
        mixed.check_cancels(generator)
        mixed.check_failures(generator, last, alone)
        mixed.check_agreement(generator, replicas)
        mixed.check_death(generator, alone)
